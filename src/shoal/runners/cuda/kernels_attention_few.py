"""Attention of few rows, in Gluon as the products before and behind it (`kernels_few.py` says why).

One kernel norms and turns queries and keys, keeps new keys and values, and attends, with the bits of
`kernels_attention`: its splits, and in each the same chains of instructions. KV of the tokens before is from earlier
steps and comes to shared memory before the products in front have ended.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shoal.runners.cuda.kernels_attention import BLOCK, LOG2E, SPLIT, _merge


@gluon.jit
def _copy_blocks(source, table, begin, position, kv_head, KV: gl.constexpr, D: gl.constexpr, SPAN: gl.constexpr):
    """Tokens begin .. begin + SPAN - 1 of keys or values, bf16 [SPAN, D] in shared memory; zeros from `position` on."""
    COUNT: gl.constexpr = SPAN // BLOCK
    L: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // D, D // 8], [COUNT, 4 // COUNT, 1], [2, 1, 0])
    S: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    block = gl.arange(0, COUNT, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
    slot = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    d = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    token = begin + block * BLOCK
    place = gl.load(table + token // BLOCK, mask=token < position, other=0).to(gl.int64)[:, None, None]
    target = gl.allocate_shared_memory(gl.bfloat16, [COUNT, BLOCK, D], S)
    here = ((place * KV + kv_head) * BLOCK + slot) * D + d
    async_copy.async_copy_global_to_shared(target, source + here, mask=token[:, None, None] + slot + d * 0 < position)
    return target.reshape([SPAN, D])


@gluon.jit
def _turned_heads(
    source, head, q_norm, k_norm, cosines, sines, position, eps, L: gl.constexpr,
    HEADS: gl.constexpr, KV: gl.constexpr, D: gl.constexpr, ROT: gl.constexpr, NORMED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """`kernels_attention._turned`: heads `head` [E, 1] of a row, float32 [E, D]. Waits before it reads the row."""
    E: gl.constexpr = head.shape[0]
    at = gl.arange(0, D, layout=gl.SliceLayout(0, L))[None, :]
    half: gl.constexpr = ROT // 2
    partner = gl.where(at < half, at + half, gl.where(at < ROT, at - half, at))
    angle = position * half + gl.where(at < half, at, at - half)
    cosine = gl.load(cosines + angle, mask=at < ROT, other=1.0)
    sine = gl.load(sines + angle, mask=at < ROT, other=0.0)
    is_key = head >= HEADS
    if NORMED:
        weight = gl.where(is_key, gl.load(k_norm + at), gl.load(q_norm + at))
        mate = gl.where(is_key, gl.load(k_norm + partner), gl.load(q_norm + partner))
    if PDL:
        gdc_wait()
    value = gl.load(source + head * D + at, cache_modifier=".cg").to(gl.float32)
    other = gl.load(source + head * D + partner, cache_modifier=".cg").to(gl.float32)
    plain = value
    if NORMED:
        squares = value * value
        for level in gl.static_range(1, 16):
            if (D >> level) > 0:
                squares = gl.sum(squares.reshape([E, D >> level, 2]), axis=2)
        scale = gl.convert_layout(gl.rsqrt(squares.reshape([E]) / D + eps), gl.SliceLayout(1, L))[:, None]
        value = value * scale * weight
        other = other * scale * mate
    turned = value * cosine + gl.where(at < half, -other, other) * sine
    return gl.where(head >= HEADS + KV, plain, turned)


@gluon.jit
def _merge_splits(
    p_most, p_total, p_mixed, out, sinks, row, kv_head, first, last,
    SPLITS: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, G: gl.constexpr, GP: gl.constexpr,
    SINKS: gl.constexpr,
):  # fmt: skip
    """Add splits first .. last of a row's G queries in order. Several are asked for at once: each is far away."""
    L: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4 // (D // 64), D // 64], [1, 0])
    R: gl.constexpr = gl.SliceLayout(1, L)
    ONCE: gl.constexpr = 8 if SPLITS > 8 else SPLITS
    g = gl.arange(0, GP, layout=R)
    mine = row * HEADS + kv_head * G + gl.minimum(g, G - 1)
    d = gl.arange(0, D, layout=gl.SliceLayout(0, L))[None, :]
    most = gl.full([GP], float("-inf"), gl.float32, R)
    total = gl.zeros([GP], gl.float32, R)
    if SINKS:
        most = gl.load(sinks + kv_head * G + gl.minimum(g, G - 1)) * LOG2E
        total = gl.full([GP], 1.0, gl.float32, R)
    mixed = gl.zeros([GP, D], gl.float32, L)
    for begin in range(first, last + 1, ONCE):
        for j in gl.static_range(ONCE):  # those behind the last are -inf, 0 and 0, which change nothing
            place, there = mine * SPLITS + begin + j, begin + j <= last
            most2 = gl.load(p_most + place, mask=there & (g >= 0), other=float("-inf"), cache_modifier=".cg")
            total2 = gl.load(p_total + place, mask=there & (g >= 0), other=0.0, cache_modifier=".cg")
            at = place[:, None] * D + d
            mixed2 = gl.load(p_mixed + at, mask=there & (at >= 0), other=0.0, cache_modifier=".cg")
            most, total, mixed = _merge(most, total, mixed, most2, total2, mixed2)
    result = (mixed / total[:, None]).to(gl.bfloat16)
    gl.store(out + mine[:, None] * D + d, result, mask=(g < G)[:, None] & (d >= 0))


@gluon.jit
def attend_few(
    qkv, keys, values, tables, positions, slots, sinks, out, p_most, p_total, p_mixed, arrived,
    q_norm, k_norm, cosines, sines, T, scale, cap, window, eps, SPLITS: gl.constexpr, SPAN: gl.constexpr,
    HEADS: gl.constexpr, KV: gl.constexpr, D: gl.constexpr, G: gl.constexpr, CAPPED: gl.constexpr,
    WINDOW: gl.constexpr, SINKS: gl.constexpr, GP: gl.constexpr, EP: gl.constexpr, ROT: gl.constexpr,
    NORMED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Attention of rows that are alone in their sequence, KV in bf16. Programs: (KV, SPLITS, rows).

    qkv bf16 [R, (HEADS + 2 KV) * D] as the products left it; out bf16 [R, HEADS, D]. With several splits each leaves
    its share in p_* (see `attend_rows`), and the last of a row and KV head to arrive, counted in `arrived` int32
    [R, KV] of zeros, adds them all in order. GP is G, EP is G + 2 rounded up to a power of two.
    """
    if PDL:
        gdc_launch_dependents()
    kv_head, split, row = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    position = gl.load(positions + row)  # a step's inputs are there before its first product starts
    first = 0
    if WINDOW:
        first = gl.maximum(position - window + 1, 0) // SPLIT
    begin = split * SPLIT
    last = position // SPLIT
    if (split <= last) & (split >= first):
        table = tables + gl.load(slots + row).to(gl.int64) * T
        k_held = _copy_blocks(keys, table, begin, position, kv_head, KV, D, SPAN)
        async_copy.commit_group()
        v_held = _copy_blocks(values, table, begin, position, kv_head, KV, D, SPAN)
        async_copy.commit_group()

        # Rows of EP: G queries, the key and the value of the row's own token.
        PER: gl.constexpr = 8 if D > 128 else 4
        L: gl.constexpr = gl.BlockedLayout([1, PER], [32 // (D // PER), D // PER], [4, 1], [1, 0])
        e = gl.arange(0, EP, layout=gl.SliceLayout(1, L))[:, None]
        head = gl.where(e < G, kv_head * G + e, HEADS + kv_head + gl.where(e == G + 1, KV, 0))
        source = qkv + row * ((HEADS + 2 * KV) * D)
        own_block = gl.load(table + position // BLOCK).to(gl.int64)
        turned = _turned_heads(
            source, head, q_norm, k_norm, cosines, sines, position, eps, L, HEADS, KV, D, ROT, NORMED, PDL
        ).to(gl.bfloat16)
        S: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        fresh = gl.allocate_shared_memory(gl.bfloat16, [EP, D], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]), turned)
        PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        if begin + SPAN > position:
            place = ((own_block * KV + kv_head) * BLOCK + position % BLOCK) * D
            place = (place + gl.arange(0, D, layout=gl.SliceLayout(0, L)))[None, :]
            gl.store(keys + place + e * 0, turned, mask=(e == G) & (place >= 0))
            gl.store(values + place + e * 0, turned, mask=(e == G + 1) & (place >= 0))

        C: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
        LA: gl.constexpr = gl.DotOperandLayout(0, C, 2)
        LB: gl.constexpr = gl.DotOperandLayout(1, C, 2)
        filler = gl.zeros([16, D], gl.bfloat16, LA).reshape([16 // GP, GP, D])
        heads = gl.allocate_shared_memory(gl.bfloat16, [1, EP, D], PLAIN, turned.reshape([1, EP, D]))
        query, _ = gl.broadcast(heads.slice(0, GP, dim=1).load(filler.type.layout), filler)
        query = gl.convert_layout(query.reshape([16, D]), LA, assert_trivial=True)  # the heads, again and again
        async_copy.wait_group(1)
        token = begin + gl.arange(0, SPAN, layout=gl.SliceLayout(0, LB))[None, :]
        own_key = fresh.slice(G, 1).permute((1, 0)).load(LB)
        key = gl.where(token == position, own_key, k_held.permute((1, 0)).load(LB))
        score = mma_v2(query, key, gl.zeros([16, SPAN], gl.float32, C))
        if CAPPED:
            score = cap * (2.0 / (1.0 + gl.exp(-2.0 * (score * scale) / cap)) - 1.0) * LOG2E
        else:
            score = score * (scale * LOG2E)
        token = begin + gl.arange(0, SPAN, layout=gl.SliceLayout(0, C))[None, :]
        visible = token <= position
        if WINDOW:
            visible = visible & (token > position - window)
        score = gl.where(visible, score, float("-inf"))
        most = gl.max(score, axis=1)
        base = gl.where(most == float("-inf"), 0.0, most)
        weight = gl.exp2(score - base[:, None]).to(gl.bfloat16)
        weight = gl.allocate_shared_memory(gl.bfloat16, [16, SPAN], S, weight).load(LA)
        async_copy.wait_group(0)
        token = begin + gl.arange(0, SPAN, layout=gl.SliceLayout(1, LB))[:, None]
        value = gl.where(token == position, fresh.slice(G + 1, 1).load(LB), v_held.load(LB))
        mixed = mma_v2(weight, value, gl.zeros([16, D], gl.float32, C))
        ones = gl.full([SPAN, 32], 1.0, gl.bfloat16, LB)
        total = gl.max(mma_v2(weight, ones, gl.zeros([16, 32], gl.float32, C)), axis=1)  # equal columns

        LR: gl.constexpr = gl.SliceLayout(1, C)
        g = gl.arange(0, 16, layout=LR)
        mine = row * HEADS + kv_head * G + gl.minimum(g, G - 1)
        d = gl.arange(0, D, layout=gl.SliceLayout(0, C))[None, :]
        most0 = gl.full([16], float("-inf"), gl.float32, LR)
        total0 = gl.zeros([16], gl.float32, LR)
        if SINKS:
            most0 = gl.load(sinks + kv_head * G + gl.minimum(g, G - 1)) * LOG2E
            total0 = gl.full([16], 1.0, gl.float32, LR)
        mixed0 = gl.zeros([16, D], gl.float32, C)
        if SPLITS == 1:
            most, total, mixed = _merge(most0, total0, mixed0, most, total, mixed)
            gl.store(
                out + mine[:, None] * D + d, (mixed / total[:, None]).to(gl.bfloat16), mask=(g < G)[:, None] & (d >= 0)
            )
        else:
            place = mine * SPLITS
            gl.store(p_most + place + split, most, mask=g < G)
            gl.store(p_total + place + split, total, mask=g < G)
            gl.store(p_mixed + (place + split)[:, None] * D + d, mixed, mask=(g < G)[:, None] & (d >= 0))
            gl.thread_barrier()
            before = gl.atomic_add(arrived + row * KV + kv_head, 1, sem="acq_rel", scope="gpu")
            if before == last - first:
                _merge_splits(
                    p_most, p_total, p_mixed, out, sinks, row, kv_head, first, last, SPLITS, HEADS, D, G, GP, SINKS
                )
                gl.store(arrived + row * KV + kv_head, 0)
