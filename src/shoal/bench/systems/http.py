"""Any OpenAI-compatible server: one by its URL, `shoal serve`, or `llama-server` where it is on the PATH.

The client is as small as it can be, for it runs on the cores of the server: HTTP/1.0, one connection a request, bytes
stamped as they come and read only when all is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, ClassVar
from urllib.parse import urlsplit
from urllib.request import urlopen

from shoal.bench.systems.base import Logits, Measured, Setup
from shoal.bench.timeline import RunTimes, TokenTimes
from shoal.bench.workloads import Job
from shoal.errors import BackendError, BenchmarkError

Chunk = tuple[float, bytes]


class AnyServer:
    """A server at `source.url` (it ends in /v1). Plain HTTP only.

    A server that refuses token ids gets text, without what is not of OpenAI's API; it may end early then, for
    `ignore_eos` is not of that API.
    """

    VARIANTS: ClassVar[dict[str, str]] = {"": "over HTTP"}

    def __init__(self, source: Measured) -> None:
        self._source = source
        self._url = source.url
        self._process: subprocess.Popen[str] | None = None
        self._model: str | None = None
        self._streams = 0
        self._prompts = "token ids"

    @staticmethod
    def missing() -> str | None:
        """A URL is all it takes."""
        return None

    @property
    def pid(self) -> int | None:
        """The server's process, when it is ours."""
        return None if self._process is None else self._process.pid

    def prepare(self, setup: Setup) -> None:  # noqa: ARG002 - a server is as it is
        """Ask the server which model it has, and whether it takes token ids."""
        if self._model is None:
            with urlopen(f"{self._url}/models", timeout=30) as answer:
                self._model = str(json.load(answer)["data"][0]["id"])
            try:
                self.run([Job((10, 11, 12), 1)])
            except BenchmarkError:  # a refusal; whatever else is wrong shows again with text
                self._prompts = "text"

    def describe(self) -> dict[str, Any]:
        """Where it is, and what it says it serves."""
        return {"version": "as the server is", "url": self._url, "model": self._model, "prompts": self._prompts}

    def run(self, jobs: Sequence[Job]) -> RunTimes:
        """One connection for each job, all in one event loop."""
        bodies = [json.dumps(self._body(job)).encode() for job in jobs]
        begin = time.perf_counter()
        answers = asyncio.run(_all(self._url, jobs, bodies, begin))
        wall_s = time.perf_counter() - begin
        traces, cached = [], 0
        for job, chunks in zip(jobs, answers, strict=True):
            trace, hits = _read(job, chunks)
            traces.append(trace)
            cached += hits
        return RunTimes(traces, wall_s, {"cached_tokens": cached})

    def _body(self, job: Job) -> dict[str, Any]:
        body = {
            "model": self._model,
            "max_tokens": job.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._prompts == "text":
            return {**body, "prompt": self._text(job)}
        return {**body, "prompt": list(job.prompt), "ignore_eos": True, "return_token_ids": True}

    def _text(self, job: Job) -> str:
        from shoal.models import Store, load_tokenizer

        return load_tokenizer(Store().resolve(self._source.model)).decode(job.prompt)

    def logits(self, tokens: Sequence[int]) -> Logits:
        """The API has none."""
        raise BackendError(f"a server tells no logits ({len(tokens)} tokens asked)", hint="measure it in process")

    def close(self) -> None:
        """Stop the server if it is ours."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


class ShoalServer(AnyServer):
    """`shoal serve` in a process of its own."""

    VARIANTS: ClassVar[dict[str, str]] = {"http": "through `shoal serve`"}

    @staticmethod
    def missing() -> str | None:
        """Whether the server's packages are here."""
        import importlib.util

        found = importlib.util.find_spec("fastapi") and importlib.util.find_spec("uvicorn")
        return None if found else "fastapi and uvicorn are not installed"

    def prepare(self, setup: Setup) -> None:
        """Start it for this many streams."""
        if self._process is not None and self._streams == setup.streams:
            return
        self.close()
        command = [sys.executable, "-c", "from shoal.cli.main import main; main()", "serve", "--port", "0"]
        command += ["--model", self._source.model, "--max-batch", str(setup.streams)]
        command += ["--kv-cache", "off"]  # a prompt of the run before is not to be found
        command += ["--threads", str(self._source.threads), "--runner", self._source.options.get("runner", "auto")]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()  # "shoal serves NAME on URL", or nothing when it ended
        if " on http://" not in line:
            raise BenchmarkError("`shoal serve` did not start", value=line.strip())
        self._url, self._streams, self._model = line.split(" on ")[-1].strip(), setup.streams, None
        super().prepare(setup)


class LlamaServer(AnyServer):
    """`llama-server` from the PATH, with as many slots as the level has streams."""

    VARIANTS: ClassVar[dict[str, str]] = {"": "its server, over HTTP"}

    @staticmethod
    def missing() -> str | None:
        """Whether it is on the PATH."""
        return None if shutil.which("llama-server") else "llama-server is not on the PATH"

    def prepare(self, setup: Setup) -> None:
        """Start it for this many streams."""
        if self._process is not None and self._streams == setup.streams:
            return
        self.close()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = ["llama-server", "-m", str(self._source.path), "--port", str(port), "-np", str(setup.streams)]
        command += ["-c", str(setup.streams * setup.length), "-t", str(self._source.threads)]
        self._process = subprocess.Popen(command, stdout=sys.stderr, text=True)
        self._url, self._streams, self._model = f"http://127.0.0.1:{port}/v1", setup.streams, None
        deadline = time.monotonic() + 120
        while self._model is None:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise BenchmarkError("llama-server did not start", value=self._process.poll())
            with contextlib.suppress(OSError):  # not listening yet, or still loading (503)
                super().prepare(setup)
            time.sleep(0.2)


async def _all(url: str, jobs: Sequence[Job], bodies: Sequence[bytes], begin: float) -> list[list[Chunk]]:
    return await asyncio.gather(*(_one(url, job, body, begin) for job, body in zip(jobs, bodies, strict=True)))


async def _one(url: str, job: Job, body: bytes, begin: float) -> list[Chunk]:
    """The answer in pieces, each with the time at which it came."""
    await asyncio.sleep(max(job.arrival_s - (time.perf_counter() - begin), 0))
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port or 80)
    head = f"POST {place.path}/completions HTTP/1.0\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    chunks = []
    while data := await reader.read(65536):
        chunks.append((time.perf_counter() - begin, data))
    writer.close()
    return chunks


def _read(job: Job, chunks: Sequence[Chunk]) -> tuple[TokenTimes, int]:
    """Tokens and times of a stream, and how many prompt tokens the server says it had cached."""
    trace, cached, rest = TokenTimes(job.arrival_s), 0, b""
    status = chunks[0][1].split(b"\r\n", 1)[0].decode() if chunks else "no answer"
    if " 200 " not in f"{status} ":
        raise BenchmarkError(f"the server answered {status}", value=b"".join(c for _, c in chunks)[-300:].decode())
    for at, data in chunks:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            document = json.loads(line[6:])
            for choice in document.get("choices", ()):
                tokens = choice.get("token_ids")
                if tokens or (tokens is None and choice.get("text")):
                    trace.add(tokens or [-1], at)  # -1: a piece of text whose tokens the server does not tell
            usage = document.get("usage") or {}
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or cached
    return trace, cached
