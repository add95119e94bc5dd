"""Which decoders the CUDA kernels take, and what their KV and steps need; without torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.models.decoder import Attention, Decoder, DeltaNet, Mixture, ShortConv
from shoal.runners.cuda.supports import kv_bytes_per_token, refusal, state_bytes, step_bytes
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


def test_hybrids_are_taken_and_what_of_them_is_not_is_named() -> None:
    model = tiny_decoder(layers=4, nets=(2, 4, 32, 16))
    assert refusal(model) is None
    net = model.layers[0].mixer
    assert isinstance(net, DeltaNet)

    def refused(mixer: Any) -> str:
        return refusal(replace(model, layers=(replace(model.layers[0], mixer=mixer), *model.layers[1:]))) or ""

    assert "differ between layers" in refused(replace(net, value_heads=2))
    uneven = tiny_decoder(layers=2, nets=(1, 4, 32, 24))
    assert "32 and 24 elements" in (refusal(uneven) or "")
    assert "ShortConv" in refused(ShortConv(4, net.q, net.k, net.v, net.conv, None, net.out))
    assert "no layer with attention" in (refusal(replace(model, layers=model.layers[:1])) or "")


def test_state_and_kv_of_a_hybrid_are_those_of_their_own_layers() -> None:
    model = tiny_decoder(layers=4, nets=(2, 4, 32, 16))
    channels = 2 * 2 * 32 + 4 * 16
    assert state_bytes(model) == 2 * (3 * channels * 2 + 4 * 32 * 16 * 4)  # layers; inputs in bf16, matrices in float32
    attending = [layer for layer in model.layers if isinstance(layer.mixer, Attention)]
    assert kv_bytes_per_token(model) == kv_bytes_per_token(replace(model, layers=tuple(attending)))
    assert state_bytes(tiny_decoder()) == 0


def test_bytes_of_kv_and_of_a_step() -> None:
    model = tiny_decoder(layers=2, kv_heads=2, dim=64)
    assert kv_bytes_per_token(model) == 2 * 2 * 2 * 64 * 2  # layers, keys and values, heads, elements, bytes
    assert kv_bytes_per_token(model, eight=True) == 2 * 2 * 2 * (64 + 4)
    dense, mixed = step_bytes(model, 100, 4), step_bytes(tiny_decoder(layers=2, mixture=EXPERTS), 100, 4)
    assert dense < mixed
    assert step_bytes(model, 200, 4) == 2 * (dense - 4 * 300 * 4) + 4 * 300 * 4
