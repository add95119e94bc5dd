"""What HTTP costs: the same streams in process and through the server, in turns, on one engine.

    python scripts/server_overhead.py [--streams 8] [--rounds 5]

The client is a process of its own that reads and counts and does nothing else. Prints one JSON line: tokens per second
of both ways (medians), their ratio round by round (`best_ratio`: of the best rounds, where the machine is not quiet),
and the time to first token of requests that come one by one, in turns as well (medians; `added_ttft_ms` is the median
of the differences).
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))


def tokens_of(stream: int, round_: int) -> list[int]:
    """A prompt of 100 tokens that shares no block with another."""
    return [(7 * stream + 131 * round_ + 3 * i) % 40_000 + 100 for i in range(100)]


class _Stream:
    """One answer as the client sees it: plain sockets, because all it costs comes off the cores that are measured."""

    def __init__(self, port: int, body: bytes) -> None:
        self.first_s = 0.0
        self.wire = socket.create_connection(("127.0.0.1", port))
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self._begin = time.perf_counter()
        self.wire.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def read(self) -> bool:
        """Take what is there; False at the end."""
        data = self.wire.recv(65536)
        if not self.first_s and b"data: {" in data:
            self.first_s = time.perf_counter() - self._begin
        return bool(data)


def client(port: int) -> None:
    """The other process: one round for each line of bodies on standard input."""
    for line in sys.stdin:
        begin = time.perf_counter()
        streams = [_Stream(port, json.dumps(body).encode()) for body in json.loads(line)]
        with selectors.DefaultSelector() as waiting:
            for stream in streams:
                waiting.register(stream.wire, selectors.EVENT_READ, stream)
            while waiting.get_map():
                for key, _ in waiting.select():
                    if not key.data.read():
                        waiting.unregister(key.fileobj)
                        key.data.wire.close()
        print(json.dumps({"wall_s": time.perf_counter() - begin, "ttft_s": [s.first_s for s in streams]}), flush=True)


def _summary(
    streams: int, here: list[float], there: list[float], first_here: list[float], first_there: list[float]
) -> dict[str, Any]:
    """Rates in tokens per second and times in seconds, here and over HTTP, round by round."""
    return {
        "streams": streams,
        "in_process_tok_s": round(statistics.median(here), 1),
        "http_tok_s": round(statistics.median(there), 1),
        "ratios": [round(b / a, 3) for a, b in zip(here, there, strict=True)],
        "best_ratio": round(max(there) / max(here), 3),
        "ratio": round(statistics.median(b / a for a, b in zip(here, there, strict=True)), 3),
        "ttft_ms": [round(1e3 * statistics.median(times), 1) for times in (first_here, first_there)],
        "added_ttft_ms": round(1e3 * statistics.median(b - a for a, b in zip(first_here, first_there, strict=True)), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--singles", type=int, default=30, help="requests one by one, for the time to first token")
    options = parser.parse_args()

    from tests.support.live import Live

    from shoal.engine.engine import Engine
    from shoal.types import Request, SamplingParams

    sys.setswitchinterval(0.0005)  # as `shoal serve` sets it
    sampling = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    here: list[float] = []
    there: list[float] = []
    first_here: list[float] = []
    first_there: list[float] = []
    command = [sys.executable, __file__, "--client"]
    with (
        Live(Engine.load(max_batch=options.streams), name="bench") as live,
        subprocess.Popen([*command, str(live.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other,
    ):
        assert other.stdin is not None
        assert other.stdout is not None
        for round_ in range(-1, options.rounds):  # the first warms up
            numbers = range(options.streams)
            requests = [Request(prompt_tokens=tokens_of(s, 2 * round_), sampling=sampling) for s in numbers]
            report = live.engine.run(requests)
            fields = {"max_tokens": options.tokens, "temperature": 0, "ignore_eos": True, "stream": True}
            bodies = [{"prompt": tokens_of(s, 2 * round_ + 1), **fields} for s in numbers]
            other.stdin.write(json.dumps(bodies) + "\n")
            other.stdin.flush()
            answer = json.loads(other.stdout.readline())
            if round_ >= 0:
                total = options.tokens * options.streams
                here.append(total / report.wall_s)
                there.append(total / answer["wall_s"])
        for number in range(options.singles):
            one = Request(prompt_tokens=tokens_of(number, 1001), sampling=SamplingParams(max_tokens=2, ignore_eos=True))
            begin = time.perf_counter()
            handle = live.engine.submit(one)
            next(iter(handle))
            first_here.append(time.perf_counter() - begin)
            handle.result()
            fields = {"max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": True}
            other.stdin.write(json.dumps([{"prompt": tokens_of(number, 1002), **fields}]) + "\n")
            other.stdin.flush()
            first_there += json.loads(other.stdout.readline())["ttft_s"]
        other.stdin.close()
    print(json.dumps(_summary(options.streams, here, there, first_here, first_there)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        client(int(sys.argv[2]))
    else:
        main()
