"""The Triton kernels of a mixture of experts: rows are grouped by expert, so that its weights are read once a step.

R rows go through U of E experts each: row r and its j-th expert are pair r * U + j. What a pair gives depends on its
row and expert only: the products are those of `kernels.sums`, one column a pair, and the U outputs of a row are added
by `kernels.norm` in the order of the choice.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shoal.runners.cuda.kernels import GATED, activated, sums

SOFTMAX = tl.constexpr(0)  # how a router's outputs become scores, see `decoder.Mixture`
SIGMOID = tl.constexpr(1)
CHOSEN = tl.constexpr(2)


@triton.jit
def route(
    scores, bias, selection, expert_scales, slots, chosen, weights, shares, spare_slot, scale,
    E: tl.constexpr, EP: tl.constexpr, U: tl.constexpr, UP: tl.constexpr, WIDTH: tl.constexpr,
    SCORING: tl.constexpr, BIAS: tl.constexpr, SELECTION: tl.constexpr, SCALED: tl.constexpr, NORMALISE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Choose the experts of each row. One program a row; EP and UP are E and U rounded up to powers of two.

    scores float32 [R, WIDTH], the router's sums: E of experts, and with WIDTH = E + 1 that of the shared
    expert's gate, whose sigmoid goes to shares [R]. chosen int32 [R, U], weights float32 [R, U]; rows that only fill up
    a bucket, those of `spare_slot`, choose -1, which is nobody. Of equals the lowest expert is taken.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    at = tl.arange(0, EP)
    inside = at < E
    raw = tl.load(scores + row * WIDTH + at, mask=inside, other=0.0)
    if BIAS:
        raw = raw + tl.load(bias + at, mask=inside, other=0.0)
    raw = tl.where(inside, raw, float("-inf"))
    if SCORING == SOFTMAX:
        grown = tl.exp(raw - tl.max(raw, axis=0))
        score = grown / tl.sum(grown, axis=0)
    elif SCORING == SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-raw))
    else:
        score = raw
    rank = score
    if SELECTION:
        rank = rank + tl.load(selection + at, mask=inside, other=0.0)
    rank = tl.where(rank == rank, rank, -1e30)
    rank = tl.where(inside, rank, float("-inf"))
    j = tl.arange(0, UP)
    experts = tl.full([UP], -1, tl.int32)
    picked = tl.full([UP], float("-inf") if SCORING == CHOSEN else 0.0, tl.float32)
    for u in tl.static_range(U):
        best = tl.min(tl.where(rank == tl.max(rank, axis=0), at, EP), axis=0)
        experts = tl.where(j == u, best, experts)
        picked = tl.where(j == u, tl.sum(tl.where(at == best, score, 0.0), axis=0), picked)
        rank = tl.where(at == best, float("-inf"), rank)
    if SCORING == CHOSEN:
        picked = tl.exp(picked - tl.max(picked, axis=0))
        picked = picked / tl.sum(picked, axis=0)
    if NORMALISE:
        picked = picked / tl.sum(picked, axis=0)
    picked = picked * scale
    if SCALED:
        picked = picked * tl.load(expert_scales + experts, mask=j < U, other=0.0)
    real = tl.load(slots + row) != spare_slot
    tl.store(chosen + row * U + j, tl.where(real, experts, -1), mask=j < U)
    tl.store(weights + row * U + j, picked, mask=j < U)
    if WIDTH > E:
        gate = tl.load(scores + row * WIDTH + E)
        tl.store(shares + row, 1.0 / (1.0 + tl.exp(-gate)))


@triton.jit
def list_pairs(chosen, lists, counts, R, PAIRS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """For each expert its pairs, in order: lists int32 [E, R], counts int32 [E]. One program an expert."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.program_id(0)
    count = expert * 0
    for begin in range(0, PAIRS, CHUNK):
        pair = begin + tl.arange(0, CHUNK)
        mine = (tl.load(chosen + pair, mask=pair < PAIRS, other=-1) == expert).to(tl.int32)
        place = count + tl.cumsum(mine, axis=0) - 1
        tl.store(lists + expert * R + place, pair, mask=mine > 0)
        count += tl.sum(mine, axis=0)
    tl.store(counts + expert, count)


@triton.jit
def deal_tiles(
    counts, work, E: tl.constexpr, EP: tl.constexpr, ITEMS: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr
):
    """Cut the lists into tiles of at most BM pairs: work int32 [ITEMS, 3] is (expert, first, how many; 0: no work).

    Programs: E, each for its own tiles, and one more for the items that are left.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.program_id(0)
    at = tl.arange(0, EP)
    count = tl.load(counts + at, mask=at < E, other=0)
    begin = tl.sum(tl.where(at < expert, (count + BM - 1) // BM, 0), axis=0)
    mine = tl.sum(tl.where(at == expert, count, 0), axis=0)  # 0 for the last program
    end = begin + (mine + BM - 1) // BM
    if expert == E:
        end = ITEMS + 0 * begin
    for item in range(begin, end):
        first = (item - begin) * BM
        tl.store(work + item * 3, tl.minimum(expert, E - 1))
        tl.store(work + item * 3 + 1, first)
        tl.store(work + item * 3 + 2, tl.maximum(tl.minimum(mine - first, BM), 0))


@triton.jit
def expert_product(
    x, w, scales, supers, bias, work, lists, weights, out, R,
    N: tl.constexpr, K: tl.constexpr, SEGS: tl.constexpr, CHUNK: tl.constexpr, U: tl.constexpr, FORM: tl.constexpr,
    EPI: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Pairs of one expert times its weights. Programs: (tiles of N, items of `work`).

    GATED: x bf16 [R, K], w [E, 2 N, K], gates first; out bf16 [R * U, N], a row a pair. Else x bf16 [R * U, K],
    w [E, N, K], and the sums times the pair's weight go to out float32 [U, R, N]. bias float32 [E, rows of w].
    """
    tile, item = tl.program_id(0), tl.program_id(1)
    j = tl.arange(0, BN)
    if EPI == GATED:
        n = tile * (BN // 2) + j % (BN // 2)
        place = tl.minimum(n, N - 1) + tl.where(j < BN // 2, 0, N)
    else:
        n = tile * BN + j
        place = tl.minimum(n, N - 1)
    EACH: tl.constexpr = 2 * N if EPI == GATED else N
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, first, count = tl.load(work + item * 3), tl.load(work + item * 3 + 1), tl.load(work + item * 3 + 2)
    if count > 0:
        i = tl.arange(0, BM)
        pair = tl.load(lists + expert * R + first + tl.minimum(i, count - 1))
        n_in = expert.to(tl.int64) * EACH + place
        row = pair // U if EPI == GATED else pair
        total = sums(x, w, scales, supers, row, n_in, 0, K, SEGS, SEGS, CHUNK, FORM, BM, BN, BK)
        if BIAS:
            total = total + tl.load(bias + n_in)[:, None]
        if EPI == GATED:
            gate, up = total.reshape([2, BN // 2, BM]).permute(1, 2, 0).split()
            inner = tile * (BN // 2) + tl.arange(0, BN // 2)
            ok = (i < count)[None, :] & (inner < N)[:, None]
            value = activated(gate, up, ACT).to(tl.bfloat16)
            tl.store(out + pair[None, :].to(tl.int64) * N + inner[:, None], value, mask=ok)
        else:
            total = total * tl.load(weights + pair)[None, :]
            here = ((pair % U).to(tl.int64) * R + pair // U) * N
            tl.store(out + here[None, :] + n[:, None], total, mask=(i < count)[None, :] & (n < N)[:, None])
