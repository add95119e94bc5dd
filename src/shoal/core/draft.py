"""Speculation: which tokens a decoding sequence may write next, and how many of them are worth a pass.

Sampling draws each token by (seed, position), and logits are the same bits in any chunk. So a draft is right exactly
when it is the token that would have been drawn: it is fed behind the sequence's last token, and what the pass gives
after each of them is chosen from as if it had come one by one, up to the first that differs. The rejected rest is
behind again. Nothing of a request's output depends on what is drafted here, only when it comes.

A draft is read off a text at the place that looks like the end of the sequence: its own prompt and output, the output
a caller predicted, or what others of the same namespace wrote. Everything here follows from the scheduler's commands.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from shoal.core.suffixes import LONGEST, Suffixes
from shoal.runners.plan import Want

if TYPE_CHECKING:
    from shoal.core.kv import KVCacheManager
    from shoal.core.pacing import Pacer
    from shoal.core.sequence import Sequence
    from shoal.runners.plan import ModelSpec, ScheduledSequence
    from shoal.types import Namespace

_PART = 1 << 14  # tokens of one part of a history, which has two
_TOTAL = 1 << 19  # tokens of all histories
_NAMESPACES = 1024  # that have one
_GIVEN_AT_ONCE = 64  # output tokens after which a running sequence's text is within reach of others
_LEAST_GAIN = 1.06  # times as fast with drafts as without: below that it is left
_HOPELESS = 0.75  # of the best so far: more rows, which cost in jumps, do not make up for that
_LEAST_CHANCE = 0.05  # of a drafted token: what is less likely to count is not looked at
_MEMORY = 0.998
_RECENT = 0.9  # of what a sequence's drafts were worth, the share that is left after the next
_LEVELS = 5  # of that: not known yet, and from the worst to the best quarter

_OWN, _HISTORY, _PREDICTION = range(3)  # where a draft is from
_KINDS = 3
BUCKET_OF = (0, 0, 0, 1, 2, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 5, 6)  # of lengths of agreement
BUCKETS = BUCKET_OF[-1] + 1
_AGREED = (0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9)  # chance that the next token is right, before anything was seen
_EASE = (1.0, 1.6, 1.3, 1.0, 0.5)  # the same by level, as a power: where drafts do well, the next one does
_FIRST: tuple[float, ...] = tuple(chance**ease for ease in _EASE for chance in _AGREED)


def why_not(spec: ModelSpec) -> str | None:
    """Why a model's sequences are not drafted for; None when they are."""
    if not spec.exact:
        return "its logits are not the same bits in any company, so a drafted token could differ from a plain one"
    if spec.recurrent:
        return "its recurrent state cannot be taken back behind a token that was drafted wrongly"
    if spec.max_rows < 2:
        return "its runner gives the logits after the last token only"
    if spec.lookahead:
        return "its runner begins the next step itself, before this one's tokens are chosen"
    return None


class Odds:
    """How often the next token was what a text said it would be, in all sequences, apart by what could be seen before.

    A bucket is whether tokens are drawn or the most likely ones, where the draft was from, how well its sequence's last
    drafts did, and how much of the end agreed.
    Older observations count less: `_MEMORY` is the share that is left of one after the next in its bucket.
    """

    __slots__ = ("hits", "seen")

    def __init__(self) -> None:
        self.hits = [0.0] * (2 * _KINDS * _LEVELS * BUCKETS)
        self.seen = [0.0] * (2 * _KINDS * _LEVELS * BUCKETS)

    def note(self, bucket: int, right: bool) -> None:
        """One more observation."""
        self.hits[bucket] = self.hits[bucket] * _MEMORY + right
        self.seen[bucket] = self.seen[bucket] * _MEMORY + 1.0


class NamespaceText:
    """What was written in one namespace: the last `_PART` tokens or more, at most twice that."""

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts = [Suffixes()]  # the newest first

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def add(self, tokens: Seq[int]) -> None:
        """A piece of text; at most one part's worth of it is kept."""
        if len(self.parts[0]) + len(tokens) > _PART:
            self.parts = [Suffixes(), self.parts[0]]
        self.parts[0].extend(tokens[-_PART:])


class Draft:
    """One sequence's drafter: its text so far, and the place in some text where the next token is expected.

    Invariant: `at` is -1, or the place of a token in `source` before which `length` tokens agree with the sequence's
    end (LONGEST: at least so many). It sees its own text and the history of its namespace, no other.
    """

    __slots__ = (
        "at", "drawn", "foretold", "given", "history", "kind", "length", "level", "own", "predicted", "right", "seen",
        "source", "taken",
    )  # fmt: skip

    def __init__(self, seq: Sequence, history: NamespaceText) -> None:
        predicted = seq.spec.predicted
        self.own = Suffixes((*predicted, *seq.spec.prompt))
        self.predicted = len(predicted)
        self.history = history
        self.drawn = 0 if seq.want[0] is Want.ARGMAX else _KINDS  # where its kinds of buckets begin
        self.right = self.seen = 0.0  # of its drafts, whether taken or not, the last ones most
        self.level = 0
        self.foretold = 0  # output tokens that stood in the prediction where they were expected
        self.taken = self.given = seq.prompt_len  # tokens of the sequence in `own`, and in the history
        self.source = self.own
        self.at, self.length, self.kind = (0, LONGEST, _PREDICTION) if predicted else (-1, 0, _OWN)
        if not predicted:
            self._look()

    def _look(self) -> None:
        """Find where the end of the text was before: where most agrees, of equals in the own text."""
        own = self.own
        self.source, (self.at, self.length) = own, own.find(own)
        self.kind = _PREDICTION if self.at < self.predicted else _OWN
        for part in self.history.parts:
            if part.tokens:
                at, length = part.find(own)
                if length > self.length:
                    self.source, self.at, self.length, self.kind = part, at, length, _HISTORY

    def follow(self, tokens: Seq[int], odds: Odds) -> None:
        """Take in what the sequence wrote; `odds` are those of all sequences."""
        own = self.own
        for token in tokens:
            at, right = self.at, False
            if at >= 0:
                right = self.source.tokens[at] == token
                kind = self.kind + self.drawn
                odds.note((kind * _LEVELS + self.level) * BUCKETS + BUCKET_OF[self.length], right)
                self.right = self.right * _RECENT + right
                self.seen = self.seen * _RECENT + 1.0
                if self.level or self.seen > 1.5:
                    self.level = 1 + int(3.99 * self.right / self.seen)
            own.append(token)
            if not right:
                self._look()
                continue
            self.at = at = at + 1
            self.length += self.length < LONGEST
            if self.kind == _PREDICTION:
                self.foretold += 1
                if at >= self.predicted:  # it went over the prediction's end
                    self._look()
            elif at >= len(self.source.tokens):
                self._look()
        self.taken += len(tokens)

    def chance(self, depth: int, odds: Odds) -> float:
        """How likely the drafted token `depth` (0: the first) is right when those before it are."""
        length = self.length + depth
        place = self.level * BUCKETS + BUCKET_OF[length if length < LONGEST else LONGEST]
        bucket = (self.kind + self.drawn) * _LEVELS * BUCKETS + place
        return (odds.hits[bucket] + 2 * _FIRST[place]) / (odds.seen[bucket] + 2)


class Drafter:
    """Keeps what drafts are read from, and says who drafts how much.

    Invariant: a sequence's `draft` refers to its own text and to the history of its namespace; histories are found by
    the namespace and nothing else, so text of another is out of reach. Memory: at most 36 bytes for each token of a
    running request, and for each of at most `_TOTAL` tokens that were written.
    """

    def __init__(self, max_rows: int) -> None:
        """`max_rows` is the most rows that a step gives of one sequence."""
        self._max_rows = max_rows
        self._odds = Odds()
        self._histories: OrderedDict[Namespace, NamespaceText] = OrderedDict()
        self._held = 0  # tokens of them all

    def follow(self, seq: Sequence) -> None:
        """A sequence wrote tokens."""
        draft = seq.draft
        if draft is None:
            history = self._history(seq.spec.namespace)
            draft = seq.draft = Draft(seq, history)
        draft.follow(seq.tokens[draft.taken :], self._odds)
        if draft.taken - draft.given >= _GIVEN_AT_ONCE:
            self._give(seq, draft)

    def leave(self, seq: Sequence) -> None:
        """A sequence ended: what it wrote is its namespace's, its own text goes."""
        if seq.draft is not None:
            self._give(seq, seq.draft)
            seq.foretold, seq.draft = seq.draft.foretold, None

    def _give(self, seq: Sequence, draft: Draft) -> None:
        begin = max(draft.given - LONGEST, seq.prompt_len)  # so that a place in the seam is found
        before = len(draft.history)
        draft.history.add(seq.tokens[begin : draft.taken])
        draft.given = draft.taken
        if self._histories.get(seq.spec.namespace) is draft.history:
            self._held += len(draft.history) - before

    def _history(self, namespace: Namespace) -> NamespaceText:
        """The history of a namespace, which becomes the last to go when there are too many."""
        histories = self._histories
        history = histories.get(namespace)
        if history is None:
            history = histories[namespace] = NamespaceText()
        histories.move_to_end(namespace)
        while len(histories) > 1 and (self._held > _TOTAL or len(histories) > _NAMESPACES):
            self._held -= len(histories.popitem(last=False)[1])
        return history

    def plan(
        self,
        decoding: Seq[Sequence],
        planned: list[ScheduledSequence],
        kv: KVCacheManager,
        pacer: Pacer,
        most: int,
        spare: int,
    ) -> bool:
        """Put drafts into a step that only decodes, where that pays; True when it does.

        `planned` has an entry for each sequence, which may be replaced. At most `most` tokens are drafted, and into no
        more than `spare` new blocks: nothing is preempted for a draft.
        """
        times = pacer.times(greedy=all(item.want is Want.ARGMAX for item in planned))
        if not times.known:
            return False
        most = min(most, times.rows_within(pacer.most_ms) - len(decoding))
        rows = []
        for seq in decoding:
            room = (seq.ready + spare) * kv.block_size - len(seq.tokens)
            rows.append((seq, min(self._max_rows - 1, seq.remaining - 1, room)))
        found = False
        for place, count in enumerate(self.choose(rows, most, pacer.most_ms, times)):
            seq, draft = decoding[place], decoding[place].draft
            if count == 0 or draft is None:
                continue
            have = seq.ready
            if kv.blocks_for(len(seq.tokens) + count) - have > spare:  # others drafted into what was spare
                count = have * kv.block_size - len(seq.tokens)
            if count <= 0 or not kv.grow(seq, len(seq.tokens) + count):
                continue
            spare -= seq.ready - have
            item = planned[place]
            tokens = (*item.tokens, *draft.source.tokens[draft.at : draft.at + count])
            want, top = (Want.LOGITS, 0) if item.want is Want.TOP else (item.want, item.top)
            planned[place] = item._replace(
                tokens=tokens,
                block_table=seq.table,
                want=want,
                top=top,
                generated=len(tokens),
                rows=len(tokens),
                windows=seq.window_table,
            )
            found = True
        return found

    def choose(
        self, rows: Seq[tuple[Sequence, int]], most: int, most_ms: float, ms: Callable[[int], float]
    ) -> list[int]:
        """How many tokens to draft for each of the decoding sequences, that they get on the fastest.

        What counts is the mean of their speeds, the geometric one: each gains or loses in proportion, so that a step
        is not made long for the sake of a few, which would end early and leave the others in a small batch. Tokens
        are taken one at a time, the one that adds most to its sequence's speed first, and the best number stands.
        `rows` has each sequence with the most that may be drafted for it; `most` is the limit of them all. `ms` tells
        what a step of so many rows takes; drafts may not bring it above `most_ms`.
        """
        streams = len(rows)
        counts = [0] * streams
        speeds = [1.0] * streams  # tokens that each is expected to write in this step
        waiting = []  # the next token of each: what it adds to the speed (negative), its chance to count, whose, depth
        for number, (seq, limit) in enumerate(rows):
            draft = seq.draft
            if draft is not None and draft.at >= 0 and limit > 0:
                chance = draft.chance(0, self._odds)
                waiting.append((-chance, chance, number, 0))
        if not waiting:
            return counts
        heapq.heapify(waiting)
        taken: list[int] = []
        tokens, best, best_at = 1.0, _LEAST_GAIN, 0
        plain_ms, share = ms(streams), 1 / streams
        while waiting and len(taken) < most:
            _, chance, number, depth = waiting[0]
            step_ms = ms(streams + len(taken) + 1)
            if chance < _LEAST_CHANCE or step_ms > most_ms:
                break
            speed = speeds[number]
            speeds[number] = speed + chance
            tokens *= (1 + chance / speed) ** share
            taken.append(number)
            gain = tokens * plain_ms / step_ms
            if gain > best:
                best, best_at = gain, len(taken)
            elif gain < _HOPELESS * best:
                break
            seq, limit = rows[number]
            draft = seq.draft
            assert draft is not None
            limit = min(limit, len(draft.source.tokens) - draft.at)
            if depth + 1 < limit:
                chance *= draft.chance(depth + 1, self._odds)
                heapq.heapreplace(waiting, (-chance / speeds[number], chance, number, depth + 1))
            else:
                heapq.heappop(waiting)
        for number in taken[:best_at]:
            counts[number] += 1
        return counts
