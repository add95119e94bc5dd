"""How near the lengths of drafts come to the best ones, on a simulated clock: no model, and nothing is timed."""

from __future__ import annotations

import random

import pytest

from shoal.bench.drafting import DraftSimulation, calculated, replayed, table
from shoal.bench.hindsight import PassCost, Proposal, WrittenText, best_lengths_ms, foresight_ms, lengths_ms, proposals

COSTS = {
    "wide": {1: 2.7, 2: 3.2, 4: 3.8, 8: 4.8, 16: 9.0},  # two Zen 4 cores, 135M
    "large": {1: 20.0, 8: 30.0, 32: 84.0},  # the same, a shape of 0.6B
    "narrow": {1: 3.8, 2: 3.9, 4: 4.1, 6: 5.3, 8: 7.2, 12: 10.5, 16: 14.0, 24: 20.2, 32: 25.7, 64: 42.7},  # a Xeon
}


def cost_of(name: str, streams: int) -> PassCost:
    return PassCost({str(streams): COSTS[name]}, streams)


def copied(rng: random.Random, slips: float) -> WrittenText:
    """A text and its copy, which leaves it now and then: another word, one left out, one put in."""
    prompt = [rng.randrange(100, 4000) for _ in range(220)]
    output, at = list[int](), 0
    while at < len(prompt) and len(output) < 180:
        slip = rng.choice(("other", "out", "in")) if rng.random() < slips else ""
        if slip != "out":
            output.append(prompt[at] if not slip else rng.randrange(100, 4000))
        at += slip != "in"
    return WrittenText(tuple(prompt), tuple(output))


def told(rng: random.Random) -> WrittenText:
    """A text of few words in no order: pairs of them come again, and what follows is seldom the same."""
    return WrittenText(tuple(rng.randrange(40) for _ in range(60)), tuple(rng.randrange(40) for _ in range(180)))


def rounds(seed: int, streams: int, slips: float | None) -> list[list[WrittenText]]:
    rng = random.Random(seed)
    count = 6 if streams == 1 else 3
    return [[told(rng) if slips is None else copied(rng, slips) for _ in range(streams)] for _ in range(count)]


@pytest.mark.parametrize("streams", [1, 4, 8])
@pytest.mark.parametrize("name", COSTS)
def test_lengths_come_near_the_best_and_nothing_is_lost_where_nothing_is_copied(name: str, streams: int) -> None:
    cost = cost_of(name, streams)
    simulation = DraftSimulation(cost)
    for seed, slips in enumerate((0.03, 0.15, None, 0.03)):  # one engine: what it learned is no harm to the next
        figures = calculated(simulation, rounds(seed, streams, slips), cost, str(seed))
        if slips is None:  # six short texts behind texts that were copies: until that is noticed
            assert figures["ours"] > 0.98
        else:
            assert figures["ours"] >= 0.9 * figures["best_lengths"], slips
        assert figures["ours"] <= 1.03 * figures["foresight"]  # a bound at one stream, and nearly one at more


def test_no_step_with_drafts_is_longer_than_the_stall_bound_though_its_rows_were_never_seen() -> None:
    longest = 0.0

    def cost(rows: int) -> float:
        nonlocal longest
        ms = 10.0 + 9.0 * rows  # four times what is guessed of a row
        longest = max(longest, ms)
        return ms

    drafted = DraftSimulation(cost).run([copied(random.Random(1), 0.0)]).drafted
    assert drafted > 50
    assert 90.0 < longest < 150.0


def test_a_simulated_engine_writes_its_texts_and_counts_what_it_did() -> None:
    texts = [copied(random.Random(seed), 0.05) for seed in range(3)]
    fed = sum(len(text.output) - 1 for text in texts)
    plain = DraftSimulation(cost_of("large", 1), speculation=False).run(texts)
    ours = DraftSimulation(cost_of("large", 1)).run(texts)
    assert (plain.steps, plain.drafted) == (max(len(text.output) for text in texts) - 1, 0)
    assert 0 < ours.accepted <= ours.drafted
    assert ours.steps < plain.steps
    assert ours.ms < plain.ms
    assert ours.steps * len(texts) + ours.accepted >= fed


def test_what_could_be_drafted_is_what_the_drafter_proposes() -> None:
    prompt = (10, 11, 12, 13, 14, 15, 16, 1, 2)
    (found,) = proposals([WrittenText(prompt, (10, 11, 12, 99, 13, 14, 15, 16))])
    assert found[0] == Proposal(0, 0, 0)  # one token agrees: too few
    assert (found[1].there, found[1].right) == (5, 1)  # behind 10, 11: 12 and then another
    assert (found[2].there, found[2].right) == (4, 0)
    assert found[5].right == 1  # 15; the last token is written, and never fed


def test_marks_of_hindsight() -> None:
    cost = PassCost({"1": {1: 1.0, 4: 1.0, 5: 5.0, 64: 64.0}}, 1)
    right = [[Proposal(min(3, left), min(3, left), 0) for left in range(7, -1, -1)]]
    assert lengths_ms([right], [0] * 7, cost) == 8.0
    assert best_lengths_ms([right], cost) == (2.0, 2.0)
    assert foresight_ms(right, cost) == 2.0
    mixed = [[Proposal(3, 0, 1), Proposal(3, 3, 6), Proposal(2, 2, 6), Proposal(1, 1, 6), Proposal(0, 0, 1)]]
    dear = PassCost({"1": {1: 1.0, 4: 1.6, 64: 64.0}}, 1)
    fixed, best = best_lengths_ms([mixed], dear)
    assert best == foresight_ms(mixed, dear) < fixed  # nothing after little agreement, three after much


def test_costs_of_fewer_rows_than_streams_and_of_a_noisy_table() -> None:
    cost = PassCost({"1": {1: 2.0, 2: 3.0, 4: 4.0}, "4": {4: 8.0, 8: 7.0, 16: 16.0}}, 4)
    assert [cost(rows) for rows in (1, 2, 3, 4, 8, 16, 32)] == [4.0, 6.0, 7.0, 8.0, 8.0, 16.0, 32.0]


def test_a_result_is_calculated_from_its_texts() -> None:
    level = {"level": "copy, 2", "model": "model", "streams": 2, "temperature": 0.0, "texts": rounds(3, 2, 0.03)}
    document = {"costs_ms": {"model": {"2": {str(rows): ms for rows, ms in COSTS["wide"].items()}}}, "levels": [level]}
    rows = replayed(document)
    assert rows == replayed(document)
    assert rows[0]["level"] == "copy, 2"
    assert f"{rows[0]['ours']:.2f}" in table(rows)
