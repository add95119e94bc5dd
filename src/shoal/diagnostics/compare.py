"""Two models on the same prompts: how often they agree, how far apart they are, what they can still do, how fast.

The first model answers each prompt greedily. The second is shown those answers token by token (its prefix tree makes
each of the many prompts cost one new token), so that both speak about the same positions; then it answers on its own.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.engine.engine import Engine
from shoal.errors import InvalidRequestError
from shoal.types import Request, Result, SamplingParams, TokenLogprob

_TOP = 20  # alternatives that are compared at each position
_AT_ONCE = 256  # requests in the queue together
_FENCE = re.compile(r"^```(?:json)?\s*\n(.*?)\n?```$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Answers:
    """One model's own answers. `tokens_per_s` is of all streams together while they decode; bytes of the weights."""

    precision: str
    weight_bytes: int
    texts: tuple[str, ...]
    tokens: int
    tokens_per_s: float
    prompts: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[TokenLogprob, ...], ...]

    @property
    def json_share(self) -> float:
        """Share of answers that are one JSON object or list, a code fence around it allowed."""
        return sum(map(is_json, self.texts)) / len(self.texts)


@dataclass(frozen=True, slots=True)
class Agreement:
    """The second model against the first.

    agreement: share of positions where its most likely token is the one the first chose. divergence: mean
    Kullback-Leibler divergence per token in nats, of the first from the second, over the tokens that are among the
    most likely of both and one more that stands for all others; the true one is at least that. same_texts: share of
    prompts that both answer alike, word for word.
    """

    first: Answers
    second: Answers
    positions: int
    agreement: float
    divergence: float
    same_texts: float


def compare(
    load: Callable[[str], Engine], first: str, second: str, prompts: Sequence[str], max_tokens: int = 48
) -> Agreement:
    """Compare two models, one loaded at a time. Raises what loading does, and `InvalidRequestError` for models whose
    tokens are not the same, or without prompts."""
    if not prompts:
        raise InvalidRequestError("there are no prompts", param="prompts", hint="give a file with one on each line")
    with load(first) as engine:
        theirs = answer(engine, prompts, max_tokens)
    with load(second) as engine:
        own = answer(engine, prompts, max_tokens)
        if own.prompts != theirs.prompts:
            raise InvalidRequestError(
                f"{first} and {second} do not have the same tokens",
                param="second",
                value=second,
                hint="compare precisions of one model, or models of one family",
            )
        forced = _forced(engine, theirs)
    pairs = [
        pair for output, seen in zip(theirs.outputs, forced, strict=True) for pair in zip(output, seen, strict=True)
    ]
    count = max(len(pairs), 1)
    return Agreement(
        theirs,
        own,
        len(pairs),
        sum(chosen.token == seen.top[0][0] for chosen, seen in pairs) / count,
        sum(divergence(chosen, seen) for chosen, seen in pairs) / count,
        sum(a == b for a, b in zip(theirs.texts, own.texts, strict=True)) / len(prompts),
    )


def answer(engine: Engine, prompts: Sequence[str], max_tokens: int) -> Answers:
    """A model's own greedy answers to some prompts, each as a chat of one message."""
    sampling = SamplingParams(max_tokens=max_tokens, logprobs=_TOP)
    requests = [Request(messages=[{"role": "user", "content": prompt}], sampling=sampling) for prompt in prompts]
    tokens = tuple(tuple(engine.tokenize(request)) for request in requests)
    report = engine.run(requests)
    results = _checked(report.results)
    return Answers(
        engine.spec.precision,
        engine.spec.weight_bytes,
        tuple(result.text for result in results),
        report.output_tokens,
        report.decode_tokens_per_s,
        tokens,
        tuple(result.logprobs for result in results),
    )


def _forced(engine: Engine, theirs: Answers) -> list[list[TokenLogprob]]:
    """What this model thinks at each position of another's answers."""
    one = SamplingParams(max_tokens=1, logprobs=_TOP, ignore_eos=True)
    requests = [
        Request(prompt_tokens=(*prompt, *(entry.token for entry in output[:at])), sampling=one)
        for prompt, output in zip(theirs.prompts, theirs.outputs, strict=True)
        for at in range(len(output))
    ]
    seen: list[TokenLogprob] = []
    for begin in range(0, len(requests), _AT_ONCE):
        seen += [result.logprobs[0] for result in _checked(engine.run(requests[begin : begin + _AT_ONCE]).results)]
    entries = iter(seen)
    return [[next(entries) for _ in output] for output in theirs.outputs]


def _checked(results: Sequence[Result]) -> Sequence[Result]:
    for result in results:
        if result.error is not None:
            raise result.error
    return results


def divergence(first: TokenLogprob, second: TokenLogprob) -> float:
    """Of two distributions known by their most likely tokens, in nats: 0 for equal ones, at most the true one."""
    theirs, own = dict(first.top), dict(second.top)
    total, rest, other = 0.0, 1.0, 1.0
    for token in theirs.keys() & own.keys():
        p, q = math.exp(theirs[token]), math.exp(own[token])
        total += p * (theirs[token] - own[token])
        rest, other = rest - p, other - q
    rest, other = max(rest, 1e-9), max(other, 1e-9)
    return max(total + rest * math.log(rest / other), 0.0)


def is_json(text: str) -> bool:
    """True for one JSON object or list, in a code fence or not."""
    fenced = _FENCE.match(text.strip())
    try:
        return isinstance(json.loads(fenced[1] if fenced else text), dict | list)
    except (ValueError, RecursionError):
        return False
