"""Feed-forwards as published files hold them."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from shoal.models.decoder import Activation, Dense, Linear, Mixture
from shoal.models.families.builder import Builder, Rows


def dense(
    b: Builder,
    i: int,
    size: int | None = None,
    activation: Activation = "silu",
    *,
    gated: bool = True,
    suffix: str = "",
) -> Dense:
    """The feed-forward of layer `i`; without its own `ffn_gate`, `ffn_up` holds gate and up, one behind the other.

    `suffix` "_shexp" is the shared expert's.
    """
    size = b.facts.counts("feed_forward_length", b.layers, least=1)[i] if size is None else size
    gate_name, up_name, down_name = (f"blk.{i}.ffn_{part}{suffix}" for part in ("gate", "up", "down"))
    gate: Linear | None = None
    if not gated or b.has(f"{gate_name}.weight"):
        up = b.linear(up_name, size, b.width)
        gate = b.linear(gate_name, size, b.width) if gated else None
    else:
        b.weight(f"{up_name}.weight", (2 * size, b.width))
        gate = b.linear(up_name, size, b.width, np.arange(size), 2 * size)
        up = b.linear(up_name, size, b.width, np.arange(size, 2 * size), 2 * size)
    return Dense(size, b.activation(activation), gate, up, b.linear(down_name, b.width, size))


def mixture(
    b: Builder,
    i: int,
    *,
    scoring: Literal["softmax", "sigmoid", "chosen"] = "softmax",
    normalise: bool = True,
    activation: Activation = "silu",
    gated: bool = True,
    size: int | None = None,
    scale: float | None = None,
    turns: bool = False,
    inner: int | None = None,
    **more: Any,
) -> Mixture:
    """The experts of layer `i`.

    `turns`: a fused tensor holds gate and up row by row in turns, not one behind the other. `inner`: the experts'
    inputs where they are not the width. `more` are further fields of `Mixture`.
    """
    at, facts, inner = f"blk.{i}.", b.facts, b.width if inner is None else inner
    experts = facts.count("expert_count")
    used = facts.counts("expert_used_count", b.layers, least=1)[i]
    if size is None:
        given = facts.counts("expert_feed_forward_length", b.layers, 0)[i]
        size = given or facts.counts("feed_forward_length", b.layers, least=1)[i]
    groups = max(facts.count("expert_group_count", 1, least=0), 1)
    groups_used = facts.count("expert_group_used_count", groups, least=0) or groups
    if used > experts or experts % groups or groups_used > groups or experts // groups * groups_used < used:
        facts.fail("expert_used_count", (used, experts, groups, groups_used), "no more than there are")
    gate, up = _inputs(b, at, experts, size, inner, gated, turns)
    bias, shared_gate = f"{at}exp_probs_b.bias", f"{at}ffn_gate_inp_shexp"
    return Mixture(
        experts=experts,
        used=used,
        size=size,
        activation=b.activation(activation),
        scoring=scoring,
        router=b.linear(f"{at}ffn_gate_inp", experts, b.width),
        gate=gate,
        up=up,
        down=_experts(b, f"{at}ffn_down_exps", experts, inner, size),
        normalise=normalise,
        scale=(facts.real("expert_weights_scale", 0) or 1.0) if scale is None else scale,
        selection_bias=b.vector(bias, experts) if b.has(bias) else None,
        groups=groups,
        groups_used=groups_used,
        shared_gate=b.linear(shared_gate, 1, b.width) if b.has(f"{shared_gate}.weight") else None,
        **more,
    )


def shared(b: Builder, i: int, size: int, activation: Activation = "silu", *, gated: bool = True) -> Dense | None:
    """The shared expert of layer `i`; None where its `size` is 0."""
    return dense(b, i, size, activation, gated=gated, suffix="_shexp") if size else None


def _inputs(
    b: Builder, at: str, experts: int, size: int, inner: int, gated: bool, turns: bool
) -> tuple[Linear | None, Linear]:
    if not gated:
        return None, _experts(b, f"{at}ffn_up_exps", experts, size, inner)
    fused = f"{at}ffn_gate_up_exps"
    if not b.has(f"{fused}.weight"):
        first, second = (_experts(b, f"{at}ffn_{part}_exps", experts, size, inner) for part in ("gate", "up"))
        return first, second
    b.weight(f"{fused}.weight", (experts, 2 * size, inner))
    both = np.arange(2 * size)
    picks = (both[0::2], both[1::2]) if turns else (both[:size], both[size:])
    first, second = (_experts(b, fused, experts, size, inner, rows, 2 * size) for rows in picks)
    return first, second


def _experts(
    b: Builder, name: str, experts: int, outputs: int, inputs: int, rows: Rows | None = None, stored: int | None = None
) -> Linear:
    """`name`.weight [experts, outputs, inputs] with the biases [experts, outputs] where the file has them."""
    bias = f"{name}.bias"
    return Linear(
        b.weight(f"{name}.weight", (experts, outputs, inputs), rows, stored),
        b.weight(bias, (experts, outputs), rows, stored, axis=-1) if b.has(bias) else None,
    )
