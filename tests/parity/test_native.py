"""The native runner on the default model: fidelity, and the same bits in any batch, with KV in 16 and in 8 bits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from shoal.models import ModelFiles
from shoal.models.families import describe
from shoal.models.gguf import read_gguf
from shoal.models.oracle import logits, mean_kl
from shoal.runners.native.runner import KvPrecision, NativeRunner
from shoal.runners.plan import ScheduledSequence, StepPlan, Want
from shoal.runners.registry import LocalModel
from tests.parity.schedules import Job, run_alone, run_together
from tests.support.native_tiny import isas

ISAS = isas()
KV: tuple[KvPrecision, ...] = ("bf16", "u8")
DECODED = 4
Load = Callable[..., NativeRunner]


@pytest.fixture(scope="module")
def load(model_files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    """Runners by instruction set, threads and precision of KV; the file is packed once."""
    cache: Path = tmp_path_factory.mktemp("packed")
    made: dict[tuple[str, int, KvPrecision], NativeRunner] = {}
    model = LocalModel.read(model_files)

    def one(isa: str, threads: int, kv: KvPrecision = "bf16") -> NativeRunner:
        if (isa, threads, kv) not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("SHOAL_ISA", isa)
                made[isa, threads, kv] = NativeRunner.load(
                    model, kv_bytes=256 << 20, cache_dir=cache, threads=threads, kv_precision=kv
                )
        return made[isa, threads, kv]

    yield one
    for runner in made.values():
        runner.close()


def test_the_best_instruction_set_is_taken(load: Load) -> None:
    assert load("auto", 2).isa == ISAS[0]
    assert load("plain", 2).isa == "plain"


@pytest.fixture(scope="module")
def exact(model_files: ModelFiles, text_tokens: list[int]) -> NDArray[np.float32]:
    return logits(describe(read_gguf(model_files.path)), text_tokens)


@pytest.mark.parametrize("kv", KV)
def test_it_says_nearly_what_the_file_says(
    load: Load, exact: NDArray[np.float32], text_tokens: list[int], kv: KvPrecision
) -> None:
    runner = load("auto", 2, kv)
    table = tuple(range(len(text_tokens) // 32 + 1))
    rows = np.empty_like(exact)
    for at, token in enumerate(text_tokens):
        output = runner.execute(StepPlan(at, (ScheduledSequence(1, (token,), at, table, Want.LOGITS),)))
        assert output.logits is not None
        rows[at] = output.logits[0]
    divergence, agreement = mean_kl(exact, rows), np.mean(exact.argmax(-1) == rows.argmax(-1))
    print(f"{runner.isa}, KV in {kv}: mean KL {divergence:.5f}, top-1 agreement {agreement:.4f}")
    assert divergence <= 0.004
    assert agreement >= 0.95


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize(("isa", "seed"), [(isa, s) for isa in ISAS for s in range(3 if isa == ISAS[0] else 1)])
def test_random_schedules_change_no_bit(load: Load, isa: str, seed: int, kv: KvPrecision) -> None:
    """Alone on one thread, together on three: neither the company nor the chunks nor the threads may show."""
    rng = random.Random(seed)
    most = 24 if isa == "plain" else 900 if seed == 0 and isa == ISAS[0] else 200

    def tokens(count: int) -> list[int]:
        return [rng.randrange(49152) for _ in range(count)]

    count = 3 if isa == "plain" else rng.randint(2, 12)
    lengths = [rng.choice([1, 2, rng.randint(3, 24), rng.randint(1, most)]) for _ in range(count)]
    alone = [Job(tokens(n), tokens(DECODED)) for n in lengths]
    together = [Job(job.prompt, job.decoded) for job in alone]
    run_alone(load(isa, 1, kv), alone)
    run_together(load(isa, 3, kv), together, rng)
    for a, b in zip(alone, together, strict=True):
        assert len(a.rows) == len(b.rows) == DECODED + 1
        for at, (row, other) in enumerate(zip(a.rows, b.rows, strict=True)):
            assert np.array_equal(row, other), f"row {at} of a prompt of {len(a.prompt)} differs"


@pytest.mark.parametrize("kv", KV)
def test_shared_trunks_change_no_bit(load: Load, text_tokens: list[int], kv: KvPrecision) -> None:
    """Twenty rows over one trunk of 200 tokens, some parting early, against each of them alone in blocks of its own."""
    runner, rng = load("auto", 2, kv), random.Random(3)
    trunk = text_tokens[:224]
    table = tuple(range(7))
    runner.execute(StepPlan(0, (ScheduledSequence(1, tuple(trunk), 0, table, Want.NOTHING),)))
    items, prompts = [], []
    for i in range(20):
        shared = rng.choice([1, 2, 3, 6, 7, 7, 7])
        suffix = [rng.randrange(1000) for _ in range(rng.choice([1, 1, 5, 70]))]
        own = tuple(range(20 + 4 * i, 24 + 4 * i))
        items.append(ScheduledSequence(10 + i, tuple(suffix), 32 * shared, table[:shared] + own, Want.LOGITS))
        prompts.append(trunk[: 32 * shared] + suffix)
    output = runner.execute(StepPlan(0, tuple(items)))
    assert output.logits is not None
    rows = output.logits.copy()
    for row, prompt in zip(rows, prompts, strict=True):
        alone = runner.execute(
            StepPlan(0, (ScheduledSequence(99, tuple(prompt), 0, tuple(range(200, 212)), Want.LOGITS),))
        )
        assert alone.logits is not None
        assert np.array_equal(row, alone.logits[0])


@pytest.mark.parametrize("kv", KV)
def test_a_long_context_has_the_same_bits_in_whatever_sections(
    load: Load, text_tokens: list[int], kv: KvPrecision
) -> None:
    """Over 1,056 tokens: one row (cut into sections for all threads), eleven rows (not cut), and on one thread."""
    trunk, suffix = (text_tokens * 3)[:1056], tuple(text_tokens[:3])
    table = tuple(range(33))

    def fill(runner: NativeRunner) -> None:
        for at in range(0, 1056, 480):
            part = tuple(trunk[at : at + 480])
            runner.execute(StepPlan(0, (ScheduledSequence(1, part, at, table, Want.NOTHING),)))

    def row(number: int, shared: int) -> ScheduledSequence:
        own = tuple(range(40 + 2 * number, 42 + 2 * number))
        return ScheduledSequence(10 + number, suffix, 32 * shared, table[:shared] + own, Want.LOGITS)

    def logits_of(runner: NativeRunner, *items: ScheduledSequence) -> NDArray[np.float32]:
        output = runner.execute(StepPlan(0, items))
        assert output.logits is not None
        return output.logits.copy()

    many, one = load("auto", 3, kv), load("auto", 1, kv)
    fill(many)
    fill(one)
    parts = [33, 33, 33, 20, 20, 33, 33, 7, 33, 17, 33]
    together = logits_of(many, *(row(i, shared) for i, shared in enumerate(parts)))
    for shared in set(parts):
        alone = logits_of(many, row(20, shared))[0]
        assert np.array_equal(alone, logits_of(one, row(20, shared))[0])
        assert all(np.array_equal(alone, together[i]) for i, other in enumerate(parts) if other == shared)


def test_chained_steps_are_the_single_ones(load: Load, text_tokens: list[int]) -> None:
    runner = load("auto", 2)
    starts = {1: text_tokens[:40], 2: text_tokens[50:57]}
    tables = {1: (0, 1, 2), 2: (5, 3)}
    outcomes: list[dict[int, list[int]]] = []
    for chain in (1, 8):
        prefill = tuple(ScheduledSequence(s, tuple(t), 0, tables[s], Want.ARGMAX) for s, t in starts.items())
        tokens = {s: list(row) for s, row in runner.execute(StepPlan(0, prefill)).argmax.items()}
        while len(tokens[1]) < 9:
            feed = tuple(
                ScheduledSequence(s, (row[-1],), len(starts[s]) + len(row) - 1, tables[s], Want.ARGMAX)
                for s, row in tokens.items()
            )
            for s, row in runner.execute(StepPlan(0, feed, chain=chain)).argmax.items():
                tokens[s] += row
        outcomes.append(tokens)
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("isa", ISAS[1:])
def test_instruction_sets_agree(load: Load, text_tokens: list[int], isa: str, kv: KvPrecision) -> None:
    """Not to the bit, sums run in other orders, but to what rounding explains."""
    plan = StepPlan(0, (ScheduledSequence(1, tuple(text_tokens[:48]), 0, (0, 1), Want.LOGITS),))
    rows = []
    for name in ("plain", isa):
        output = load(name, 2, kv).execute(plan)
        assert output.logits is not None
        rows.append(output.logits.copy())
    assert mean_kl(rows[0], rows[1]) < 2e-3
