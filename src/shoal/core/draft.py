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
from shoal.runners.plan import ScheduledSequence, Want

if TYPE_CHECKING:
    from shoal.core.kv import KVCacheManager
    from shoal.core.pacing import Pacer
    from shoal.core.sequence import Sequence
    from shoal.runners.plan import ModelSpec
    from shoal.types import Namespace

_PART = 1 << 14  # tokens of one part of a history, which has two
_TOTAL = 1 << 19  # tokens of all histories
_NAMESPACES = 1024  # that have one
_GIVEN_AT_ONCE = 64  # output tokens after which a running sequence's text is within reach of others that run
_LEAST_GAIN = 1.06  # times as fast with drafts as without: below that it is left
_HOPELESS = 0.75  # of the best so far: more rows, which cost in jumps, do not make up for that
_LEAST_CHANCE = 0.05  # of a drafted token: what is less likely to count is not looked at
_MEMORY = 0.998
_RECENT = 0.9  # of what a sequence's drafts were worth, the share that is left after the next
_LEVELS = 5  # of that: not known yet, and from the worst to the best quarter
_PATIENCE = 16  # tokens in a row behind which no draft could pay, after which a sequence rests
_REST = 16  # tokens that it writes then, at most, before its text is looked at again: one more each time in vain
FOR_EVER = 1 << 60

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


class NamespaceText:
    """What was written in one namespace: the last `_PART` tokens or more, at most twice that."""

    __slots__ = ("parts", "readers")

    def __init__(self) -> None:
        self.parts = [Suffixes()]  # the newest first
        self.readers = 0  # running sequences that look here

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def add(self, tokens: Seq[int]) -> None:
        """A piece of text; at most one part's worth of it is kept."""
        if len(self.parts[0]) + len(tokens) > _PART:
            self.parts = [Suffixes(), self.parts[0]]
        self.parts[0].add(tokens[-_PART:])


class Draft:
    """One sequence's drafter: its text so far, and the place in some text where the next token is expected.

    It takes its sequence's tokens in when a step is planned: all that were written since the last time. One that rests,
    since no draft could have paid for long, does so ever more seldom, at last every `_REST` tokens.

    Invariant: `at` is -1, or the place of a token in `source` before which `length` tokens agree with the end of the
    tokens taken in (LONGEST: at least so many). `first` is above 0 where it may be drafted: `at` is a place, and all
    tokens are taken in. It sees its own text and the history of its namespace, no other.
    """

    __slots__ = (
        "at", "drawn", "due", "first", "foretold", "given", "history", "idle", "kind", "length", "level", "own",
        "predicted", "right", "seen", "source", "taken",
    )  # fmt: skip

    def __init__(self, seq: Sequence, history: NamespaceText) -> None:
        predicted = seq.spec.predicted
        self.own = Suffixes((*predicted, *seq.spec.prompt))
        self.predicted = len(predicted)
        self.history = history
        self.drawn = 0 if seq.want[0] is Want.ARGMAX else _KINDS  # where its kinds of buckets begin
        self.right = self.seen = 0.0  # of its drafts, whether taken or not, the last ones most
        self.level = 0
        self.idle = 0  # tokens since one behind which a draft could pay
        self.foretold = 0  # output tokens that stood in the prediction where they were expected
        self.taken = self.given = seq.prompt_len  # tokens of the sequence in `own`, and in the history
        self.due = seq.prompt_len + 1  # tokens of the sequence with which it takes in what was written
        self.first = 0.0  # how likely the first drafted token is right
        self.source = self.own
        self.at, self.length, self.kind = (0, LONGEST, _PREDICTION) if predicted else (-1, 0, _OWN)
        if not predicted:
            self._look()

    def _look(self) -> None:
        """Find where the end of the text was before: where most agrees, of equals in the own text."""
        own = self.own
        self.source, (self.at, self.length) = own, own.find(own)
        self.kind = _PREDICTION if self.at < self.predicted else _OWN
        if self.length < LONGEST:
            for part in self.history.parts:
                if part.tokens:
                    at, length = part.find(own)
                    if length > self.length:
                        self.source, self.at, self.length, self.kind = part, at, length, _HISTORY

    def take(self, tokens: Seq[int], odds: Odds, least: float, patience: int) -> None:
        """Take in what the sequence wrote; `tokens` are all that it has, `odds` those of all sequences.

        Only drafts with a chance of at least `least` may pay. Where none had for `patience` tokens, the sequence rests.
        """
        written = tokens[self.taken :]
        if self.due > self.taken + 1:  # it rested: what came of its last draft is noted, and the rest taken in
            self._follow(written[:1], odds)
            self.own.extend(written[1:])
            self._look()
        else:
            self._follow(written, odds)
        self.taken = len(tokens)
        self.due = self.taken + 1
        self.first = self.chance(0, odds) if self.at >= 0 else 0.0
        if self.first >= least:
            self.idle = 0
            return
        self.idle += 1
        if self.idle > patience:
            self.first = 0.0
            self.due = self.taken + min(self.idle - patience, _REST)

    def _follow(self, written: Seq[int], odds: Odds) -> None:
        """Take tokens in as far as they come as expected, and one that does not; look for another place, and so on."""
        count, done = len(written), 0
        while done < count:
            begin, right, at, end = done, False, self.at, 0
            if at >= 0:
                expected = self.source.tokens
                end = self.predicted if self.kind == _PREDICTION else len(expected)
                right = True
                while right and done < count and at < end:
                    right = expected[at] == written[done]
                    self._note(odds, right)
                    at += 1
                    done += 1
                self.at = at
            else:
                done += 1
            self.own.extend(written[begin:done])
            if not right or (at >= end and self.kind != _OWN):
                self._look()

    def _note(self, odds: Odds, right: bool) -> None:
        """One more token came, or did not come, as it was expected."""
        length = self.length
        bucket = ((self.kind + self.drawn) * _LEVELS + self.level) * BUCKETS + BUCKET_OF[length]
        odds.hits[bucket] = odds.hits[bucket] * _MEMORY + right
        odds.seen[bucket] = odds.seen[bucket] * _MEMORY + 1.0
        self.right = self.right * _RECENT + right
        self.seen = seen = self.seen * _RECENT + 1.0
        if self.level or seen > 1.5:
            self.level = 1 + int(3.99 * self.right / seen)
        if right:
            if length < LONGEST:
                self.length = length + 1
            if self.kind == _PREDICTION:
                self.foretold += 1

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

    def __init__(self, max_rows: int, patience: int = _PATIENCE, least_gain: float = _LEAST_GAIN) -> None:
        """`max_rows` is the most rows that a step gives of one sequence; the others are as the module says."""
        self._max_rows = max_rows
        self._patience = patience
        self._least_gain = least_gain
        self._odds = Odds()
        self._histories: OrderedDict[Namespace, NamespaceText] = OrderedDict()
        self._held = 0  # tokens of them all

    def follow(self, seq: Sequence, least: float = 0.0) -> None:
        """Take in what a sequence wrote; with drafts less likely than `least` it rests after a while."""
        draft = seq.draft
        if draft is None:
            draft = seq.draft = Draft(seq, self._history(seq.spec.namespace))
            draft.history.readers += 1
        # Of a sequence with a prediction, it is told in the end how much came true: it does not rest.
        draft.take(seq.tokens, self._odds, 0.0 if draft.predicted else least, self._patience)
        if draft.taken - draft.given >= _GIVEN_AT_ONCE and draft.history.readers > 1:
            self._give(seq, draft.history, draft.given)
            draft.given = draft.taken

    def leave(self, seq: Sequence) -> None:
        """A sequence ended: what it wrote is its namespace's, its own text goes."""
        if not seq.spec.sampling.speculate or len(seq.tokens) == seq.prompt_len:
            return
        if seq.spec.predicted:
            self.follow(seq)
        draft, seq.draft = seq.draft, None
        if draft is None:
            self._give(seq, self._history(seq.spec.namespace), seq.prompt_len)
        else:
            draft.history.readers -= 1
            self._give(seq, draft.history, draft.given)
            seq.foretold = draft.foretold

    def _give(self, seq: Sequence, history: NamespaceText, given: int) -> None:
        """Let the history have what the sequence wrote beyond the tokens that were `given` before."""
        begin = max(given - LONGEST, seq.prompt_len)  # so that a place in the seam is found
        before = len(history)
        history.add(seq.tokens[begin:])
        if self._histories.get(seq.spec.namespace) is history:
            self._held += len(history) - before

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
        least, likely = times.least_chance(len(decoding), self._least_gain), 0.0
        for seq in decoding:
            draft = seq.draft
            if draft is None or len(seq.tokens) >= draft.due:
                if not seq.spec.sampling.speculate:
                    continue
                self.follow(seq, least)
                draft = seq.draft
                assert draft is not None
            if draft.first > likely:
                likely = draft.first
        if likely < max(least, _LEAST_CHANCE):
            return False
        most = min(most, times.rows_within(pacer.most_ms) - len(decoding))
        limits = []
        for seq in decoding:
            room = (seq.ready + spare) * kv.block_size - len(seq.tokens)
            limits.append((seq, min(self._max_rows - 1, seq.remaining - 1, room)))
        found = False
        for place, count in enumerate(self.choose(limits, most, pacer.most_ms, times)):
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
            want, top = (Want.LOGITS, 0) if item.want in (Want.TOP, Want.DRAW) else (item.want, item.top)
            rows = len(tokens)
            planned[place] = ScheduledSequence(
                item.seq_id, tokens, item.start, seq.table, want, rows, None, None, top, rows, seq.window_table
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
        streams, odds = len(rows), self._odds
        counts = [0] * streams
        speeds = [1.0] * streams  # tokens that each is expected to write in this step
        waiting = []  # the next token of each: what it adds to the speed (negative), its chance to count, whose, depth
        for number, (seq, limit) in enumerate(rows):
            draft = seq.draft
            if draft is not None and draft.first > 0 and limit > 0:
                waiting.append((-draft.first, draft.first, number, 0))
        if not waiting:
            return counts
        heapq.heapify(waiting)
        taken: list[int] = []
        tokens, best, best_at = 1.0, self._least_gain, 0
        plain_ms, share = ms(streams), 1 / streams
        while waiting and len(taken) < most:
            _, chance, number, depth = waiting[0]
            step_ms = ms(streams + len(taken) + 1)
            if chance < _LEAST_CHANCE or step_ms > most_ms:
                break
            speed = speeds[number]
            speeds[number] = faster = speed + chance
            tokens *= (faster / speed) ** share
            taken.append(number)
            gain = tokens * plain_ms / step_ms
            if gain > best:
                best, best_at = gain, len(taken)
            elif gain < _HOPELESS * best:
                break
            seq, limit = rows[number]
            draft, depth = seq.draft, depth + 1
            assert draft is not None
            if depth < limit and depth < len(draft.source.tokens) - draft.at:
                chance *= draft.chance(depth, odds)
                heapq.heapreplace(waiting, (-chance / faster, chance, number, depth))
            else:
                heapq.heappop(waiting)
        for number in taken[:best_at]:
            counts[number] += 1
        return counts
