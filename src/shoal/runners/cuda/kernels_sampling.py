"""The Triton kernel that draws tokens; letters are those of `kernels.py`."""

from __future__ import annotations

import triton
import triton.language as tl

UNSURE = tl.constexpr(-2)
MARGIN = tl.constexpr(4e-6)  # of a total: more than the sampler's running sums and these can differ by


@triton.jit
def _weights(logits, at, V, largest, scale, usable):
    """The sampler's unnormalised probabilities of tokens `at`, float64, to within the rounding of a float32 `exp`."""
    z = tl.load(logits + at, mask=at < V, other=float("-inf"))
    return tl.where(usable, tl.exp(((z - largest) * scale).to(tl.float64)), 0.0)


@triton.jit
def draw(logits, rows, draws, chosen, V, BLOCK: tl.constexpr):
    """The token that `sampling.sampler` draws from a row, -1 where its largest logit is not finite, UNSURE where
    rounding could make it another. One program a row.

    logits float32 [R, V]; rows int32 [programs]; draws float64 [programs, 3]: what a logit's distance from the largest
    is multiplied by, min-p, and the number in [0, 1) that draws. Sums are float64. The sampler's are of a float32 `exp`
    in blocks of float32, with an error below 1e-6: a token stands if the number's place is MARGIN away from both of
    its ends.
    """
    program = tl.program_id(0)
    row = logits + tl.load(rows + program).to(tl.int64) * V
    scale = tl.load(draws + program * 3).to(tl.float32)
    least = tl.load(draws + program * 3 + 1).to(tl.float32).to(tl.float64)
    number = tl.load(draws + program * 3 + 2)
    i = tl.arange(0, BLOCK)
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    bad = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, V, BLOCK):
        z = tl.load(row + begin + i, mask=begin + i < V, other=float("-inf"))
        bad = bad | (z != z).to(tl.int32)
        most = tl.maximum(most, tl.where(z != z, float("-inf"), z))
    largest = tl.max(most, axis=0)
    usable = (tl.max(bad, axis=0) == 0) & (tl.abs(largest) < float("inf"))
    largest = tl.where(usable, largest, 0.0)
    sums = tl.zeros([BLOCK], tl.float64)
    close = tl.zeros([BLOCK], tl.int32)  # weights that the sampler may find on the other side of min-p
    for begin in range(0, V, BLOCK):
        weight = _weights(row, begin + i, V, largest, scale, usable)
        close = close | (tl.abs(weight - least) < least * MARGIN).to(tl.int32)
        sums += tl.where(weight >= least, weight, 0.0)
    total = tl.sum(sums, axis=0)
    target, margin = total * number, total * MARGIN
    before = number * 0.0
    token = V
    sure = tl.max(close, axis=0) == 0
    for begin in range(0, V, BLOCK):
        weight = _weights(row, begin + i, V, largest, scale, usable)
        weight = tl.where(weight >= least, weight, 0.0)
        running = before + tl.cumsum(weight, axis=0)
        end = tl.max(running, axis=0)
        if (token == V) & (end > target):
            first = tl.min(tl.where(running > target, i, BLOCK), axis=0)
            behind = tl.sum(tl.where(i == first, running, 0.0), axis=0)
            ahead = behind - tl.sum(tl.where(i == first, weight, 0.0), axis=0)
            token = begin + first
            sure = sure & (behind - target > margin) & (target - ahead > margin)
        before = end
    token = tl.where(sure & (token < V), token, UNSURE)
    tl.store(chosen + program, tl.where(usable, token, -1))
