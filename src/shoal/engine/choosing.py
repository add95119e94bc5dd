"""What a step's requests write: tokens are chosen from what the pass gave, and judged by the stop rules.

Nothing here changes the scheduler: what was chosen, and which requests must end since nothing could be chosen for
them, goes back to the loop as values.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shoal.core.commands import Abort, Fail, JudgedTokens
from shoal.core.stop import StopChecker
from shoal.engine.inflight import RequestState
from shoal.errors import RunnerError, ShoalError
from shoal.runners.plan import Draw, HeldRows, ScheduledSequence, SeqId, StepOutput, StepPlan, Want
from shoal.sampling.grammar import GrammarCompiler, gave_up
from shoal.sampling.sampler import INVALID_TOKEN, RowChooser, SamplerState, inverse, sample_top, score
from shoal.types import Event, FinishReason, TokenLogprob


@dataclass(slots=True, eq=False, kw_only=True)
class LocalState(RequestState):
    """One request that is computed here: how it samples and stops.

    `new_tokens`, `new_text` and `new_logprobs` are what the next event tells.
    """

    sampler: SamplerState
    checker: StopChecker
    fed: int  # tokens that need not be fed for the first time: the prompt, output of before, what passes have had
    new_tokens: tuple[int, ...] = ()
    new_text: str = ""
    new_logprobs: list[TokenLogprob] = field(default_factory=list)
    told: bool = False  # an event went out

    def take(self, tokens: tuple[int, ...]) -> JudgedTokens:
        """Let the stop rules judge new tokens, in order, up to one that ends the output. A step may call it again."""
        if len(tokens) == 1:  # the common case, without the lists
            text, reason, is_output = self.checker.push(tokens[0])
            if text:
                self.new_text += text
            if is_output:
                self.new_tokens += tokens
            return JudgedTokens(tokens, int(is_output), reason)
        texts: list[str] = []
        outcome = judged(tokens, self.checker, texts)
        self.new_text += "".join(texts)
        self.new_tokens += outcome.tokens[: outcome.kept]
        return outcome

    def event(self, now: float, reason: FinishReason | None = None, error: ShoalError | None = None) -> Event:
        """The news since the last event, which become part of what it has written; with a reason, the last event."""
        tokens, text = self.new_tokens, self.new_text
        logprobs: tuple[TokenLogprob, ...] = ()
        if tokens and self.first_token_at is None:
            self.first_token_at = now
        if text:
            self.text.append(text)
        if self.new_logprobs:
            logprobs = tuple(self.new_logprobs[: len(tokens)])  # a stop token's is not part of the output
            self.logprobs += logprobs
            self.new_logprobs.clear()
        scored = () if self.told else tuple(self.prompt_logprobs)
        result = None if reason is None else self.result(now, reason, error)
        self.new_tokens, self.new_text, self.told = (), "", True
        return Event(self.request_id, tokens, text, logprobs, result, scored)


class TokenChooser:
    """Chooses what the requests of a step write, and has it judged.

    It changes the states of requests: their samplers and stop rules, and what they have to tell. A request whose row
    leaves no token to choose ends alone: `choose` gives the command that ends it, and the loop applies it.
    """

    def __init__(
        self, states: Mapping[SeqId, LocalState], vocab_size: int, grammars: GrammarCompiler | None = None
    ) -> None:
        """`states` are the requests in flight, as they come and go; `grammars` fills the masks of the constrained."""
        self._states = states
        self._rows = RowChooser(vocab_size)
        self._grammars = grammars

    def begin_masks(self, plan: StepPlan) -> Future[None] | None:
        """Let the masks of the rows this pass gives be filled while the device computes."""
        rows = [item for item in plan.sequences if item.want is Want.LOGITS]
        samplers = [self._states[item.seq_id].sampler for item in rows if self._writes(item)]
        constraints = [sampler.constraint for sampler in samplers if sampler.constraint is not None]
        return self._grammars.begin_fill(constraints) if constraints and self._grammars is not None else None

    def choose(
        self, plan: StepPlan, output: StepOutput, drafts: Mapping[SeqId, tuple[int, ...]]
    ) -> tuple[dict[SeqId, JudgedTokens], list[Abort | Fail]]:
        """Next tokens of all sequences, up to their ends; and what ends the requests that cannot have one.

        `drafts` are the tokens of the plan that were fed behind a sequence's last one.
        """
        outcomes: dict[SeqId, JudgedTokens] = {}
        ending: list[Abort | Fail] = []
        states = self._states
        for seq_id, tokens in output.argmax.items():
            if drafts and seq_id in drafts:
                tokens = _agreed(tokens, drafts[seq_id])
            if INVALID_TOKEN in tokens:
                ending.append(_nothing_to_choose(states[seq_id]))
            else:
                outcomes[seq_id] = states[seq_id].take(tokens)
        chosen = {i: sample_top(ids, logits, states[i].sampler) for i, (ids, logits) in output.top.items()}
        if output.rows is not None:
            chosen |= self._drawn(plan, output.rows)
        for seq_id, token in chosen.items():
            if token == INVALID_TOKEN:
                ending.append(_nothing_to_choose(states[seq_id]))
                continue
            states[seq_id].sampler.accept(token)
            outcomes[seq_id] = states[seq_id].take((token,))
        if output.logits is not None:
            self._choose_from_rows(plan, output.logits, drafts, outcomes, ending)
        return outcomes, ending

    def _drawn(self, plan: StepPlan, rows: HeldRows) -> dict[SeqId, int]:
        """Tokens of the sequences whose rows stay on the device, or INVALID_TOKEN."""
        samplers = {item.seq_id: self._states[item.seq_id].sampler for item in plan.sequences if item.want is Want.DRAW}
        found = rows.draw({seq_id: _draw_of(sampler) for seq_id, sampler in samplers.items()})
        # a whole row comes back where the device could not tell
        return {i: t if isinstance(t, int) else self._rows.choose(t, samplers[i])[0] for i, t in found.items()}

    def _choose_from_rows(
        self,
        plan: StepPlan,
        logits: NDArray[np.float32],
        drafts: Mapping[SeqId, tuple[int, ...]],
        outcomes: dict[SeqId, JudgedTokens],
        ending: list[Abort | Fail],
    ) -> None:
        """As `choose`, of the sequences that want whole rows: their scores, their next tokens, or both."""
        at = 0
        for item in plan.sequences:
            if item.want is not Want.LOGITS:
                continue
            state = self._states[item.seq_id]
            rows = logits[at : at + item.rows]
            at += item.rows
            if state.seq.scoring and not _take_scores(state, item, rows):
                ending.append(_nothing_to_choose(state))
            elif self._writes(item):
                tried = drafts.get(item.seq_id, ())
                outcome = self._write(state, rows[-1 - len(tried) :], tried)
                if outcome is None:
                    ending.append(_nothing_to_choose(state))
                else:
                    outcomes[item.seq_id] = outcome

    def _write(self, state: LocalState, rows: NDArray[np.float32], drafts: tuple[int, ...]) -> JudgedTokens | None:
        """What a request writes: from the first row, and from each one behind drafts as long as these are right.

        None when there is no token to choose in the first; in a later one that is for the next step to find.
        """
        sampler = state.sampler
        written: tuple[int, ...] = ()
        outcome: JudgedTokens | None = None
        while True:
            token, logprob = self._rows.choose(rows[len(written)], sampler)
            if token == INVALID_TOKEN:
                return outcome
            sampler.accept(token)
            if logprob is not None:
                state.new_logprobs.append(logprob)
            taken = state.take((token, *sampler.take_forced()))
            before, written = len(written), (*written, *taken.tokens)
            outcome = JudgedTokens(written, before + taken.kept, taken.finish)
            if taken.finish is not None or drafts[: len(written)] != written:
                return outcome
            if sampler.constraint is not None:
                sampler.constraint.fill()

    def _writes(self, item: ScheduledSequence) -> bool:
        """Whether the last row of a sequence that wants logits gives its next token: a scored prompt goes on."""
        seq = self._states[item.seq_id].seq
        return item.start + len(item.tokens) >= len(seq.tokens) and seq.writes


def _draw_of(sampler: SamplerState) -> Draw:
    return Draw(float(inverse(sampler.params.temperature)), sampler.params.min_p, sampler.next_uniform())


def judged(tokens: tuple[int, ...], checker: StopChecker, text: list[str]) -> JudgedTokens:
    """Let the stop rules judge tokens, in order, up to one that ends the output; the text of each goes to `text`."""
    for count, token in enumerate(tokens):
        verdict = checker.push(token)
        text.append(verdict.text)
        if verdict.reason is not None:
            return JudgedTokens(tokens[: count + 1], count + verdict.is_output, verdict.reason)
    return JudgedTokens(tokens, len(tokens))


def _agreed(tokens: tuple[int, ...], drafts: tuple[int, ...]) -> tuple[int, ...]:
    """Of the most likely tokens after the last token and after each draft, those that follow right ones.

    One that is not finite is only among them when it is the first: behind others it is for the next step to find.
    """
    count = 0
    while count < len(drafts) and tokens[count] == drafts[count]:
        count += 1
    if count and tokens[count] == INVALID_TOKEN:
        return tokens[:count]
    return tokens[: count + 1]


def _take_scores(state: LocalState, item: ScheduledSequence, rows: NDArray[np.float32]) -> bool:
    """Note what `rows`, after the last tokens fed, say of the prompt tokens behind; False when they are not finite."""
    seq, end = state.seq, item.start + len(item.tokens)
    behind = seq.tokens[end - item.rows + 1 : min(end + 1, seq.prompt_len)]
    scores = score(rows[: len(behind)], behind, state.seq.spec.sampling.prompt_logprobs or 0)
    state.prompt_logprobs += scores
    return len(scores) == len(behind)


def _nothing_to_choose(state: LocalState) -> Abort | Fail:
    """What ends a request whose row left no token to choose: its grammar gave up, or the row is not finite."""
    seq_id, constraint = state.seq.seq_id, state.sampler.constraint
    if constraint is not None and constraint.error is not None:
        return Abort(seq_id, FinishReason.ERROR, gave_up(state.prepared.spec.sampling, constraint.error))
    message, hint = "the model gave logits that are not finite numbers", "its KV was dropped; try again"
    return Fail((seq_id,), RunnerError(message, value=float("nan"), hint=hint))
