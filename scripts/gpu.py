"""Check and measure the CUDA runner on a machine with an NVIDIA GPU; prints one JSON: `python scripts/gpu.py [--rows 1
8 ...]`.

Needs torch with Triton, numpy and gguf; a folder of wheels can be given with --wheels. The models are random, in the
shape of Qwen3-0.6B and tiny ones for the checks against the numpy oracle.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]


def runner_of(decoder: Any, *, blocks: int, slots: int, rows: int) -> Any:
    """A CUDA runner over a decoder."""
    import torch

    from shoal.runners.cuda.access import identity_of
    from shoal.runners.cuda.backend import spec_of
    from shoal.runners.cuda.model import upload
    from shoal.runners.cuda.runner import CUDARunner, bucket

    model = upload(decoder, torch.device("cuda"), blocks, decoder.context_length, bucket(slots))
    identity = identity_of(decoder.name, "bf16", model.device)
    return CUDARunner(model, spec_of(decoder, blocks, model.weight_bytes), identity, slots=slots, rows=rows)


def plan_of(*sequences: Any, chain: int = 1) -> Any:
    from shoal.runners.plan import StepPlan

    return StepPlan(1, tuple(sequences), chain=chain)


def seq(seq_id: int, tokens: Any, start: int, table: Any, want: str = "logits") -> Any:
    from shoal.runners.plan import ScheduledSequence, Want

    return ScheduledSequence(seq_id, tuple(tokens), start, tuple(table), Want(want))


def check_tiny() -> list[dict[str, Any]]:
    """Tiny decoders: prefill, chunks, single tokens and batches against the oracle, and bit for bit."""
    import numpy as np
    from tests.cuda.tiny import prompts, tiny_decoder

    from shoal.models import oracle

    forms: list[dict[str, Any]] = [
        {},
        {"kind": "Q4_K", "bias": True},
        {"window": 40, "sinks": True, "post_norms": True, "qk_norm": False},
        {"kind": "Q6_K"},
        {"kind": "Q4_0", "soft_cap": 20.0},
        {"kind": "Q8_0", "heads": 8, "kv_heads": 1},
    ]
    found = []
    for form in forms:
        decoder = tiny_decoder(**form)
        runner = runner_of(decoder, blocks=512, slots=64, rows=512)
        prompt, *others = prompts(1, [400, *range(130, 300, 5)])
        exact = oracle.logits(decoder, prompt)
        whole = runner.execute(plan_of(seq(1, prompt, 0, range(13)))).logits[0]
        at, chunked = 0, None
        for size in (37, 1, 200, 1, 61, 99, 1):
            chunked = runner.execute(plan_of(seq(2, prompt[at : at + size], at, range(13, 26)))).logits[0]
            at += size
        tables = {3: range(26, 39)} | {4 + i: range(39 + 10 * i, 49 + 10 * i) for i in range(len(others))}
        feeding = [seq(3, prompt[:-1], 0, tables[3], "nothing")]
        feeding += [seq(4 + i, p[:-1], 0, tables[4 + i], "nothing") for i, p in enumerate(others[:3])]
        runner.execute(plan_of(*feeding[:1]))
        for item in feeding[1:]:
            runner.execute(plan_of(item))
        batch = [seq(3, prompt[-1:], len(prompt) - 1, tables[3])]
        batch += [seq(4 + i, p[-1:], len(p) - 1, tables[4 + i]) for i, p in enumerate(others[:3])]
        batch += [seq(20, others[5], 0, range(400, 410))]
        mixed = runner.execute(plan_of(*batch)).logits[0]
        trunk = [seq(30 + i, prompt[-1:], len(prompt) - 1, [*range(12), 420 + i]) for i in range(6)]
        for item in trunk:
            runner.execute(plan_of(seq(item.seq_id, prompt[384:-1], 384, item.block_table, "nothing")))
        shared = runner.execute(plan_of(*trunk)).logits
        found.append(
            {
                "form": form,
                "kl": oracle.mean_kl(exact[-1:], whole[None]),
                "chunked_equal": bool(np.array_equal(whole, chunked)),
                "batched_equal": bool(np.array_equal(whole, mixed)),
                "trunk_equal": all(bool(np.array_equal(whole, row)) for row in shared),
            }
        )
        runner.close()
    return found


def check_ahead() -> bool:
    """Greedy tokens step by step, with one step ahead, equal those of a chain."""
    from tests.cuda.tiny import prompts, tiny_decoder

    decoder = tiny_decoder()
    outputs = []
    for chain in (1, 8):
        runner = runner_of(decoder, blocks=64, slots=8, rows=512)
        rows = {i: list(p) for i, p in enumerate(prompts(3, [33, 60, 5]))}
        tables = {i: tuple(range(8 * i, 8 * i + 8)) for i in rows}
        for i, tokens in rows.items():
            out = runner.execute(plan_of(seq(i, tokens, 0, tables[i], "argmax")))
            tokens.append(out.argmax[i][0])
        for _ in range(64 // chain):
            step = [seq(i, t[-1:], len(t) - 1, tables[i], "argmax") for i, t in rows.items()]
            out = runner.execute(plan_of(*step, chain=chain))
            for i, tokens in rows.items():
                tokens.extend(out.argmax[i])
        outputs.append(rows)
        runner.close()
    return outputs[0] == outputs[1]


class Decoding:
    """Greedy decoding of some rows through `execute`, at a context, with blocks of a trunk that all rows share."""

    def __init__(self, runner: Any, count: int, context: int, trunk: int) -> None:
        blocks, held = -(-(context + 64) // 32), trunk // 32
        own = blocks - held
        self.runner = runner
        shared = tuple(range(held))
        self.tables = [shared + tuple(range(held + i * own, held + (i + 1) * own)) for i in range(count)]
        self.rows = [[(7 * i) % 1000, context - 12] for i in range(count)]

    def step(self) -> None:
        items = enumerate(self.rows)
        out = self.runner.execute(plan_of(*(seq(i, (t,), at, self.tables[i], "argmax") for i, (t, at) in items)))
        for i, row in enumerate(self.rows):
            row[0], row[1] = out.argmax[i][0], row[1] + 1

    def seconds(self, steps: int = 8) -> float:
        """Of one step; the rows go back to where they were."""
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        taken = (time.perf_counter() - begin) / steps
        for row in self.rows:
            row[1] -= steps
        return taken


def speeds(runner: Any, rows: list[int], context: int, trunk: int = 0) -> dict[int, dict[str, Any]]:
    """Tokens per second of greedy decoding through `execute`, and microseconds of the bare graph."""
    import torch

    found: dict[int, dict[str, Any]] = {}
    for count in rows:
        runner.release(range(10_000))
        decoding = Decoding(runner, count, context, trunk)
        for _ in range(4):
            decoding.step()
        whole = statistics.median(decoding.seconds() for _ in range(5)) * 1e6
        decoding.step()
        decoding.step()
        graph = runner._step._graphs[runner._ahead.shape]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda.synchronize()
        events[0].record()
        for _ in range(20):
            graph.replay()
        events[1].record()
        torch.cuda.synchronize()
        bare = events[0].elapsed_time(events[1]) / 20 * 1e3
        found[count] = {"us": round(whole), "tok_s": round(count / whole * 1e6), "graph_us": round(bare)}
    return found


def check_products() -> list[str]:
    """Forms and sizes of a weight whose product differs between numbers of rows, or from a float32 product."""
    import torch
    from tests.cuda.tiny import random_weight

    from shoal.runners.cuda import kernels as k
    from shoal.runners.cuda.step import product
    from shoal.runners.cuda.weights import stacked

    wrong = []
    for form in ("BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"):
        for n, size in ((640, 512), (96, 2304)):
            weight = random_weight(form, n, size)
            matrix = stacked([weight], torch.device("cuda"))[0]
            x = torch.randn(600, size, device="cuda").bfloat16()
            exact = x[0].float() @ torch.from_numpy(weight.values()).cuda().bfloat16().float().T
            base = None
            for rows in (1, 33, 600):
                out = torch.zeros(4 * max(rows, 32) * n, device="cuda")
                parts = product(x, matrix, out, k.PARTS, rows)
                sums = torch.zeros(n, device="cuda")
                for i in range(parts):
                    sums = sums + out[i * rows * n : i * rows * n + n]
                base = sums if base is None else base
                error = ((sums - exact).norm() / exact.norm()).item()
                if not torch.equal(sums, base) or error > 1e-5:
                    wrong.append(f"{form} {n}x{size} rows {rows}: {error:.1e}, {torch.equal(sums, base)}")
    return wrong


def engine_speed(decoder: Any, rows: list[int]) -> dict[str, Any]:
    """The whole engine: greedy tokens per second by batch, and whether a request writes what it writes alone."""
    from shoal import Engine, EngineConfig, Request, SamplingParams
    from shoal.runners.cuda.backend import load_decoder

    most = max(rows)
    config = EngineConfig(max_batch=most, kv_memory="16GiB", max_step_tokens=4096, max_queue=4 * most)

    def load() -> Any:
        return load_decoder(
            decoder, "cuda:0", key="gpu", kv_bytes=16 << 30, memory_bytes=None, max_batch=most, max_step_tokens=4096
        )

    found: dict[str, Any] = {}
    with Engine(load, None, config) as engine:

        def requests(count: int) -> list[Request]:
            sampling = SamplingParams(max_tokens=128, ignore_eos=True)
            prompts = ([(i * 37 + j * 11) % 1000 for j in range(16 + i % 7)] for i in range(count))
            return [Request(prompt_tokens=prompt, sampling=sampling) for prompt in prompts]

        engine.run(requests(most))
        alone = engine.run(requests(1)).results[0].tokens
        for count in rows:
            reports = [engine.run(requests(count)) for _ in range(3)]
            found[str(count)] = round(statistics.median(report.decode_tokens_per_s for report in reports))
            found[f"equal_at_{count}"] = all(report.results[0].tokens == alone for report in reports)
        chosen = (SamplingParams(max_tokens=64, temperature=0.8, top_k=40, seed=seed) for seed in range(16))
        samples = [dataclasses.replace(r, sampling=how) for r, how in zip(requests(16), chosen, strict=True)]
        together = [r.tokens for r in engine.run(samples).results]
        found["sampled_equal"] = together == [engine.run([r]).results[0].tokens for r in samples]
    return found


def prefill_speed(runner: Any, decoder: Any, tokens: int = 2048) -> dict[str, Any]:
    """Prompt tokens per second of one step, and the share of the measured bf16 product rate."""
    import torch

    prompt = tuple(i % 1000 for i in range(tokens))
    table = tuple(range(tokens // 32))
    for _ in range(2):
        runner.execute(plan_of(seq(1, prompt, 0, table, "argmax")))
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        runner.execute(plan_of(seq(1, prompt, 0, table, "argmax")))
        times.append(time.perf_counter() - begin)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    torch.matmul(a, a)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(5):
        torch.matmul(a, a)
    torch.cuda.synchronize()
    rate = 2 * 8192**3 * 5 / (time.perf_counter() - begin)
    weights = sum(w.tensor.shape[0] * w.tensor.shape[1] for _, w in decoder.weights() if len(w.shape) == 2)
    weights -= decoder.vocab_size * decoder.width
    seconds = statistics.median(times)
    return {
        "tokens": tokens,
        "tok_s": round(tokens / seconds),
        "share_of_product_rate": round(2 * weights * tokens / seconds / rate, 3),
    }


def kernel_times(runner: Any) -> dict[str, float]:
    """Microseconds a step of each kernel, from the profiler, without dependent launch."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    shape = runner._ahead.shape
    graph = runner._step._graphs[shape]
    with profile(activities=[ProfilerActivity.CUDA]) as session:
        for _ in range(4):
            graph.replay()
        torch.cuda.synchronize()
    totals: dict[str, float] = {}
    for event in session.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            totals[event.name[:24]] = (
                totals.get(event.name[:24], 0.0) + (event.time_range.end - event.time_range.start) / 4
            )
    return {name: round(us, 1) for name, us in sorted(totals.items(), key=lambda item: -item[1])[:12]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 256])
    parser.add_argument("--skip-checks", action="store_true")
    options = parser.parse_args()
    if options.wheels:
        target = "/tmp/shoal-wheels"
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", target]
        subprocess.run([*command, *map(str, options.wheels.glob("*.whl"))], check=True)
        sys.path.insert(0, target)
    import torch

    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    if not options.skip_checks:
        report["products_wrong"] = check_products()
        report["tiny"] = check_tiny()
        report["ahead_equal"] = check_ahead()
        print(json.dumps(report, indent=1), flush=True)
    from tests.cuda.tiny import qwen3_shape

    decoder = qwen3_shape()
    begin = time.perf_counter()
    runner = runner_of(decoder, blocks=12_000, slots=256, rows=4096)
    report["load_s"] = round(time.perf_counter() - begin, 1)
    report["short"] = speeds(runner, options.rows, 52)
    report["kernels_of_the_last"] = kernel_times(runner)
    print(json.dumps(report["short"]), flush=True)
    report["context_1000"] = speeds(runner, options.rows, 1000)
    report["trunk_896"] = speeds(runner, [r for r in options.rows if r > 1], 1000, trunk=896)
    report["prefill"] = prefill_speed(runner, decoder)
    runner.close()
    print(json.dumps(report), flush=True)
    report["engine"] = engine_speed(decoder, options.rows)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
