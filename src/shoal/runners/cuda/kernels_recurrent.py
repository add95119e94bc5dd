"""The Triton kernels of gated delta nets (`decoder.DeltaNet`), and of the gates behind attention.

A run is what a step feeds of one sequence: rows first .. first + count - 1. Tokens of a run go one after the other in
one program, and every sum has the shape of the model, so no cut into chunks and no neighbour can show. The other
letters are those of `kernels.py`; C counts the channels of q, k and v of all heads, side by side.

A sequence has two entries of state, a step reads one and writes the other (`states.py` says why): `runs` int32
[runs, 4] are (first, count, place, flip), and entry 2 * place + (position of the first + flip) % 2 is read. A run of 0
rows is no work.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def convolve(
    columns, taps, inputs, decay, dt_bias, runs, run_of, positions, mixed, decays, betas, ld, entry, l2_eps, q_scale,
    KEYS: tl.constexpr, VALUES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TAPS: tl.constexpr, P: tl.constexpr,
    EACH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of each row: the convolution and SiLU of q, k and v, q and k at unit length, and both shares of the recurrence.

    Programs: (rows, (2 KEYS + VALUES) / EACH, rounded up): heads of q, of k, of v; P is K and V rounded up to a power
    of two. columns bf16 [R, ld] are C channels, z, alpha and beta of a row; taps float32 [TAPS, C]; inputs bf16
    [entries, ..., TAPS - 1, C], `entry` elements apart: what came before a run, oldest first, zeros before the first
    position. mixed bf16 [R, C]; decays and betas float32 [R, VALUES]. run_of int32 [R]: a row's run, -1 for rows that
    only fill up a bucket.
    """
    row = tl.program_id(0)
    run = tl.load(run_of + row)  # a step's inputs are there before its first product starts
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if run >= 0:
        C: tl.constexpr = 2 * KEYS * K + VALUES * V
        first, count = tl.load(runs + run * 4), tl.load(runs + run * 4 + 1)
        place, flip = tl.load(runs + run * 4 + 2), tl.load(runs + run * 4 + 3)
        position = tl.load(positions + first)
        side = (position + flip) % 2
        before = inputs + (2 * place + side).to(tl.int64) * entry
        after = inputs + (2 * place + 1 - side).to(tl.int64) * entry
        head = tl.program_id(1) * EACH + tl.arange(0, EACH)
        value = head - 2 * KEYS  # which head of values
        is_value = (value >= 0) & (value < VALUES)
        at = tl.arange(0, P)
        start = tl.where(value >= 0, 2 * KEYS * K + value * V, head * K)
        size = tl.where(value >= 0, V, K)
        channel = start[:, None] + at[None, :]
        inside = (value < VALUES)[:, None] & (at[None, :] < size[:, None])
        total = tl.zeros([EACH, P], tl.float32)
        for j in tl.static_range(TAPS):
            source = row - (TAPS - 1 - j)  # the row whose input this tap takes; below `first` it is an earlier step's
            here = tl.load(columns + source * ld + channel, mask=inside & (source >= first), other=0.0)
            old = before + (source - first + TAPS - 1) * C
            kept = tl.load(old + channel, mask=inside & (source < first) & (position > 0), other=0.0)
            x = tl.where(source >= first, here, kept)
            if j > 0:
                tl.store(after + (j - 1) * C + channel, x, mask=inside & (row == first + count - 1))
            total = total + x.to(tl.float32) * tl.load(taps + j * C + channel, mask=inside, other=0.0)
        total = total / (1.0 + tl.exp(-total))
        length = tl.rsqrt(tl.sum(total * total, axis=1) + l2_eps) * tl.where(head < KEYS, q_scale, 1.0)
        total = total * tl.where(value >= 0, 1.0, length)[:, None]
        tl.store(mixed + row * C + channel, total.to(tl.bfloat16), mask=inside)
        share = columns + row * ld + C + VALUES * V + value
        alpha = tl.load(share, mask=is_value, other=0.0).to(tl.float32)
        alpha = alpha + tl.load(dt_bias + value, mask=is_value, other=0.0)
        step = tl.maximum(alpha, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(alpha)))
        rate = tl.load(decay + value, mask=is_value, other=0.0)
        beta = tl.load(share + VALUES, mask=is_value, other=0.0).to(tl.float32)
        tl.store(decays + row * VALUES + value, tl.exp(rate * step), mask=is_value)
        tl.store(betas + row * VALUES + value, 1.0 / (1.0 + tl.exp(-beta)), mask=is_value)


@triton.jit
def _token(
    mixed, decays, betas, row, key, head, i, j,
    KEYS: tl.constexpr, VALUES: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """What the recurrence needs of a row: q and k [KP], columns j of v, and the two shares."""
    C: tl.constexpr = 2 * KEYS * K + VALUES * V
    at = mixed + row * C
    q = tl.load(at + key * K + i, mask=i < K, other=0.0).to(tl.float32)
    k = tl.load(at + (KEYS + key) * K + i, mask=i < K, other=0.0).to(tl.float32)
    v = tl.load(at + 2 * KEYS * K + head * V + j).to(tl.float32)
    return q, k, v, tl.load(decays + row * VALUES + head), tl.load(betas + row * VALUES + head)


@triton.jit
def recur(
    mixed, decays, betas, key_of, state, runs, positions, out, entry,
    KEYS: tl.constexpr, VALUES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The gated delta rule over the tokens of a run: BV columns of one head's state. Programs: (V / BV, VALUES, runs).

    state float32 [entries, ..., VALUES, K, V], `entry` elements apart; key_of int32 [VALUES]; out float32
    [R, VALUES, V]. KP is K rounded up to a power of two.
    """
    head, run = tl.program_id(1), tl.program_id(2)
    first, count = tl.load(runs + run * 4), tl.load(runs + run * 4 + 1)
    place, flip = tl.load(runs + run * 4 + 2), tl.load(runs + run * 4 + 3)
    i = tl.arange(0, KP)
    j = tl.program_id(0) * BV + tl.arange(0, BV)
    position = tl.load(positions + first)
    side = (position + flip) % 2
    cell = head * K * V + i[:, None] * V + j[None, :]
    inside = (i < K)[:, None] & (j >= 0)[None, :]
    before = state + (2 * place + side).to(tl.int64) * entry
    after = state + (2 * place + 1 - side).to(tl.int64) * entry
    # Before the wait: the entry that is read was written in an earlier step.
    s = tl.load(before + cell, mask=inside & (position > 0) & (count > 0), other=0.0)
    key = tl.load(key_of + head)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if count > 0:
        q, k, v, decay, beta = _token(mixed, decays, betas, first, key, head, i, j, KEYS, VALUES, K, V)
        last = first + count - 1
        for row in range(first, first + count):  # the next token is on its way while this one is computed
            q2, k2, v2, decay2, beta2 = _token(
                mixed, decays, betas, tl.minimum(row + 1, last), key, head, i, j, KEYS, VALUES, K, V
            )
            s = s * decay
            missing = beta * (v - tl.sum(s * k[:, None], axis=0))
            s = s + k[:, None] * missing[None, :]
            tl.store(out + (row * VALUES + head) * V + j, tl.sum(s * q[:, None], axis=0))
            q, k, v, decay, beta = q2, k2, v2, decay2, beta2
        tl.store(after + cell, s, mask=inside)


@triton.jit
def gate_heads(
    x, gates, weight, out, ld, eps,
    HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, EACH: tl.constexpr, NORMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out bf16 [R, HEADS, D] = x * sigmoid(gates), of attention; NORMED: norm(x) * silu(gates), of a delta net.

    Programs: (rows, HEADS / EACH, rounded up); P is D rounded up to a power of two. x as out, or float32; gates bf16
    [R, ld]. out may be x.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    head = tl.program_id(1) * EACH + tl.arange(0, EACH)
    at = tl.arange(0, P)
    place = head[:, None] * D + at[None, :]
    inside = (head < HEADS)[:, None] & (at < D)[None, :]
    value = tl.load(x + row * (HEADS * D) + place, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gates + row * ld + place, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    if NORMED:
        value = value * tl.rsqrt(tl.sum(value * value, axis=1) / D + eps)[:, None]
        value = value * tl.load(weight + at, mask=at < D, other=0.0)[None, :]
        share = share * gate
    tl.store(out + row * (HEADS * D) + place, (value * share).to(tl.bfloat16), mask=inside)
