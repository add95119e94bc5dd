"""The product of many rows, in Gluon: rows of a prompt, or of a large batch.

Warps have parts: one brings tiles of rows and of weights to shared memory with the copy engine (TMA), in a ring, also
those of the next tile of outputs while this one is written; two groups of four multiply 64 rows each with `wgmma`.
While one group adds a chunk to its segment, the other's instructions run: the adding, which keeps the bits of every
other product (`kernels.py` has the rules and the letters of shapes), costs little then.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from shoal.runners.cuda.kernels import ADD, GATED, PICK, SUMS, activated

GROUP_ROWS = gl.constexpr(64)  # rows of one group of warps: what an instruction takes
LOAD = gl.constexpr(64)  # inputs of one load: 128 bytes, as wide as shared memory is swizzled


@gluon.jit
def _place(tile, m_tiles, n_tiles, WIDE: gl.constexpr):
    """The first row and output of a tile, and its part of K. Neighbours have the same weights."""
    return tile % m_tiles * (2 * GROUP_ROWS), tile // m_tiles % n_tiles * WIDE, tile // (m_tiles * n_tiles)


@gluon.jit
def _bring(
    x, w, rows_held, weights_held, full, empty, m_tiles, n_tiles,
    N: gl.constexpr, K: gl.constexpr, SPLITK: gl.constexpr, BN: gl.constexpr, WIDE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Ask for all tiles of rows and weights that this program multiplies, as places of the ring become free."""
    LOADS: gl.constexpr = K // SPLITK // LOAD
    count = 0
    for tile in range(gl.program_id(0), m_tiles * n_tiles * SPLITK, gl.num_programs(0)):
        m0, n0, part = _place(tile, m_tiles, n_tiles, WIDE)
        behind = n0 + (BN // 2 if WIDE == BN else N)  # the second half: the next outputs, or the ups of these gates
        for load in range(LOADS):
            stage, k = count % STAGES, (part * LOADS + load) * LOAD
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(ready, (2 * GROUP_ROWS + BN) * LOAD * 2)
            tma.async_copy_global_to_shared(x, [m0, k], ready, rows_held.index(2 * stage))
            tma.async_copy_global_to_shared(x, [m0 + GROUP_ROWS, k], ready, rows_held.index(2 * stage + 1))
            tma.async_copy_global_to_shared(w, [n0, k], ready, weights_held.index(2 * stage))
            tma.async_copy_global_to_shared(w, [behind, k], ready, weights_held.index(2 * stage + 1))
            count += 1


@gluon.jit
def _pick(
    total, m, n, out, ld, best, best_at, tile, tiles, M, N, cap, CAPPED: gl.constexpr, LOGITS: gl.constexpr
):  # fmt: skip
    """What `kernels.product` does with logits [64, BN] of rows m [64] and tokens n [1, BN]."""
    if CAPPED:
        total = cap * (2.0 / (1.0 + gl.exp(-2.0 * total / cap)) - 1.0)
    inside = (n < N) & (m >= 0)[:, None]
    if LOGITS:
        gl.store(out + m.to(gl.int64)[:, None] * ld + n, total, mask=inside & (m < M)[:, None])
    finite = gl.abs(total) < float("inf")  # false for NaN too
    bad = gl.max((inside & (finite == 0)).to(gl.int32), axis=1) > 0
    shown = gl.where(inside & finite, total, float("-inf"))
    most = gl.max(shown, axis=1)
    where = gl.min(gl.where(shown == most[:, None], n + m[:, None] * 0, 2147483647), axis=1)
    gl.store(best + m * tiles + tile, gl.where(bad, float("nan"), most), mask=m < M)
    gl.store(best_at + m * tiles + tile, where, mask=m < M)


@gluon.jit
def _multiply(
    rows_held, weights, out_held, full, empty, bias, out, best, best_at, M, ld, m_tiles, n_tiles, cap, scale,
    GROUP: gl.constexpr, N: gl.constexpr, K: gl.constexpr, SEGS: gl.constexpr, SPLITK: gl.constexpr,
    CHUNK: gl.constexpr, EPI: gl.constexpr, BIAS: gl.constexpr, ACT: gl.constexpr, CAPPED: gl.constexpr,
    LOGITS: gl.constexpr, BN: gl.constexpr, WIDE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The sums of one group of warps: rows GROUP * 64 .. of each tile."""
    C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    LOADS: gl.constexpr = CHUNK // LOAD
    count = 0
    for tile in range(gl.program_id(0), m_tiles * n_tiles * SPLITK, gl.num_programs(0)):
        m0, n0, part = _place(tile, m_tiles, n_tiles, WIDE)
        m0 += GROUP * GROUP_ROWS
        total = gl.zeros([GROUP_ROWS, BN], gl.float32, C)
        for _ in range(SEGS // SPLITK):
            own = gl.zeros([GROUP_ROWS, BN], gl.float32, C)
            for _ in range(K // SEGS // CHUNK):
                acc = warpgroup_mma_init(gl.zeros([GROUP_ROWS, BN], gl.float32, C))
                for load in gl.static_range(LOADS):
                    stage = (count + load) % STAGES
                    mbarrier.wait(full.index(stage), (count + load) // STAGES & 1)
                    left, right = rows_held.index(2 * stage + GROUP), weights.index(stage).permute((1, 0))
                    acc = warpgroup_mma(left, right, acc, use_acc=load > 0, is_async=True)
                own = own + warpgroup_mma_wait(0, (acc,))
                for load in gl.static_range(LOADS):
                    mbarrier.arrive(empty.index((count + load) % STAGES))
                count += LOADS
            total = total + own
        if EPI == GATED:
            gate, up = gl.split(gl.permute(total.reshape([GROUP_ROWS, 2, WIDE]), (0, 2, 1)))
            result = activated(gate, up, ACT)
        else:
            result = total
        L: gl.constexpr = result.type.layout
        row = m0 + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, L))
        m = row[:, None]
        n = (n0 + gl.arange(0, WIDE, layout=gl.SliceLayout(0, L)))[None, :]
        if BIAS:
            result = result + gl.load(bias + n, mask=n < N, other=0.0)
        if EPI == PICK:
            _pick(result * scale, row, n, out, ld, best, best_at, n0 // WIDE, n_tiles, M, N, cap, CAPPED, LOGITS)
        elif EPI == SUMS:
            gl.store(out + (part * M + m).to(gl.int64) * ld + n, result, mask=(m < M) & (n < N))
        elif EPI == ADD:
            place = out + m.to(gl.int64) * ld + n
            before = gl.load(place, mask=(m < M) & (n < N), other=0.0)
            gl.store(place, before + result * scale, mask=(m < M) & (n < N))
        else:
            tma.store_wait(0)  # of the tile before
            out_held.store(result.to(gl.bfloat16))
            fence_async_shared()
            tma.async_copy_shared_to_global(out, [m0, n0], out_held)
    if EPI != PICK and EPI != SUMS and EPI != ADD:
        tma.store_wait(0)


@gluon.jit
def product_many(
    x, w, bias, out, best, best_at, M, ld, m_tiles, n_tiles, cap, scale,
    N: gl.constexpr, K: gl.constexpr, SEGS: gl.constexpr, SPLITK: gl.constexpr, CHUNK: gl.constexpr,
    EPI: gl.constexpr, BIAS: gl.constexpr, ACT: gl.constexpr, CAPPED: gl.constexpr, LOGITS: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`product` of many rows, weights in bf16. Programs take tiles in turns.

    x is a descriptor of bf16 [rows, K] in boxes of [64, LOAD], w of [N, K] ([2 N, K] for GATED) in boxes of
    [BN / 2, LOAD]. A tile is 128 rows and BN outputs, or for GATED BN / 2 gates and their ups. For STORE and GATED out
    is a descriptor of bf16 [M, N] in boxes of [64, outputs of a tile]. ADD: out is the residual, float32 [M, N], which
    grows by the sums times `scale`; for PICK `scale` is that of logits.
    """
    WIDE: gl.constexpr = BN // 2 if EPI == GATED else BN
    rows_held = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, GROUP_ROWS, LOAD], x.layout)
    weights_held = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, BN // 2, LOAD], w.layout)
    weights = weights_held._reinterpret(gl.bfloat16, [STAGES, BN, LOAD], w.layout)
    if EPI == PICK or EPI == SUMS or EPI == ADD:
        first, second = rows_held.index(0), rows_held.index(0)  # nobody writes there
    else:
        out_held = gl.allocate_shared_memory(gl.bfloat16, [2, GROUP_ROWS, WIDE], out.layout)
        first, second = out_held.index(0), out_held.index(1)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (rows_held, weights, first, full, empty, bias, out, best, best_at, M, ld, m_tiles, n_tiles,
                         cap, scale, 0, N, K, SEGS, SPLITK, CHUNK, EPI, BIAS, ACT, CAPPED, LOGITS, BN, WIDE, STAGES)),
            (_multiply, (rows_held, weights, second, full, empty, bias, out, best, best_at, M, ld, m_tiles, n_tiles,
                         cap, scale, 1, N, K, SEGS, SPLITK, CHUNK, EPI, BIAS, ACT, CAPPED, LOGITS, BN, WIDE, STAGES)),
            (_bring, (x, w, rows_held, weights_held, full, empty, m_tiles, n_tiles, N, K, SPLITK, BN, WIDE, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
