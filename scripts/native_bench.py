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


def llama_worker(path: str, threads: int) -> None:
    import ctypes

    import llama_cpp as ll

    quiet = ll.llama_log_callback(lambda *_: None)  # lives as long as the loop below
    ll.llama_log_set(quiet, None)
    ll.llama_backend_init()
    model = ll.llama_model_load_from_file(path.encode(), ll.llama_model_default_params())
    vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
    context: Any = None

    def open_context(streams: int, length: int, unified: bool) -> Any:
        p = ll.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_ubatch, p.n_seq_max = streams * (length + 64), 512, 512, streams
        p.n_threads = p.n_threads_batch = threads
        p.kv_unified = unified
        return ll.llama_init_from_model(model, p)

    batch = ll.llama_batch_init(1024, 0, 1)

    def feed(items: list[tuple[int, int, int, bool]]) -> None:
        batch.n_tokens = len(items)
        for i, (token, pos, seq, want) in enumerate(items):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, pos, 1, int(want)
            batch.seq_id[i][0] = seq
        if ll.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")

    state: dict[str, int] = {}
    for line in sys.stdin:
        job = json.loads(line)
        times = []
        if job["do"] == "setup":
            streams, length, shared = job["case"]
            if context is not None:
                ll.llama_free(context)
            context = open_context(streams, length, shared > 0)
            memory = ll.llama_get_memory(context)
            for seq in range(streams):
                first = shared if seq else 0
                if seq and shared:
                    ll.llama_memory_seq_cp(memory, 0, seq, 0, shared)
                tokens = [(7 * p + seq) % 1000 + 100 for p in range(length)]
                for at in range(first, length, 512):
                    feed([(tokens[p], p, seq, False) for p in range(at, min(at + 512, length))])
            state = {"streams": streams, "pos": length}
        elif job["do"] == "decode":
            memory = ll.llama_get_memory(context)
            for _ in range(job["steps"]):
                began = time.perf_counter()
                feed([(100 + s, state["pos"], s, True) for s in range(state["streams"])])
                for i in range(state["streams"]):  # llama.cpp has no arg-max of its own in this interface
                    row = (ctypes.c_float * vocab).from_address(
                        ctypes.addressof(ll.llama_get_logits_ith(context, i).contents)
                    )
                    row[0]
                times.append(time.perf_counter() - began)
                for s in range(state["streams"]):
                    ll.llama_memory_seq_rm(memory, s, state["pos"], -1)
        else:
            memory = ll.llama_get_memory(context)
            for _ in range(job["steps"]):
                ll.llama_memory_clear(memory, False)
                began = time.perf_counter()
                feed([((7 * p) % 1000 + 100, p, 0, p == PREFILL - 1) for p in range(PREFILL)])
                ll.llama_get_logits_ith(context, PREFILL - 1)[0]
                times.append(time.perf_counter() - began)
        print(json.dumps(times), flush=True)


def runner_worker(kind: str, path: str, threads: int, cache: str) -> None:
    from shoal.models.files import local_files
    from shoal.plan import ScheduledSequence, StepPlan, Want

    files = local_files("bench", Path(path))
    runner: Any
    if kind == "native":
        from shoal.runners.native.runner import NativeRunner

        runner = NativeRunner.load(files, kv_bytes=512 << 20, cache_dir=Path(cache), threads=threads)
    else:
        from shoal.runners.openvino.runner import OpenVINORunner

        runner = OpenVINORunner.load(files.path, kv_bytes=512 << 20, cache_dir=Path(cache), threads=threads)
    size = runner.spec.block_size
    tables: list[tuple[int, ...]] = []
    length = 0

    def step(items: list[tuple[int, tuple[int, ...], int, Want]]) -> None:
        sequences = tuple(ScheduledSequence(s, tokens, start, tables[s], want) for s, tokens, start, want in items)
        runner.execute(StepPlan(0, sequences))

    for line in sys.stdin:
        job = json.loads(line)
        times = []
        if job["do"] == "setup":
            streams, length, shared = job["case"]
            blocks = (length + 64) // size + 1
            trunk = shared // size
            tables = []
            for s in range(streams):
                tables.append(tuple(range(s * blocks, (s + 1) * blocks)))
            if shared:
                free = iter(range(blocks, 10**6))
                tables = [tables[0]] + [
                    tuple(range(trunk)) + tuple(next(free) for _ in range(blocks - trunk)) for _ in range(streams - 1)
                ]
            for s in range(streams):
                tokens = [(7 * p + s) % 1000 + 100 for p in range(length)]
                for at in range(trunk * size if s and shared else 0, length, 512):
                    step([(s, tuple(tokens[at : at + 512]), at, Want.NOTHING)])
        elif job["do"] == "decode":
            for _ in range(job["steps"]):
                began = time.perf_counter()
                step([(s, (100 + s,), length, Want.ARGMAX) for s in range(len(tables))])
                times.append(time.perf_counter() - began)
        elif job["do"] == "profile":
            times = [runner.profile()]
        else:
            tables = [tuple(range(PREFILL // size + 1))]
            for _ in range(job["steps"]):
                began = time.perf_counter()
                step([(0, tuple((7 * p) % 1000 + 100 for p in range(PREFILL)), 0, Want.ARGMAX)])
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
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--peers", default="llama")
    parser.add_argument("--cases", default=",".join([*CASES, "prefill"]))
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    if options.worker == "llama":
        llama_worker(options.model, options.threads)
        return
    if options.worker:
        runner_worker(options.worker, options.model, options.threads, options.cache)
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
