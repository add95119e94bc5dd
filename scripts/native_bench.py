"""Native runner against llama.cpp and OpenVINO on one file, in one run: `scripts/native_bench.py MODEL.gguf`.

Each peer is a process of its own that keeps its model loaded; bursts of a few steps alternate between them, so that
what else runs on the machine hits all alike. Prints medians and ratios. --peer-python has llama-cpp-python.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CASES = {  # name: streams, tokens of context, of which shared
    "decode1": (1, 32, 0),
    "decode8": (8, 32, 0),
    "decode32": (32, 32, 0),
    "ctx8": (8, 1000, 0),
    "trunk8": (8, 1000, 900),
}
PREFILL = 512


def prompt(seed: int, length: int) -> list[int]:
    return [(7 * p + seed) % 1000 + 100 for p in range(length)]


class LlamaWorker:
    """llama.cpp through its low-level API, as its server uses it."""

    def __init__(self, path: str, threads: int) -> None:
        import llama_cpp as ll

        self.ll, self.threads = ll, threads
        self.quiet = ll.llama_log_callback(lambda *_: None)  # lives as long as this
        ll.llama_log_set(self.quiet, None)
        ll.llama_backend_init()
        self.model = ll.llama_model_load_from_file(path.encode(), ll.llama_model_default_params())
        self.batch = ll.llama_batch_init(1024, 0, 1)
        self.context: Any = None

    def setup(self, streams: int, length: int, shared: int) -> None:
        ll = self.ll
        if self.context is not None:
            ll.llama_free(self.context)
        p = ll.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_ubatch, p.n_seq_max = streams * (length + 64), 512, 512, streams
        p.n_threads = p.n_threads_batch = self.threads
        p.kv_unified = shared > 0
        self.context = ll.llama_init_from_model(self.model, p)
        self.memory = ll.llama_get_memory(self.context)
        self.streams, self.at = streams, length
        for seq in range(streams):
            first = shared if seq else 0
            if first:
                ll.llama_memory_seq_cp(self.memory, 0, seq, 0, shared)
            tokens = prompt(seq, length)
            for at in range(first, length, 512):
                self.feed([(tokens[p], p, seq, False) for p in range(at, min(at + 512, length))])

    def feed(self, items: list[tuple[int, int, int, bool]]) -> None:
        batch = self.batch
        batch.n_tokens = len(items)
        for i, (token, pos, seq, want) in enumerate(items):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, pos, 1, int(want)
            batch.seq_id[i][0] = seq
        if self.ll.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")

    def decode(self) -> None:
        """A step; the arg-max, which this interface leaves to its caller, is not counted."""
        self.feed([(100 + s, self.at, s, True) for s in range(self.streams)])
        self.at += 1
        for i in range(self.streams):
            self.ll.llama_get_logits_ith(self.context, i)[0]

    def before_prefill(self) -> None:
        self.ll.llama_memory_clear(self.memory, False)

    def prefill(self) -> None:
        self.feed([(token, p, 0, p == PREFILL - 1) for p, token in enumerate(prompt(0, PREFILL))])
        self.ll.llama_get_logits_ith(self.context, PREFILL - 1)[0]


class RunnerWorker:
    """One of this package's runners, without scheduler or engine."""

    def __init__(self, kind: str, path: str, threads: int, cache: str, kv: Any) -> None:
        from shoal.models.files import local_files

        files = local_files("bench", Path(path))
        if kind == "native":
            from shoal.runners.native.runner import NativeRunner

            self.runner: Any = NativeRunner.load(
                files, kv_bytes=512 << 20, cache_dir=Path(cache), threads=threads, kv_precision=kv
            )
        else:
            from shoal.runners.openvino.runner import OpenVINORunner

            self.runner = OpenVINORunner.load(files.path, kv_bytes=512 << 20, cache_dir=Path(cache), threads=threads)
        self.tables: list[tuple[int, ...]] = []

    def step(self, items: list[tuple[int, tuple[int, ...], int, bool]]) -> None:
        from shoal.runners.plan import ScheduledSequence, StepPlan, Want

        sequences = tuple(
            ScheduledSequence(s, tokens, start, self.tables[s], Want.ARGMAX if want else Want.NOTHING)
            for s, tokens, start, want in items
        )
        self.runner.execute(StepPlan(0, sequences))

    def setup(self, streams: int, length: int, shared: int) -> None:
        size = self.runner.spec.block_size
        blocks, trunk = (length + 64) // size + 1, shared // size
        self.at = length
        self.tables = [
            (*range(trunk), *range(trunk + s * (blocks - trunk), trunk + (s + 1) * (blocks - trunk)))
            for s in range(streams)
        ]
        for s in range(streams):
            tokens = prompt(s, length)
            for at in range(trunk * size if s else 0, length, 512):
                self.step([(s, tuple(tokens[at : at + 512]), at, False)])

    def decode(self) -> None:
        self.step([(s, (100 + s,), self.at, True) for s in range(len(self.tables))])
        self.at += 1

    def before_prefill(self) -> None:
        self.tables = [tuple(range(PREFILL // self.runner.spec.block_size + 1))]

    def prefill(self) -> None:
        self.step([(0, tuple(prompt(0, PREFILL)), 0, True)])


def serve(worker: LlamaWorker | RunnerWorker) -> None:
    """Answer jobs, one JSON line each, with the seconds of each step."""
    for line in sys.stdin:
        job = json.loads(line)
        times: list[Any] = []
        if job["do"] == "setup":
            worker.setup(*job["case"])
        elif job["do"] == "profile":
            assert isinstance(worker, RunnerWorker)
            times = [worker.runner.profile()]
        else:
            decode = job["do"] == "decode"
            for _ in range(job["steps"]):
                if not decode:
                    worker.before_prefill()
                began = time.perf_counter()
                (worker.decode if decode else worker.prefill)()
                times.append(time.perf_counter() - began)
        print(json.dumps(times), flush=True)


class Peer:
    def __init__(self, python: str, kind: str, options: argparse.Namespace) -> None:
        command = [
            python,
            __file__,
            options.model,
            "--worker",
            kind,
            "--threads",
            str(options.threads),
            "--cache",
            options.cache,
            "--kv-precision",
            options.kv_precision,
        ]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **job: Any) -> list[Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        answer: list[Any] = json.loads(self.process.stdout.readline())
        return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--worker", default="")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cache", default="/tmp/shoal-native-bench")
    parser.add_argument("--kv-precision", default="auto")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--peers", default="llama")
    parser.add_argument("--cases", default=",".join([*CASES, "prefill"]))
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    if options.worker == "llama":
        serve(LlamaWorker(options.model, options.threads))
        return
    if options.worker:
        serve(RunnerWorker(options.worker, options.model, options.threads, options.cache, options.kv_precision))
        return
    kinds = ["native", *[p for p in options.peers.split(",") if p]]
    peers = {kind: Peer(options.peer_python if kind == "llama" else sys.executable, kind, options) for kind in kinds}
    results: dict[str, dict[str, float]] = {}
    for case in options.cases.split(","):
        prefill = case == "prefill"
        for peer in peers.values():
            peer.ask(do="setup", case=CASES.get(case, (1, PREFILL, 0)))
        samples: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(options.rounds):
            for kind, peer in peers.items():
                samples[kind] += peer.ask(do=case if prefill else "decode", steps=1 if prefill else 6)
        tokens = PREFILL if prefill else CASES[case][0]
        medians = {kind: statistics.median(times) for kind, times in samples.items()}
        best = {kind: min(times) for kind, times in samples.items()}
        results[case] = {kind: round(tokens / t, 1) for kind, t in medians.items()}
        row = "  ".join(
            f"{k} {medians[k] * 1e3:8.2f} ms ({best[k] * 1e3:.2f} best) {tokens / medians[k]:7.0f} tok/s" for k in kinds
        )
        ratios = "  ".join(
            f"x{medians[k] / medians['native']:.2f} ({best[k] / best['native']:.2f} best) of {k}" for k in kinds[1:]
        )
        print(f"{case:9s} {row}  {ratios}", flush=True)
    profile = peers["native"].ask(do="profile")[0]
    print("profile", {k: round(v / max(profile["steps"], 1) * 1e3, 3) for k, v in profile.items()})
    print(json.dumps({"bench": "native", "load": os.getloadavg()[0], "tokens_per_s": results}))
    for peer in peers.values():
        peer.process.terminate()
        peer.process.wait()


if __name__ == "__main__":
    main()
