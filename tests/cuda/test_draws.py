"""Tokens drawn on the device against the sampler's. Needs the extra `cuda`."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cuda.runners import torch  # isort: skip - first, it tells Triton where to run

from shoal.runners.cuda import choices
from shoal.runners.cuda.choices import DeviceRows
from shoal.runners.plan import Draw
from shoal.sampling.sampler import SamplerState, inverse, sample
from shoal.types import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # in the interpreter

VOCAB = 5000  # more than a program sums at once, and no whole number of it


@pytest.mark.parametrize("min_p", [0.0, 0.02])
def test_a_drawn_token_is_the_samplers(min_p: float) -> None:
    rng = np.random.default_rng(3)
    rows = rng.normal(0, 3, (24, VOCAB)).astype(np.float32)
    rows[5, 100:] = -np.inf
    rows[6, 7], rows[7, 9], rows[8] = np.nan, np.inf, -np.inf
    rows[9] = 0.0  # equal weights
    states, draws = [], {}
    for i in range(len(rows)):
        params = SamplingParams(temperature=(0.05, 0.7, 1.0, 1.9)[i % 4], min_p=min_p)
        states.append(SamplerState(params, seed=i, vocab_size=VOCAB))
        draws[100 + i] = Draw(float(inverse(params.temperature)), min_p, states[-1].next_uniform())
    expected, _ = sample(rows, states)
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    held = DeviceRows(torch.from_numpy(rows).to(device), {100 + i: i for i in range(len(rows))})
    found = held.draw(draws)
    told = [token for token in found.values() if isinstance(token, int)]
    assert len(told) >= len(rows) - 2, "it may not be sure of one or two"
    for i, token in enumerate(found.values()):
        if isinstance(token, int):
            assert token == expected[i], i
        else:
            assert np.array_equal(token, rows[i])
    assert [found[100 + i] for i in (6, 7, 8)] == [-1, -1, -1]


def test_a_number_near_the_end_of_a_token_is_left_to_the_sampler() -> None:
    row = np.random.default_rng(4).normal(0, 1, VOCAB).astype(np.float32)
    weights = np.exp((row - row.max()).astype(np.float64))
    ends = weights.cumsum() / weights.sum()
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    held = DeviceRows(torch.from_numpy(row[None]).to(device), {1: 0})
    middle = (ends[3000] + ends[2999]) / 2
    assert held.draw({1: Draw(1.0, 0.0, float(middle))}) == {1: 3000}
    for number in (ends[3000] - 1e-6, ends[3000] + 1e-6, 0.0):
        found = held.draw({1: Draw(1.0, 0.0, float(number))})[1]
        assert not isinstance(found, int)
        assert np.array_equal(found, row)


def test_a_device_that_draws_others_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner asks once, when it is loaded."""
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    assert choices.draws_rightly(device)
    true = DeviceRows.draw

    def wrong(self: DeviceRows, draws: dict[int, Draw]) -> dict[int, object]:
        found: dict[int, object] = dict(true(self, draws))
        found[9] = 0
        return found

    monkeypatch.setattr(DeviceRows, "draw", wrong)
    assert not choices.draws_rightly(device)
