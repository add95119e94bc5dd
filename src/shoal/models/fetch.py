"""Brings model files over the network into a directory: from a wheel by pip, from the hub by `huggingface_hub`.

Nothing here decides where models live or when a fetch is complete; that is the store's part.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from shoal.errors import (
    DownloadError,
    ModelError,
    ModelFormatError,
    ModelNotFoundError,
    StoreError,
    UnsupportedModelError,
)
from shoal.models.files import Progress
from shoal.models.split import part_names

_CHUNK = 1 << 20
_COMMON = ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json", "chat_template.jinja")
HUB_PATTERNS = {
    "openvino": (*_COMMON, "openvino_model.xml", "openvino_model.bin"),
    "safetensors": (*_COMMON, "*.safetensors", "*.safetensors.index.json"),
}


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A model file inside a wheel on the Python package index. `size` in bytes, `sha256` in hexadecimal."""

    package: str
    version: str
    member: str
    size: int
    sha256: str

    @property
    def file_name(self) -> str:
        """Name of the file without its folders."""
        return self.member.rsplit("/", 1)[-1]


def store_error(error: OSError, path: Path) -> StoreError:
    """What a failed write to the store means, as an error that names the path."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreError(f"the disk of {path} is full", value=str(path), hint="free some space or set SHOAL_HOME")
    return StoreError(
        f"the model store cannot use {path} ({error.strerror or error})",
        value=str(path),
        hint="check its permissions or set SHOAL_HOME to a directory you can write to",
    )


def _full(into: Path) -> StoreError:
    """Which disk is full: pip writes to a temporary folder before it writes to the store."""
    temporary = Path(tempfile.gettempdir())
    if shutil.disk_usage(temporary).free < shutil.disk_usage(into).free:
        hint = "free some space there, or set TMPDIR to a folder on another disk"
        return StoreError(f"the disk of the temporary folder {temporary} is full", value=str(temporary), hint=hint)
    return StoreError(f"the disk of {into} is full", value=str(into), hint="free some space or set SHOAL_HOME")


def download_wheel(source: WheelSource, into: Path, progress: Progress | None) -> Path:
    """Let pip, as it is configured here, download the wheel of `source` into the directory `into`.

    Raises `DownloadError` when pip is missing or fails, `StoreError` when the disk is full.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(into), f"{source.package}=={source.version}"]
    if progress is not None and _pip_version() >= (24, 1):
        command += ["--progress-bar", "raw"]
    code, output = _run(command, progress)
    wheels = sorted(into.glob("*.whl"))
    if code == 0 and wheels:
        return wheels[0]
    if "No space left on device" in output or "Errno 28" in output or "Errno 122" in output:
        raise _full(into)
    if "No module named pip" in output:
        hint = "run `python -m ensurepip` in this environment, or give the path of a .gguf file"
    else:
        hint = "check the network and pip's index, or give the path of a .gguf file"
    raise DownloadError(
        f"pip could not download {source.package} {source.version}: {_reason(output, code)}",
        value=f"{source.package}=={source.version}",
        hint=hint,
    )


def _pip_version() -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in re.findall(r"\d+", metadata.version("pip"))[:2])
    except metadata.PackageNotFoundError:
        return (0,)


def _run(command: list[str], progress: Progress | None) -> tuple[int, str]:
    """Exit status and output of `command`; the child never outlives this call, whatever interrupts it."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        )
    except OSError as error:
        return 1, f"ERROR: {command[0] or 'python'} does not run ({error.strerror})"
    output = []
    with process:
        assert process.stdout is not None
        try:
            for line in process.stdout:  # universal newlines: pip's carriage returns end lines too
                match = re.fullmatch(r"Progress (\d+) of (\d+)\s*", line)
                if match is None:
                    output.append(line)
                elif progress is not None:
                    progress("download", int(match[1]), int(match[2]))
        except BaseException:  # Ctrl-C, or the caller's progress function
            process.kill()
            raise
    return process.returncode, "".join(output)


def _reason(output: str, code: int) -> str:
    """The line of pip's output that says why, for a one-line message."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    return (errors or lines[-1:] or [f"exit status {code}"])[-1][:300]


def unpack_wheel(source: WheelSource, wheel: Path, target: Path, progress: Progress | None) -> None:
    """Write the model file of `source` out of `wheel` to the new file `target`, checked and on disk (fsync).

    Raises `ModelFormatError` when size or checksum differ or the wheel is damaged, `StoreError` on write errors.
    """
    hint = "pull again; if it persists, the package index serves another file"
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(source.member).file_size
            if size != source.size:
                raise ModelFormatError(f"{source.member} has a wrong size", value=size, limit=source.size, hint=hint)
            digest = hashlib.sha256()
            with archive.open(source.member) as member, target.open("xb") as out:
                while chunk := member.read(_CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
                    if progress is not None:
                        progress("unpack", out.tell(), source.size)
                out.flush()
                os.fsync(out.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise ModelFormatError(f"{wheel.name} is damaged ({error})", value=wheel.name, hint=hint) from error
    except OSError as error:
        raise store_error(error, target) from error
    if digest.hexdigest() != source.sha256:
        raise ModelFormatError(
            f"{source.member} has a wrong checksum", value=digest.hexdigest(), limit=source.sha256, hint=hint
        )


def bytes_in(directory: Path) -> int:
    """What the files of a directory take, those of downloads under way too."""
    size = 0
    for file in directory.rglob("*"):
        with suppress(FileNotFoundError):  # a download renames its files when they are whole
            size += file.stat().st_size if file.is_file() else 0
    return size


def _bars(into: Path, total: int, progress: Progress) -> type:
    """In place of the hub's progress bars: nothing is shown, and `progress` is told how far all files together are.

    What it raises ends the download: its threads at their next piece.
    """
    # Not `utils.tqdm`: that is the module or the class, by what was imported before. Its types are not told.
    tqdm: Any = vars(import_module("huggingface_hub.utils.tqdm"))["tqdm"]

    class Bars(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **{**settings, "disable": True})

        def update(self, n: float | None = 1) -> Any:
            progress("download", min(bytes_in(into), total), total)
            return super().update(n)

    return Bars


def download_hub(
    repo: str,
    wanted: str | None,
    into: Path,
    check_space: Callable[[int], None],
    progress: Progress | None = None,
) -> str:
    """Download a model of the Hugging Face hub into the directory `into`; returns its kind.

    `wanted` picks a GGUF of the repository by its path or by a part of its name ("Q4_K_M"); without it an OpenVINO
    model is preferred, then a lone GGUF, then safetensors. A file of several parts comes with all of them.
    `check_space` is told the bytes first, and may raise. Without `progress` the hub's bars are shown; what it raises
    ends the download, and is raised. Resumes an interrupted download, honours HF_ENDPOINT, HF_HUB_OFFLINE and HF_TOKEN.
    Raises `ModelNotFoundError`, `UnsupportedModelError`, `DownloadError` or `StoreError`.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub import errors as hub

    transport: type[Exception] = vars(hub)["HTTPError"]  # of whichever HTTP client this version of the hub uses
    try:
        entries = HfApi().list_repo_tree(repo, recursive=True)
        sizes = {entry.path: entry.size for entry in entries if hasattr(entry, "size")}
        kind, names = _choose(repo, wanted, list(sizes))
        here = {name: (into / name).stat().st_size for name in names if (into / name).is_file()}
        check_space(sum(sizes[name] for name in names) - sum(here.values()))
        settings: dict[str, Any] = {}
        if progress is not None:
            total = sum(sizes[name] for name in names)
            progress("download", min(bytes_in(into), total), total)
            settings["tqdm_class"] = _bars(into, total, progress)
        patterns = [re.sub(r"([*?\[])", r"[\1]", name) for name in names]
        snapshot_download(repo, local_dir=into, allow_patterns=patterns, **settings)
        if progress is not None:
            progress("download", total, total)
    except (hub.RepositoryNotFoundError, hub.EntryNotFoundError, hub.HFValidationError) as error:
        if isinstance(error, hub.LocalEntryNotFoundError):  # no answer, and nothing here from before
            raise _unreachable(repo, error) from error
        raise ModelNotFoundError(
            f"the hub has no model {repo!r} that you may read", value=repo, hint="check the name; log in if it is gated"
        ) from error
    except (transport, hub.OfflineModeIsEnabled, hub.FileMetadataError, ConnectionError, TimeoutError) as error:
        raise _unreachable(repo, error) from error
    except OSError as error:
        raise store_error(error, into) from error
    return kind


def _unreachable(repo: str, error: Exception) -> ModelError:
    reason = str(error).strip().split("\n", 1)[0][:200]
    return DownloadError(
        f"{repo} could not be downloaded ({reason})", value=repo, hint="check the network, HF_ENDPOINT, HF_HUB_OFFLINE"
    )


def _choose(repo: str, wanted: str | None, files: list[str]) -> tuple[str, list[str]]:
    """Which form of a model to take from a repository that holds `files`: its kind, and the names to download."""
    gguf = sorted(name for name in files if name.endswith(".gguf") and "mmproj" not in name.rsplit("/", 1)[-1])
    if wanted is None and "openvino_model.xml" in files:
        return "openvino", _matching(files, HUB_PATTERNS["openvino"])
    models = _whole_models(gguf)
    if wanted is not None:
        parts = part_names(wanted.rsplit("/", 1)[-1])
        first = wanted.removesuffix(wanted.rsplit("/", 1)[-1]) + parts[0]
        models = [first] if first in models else [name for name in models if wanted.lower() in name.lower()]
    if not models and wanted is not None:
        hint = f"it has {', '.join(_whole_models(gguf)[:12])}" if gguf else "see the model's page for its files"
        raise ModelNotFoundError(f"{repo} has no file {wanted!r}", value=wanted, limit=len(gguf), hint=hint)
    if len(models) == 1:
        folder = models[0][: models[0].rfind("/") + 1]
        names = [folder + part for part in part_names(models[0].rsplit("/", 1)[-1])]
        missing = [name for name in names if name not in files]
        if missing:
            raise ModelFormatError(f"{repo} lacks {missing[0]}", value=missing[:12], limit=len(names))
        return "gguf", names
    if models:
        raise ModelNotFoundError(
            f"{repo} has {len(models)} GGUF models",
            value=models,
            limit=1,
            hint=f"name one, as in {repo}:{models[0]}, or by a part of its name",
        )
    if any(name.endswith(".safetensors") for name in files) and {"tokenizer.json", "config.json"} <= set(files):
        return "safetensors", _matching(files, HUB_PATTERNS["safetensors"])
    raise UnsupportedModelError(
        f"{repo} holds no model of a known form",
        value=repo,
        limit="OpenVINO IR, GGUF or safetensors with tokenizer.json",
    )


def _whole_models(names: list[str]) -> list[str]:
    """Of names of GGUF files, those that are whole and the first parts of the others."""
    return [name for name in names if part_names(name)[0] == name]


def _matching(files: list[str], patterns: tuple[str, ...]) -> list[str]:
    return [name for name in files if any(fnmatchcase(name, pattern) for pattern in patterns) and "/" not in name]
