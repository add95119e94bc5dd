"""The bound on thinking, beside a grammar: what the grammar does not allow is never written."""

from __future__ import annotations

import numpy as np

from shoal.runners.fake import ByteTokenizer
from shoal.sampling.grammar import GrammarCompiler
from shoal.sampling.sampler import SamplerState, sample
from shoal.sampling.thinking import ThinkingLimit
from shoal.types import SamplingParams, Thinking

END = "</t>"
LIKED = np.zeros((1, 259), np.float32)
LIKED[0, 0xA9] = 1.0  # the second byte of é
LIKED[0, ord("z")] = 0.5


def state(budget: int, *, regex: str | None) -> SamplerState:
    codec = ByteTokenizer()
    bound = Thinking(budget, "", END)
    params = SamplingParams(temperature=0, regex=regex, thinking=bound, logprobs=0)
    constraint = None if regex is None else GrammarCompiler(codec, 259).compile(params).start()
    limit = ThinkingLimit(bound, tuple(END.encode()), codec.token_bytes)
    return SamplerState(params, 0, 259, (), codec.eos_ids, constraint, limit)


def written(sampler: SamplerState, count: int) -> bytes:
    """The next tokens, chosen one by one."""
    tokens = []
    for _ in range(count):
        if sampler.constraint is not None:
            sampler.constraint.fill()
        tokens.append(int(sample(LIKED, [sampler])[0][0]))
        assert tokens[-1] >= 0
        sampler.accept(tokens[-1])
        assert sampler.constraint is None or sampler.constraint.error is None, sampler.constraint.error
    return bytes(tokens)


def test_the_end_waits_for_the_rest_of_a_character() -> None:
    sampler = state(1, regex=f"(.|\\n)*{END}!!")
    sampler.accept(0xC3)
    assert written(sampler, 5) == b"\xa9" + END.encode()
    assert sampler.limit is not None
    assert sampler.limit.over


def test_a_grammar_without_room_for_the_end_is_followed() -> None:
    assert written(state(2, regex="zzzzz<zz"), 8) == b"zzzzz<zz"


def test_where_the_grammar_has_an_end_later_it_is_written_there() -> None:
    assert written(state(2, regex=f"z{{5}}(z|{END})z*"), 11) == b"zzzzz" + END.encode() + b"zz"


def test_without_a_grammar_the_end_comes_at_once() -> None:
    assert written(state(0, regex=None), 5) == END.encode() + b"\xa9"
