"""A swarm on the toy model: shared prompts, cards, serial runs, aborts, failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shoal.agents.cards import Card, CardState, Specialist
from shoal.agents.swarm import (
    RULES,
    SPECIALISTS,
    SYNTHESIS,
    Swarm,
    specialists,
    swarm_messages,
    synthesis_messages,
)
from shoal.config import EngineConfig
from shoal.engine.engine import Engine
from shoal.errors import InvalidRequestError, PromptTooLongError, RunnerError
from shoal.runners.fake import ByteTokenizer, FakeRunner
from shoal.runners.plan import StepPlan
from shoal.types import SamplingParams

SAMPLING = SamplingParams(max_tokens=24, temperature=1.0, seed=3, ignore_eos=True)
QUESTION = "Should we move to the sea?"


def engine(**runner: Any) -> Engine:
    return Engine(lambda: FakeRunner(**runner), ByteTokenizer(), EngineConfig(max_batch=8))


@pytest.fixture
def plain() -> Iterator[Engine]:
    with engine() as made:
        yield made


def follow(swarm: Swarm, made: Engine, begun: Callable[[], object] = lambda: None) -> list[Card]:
    """Run a swarm to its end; `begun` is called when it has begun."""

    async def work() -> list[Card]:
        ended = []
        swarm.start(made)
        begun()
        while not swarm.finished:
            ended += await swarm.pump(timeout_s=1.0)
        return ended

    return asyncio.run(work())


def test_prompts_share_all_but_their_last_line() -> None:
    chats = [swarm_messages(QUESTION, specialist) for specialist in SPECIALISTS]
    assert {str(chat[0]["content"]) for chat in chats} == {RULES}
    heads = {str(chat[1]["content"]).rpartition("\n")[0] for chat in chats}
    assert heads == {f"{QUESTION}\n"}
    assert len({str(chat[1]["content"]) for chat in chats}) == len({s.name for s in SPECIALISTS}) == 8


def test_what_the_graph_asks_is_what_is_said_here(plain: Engine) -> None:
    """Braces in a question or a task are text like any other."""
    team = [Specialist("A", "Say {question} or {task_1}."), Specialist("B", "Say {x}.")]
    swarm = Swarm("Why {question} and {not}?", team, SAMPLING)
    follow(swarm, plain)
    for card in swarm.cards:
        chat = swarm_messages("Why {question} and {not}?", card.specialist)
        assert card.handle is not None
        assert list(card.handle.prompt_tokens) == ByteTokenizer().encode_messages(chat)


def test_each_agent_draws_from_a_seed_of_its_own(plain: Engine) -> None:
    whole, part = Swarm(QUESTION, SPECIALISTS, SAMPLING), Swarm(QUESTION, specialists(3), SAMPLING)
    for swarm in (whole, part):
        follow(swarm, plain)
    seeds = [card.result.seed for card in whole.cards if card.result is not None]
    assert len(set(seeds)) == 8
    assert [card.result.seed for card in part.cards if card.result is not None] == seeds[:3]


@pytest.mark.parametrize("count", [0, 9, -1])
def test_there_are_one_to_eight_specialists(count: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"agents is {count}.*from 1 to 8"):
        specialists(count)


@pytest.mark.parametrize("question", ["", "  \n"])
def test_a_question_has_text(question: str) -> None:
    with pytest.raises(InvalidRequestError, match="the question is empty"):
        Swarm(question, SPECIALISTS, SAMPLING)


def test_every_agent_ends_once_and_the_summary_counts_them(plain: Engine) -> None:
    swarm = Swarm(QUESTION, SPECIALISTS, SAMPLING)
    ended = follow(swarm, plain)
    assert sorted(card.name for card in ended) == sorted(s.name for s in SPECIALISTS)
    assert {card.state for card in swarm.cards} == {CardState.DONE}
    for card in swarm.cards:
        assert card.result is not None
        assert (card.text, card.tokens) == (card.result.text, len(card.result.tokens))
        assert card.tokens_per_s(0.0) > 0
    summary = swarm.summary()
    common = len(ByteTokenizer().encode_messages(swarm_messages(QUESTION, SPECIALISTS[0]))) - 1
    assert summary.tokens == 8 * 24
    assert 100 < summary.prefix_tokens < common
    assert summary.cached_tokens >= 7 * (summary.prefix_tokens // 32) * 32
    assert summary.tokens_per_s == pytest.approx(summary.tokens / summary.wall_s)


def test_one_agent_shares_with_nobody(plain: Engine) -> None:
    swarm = Swarm(QUESTION, specialists(1), SAMPLING)
    follow(swarm, plain)
    assert swarm.summary().prefix_tokens == 0


def test_serial_gives_the_same_texts_one_after_another(plain: Engine) -> None:
    together = Swarm(QUESTION, SPECIALISTS, SAMPLING)
    follow(together, plain)
    widths = []
    plain.listen(lambda record: widths.append(record.batch))
    one_by_one = Swarm(QUESTION, SPECIALISTS, SAMPLING, serial=True)
    ended = follow(one_by_one, plain)
    assert [card.text for card in one_by_one.cards] == [card.text for card in together.cards]
    assert [card.name for card in ended] == [s.name for s in SPECIALISTS]
    assert set(widths) == {1}


@pytest.mark.parametrize("serial", [False, True])
def test_abort_ends_all_and_keeps_what_there_is(serial: bool) -> None:
    async def work(made: Engine) -> None:
        swarm.start(made)
        while swarm.cards[0].tokens < 3 or (swarm.cards[-1].tokens < 1 and not serial):
            await swarm.pump(timeout_s=0.02)
        assert swarm.cards[0].state is CardState.DECODING
        assert swarm.cards[-1].state is (CardState.QUEUED if serial else CardState.DECODING)
        swarm.abort()
        while not swarm.finished:
            await swarm.pump(timeout_s=1.0)

    with engine(step_s=0.005) as made:
        swarm = Swarm(QUESTION, SPECIALISTS, SamplingParams(max_tokens=2000, ignore_eos=True), serial=serial)
        asyncio.run(work(made))
        assert {card.state for card in swarm.cards} == {CardState.ABORTED}
        assert swarm.cards[0].text
        assert swarm.cards[0].result is not None
        assert made.stats().running == made.stats().waiting == 0


def test_a_failed_pass_fails_its_agents() -> None:
    def fault(plan: StepPlan) -> None:
        if len(plan.sequences) == 2:
            raise RunnerError("the device is gone")

    with engine(fault=fault) as made:
        swarm = Swarm(QUESTION, specialists(2), SAMPLING)
        follow(swarm, made)
        assert {card.state for card in swarm.cards} == {CardState.FAILED}
        assert [str(error) for error in swarm.failures()] == ["the device is gone"] * 2


def test_a_question_that_does_not_fit_leaves_nothing_running() -> None:
    with engine(context_length=256) as made:
        swarm = Swarm("why " * 100, SPECIALISTS, SAMPLING)
        with pytest.raises(PromptTooLongError):
            follow(swarm, made)
        assert swarm.finished
        assert made.stats().running == made.stats().waiting == 0


def test_the_synthesis_reads_what_the_others_wrote_and_begins_as_they_do(plain: Engine) -> None:
    swarm = Swarm(QUESTION, specialists(3), SAMPLING, synthesis=SYNTHESIS)
    assert swarm.synthesis is not None
    ended = follow(swarm, plain)
    assert ended[-1] is swarm.synthesis
    assert swarm.synthesis not in swarm.cards
    chat = synthesis_messages(QUESTION, SYNTHESIS, [(card.name, card.text) for card in swarm.cards])
    assert swarm.synthesis.result is not None
    assert swarm.synthesis.result.prompt_tokens == len(ByteTokenizer().encode_messages(chat))
    assert swarm.synthesis.result.cached_tokens >= (len(RULES + QUESTION) // 32) * 32
    summary = swarm.summary()
    assert summary.tokens == 3 * 24


def test_one_agent_is_aborted_and_the_synthesis_does_without() -> None:
    with engine(step_s=0.002) as made:
        swarm = Swarm(QUESTION, specialists(3), SAMPLING, serial=True, synthesis=SYNTHESIS)
        follow(swarm, made, lambda: swarm.abort(swarm.cards[2]))
        states = [card.state for card in swarm.everyone]
        assert states == [CardState.DONE, CardState.DONE, CardState.ABORTED, CardState.DONE]


def test_a_synthesis_of_nothing_does_not_begin() -> None:
    with engine(step_s=0.002) as made:
        swarm = Swarm(QUESTION, specialists(2), SAMPLING, synthesis=SYNTHESIS)
        follow(swarm, made, lambda: list(map(swarm.abort, swarm.cards)))
        assert {card.state for card in swarm.everyone} == {CardState.ABORTED}


def test_agents_that_share_nothing_write_the_same(plain: Engine) -> None:
    shared, alone = Swarm(QUESTION, SPECIALISTS, SAMPLING), Swarm(QUESTION, SPECIALISTS, SAMPLING, sharing=False)
    follow(shared, plain)
    follow(alone, plain)
    assert [card.text for card in alone.cards] == [card.text for card in shared.cards]
    assert alone.summary().cached_tokens == 0


def test_two_greedy_agents_with_one_task_cost_one(plain: Engine) -> None:
    team = [Specialist("A", "Say it."), Specialist("B", "Say it.")]
    swarm = Swarm(QUESTION, team, SamplingParams(max_tokens=9, ignore_eos=True))
    assert len(follow(swarm, plain)) == 2
    assert swarm.cards[0].text == swarm.cards[1].text != ""
    assert {card.state for card in swarm.cards} == {CardState.DONE}
    assert swarm.summary().tokens == 9


def test_a_swarm_that_ended_leaves_nothing_on_the_engine(plain: Engine) -> None:
    for _ in range(4):
        follow(Swarm(QUESTION, specialists(2), SAMPLING), plain)
    assert len(plain._loop.step_starters) <= 1  # the last one's leaves with the next step
