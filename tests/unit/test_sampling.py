from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from shoal.config import EngineConfig
from shoal.engine.inputs import InputProcessor
from shoal.engine.loop import StepLoop
from shoal.errors import InvalidRequestError
from shoal.runners.fake import FakeRunner
from shoal.runners.plan import Draw, SeqId, StepOutput, StepPlan, Want
from shoal.sampling.sampler import INVALID_TOKEN, SamplerState, sample, sample_top, uniform
from shoal.types import Event, Request, SamplingParams

Floats = NDArray[np.float32]


def row_of(*values: float) -> Floats:
    return np.array(values, np.float32)


def draw(row: Floats, params: SamplingParams, seed: int = 0) -> int:
    tokens, _ = sample(row[None], [SamplerState(params, seed, len(row))])
    return int(tokens[0])


def support(row: Floats, params: SamplingParams, seeds: int = 400) -> set[int]:
    tokens, _ = sample(np.stack([row] * seeds), [SamplerState(params, s, len(row)) for s in range(seeds)])
    return {int(t) for t in tokens}


def probabilities(row: Floats, params: SamplingParams) -> NDArray[np.float64]:
    """Exact probabilities in float64, [V]."""
    scaled = row.astype(np.float64) / params.temperature
    order = np.argsort(-scaled, kind="stable")
    p = np.exp(scaled - scaled.max())
    if params.top_k:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    if params.top_p < 1:
        p[order[int(np.cumsum(p[order]).searchsorted(params.top_p)) + 1 :]] = 0
    p[p < params.min_p * p.max()] = 0
    exact: NDArray[np.float64] = p / p.sum()
    return exact


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=0.8, top_k=12),
        SamplingParams(temperature=1.2, top_p=0.9),
        SamplingParams(temperature=0.8, min_p=0.02),
        SamplingParams(temperature=1.5, top_k=50, top_p=0.95, min_p=0.01),
    ],
    ids=str,
)
def test_distribution_is_the_exact_one(params: SamplingParams) -> None:
    draws, vocab = 10_000, 700
    row = (np.random.default_rng(1).standard_normal(vocab) * 2).astype(np.float32)
    state = SamplerState(params, 12345, vocab)
    counts = np.zeros(vocab)
    for _ in range(draws):
        token = int(sample(row[None], [state])[0][0])
        counts[token] += 1
        state.accept(token)
    expected = probabilities(row, params) * draws
    assert counts[expected == 0].sum() == 0
    # Pearson's chi-square; tokens expected fewer than 8 times are put together.
    rare = expected < 8
    observed, expected = np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    chi_square = ((observed - expected) ** 2 / expected).sum()
    freedom = len(observed) - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)  # mean and spread of the chi-square distribution


def test_uniform_is_uniform_and_its_neighbours_are_unrelated() -> None:
    grid = np.array([[uniform(seed, position) for position in range(200)] for seed in range(200)])
    assert grid.min() >= 0
    assert grid.max() < 1
    counts = np.histogram(grid, bins=100, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 99 + 4 * np.sqrt(2 * 99)
    for a, b in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1]), (grid[1:, 1:], grid[:-1, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02
    assert len(np.unique(grid)) == grid.size


def splitmix64(state: int, count: int) -> list[int]:
    """The first outputs of SplitMix64, written after its authors' C code."""
    outputs = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        outputs.append(z ^ (z >> 31))
    return outputs


def test_uniform_is_splitmix64_started_from_the_mixed_seed() -> None:
    assert splitmix64(0, 1) == [0xE220A8397B1DCDAF]  # the published first output of state 0
    for seed in (0, 1, 2**63 - 1):
        stream = splitmix64(splitmix64(seed, 1)[0], 5)
        assert [uniform(seed, position) for position in range(5)] == [(x >> 11) / 2**53 for x in stream]
    assert uniform(0, 0) == 0.6524484863740322  # a change would change every seeded output


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_after_a_restart() -> None:
    rng = np.random.default_rng(5)
    steps = rng.standard_normal((20, 3, 1000)).astype(np.float32) * 3
    mine = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.3)

    def new_state() -> SamplerState:
        return SamplerState(mine, 99, 1000, prompt_tokens=[1, 2, 3])

    def run(state: SamplerState, step: int, *mates: SamplerState) -> int:
        token = int(sample(steps[step][: 1 + len(mates)], [state, *mates])[0][0])
        state.accept(token)
        return token

    state = new_state()
    alone = [run(state, i) for i in range(20)]
    mates = [SamplerState(SamplingParams(temperature=2.0), 4, 1000), SamplerState(SamplingParams(), 5, 1000)]
    state = new_state()
    assert [run(state, i, *mates) for i in range(20)] == alone
    state = new_state()
    for token in alone[:10]:
        state.accept(token)
    assert [run(state, i) for i in range(10, 20)] == alone[10:]


def test_greedy_is_unmoved_by_a_random_neighbour_and_takes_the_first_of_equals() -> None:
    logits = np.stack([row_of(1, 5, 5, 0), row_of(0, 0, 0, 0)])
    for seed in range(50):
        states = [SamplerState(SamplingParams(), 0, 4), SamplerState(SamplingParams(temperature=2.0), seed, 4)]
        assert sample(logits, states)[0][0] == 1


def test_ties_at_the_edge_of_top_k_and_top_p_keep_the_lower_ids() -> None:
    ties = row_of(1, 3, 1, 3, 1, 1)
    assert support(ties, SamplingParams(temperature=1.0, top_k=3)) == {0, 1, 3}
    four = row_of(0, 0, 0, 0)
    assert support(four, SamplingParams(temperature=1.0, top_p=0.5)) == {0, 1}  # exactly half is enough
    assert support(four, SamplingParams(temperature=1.0, top_p=0.501)) == {0, 1, 2}
    assert support(four, SamplingParams(temperature=1.0, top_p=1e-9)) == {0}
    assert support(four, SamplingParams(temperature=1.0, min_p=1.0)) == {0, 1, 2, 3}


def test_filters_apply_one_after_the_other() -> None:
    row = np.log(row_of(0.4, 0.3, 0.2, 0.1))
    # Of the top two, 0.4 / 0.7 = 0.57 of what is left: one is enough for 0.55, both are needed for 0.6.
    assert support(row, SamplingParams(temperature=1.0, top_k=2, top_p=0.55)) == {0}
    assert support(row, SamplingParams(temperature=1.0, top_k=2, top_p=0.6)) == {0, 1}
    assert support(row, SamplingParams(temperature=1.0, top_p=0.95, min_p=0.45)) == {0, 1, 2}
    assert support(row, SamplingParams(temperature=1.0, top_p=0.65, min_p=0.01)) == {0, 1}


@pytest.mark.parametrize("spread", [0.0, 1e-3, 5.0])
@pytest.mark.parametrize("top_k", [0, 5000])
def test_top_p_just_below_one_keeps_every_row_drawable(spread: float, top_k: int) -> None:
    row = (np.random.default_rng(8).standard_normal(9000) * spread).astype(np.float32)
    for top_p in (1 - 2**-53, 1 - 1e-15, 1 - 1e-9):
        params = SamplingParams(temperature=1.0, top_p=top_p, top_k=top_k)
        assert min(support(row, params, 20)) >= 0


@pytest.mark.parametrize("temperature", [1e-310, 1e-40, 1e-3])
def test_a_very_low_temperature_takes_the_largest(temperature: float) -> None:
    row = (np.random.default_rng(0).standard_normal(3000) * 5).astype(np.float32)
    for extra in (SamplingParams(temperature=temperature), SamplingParams(temperature=temperature, top_p=0.9)):
        assert support(row, extra, 20) == {int(row.argmax())}


def test_penalties_move_the_choice() -> None:
    row = row_of(2.0, 1.9, -1.0)
    state = SamplerState(SamplingParams(repetition_penalty=1.2), 0, 3, prompt_tokens=[0])
    assert sample(row[None], [state])[0][0] == 1  # 2.0 / 1.2 < 1.9: the prompt counts
    state = SamplerState(SamplingParams(presence_penalty=0.5), 0, 3, prompt_tokens=[0])
    assert sample(row[None], [state])[0][0] == 0  # the prompt does not count
    state.accept(0)
    assert sample(row[None], [state])[0][0] == 1
    state = SamplerState(SamplingParams(frequency_penalty=0.06), 0, 3)
    chosen = []
    for _ in range(4):
        chosen.append(int(sample(row[None], [state])[0][0]))
        state.accept(chosen[-1])
    assert chosen == [0, 0, 1, 0]


def test_many_distinct_tokens_are_counted() -> None:
    state = SamplerState(SamplingParams(frequency_penalty=1.0), 0, 1000)
    for token in [*range(500), *range(250)]:
        state.accept(token)
    z = np.zeros(1000, np.float32)
    state.shape(z)
    assert z.tolist() == [-2.0] * 250 + [-1.0] * 250 + [0.0] * 500


def test_end_tokens_are_banned_until_min_tokens() -> None:
    row = row_of(9, 8, 7, 1)
    params = SamplingParams(min_tokens=2, stop_token_ids=(1, 70_000))
    state = SamplerState(params, 0, 4, eos_ids=[0])
    chosen = []
    for _ in range(3):
        chosen.append(int(sample(row[None], [state])[0][0]))
        state.accept(chosen[-1])
    assert chosen == [2, 2, 0]
    ignoring = SamplingParams(min_tokens=2, ignore_eos=True)
    assert sample(row[None], [SamplerState(ignoring, 0, 4, eos_ids=[0])])[0][0] == 0


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="logit_bias") as caught:
        SamplerState(SamplingParams(logit_bias={4: 1.0}), 0, 4)
    assert (caught.value.param, caught.value.value, caught.value.limit) == ("logit_bias", 4, 4)


def test_logprobs_are_of_the_raw_distribution() -> None:
    row = (np.random.default_rng(3).standard_normal(500) * 2).astype(np.float32)
    row[17] = row[400] = row.max() + 1  # a tie at the top
    exact = row.astype(np.float64) - np.log(np.exp(row.astype(np.float64)).sum())
    params = SamplingParams(temperature=0.3, top_k=5, logit_bias={17: -100.0}, logprobs=3)
    _, logprobs = sample(row[None], [SamplerState(params, 1, 500)])
    report = logprobs[0]
    assert report is not None
    assert report.token != 17
    assert report.logprob == pytest.approx(exact[report.token], abs=1e-5)
    order = np.argsort(-row, kind="stable")[:3]
    assert [t for t, _ in report.top] == order.tolist()
    assert order[:2].tolist() == [17, 400]
    assert [p for _, p in report.top] == pytest.approx(exact[order].tolist(), abs=1e-5)


def test_logprobs_only_where_asked_and_without_impossible_tokens() -> None:
    row = row_of(-np.inf, 0.0, -np.inf, 0.0)
    wants = [SamplingParams(), SamplingParams(logprobs=0), SamplingParams(logprobs=20)]
    _, (nothing, chosen, all_of_them) = sample(np.stack([row] * 3), [SamplerState(p, 0, 4) for p in wants])
    assert nothing is None
    assert chosen is not None
    assert all_of_them is not None
    assert (chosen.token, chosen.top) == (1, ())
    assert chosen.logprob == pytest.approx(np.log(0.5))
    assert [t for t, _ in all_of_them.top] == [1, 3]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_is_told_apart_and_harms_nobody(bad: float) -> None:
    logits = np.zeros((3, 300), np.float32)
    logits[:, 7] = 50
    logits[1, 250] = bad
    for params in (SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(logprobs=2, top_k=3)):
        tokens, logprobs = sample(logits, [SamplerState(params, 0, 300) for _ in range(3)])
        assert tokens.tolist() == [7, INVALID_TOKEN, 7]
        assert logprobs[1] is None


def test_a_row_with_nothing_left_is_invalid() -> None:
    assert draw(row_of(-np.inf, -np.inf), SamplingParams(temperature=1.0)) == INVALID_TOKEN
    all_banned = SamplingParams(min_tokens=1, stop_token_ids=(0, 1))
    assert draw(row_of(1, 2), all_banned) == INVALID_TOKEN


def test_logits_and_states_are_left_as_they_were() -> None:
    logits = np.random.default_rng(0).standard_normal((2, 100)).astype(np.float32)
    logits.flags.writeable = False
    params = SamplingParams(temperature=1.0, logit_bias={1: 5.0}, repetition_penalty=1.5, logprobs=2)
    states = [SamplerState(params, i, 100, prompt_tokens=[4, 5]) for i in range(2)]
    first, _ = sample(logits, states)
    second, _ = sample(logits, states)
    np.testing.assert_array_equal(first, second)
    assert [s.num_output for s in states] == [0, 0]


def test_no_rows_and_a_wrong_number_of_states() -> None:
    tokens, logprobs = sample(np.empty((0, 10), np.float32), [])
    assert tokens.shape == (0,)
    assert logprobs == []
    with pytest.raises(ValueError, match="zip"):
        sample(np.zeros((2, 10), np.float32), [SamplerState(SamplingParams(), 0, 10)])


def test_two_threads_do_not_share_anything() -> None:
    logits = (np.random.default_rng(0).standard_normal((4, 20_000)) * 3).astype(np.float32)
    params = SamplingParams(temperature=1.0, top_p=0.95, logit_bias={1: 1.0})

    def tokens_of(seed: int) -> list[int]:
        return [int(t) for t in sample(logits, [SamplerState(params, seed + i, 20_000) for i in range(4)])[0]]

    expected = [tokens_of(seed) for seed in range(20)]
    found: dict[int, list[list[int]]] = {}

    def work(name: int) -> None:
        found[name] = [tokens_of(seed) for seed in range(20)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(found.values()) == [expected] * 3


@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0, 60.0])
def test_the_largest_few_choose_as_the_whole_row_does(spread: float) -> None:
    """Rounded to quarters, so that many logits are equal at the edge of the few."""
    rng = np.random.default_rng(3)
    for seed in range(60):
        row = (np.round(rng.standard_normal(1000) * spread * 4) / 4).astype(np.float32)
        params = SamplingParams(
            temperature=float(rng.choice([1e-3, 0.7, 1.0, 3.0])),
            top_k=int(rng.choice([1, 2, 40, 128])),
            top_p=float(rng.choice([0.3, 0.9, 1.0])),
            min_p=float(rng.choice([0.0, 0.1])),
        )
        assert params.top == params.top_k
        state = SamplerState(params, seed, len(row))
        tokens, _ = sample(row[None], [state])
        best = np.sort(np.argsort(-row, kind="stable")[: params.top_k])
        assert sample_top(best, row[best], state) == tokens[0]
    assert sample_top(best[:0], row[:0], state) == INVALID_TOKEN


def test_only_what_needs_no_other_logits_asks_for_a_few() -> None:
    assert SamplingParams(temperature=1.0, top_k=9, top_p=0.5, min_p=0.1).top == 9
    for other in ({"logprobs": 2}, {"min_tokens": 3}, {"frequency_penalty": 0.5}, {"logit_bias": {3: 1.0}}):
        assert SamplingParams(temperature=1.0, top_k=9, **other).top == 0
    assert SamplingParams(temperature=0.0, top_k=9).top == 0
    assert SamplingParams(temperature=1.0).top == 0


@pytest.mark.parametrize("poisoned", [False, True])
def test_requests_get_the_same_tokens_from_a_few_logits_as_from_all(poisoned: bool) -> None:
    outcomes = []
    for max_top in (0, 64):
        runner = FakeRunner(max_top=max_top, keep_plans=True)
        loop = StepLoop(runner, InputProcessor(runner.spec, None, 0), EngineConfig())
        ends: list[Event] = []
        for seed, top_k in enumerate((1, 7, 64, 65, 500)):
            sampling = SamplingParams(
                max_tokens=20, temperature=0.8, top_k=top_k, top_p=0.9, seed=seed, ignore_eos=True
            )
            loop.add(f"r{seed}", loop.inputs.prepare(Request(prompt_tokens=[5, 6, 7], sampling=sampling)), ends.append)
        if poisoned:
            runner.nan_for.add(2)
        while not loop.idle:
            loop.step()
        assert runner.plans is not None
        asked = {item.top for plan in runner.plans for item in plan.sequences if item.want is Want.TOP}
        assert asked == ({1, 7, 64} if max_top else set())
        results = {event.request_id: event.result for event in ends if event.result is not None}
        outcomes.append({name: (result.tokens, result.finish_reason) for name, result in sorted(results.items())})
    assert outcomes[0] == outcomes[1]
    assert (outcomes[0]["r1"][1] == "error") == poisoned


class Held(FakeRunner):
    """A runner that draws: for sequences of odd ids it names tokens, of the others it gives the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = replace(self.spec, draws=True)
        self.drawn: list[SeqId] = []

    def execute(self, plan: StepPlan) -> StepOutput:
        """DRAW as LOGITS, kept back."""
        drawing = [item.seq_id for item in plan.sequences if item.want is Want.DRAW]
        items = [i._replace(want=Want.LOGITS) if i.want is Want.DRAW else i for i in plan.sequences]
        output = super().execute(StepPlan(plan.step, tuple(items), plan.copies))
        assert all(item.want is not Want.LOGITS for item in plan.sequences), "whole rows were asked for"
        if output.logits is None:
            return output
        self._rows = dict(zip(drawing, output.logits, strict=True))
        return replace(output, logits=None, rows=self)

    def draw(self, draws: Mapping[SeqId, Draw]) -> Mapping[SeqId, int | NDArray[np.float32]]:
        """See `HeldRows`."""
        found: dict[SeqId, int | NDArray[np.float32]] = {}
        for seq_id, (scale, min_p, number) in draws.items():
            row = self._rows[seq_id].astype(np.float64)
            found[seq_id] = self._rows[seq_id]
            if not np.isfinite(row.max()):
                found[seq_id] = -1
            elif seq_id % 2:
                weights = np.exp((row - row.max()) * scale)
                weights[weights < min_p] = 0
                running = weights.cumsum()
                found[seq_id] = int(running.searchsorted(number * running[-1], side="right"))
                self.drawn.append(seq_id)
        return found


@pytest.mark.parametrize("poisoned", [False, True])
def test_requests_get_the_same_tokens_from_a_runner_that_draws(poisoned: bool) -> None:
    outcomes = []
    for runner in (FakeRunner(), Held()):
        loop = StepLoop(runner, InputProcessor(runner.spec, None, 0), EngineConfig())
        ends: list[Event] = []
        for seed, (temperature, min_p) in enumerate(((0.7, 0.0), (1.0, 0.0), (1.5, 0.05), (0.9, 0.0))):
            sampling = SamplingParams(max_tokens=20, temperature=temperature, min_p=min_p, seed=seed, ignore_eos=True)
            loop.add(f"r{seed}", loop.inputs.prepare(Request(prompt_tokens=[5, 6, 7], sampling=sampling)), ends.append)
        if poisoned:
            runner.nan_for.add(2)
        while not loop.idle:
            loop.step()
        results = {event.request_id: event.result for event in ends if event.result is not None}
        outcomes.append({name: (result.tokens, result.finish_reason) for name, result in sorted(results.items())})
        if isinstance(runner, Held):
            assert len(runner.drawn) >= 20
    assert outcomes[0] == outcomes[1]
    assert "error" in {reason for _, reason in outcomes[0].values()} or not poisoned


def test_what_is_drawn_by_temperature_alone() -> None:
    assert SamplingParams(temperature=0.5, min_p=0.1).draws
    for other in ({"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.9}, {"logprobs": 1}, {"presence_penalty": 0.5}):
        assert not SamplingParams(**({"temperature": 1.0} | other)).draws


def test_every_step_of_a_top_k_request_asks_for_a_few_logits_only() -> None:
    """Each decode step's rows are counted: a set over all plans would be content with that of the prefill alone."""
    runner = FakeRunner(keep_plans=True)
    loop = StepLoop(runner, InputProcessor(runner.spec, None, 0), EngineConfig())
    for seed, top_k in enumerate((7, 9)):
        sampling = SamplingParams(max_tokens=6, temperature=0.8, top_k=top_k, seed=seed, ignore_eos=True)
        request = Request(prompt_tokens=[5, 6, 7], sampling=sampling)
        loop.add(f"r{seed}", loop.inputs.prepare(request), lambda event: None)
    while not loop.idle:
        loop.step()
    assert runner.plans is not None
    rows = [[(item.want, item.top) for item in plan.sequences] for plan in runner.plans]
    assert len(rows) == 6
    assert all(wanted == [(Want.TOP, 7), (Want.TOP, 9)] for wanted in rows)
