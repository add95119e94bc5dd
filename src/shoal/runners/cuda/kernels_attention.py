"""The Triton kernels of attention over KV blocks; rules and letters are those of `kernels.py`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shoal.runners.cuda.kernels import row_sums

SPLIT = tl.constexpr(128)  # tokens of one attention split
BLOCK = tl.constexpr(32)  # token slots of a KV block
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _angles(cosines, sines, position, D: tl.constexpr, ROT: tl.constexpr):
    """By what each of D is turned at a position, cosines and sines [1, D]; what is behind ROT is not."""
    at = tl.arange(0, D)
    half: tl.constexpr = ROT // 2
    place = position * half + tl.where(at < half, at, at - half)
    cosine = tl.load(cosines + place, mask=at < ROT, other=1.0)[None, :]
    return cosine, tl.load(sines + place, mask=at < ROT, other=0.0)[None, :]


@triton.jit
def _turned(
    source, head, q_norm, k_norm, cosine, sine, eps,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, ROT: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Heads `head` [E] of a row's queries, keys and values at `source`, float32 [E, D]: all but values normed and
    turned.
    """
    at = tl.arange(0, D)
    inside = (head < HEADS + 2 * KV)[:, None] & (at >= 0)[None, :]
    half: tl.constexpr = ROT // 2
    partner = tl.where(at < half, at + half, tl.where(at < ROT, at - half, at))
    begin = source + head[:, None] * D
    value = tl.load(begin + at[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(begin + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    plain = value
    if NORMED:
        is_key = (head >= HEADS)[:, None]
        scale = tl.rsqrt(row_sums(value * value, D) / D + eps)[:, None]
        weight = tl.where(is_key, tl.load(k_norm + at)[None, :], tl.load(q_norm + at)[None, :])
        mate = tl.where(is_key, tl.load(k_norm + partner)[None, :], tl.load(q_norm + partner)[None, :])
        value = value * scale * weight
        other = other * scale * mate
    turned = value * cosine + tl.where((at < half)[None, :], -other, other) * sine
    return tl.where((head >= HEADS + KV)[:, None], plain, turned)


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
    row = tl.program_id(0)
    head = tl.program_id(1) * EACH + tl.arange(0, EACH)
    at = tl.arange(0, D)
    inside = (head < HEADS + 2 * KV)[:, None] & (at >= 0)[None, :]
    position = tl.load(positions + row)  # a step's inputs are there before its first product starts
    is_key = (head >= HEADS)[:, None]
    is_value = (head >= HEADS + KV)[:, None]
    cosine, sine = _angles(cosines, sines, position, D, ROT)
    slot = tl.load(slots + row)
    block = tl.load(tables + slot.to(tl.int64) * T + position // BLOCK).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    value = _turned(
        qkv + row * ((HEADS + 2 * KV) * D), head, q_norm, k_norm, cosine, sine, eps, HEADS, KV, D, ROT, NORMED
    )
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
def _tile(
    keys, values, key_scales, value_scales, table, start, last, kv_head,
    KV: tl.constexpr, D: tl.constexpr, SPAN: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    """Keys and values [SPAN, D] as they are kept of tokens start .. start + SPAN - 1, and their scales [SPAN] (EIGHT).

    Those after `last` are zeros.
    """
    token = start + tl.arange(0, SPAN)
    seen = token <= last
    block = tl.load(table + token // BLOCK, mask=seen, other=0).to(tl.int64)
    slot = (block * KV + kv_head) * BLOCK + token % BLOCK
    at = slot * D
    d = tl.arange(0, D)
    k = tl.load(keys + at[:, None] + d[None, :], mask=seen[:, None], other=0.0)
    v = tl.load(values + at[:, None] + d[None, :], mask=seen[:, None], other=0.0)
    k_scale, v_scale = 0.0, 0.0
    if EIGHT:
        k_scale = tl.load(key_scales + slot, mask=seen, other=0.0)
        v_scale = tl.load(value_scales + slot, mask=seen, other=0.0)
    return k, v, k_scale, v_scale


@triton.jit
def _partial(
    q, k, v, k_scale, v_scale, start, position, scale, cap, window,
    SPAN: tl.constexpr, CAPPED: tl.constexpr, WINDOW: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    """One split: tokens start .. start + SPAN - 1, a `_tile`, for queries q bf16 [M, D] at `position` [M] (they see up
    to their own).

    M is 64, also for a lone row: tiles of 16 gave the same bits on an H200 and took a quarter longer. SPAN is SPLIT,
    or half of it where no row of the step has more: what it leaves out would add zeros
    at the end. Returns the largest score [M] (in powers of two; -inf where a row sees nothing), the sum of weights [M]
    and the weighted values float32 [M, D]. The sum of weights is a product with ones: it has one order in every tile.
    With EIGHT, keys and values are codes, exact in bf16: a key's scale multiplies its scores, a value's scale its
    weights.
    """
    token = start + tl.arange(0, SPAN)
    if EIGHT:
        k, v = k.to(tl.float32).to(tl.bfloat16), v.to(tl.float32).to(tl.bfloat16)
    score = tl.dot(q, k.trans())
    if EIGHT:
        score = score * k_scale[None, :]
    if CAPPED:
        score = cap * (2.0 / (1.0 + tl.exp(-2.0 * (score * scale) / cap)) - 1.0) * LOG2E
    else:
        score = score * (scale * LOG2E)
    visible = token[None, :] <= position[:, None]
    if WINDOW:
        visible = visible & (token[None, :] > position[:, None] - window)
    score = tl.where(visible, score, float("-inf"))
    most = tl.max(score, axis=1)
    base = tl.where(most == float("-inf"), 0.0, most)
    share = tl.exp2(score - base[:, None])
    weight = share.to(tl.bfloat16)
    mixed = tl.dot((share * v_scale[None, :]).to(tl.bfloat16), v) if EIGHT else tl.dot(weight, v)
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
def _keep(p_most, p_total, p_mixed, place, ok, most, total, mixed, D: tl.constexpr):
    """Leave a split of the queries that are `ok` at `place` [M], for `merge_rows`."""
    d = tl.arange(0, D)
    tl.store(p_most + place, most, mask=ok)
    tl.store(p_total + place, total, mask=ok)
    tl.store(p_mixed + place.to(tl.int64)[:, None] * D + d[None, :], mixed, mask=ok[:, None])


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
def _keep_own(
    source, kv_head, k, v, k_scale, v_scale, keys, values, key_scales, value_scales, table, start, position,
    q_norm, k_norm, cosine, sine, eps,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, ROT: tl.constexpr, NORMED: tl.constexpr,
    SPAN: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    """Put the key and value of the row's own token into a `_tile`, and where it is in the tile into its KV block."""
    one = tl.zeros([1], tl.int32)
    key = _turned(source, HEADS + kv_head + one, q_norm, k_norm, cosine, sine, eps, HEADS, KV, D, ROT, NORMED)
    value = tl.load(source + (HEADS + KV + kv_head + one)[:, None] * D + tl.arange(0, D)[None, :]).to(tl.float32)
    token = start + tl.arange(0, SPAN)
    own = token == position
    here = (position >= start) & (position < start + SPAN)
    block = tl.load(table + position // BLOCK).to(tl.int64)
    slot = (block * KV + kv_head) * BLOCK + position % BLOCK + one
    place = slot[:, None] * D + tl.arange(0, D)[None, :]
    inside = here & (place >= 0)
    if EIGHT:
        key, key_scale = _eight_bits(key)
        value, value_scale = _eight_bits(value)
        tl.store(key_scales + slot[:, None], key_scale, mask=here & (slot >= 0)[:, None])
        tl.store(value_scales + slot[:, None], value_scale, mask=here & (slot >= 0)[:, None])
        k_scale = tl.where(own, key_scale.reshape([1]), k_scale)
        v_scale = tl.where(own, value_scale.reshape([1]), v_scale)
    else:
        key, value = key.to(tl.bfloat16), value.to(tl.bfloat16)
    tl.store(keys + place, key, mask=inside)
    tl.store(values + place, value, mask=inside)
    return tl.where(own[:, None], key, k), tl.where(own[:, None], value, v), k_scale, v_scale


@triton.jit
def attend_rows(
    q, keys, values, key_scales, value_scales, tables, positions,
    slots, sinks, out, q_norm, k_norm, cosines, sines,
    T, scale, cap, window, eps, SPAN: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr,
    D: tl.constexpr, G: tl.constexpr, EIGHT: tl.constexpr, CAPPED: tl.constexpr, WINDOW: tl.constexpr,
    SINKS: tl.constexpr, WALK: tl.constexpr, FRESH: tl.constexpr, GP: tl.constexpr, ROT: tl.constexpr,
    NORMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of rows that are alone in their sequence, to out bf16 [R, HEADS, D]. Programs: (KV, rows).

    A program reads all splits with WALK, else there is one. FRESH: q is what the products left, and what
    `rotate_and_keep` would do with it is done here; not with WALK. GP is G rounded up to a power of two. KV of the
    tokens before is from earlier steps, so it may be read before the wait.
    """
    kv_head, row = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + row)  # a step's inputs are there before its first product starts
    g = tl.arange(0, 64)
    head = kv_head * G + tl.minimum(g, G - 1)
    d = tl.arange(0, D)
    table = tables + tl.load(slots + row).to(tl.int64) * T
    at = tl.full([64], 0, tl.int32) + position
    mine = q + (row * HEADS + head)[:, None] * D + d[None, :]
    first = 0
    if WINDOW:
        first = tl.maximum(position - window + 1, 0) // SPLIT
    if FRESH:
        cosine, sine = _angles(cosines, sines, position, D, ROT)
        k, v, k_scale, v_scale = _tile(
            keys, values, key_scales, value_scales, table, 0, position - 1, kv_head, KV, D, SPAN, EIGHT
        )
    if PDL:  # what follows is a product of few rows, which may fetch its weights meanwhile
        gdc_launch_dependents()
        gdc_wait()
    if FRESH:
        source = q + row * ((HEADS + 2 * KV) * D)
        few = kv_head * G + tl.minimum(tl.arange(0, GP), G - 1)
        turned = _turned(source, few, q_norm, k_norm, cosine, sine, eps, HEADS, KV, D, ROT, NORMED)
        query = turned.to(tl.bfloat16).reshape([1, GP, D]).broadcast_to([64 // GP, GP, D]).reshape([64, D])
        k, v, k_scale, v_scale = _keep_own(
            source, kv_head, k, v, k_scale, v_scale, keys, values, key_scales, value_scales, table, 0,
            position, q_norm, k_norm, cosine, sine, eps, HEADS, KV, D, ROT, NORMED, SPAN, EIGHT,
        )  # fmt: skip
    else:
        query = tl.load(mine)
    most, total, mixed = _begin(sinks, head, 64, D, SINKS)
    if WALK:
        for split in range(first, position // SPLIT + 1):
            k, v, k_scale, v_scale = _tile(
                keys, values, key_scales, value_scales, table, split * SPLIT, position, kv_head, KV, D, SPLIT, EIGHT
            )
            most2, total2, mixed2 = _partial(
                query, k, v, k_scale, v_scale, split * SPLIT, at, scale, cap, window, SPLIT, CAPPED, WINDOW, EIGHT
            )
            most, total, mixed = _merge(most, total, mixed, most2, total2, mixed2)
    else:
        if not FRESH:
            k, v, k_scale, v_scale = _tile(
                keys, values, key_scales, value_scales, table, 0, position, kv_head, KV, D, SPAN, EIGHT
            )
        most2, total2, mixed2 = _partial(
            query, k, v, k_scale, v_scale, 0, at, scale, cap, window, SPAN, CAPPED, WINDOW, EIGHT
        )
        most, total, mixed = _merge(most, total, mixed, most2, total2, mixed2)
    result = out + (row * HEADS + head)[:, None] * D + d[None, :]
    tl.store(result, (mixed / total[:, None]).to(tl.bfloat16), mask=(g < G)[:, None])


@triton.jit
def attend_splits(
    q, keys, values, key_scales, value_scales, tables, positions, slots, trunk_splits, trunks, p_most, p_total, p_mixed,
    T, scale, cap, window, TRUNKS: tl.constexpr, SPLITS: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr,
    D: tl.constexpr, G: tl.constexpr, EIGHT: tl.constexpr, CAPPED: tl.constexpr, WINDOW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A split of a row, or one that several rows share, read once for all of them.

    Programs: (TRUNKS + SPLITS * rows, KV). trunks int32 [TRUNKS, 4]: the table's slot, the split, the first row and how
    many (at most 64 / G); 0 of them is no work. Only layers without a window have trunks. Splits of a row below
    trunk_splits[row] are among them. Shares go to p_* [R, HEADS, SPLITS(, D)] for `merge_rows`.
    """
    number, kv_head = tl.program_id(0), tl.program_id(1)
    if number < TRUNKS:
        slot, split = tl.load(trunks + number * 4), tl.load(trunks + number * 4 + 1)
        row, count = tl.load(trunks + number * 4 + 2), tl.load(trunks + number * 4 + 3)
    else:
        row, split = (number - TRUNKS) // SPLITS, (number - TRUNKS) % SPLITS
        at = tl.load(positions + row)  # a step's inputs are there before its first product starts
        first = tl.load(trunk_splits + row)
        if WINDOW:
            first = tl.maximum(at - window + 1, 0) // SPLIT
        slot, count = tl.load(slots + row), ((split * SPLIT <= at) & (split >= first)).to(tl.int32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if count > 0:
        i = tl.arange(0, 64)
        reader = row + tl.minimum(i // G, count - 1)
        head = kv_head * G + i % G
        d = tl.arange(0, D)
        query = tl.load(q + (reader * HEADS + head)[:, None] * D + d[None, :])
        position = tl.load(positions + reader)
        table = tables + slot.to(tl.int64) * T
        begin, last = split * SPLIT, tl.max(position, axis=0)
        k, v, k_scale, v_scale = _tile(
            keys, values, key_scales, value_scales, table, begin, last, kv_head, KV, D, SPLIT, EIGHT
        )
        most, total, mixed = _partial(
            query, k, v, k_scale, v_scale, begin, position, scale, cap, window, SPLIT, CAPPED, WINDOW, EIGHT
        )
        place = (reader * HEADS + head) * SPLITS + split
        _keep(p_most, p_total, p_mixed, place, i // G < count, most, total, mixed, D)


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
    last = position // SPLIT
    ONCE: tl.constexpr = 8 if SPLITS > 8 else SPLITS
    for begin in range(first, last + 1, ONCE):  # several are asked for at once: each is far away
        for j in tl.static_range(ONCE):  # those behind the last are -inf, 0 and 0, which change nothing
            place, there = (row * HEADS + head) * SPLITS + begin + j + one, begin + j <= last
            most2 = tl.load(p_most + place, mask=there & (one == 0), other=float("-inf"))
            total2 = tl.load(p_total + place, mask=there & (one == 0), other=0.0)
            at = place.to(tl.int64)[:, None] * D + d[None, :]
            mixed2 = tl.load(p_mixed + at, mask=there & (at >= 0), other=0.0)
            most, total, mixed = _merge(most, total, mixed, most2, total2, mixed2)
    tl.store(out + (row * HEADS + head) * D + d[None, :], (mixed / total[:, None]).to(tl.bfloat16))


@triton.jit
def attend_tiles(
    q, keys, values, key_scales, value_scales, tables, positions, slots, tiles, sinks, out,
    T, scale, cap, window, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, G: tl.constexpr,
    EIGHT: tl.constexpr, CAPPED: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of neighbours in one sequence (a prompt's chunk). Programs: (tiles, KV, 2), each half a tile.

    tiles int32 [tiles, 2]: the first row and how many (at most 128 / G; 0 is no work).
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    before = tl.program_id(2) * (64 // G)
    first, count = tl.load(tiles + tile * 2) + before, tl.minimum(tl.load(tiles + tile * 2 + 1) - before, 64 // G)
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
            k, v, k_scale, v_scale = _tile(
                keys, values, key_scales, value_scales, table, split * SPLIT, last, kv_head, KV, D, SPLIT, EIGHT
            )
            m2, t2, v2 = _partial(
                mine, k, v, k_scale, v_scale, split * SPLIT, position, scale, cap, window, SPLIT, CAPPED, WINDOW, EIGHT
            )
            most, total, mixed = _merge(most, total, mixed, m2, t2, v2)
        result = (mixed / total[:, None]).to(tl.bfloat16)
        tl.store(out + (row * HEADS + head)[:, None] * D + d[None, :], result, mask=(i // G < count)[:, None])
