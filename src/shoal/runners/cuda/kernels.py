"""The Triton kernels of one step but attention's and mixtures', which have files of their own.

Their order of sums depends on the shape of the model only, never on the batch. Letters in shapes: R rows (one fed
token each), H hidden size, K inputs and N outputs of a product, V vocabulary, D head size, G query heads of one KV
head, T block-table entries of a sequence.

Three rules keep a row's bits equal for every number of rows beside it:
- A product cuts K into segments of equal length (`SEGS`), and these into chunks of `CHUNK` inputs. A chunk is one chain
  of tensor-core instructions from zero; the chunks of a segment are added in order, and so are the segments, whether
  a program walks them, each segment has a program of its own, or (few rows, `kernels_few.py`) warps share the chunks.
- Attention cuts a sequence into splits of `SPLIT` tokens at fixed places. `_partial` computes a split, `_merge` adds
  it to those before it; a lone row, a tile of prompt rows and the readers of a shared trunk all go through these two.
- Whatever sums a row is one program a row, of one shape; a norm's squares are summed as a written-out tree
  (`row_sums`), so that the product before may begin it and the product behind may end it.
PDL (dependent launch) lets a kernel start while the one before it ends: each waits before it reads or writes anything.
Fused multiply-add is off (`enable_fp_fusion=False` at each launch): a compiler would contract differently in each
kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BF16 = tl.constexpr(0)  # how a weight is stored, see `weights.py`
Q8_0 = tl.constexpr(1)
Q4_0 = tl.constexpr(2)
Q4_K = tl.constexpr(3)
Q6_K = tl.constexpr(4)

STORE = tl.constexpr(0)  # what a product does with its sums: bf16 out
SUMS = tl.constexpr(1)  # the sums themselves, or those of each segment, float32, which the next norm adds in order
GATED = tl.constexpr(2)  # bf16 activation(gate) * up
PICK = tl.constexpr(3)  # the largest of the tile, and the logits themselves where asked for
ADD = tl.constexpr(4)  # the residual grows by them, and the squares of what it is then are left for the next norm
SQUARES = tl.constexpr(8)  # neighbours of a row whose squares are summed where they come about


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
    row = tl.program_id(0)
    at = tl.arange(0, HP)
    inside = at < H
    if NORM:
        gain = tl.load(weight + at, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    source = tl.load(rows + row) if GATHER else row
    value = tl.load(x + source * H + at, mask=inside, other=0.0)
    if SEGS > 0:
        total = tl.zeros([HP], tl.float32)
        for s in tl.static_range(SEGS):
            total = total + tl.load(parts + s * part_stride + source * H + at, mask=inside, other=0.0)
        if BIAS:
            total = total + tl.load(bias + at, mask=inside, other=0.0)
        if POST:
            total = _rms(total, H, HP, eps) * tl.load(post + at, mask=inside, other=0.0)
        value = value + total * residual_scale
        tl.store(x + source * H + at, value, mask=inside)
    if NORM:
        normed = _rms(value, H, HP, eps) * gain
        tl.store(out + row * H + at, normed.to(tl.bfloat16), mask=inside)


@triton.jit
def row_sums(value, N: tl.constexpr):
    """The sums of rows [R, N] as [R], N a power of two: of neighbours, then of neighbours among these, and so on.

    Of two there is one order; for more, `tl.sum` has one for each way in which a tensor lies in threads. Zeros at the
    end change nothing, and a row may be summed in parts of a power of two, and then the sums of the parts.
    """
    R: tl.constexpr = value.shape[0]
    for level in tl.static_range(1, 16):
        if (N >> level) > 0:
            value = tl.sum(value.reshape([R, N >> level, 2]), axis=2)
    return value.reshape([R])


@triton.jit
def _rms(value, SIZE: tl.constexpr, PADDED: tl.constexpr, eps):
    """A row [PADDED], zeros behind SIZE, over the root of its mean square."""
    squares = row_sums((value * value).reshape([1, PADDED]), PADDED)
    return value * tl.sum(tl.rsqrt(squares / SIZE + eps), axis=0)


@triton.jit
def _weights(w, scales, supers, base, FORM: tl.constexpr, R: tl.constexpr, BK: tl.constexpr):
    """A tile of weights, bf16 [R, BK]: BK neighbours in K each from element `base` [R] on, a multiple of BK or 32."""
    if FORM == BF16:
        return tl.load(w + base[:, None] + tl.arange(0, BK)[None, :])
    if FORM == Q4_0 or FORM == Q4_K:  # of 32 inputs the first 16 are the low halves of 16 bytes
        packed = tl.load(w + (base // 2)[:, None] + tl.arange(0, BK // 2)[None, :]).to(tl.uint8, bitcast=True)
        packed = packed.reshape([R, BK // 32, 16])
        codes = tl.join(packed & 15, packed >> 4).permute(0, 1, 3, 2).reshape([R, BK]).to(tl.float32)
    else:
        codes = tl.load(w + base[:, None] + tl.arange(0, BK)[None, :]).to(tl.float32)
    if FORM == Q4_0:
        codes = codes - 8.0
    GROUP: tl.constexpr = 16 if FORM == Q6_K else 32
    group = (base // GROUP)[:, None] + tl.arange(0, BK // GROUP)[None, :]
    scale = tl.load(scales + group)
    codes = codes.reshape([R, BK // GROUP, GROUP])
    if FORM == Q4_K:  # a byte of scale and a byte of minimum each 32 inputs, in units of two f16 each 256
        pair = tl.load(supers + group // 8)
        unit = (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        least = ((pair >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        step = unit * (scale & 0xFF).to(tl.float32)
        floor = least * ((scale >> 8) & 0xFF).to(tl.float32)
        value = codes * step[:, :, None] - floor[:, :, None]
    elif FORM == Q6_K:
        unit = tl.load(supers + group // 16).to(tl.float32)
        value = codes * (unit * scale.to(tl.float32))[:, :, None]
    else:
        value = codes * scale.to(tl.float32)[:, :, None]
    return value.reshape([R, BK]).to(tl.bfloat16)


@triton.jit
def sums(
    x, w, scales, supers, row, n, segment,
    K: tl.constexpr, SEGS: tl.constexpr, EACH: tl.constexpr, CHUNK: tl.constexpr, FORM: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Outputs n [BN] of rows `row` [BM] of x, float32 [BN, BM]: over EACH segments from `segment` on, of SEGS.

    BK is CHUNK or a part of it.
    """
    LOADS: tl.constexpr = CHUNK // BK
    LENGTH: tl.constexpr = K // SEGS // BK  # loads of a segment
    total = tl.zeros([BN, BM], tl.float32)
    own = tl.zeros([BN, BM], tl.float32)  # of the segment
    acc = tl.zeros([BN, BM], tl.float32)  # of the chunk
    for i in range(EACH * LENGTH):  # one loop over all, so that loads run ahead across the ends of segments
        k = (segment * LENGTH + i) * BK
        if LOADS == 1:  # a zero that is seen: of `0 + a product` to be added a compiler makes one chain with all before
            acc = tl.where(i < 0, total, 0.0)
        b = tl.load(x + row[None, :] * K + (k + tl.arange(0, BK))[:, None])
        acc = tl.dot(_weights(w, scales, supers, n * K + k, FORM, BN, BK), b, acc)
        if LOADS == 1:
            own = own + acc
        else:  # acc not in an `if` of its own: there Triton 3.6 reads it while the instructions that write it run
            ends = i % LOADS == LOADS - 1
            own = own + tl.where(ends, acc, 0.0)
            acc = tl.where(ends, 0.0, acc)
        if i % LENGTH == LENGTH - 1:
            total = total + own
            own = tl.zeros([BN, BM], tl.float32)
    return total


@triton.jit
def activated(gate, up, ACT: tl.constexpr):
    """act(gate) * up: SiLU (0), GELU in its tanh form (1), or the clipped kind of gpt-oss (2)."""
    if ACT == 2:
        gate, up = tl.minimum(gate, 7.0), tl.minimum(tl.maximum(up, -7.0), 7.0)
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    if ACT == 0:
        return gate / (1.0 + tl.exp(-gate)) * up
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-2.0 * inner)) * up


@triton.jit
def _store_gated(out, total, tile, m, M, ld, N: tl.constexpr, ACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """out bf16 [M, ld]: activation(gate) * up of the sums [BN, BM], whose first half are gates."""
    gate, up = total.reshape([2, BN // 2, BM]).permute(1, 2, 0).split()
    inner = tile * (BN // 2) + tl.arange(0, BN // 2)
    place = m[None, :].to(tl.int64) * ld + inner[:, None]
    inside = (m < M)[None, :] & (inner < N)[:, None]
    tl.store(out + place, activated(gate, up, ACT).to(tl.bfloat16), mask=inside)


@triton.jit
def product(
    x, w, scales, supers, bias, shares, out, best, best_at, M, ld, cap, logit_scale,
    N: tl.constexpr, K: tl.constexpr, SEGS: tl.constexpr, SPLITK: tl.constexpr, CHUNK: tl.constexpr,
    FORM: tl.constexpr, EPI: tl.constexpr,
    BIAS: tl.constexpr, SHARED: tl.constexpr, ACT: tl.constexpr, CAPPED: tl.constexpr, LOGITS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x bf16 [M, K] times w [N, K]. Programs: (tiles of N, tiles of M, SPLITK).

    STORE: out bf16 [M, ld], whose first N columns are written. SUMS: out float32 [SPLITK, M, N], where SPLITK is 1 or
    SEGS, and what is left to add then. GATED: w is [2 N, K], gates first; out bf16 [M, N]. PICK: best float32 and
    best_at int32 [M, tiles], NaN where a logit is not finite; with LOGITS also out float32 [M, N]. SHARED multiplies
    the sums of a row by shares[row], float32 [M].

    Weights are the left operand, so that BN, 64 or more, fills the instruction's 64 rows and a few rows of x its 16
    columns: one instruction for every M. (A tile of 16 rows of x on the left would take another one, whose sums
    differ.)
    """
    tile, ps = tl.program_id(0), tl.program_id(2)
    EACH: tl.constexpr = SEGS // SPLITK
    j = tl.arange(0, BN)
    if EPI == GATED:  # half of the tile are gates, the other half what they multiply
        n = tile * (BN // 2) + j % (BN // 2)
        n_in = (tl.minimum(n, N - 1) + tl.where(j < BN // 2, 0, N)).to(tl.int64)
    else:
        n = tile * BN + j
        n_in = tl.minimum(n, N - 1).to(tl.int64)  # outputs past the end repeat the last
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    row = tl.minimum(m, M - 1)  # rows past the end too: no masks in the loop
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = sums(x, w, scales, supers, row, n_in, ps * EACH, K, SEGS, EACH, CHUNK, FORM, BM, BN, BK)
    if BIAS:
        total = total + tl.load(bias + n, mask=n < N, other=0.0)[:, None]
    if SHARED:
        total = total * tl.load(shares + row)[None, :]
    if EPI == GATED:
        _store_gated(out, total, tile, m, M, ld, N, ACT, BM, BN)
    else:
        here = m[None, :].to(tl.int64) * ld + n[:, None]
        ok = (m < M)[None, :] & (n < N)[:, None]
        if EPI == STORE:
            tl.store(out + here, total.to(tl.bfloat16), mask=ok)
        elif EPI == SUMS:
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
