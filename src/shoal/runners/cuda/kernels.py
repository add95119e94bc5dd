"""The Triton kernels of one step. Their order of sums depends on the shape of the model only, never on the batch.

Letters in shapes: R rows (one fed token each), H hidden size, K inputs and N outputs of a product, V vocabulary, D
head size, G query heads of one KV head, T block-table entries of a sequence.

Three rules keep a row's bits equal for every number of rows beside it:
- A product cuts K into `SEGS` segments of equal length. Each is one chain of tensor-core instructions from front to
  back, and
  the segments are added in order, whether one program walks all of them or each has a program of its own.
- Attention cuts a sequence into splits of `SPLIT` tokens at fixed places. `_partial` computes a split, `_merge`
  adds it to
  those before it; a lone row, a tile of prompt rows and the readers of a shared trunk all go through these two.
- Whatever sums a row (a norm) is one program a row, of one shape.
PDL (dependent launch) lets a kernel start while the one before it ends: each waits before it reads or writes anything.
Fused multiply-add is off (`enable_fp_fusion=False` at each launch): a compiler would contract differently in each
kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SPLIT = tl.constexpr(128)  # tokens of one attention split
BLOCK = tl.constexpr(32)  # token slots of a KV block
LOG2E = tl.constexpr(1.4426950408889634)

BF16 = tl.constexpr(0)  # how a weight is stored, see `weights.py`
Q8_0 = tl.constexpr(1)
Q4_0 = tl.constexpr(2)
Q4_K = tl.constexpr(3)
Q6_K = tl.constexpr(4)

STORE = tl.constexpr(0)  # what a product does with its sums: bf16 out
PARTS = tl.constexpr(1)  # float32 sums of each segment, which the next kernel adds in order
GATED = tl.constexpr(2)  # bf16 activation(gate) * up
PICK = tl.constexpr(3)  # the largest of the tile, and the logits themselves where asked for


@triton.jit
def embed(tokens, table, x, scale, H: tl.constexpr, HP: tl.constexpr, PDL: tl.constexpr):
    """x[r] = table[tokens[r]] * scale, float32 [R, H]. One program a row; HP is H rounded up to a power of two."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    at = tl.arange(0, HP)
    token = tl.load(tokens + row).to(tl.int64)
    value = tl.load(table + token * H + at, mask=at < H, other=0.0).to(tl.float32)
    tl.store(x + row * H + at, value * scale, mask=at < H)


@triton.jit
def update_tables(tables, updates, COUNT: tl.constexpr, PDL: tl.constexpr):
    """Write the block-table entries that changed: updates int32 [COUNT, 2] are (place in the tables, block)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    i = tl.arange(0, COUNT)
    tl.store(tables + tl.load(updates + 2 * i), tl.load(updates + 2 * i + 1))


@triton.jit
def norm(
    x, parts, bias, post, weight, rows, out, part_stride, eps, residual_scale,
    H: tl.constexpr, HP: tl.constexpr, SEGS: tl.constexpr, BIAS: tl.constexpr, POST: tl.constexpr, GATHER: tl.constexpr,
    NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add what the last product left (SEGS sums, in order) to the residual x, then norm it for the next one.

    x float32 [R, H]; parts float32 [SEGS, R, H]; out bf16 [programs, H]. BIAS adds that of the
    product; POST norms the sum with `post` before it is added.
    GATHER takes row rows[program] and adds nothing. Without NORM only x changes.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    source = tl.load(rows + row) if GATHER else row
    at = tl.arange(0, HP)
    inside = at < H
    value = tl.load(x + source * H + at, mask=inside, other=0.0)
    if SEGS > 0:
        total = tl.zeros([HP], tl.float32)
        for s in tl.static_range(SEGS):
            total = total + tl.load(parts + s * part_stride + source * H + at, mask=inside, other=0.0)
        if BIAS:
            total = total + tl.load(bias + at, mask=inside, other=0.0)
        if POST:
            total = _rms(total, H, eps) * tl.load(post + at, mask=inside, other=0.0)
        value = value + total * residual_scale
        tl.store(x + source * H + at, value, mask=inside)
    if NORM:
        normed = _rms(value, H, eps) * tl.load(weight + at, mask=inside, other=0.0)
        tl.store(out + row * H + at, normed.to(tl.bfloat16), mask=inside)


@triton.jit
def _rms(value, size: tl.constexpr, eps):
    return value * tl.rsqrt(tl.sum(value * value, axis=-1) / size + eps)


@triton.jit
def _weights(w, scales, supers, n, k, K: tl.constexpr, FORM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """A tile of weights, bf16 [BN, BK]: outputs n, inputs k .. k + BK - 1. K and k are multiples of BK."""
    if FORM == BF16:
        return tl.load(w + n[:, None] * K + (k + tl.arange(0, BK))[None, :])
    if FORM == Q4_0 or FORM == Q4_K:  # noqa: SIM109 - Triton has no `in`; of 32 inputs the first 16 are the low halves of 16 bytes
        packed = tl.load(w + n[:, None] * (K // 2) + (k // 2 + tl.arange(0, BK // 2))[None, :]).to(
            tl.uint8, bitcast=True
        )
        packed = packed.reshape([BN, BK // 32, 16])
        codes = tl.join(packed & 15, packed >> 4).permute(0, 1, 3, 2).reshape([BN, BK]).to(tl.float32)
    else:
        codes = tl.load(w + n[:, None] * K + (k + tl.arange(0, BK))[None, :]).to(tl.float32)
    if FORM == Q4_0:
        codes = codes - 8.0
    GROUP: tl.constexpr = 16 if FORM == Q6_K else 32
    group = k // GROUP + tl.arange(0, BK // GROUP)
    scale = tl.load(scales + n[:, None] * (K // GROUP) + group[None, :])
    codes = codes.reshape([BN, BK // GROUP, GROUP])
    if FORM == Q4_K:  # a byte of scale and a byte of minimum each 32 inputs, in units of two f16 each 256
        pair = tl.load(supers + n[:, None] * (K // 256) + (group // 8)[None, :])
        unit = (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        least = ((pair >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        step = unit * (scale & 0xFF).to(tl.float32)
        base = least * ((scale >> 8) & 0xFF).to(tl.float32)
        value = codes * step[:, :, None] - base[:, :, None]
    elif FORM == Q6_K:
        unit = tl.load(supers + n[:, None] * (K // 256) + (group // 16)[None, :]).to(tl.float32)
        value = codes * (unit * scale.to(tl.float32))[:, :, None]
    else:
        value = codes * scale.to(tl.float32)[:, :, None]
    return value.reshape([BN, BK]).to(tl.bfloat16)


@triton.jit
def _activated(gate, ACT: tl.constexpr):
    if ACT == 0:
        return gate / (1.0 + tl.exp(-gate))  # SiLU
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)  # GELU, the tanh form
    return gate / (1.0 + tl.exp(-2.0 * inner))


@triton.jit
def product(
    x, w, scales, supers, bias, out, best, best_at, M, ld, cap, logit_scale,
    N: tl.constexpr, K: tl.constexpr, SEGS: tl.constexpr, SPLITK: tl.constexpr, FORM: tl.constexpr, EPI: tl.constexpr,
    BIAS: tl.constexpr, ACT: tl.constexpr, CAPPED: tl.constexpr, LOGITS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x bf16 [M, K] times w [N, K]. Programs: (tiles of N, tiles of M, SPLITK).

    STORE: out bf16 [M, ld], whose first N columns are written. PARTS: out float32 [SEGS, M, N], SPLITK = SEGS or 1
    (then [1, M, N], summed). GATED: w is [2 N, K], gates first; out bf16 [M, N]. PICK: best float32 and best_at int32
    [M, tiles], NaN where a logit is not finite; with LOGITS also out float32 [M, N].

    Weights are the left operand, so that BN, 64 or more, fills the instruction's 64 rows and a few rows of x its 16
    columns: one instruction for every M. (A tile of 16 rows of x on the left would take another one, whose sums
    differ.)
    """
    tile, ps = tl.program_id(0), tl.program_id(2)
    j = tl.arange(0, BN)
    if EPI == GATED:  # half of the tile are gates, the other half what they multiply
        n = tile * (BN // 2) + j % (BN // 2)
        n_in = (tl.minimum(n, N - 1) + tl.where(j < BN // 2, 0, N)).to(tl.int64)
    else:
        n = tile * BN + j
        n_in = tl.minimum(n, N - 1).to(tl.int64)  # outputs past the end repeat the last
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    row = tl.minimum(m, M - 1)  # rows past the end too: no masks in the loop
    KS: tl.constexpr = K // SEGS
    EACH: tl.constexpr = SEGS // SPLITK
    total = tl.zeros([BN, BM], tl.float32)
    acc = tl.zeros([BN, BM], tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for i in range(EACH * (KS // BK)):  # one loop over all segments, so that loads run ahead across their ends
        k = ps * EACH * KS + i * BK
        b = tl.load(x + row[None, :] * K + (k + tl.arange(0, BK))[:, None])
        acc = tl.dot(_weights(w, scales, supers, n_in, k, K, FORM, BN, BK), b, acc)
        # Not in an `if`: there Triton 3.6 reads acc while the instructions that write it are under way.
        ends = i % (KS // BK) == KS // BK - 1
        total = total + tl.where(ends, acc, 0.0)
        acc = tl.where(ends, 0.0, acc)
    if BIAS:
        total = total + tl.load(bias + n, mask=n < N, other=0.0)[:, None]
    if EPI == GATED:
        gate, up = total.reshape([2, BN // 2, BM]).permute(1, 2, 0).split()
        inner = tile * (BN // 2) + tl.arange(0, BN // 2)
        place = m[None, :].to(tl.int64) * ld + inner[:, None]
        inside = (m < M)[None, :] & (inner < N)[:, None]
        tl.store(out + place, (_activated(gate, ACT) * up).to(tl.bfloat16), mask=inside)
    else:
        here = m[None, :].to(tl.int64) * ld + n[:, None]
        ok = (m < M)[None, :] & (n < N)[:, None]
        if EPI == STORE:
            tl.store(out + here, total.to(tl.bfloat16), mask=ok)
        elif EPI == PARTS:
            tl.store(out + ps.to(tl.int64) * M * N + here, total, mask=ok)
        else:
            total = total * logit_scale
            if CAPPED:
                total = cap * (2.0 / (1.0 + tl.exp(-2.0 * total / cap)) - 1.0)
            if LOGITS:
                tl.store(out + here, total, mask=ok)
            finite = tl.abs(total) < float("inf")  # false for NaN too
            bad = tl.sum((ok & ~finite).to(tl.int32), axis=0) > 0
            shown = tl.where(ok & finite, total, float("-inf"))
            most = tl.max(shown, axis=0)
            where = tl.min(tl.where(shown == most[None, :], n[:, None], 2147483647), axis=0)
            tiles = tl.num_programs(0)
            tl.store(best + m * tiles + tile, tl.where(bad, float("nan"), most), mask=m < M)
            tl.store(best_at + m * tiles + tile, where, mask=m < M)


@triton.jit
def pick(
    best, best_at, tokens, positions, slots, chosen, spare_slot,
    TILES: tl.constexpr, TP: tl.constexpr, FEED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The most likely token of each row, of equals the lowest, -1 where a logit was not finite.

    One program a row. FEED makes it the next token fed, at the next position (chained steps); rows that only fill up a
    bucket, those of `spare_slot`, stay where they are.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    at = tl.arange(0, TP)
    value = tl.load(best + row * TILES + at, mask=at < TILES, other=float("-inf"))
    bad = tl.sum((value != value).to(tl.int32), axis=0) > 0
    most = tl.max(tl.where(value != value, float("-inf"), value), axis=0)
    index = tl.load(best_at + row * TILES + at, mask=at < TILES, other=2147483647)
    token = tl.min(tl.where(value == most, index, 2147483647), axis=0)
    tl.store(chosen + row, tl.where(bad, -1, token))
    if FEED:
        tl.store(tokens + row, tl.where(bad, 0, token))
        moves = tl.load(slots + row) != spare_slot
        tl.store(positions + row, tl.load(positions + row) + moves.to(tl.int32))


@triton.jit
def rotate_and_keep(
    qkv, q_norm, k_norm, cosines, sines, positions, slots, tables, keys, values, key_scales, value_scales, q,
    eps, T, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, ROT: tl.constexpr, NORMED: tl.constexpr,
    EIGHT: tl.constexpr, EACH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm and rotate queries and keys of a row; put keys and values into its KV block. EACH heads a program.

    Programs: (rows, (HEADS + 2 KV) / EACH, rounded up). qkv bf16 [R, (HEADS + 2 KV) * D]; q bf16 [R, HEADS, D]; keys
    and values bf16 [blocks, KV, BLOCK, D], or with EIGHT int8 and their scales float32 [blocks, KV, BLOCK]; the first
    ROT of D are rotated in pairs (i, i + ROT / 2) with cosines and sines float32 [positions, ROT / 2].
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    head = tl.program_id(1) * EACH + tl.arange(0, EACH)
    at = tl.arange(0, D)
    inside = (head < HEADS + 2 * KV)[:, None] & (at >= 0)[None, :]
    source = qkv + row * ((HEADS + 2 * KV) * D) + head[:, None] * D
    value = tl.load(source + at[None, :], mask=inside, other=0.0).to(tl.float32)
    position = tl.load(positions + row)
    is_key = (head >= HEADS)[:, None]
    is_value = (head >= HEADS + KV)[:, None]
    half: tl.constexpr = ROT // 2
    partner = tl.where(at < half, at + half, tl.where(at < ROT, at - half, at))
    other = tl.load(source + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    plain = value
    if NORMED:
        scale = tl.rsqrt(tl.sum(value * value, axis=1) / D + eps)[:, None]
        weight = tl.where(is_key, tl.load(k_norm + at)[None, :], tl.load(q_norm + at)[None, :])
        mate = tl.where(is_key, tl.load(k_norm + partner)[None, :], tl.load(q_norm + partner)[None, :])
        value = value * scale * weight
        other = other * scale * mate
    pair = tl.where(at < half, at, at - half)
    cosine = tl.load(cosines + position * half + pair, mask=at < ROT, other=1.0)[None, :]
    sine = tl.load(sines + position * half + pair, mask=at < ROT, other=0.0)[None, :]
    turned = value * cosine + tl.where((at < half)[None, :], -other, other) * sine
    value = tl.where(is_value, plain, turned)
    slot = tl.load(slots + row)
    block = tl.load(tables + slot.to(tl.int64) * T + position // BLOCK).to(tl.int64)
    kv_head = tl.where(is_value, head[:, None] - HEADS - KV, head[:, None] - HEADS)
    kept = (block * KV + kv_head) * BLOCK + position % BLOCK  # [EACH, 1]
    place = kept * D + at[None, :]
    a_key, a_value = is_key & (is_value == 0), is_value & (head < HEADS + 2 * KV)[:, None]
    if EIGHT:
        codes, scales = _eight_bits(value)
        tl.store(keys + place, codes, mask=inside & a_key)
        tl.store(values + place, codes, mask=inside & a_value)
        tl.store(key_scales + kept, scales, mask=a_key)
        tl.store(value_scales + kept, scales, mask=a_value)
    else:
        tl.store(keys + place, value.to(tl.bfloat16), mask=inside & a_key)
        tl.store(values + place, value.to(tl.bfloat16), mask=inside & a_value)
    tl.store(q + (row * HEADS + head[:, None]) * D + at[None, :], value.to(tl.bfloat16), mask=inside & (is_key == 0))


@triton.jit
def _eight_bits(value):
    """Rows of float32 [M, D] as int8 codes, the largest of a row 127 or -127, and float32 scales [M, 1]."""
    most = tl.max(tl.abs(value), axis=1)[:, None]
    unit = tl.where(most > 1e-30, 127.0 / tl.maximum(most, 1e-30), 0.0)
    return tl.floor(value * unit + 0.5).to(tl.int8), most / 127.0


@triton.jit
def _partial(
    q, keys, values, key_scales, value_scales, table, start, position, last, kv_head, scale, cap, window,
    KV: tl.constexpr, D: tl.constexpr, SPAN: tl.constexpr, CAPPED: tl.constexpr, WINDOW: tl.constexpr,
    EIGHT: tl.constexpr,
):  # fmt: skip
    """One split: tokens start .. start + SPAN - 1 for queries q bf16 [M, D] at `position` [M] (they see up to their
    own).

    M is 64: a smaller tile would take another instruction, whose sums differ. `last` is the largest position. SPAN is
    SPLIT, or half of it where no row of the step has more: what it leaves out would add zeros at the end. Returns the
    largest score [M] (in powers of two; -inf where a row sees nothing), the sum of weights [M] and the weighted values
    float32 [M, D]. The sum of weights is a product with ones: it has one order in every tile. With EIGHT, keys and
    values are codes, exact in bf16: a key's scale multiplies its scores, a value's scale its weights.
    """
    token = start + tl.arange(0, SPAN)
    seen = token <= last
    block = tl.load(table + token // BLOCK, mask=seen, other=0).to(tl.int64)
    slot = (block * KV + kv_head) * BLOCK + token % BLOCK
    at = slot * D
    d = tl.arange(0, D)
    k = tl.load(keys + at[:, None] + d[None, :], mask=seen[:, None], other=0.0)
    v = tl.load(values + at[:, None] + d[None, :], mask=seen[:, None], other=0.0)
    if EIGHT:
        k, v = k.to(tl.float32).to(tl.bfloat16), v.to(tl.float32).to(tl.bfloat16)
    score = tl.dot(q, k.trans()) * scale
    if EIGHT:
        score = score * tl.load(key_scales + slot, mask=seen, other=0.0)[None, :]
    if CAPPED:
        score = cap * (2.0 / (1.0 + tl.exp(-2.0 * score / cap)) - 1.0)
    visible = token[None, :] <= position[:, None]
    if WINDOW:
        visible = visible & (token[None, :] > position[:, None] - window)
    score = tl.where(visible, score * LOG2E, float("-inf"))
    most = tl.max(score, axis=1)
    base = tl.where(most == float("-inf"), 0.0, most)
    share = tl.exp2(score - base[:, None])
    weight = share.to(tl.bfloat16)
    if EIGHT:
        mixed = tl.dot((share * tl.load(value_scales + slot, mask=seen, other=0.0)[None, :]).to(tl.bfloat16), v)
    else:
        mixed = tl.dot(weight, v)
    ones = tl.full([SPAN, 16], 1.0, tl.float32).to(tl.bfloat16)
    total = tl.max(tl.dot(weight, ones), axis=1)  # 16 equal columns
    return most, total, mixed


@triton.jit
def _merge(most, total, mixed, most2, total2, mixed2):
    """Two runs of splits, the first before the second, as one."""
    new = tl.maximum(most, most2)
    base = tl.where(new == float("-inf"), 0.0, new)
    a, b = tl.exp2(most - base), tl.exp2(most2 - base)
    return new, total * a + total2 * b, mixed * a[:, None] + mixed2 * b[:, None]


@triton.jit
def _begin(sinks, head, M: tl.constexpr, D: tl.constexpr, SINKS: tl.constexpr):
    """The state before any split: nothing, or a sink that takes its share of the weight and gives no value."""
    if SINKS:
        most = tl.load(sinks + head) * LOG2E
        total = tl.full([M], 1.0, tl.float32)
    else:
        most = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
    return most, total, tl.zeros([M, D], tl.float32)


@triton.jit
def attend_rows(
    q, keys, values, key_scales, value_scales, tables, positions,
    slots, trunk_splits, sinks, out, p_most, p_total, p_mixed,
    T, scale, cap, window, SPLITS: tl.constexpr, SPAN: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr,
    D: tl.constexpr, G: tl.constexpr, EIGHT: tl.constexpr, CAPPED: tl.constexpr, WINDOW: tl.constexpr,
    SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of rows that are alone in their sequence. Programs: (SPLITS, KV, rows).

    With one split out bf16 [R, HEADS, D] is written, else the split's share goes to p_* [R, HEADS, SPLITS(, D)] for
    `merge_rows`. Splits below trunk_splits[row] are left to `attend_trunks`.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    split, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + row)
    start = split * SPLIT
    first = 0
    if WINDOW:
        first = tl.maximum(position - window + 1, 0) // SPLIT
    if (start <= position) & (split >= first) & (split >= tl.load(trunk_splits + row)):
        g = tl.arange(0, 64)
        head = kv_head * G + tl.minimum(g, G - 1)
        d = tl.arange(0, D)
        mine = tl.load(q + (row * HEADS + head)[:, None] * D + d[None, :])
        table = tables + tl.load(slots + row).to(tl.int64) * T
        at = tl.full([64], 0, tl.int32) + position
        most, total, mixed = _partial(
            mine, keys, values, key_scales, value_scales, table, start, at, position, kv_head, scale, cap, window,
            KV, D, SPAN, CAPPED, WINDOW, EIGHT,
        )  # fmt: skip
        ok = g < G
        if SPLITS == 1:
            m0, t0, v0 = _begin(sinks, head, 64, D, SINKS)
            m0, t0, v0 = _merge(m0, t0, v0, most, total, mixed)
            result = (v0 / t0[:, None]).to(tl.bfloat16)
            tl.store(out + (row * HEADS + head)[:, None] * D + d[None, :], result, mask=ok[:, None])
        else:
            place = (row * HEADS + head) * SPLITS + split
            tl.store(p_most + place, most, mask=ok)
            tl.store(p_total + place, total, mask=ok)
            tl.store(p_mixed + place.to(tl.int64)[:, None] * D + d[None, :], mixed, mask=ok[:, None])


@triton.jit
def attend_trunks(
    q, keys, values, key_scales, value_scales, tables, positions,
    readers, trunks, p_most, p_total, p_mixed,
    T, scale, cap, window, SPLITS: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
    G: tl.constexpr, EIGHT: tl.constexpr, CAPPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Splits that several rows share, read once for all of them. Programs: (work items, KV).

    trunks int32 [items, 4]: the table's slot, the split, the first of `readers` and how many (at most 64 / G); 0 of
    them is no work. Only layers without a window have trunks.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    item, kv_head = tl.program_id(0), tl.program_id(1)
    slot, split = tl.load(trunks + item * 4), tl.load(trunks + item * 4 + 1)
    first, count = tl.load(trunks + item * 4 + 2), tl.load(trunks + item * 4 + 3)
    if count > 0:
        i = tl.arange(0, 64)
        reader = tl.load(readers + first + tl.minimum(i // G, count - 1))
        head = kv_head * G + i % G
        d = tl.arange(0, D)
        mine = tl.load(q + (reader * HEADS + head)[:, None] * D + d[None, :])
        position = tl.load(positions + reader)
        table = tables + slot.to(tl.int64) * T
        most, total, mixed = _partial(
            mine, keys, values, key_scales, value_scales, table, split * SPLIT, position, tl.max(position, axis=0),
            kv_head, scale, cap, window, KV, D, SPLIT, CAPPED, False, EIGHT,
        )  # fmt: skip
        ok = i // G < count
        place = (reader * HEADS + head) * SPLITS + split
        tl.store(p_most + place, most, mask=ok)
        tl.store(p_total + place, total, mask=ok)
        tl.store(p_mixed + place.to(tl.int64)[:, None] * D + d[None, :], mixed, mask=ok[:, None])


@triton.jit
def merge_rows(
    positions, sinks, out, p_most, p_total, p_mixed, window,
    SPLITS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Put the splits of each row and head together, in order. Programs: (HEADS, rows)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    head, row = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + row)
    first = 0
    if WINDOW:
        first = tl.maximum(position - window + 1, 0) // SPLIT
    one = tl.zeros([1], tl.int32)
    d = tl.arange(0, D)
    most, total, mixed = _begin(sinks, head + one, 1, D, SINKS)
    for split in range(first, position // SPLIT + 1):
        place = (row * HEADS + head) * SPLITS + split + one
        part = tl.load(p_mixed + place.to(tl.int64)[:, None] * D + d[None, :])
        most, total, mixed = _merge(most, total, mixed, tl.load(p_most + place), tl.load(p_total + place), part)
    tl.store(out + (row * HEADS + head) * D + d[None, :], (mixed / total[:, None]).to(tl.bfloat16))


@triton.jit
def attend_tiles(
    q, keys, values, key_scales, value_scales, tables, positions, slots, tiles, sinks, out,
    T, scale, cap, window, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, G: tl.constexpr,
    EIGHT: tl.constexpr, CAPPED: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of neighbours in one sequence (a prompt's chunk). Programs: (tiles, KV).

    tiles int32 [tiles, 2]: the first row and how many (at most 64 / G; 0 is no work).
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(tiles + tile * 2), tl.load(tiles + tile * 2 + 1)
    if count > 0:
        i = tl.arange(0, 64)
        row = first + tl.minimum(i // G, count - 1)
        head = kv_head * G + i % G
        d = tl.arange(0, D)
        mine = tl.load(q + (row * HEADS + head)[:, None] * D + d[None, :])
        position = tl.load(positions + row)
        table = tables + tl.load(slots + first).to(tl.int64) * T
        begin = 0
        if WINDOW:
            begin = tl.maximum(tl.load(positions + first) - window + 1, 0) // SPLIT
        most, total, mixed = _begin(sinks, head, 64, D, SINKS)
        last = tl.load(positions + first + count - 1)
        for split in range(begin, last // SPLIT + 1):
            m2, t2, v2 = _partial(
                mine, keys, values, key_scales, value_scales, table, split * SPLIT, position, last,
                kv_head, scale, cap, window, KV, D, SPLIT, CAPPED, WINDOW, EIGHT,
            )  # fmt: skip
            most, total, mixed = _merge(most, total, mixed, m2, t2, v2)
        result = (mixed / total[:, None]).to(tl.bfloat16)
        tl.store(out + (row * HEADS + head)[:, None] * D + d[None, :], result, mask=(i // G < count)[:, None])
