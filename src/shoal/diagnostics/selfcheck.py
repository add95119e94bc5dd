"""Whether a batch gives what a lone run gives, on the model and the machine that are here."""

from __future__ import annotations

from shoal.engine.engine import Engine
from shoal.types import Namespace, Request, SamplingParams

_TOKENS = 24
_SAME = "List three reasons why people live by the sea."
_MATES = (
    "Hello!",
    "What is the capital of France?",
    "Write one sentence about rain.",
    "Count from one to twenty in words, and say which of these numbers is your favourite one.",
    "Name a fruit.",
    "Explain in simple words how a bicycle stays upright while somebody rides it. " * 8,
    "List three reasons why people live in the mountains.",
)


def self_check(engine: Engine) -> dict[str, str]:
    """Whether one prompt gives the same tokens alone, beside seven others, and from a cached prefix beside them.

    Greedy and sampled. The namespaces keep the first two from sharing a prefix, so that both compute all of it.
    """
    differing = []
    for name, sampling in (
        ("greedy", SamplingParams(max_tokens=_TOKENS, ignore_eos=True)),
        ("sampled", SamplingParams(max_tokens=_TOKENS, ignore_eos=True, temperature=1.0, seed=7)),
    ):
        alone = _answer(engine, sampling, f"{name} alone", ())
        batch = _answer(engine, sampling, f"{name} batch", _MATES)
        cached = _answer(engine, sampling, f"{name} alone", _MATES)
        differing += [f"{name} {how}" for how, tokens in (("in a batch", batch), ("cached", cached)) if tokens != alone]
    if differing:
        detail = f"tokens differ from those of a lone run: {', '.join(differing)}"
        if engine.spec.exact:
            return {"status": "FAILED", "detail": detail}
        return {
            "status": "inexact",
            "detail": f"{detail}; this backend rounds otherwise in a batch, so near-ties may fall",
        }
    return {
        "status": "ok",
        "detail": f"{_TOKENS} tokens, greedy and sampled, are equal alone, in a batch of 8, and from a cached prefix",
    }


def _answer(engine: Engine, sampling: SamplingParams, task: str, mates: tuple[str, ...]) -> tuple[int, ...]:
    requests = [
        Request(messages=[{"role": "user", "content": text}], sampling=sampling, namespace=Namespace(task=task))
        for text in (*mates, _SAME)
    ]
    results = engine.run(requests).results
    for result in results:
        if result.error is not None:
            raise result.error
    return results[-1].tokens
