"""The native runner's edges: what is packed, what is refused and how, and that nothing leaks between sequences."""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES

from shoal.config import EngineConfig
from shoal.errors import BackendError, ConfigError, ModelFormatError, RunnerError, StoreError, UnsupportedModelError
from shoal.models import families
from shoal.models.decoder import Attention, Dense, Weight
from shoal.models.files import local_files
from shoal.models.gguf import GgufModel, GgufTensor, read_gguf
from shoal.runners.native import backend, describe, pack, runner
from shoal.runners.native.core import load_core
from shoal.runners.native.runner import KvPrecision, NativeRunner, packed_path
from shoal.runners.plan import ScheduledSequence, StepPlan, Want
from shoal.runners.registry import LocalModel, choose_runner
from tests.support.native_tiny import isas, open_tiny, write_blocks
from tests.support.tiny_gguf import write_tiny

ISAS = isas()


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_blocks(tmp_path_factory.mktemp("tiny") / "blocks.gguf", "Q4_1", bad_token=7)


@pytest.fixture
def tiny(blocks: Path) -> NativeRunner:
    return open_tiny(blocks)


def item(
    tokens: list[int], start: int, table: tuple[int, ...], want: Want = Want.LOGITS, seq_id: int = 1
) -> ScheduledSequence:
    return ScheduledSequence(seq_id, tuple(tokens), start, table, want)


def run(made: NativeRunner, *items: ScheduledSequence, **fields: Any) -> Any:
    output = made.execute(StepPlan(0, items, **fields))
    return None if output.logits is None else output.logits.copy()


# -- packing ---------------------------------------------------------------------------------------------------------


def part_of(kind: str, shape: tuple[int, ...], data: Any) -> pack.PackedTensor:
    return pack.PackedTensor("w", shape, Weight(GgufTensor("w", kind, shape, data), shape))


def random_part(kind: str, shape: tuple[int, ...]) -> pack.PackedTensor:
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    data = np.random.default_rng(3).integers(0, 256, math.prod(shape) // block * size, dtype=np.uint8)
    return part_of(kind, shape, data)


@pytest.mark.parametrize("kind", sorted(pack.FORMS))
def test_packing_keeps_every_weight(kind: str) -> None:
    """Random bits, so infinite and undefined scales too."""
    part = random_part(kind, (40, 512))
    entry, total = pack.entry_of(part, 0)
    packed = pack.packed_bytes(part)
    assert packed.nbytes == total
    values = np.empty((40, 512), np.float32)
    for row, out in enumerate(values):
        load_core().unpack(asdict(entry), packed, row, out)
    assert isinstance(part.weight, Weight)
    assert np.array_equal(values, part.weight.tensor.dequantize(), equal_nan=True)


@pytest.mark.parametrize("kind", [k for k in pack.FORMS if k != "Q3_K" and not k.startswith(("IQ1", "IQ2", "IQ3"))])
def test_packed_weights_are_hardly_larger_than_their_source(kind: str) -> None:
    part = random_part(kind, (64, 512))
    assert pack.entry_of(part, 0)[1] <= 1.02 * part.encoded_rows(0, part.shape[0]).nbytes


def test_a_tensor_of_several_pieces_is_packed_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("Q4_K", "IQ2_S"):
        part = random_part(kind, (200, 256))
        whole = pack.packed_bytes(part)
        with monkeypatch.context() as patch:
            patch.setattr(pack, "_PIECE", 10_000)
            assert np.array_equal(pack.packed_bytes(part), whole)


def test_the_extension_packs_nothing_beyond_its_arrays() -> None:
    core = load_core()
    part = part_of("Q4_0", (32, 64), np.zeros(32 * 36, np.uint8))
    entry, size = pack.entry_of(part, 0)
    raw, out, fields = part.encoded_rows(0, 32).reshape(-1), np.zeros(size, np.uint8), asdict(entry)
    core.pack(fields, "Q4_0", raw, out)
    for arguments in (
        (fields, "Q4_1", raw, out),
        (fields, "Q4_0", raw[:-1], out),
        (fields, "Q4_0", raw, out[:-1]),
        (fields | {"n": 33}, "Q4_0", raw, out),
        (fields | {"n": -1}, "Q4_0", raw, out),
        (fields, "abacus", raw, out),
        (fields | {"codes": 9}, "Q4_0", raw, out),
    ):
        with pytest.raises(core.FormatError):
            core.pack(*arguments)
    other = asdict(pack.entry_of(random_part("Q4_K", (32, 256)), 0)[0])  # of as many bytes
    with pytest.raises(core.FormatError, match="form"):
        core.pack(other, "Q4_0", np.zeros(32 * 144, np.uint8), np.zeros(core.strips_of(other)[0], np.uint8))


def test_a_second_load_reads_what_the_first_packed(blocks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_tiny(blocks).close()
    monkeypatch.setattr(runner, "write_packed", lambda *_: pytest.fail("packed again"))
    open_tiny(blocks).close()
    assert not list(blocks.parent.glob("*.tmp"))


@pytest.mark.parametrize("damage", [b"", b"\xff" * 100, b"shoalpk2" + (64).to_bytes(8, "little") * 2 + b"{}".ljust(40)])
def test_a_damaged_packed_file_is_made_again(tmp_path: Path, damage: bytes) -> None:
    path = write_blocks(tmp_path / "m.gguf", "Q8_0", layers=1)
    open_tiny(path).close()
    packed = packed_path(local_files("tiny", path), tmp_path)
    whole = packed.read_bytes()
    packed.write_bytes(damage)
    open_tiny(path).close()
    assert packed.read_bytes() == whole
    packed.write_bytes(whole[:-64])
    open_tiny(path).close()
    assert packed.read_bytes() == whole
    for at in (30, len(whole) // 2, len(whole) - 1):  # one bit of the header, or of the weights
        packed.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        open_tiny(path).close()
        assert packed.read_bytes() == whole


def test_what_earlier_versions_and_killed_writers_left_is_removed(tmp_path: Path) -> None:
    path = write_blocks(tmp_path / "m.gguf", "Q8_0", layers=1)
    packed = packed_path(local_files("tiny", path), tmp_path)
    old = packed.with_name(packed.name.replace(f"native-{pack.LAYOUT_VERSION}", "native-3"))
    stale, fresh = (packed.with_name(f"{packed.name}{name}.tmp") for name in ("stale", "fresh"))
    for left in (old, stale, fresh):
        left.write_text("")
    os.utime(stale, (0, 0))
    open_tiny(path).close()
    assert not old.exists()
    assert not stale.exists()
    assert fresh.exists()


@pytest.mark.parametrize("after", ["packing", "reading"])
def test_a_packed_file_that_another_process_removes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    path = write_blocks(tmp_path / "m.gguf", "Q8_0", layers=1)
    packed = packed_path(local_files("tiny", path), tmp_path)
    calls = []
    place, name = (runner, "write_packed") if after == "packing" else (pack, "read_header")
    real = getattr(place, name)

    def removed(*given: Any) -> Any:
        made = real(*given)
        calls.append(packed.exists())
        if len(calls) == 1:
            packed.unlink()
        return made

    monkeypatch.setattr(place, name, removed)
    open_tiny(path).close()
    assert packed.exists()
    assert len(calls) == 2


def test_mapped_weights_give_the_same_bits_and_do_not_count(blocks: Path, tiny: NativeRunner) -> None:
    model = LocalModel.read(local_files("tiny", blocks))
    mapped = NativeRunner.load(model, kv_bytes=4 << 20, cache_dir=blocks.parent, threads=2, mmap=True)
    assert mapped.spec.weight_bytes == 0
    assert np.array_equal(run(mapped, item([3, 4, 5], 0, (0,))), run(tiny, item([3, 4, 5], 0, (0,))))
    mapped.close()


def test_an_unwritable_cache_is_a_store_error(blocks: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write"):
        NativeRunner.load(
            LocalModel.read(local_files("m", blocks)), kv_bytes=1 << 22, cache_dir=tmp_path / "file" / "cache"
        )


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource")
def test_a_disk_that_takes_no_more_is_a_store_error_and_leaves_nothing(tmp_path: Path) -> None:
    import resource

    path = write_blocks(tmp_path / "m.gguf", "Q8_0", layers=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(StoreError, match="cannot write") as caught:
            open_tiny(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]


def test_packing_that_is_cancelled_ends_early_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, planned, made = write_blocks(tmp_path / "m.gguf", "Q8_0", layers=1), [], []
    fill, write = pack._fill, pack._write_pieces

    def slow_fill(piece: Any, out: Any) -> None:
        made.append(piece)
        time.sleep(0.01)
        fill(piece, out)

    def planned_write(file: int, pieces: Any, *rest: Any) -> list[int]:
        planned.extend(pieces)
        return write(file, pieces, *rest)

    monkeypatch.setattr(pack, "_PIECE", 1)  # each strip is a piece
    monkeypatch.setattr(pack, "_fill", slow_fill)
    monkeypatch.setattr(pack, "_write_pieces", planned_write)

    def progress(*_: Any) -> None:
        raise KeyboardInterrupt

    files = local_files("tiny", path)
    with pytest.raises(KeyboardInterrupt):
        runner.write_packed(LocalModel.read(files), packed_path(files, tmp_path), progress=progress)
    assert 0 < len(made) < len(planned) // 2
    assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]


# -- what is taken ---------------------------------------------------------------------------------------------------


def changed(model: GgufModel, **fields: Any) -> GgufModel:
    values = {name: getattr(model, name) for name in GgufModel.__dataclass_fields__}
    return GgufModel(**values | fields)


def test_refuses_says_why_not(blocks: Path) -> None:
    gguf = read_gguf(blocks)
    model = families.describe(gguf)
    assert describe.refuses(model) is None
    layer = model.layers[0]
    assert isinstance(layer.mixer, Attention)
    narrow = replace(layer, mixer=replace(layer.mixer, key_dim=80))
    assert "head size 80" in str(describe.refuses(replace(model, layers=(narrow,))))
    assert isinstance(layer.feed_forward, Dense)
    assert "attention" in str(describe.refuses(replace(model, layers=(replace(layer, mixer=None),))))
    tensors = dict(gguf.tensors)
    tensors["blk.0.attn_q.weight"] = replace(tensors["blk.0.attn_q.weight"], type="TQ1_0")
    assert "TQ1_0" in str(describe.refuses(families.describe(changed(gguf, tensors=tensors))))
    model_of = partial(LocalModel, local_files("m", blocks))
    assert backend.refuses(model_of(gguf), EngineConfig()) is None
    assert "abacus" in str(backend.refuses(model_of(changed(gguf, architecture="abacus")), EngineConfig()))


def test_a_model_of_another_kind_is_left_to_another_runner(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "t.gguf", "llama", kind="Q8_0", head_dim=16)
    with pytest.raises(BackendError, match="head size 16"):
        open_tiny(path)


def test_a_type_without_a_kernel_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="TQ1_0"):
        pack.entry_of(part_of("TQ1_0", (32, 256), np.zeros(1, np.uint8)), 0)
    with pytest.raises(UnsupportedModelError, match="Q4_K"):
        pack.entry_of(part_of("Q4_K", (32, 288), np.zeros(1, np.uint8)), 0)


def test_the_extension_checks_the_packed_file_again(blocks: Path) -> None:
    made = open_tiny(blocks)
    made.close()
    path = packed_path(local_files("tiny", blocks), blocks.parent)
    core = load_core()
    facts, entries, start, pieces = pack.read_header(path)
    facts["kv_bits"] = 16
    settings = {"blocks": 4, "windows": 0, "checkpoints": 0, "threads": 1, "pin": False, "isa": "auto", "map": False}
    core.Core(facts, settings, str(path), start, entries, pieces)
    k = "layers.0.mixer.k.weight"
    outside = [e | {"offset": 1 << 40} if e["name"] == k else e for e in entries]
    odd = [e | {"scales": 7} if e["name"] == k else e for e in entries]

    def layer(**changes: Any) -> dict[str, Any]:
        return facts | {"layers": [facts["layers"][0] | changes, *facts["layers"][1:]]}

    for bad_facts, bad_settings, bad_entries, reason in (
        (facts, settings, outside, "outside"),
        (facts, settings, odd, "no kernel"),
        (facts, settings, entries[:-1], "missing"),
        (facts | {"embd": 128}, settings, entries, "not"),
        (facts | {"embd": "many"}, settings, entries, "embd"),
        (facts | {"layers": []}, settings, entries, "range"),
        (facts | {"layers": [7]}, settings, entries, "layers"),
        (facts | {"kv_bits": 4}, settings, entries, "fit"),
        (facts | {"rotaries": [{"frequencies": [1.0] * 100, "factor": 1.0}]}, settings, entries, "pairs"),
        (layer(heads=3), settings, entries, "range"),
        (layer(heads=2**30), settings, entries, "range"),
        (layer(dim=2**30), settings, entries, "fit"),
        (layer(ff=2**31 - 32), settings, entries, "fit"),
        (layer(rotary=5), settings, entries, "range"),
        (layer(kv_layer=0), settings, entries, "not there"),
        (layer(hops=1), settings, entries, "do not know"),
        (layer(mixer=9), settings, entries, "unknown"),
        (layer(feed=2), settings, entries, "mixture"),
        (facts, settings | {"blocks": 0}, entries, "range"),
        (facts, settings | {"windows": 1}, entries, "range"),
        (facts, settings | {"isa": "abacus"}, entries, "abacus"),
    ):
        with pytest.raises(core.FormatError, match=reason):
            core.Core(bad_facts, bad_settings, str(path), start, bad_entries, pieces)


def test_bad_settings_are_typed_errors(blocks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = LocalModel.read(local_files("m", blocks))
    with pytest.raises(ConfigError, match="one block of KV takes"):
        NativeRunner.load(model, kv_bytes=100, cache_dir=blocks.parent)
    with pytest.raises(BackendError, match="not enough memory"):
        NativeRunner.load(model, kv_bytes=1 << 50, cache_dir=blocks.parent)
    monkeypatch.setenv("SHOAL_ISA", "abacus")
    with pytest.raises(ModelFormatError, match="abacus"):
        NativeRunner.load(model, kv_bytes=1 << 22, cache_dir=blocks.parent)


def test_without_the_extension_the_reason_is_said(blocks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise BackendError("the native kernels are not built", hint="install a compiler")

    monkeypatch.setattr("shoal.runners.native.core.load_core", missing)
    assert "not built" in str(backend.refuses(LocalModel.read(local_files("m", blocks)), EngineConfig()))


# -- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("items", "fields", "reason"),
    [
        ([item([1], 3, (0,))], {}, "nothing was written"),
        ([item([1], 32, (40, 41))], {}, "nothing was written"),
        ([item([1], 0, (10_000,))], {}, "block 10000"),
        ([item([1], 0, (-1,))], {}, "block -1"),
        ([item([1], 0, ())], {}, "block table ends"),
        ([item([1] * 33, 0, (1,))], {}, "block table ends"),
        ([item([130], 0, (1,))], {}, "token 130"),
        ([item([-1], 0, (1,))], {}, "token -1"),
        ([item([2**40], 0, (1,))], {}, "step 0"),
        ([item([], 0, (1,))], {}, "no tokens"),
        ([item([1], -5, (1,))], {}, "position"),
        ([item([1], 512, tuple(range(20)))], {}, "position 512"),
        ([item([1], 0, (1,)), item([2], 0, (1,), seq_id=2)], {}, "written twice"),
        ([item([1] * 40, 0, (1, 1))], {}, "written twice"),
        ([item([1], 0, (1,))], {"copies": ((0, 10_000),)}, "copy"),
        ([item([1], 0, (1,))], {"copies": ((-1, 0),)}, "copy"),
        ([item([1], 0, (1,))], {"chain": 2}, "chained"),
        ([item([1], 0, (1,), Want.ARGMAX)], {"chain": 0}, "chain"),
        ([item([1], 0, (1,), Want.ARGMAX)], {"chain": 65}, "chain"),
        ([item([1], 31, (1,), Want.ARGMAX)], {"chain": 2}, "block table ends"),
        ([item([1], 0, (1,), Want.TOP)], {}, "the best 0 tokens"),
        ([item([1], 0, (1,), Want.TOP)._replace(top=131)], {}, "the best 131 tokens"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(
    tiny: NativeRunner, items: list[Any], fields: dict[str, Any], reason: str
) -> None:
    before = run(tiny, item([3, 4], 0, (2,)))
    with pytest.raises(RunnerError, match=reason):
        tiny.execute(StepPlan(0, tuple(items), **fields))
    assert np.array_equal(run(tiny, item([4], 1, (2,))), before)


def test_a_refused_plan_copies_nothing(tiny: NativeRunner) -> None:
    run(tiny, item([3, 4, 5], 0, (0,)))
    with pytest.raises(RunnerError):
        run(tiny, item([1], 0, (10_000,)), copies=((0, 1),))
    with pytest.raises(RunnerError, match="nothing was written"):
        run(tiny, item([6], 3, (1,)))
    assert np.array_equal(run(tiny, item([6], 3, (1,)), copies=((0, 1),)), run(tiny, item([6], 3, (0,))))


def test_kv_in_8_bits_takes_about_half_and_is_copied_whole(blocks: Path, tiny: NativeRunner) -> None:
    """A scale for every token, head and of K and V is part of the block."""
    made = open_tiny(blocks, kv="u8")
    assert tiny.spec.kv_bytes_per_token == 2 * 2 * 64 * 2 * 2  # layers, heads, dimensions, K and V, bytes
    assert made.spec.kv_bytes_per_token == 2 * 2 * (64 + 4) * 2
    assert made.spec.num_blocks > 1.8 * tiny.spec.num_blocks
    run(made, item([3, 4, 5], 0, (0,)), item(list(range(10, 40)), 0, (1,), seq_id=2))
    expected = run(made, item([6], 3, (0,)))
    assert np.array_equal(run(made, item([6], 3, (1,)), copies=((0, 1),)), expected)
    close = run(tiny, item([3, 4, 5, 6], 0, (0,)))
    assert not np.array_equal(close, expected)
    np.testing.assert_allclose(close, expected, atol=0.05 * np.abs(close).max())


def test_an_empty_plan_and_copies_alone_are_fine(tiny: NativeRunner) -> None:
    assert tiny.execute(StepPlan(0, ())).argmax == {}
    run(tiny, item([3], 0, (0,)))
    assert tiny.execute(StepPlan(0, (), copies=((0, 5),))).logits is None
    run(tiny, item([4], 1, (5,)))


def test_a_closed_runner_says_so(blocks: Path) -> None:
    made = open_tiny(blocks)
    made.release([1, 2])
    made.close()
    made.close()
    with pytest.raises(RunnerError, match="closed"):
        made.execute(StepPlan(0, ()))


@pytest.mark.parametrize("kv", ["bf16", "u8"])
@pytest.mark.parametrize("isa", ISAS)
def test_what_is_not_finite_stays_in_its_sequence(blocks: Path, isa: str, kv: KvPrecision) -> None:
    """Token 7 has an infinite embedding. Its batch mates, and those who use its blocks later, see nothing of it."""
    made = open_tiny(blocks, isa=isa, kv=kv)
    good = item([1, 2, 3], 0, (4,), seq_id=1)
    expected = run(made, good)
    bad = item([1, 7, 3], 0, (5,), Want.ARGMAX, seq_id=2)
    few = item([1, 7, 3], 0, (12,), Want.TOP, seq_id=4)._replace(top=5)
    output = made.execute(StepPlan(0, (good, bad, item([9], 0, (6,), Want.ARGMAX, seq_id=3), few)))
    assert output.argmax[2] == (-1,)
    assert [len(part) for part in output.top[4]] == [0, 0]
    assert output.argmax[3][0] >= 0
    assert output.logits is not None
    assert np.array_equal(output.logits[0], expected[0])
    run(made, item([7] * 64, 0, (8, 9), Want.NOTHING))
    for count in (1, 2, 31, 33):
        tokens = [10 + i for i in range(count)]
        assert np.array_equal(run(made, item(tokens, 0, (8, 9))), run(made, item(tokens, 0, (1, 2)))), count
    assert not np.isfinite(run(made, item([7], 0, (8,)))).any()
    chained = made.execute(StepPlan(0, (item([7], 0, (8,), Want.ARGMAX),), chain=3)).argmax[1]
    assert chained == (-1, -1, -1)


def test_ties_go_to_the_lowest_token(tmp_path: Path) -> None:
    """With output weights all zero every logit is zero."""
    path = write_blocks(tmp_path / "m.gguf", "Q8_0", layers=1, zero="output.weight")
    made = open_tiny(path, threads=3)
    assert made.execute(StepPlan(0, (item([5, 6], 0, (0,), Want.ARGMAX),))).argmax == {1: (0,)}


def test_two_runners_in_one_process_do_not_meet(blocks: Path) -> None:
    first, second = open_tiny(blocks, threads=3), open_tiny(blocks, threads=1)
    a = run(first, item([1, 2, 3], 0, (0,)))
    b = run(second, item([1, 2, 3], 0, (3,)))
    assert np.array_equal(a, b)
    first.close()
    assert np.array_equal(run(second, item([3], 2, (3,))), b)
    second.close()


# -- settings and threads --------------------------------------------------------------------------------------------


def test_kv_precision_is_honoured_or_refused() -> None:
    assert choose_runner(EngineConfig(kv_precision="u8"))[0] == "native"
    with pytest.raises(ConfigError, match=r"kv_precision is 'u8', and the runner is openvino \(asked for\)"):
        choose_runner(EngineConfig(kv_precision="u8", runner="openvino"))
    with pytest.raises(ConfigError, match="kv_precision is 'u4'"):
        EngineConfig.of(kv_precision="u4")


def single_cpu_threads() -> int:
    return sum(len(os.sched_getaffinity(int(task.name))) == 1 for task in Path("/proc/self/task").iterdir())


@pytest.mark.skipif(sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs Linux and two CPUs")
def test_threads_are_pinned_only_when_asked(blocks: Path) -> None:
    model, before = LocalModel.read(local_files("tiny", blocks)), single_cpu_threads()
    free = NativeRunner.load(model, kv_bytes=4 << 20, cache_dir=blocks.parent, threads=3)
    run(free, item([1, 2], 0, (0,)))
    assert single_cpu_threads() == before
    pinned = NativeRunner.load(model, kv_bytes=4 << 20, cache_dir=blocks.parent, threads=3, pin_threads=True)
    assert np.array_equal(run(pinned, item([1, 2], 0, (0,))), run(free, item([1, 2], 0, (0,))))
    assert single_cpu_threads() == before + 2  # the caller's thread stays as it was
    pinned.close()
    free.close()


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "100000 100000"}, 1),  # the quota of a group above
        ("0::/\n", {"cpu.max": "150000 100000"}, 1),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        ("4:cpu,cpuacct:/c\n", {"cpu/c/cpu.cfs_quota_us": "100000", "cpu/c/cpu.cfs_period_us": "100000"}, 1),
        ("4:cpu,cpuacct:/c\n", {"cpu/c/cpu.cfs_quota_us": "-1", "cpu/c/cpu.cfs_period_us": "100000"}, None),
        ("4:memory:/c\n", {"cpu/c/cpu.cfs_quota_us": "100000", "cpu/c/cpu.cfs_period_us": "100000"}, None),
        ("0::/a\n", {"a/cpu.max": "max 100000"}, None),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="cgroups are Linux's")
def test_a_quota_bounds_the_threads(groups: str, files: dict[str, str], cores: int | None, tmp_path: Path) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(groups)
    for name, text in files.items():
        path = tmp_path / "sys" / "fs" / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert load_core().cpus(str(tmp_path)) == (cores or len(os.sched_getaffinity(0)))


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_two_threads_of_one_core_count_once(tmp_path: Path) -> None:
    for cpu in os.sched_getaffinity(0):
        folder = tmp_path / "sys" / "devices" / "system" / "cpu" / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text("0-1\n")
    assert load_core().cpus(str(tmp_path)) == 1


def test_idle_threads_take_no_cpu(tiny: NativeRunner) -> None:
    run(tiny, item([1, 2, 3], 0, (0,)))
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.3  # one that waits by asking would take a second


@pytest.mark.parametrize("built", ["0" * 64, None])
def test_an_extension_of_other_sources_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, built: str | None
) -> None:
    core = load_core()
    if built is None:  # as they were before they told
        monkeypatch.delattr(core, "binding")
    else:
        monkeypatch.setattr(core, "binding", built)
    monkeypatch.setattr("shoal.runners.native.core._binding_hash", lambda: "1" * 64)
    with pytest.raises(BackendError, match="built from other sources") as caught:
        load_core()
    assert caught.value.limit == "1" * 64
    monkeypatch.setattr("shoal.runners.native.core._binding_hash", lambda: None)  # of a wheel
    assert load_core() is core
