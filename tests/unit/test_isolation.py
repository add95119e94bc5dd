"""The check of `shoal doctor` that answers never mix, where its requests are quicker than it is."""

from __future__ import annotations

from shoal.diagnostics.isolation import _fork
from shoal.types import Request, SamplingParams
from tests.support.engines import toy_engine


def test_a_request_that_ended_before_it_could_be_branched_has_no_branch() -> None:
    with toy_engine() as engine:
        request = Request(prompt_tokens=(5, 6, 7), sampling=SamplingParams(max_tokens=3, ignore_eos=True))
        handle, other = engine.submit(request), engine.submit(request)
        assert other.result().error is None
        while handle.state != "finished":
            pass
        assert _fork(handle) == []
        assert len(handle.result().tokens) == 3
