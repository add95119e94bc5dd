"""Two models side by side, on the toy model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal.diagnostics.compare import compare, divergence, is_json
from shoal.engine.engine import Engine
from shoal.errors import InvalidRequestError, ModelNotFoundError
from shoal.runners.fake import ByteTokenizer, FakeRunner
from shoal.runners.plan import StepOutput, StepPlan
from shoal.types import TokenLogprob

PROMPTS = ["one", "two", "three"]


class Blurred(FakeRunner):
    """The toy model with noise in its logits, as a lower precision has: the same for the same logits."""

    def execute(self, plan: StepPlan) -> StepOutput:
        output = super().execute(plan)
        if output.logits is not None:
            output.logits[:] += 0.3 * np.sin(output.logits * 1e4)
        return output


class OtherTokens(ByteTokenizer):
    def encode_messages(self, messages: Any) -> list[int]:
        return [*super().encode_messages(messages), 258]


def load(name: str) -> Engine:
    if name == "none":
        raise ModelNotFoundError("there is no model 'none'")
    codec = OtherTokens() if name == "other" else ByteTokenizer()
    return Engine(Blurred if name == "blurred" else FakeRunner, codec)


def test_a_model_agrees_with_itself() -> None:
    told = compare(load, "toy", "toy", PROMPTS, 12)
    assert (told.agreement, told.same_texts) == (1.0, 1.0)
    assert told.divergence == pytest.approx(0, abs=1e-9)
    assert told.positions == told.first.tokens == told.second.tokens > 12
    assert told.first.texts == told.second.texts
    assert told.first.tokens_per_s > 0


def test_another_precision_is_near_but_not_the_same() -> None:
    told = compare(load, "toy", "blurred", PROMPTS, 12)
    assert 0.1 < told.agreement < 1
    assert 0.001 < told.divergence < 1
    assert told.same_texts < 1


def test_models_of_other_tokens_and_no_prompts_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="do not have the same tokens"):
        compare(load, "toy", "other", PROMPTS)
    with pytest.raises(InvalidRequestError, match="no prompts"):
        compare(load, "toy", "toy", [])
    with pytest.raises(ModelNotFoundError):
        compare(load, "toy", "none", PROMPTS, 2)


def test_the_divergence_of_what_is_known_is_never_more_than_the_true_one() -> None:
    rng = np.random.default_rng(5)
    for spread in (0.01, 0.3, 2.0):
        first = rng.standard_normal(400) * 3
        second = first + spread * rng.standard_normal(400)
        p, q = (np.exp(z - np.logaddexp.reduce(z)) for z in (first, second))
        true = float(np.sum(p * np.log(p / q)))
        told = divergence(most_likely(p), most_likely(q))
        assert 0 <= told <= true + 1e-12
        assert told > 0.2 * true
    assert divergence(most_likely(p), most_likely(p)) == 0


def most_likely(p: Any) -> TokenLogprob:
    order = np.argsort(-p)[:20]
    return TokenLogprob(int(order[0]), float(np.log(p[order[0]])), tuple((int(t), float(np.log(p[t]))) for t in order))


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ('{"a": 1}', True),
        ("  [1, 2]\n", True),
        ('```json\n{"a": 1}\n```', True),
        ("```\n[]\n```", True),
        ('Sure! {"a": 1}', False),
        ('{"a": 1', False),
        ("3", False),
        ("", False),
        ("[" * 100_000, False),
    ],
)
def test_what_counts_as_json(text: str, valid: bool) -> None:
    assert is_json(text) is valid
