"""The runner on tiny models: inputs it refuses, rows it can blame, two at once, what it remembers."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shoal.errors import BackendError, ConfigError, ModelFormatError, ModelNotFoundError, RunnerError
from shoal.models.gguf import GgufTensor
from shoal.runners.openvino import convert, loading
from shoal.runners.openvino import runner as runner_module
from shoal.runners.openvino.runner import OpenVINORunner
from shoal.runners.plan import ScheduledSequence, StepPlan, Want
from tests.support.tiny_gguf import VOCAB, write_tiny


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", "llama", kind="Q8_0")


@pytest.fixture
def runner(path: Path) -> Iterator[OpenVINORunner]:
    made = load(path)
    yield made
    made.close()


def load(path: Path, kv_bytes: int = 1 << 20) -> OpenVINORunner:
    return OpenVINORunner.load(path, kv_bytes=kv_bytes, cache_dir=path.parent / "cache", threads=1)


def feed(
    tokens: tuple[int, ...], block: int, *, seq_id: int = 1, start: int = 0, want: Want = Want.LOGITS
) -> ScheduledSequence:
    return ScheduledSequence(seq_id, tokens, start, (block,), want)


def test_kv_is_sized_by_the_budget(runner: OpenVINORunner, path: Path) -> None:
    spec = runner.spec
    assert spec.block_bytes * spec.num_blocks <= 1 << 20 < spec.block_bytes * (spec.num_blocks + 1)
    assert spec.vocab_size == VOCAB
    assert spec.precision in ("bf16", "f32")
    with pytest.raises(ConfigError, match="one block of KV takes"):
        load(path, kv_bytes=spec.block_bytes - 1)
    one = load(path, kv_bytes=spec.block_bytes)
    assert (one.spec.num_blocks, one.spec.exact) == (1, False)
    one.close()


def test_nothing_wanted_gives_nothing(runner: OpenVINORunner) -> None:
    output = runner.execute(StepPlan(1, (feed((1, 2), 0, want=Want.NOTHING),)))
    assert (output.argmax, output.logits) == ({}, None)
    assert runner.execute(StepPlan(2, ())).argmax == {}


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_token_outside_the_vocabulary_is_refused(runner: OpenVINORunner, token: int) -> None:
    with pytest.raises(RunnerError, match="vocabulary"):
        runner.execute(StepPlan(1, (feed((token,), 0),)))


def test_a_block_that_is_not_there_is_refused(runner: OpenVINORunner) -> None:
    for block in (-1, runner.spec.num_blocks):  # the second is the scratch block
        with pytest.raises(RunnerError, match="sequence 7: a block") as caught:
            runner.execute(StepPlan(1, (feed((1,), block, seq_id=7),)))
        assert caught.value.limit == runner.spec.num_blocks


def test_a_chain_is_refused(runner: OpenVINORunner) -> None:
    with pytest.raises(RunnerError, match="chain is 2"):
        runner.execute(StepPlan(1, (feed((1,), 0, want=Want.ARGMAX),), chain=2))


def test_the_scratch_block_is_not_the_core_s(runner: OpenVINORunner) -> None:
    last = runner.spec.num_blocks - 1
    runner.execute(StepPlan(1, (feed((3, 4, 5), last, want=Want.NOTHING),)))
    before = runner.execute(StepPlan(2, (feed((6,), last, start=3),))).logits
    assert before is not None
    kept = before.copy()
    runner.execute(StepPlan(3, (feed((9,), 0, seq_id=2),)))  # a lone token: its filler goes to scratch
    after = runner.execute(StepPlan(4, (feed((6,), last, start=3),))).logits
    assert after is not None
    assert np.array_equal(kept, after)


@pytest.mark.parametrize("want", [Want.LOGITS, Want.ARGMAX])
def test_a_poisoned_row_is_blamed_on_its_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, want: Want) -> None:
    """Token 5's embedding is NaN: only the sequence that was fed it may be named."""
    source = write_tiny(tmp_path / "tiny.gguf", "llama", kind="Q8_0", tied=False)
    encode = convert.encode

    def poisoned(tensor: GgufTensor) -> convert.Codes:
        codes = encode(tensor)
        if tensor.name == "token_embd.weight":
            codes.scales.flags.writeable = True
            codes.scales[5] = np.nan
        return codes

    monkeypatch.setattr(convert, "encode", poisoned)
    # The probe's random tokens would meet the fail_sequence before the test does.
    monkeypatch.setattr(runner_module, "is_exact", lambda execute, vocab_size: False)
    runner = load(source)
    healthy = (feed((1, 2), 0, seq_id=1, want=want), feed((3,), 1, seq_id=2, want=want))
    runner.execute(StepPlan(1, healthy))
    sick = feed((4, 5), 2, seq_id=9, want=want)
    output = runner.execute(StepPlan(2, (*healthy, sick, feed((3,), 3, seq_id=4, want=want))))
    if want is Want.ARGMAX:
        assert [seq_id for seq_id, tokens in output.argmax.items() if tokens == (-1,)] == [9]
    else:
        assert output.logits is not None
        assert np.isfinite(output.logits.max(axis=1)).tolist() == [True, True, False, True]
    runner.execute(StepPlan(3, healthy))
    runner.close()


def test_release_forgets_and_close_is_final(path: Path) -> None:
    runner = load(path)
    runner.execute(StepPlan(1, (feed((1, 2), 0),)))
    runner.release([1, 12345])
    assert runner._feed._tables == {}
    runner.close()
    runner.close()
    with pytest.raises(RunnerError, match="closed"):
        runner.execute(StepPlan(2, (feed((1, 2), 0),)))


def test_two_runners_do_not_meet(path: Path, runner: OpenVINORunner) -> None:
    other = load(path)
    runner.execute(StepPlan(1, (feed((1, 2, 3), 0, want=Want.NOTHING),)))
    other.execute(StepPlan(1, (feed((9, 8, 7), 0, want=Want.NOTHING),)))
    mine, theirs = (r.execute(StepPlan(2, (feed((4,), 0, start=3),))).logits for r in (runner, other))
    again = load(path)
    again.execute(StepPlan(1, (feed((1, 2, 3), 0, want=Want.NOTHING),)))
    expected = again.execute(StepPlan(2, (feed((4,), 0, start=3),))).logits
    assert mine is not None
    assert theirs is not None
    assert expected is not None
    assert np.array_equal(mine, expected)
    assert not np.array_equal(mine, theirs)
    other.close()
    again.close()


def test_an_exception_of_the_backend_is_wrapped(runner: OpenVINORunner, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def set_tensor(self, name: str, tensor: object) -> None: ...

        def infer(self, *, share_outputs: bool) -> None:
            raise RuntimeError("no memory")

    monkeypatch.setattr(runner, "_request", Broken())
    with pytest.raises(RunnerError, match="step 8") as caught:
        runner.execute(StepPlan(8, (feed((1, 2), 0),)))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        load(tmp_path / "none.gguf")
    with pytest.raises(ModelFormatError, match=r"no openvino_model\.xml"):
        load(tmp_path)
    (tmp_path / "openvino_model.xml").write_text("<net/>")
    with pytest.raises(ModelFormatError, match="does not describe a decoder"):
        load(tmp_path)
    config = {"model_type": "x", "max_position_embeddings": 9, "hidden_size": 8, "intermediate_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "openvino_model.bin").write_bytes(b"")
    with pytest.raises(ModelFormatError, match="cannot be read"):
        load(tmp_path)


def test_a_missing_openvino_is_a_backend_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(BackendError, match="pip install openvino"):
        load(path)


def test_loading_and_running_touches_no_network(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        pytest.fail("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    runner = load(path)
    runner.execute(StepPlan(1, (feed((1, 2), 0),)))
    runner.close()


def test_the_module_is_imported_without_openvino() -> None:
    code = "import sys, shoal.runners.openvino.runner; sys.exit('openvino' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_exactness_is_found_out_once(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[int] = []

    def probe(execute: object, vocab_size: int) -> bool:
        asked.append(vocab_size)
        return True

    monkeypatch.setattr(runner_module, "is_exact", probe)
    for _ in range(2):
        runner = OpenVINORunner.load(path, kv_bytes=1 << 20, cache_dir=tmp_path)
        assert runner.spec.exact
        runner.close()
    assert asked == [VOCAB]


def test_cpus_without_quantised_activations_get_plain_products(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[dict[str, str]] = []

    class Core:
        def __init__(self) -> None:
            self.core = loading.open_core()

        def get_property(self, *args: str) -> object:
            return self.core.get_property(*args)

        def compile_model(self, model: object, device: str, config: dict[str, str]) -> object:
            settings.append(dict(config))
            if "DYNAMIC_QUANTIZATION_GROUP_SIZE" not in config:
                raise RuntimeError("could not create a primitive")
            return self.core.compile_model(model, device, config)

    monkeypatch.setattr(runner_module, "open_core", Core)
    runner = load(path)
    assert [s.get("DYNAMIC_QUANTIZATION_GROUP_SIZE") for s in settings] == [None, "0"]
    runner.close()
