"""Mixers with a recurrent state as published files hold them."""

from __future__ import annotations

import math

import numpy as np

from shoal.models.decoder import DeltaNet, Linear, Mamba2, Norm, ShortConv, Weight
from shoal.models.families.attention import picked
from shoal.models.families.builder import Builder, Rows


def delta_net(b: Builder, i: int, *, tiled: bool) -> DeltaNet:
    """The gated delta net of layer `i`. `tiled`: value head h reads key head h % key_heads, else h // (a key's share).

    Q, K and V are one behind the other in `attn_qkv`, or all of them and Z, key head by key head, in `ssm_in`;
    beta and alpha are tensors of their own, or key head by key head in `ssm_ba`.
    """
    at, facts = f"blk.{i}.", b.facts
    keys, values = facts.count("ssm.group_count"), facts.count("ssm.time_step_rank")
    key, inner, kernel = facts.count("ssm.state_size"), facts.count("ssm.inner_size"), facts.count("ssm.conv_kernel")
    if values % keys or inner % values:
        facts.fail("ssm.time_step_rank", (keys, values, inner), "value heads that key heads divide, and the inner size")
    value = inner // values
    channels = 2 * keys * key + inner
    conv = b.weight(f"{at}ssm_conv1d.weight", (channels, kernel))
    q, k, v, z = _qkvz(b, at, keys, values, key, value)
    alpha, beta = _alpha_beta(b, at, keys, values)
    return DeltaNet(
        key_heads=keys,
        value_heads=values,
        key_dim=key,
        value_dim=value,
        kernel=kernel,
        key_of=tuple(h % keys if tiled else h // (values // keys) for h in range(values)),
        q=q,
        k=k,
        v=v,
        z=z,
        alpha=alpha,
        beta=beta,
        conv=conv,
        decay=b.vector(f"{at}ssm_a", values, transform=None if b.gguf else "minus_exp"),
        dt_bias=b.vector(f"{at}ssm_dt.bias", values),
        norm=b.norm(f"{at}ssm_norm", value, plus_one=False),
        out=b.linear(f"{at}ssm_out", b.width, inner),
        l2_eps=b.eps if b.gguf else 1e-6,
    )


def _qkvz(b: Builder, at: str, keys: int, values: int, key: int, value: int) -> tuple[Linear, Linear, Linear, Linear]:
    share = values // keys * value
    sizes = (keys * key, keys * key, keys * share)
    if b.has(f"{at}attn_qkv.weight"):
        total, ends = sum(sizes), np.cumsum((0, *sizes))
        b.weight(f"{at}attn_qkv.weight", (total, b.width))
        q, k, v = (picked(b, f"{at}attn_qkv", np.arange(ends[j], ends[j + 1]), total) for j in range(3))
        return q, k, v, b.linear(f"{at}attn_gate", keys * share, b.width)
    parts = (key, key, share, share)
    total, ends = keys * sum(parts), np.cumsum((0, *parts))
    b.weight(f"{at}ssm_in.weight", (total, b.width))
    head = np.arange(keys)[:, None] * sum(parts)
    q, k, v, z = (picked(b, f"{at}ssm_in", head + np.arange(ends[j], ends[j + 1]), total) for j in range(4))
    return q, k, v, z


def _alpha_beta(b: Builder, at: str, keys: int, values: int) -> tuple[Linear, Linear]:
    if not b.has(f"{at}ssm_ba.weight"):
        return b.linear(f"{at}ssm_alpha", values, b.width), b.linear(f"{at}ssm_beta", values, b.width)
    share = values // keys
    b.weight(f"{at}ssm_ba.weight", (2 * values, b.width))
    head = np.arange(keys)[:, None] * 2 * share
    beta = picked(b, f"{at}ssm_ba", head + np.arange(share), 2 * values)
    return picked(b, f"{at}ssm_ba", head + np.arange(share, 2 * share), 2 * values), beta


def mamba2(b: Builder, i: int, *, norm_groups: int | None = None) -> Mamba2:
    """The state-space mixer of layer `i`; `norm_groups` None: as many as it has groups."""
    at, facts = f"blk.{i}.", b.facts
    heads, groups = facts.count("ssm.time_step_rank"), facts.count("ssm.group_count")
    inner, state, kernel = facts.count("ssm.inner_size"), facts.count("ssm.state_size"), facts.count("ssm.conv_kernel")
    if inner % heads or heads % groups or inner % groups:
        facts.fail("ssm.group_count", (inner, heads, groups), "groups that divide heads, heads that divide the size")
    shared = groups * state
    total = 2 * inner + 2 * shared + heads
    b.weight(f"{at}ssm_in.weight", (total, b.width))
    bias = f"{at}ssm_conv1d.bias"

    def rows(begin: int, size: int) -> Linear:
        return picked(b, f"{at}ssm_in", np.arange(begin, begin + size), total)

    has_norm = b.has(f"{at}ssm_norm.weight")
    return Mamba2(
        heads=heads,
        head_dim=inner // heads,
        groups=groups,
        state=state,
        kernel=kernel,
        z=rows(0, inner),
        x=rows(inner, inner),
        b=rows(2 * inner, shared),
        c=rows(2 * inner + shared, shared),
        dt=rows(2 * inner + 2 * shared, heads),
        conv=b.weight(f"{at}ssm_conv1d.weight", (inner + 2 * shared, kernel)),
        conv_bias=b.vector(bias, inner + 2 * shared) if b.has(bias) else None,
        decay=b.vector(f"{at}ssm_a", heads, transform=None if b.gguf else "minus_exp"),
        skip=b.vector(f"{at}ssm_d", heads),
        dt_bias=b.vector(f"{at}ssm_dt.bias", heads),
        norm=_flat_norm(b, f"{at}ssm_norm.weight", inner) if has_norm else None,
        norm_groups=groups if norm_groups is None else norm_groups,
        out=b.linear(f"{at}ssm_out", b.width, inner),
    )


def _flat_norm(b: Builder, name: str, size: int) -> Norm:
    """A norm whose weight the file may hold as [groups, size / groups]."""
    stored = b.stored(name)
    if math.prod(stored.shape) != size:
        b.vector(name, size)  # says which shape it must have
    return Norm(b.eps, Weight(stored, (size,), axis=-1))


def short_conv(b: Builder, i: int) -> ShortConv:
    """The short convolution of layer `i`: B, C and X are one behind the other."""
    at, n = f"blk.{i}.", b.width
    kernel = b.facts.count("shortconv.l_cache")
    b.weight(f"{at}shortconv.in_proj.weight", (3 * n, n))
    bias = f"{at}shortconv.conv.bias"

    def rows(j: int) -> Linear:
        part: Rows = np.arange(j * n, (j + 1) * n)
        return picked(b, f"{at}shortconv.in_proj", part, 3 * n)

    return ShortConv(
        kernel=kernel,
        b=rows(0),
        c=rows(1),
        x=rows(2),
        conv=b.weight(f"{at}shortconv.conv.weight", (n, kernel)),
        conv_bias=b.vector(bias, n) if b.has(bias) else None,
        out=b.linear(f"{at}shortconv.out_proj", n, n),
    )
