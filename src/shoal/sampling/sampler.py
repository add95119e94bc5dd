"""The choice of the next token: every row of a batch by its own parameters, penalties and seed.

A row's token depends on that row's logits, its `SamplingParams`, its seed and its position, bit for bit: never on
batch mates, their order or their number. Each row is therefore computed by itself; at 50,000 logits a row the calls
into numpy cost little beside the passes over the row, and a row stays in the cache between them.

The definition, with z the logits after penalties, bias and bans, all in float32:

    w = exp((z - max z) / temperature)      the unnormalised probabilities
    top-k    keep the k tokens of largest z
    top-p    keep the fewest tokens, largest w first, that hold at least top_p of what is left
    min-p    keep those with w >= min_p (the largest w is 1)
    draw     the first token in order of id at which the running sum of the kept w exceeds u times their total

Of equals the lower id comes first. Sums are float64, save that those over a whole row add blocks of 256 in float32
first, which leaves a relative error below 1e-6, about that of a float32 `w` itself. No row is ever sorted whole.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.errors import InvalidRequestError
from shoal.splitmix import GOLDEN, MASK, mix
from shoal.types import SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from shoal.sampling.grammar import Constraint
    from shoal.sampling.thinking import ThinkingLimit

Floats: TypeAlias = NDArray[np.float32]
Ids: TypeAlias = NDArray[np.int64]

INVALID_TOKEN = -1
"""Given by `sample` for a row without a usable distribution."""

_BLOCK = 256  # entries summed at once in the walk over a whole row
_BUCKETS_FROM = 4096  # entries from which on grouping them by size is quicker than sorting them
_LOWEST = np.finfo(np.float32).min


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that draws output token `position` (0 is the first) of a request with this `seed`.

    SplitMix64 (Steele, Lea and Flood, 2014) used as a counter-based generator: its finaliser over a counter. The
    finaliser is applied to the seed first, so that the sequences of two seeds do not overlap when the seeds are near.
    The 53 high bits give the number.
    """
    key = mix((seed + GOLDEN) & MASK)
    return float(mix((key + (position + 1) * GOLDEN) & MASK) >> 11) * 2.0**-53


def derive_seed(seed: int, number: int) -> int:
    """A seed for branch `number` of a request with `seed`: 62 bits, far from the seeds of its siblings."""
    return mix((mix(seed & MASK) + number * GOLDEN) & MASK) >> 2


class SamplerState:
    """What sampling keeps for one request: parameters, seed, and the tokens that occurred, for the penalties.

    Invariant: it is a function of the constructor's arguments and the accepted tokens, so a state made anew and given
    the same tokens (a request that was suspended) goes on as the old one would. The number of accepted tokens is the
    position of the next. What occurred is kept as a list of distinct tokens with counts: V never enters.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        vocab_size: int,
        prompt_tokens: Sequence[int] = (),
        eos_ids: Collection[int] = (),
        constraint: Constraint | None = None,
        limit: ThinkingLimit | None = None,
    ) -> None:
        """`eos_ids` are the model's end tokens; with the stop ids they are banned until `min_tokens` are output.

        `constraint` is where the output stands in its grammar, `limit` in its thinking; neither is shared with another
        state.
        Raises `InvalidRequestError` when `logit_bias` names a token that the vocabulary lacks.
        """
        for token in params.logit_bias:
            if token >= vocab_size:
                raise InvalidRequestError(
                    f"logit_bias names token {token}",
                    param="logit_bias",
                    value=token,
                    limit=vocab_size,
                    hint=f"this model has tokens 0 to {vocab_size - 1}",
                )
        self.params = params
        self.seed = seed
        self.constraint = constraint
        self.limit = limit
        self.num_output = 0
        self._bias_ids = np.array(list(params.logit_bias.keys()), np.int64)
        self._bias = np.array(list(params.logit_bias.values()), np.float32)
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
        self._end_ids = np.array(sorted(t for t in ends if t < vocab_size), np.int64)
        self._penalises_output = params.presence_penalty != 0 or params.frequency_penalty != 0
        self._penalises = self._penalises_output or params.repetition_penalty != 1
        prompt = sorted(set(prompt_tokens)) if params.repetition_penalty != 1 else []
        self._slots = {token: slot for slot, token in enumerate(prompt)}
        self._ids = np.array(prompt, np.int64)
        self._counts = np.zeros(len(prompt), np.float32)  # of the output only; a prompt token starts at 0

    def accept(self, token: int) -> None:
        """Record that `token` was appended to the output."""
        self.num_output += 1
        if self.constraint is not None:
            self.constraint.accept(token)
        if self.limit is not None:
            self.limit.accept(token)
        self._count(token)

    def take_forced(self) -> tuple[int, ...]:
        """Tokens that the grammar leaves no choice about, an end token last where it is complete; they are accepted.

        None where log-probabilities are wanted: a token that no pass was run for has none.
        """
        if self.constraint is None or self.params.logprobs is not None:
            return ()
        forced = self.constraint.take_forced()
        for token in forced:
            self.num_output += 1
            if self.limit is not None:
                self.limit.accept(token)
            self._count(token)
        return forced

    def _count(self, token: int) -> None:
        if not self._penalises:
            return
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            more = max(64, slot)
            self._ids = np.concatenate([self._ids, np.zeros(more, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(more, np.float32)])
        self._ids[slot] = token
        self._counts[slot] += 1

    def next_uniform(self) -> float:
        """The number in [0, 1) that draws the next token; the same until `accept`."""
        return uniform(self.seed, self.num_output)

    @property
    def shapes_now(self) -> bool:
        """True when the next token's logits are changed before the choice."""
        occurred = self._penalises and len(self._slots) > 0
        biased = len(self._bias_ids) > 0 or self.constraint is not None
        forced = self.limit is not None and self.limit.forced is not None
        return occurred or biased or forced or self.num_output < self.params.min_tokens

    def shape(self, z: Floats) -> None:
        """Apply penalties, bias and bans to `z`, float32 [V], in place, and last the mask of the grammar."""
        params = self.params
        if self._penalises and self._slots:
            ids, counts = self._ids[: len(self._slots)], self._counts[: len(self._slots)]
            values = z[ids]
            if params.repetition_penalty != 1:
                penalty = np.float32(params.repetition_penalty)
                values = np.where(values > 0, values / penalty, values * penalty)
            if self._penalises_output:
                values -= counts * np.float32(params.frequency_penalty)
                values -= (counts > 0) * np.float32(params.presence_penalty)
            z[ids] = values
        if len(self._bias_ids):
            z[self._bias_ids] += self._bias
        if self.num_output < params.min_tokens:
            z[self._end_ids] = -np.inf
        if self.constraint is not None:
            self.constraint.mask(z)
        token = None if self.limit is None else self.limit.forced
        if token is not None and (self.constraint is None or self.constraint.allows(token)):
            z[:] = -np.inf
            z[token] = 0.0


def sample(logits: Floats, states: Sequence[SamplerState]) -> tuple[Ids, list[TokenLogprob | None]]:
    """Choose a token for each row of `logits`, float32 [n, V], which are left as they are.

    Returns the tokens, int64 [n], and for each row that asked for them its log-probabilities, else None. These are of
    the model's own distribution, the log-softmax of the row as given (as OpenAI reports them): temperature, penalties
    and filters do not change them. `top` has the most likely tokens of that distribution, the chosen one among them or
    not. Temperature 0 takes the arg-max after penalties and bias.

    A row whose largest entry, before or after penalties, is not a finite number (a NaN or +inf anywhere, or nothing
    above -inf) gets `INVALID_TOKEN` and None; its request alone is to end with an error. States are not changed: the
    caller accepts the token once it is part of the output. Raises ValueError unless there are as many states as rows.
    """
    chooser = RowChooser(logits.shape[1])
    chosen = [chooser.choose(row, state) for row, state in zip(logits, states, strict=True)]
    return np.array([token for token, _ in chosen], np.int64), [logprob for _, logprob in chosen]


class RowChooser:
    """Chooses tokens one row after another, as `sample` does for rows at once.

    Its buffers are shared by the rows, so that they stay in the cache.
    """

    def __init__(self, vocab_size: int) -> None:
        self._shaped = np.empty(vocab_size, np.float32)
        self._padded = np.zeros(-(-vocab_size // _BLOCK) * _BLOCK, np.float32)  # zero weights up to whole blocks

    def choose(self, row: Floats, state: SamplerState) -> tuple[int, TokenLogprob | None]:
        """The token for a row, float32 [V], and its log-probability where that was asked for; see `sample`."""
        wanted = state.params.logprobs
        with np.errstate(over="ignore", under="ignore"):  # a logit far below the largest becomes -inf, its weight 0
            z, largest = row, row.max()
            if not math.isfinite(largest):
                return INVALID_TOKEN, None
            if wanted is not None:
                _weigh(row, largest, 1.0, self._padded)
                log_total = float(largest) + math.log(_block_sums(self._padded)[-1])
            if state.shapes_now:
                z = self._shaped
                np.copyto(z, row)
                state.shape(z)
                largest = z.max()
                if not math.isfinite(largest):
                    return INVALID_TOKEN, None
            token = _choose(z, largest, state, self._padded)
            return token, None if wanted is None else _report(row, token, log_total, wanted)


def score(logits: Floats, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Log-probability of `tokens[i]` under row i of `logits`, float32 [n, V], and of the `count` most likely there.

    An empty list when a row's largest entry is not a finite number.
    """
    padded = np.zeros(-(-logits.shape[1] // _BLOCK) * _BLOCK, np.float32)
    scored = []
    with np.errstate(under="ignore"):
        for row, token in zip(logits, tokens, strict=True):
            largest = row.max()
            if not math.isfinite(largest):
                return []
            _weigh(row, largest, 1.0, padded)
            scored.append(_report(row, token, float(largest) + math.log(_block_sums(padded)[-1]), count))
    return scored


def sample_top(ids: Ids, logits: Floats, state: SamplerState) -> int:
    """The token that `sample` chooses for a row of which only the `top_k` largest logits are at hand.

    `ids` rise, `logits` are theirs; for requests whose `SamplingParams.top` is that number. `INVALID_TOKEN` when empty.
    """
    if not len(ids):
        return INVALID_TOKEN
    with np.errstate(over="ignore", under="ignore"):
        return _choose_among(ids, logits, logits.max(), state)


def inverse(temperature: float) -> np.float32:
    """What distances from the largest logit are multiplied by.

    A temperature too small for float32 to hold its inverse must not give 0 * inf.
    """
    return np.float32(min(1 / temperature, 3e38))


def _choose_among(ids: Ids, z: Floats, largest: np.float32, state: SamplerState) -> int:
    """The token among those that top-k left, with logits `z`; `ids` rise."""
    params = state.params
    if params.top_k == 1:
        return int(ids[z.argmax()])
    weights = _weigh(z, largest, params.temperature)
    if params.top_p < 1:
        ids, weights = _nucleus(ids, weights, params.top_p * float(weights.sum(dtype=np.float64)))
    return _draw_among(ids, weights, state)


def _draw_among(ids: Ids, weights: Floats, state: SamplerState) -> int:
    if state.params.min_p > 0:
        kept = (weights >= np.float32(state.params.min_p)).nonzero()[0]
        ids, weights = ids[kept], weights[kept]
    return int(ids[_draw(_running(weights), state.next_uniform())])


def _choose(z: Floats, largest: np.float32, state: SamplerState, padded: Floats) -> int:
    """The token for shaped logits `z` with that finite maximum; `padded` is scratch of whole blocks, zero beyond V."""
    params = state.params
    if params.temperature == 0 or params.top_k == 1:
        return int(z.argmax())
    if 0 < params.top_k < len(z):
        ids = _largest(z, params.top_k)
        return _choose_among(ids, z[ids], largest, state)
    if params.top_p < 1:
        row = _weigh(z, largest, params.temperature, padded)
        ids, weights = _nucleus_of_row(row, float(_block_sums(padded)[-1]), params.top_p, params.min_p)
    elif params.min_p > 0:
        ids = _at_least(z, largest, params.temperature, params.min_p)
        weights = _weigh(z[ids], largest, params.temperature)
    else:
        _weigh(z, largest, params.temperature, padded)
        return _draw_from_row(padded, state.next_uniform())
    return _draw_among(ids, weights, state)


def _weigh(z: Floats, largest: np.float32, temperature: float, out: Floats | None = None) -> Floats:
    """exp((z - largest) / temperature), in the first len(z) entries of `out` where given."""
    out = np.empty(len(z), np.float32) if out is None else out[: len(z)]
    np.subtract(z, largest, out=out)
    if temperature != 1:
        np.multiply(out, inverse(temperature), out=out)
    return np.exp(out, out=out)


def _running(weights: Floats) -> NDArray[np.float64]:
    """Running sums in float64."""
    return weights.astype(np.float64).cumsum()


def _block_sums(padded: Floats) -> NDArray[np.float64]:
    """Running sums of the row's blocks, [blocks]."""
    # einsum is numpy's fastest sum of contiguous rows, and starts no BLAS threads beside the runner's.
    return _running(np.einsum("ij->i", padded.reshape(-1, _BLOCK)))


def _draw(running: NDArray[np.float64], u: float) -> int:
    """First index at which the running sum exceeds u times the total; never one of weight 0."""
    return _search(running, u * float(running[-1]))


def _search(running: NDArray[np.float64], target: float) -> int:
    below_total = math.nextafter(float(running[-1]), 0.0)  # where rounding brought the target up to the total
    return int(running.searchsorted(min(target, below_total), side="right"))


def _draw_from_row(padded: Floats, u: float) -> int:
    """`_draw` over a whole row in two levels, the running sum over blocks and that inside one of them."""
    blocks = _block_sums(padded)
    target = u * float(blocks[-1])
    block = _search(blocks, target)
    inside = target - float(blocks[block - 1]) if block else target
    start = block * _BLOCK
    return start + _search(_running(padded[start : start + _BLOCK]), inside)


def _trim(values: Floats, bound: np.float32, count: int) -> Ids:
    """Indices of the `count` largest values, ascending, where `bound` is the smallest of them; of equals the first."""
    kept = (values >= bound).nonzero()[0]
    surplus = len(kept) - count
    if surplus > 0:
        equal = (values[kept] == bound).nonzero()[0]
        kept = np.delete(kept, equal[-surplus:])
    return kept


def _largest(z: Floats, count: int) -> Ids:
    """Indices of the `count` largest entries above -inf, ascending; fewer when there are fewer; of equals the first."""
    rows = min(32, len(z) // (4 * count))
    if rows >= 4:
        # Each column maximum is an entry of its own, so at least `count` entries reach the count-th largest of them.
        columns = len(z) // rows
        maxima = z[: rows * columns].reshape(rows, columns).max(axis=0)
        floor = np.partition(maxima, columns - count)[columns - count]
    else:
        floor = np.partition(z, len(z) - count)[len(z) - count]
    ids: Ids = (z >= max(floor, _LOWEST)).nonzero()[0]
    if len(ids) <= count:
        return ids
    values = z[ids]
    kept = _trim(values, np.partition(values, len(ids) - count)[len(ids) - count], count)
    return ids.take(kept)


def _at_least(z: Floats, largest: np.float32, temperature: float, min_p: float) -> Ids:
    """Indices of all entries with weight >= min_p, and of few others: the caller compares the weights themselves."""
    # Lower than min_p says by more than the rounding of the weights, and that of the floor itself, could make up.
    floor = float(largest) + temperature * (math.log(min_p) - 1e-3)
    return np.flatnonzero(z >= np.float32(floor - 1e-6 * abs(floor)))


def _nucleus(ids: Ids, weights: Floats, target: float) -> tuple[Ids, Floats]:
    """The fewest tokens, largest weight first, whose weights sum to at least `target`; in order of id like `ids`."""
    inside, above, count = weights, 0.0, 0
    if len(weights) > _BUCKETS_FROM:
        # A flat distribution. The upper half of their bits orders the weights, and tells the few near the edge.
        bucket = weights.view(np.uint32) >> 16
        mass = np.bincount(bucket, weights)[::-1].cumsum()
        target = min(target, float(mass[-1]))  # summed in another order, all of them may fall short by a rounding
        edge = int(mass.searchsorted(target))
        above = float(mass[edge - 1]) if edge else 0.0
        count = int(np.count_nonzero(bucket >= len(mass) - edge))
        inside = weights[bucket == len(mass) - 1 - edge]
    falling = np.sort(inside)[::-1]
    needed = min(int(_running(falling).searchsorted(target - above)), len(falling) - 1) + 1
    if count + needed == len(ids):
        return ids, weights
    kept = _trim(weights, falling[needed - 1], count + needed)
    return ids[kept], weights[kept]


def _nucleus_of_row(row: Floats, total: float, top_p: float, min_p: float) -> tuple[Ids, Floats]:
    """The nucleus of a whole row of weights with that sum, found among the few tokens above a floor.

    Exact because the floor is checked: tokens above it that hold the target contain the nucleus. Where they do not,
    the floor goes down to where what lies below (V tokens at most) cannot hold the rest, and at last to zero. Of a
    nucleus that reaches below `min_p` only the tokens from `min_p` on come back, as the next filter would leave it.
    """
    target, rest = top_p * total, (1 - top_p) * total
    for floor in (rest / 512, rest / (2 * len(row)), 0.0):
        floor = max(floor, min_p)
        ids = (row >= np.float32(floor)).nonzero()[0] if floor else row.nonzero()[0]
        weights = row[ids]
        if float(weights.sum(dtype=np.float64)) >= target:
            return _nucleus(ids, weights, target)
        if floor == min_p:
            break
    return ids, weights


def _report(row: Floats, token: int, log_total: float, count: int) -> TokenLogprob:
    """Log-probability of `token` and of the `count` most likely, largest first, under the log-softmax of `row`."""
    top: tuple[tuple[int, float], ...] = ()
    if count:
        ids = _largest(row, min(count, len(row)))
        order = np.argsort(-row[ids], kind="stable")
        top = tuple((int(i), float(row[i]) - log_total) for i in ids[order])
    return TokenLogprob(token, float(row[token]) - log_total, top)
