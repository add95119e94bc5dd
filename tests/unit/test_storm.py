"""The log tells of an eviction storm, once, with the setting that helps."""

from __future__ import annotations

import logging
import re

import pytest

from shoal.runners.fake import FakeRunner
from shoal.types import Request, SamplingParams
from tests.support.engines import toy_loop

SHORT = SamplingParams(max_tokens=1, ignore_eos=True)


def visit(prompts: int, rounds: int, caplog: pytest.LogCaptureFixture, **settings: object) -> list[str]:
    """One prompt after another, again and again, through a pool that holds about two of them."""
    loop = toy_loop(FakeRunner(num_blocks=24, block_size=16), **settings)
    now = 0.0
    loop.clock = lambda: now
    with caplog.at_level(logging.WARNING, "shoal.engine"):
        for turn in range(rounds * prompts):
            request = Request(prompt=f"{turn % prompts:03d}" * 50, sampling=SHORT)
            loop.add(f"r{turn}", loop.inputs.prepare(request), lambda _: None)
            while not loop.idle:
                loop.step()
            now += 0.1
    return [record.getMessage() for record in caplog.records]


def test_prompts_that_drive_each_other_out_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = visit(4, 40, caplog)
    assert line.startswith("eviction storm: of ")
    assert "raise kv_memory (now " in line
    computed, _, again = (int(part) for part in re.findall(r"\d+", line)[:3])
    assert 0 < again <= computed


def test_the_setting_named_is_the_one_that_binds(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = visit(2, 80, caplog, prefix_memory=1)
    assert "raise prefix_memory (now " in line


def test_a_long_storm_is_told_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    assert len(visit(4, 200, caplog)) == 2, "800 requests in 80 seconds"


@pytest.mark.parametrize(("prompts", "rounds"), [(2, 100), (400, 1), (4, 20)])
def test_what_fits_never_comes_again_or_is_soon_over_is_no_storm(
    prompts: int, rounds: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert visit(prompts, rounds, caplog) == []
