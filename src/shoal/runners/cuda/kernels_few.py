"""The product of few rows, in Gluon, the half of Triton in which a program says where each value lies.

What a step of few rows waits for is memory and the chain of its kernels, not arithmetic. Written so, a program asks
for all its weights before the kernel in front of it has ended (they come to shared memory by asynchronous copies, for
which no register waits), each warp has inputs of its own, and two barriers are all that is left behind the wait.

Bits are those of `kernels.product`: the same chunks, each a chain of tensor-core instructions, added in the same order.
`kernels.py` has the rules and the letters of shapes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shoal.runners.cuda.kernels import ADD, BF16, GATED, Q4_0, Q4_K, Q6_K, SQUARES, activated


@gluon.jit
def _left(x, C: gl.constexpr):
    """Rows of x [warps, rows, K] as the left operand. Each thread has loaded 4 neighbours of K at once.

    An instruction takes 16 of K, of which a thread holds two pairs 8 apart. Which 16 they are decides the bits, their
    order does not: so the 4 neighbours are taken for these pairs, here and in `_right`. No value moves.
    """
    B: gl.constexpr = x.shape[0]
    M: gl.constexpr = x.shape[1]
    K: gl.constexpr = x.shape[2]
    pairs = gl.permute(x.reshape([B, M, K // 16, 4, 2, 2]), (0, 1, 2, 4, 3, 5)).reshape([B, M, K])
    return gl.convert_layout(pairs, gl.DotOperandLayout(0, C, 2), assert_trivial=True)


@gluon.jit
def _right(w, C: gl.constexpr):
    """The same of weights [warps, K, outputs]."""
    B: gl.constexpr = w.shape[0]
    K: gl.constexpr = w.shape[1]
    N: gl.constexpr = w.shape[2]
    pairs = gl.permute(w.reshape([B, K // 16, 4, 2, 2, N]), (0, 1, 3, 2, 4, 5)).reshape([B, K, N])
    return gl.convert_layout(pairs, gl.DotOperandLayout(1, C, 2), assert_trivial=True)


@gluon.jit
def _row_scales(
    squares, m0, eps, M: gl.constexpr, K: gl.constexpr, R: gl.constexpr, SP: gl.constexpr, NW: gl.constexpr
):
    """1 over the root of the mean square of R rows from m0 on, [R]: sums of pairs, as `row_sums`.

    squares float32 [M, K / SQUARES]; SP is K / SQUARES rounded up to a power of two.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [NW, 1], [1, 0])
    COUNT: gl.constexpr = K // SQUARES
    row = gl.minimum(m0 + gl.arange(0, R, layout=gl.SliceLayout(1, L)), M - 1)[:, None]
    part = gl.arange(0, SP, layout=gl.SliceLayout(0, L))[None, :]
    value = gl.load(squares + row * COUNT + part, mask=(part < COUNT) & (row >= 0), other=0.0, cache_modifier=".cg")
    for level in gl.static_range(1, 16):
        if (SP >> level) > 0:
            value = gl.sum(value.reshape([R, SP >> level, 2]), axis=2)
    return gl.rsqrt(value.reshape([R]) / K + eps)


@gluon.jit
def _outputs(tile, N: gl.constexpr, BN: gl.constexpr, WIDE: gl.constexpr, L: gl.constexpr):
    """Rows of the weights that a tile takes: BN outputs, and where WIDE is more, what lies N behind them."""
    j = gl.arange(0, WIDE, layout=L)
    return gl.minimum(tile * BN + j % BN, N - 1) + gl.where(j < BN, 0, N)


@gluon.jit
def _stage(
    target, w, scales, supers, tile, chunk,
    FORM: gl.constexpr, N: gl.constexpr, K: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr, NW: gl.constexpr,
    BN: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Bring chunks chunk .. chunk + NW - 1 of a tile to shared memory, bf16 [NW, WIDE, CHUNK], one chunk a warp.

    bf16 comes by asynchronous copies; other forms are unpacked, with the very operations of `kernels._weights`.
    Past the last chunk, and past the last output, the last one comes again.
    """
    SIZE: gl.constexpr = 8 if FORM == BF16 or FORM == Q4_0 or FORM == Q4_K else 16
    ALONG: gl.constexpr = CHUNK // SIZE if FORM != Q4_0 and FORM != Q4_K else CHUNK // 2 // SIZE
    L: gl.constexpr = gl.BlockedLayout([1, 1, SIZE], [1, 32 // ALONG, ALONG], [NW, 1, 1], [2, 1, 0])
    warp = gl.arange(0, NW, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
    first = (gl.minimum(chunk + warp, CHUNKS - 1) * CHUNK)[:, None, None]
    row = _outputs(tile, N, BN, WIDE, gl.SliceLayout(0, gl.SliceLayout(2, L))).to(gl.int64)[None, :, None] * K
    base = row + first  # [NW, WIDE, 1]
    if FORM == BF16:
        k = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
        async_copy.async_copy_global_to_shared(target, w + base + k)
    else:
        if FORM == Q4_0 or FORM == Q4_K:
            k = gl.arange(0, CHUNK // 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
            packed = gl.load(w + base // 2 + k).to(gl.uint8, bitcast=True).reshape([NW, WIDE, CHUNK // 32, 16])
            codes = gl.permute(gl.join(packed & 15, packed >> 4), (0, 1, 2, 4, 3)).to(gl.float32)
        else:
            k = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
            codes = gl.load(w + base + k).to(gl.float32)
        if FORM == Q4_0:
            codes = codes - 8.0
        GROUP: gl.constexpr = 16 if FORM == Q6_K else 32
        codes = codes.reshape([NW, WIDE, CHUNK // GROUP, GROUP])
        LG: gl.constexpr = gl.SliceLayout(3, codes.type.layout)
        warp3 = gl.arange(0, NW, layout=gl.SliceLayout(1, gl.SliceLayout(2, LG)))
        group = (gl.minimum(chunk + warp3, CHUNKS - 1) * (CHUNK // GROUP))[:, None, None]
        group += gl.arange(0, CHUNK // GROUP, layout=gl.SliceLayout(0, gl.SliceLayout(1, LG)))[None, None, :]
        group += _outputs(tile, N, BN, WIDE, gl.SliceLayout(0, gl.SliceLayout(2, LG)))[None, :, None] * (K // GROUP)
        scale = gl.load(scales + group)
        if FORM == Q4_K:
            pair = gl.load(supers + group // 8)
            unit = (pair & 0xFFFF).to(gl.uint16).to(gl.float16, bitcast=True).to(gl.float32)
            least = ((pair >> 16) & 0xFFFF).to(gl.uint16).to(gl.float16, bitcast=True).to(gl.float32)
            step = unit * (scale & 0xFF).to(gl.float32)
            floor = least * ((scale >> 8) & 0xFF).to(gl.float32)
            value = codes * gl.expand_dims(step, 3) - gl.expand_dims(floor, 3)
        elif FORM == Q6_K:
            unit = gl.load(supers + group // 16).to(gl.float32)
            value = codes * gl.expand_dims(unit * scale.to(gl.float32), 3)
        else:
            value = codes * gl.expand_dims(scale.to(gl.float32), 3)
        target.store(value.reshape([NW, WIDE, CHUNK]).to(gl.bfloat16))


@gluon.jit
def _added(
    held, first,
    R: gl.constexpr, BN: gl.constexpr, SEGS: gl.constexpr, EACH: gl.constexpr, NW: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """The sums of all chunks in order, EACH a segment, [1, R, BN], of outputs from `first`.

    `held`: float32 [NW, rows, outputs] a round.
    """
    total = gl.zeros([1, R, BN], gl.float32, L)
    for segment in gl.static_range(SEGS):
        own = gl.zeros([1, R, BN], gl.float32, L)
        for chunk in gl.static_range(segment * EACH, segment * EACH + EACH):
            one = held[chunk // NW].slice(chunk % NW, 1, dim=0)
            own = own + one.slice(0, R, dim=1).slice(first, BN, dim=2).load(L)
        total = total + own
    return total


@gluon.jit
def product_few(
    x, w, scales, supers, bias, gain, squares, out, ld, eps, residual_scale,
    M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, FORM: gl.constexpr, EPI: gl.constexpr, BIAS: gl.constexpr,
    ACT: gl.constexpr, NORMED: gl.constexpr, SEGS: gl.constexpr, CHUNK: gl.constexpr, R: gl.constexpr,
    BN: gl.constexpr, SP: gl.constexpr, NW: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """`product` of few rows for STORE, SUMS, GATED and ADD. Programs: (tiles of N, tiles of R rows).

    NORMED: x is the residual, float32 [M, K], normed here with `gain` float32 [K] and `squares`. ADD: out is the
    residual, float32 [M, N], which grows by what `norm` would have added; the sums of its new squares go to `squares`
    float32 [M, N / SQUARES]. SP is K / SQUARES rounded up to a power of two. NW warps take a chunk each, in rounds.
    R, at most 16 and a power of two, is rows of a program: fewer than an instruction's 16 are repeated.
    """
    if PDL:
        gdc_launch_dependents()
    CHUNKS: gl.constexpr = K // CHUNK
    ROUNDS: gl.constexpr = (CHUNKS + NW - 1) // NW
    WIDE: gl.constexpr = 2 * BN if EPI == GATED else BN  # outputs of the weights: gates first, then ups
    HELD: gl.constexpr = 8 if R < 16 else 16
    C: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NW, 1, 1], [1, 16, 8])
    LA: gl.constexpr = gl.DotOperandLayout(0, C, 4)
    LB: gl.constexpr = gl.DotOperandLayout(1, C, 4)
    # Lanes read 4 rows of 32 bytes at a time: these come from different banks.
    SW: gl.constexpr = gl.SwizzledSharedLayout(16, 1 if CHUNK >= 64 else 2, 4 if CHUNK >= 64 else 2, [2, 1, 0])
    SH: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    ACROSS: gl.constexpr = BN if BN < 32 else 32
    L: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 32 // ACROSS, ACROSS], [1, NW, 1], [2, 1, 0])
    tile, m0 = gl.program_id(0), gl.program_id(1) * R

    weights = ()  # of each round apart: views of one would cost a barrier each
    for i in gl.static_range(ROUNDS):
        weights = weights + (gl.allocate_shared_memory(gl.bfloat16, [NW, WIDE, CHUNK], SW),)
        _stage(weights[i], w, scales, supers, tile, i * NW, FORM, N, K, CHUNK, CHUNKS, NW, BN, WIDE)
    if FORM == BF16:
        async_copy.commit_group()
    SIZE: gl.constexpr = 4 if NORMED else 8  # neighbours of x that a thread brings at once: 16 bytes
    LX: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, SIZE], [1, 1, 32 // (CHUNK // SIZE), CHUNK // SIZE], [NW, 1, 1, 1], [3, 2, 1, 0]
    )
    warp = gl.arange(0, NW, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LX))))[:, None, None, None]
    LR: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LX)))
    row = gl.minimum(m0 + gl.arange(0, R, layout=LR), M - 1)[None, None, :, None]
    k = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LX))))[None, None, None, :]
    gains = ()
    for i in gl.static_range(ROUNDS):
        if NORMED:
            gains = gains + (gl.load(gain + gl.minimum(i * NW + warp, CHUNKS - 1) * CHUNK + k),)
    if PDL:
        gdc_wait()
    SX: gl.constexpr = gl.SwizzledSharedLayout(16, 1 if CHUNK >= 64 else 2, 4 if CHUNK >= 64 else 2, [3, 2, 1, 0])
    inputs = ()  # bf16 [NW, 1, R, CHUNK] in shared memory, a chunk of all rows a warp
    loaded = ()
    for i in gl.static_range(ROUNDS):
        from_ = x + row * K + gl.minimum(i * NW + warp, CHUNKS - 1) * CHUNK + k
        if NORMED:
            loaded = loaded + (gl.load(from_, cache_modifier=".cg"),)
        else:
            inputs = inputs + (gl.allocate_shared_memory(gl.bfloat16, [NW, 1, R, CHUNK], SX),)
            async_copy.async_copy_global_to_shared(inputs[i], from_)
    if NORMED:
        scale = gl.convert_layout(_row_scales(squares, m0, eps, M, K, R, SP, NW), LR)[None, None, :, None]
        for i in gl.static_range(ROUNDS):
            value = (loaded[i] * scale * gains[i]).to(gl.bfloat16)
            inputs = inputs + (gl.allocate_shared_memory(gl.bfloat16, [NW, 1, R, CHUNK], SX, value),)
    else:
        async_copy.commit_group()
    m = m0 + gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    o = tile * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    ok = (m < M) & (o < N)
    here = m * ld + o
    if EPI == ADD:
        before = gl.load(out + here, mask=ok, other=0.0, cache_modifier=".cg")
    if FORM == BF16 or not NORMED:
        async_copy.wait_group(0)
    filler = gl.zeros([NW, 16, CHUNK], gl.bfloat16, LA).reshape([NW, 16 // R, R, CHUNK])
    held = ()
    for i in gl.static_range(ROUNDS):
        value, _ = gl.broadcast(inputs[i].load(filler.type.layout), filler)  # R rows, again and again
        left = gl.convert_layout(value.reshape([NW, 16, CHUNK]), LA, assert_trivial=True)
        right = weights[i].permute((0, 2, 1)).load(LB)
        sums = mma_v2(_left(left, C), _right(right, C), gl.zeros([NW, 16, WIDE], gl.float32, C))
        if R < 16:
            sums, _ = gl.split(gl.permute(sums.reshape([NW, 2, 8, WIDE]), (0, 2, 3, 1)))
        held = held + (gl.allocate_shared_memory(gl.float32, [NW, HELD, WIDE], SH, sums),)
    total = _added(held, 0, R, BN, SEGS, CHUNKS // SEGS, NW, L)
    if EPI == GATED:
        total = activated(total, _added(held, BN, R, BN, SEGS, CHUNKS // SEGS, NW, L), ACT)
    if BIAS:
        total = total + gl.load(bias + o, mask=o < N, other=0.0)
    if EPI == ADD:
        total = before + total * residual_scale
        square = gl.where(ok, total * total, 0.0)
        PARTS: gl.constexpr = BN // SQUARES
        for level in gl.static_range(1, 16):
            if (SQUARES >> level) > 0:
                square = gl.sum(square.reshape([1, R, PARTS, SQUARES >> level, 2]), axis=4)
    gl.store(out + here, total.to(out.dtype.element_ty), mask=ok)  # STORE, GATED: bf16; SUMS, ADD: float32
    if EPI == ADD:
        left_over = square.reshape([1, R, PARTS])
        LP: gl.constexpr = left_over.type.layout
        mp = m0 + gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, LP)))[None, :, None]
        part = tile * PARTS + gl.arange(0, PARTS, layout=gl.SliceLayout(0, gl.SliceLayout(1, LP)))[None, None, :]
        gl.store(squares + mp * (N // SQUARES) + part, left_over, mask=(mp < M) & (part < N // SQUARES))
