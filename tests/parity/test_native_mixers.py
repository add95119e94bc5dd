"""Every family on the native kernels: against the oracle, and the same bits under random schedules."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from shoal.models import families, oracle
from shoal.models.decoder import Attention, Float, Rotary
from shoal.models.gguf import read_gguf
from shoal.runners.native import describe
from shoal.runners.native.runner import KvPrecision
from shoal.runners.plan import ScheduledSequence, StepPlan, Want
from tests.parity.equality import run
from tests.parity.schedules import Job, run_alone, run_together
from tests.support.native_tiny import isas, open_tiny, tiny_native
from tests.support.tiny_models import MODELS, some_tokens, write_model
from tests.support.tiny_writer import VOCAB, WIDTH, Tiny

ISAS = isas()
EACH = ("qwen35moe", "granitehybrid-mixture", "lfm2", "gemma3", "gpt-oss", "olmo3", "gemma2")
"""A model for each kind of mixer, feed-forward and norm."""


def to_bf16(x: Float) -> Float:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


@contextmanager
def rounded() -> Iterator[None]:
    """The oracle with bf16 where the kernels have it: queries, keys, values and, up to 64 tokens, softmax weights."""
    attention, keys, rotate = oracle.attention, oracle._keys, oracle.rotate
    of: list[Attention] = []

    def rounded_softmax(x: Float) -> Float:
        weights = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
        out: Float = (to_bf16(weights.astype(np.float32)) / weights.sum(-1, keepdims=True)).astype(np.float32)
        return out

    def attention_of(x: Float, part: Attention, i: int, kept: dict[int, oracle.Keys]) -> Float:
        of.append(part)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(oracle, "softmax", rounded_softmax)
            return attention(x, part, i, kept)

    def rounded_keys(x: Float, part: Attention) -> oracle.Keys:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(oracle, "rotate", rotate)
            k, v = keys(x, part)
        return to_bf16(k), to_bf16(v)

    def rounded_queries(x: Float, part: Rotary) -> Float:
        grown = of[-1].query_scale
        scale = np.full((len(x), 1, 1), np.log2(np.e) * of[-1].scale, np.float32)
        if grown is not None:
            scale[:, 0, 0] *= 1 + grown.beta * np.log(1 + np.arange(len(x)) // grown.length)
        out: Float = to_bf16(rotate(x, part) * scale) / scale
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "attention", attention_of)
        patch.setattr(oracle, "_keys", rounded_keys)
        patch.setattr(oracle, "rotate", rounded_queries)
        yield


def divergences(exact: NDArray[np.float32], rows: NDArray[np.float32]) -> list[float]:
    return [oracle.mean_kl(a[None], b[None]) for a, b in zip(exact, rows, strict=True)]


def against_the_oracle(
    name: str, kind: str | None, isa: str, folder: Path
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Logits of the oracle and of the kernels after token 3 of 60, and after the fortieth and each that follows."""
    path = write_model(folder / f"{name}.gguf", name, kind)
    model = families.describe(read_gguf(path))
    reason = describe.refuses(model)
    if reason is not None:
        pytest.skip(f"refused: {reason}")
    tokens = some_tokens(60)
    with rounded():
        exact = oracle.logits(model, tokens)
    runner = open_tiny(path, isa=isa)
    rows = []
    for begin, end in [(0, 3), (3, 40), *((i, i + 1) for i in range(40, 60))]:
        part = ScheduledSequence(1, tuple(tokens[begin:end]), begin, (9, 2, 5), Want.LOGITS)
        output = runner.execute(StepPlan(0, (part,)))
        assert output.logits is not None
        rows.append(output.logits[0].copy())
    runner.close()
    return exact[[2, *range(39, 60)]], np.stack(rows)


CASES = [(name, ISAS[0]) for name in MODELS] + [(name, isa) for name in EACH for isa in ISAS[1:]]


@pytest.mark.parametrize(("name", "isa"), CASES, ids=[f"{name}-{isa}" for name, isa in CASES])
def test_a_family_computes_what_the_oracle_computes(name: str, isa: str, tmp_path: Path) -> None:
    """In float32 weights; quantised ones bring activations in 8 bits, whose rounding random weights magnify."""
    exact, rows = against_the_oracle(name, None, isa, tmp_path)
    far = sorted(divergences(exact, rows))
    if name == "gemma4-mixture":  # its router stands between two experts in one of the rows, and may choose the other
        far.pop()
    assert np.mean(far) < (1e-4 if MODELS[name][1] == "F32" else 3e-2)
    best = rows.argmax(-1)
    for row, other, token in zip(exact, rows, best, strict=True):
        assert row.max() - row[token] <= 2 * np.abs(row - other).max()  # equal, or a tie but for rounding


@pytest.mark.parametrize("name", EACH)
def test_a_quantised_family_is_near_the_oracle(name: str, tmp_path: Path) -> None:
    exact, rows = against_the_oracle(name, "Q8_0", ISAS[0], tmp_path)
    assert np.median(divergences(exact, rows)) < 5e-2  # random experts differ more than trained ones do
    assert np.median([np.corrcoef(a, b)[0, 1] for a, b in zip(exact, rows, strict=True)]) > 0.98


@pytest.mark.parametrize("kv", ["bf16", "u8"])
@pytest.mark.parametrize(("name", "isa"), [(n, i) for n in EACH for i in ISAS if i in (ISAS[0], "plain")])
def test_company_chunks_and_threads_change_no_bit(name: str, isa: str, kv: KvPrecision, tmp_path: Path) -> None:
    rng = random.Random(f"{name}{isa}{kv}")
    path = write_model(tmp_path / "m.gguf", name, "Q8_0")

    def tokens(count: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(count)]

    lengths = [rng.choice([1, 2, rng.randint(3, 24), rng.randint(1, 150)]) for _ in range(3 if isa == "plain" else 7)]
    alone = [Job(tokens(n), tokens(4)) for n in lengths]
    together = [Job(job.prompt, job.decoded) for job in alone]
    one, three = (open_tiny(path, isa=isa, threads=n, kv=kv, kv_bytes=16 << 20) for n in (1, 3))
    run_alone(one, alone)
    run_together(three, together, rng)
    for a, b in zip(alone, together, strict=True):
        for at, (row, other) in enumerate(zip(a.rows, b.rows, strict=True)):
            assert np.array_equal(row, other), f"row {at} of a prompt of {len(a.prompt)} differs"


@pytest.mark.parametrize("name", ["qwen35", "qwen3moe", "gemma3", "granitehybrid-mixture"])
def test_random_schedules_of_an_engine_change_no_bit(name: str, tmp_path: Path) -> None:
    """`python -m tests.parity.equality --tiny NAME --schedules 200` is the large form."""
    runner = tiny_native(name, tmp_path)
    outcome = run(runner, schedules=12, requests=8, seed=5)
    assert (outcome.rows_differing, outcome.outputs_differing) == (0, 0)
    assert outcome.rows > 300
    assert outcome.seen["hit"] > 0


@pytest.mark.parametrize("name", ["qwen3", "gemma4-small"])  # the latter's last layers read keys of others
def test_keys_with_outlying_elements_keep_their_bits_and_fit_eight(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm's large weights go half over to queries: nothing changes where KV is bf16, and codes get finer."""
    norm = Tiny.norm

    def outlying(tiny: Tiny, at: str, size: int = WIDTH) -> None:
        if at.endswith("k_norm"):
            tiny.raw(f"{at}.weight", np.where(np.arange(size) % (size // 2) == 1, 24.0, 1.0))
        elif at.endswith("q_norm"):
            tiny.raw(f"{at}.weight", np.where(np.arange(size) % (size // 2) == 1, 1 / 24, 1.0))
        else:
            norm(tiny, at, size)

    def rows(folder: str, kv: KvPrecision) -> NDArray[np.float32]:
        (tmp_path / folder).mkdir(exist_ok=True)
        runner = open_tiny(write_model(tmp_path / folder / "m.gguf", name, "Q8_0"), kv=kv)
        output = runner.execute(
            StepPlan(0, (ScheduledSequence(1, tuple(some_tokens(48)), 0, (0, 1), Want.LOGITS, rows=48),))
        )
        runner.close()
        assert output.logits is not None
        return output.logits.copy()

    monkeypatch.setattr(Tiny, "norm", outlying)
    after, codes = rows("after", "bf16"), rows("after", "u8")
    monkeypatch.setattr(describe, "balances", lambda _: {})
    before, coarse = rows("before", "bf16"), rows("before", "u8")
    assert np.array_equal(before, after)
    assert oracle.mean_kl(before, codes) < 0.4 * oracle.mean_kl(before, coarse)
