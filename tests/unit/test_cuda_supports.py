"""Which decoders the CUDA kernels take, and what their KV and steps need; without torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.models.decoder import Decoder, Mixture
from shoal.runners.cuda.supports import kv_bytes_per_token, refusal, step_bytes
from tests.cuda.tiny import tiny_decoder

EXPERTS: dict[str, Any] = {"experts": 4, "used": 2}


def with_experts(**changes: Any) -> Decoder:
    """One layer whose mixture is changed by hand."""
    model = tiny_decoder(layers=1, mixture=EXPERTS)
    (layer,) = model.layers
    assert isinstance(layer.feed_forward, Mixture)
    return replace(model, layers=(replace(layer, feed_forward=replace(layer.feed_forward, **changes)),))


def test_dense_decoders_and_mixtures_are_taken() -> None:
    assert refusal(tiny_decoder(heads=3, kv_heads=1)) is None
    for how in ({}, {"scoring": "sigmoid", "selection": True}, {"shared": True, "gated": True}):
        assert refusal(tiny_decoder(layers=1, mixture=EXPERTS | how)) is None
    assert refusal(with_experts(scoring="chosen", activation="swiglu_clipped")) is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"groups": 2}, "groups"),
        ({"gate": None}, "without a gate"),
        ({"activation": "relu2"}, "relu2"),
    ],
)
def test_what_mixtures_are_not_taken_is_named(changes: dict[str, Any], named: str) -> None:
    reason = refusal(with_experts(**changes))
    assert reason is not None
    assert named in reason
    assert "layer 0" in reason


def test_more_query_heads_for_one_kv_head_than_a_tile_serves_are_refused() -> None:
    assert "17 query heads" in (refusal(tiny_decoder(layers=1, heads=17, kv_heads=1)) or "")


def test_bytes_of_kv_and_of_a_step() -> None:
    model = tiny_decoder(layers=2, kv_heads=2, dim=64)
    assert kv_bytes_per_token(model) == 2 * 2 * 2 * 64 * 2  # layers, keys and values, heads, elements, bytes
    assert kv_bytes_per_token(model, eight=True) == 2 * 2 * 2 * (64 + 4)
    dense, mixed = step_bytes(model, 100, 4), step_bytes(tiny_decoder(layers=2, mixture=EXPERTS), 100, 4)
    assert dense < mixed
    assert step_bytes(model, 200, 4) == 2 * (dense - 4 * 300 * 4) + 4 * 300 * 4
