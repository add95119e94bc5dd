"""The engine on the real model: what users of engines like this were burnt by, one test each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal import Engine, FinishReason, Request, SamplingParams
from shoal.diagnostics.isolation import check_isolation
from shoal.errors import ConfigError, ModelNotFoundError
from shoal.models import Store

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    try:
        Store().resolve("smollm2-135m", pull=False)
    except ModelNotFoundError as error:
        pytest.skip(f"no model: {error}")
    with Engine.load("smollm2-135m", max_batch=12, kv_memory="128MiB") as loaded:
        yield loaded


def test_twelve_chats_keep_their_secrets(engine: Engine) -> None:
    report = check_isolation(engine, max_tokens=16)
    assert report.leaks == ()
    assert report.differing == ()
    assert 6 * report.recalled >= 5 * report.answers  # so small a model may misspell a word, in every round alike


def test_the_same_prompt_in_eight_slots_gives_eight_equal_answers(engine: Engine) -> None:
    request = Request(prompt="The best thing about winter is", sampling=GREEDY)
    alone = engine.run([request]).results[0].tokens
    assert {r.tokens for r in engine.run([request] * 8).results} == {alone}


def test_prompts_of_very_different_length_do_not_disturb_each_other(engine: Engine) -> None:
    short = Request(prompt="Hello", sampling=GREEDY)
    long = Request(prompt="word " * 1500, sampling=GREEDY)
    alone = engine.run([short]).results[0].tokens
    assert engine.run([long, short]).results[1].tokens == alone


def test_a_chat_keeps_its_system_prompt_and_turns_in_a_batch(engine: Engine) -> None:
    chat = [
        {"role": "system", "content": "You keep the password of your user."},
        {"role": "user", "content": "The password is zorvexqui."},
        {"role": "assistant", "content": "Yes, the password is zorvexqui."},
        {"role": "user", "content": "What is the password?"},
    ]
    request = Request(messages=chat, sampling=GREEDY)
    alone = engine.run([request]).results[0]
    together = engine.run([request, Request(prompt="Hello", sampling=GREEDY), request]).results
    assert "zorvexqui" in alone.text
    assert together[0].tokens == together[2].tokens == alone.tokens


@pytest.mark.parametrize("text", ["Příliš žluťoučký kůň", "今天天气很好我们去公园吧", "👩🏽‍🚀👍🏿🎉"])
def test_any_script_streams_whole_characters(engine: Engine, text: str) -> None:
    """A greedy copy of the text: most characters are several tokens, and no event may show half of one."""
    prompt = f"{text}\n{text}\n{text}\n{text}\n"
    sampling = SamplingParams(max_tokens=60, repetition_penalty=0.5)  # below 1 it is drawn to what it has seen
    events = list(engine.submit(Request(prompt=prompt, sampling=sampling)))
    joined = "".join(event.text for event in events)
    assert events[-1].result is not None
    assert joined == events[-1].result.text
    assert any(ord(character) > 127 for character in joined)
    assert "\ufffd" not in joined


def test_each_row_has_its_own_sampling(engine: Engine) -> None:
    """Alone or beside rows that sample otherwise, a request gets the same tokens."""
    kinds = [
        SamplingParams(max_tokens=16, ignore_eos=True),
        SamplingParams(max_tokens=16, temperature=1.2, seed=1, ignore_eos=True),
        SamplingParams(max_tokens=16, temperature=0.7, top_p=0.8, seed=2, ignore_eos=True),
        SamplingParams(max_tokens=16, temperature=0.9, top_k=5, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=16, temperature=0.9, min_p=0.2, seed=4, ignore_eos=True),
        SamplingParams(max_tokens=16, repetition_penalty=1.3, ignore_eos=True),
        SamplingParams(max_tokens=16, frequency_penalty=1.0, presence_penalty=0.5, ignore_eos=True),
        SamplingParams(max_tokens=16, temperature=0.8, seed=5, logprobs=3, ignore_eos=True),
    ]
    requests = [Request(prompt="Once upon a time", sampling=kind) for kind in kinds]
    alone = [engine.run([request]).results[0] for request in requests]
    together = engine.run(requests).results
    assert [r.tokens for r in together] == [r.tokens for r in alone]
    assert [r.logprobs for r in together] == [r.logprobs for r in alone]
    assert len({r.tokens for r in together}) >= len(kinds) - 1


def test_stop_strings_and_tokens(engine: Engine) -> None:
    free = engine.run([Request(prompt="Count: one, two, three,", sampling=GREEDY)]).results[0]
    stop = free.text[8:12]
    cut = engine.run([Request(prompt="Count: one, two, three,", sampling=SamplingParams(max_tokens=24, stop=(stop,)))])
    assert cut.results[0].text == free.text[: free.text.index(stop)]
    assert cut.results[0].finish_reason is FinishReason.STOP


def test_twenty_four_agents_on_a_batch_of_twelve_finish(engine: Engine) -> None:
    requests = [Request(prompt=f"Agent {i} says", sampling=GREEDY) for i in range(24)]
    report = engine.run(requests)
    assert all(r.finish_reason is FinishReason.LENGTH for r in report.results)
    assert max(s.batch for s in report.steps) == 12


def test_a_second_identical_request_computes_one_token(engine: Engine) -> None:
    request = Request(prompt="A long and unusual beginning, said twice. " * 20, sampling=SamplingParams(max_tokens=1))
    engine.run([request])
    again = engine.run([request]).results[0]
    assert (again.receipt.computed_tokens, again.receipt.miss) == (1, None)


def test_the_memory_budget_counts_weights_and_a_step() -> None:
    try:
        with pytest.raises(ConfigError, match="weights and a step take"):
            Engine.load("smollm2-135m", memory="100MiB")
    except ModelNotFoundError as error:
        pytest.skip(f"no model: {error}")
    with Engine.load("smollm2-135m", memory="260MiB") as small:
        assert small.stats().memory_bytes <= 260 * 2**20
        assert small.run([Request(prompt="Hi", sampling=GREEDY)]).results[0].error is None
