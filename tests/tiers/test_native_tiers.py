"""KV of the native runner on disk: every kind of model gives the same bits after a restart as without one."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.errors import ModelNotFoundError
from shoal.runners.native.runner import KvPrecision, NativeRunner
from shoal.types import Result, SamplingParams
from tests.support.native_tiny import isas, open_tiny, tiny_native
from tests.support.runners import real_runner
from tests.support.tiers import BadFiles, Lab
from tests.support.tiny_models import write_model

KINDS: list[tuple[str, KvPrecision]] = [
    ("llama", "auto"),
    ("llama", "u8"),
    ("qwen35", "auto"),
    ("granitehybrid", "u8"),
    ("lfm2", "auto"),
    ("gemma3", "auto"),
]


def answers(lab: Lab, prompts: list[list[int]]) -> list[Result]:
    results = []
    for number, prompt in enumerate(prompts):
        results.append(lab.result_of(prompt, SamplingParams(max_tokens=6, logprobs=5, ignore_eos=True), str(number)))
        lab.settle()
    return results


@pytest.mark.parametrize(("name", "kv"), KINDS)
def test_a_restart_gives_the_bits_of_a_run_that_never_stopped(tmp_path: Path, name: str, kv: KvPrecision) -> None:
    isas()
    rng = random.Random(4)
    prompts = [[rng.randrange(3, 120) for _ in range(140)] for _ in range(2)]
    longer = [[*prompt, *(rng.randrange(3, 120) for _ in range(9))] for prompt in prompts]

    path = write_model(tmp_path / "tiny.gguf", name, "Q8_0")

    def runner() -> NativeRunner:
        return open_tiny(path, kv=kv, kv_bytes=8 << 20)

    whole = Lab(runner=runner())
    expected = answers(whole, longer)
    whole.runner.close()
    before = Lab(tmp_path / "kv", quota=1 << 30, runner=runner())
    answers(before, prompts)
    before.close()
    before.runner.close()
    after = Lab(tmp_path / "kv", quota=1 << 30, runner=runner())
    found = answers(after, longer)
    after.close()
    after.runner.close()
    assert [result.receipt.disk_tokens for result in found] == [128, 128]
    assert [(r.tokens, r.logprobs) for r in found] == [(r.tokens, r.logprobs) for r in expected]


def test_another_precision_of_kv_finds_nothing(tmp_path: Path) -> None:
    isas()
    path = write_model(tmp_path / "tiny.gguf", "llama", "Q8_0")
    prompt = [5 + i % 90 for i in range(100)]
    steps: tuple[tuple[KvPrecision, int], ...] = (("auto", 0), ("u8", 0), ("auto", 96))
    for kv, cached in steps:
        lab = Lab(tmp_path / "kv", quota=1 << 30, runner=open_tiny(path, kv=kv))
        (result,) = answers(lab, [prompt])
        assert result.receipt.disk_tokens == cached
        lab.close()
        lab.runner.close()


def test_memory_that_is_given_back_is_not_read(tmp_path: Path) -> None:
    isas()
    runner = tiny_native("llama", tmp_path)
    lab = Lab(runner=runner)
    prompt = [5 + i % 90 for i in range(100)]
    (first,) = answers(lab, [prompt])
    lab.loop.drop_kv()
    runner.discard_blocks(lab.loop.scheduler.kv.pool.free_blocks)
    (again,) = answers(lab, [prompt])
    assert (again.tokens, again.receipt.cached_tokens) == (first.tokens, 0)
    runner.close()


def ten_megabytes_a_second(files: BadFiles) -> None:
    files.rate = 10e6


def gone(files: BadFiles) -> None:
    files.path = Path("/nowhere/at/all")


@pytest.mark.model
@pytest.mark.parametrize("suffer", [ten_megabytes_a_second, gone])
def test_real_streams_get_a_token_in_every_step_whatever_the_disk_does(
    tmp_path: Path, suffer: Callable[[BadFiles], None]
) -> None:
    """On the default model, whose blocks take many steps to come from such a disk. Steps are counted, not timed."""
    try:
        runner = real_runner("native", kv_memory="64MiB")
    except ModelNotFoundError as error:
        pytest.skip(f"no model: {error}")
    assert isinstance(runner, NativeRunner)
    rng = random.Random(8)
    prompts = [[rng.randrange(1000, 40000) for _ in range(200)] for _ in range(3)]
    before = Lab(tmp_path, quota=1 << 30, runner=runner)
    expected = [before.ask(prompt)[0] for prompt in prompts]
    before.loop.drop_kv()
    files = BadFiles(tmp_path, runner.identity, 1 << 30)
    lab = Lab(files=files, runner=runner, speculation=False)  # one token a step
    assert lab.disk is not None
    lab.disk.wait_scanned(60.0)
    suffer(files)  # now that it is known what should be there
    stream, _ = lab.add([*range(1000, 1040)], 100)
    while not stream.seq.decoding:
        lab.step()
    late = []
    for count in range(80):
        if count in (0, 25, 50):
            late.append(lab.add(prompts[count // 25], 4)[1])
        written = len(stream.seq.tokens)
        lab.step()
        assert len(stream.seq.tokens) > written, "a stream waits for the disk"
    lab.drain()
    assert files.asked, "the disk was not used at all"
    assert threading.get_ident() not in files.threads, "the thread that steps was in a call to the disk"
    assert [told[-1].result.tokens for told in late if told[-1].result is not None] == expected
    if suffer is ten_megabytes_a_second:
        assert lab.tiers.stats().restored_disk_blocks > 0, "nothing came from a disk that is slow and right"
    lab.close()
    before.close()
    runner.close()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system does not tell resident memory")
def test_thirty_turns_with_memory_for_five_grow_nothing(tmp_path: Path) -> None:
    """Six chats of five turns each, on a device that holds about one of them: the rest comes from disk."""
    isas()
    path = write_model(tmp_path / "tiny.gguf", "llama", "Q8_0")
    probe = open_tiny(path)
    block_bytes = probe.spec.block_bytes
    probe.close()
    lab = Lab(tmp_path / "kv", quota=1 << 30, runner=open_tiny(path, kv_bytes=block_bytes * 14))
    rng = random.Random(6)
    chats: list[list[int]] = [[] for _ in range(6)]
    prompts = cached = 0
    sizes = []
    for turn in range(90):
        if turn % 30 == 0:
            chats = [[rng.randrange(3, 120) for _ in range(60)] for _ in range(6)]
        chat = chats[turn % 6]
        chat += (rng.randrange(3, 120) for _ in range(40))
        (result,) = answers(lab, [chat])
        prompts, cached = prompts + result.prompt_tokens, cached + result.cached_tokens
        chat += result.tokens
        sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4)
    assert cached > prompts * 0.5
    assert lab.tiers.stats().restored_disk_blocks > 50
    assert max(sizes[60:]) < max(sizes[:30]) + 8192, f"resident memory grew, in KiB: {sizes[::10]}"
    lab.close()
    lab.runner.close()
