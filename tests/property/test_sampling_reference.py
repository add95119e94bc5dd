"""The sampler against a slow one that follows the definition word for word, on rows of every awkward kind."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shoal.sampling.sampler import INVALID_TOKEN, SamplerState, sample, uniform
from shoal.types import SamplingParams

Floats = NDArray[np.float32]


def reference(row: Floats, params: SamplingParams, u: float, error: float = 0.0) -> int:
    """Full sorts, float64 sums; `error` shifts every comparison of sums by that part of the total."""
    ids = np.argsort(-row, kind="stable")
    if params.temperature == 0:
        return int(ids[0])
    with np.errstate(over="ignore"):
        inverse = np.float32(min(1 / params.temperature, 3e38))
        weights = np.exp((row - row.max()) * inverse) if params.temperature != 1 else np.exp(row - row.max())
    if params.top_k:
        ids = ids[: params.top_k]
    if params.top_p < 1:
        ids = np.sort(ids)
        ids = ids[np.argsort(-weights[ids], kind="stable")]
        running = np.cumsum(weights[ids].astype(np.float64))
        target = (params.top_p + error) * running[-1]
        size = next((i for i, mass in enumerate(running) if mass >= target), len(ids) - 1) + 1
        ids = ids[:size]
    ids = np.sort(ids[weights[ids] >= np.float32(params.min_p)])
    running = np.cumsum(weights[ids].astype(np.float64))
    passed = running > (u + error) * running[-1]
    passed &= weights[ids] > 0
    return int(ids[np.argmax(passed)]) if passed.any() else int(ids[weights[ids] > 0][-1])


def accepted(row: Floats, params: SamplingParams, u: float) -> set[int]:
    return {reference(row, params, u, error) for error in (0.0, -1e-6, 1e-6)}


def peaked(rng: np.random.Generator, size: int) -> Floats:
    return (rng.standard_normal(size) * 3).astype(np.float32)


def coarse(rng: np.random.Generator, size: int) -> Floats:
    return (np.round(rng.standard_normal(size) * 24) / 8).astype(np.float32)  # many ties, as bf16 kernels give


def flat(rng: np.random.Generator, size: int) -> Floats:
    return (rng.standard_normal(size) * 1e-3).astype(np.float32)


def constant(rng: np.random.Generator, size: int) -> Floats:
    return np.full(size, rng.standard_normal(), np.float32)


def masked(rng: np.random.Generator, size: int) -> Floats:
    row = peaked(rng, size)
    row[rng.random(size) < 0.9] = -np.inf
    row[rng.integers(size)] = 1.5
    return row


def single(rng: np.random.Generator, size: int) -> Floats:
    row = np.full(size, -np.inf, np.float32)
    row[rng.integers(size)] = -3.0
    return row


def huge(rng: np.random.Generator, size: int) -> Floats:
    return (rng.standard_normal(size) * 1e37).astype(np.float32)


KINDS: list[Callable[[np.random.Generator, int], Floats]] = [peaked, coarse, flat, constant, masked, single, huge]


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(
    size=st.sampled_from([1, 2, 7, 255, 256, 257, 1000, 5000, 20_000]),
    rows=st.integers(0, 2**32 - 1),
    temperature=st.sampled_from([0.0, 1e-40, 1e-3, 0.1, 0.8, 1.0, 2.0, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 40, 700, 10**6]),
    top_p=st.sampled_from([1e-6, 0.5, 0.9, 0.95, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-30, 1e-4, 0.05, 0.5, 1.0]),
)
def test_agrees_with_the_slow_sampler(
    kind: Callable[[np.random.Generator, int], Floats],
    size: int,
    rows: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    rng = np.random.default_rng(rows)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    row = kind(rng, size)
    seeds = [int(s) for s in rng.integers(0, 2**63, 4)]
    tokens, _ = sample(np.stack([row] * 4), [SamplerState(params, s, size) for s in seeds])
    for token, seed in zip(tokens, seeds, strict=True):
        assert int(token) in accepted(row, params, uniform(seed, 0))
        assert row[token] > -np.inf


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(0, 2**32 - 1),
    prompt=st.lists(st.integers(0, 299), max_size=80),
    output=st.lists(st.integers(0, 299), max_size=200),
    repetition=st.sampled_from([1.0, 0.5, 1.3]),
    presence=st.sampled_from([0.0, 0.7, -0.7]),
    frequency=st.sampled_from([0.0, 0.25, -0.25]),
    bias=st.dictionaries(st.integers(0, 299), st.floats(-1000, 1000, width=32), max_size=5),
    min_tokens=st.sampled_from([0, 10, 250]),
)
def test_penalties_agree_with_the_definition(
    rows: int,
    prompt: list[int],
    output: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
    min_tokens: int,
) -> None:
    row = coarse(np.random.default_rng(rows), 300)
    params = SamplingParams(
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
        min_tokens=min_tokens,
        stop_token_ids=(5, 1000),
    )
    state = SamplerState(params, 0, 300, prompt, eos_ids=(7,))
    for token in output:
        state.accept(token)
    expected = row.copy()
    for token in range(300):
        z = expected[token]
        if token in prompt or token in output:
            z = z / np.float32(repetition) if z > 0 else z * np.float32(repetition)
        z -= np.float32(output.count(token)) * np.float32(frequency)
        z -= np.float32(token in output) * np.float32(presence)
        z += np.float32(bias.get(token, 0.0))
        expected[token] = -np.inf if token in (5, 7) and len(output) < min_tokens else z
    shaped = row.copy()
    state.shape(shaped)
    np.testing.assert_array_equal(shaped, expected)
    tokens, _ = sample(row[None], [state])
    assert tokens[0] == expected.argmax()


@settings(deadline=None, max_examples=30)
@given(rows=st.integers(0, 2**32 - 1))
def test_a_row_gives_the_same_bits_in_any_batch(rows: int) -> None:
    rng = np.random.default_rng(rows)
    vocab, kinds = (
        5003,
        [
            SamplingParams(temperature=0.8),
            SamplingParams(temperature=1.0, top_p=0.95, logprobs=3),
            SamplingParams(temperature=1.3, top_k=40),
            SamplingParams(temperature=100.0, top_p=0.9, min_p=0.01),
            SamplingParams(temperature=0.5, min_p=0.1, logprobs=0),
            SamplingParams(),
            SamplingParams(logprobs=5, repetition_penalty=1.2),
            SamplingParams(temperature=0.9, presence_penalty=1.0, logit_bias={3: 5.0}),
        ],
    )
    states = [SamplerState(p, int(rng.integers(2**63)), vocab, [1, 2, 3]) for p in kinds]
    for state in states:
        for token in rng.integers(0, vocab, int(rng.integers(4))):
            state.accept(int(token))
    logits = np.stack([peaked(rng, vocab) for _ in states])
    logits[2] = np.nan
    tokens, logprobs = sample(logits, states)
    assert tokens[2] == INVALID_TOKEN
    chosen = list(rng.permutation(len(states))[: int(rng.integers(1, len(states) + 1))])
    # The same rows in another order, number and memory layout, at another alignment.
    memory = np.empty(len(chosen) * (vocab + 3) + 1, np.float32)[1:].reshape(len(chosen), vocab + 3)
    memory[:, :vocab] = logits[chosen]
    for batch in (logits[chosen], memory[:, :vocab], np.asfortranarray(logits[chosen])):
        again, logprobs_again = sample(batch, [states[i] for i in chosen])
        np.testing.assert_array_equal(again, tokens[chosen])
        assert logprobs_again == [logprobs[i] for i in chosen]
