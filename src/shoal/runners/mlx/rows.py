"""Sequences side by side in `mlx-lm`'s caches: they join along the batch axis and leave by selection.

A cache here is one per layer, as `mlx_lm.models.cache` makes them; a `CacheList` holds several. Its *leaves* are of two
sorts: KV (plain or rotating), whose arrays are [B, H, T, D], and recurrent state (`ArraysCache`), arrays [B, ...].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
)

from shoal.runners.plan import SeqId

Item = TypeVar("Item")

BATCHED = (KVCache, RotatingKVCache, ArraysCache)
"""Leaves that can be joined and selected from; exactly these, a subclass may do something else."""


def leaves(caches: Sequence[Any]) -> list[Any]:
    """The caches, lists of caches opened, in order."""
    found: list[Any] = []
    for cache in caches:
        found += leaves(cache.caches) if isinstance(cache, CacheList) else [cache]
    return found


def kv_leaves(caches: Sequence[Any]) -> list[Any]:
    """The leaves that hold KV."""
    return [leaf for leaf in leaves(caches) if not isinstance(leaf, ArraysCache)]


def state_leaves(caches: Sequence[Any]) -> list[ArraysCache]:
    """The leaves that hold recurrent state."""
    return [leaf for leaf in leaves(caches) if isinstance(leaf, ArraysCache)]


def arrays(caches: Sequence[Any]) -> list[mx.array]:
    """All arrays in the caches, for evaluation."""
    found: list[mx.array] = []
    for leaf in leaves(caches):
        parts = leaf.cache if isinstance(leaf, ArraysCache) else leaf.state
        found += [part for part in parts if isinstance(part, mx.array)]
    return found


class Rows:
    """Some sequences in one set of caches, row by row.

    Rows of one length lie in plain caches with an integer offset; rows of different lengths are padded on the left
    and masked, in `mlx-lm`'s batch caches. Invariant: `lengths[i]` tokens of sequence `ids[i]` are in row i, and
    `ahead` more that may have to be taken back.
    """

    def __init__(self, caches: list[Any], ids: list[SeqId], lengths: list[int], *, padded: bool = False) -> None:
        self.caches = caches
        self.ids = ids
        self.lengths = lengths
        self.padded = padded
        self.ahead = 0

    def __len__(self) -> int:
        return len(self.ids)

    # -- joining and leaving ------------------------------------------------------------------------------------

    def join(self, others: Sequence[Rows]) -> None:
        """Take in the rows of `others`, which are used up; padded ones go first, else the order stays.

        All have as many tokens `ahead`. Every array is copied once, however many join: one after the other, the first
        would be copied for each.
        """
        parts = sorted((part for part in (self, *others) if part.ids), key=lambda part: not part.padded)
        if not parts:
            return
        self.ahead = parts[0].ahead
        assert all(part.ahead == self.ahead for part in parts)
        caches = parts[0].caches if len(parts) == 1 else _concatenated_all(parts)
        if caches is not None:
            self.caches, self.padded = caches, parts[0].padded
        else:
            self.caches, self.padded = _padded_all(parts), True
        self.ids = [seq_id for part in parts for seq_id in part.ids]
        self.lengths = [length for part in parts for length in part.lengths]
        self._align()

    def pad(self) -> None:
        """Go over to batch caches, whose rows may have different lengths."""
        if not self.padded:
            self.caches, self.padded = _merged([self]), True

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        if list(rows) == list(range(len(self))):
            return
        self.ids = [self.ids[i] for i in rows]
        self.lengths = [self.lengths[i] for i in rows]
        if not rows:
            self.caches, self.padded, self.ahead = [], False, 0
            return
        chosen = mx.array(list(rows))
        if not self.padded:
            self.caches = [_mapped(cache, lambda leaf: _selected(leaf, chosen)) for cache in self.caches]
            return
        held = [length + self.ahead for length in self.lengths]
        positions, padding = mx.array(held), mx.array([max(held) - count for count in held])
        for leaf in leaves(self.caches):
            if type(leaf) is not BatchKVCache or leaf.empty():
                leaf.filter(chosen)
                continue
            # Its own `filter` asks the device how far its rows are padded, layer by layer.
            keys, values, _, _, longest = leaf.state
            less = longest - max(held)
            leaf.state = keys[:, :, less:][chosen], values[:, :, less:][chosen], positions, padding, max(held)
        self._align()

    def _align(self) -> None:
        """Rows of one length need no padding: back to plain caches, whose steps are cheaper."""
        kv = kv_leaves(self.caches)
        if not self.padded or len(set(self.lengths)) > 1:
            return
        if all(isinstance(leaf, BatchKVCache) and not leaf.empty() for leaf in kv):
            held = self.lengths[0] + self.ahead
            self.caches = [_mapped(cache, lambda leaf: _plain(leaf, held)) for cache in self.caches]
            self.padded = False

    def take_back(self) -> None:
        """Forget the tokens that were fed ahead. Only for caches that can be trimmed."""
        if self.ahead:
            for leaf in leaves(self.caches):
                leaf.trim(self.ahead)
            self.ahead = 0

    def alone(self, row: int) -> Rows:
        """A copy of one row, in plain caches."""
        held = self.lengths[row] + self.ahead
        caches = [_mapped(cache, lambda leaf: _row(leaf, row, held)) for cache in self.caches]
        copy = Rows(caches, [self.ids[row]], [self.lengths[row]])
        copy.ahead = self.ahead
        return copy

    # -- reading ------------------------------------------------------------------------------------------------

    def kv(self, rows: Sequence[int], count: int) -> list[tuple[mx.array, mx.array]]:
        """Copies of K and V, [R, H, count, D], of the last `count` positions of these rows, for each KV leaf.

        Of a shorter row what lies in front of its first position means nothing. Of rotating caches, which must still
        have the positions, one row at a time.
        """
        found = []
        in_order = list(rows) == list(range(len(self)))
        chosen = None if in_order or len(rows) == 1 else mx.array(list(rows))
        for leaf in kv_leaves(self.caches):
            pair, first = _in_order(leaf, rows[0])
            end = pair[0].shape[2] - self.ahead
            assert count <= end, f"{count} positions are asked of a cache of {end}"
            keys, values = (array[:, :, end - count : end] for array in pair)
            if chosen is not None:
                keys, values = keys[chosen], values[chosen]
            elif len(rows) == 1:
                keys, values = keys[first : first + 1], values[first : first + 1]
            found.append((mx.contiguous(keys), mx.contiguous(values)))
        return found

    # -- feeding ------------------------------------------------------------------------------------------------

    def feed(self, model: Callable[..., mx.array], chunks: Sequence[Sequence[int]]) -> None:
        """Compute a chunk of prompt tokens for each row. Only the caches are evaluated: no position reaches the
        projection to the vocabulary.
        """
        fed = [len(chunk) for chunk in chunks]
        longest = max(fed)
        ragged = min(fed) < longest
        if ragged:
            self.pad()
            padding = [longest - count for count in fed]
            for cache in self.caches:
                cache.prepare(lengths=fed, right_padding=padding)
        tokens = mx.array([[*chunk, *([0] * (longest - len(chunk)))] for chunk in chunks])
        model(tokens, cache=self.caches)
        if ragged:
            for cache in self.caches:
                cache.finalize()
        mx.async_eval(arrays(self.caches))
        self.lengths = [length + count for length, count in zip(self.lengths, fed, strict=True)]
        self._align()

    def step(self, model: Callable[..., mx.array], fed: mx.array) -> mx.array:
        """Logits [B, V] after one more token of each row, `fed` [B]. Nothing is evaluated, and `lengths` stay.

        All layers then share one array of positions. Each would add 1 to its own, and small kernels are what a step of
        padded rows waits for; an addition whose result nobody reads is never run.
        """
        logits = model(fed[:, None], cache=self.caches)[:, -1, :]
        if self.padded:
            same = [leaf for leaf in leaves(self.caches) if type(leaf) is BatchKVCache]
            for leaf in same[1:]:
                leaf.offset = same[0].offset
        return logits


@dataclass(frozen=True, slots=True)
class Ahead:
    """A step of some rows that was started before anybody asked for it: what was fed, and what comes out, a row each.

    `best` is fed on; `chosen` is the same with -1 where logits are not finite.
    """

    fed: list[int]
    best: mx.array
    chosen: mx.array

    def of(self, rows: Sequence[int]) -> Ahead:
        """The same of these rows only."""
        picked = mx.array(list(rows))
        return Ahead([self.fed[row] for row in rows], self.best[picked], self.chosen[picked])


def alike(parts: Iterable[Item], size: Callable[[Item], int]) -> list[list[Item]]:
    """Groups by size, of which the smallest is at least half of the largest, so that little is padded."""
    groups: list[list[Item]] = []
    for part in sorted(parts, key=size):
        if groups and size(groups[-1][0]) * 2 >= size(part) and bool(size(groups[-1][0])) == bool(size(part)):
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups


def _mapped(cache: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(cache, CacheList):
        return CacheList(*(_mapped(part, function) for part in cache.caches))
    return function(cache)


def _with_rows(leaf: Any, change: Callable[[mx.array], mx.array]) -> Any:
    """A plain leaf whose arrays are those of `leaf`, changed along the batch axis."""
    if isinstance(leaf, ArraysCache):
        made = ArraysCache(len(leaf.cache))
        made.cache = [None if part is None else change(part) for part in leaf.cache]
        return made
    keys, values, *rest = leaf.state
    if keys is None:
        return leaf
    return type(leaf).from_state((change(keys), change(values), *rest))


def _row(leaf: Any, row: int, length: int) -> Any:
    """A plain leaf of one row, in which `length` tokens are."""
    if isinstance(leaf, BatchRotatingKVCache):
        return leaf.extract(row)
    if isinstance(leaf, BatchKVCache) and not leaf.empty():  # its own `extract` asks the device how far it is padded
        pair = leaf.keys_and_values()
        begin = pair[0].shape[2] - length
        return KVCache.from_state((*(mx.contiguous(array[row : row + 1, :, begin:]) for array in pair), length))
    return _with_rows(leaf, lambda array: array[row : row + 1])


def _selected(leaf: Any, rows: mx.array) -> Any:
    return _with_rows(leaf, lambda array: array[rows])


def _concatenated_all(parts: Sequence[Rows]) -> list[Any] | None:
    """Plain caches of one length as one; None when they are not alike."""
    if any(part.padded or part.lengths[0] != parts[0].lengths[0] for part in parts):
        return None
    joined = [_concatenated(together) for together in zip(*(leaves(part.caches) for part in parts), strict=True)]
    if any(leaf is None for leaf in joined):
        return None
    replacement = iter(joined)
    return [_mapped(cache, lambda _: next(replacement)) for cache in parts[0].caches]


def _padded_all(parts: Sequence[Rows]) -> list[Any]:
    """Batch caches of all rows; of `parts` the padded ones come first."""
    held = [part.caches for part in parts if part.padded]
    plain = [part for part in parts if not part.padded]
    first, *rest = [*held, _merged(plain)] if plain else held
    for caches in rest:
        for mine, theirs in zip(first, caches, strict=True):
            mine.extend(theirs)
    return first


def _merged(parts: Sequence[Rows]) -> list[Any]:
    """Batch caches of the rows of plain ones."""
    rows = [part.alone(i).caches for part in parts for i in range(len(part))]
    return [caches[0].merge(list(caches)) for caches in zip(*rows, strict=True)]


def _concatenated(parts: Sequence[Any]) -> Any | None:
    """Plain leaves as one along the batch axis; None when their insides differ in more than the number of rows."""
    if isinstance(parts[0], ArraysCache):
        made = ArraysCache(len(parts[0].cache))
        for i, held in enumerate(zip(*(leaf.cache for leaf in parts), strict=True)):
            if any((part is None) != (held[0] is None) for part in held):
                return None
            made.cache[i] = None if held[0] is None else mx.concatenate(held)
        return made
    (keys, _, *rest), *others = [leaf.state for leaf in parts]
    if any((other[0] is None) != (keys is None) or other[2:] != tuple(rest) for other in others):
        return None
    if keys is None:
        return parts[0]  # nothing in it yet: it takes any number of rows
    pairs = [leaf.state[:2] for leaf in parts]
    if any(pair[0].shape[2] != keys.shape[2] for pair in pairs):
        if type(parts[0]) is not KVCache:
            return None
        pairs = [leaf.keys_and_values() for leaf in parts]
    return type(parts[0]).from_state((*(mx.concatenate(arrays) for arrays in zip(*pairs, strict=True)), *rest))


def _plain(leaf: Any, length: int) -> Any:
    if isinstance(leaf, ArraysCache):
        return leaf
    keys, values = leaf.keys_and_values()
    filled = keys.shape[2]
    return KVCache.from_state((keys[:, :, filled - length :], values[:, :, filled - length :], length))


def _in_order(leaf: Any, row: int) -> tuple[tuple[mx.array, mx.array], int]:
    """K and V, [B, H, T, D], the last token's last, and which of them the row is; of rotating caches the row alone."""
    if isinstance(leaf, BatchRotatingKVCache):
        leaf, row = leaf.extract(row), 0
    if not isinstance(leaf, RotatingKVCache):
        return leaf.keys_and_values(), row
    keys, values, offset, _, _, index = leaf.state
    keys, values = keys[row : row + 1], values[row : row + 1]
    if index == keys.shape[2]:
        return (keys, values), 0
    if index >= offset:  # not full yet
        return (keys[:, :, :index], values[:, :, :index]), 0
    parts = slice(index, None), slice(0, index)
    turned = tuple(mx.concatenate([x[:, :, part] for part in parts], axis=2) for x in (keys, values))
    return (turned[0], turned[1]), 0
