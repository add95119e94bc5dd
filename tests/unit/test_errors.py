"""Typed errors survive what carries results between threads, processes and machines."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

import shoal.errors as tree
from shoal.errors import CycleError, GraphFileError, InvalidRequestError, QueueFullError, ShoalError
from shoal.types import FinishReason, Result

_GIVEN: dict[str, Any] = {
    "message": "no", "value": 3, "limit": 2, "hint": "less", "param": "top_k", "retry_after_s": 1.5, "result": {"a": 1},
    "path": ("a", "b", "a"), "file": "graph.yaml", "line": 7,
}  # fmt: skip
_ALL = [kind for _, kind in inspect.getmembers(tree, inspect.isclass) if issubclass(kind, ShoalError)]


def made(kind: type[ShoalError]) -> ShoalError:
    wanted = inspect.signature(kind.__init__).parameters
    return kind(**{name: value for name, value in _GIVEN.items() if name in wanted})


@pytest.mark.parametrize("kind", _ALL)
@pytest.mark.parametrize("how", [lambda e: pickle.loads(pickle.dumps(e)), copy.deepcopy, copy.copy])
def test_every_error_comes_back_whole(kind: type[ShoalError], how: Any) -> None:
    error = made(kind)
    again = how(error)
    assert type(again) is kind
    assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))


def test_errors_that_say_more_keep_it() -> None:
    cycle = pickle.loads(pickle.dumps(CycleError(("a", "b", "a"))))
    assert cycle.path == ("a", "b", "a")
    assert "a -> b -> a" in str(cycle)
    assert pickle.loads(pickle.dumps(GraphFileError("bad", file="x.yaml", line=3))).line == 3


def test_a_result_with_an_error_can_be_taken_apart() -> None:
    error = InvalidRequestError("top_k is -1", param="top_k", value=-1, limit="0 or more")
    result = Result("r", (), "", FinishReason.ERROR, 0, None, 0.0, 0, error=error)
    told = dataclasses.asdict(result)["error"]
    assert (type(told), told.param, told.value) == (InvalidRequestError, "top_k", -1)


def refuse() -> None:
    raise QueueFullError("5 requests wait already", value=5, limit=4, retry_after_s=2.5)


def test_a_process_pool_raises_what_its_worker_raised() -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        with pytest.raises(QueueFullError, match="5 requests wait already") as caught:
            pool.submit(refuse).result(60)
        assert (caught.value.retry_after_s, caught.value.limit) == (2.5, 4)
