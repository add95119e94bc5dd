"""Attention as published files hold it."""

from __future__ import annotations

from typing import Literal

import numpy as np

from shoal.models.decoder import Attention, Linear, Norm, QueryScale, Rotary
from shoal.models.families.builder import Builder, Rows
from shoal.models.families.rotary import rotary


def head_sizes(b: Builder, local: bool = False) -> tuple[int, int]:
    """Sizes of a key and of a value; `local` for layers with a window."""
    default = max(b.width // max(max(b.heads), 1), 1)
    key = b.facts.count("attention.key_length", default)
    value = b.facts.count("attention.value_length", default)
    if local:
        key = b.facts.count("attention.key_length_swa", key)
        value = b.facts.count("attention.value_length_swa", value)
    return key, value


def windows(b: Builder, pattern: int, first: bool = False) -> list[int | None]:
    """The window of each layer: of every `pattern` layers all but the last (`first`: the first) have one; 0: all."""
    window = b.facts.count("attention.sliding_window", 0, least=0)
    key = "attention.sliding_window_pattern"
    local = b.facts.flags(key, b.layers)
    if local is None:
        pattern = b.facts.count(key, pattern, least=0)
        full = 0 if first else pattern - 1
        local = [pattern == 0 or i % pattern != full for i in range(b.layers)]
    return [window if window and each else None for each in local]


def positions(b: Builder, key_dim: int, *, local: bool = False, local_base: float | None = None) -> Rotary:
    """Rotary positions for heads of `key_dim`; `local` for layers with a window where a model tells them apart.

    `local_base` is the base of those where the file names none; None: the same as of the others.
    """
    turned = b.facts.count("rope.dimension_count", key_dim)
    base = b.facts.real("rope.freq_base", 10000.0)
    if local:
        turned = b.facts.count("rope.dimension_count_swa", turned)
        base = b.facts.real("rope.freq_base_swa", base if local_base is None else local_base)
    if turned > key_dim:
        b.facts.fail("rope.dimension_count", turned, key_dim)
    made = b.rotaries.get((base, turned, local))
    if made is None:
        made = b.rotaries[base, turned, local] = rotary(base, turned, b.source.scaling(local), b.source.where)
    return made


def attention(
    b: Builder,
    i: int,
    *,
    turn: bool = True,
    local: bool = False,
    local_base: float | None = None,
    window: int | None = None,
    qk_norm: Literal["no", "head", "all", "optional"] = "no",
    scale: float | None = None,
    sinks: bool = False,
    soft_cap: float | None = None,
    gate: bool = False,
    query_scale: QueryScale | None = None,
    v_norm: Norm | None = None,
    kv_layer: int | None = None,
) -> Attention:
    """The attention of layer `i`. `gate`: the file's Q holds, for each head, its query and behind it its gate.

    `local` layers have head sizes and positions of their own where the file gives them. With `kv_layer` the layer has
    no K and V. Where it has K and no V, its values are its keys.
    """
    heads, kv_heads = b.heads[i], b.kv_heads[i]
    key, value = head_sizes(b, local)
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        b.facts.fail("attention.head_count", (heads, kv_heads), "heads that KV heads divide")
    parts = _Parts(b, i, heads, kv_heads, key, value, gate)
    turned = positions(b, key, local=local, local_base=local_base) if turn else None
    order = pair_order(b, key, turned)
    norms: dict[str, Norm | None] = {"q": None, "k": None}
    for part, n in (("q", heads), ("k", kv_heads))[: 2 if kv_layer is None else 1]:
        name = f"blk.{i}.attn_{part}_norm"
        if qk_norm in ("head", "all") or (qk_norm == "optional" and b.has(f"{name}.weight")):
            norms[part] = head_norm(b, name, n if qk_norm == "all" else 1, key, order)
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        key_dim=key,
        value_dim=value,
        q=parts.take("q", 0, key, order),
        k=parts.take("k", 0, key, order) if kv_layer is None else None,
        v=parts.take("v", 0, value) if kv_layer is None and parts.has_values else None,
        out=b.linear(f"blk.{i}.attn_output", b.width, heads * value),
        scale=key**-0.5 if scale is None else scale,
        rotary=turned,
        q_norm=norms["q"],
        k_norm=norms["k"],
        norm_over_heads=qk_norm == "all",
        gate=parts.take("q", key, 2 * key) if gate else None,
        sinks=b.vector(f"blk.{i}.attn_sinks.weight", heads) if sinks else None,
        window=window,
        soft_cap=soft_cap,
        query_scale=query_scale,
        v_norm=v_norm if kv_layer is None else None,
        kv_layer=kv_layer,
    )


class _Parts:
    """Q, K and V of one layer: tensors of their own, or one behind the other in `attn_qkv`.

    `has_values` is False where the layer has keys and no values.
    """

    def __init__(self, b: Builder, i: int, heads: int, kv_heads: int, key: int, value: int, gate: bool) -> None:
        self.b, self.at = b, f"blk.{i}."
        self.sizes = {"q": (heads, key * (2 if gate else 1)), "k": (kv_heads, key), "v": (kv_heads, value)}
        self.total = sum(n * size for n, size in self.sizes.values())
        self.fused = b.has(f"{self.at}attn_qkv.weight")
        self.has_values = self.fused or b.has(f"{self.at}attn_v.weight") or not b.has(f"{self.at}attn_k.weight")
        # Before rows are counted out: the sizes must be those of tensors.
        if self.fused:
            b.weight(f"{self.at}attn_qkv.weight", (self.total, b.width))
            return
        for part, (n, size) in self.sizes.items():
            if b.has(f"{self.at}attn_{part}.weight"):
                b.weight(f"{self.at}attn_{part}.weight", (n * size, b.width))

    def take(self, part: str, begin: int, end: int, order: Rows | None = None) -> Linear:
        """Elements begin to end of each head of `part`, in `order`."""
        n, size = self.sizes[part]
        if not self.fused:
            self.b.stored(f"{self.at}attn_{part}.weight")
        rows = np.arange(n)[:, None] * size + np.arange(begin, end)
        rows = rows if order is None else rows[:, order]
        if not self.fused:
            return picked(self.b, f"{self.at}attn_{part}", rows, n * size)
        before = {"q": 0, "k": 1, "v": 2}[part]
        offset = sum(heads * each for heads, each in list(self.sizes.values())[:before])
        return picked(self.b, f"{self.at}attn_qkv", rows + offset, self.total)


def picked(b: Builder, name: str, rows: Rows, stored: int, inputs: int | None = None) -> Linear:
    """The linear `name` of `stored` outputs with `rows` of them; none are named when all are taken in order."""
    flat = rows.reshape(-1)
    plain = len(flat) == stored and bool((flat == np.arange(stored)).all())
    return b.linear(name, len(flat), b.width if inputs is None else inputs, None if plain else flat, stored)


def pair_order(b: Builder, key_dim: int, turned: Rotary | None) -> Rows | None:
    """The order of a head's elements that brings pairs (2i, 2i + 1) to (i, i + pairs), or None when they are so."""
    if turned is None or b.pairs == "halves":
        return None
    order = np.arange(key_dim)
    order[: 2 * turned.pairs] = order[: 2 * turned.pairs].reshape(-1, 2).T.reshape(-1)
    return order


def head_norm(b: Builder, name: str, heads: int, key_dim: int, order: Rows | None) -> Norm:
    """A norm of queries or keys, over `heads` of them together, its weights in `order` within each head."""
    rows = None if order is None else (np.arange(heads)[:, None] * key_dim + order).reshape(-1)
    return b.norm(name, heads * key_dim, rows)
