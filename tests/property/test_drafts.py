"""Random requests with and without drafts: equal outputs, one end each, whatever holds or bounds them."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shoal.runners.fake import FakeRunner
from shoal.runners.plan import ScheduledSequence
from shoal.types import Request, Result, SamplingParams, Thinking
from tests.support.drafting import draft_anything
from tests.support.engines import finish, toy_loop

TEXTS = (
    "the cat sat on the mat. ",
    '{"a": 1, "b": [1, 2]}',
    "été à la mer, 日本語</think>",
    "aaaaaaaa",
    "x<y</think>z ",
)
OBJECT = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}'
HELD: tuple[dict[str, Any], ...] = (
    {},
    {"json_schema": {"enum": ["cat", "catalogue", "ca", True, 12]}},
    {"json_schema": {"type": "string", "maxLength": 12}},
    {"regex": "(the cat sat on the mat\\. ){2,4}"},
    {"regex": "(.|\\n)*</think>(cat|dog)+"},
    {"regex": "(été|日本語|a)*"},
    {"grammar": 'start: ("a" | "b" start | "{" start "}")\n'},
    {"grammar": f'start: thought held\nthought[lazy]: /(.|\\n)*/ "</think>"\nheld: %json {OBJECT}\n'},
)


class Talking(FakeRunner):
    """The toy model, which mostly goes on as a text does; of no use at one position where `broken` says so."""

    def __init__(self, text: bytes, broken: int) -> None:
        super().__init__(num_blocks=64, block_size=8)
        self._text, self._broken = text, broken

    def _feed(self, item: ScheduledSequence, tokens: Seq[int], start: int, generated: int) -> NDArray[np.float32]:
        logits = super()._feed(item, tokens, start, generated).copy()
        at = self._text.find(bytes(tokens[-1:])) if tokens[-1] < 256 else -1
        if at >= 0:
            logits[self._text[(at + 1) % len(self._text)]] += 4.5
        return logits * np.float32(np.nan) if start + len(tokens) == self._broken else logits


def sampling(rng: random.Random) -> SamplingParams:
    fields: dict[str, Any] = dict(rng.choice(HELD))
    maybe: dict[str, Any] = {
        "logprobs": rng.choice((0, 2)),
        "thinking": Thinking(rng.choice((0, 1, 5, 30)), rng.choice(("", "<think>")), rng.choice(("</think>", "é"))),
        "stop": rng.choice((["mat"], ["</think>"], ["a", "ab"], ["日"])),
        "stop_token_ids": [rng.randrange(256)],
        "presence_penalty": 0.3,
        "top_k": rng.choice((1, 40)),
    }
    fields.update({name: value for name, value in maybe.items() if rng.random() < 0.3})
    most = rng.choice((1, 2, 7, 60))
    return SamplingParams(max_tokens=most, temperature=rng.choice((0, 0.3, 0.8)), seed=rng.randrange(99), **fields)


def run(seed: int, *, speculation: bool) -> tuple[list[Result], int]:
    """The results of the requests that `seed` makes, and how many drafted tokens were right."""
    rng = random.Random(seed)
    runner = Talking(rng.choice(TEXTS).encode(), rng.choice((0, 0, 60)))
    requests = [
        Request(
            prompt_tokens=list((rng.choice(TEXTS) * 2).encode()[: rng.randrange(1, 40)]),
            sampling=sampling(rng),
            predicted=list(rng.choice(TEXTS).encode()) if rng.random() < 0.3 else [],
        )
        for _ in range(3)
    ]
    loop = toy_loop(runner, speculation=speculation, max_stall_ms=10_000)
    draft_anything(loop, rng)
    return finish(loop, requests, most_steps=1000), loop.stats().accepted_tokens


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_drafts_change_no_output_and_no_end(first: int) -> None:
    right = 0
    for seed in range(first, first + 25):
        (plain, _), (drafted, accepted) = run(seed, speculation=False), run(seed, speculation=True)
        right += accepted
        for a, b in zip(plain, drafted, strict=True):
            assert (a.tokens, a.text, a.finish_reason, a.logprobs, str(a.error)) == (
                b.tokens,
                b.text,
                b.finish_reason,
                b.logprobs,
                str(b.error),
            ), seed
            assert a.error is None or "not finite" in str(a.error), f"{seed}: {a.error}"
    assert right > 20
