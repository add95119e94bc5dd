"""The speeds of `gpu.py`: decoding, prefill, the whole engine, a workload, and which share of the floor is reached."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from gpu_common import Decoding, decoder_of, plan_of, runner_of, seq

LAUNCH_US = 0.8  # of a kernel in a graph that does nothing


def memory_rate() -> float:
    """Bytes a second that a large copy reads and writes."""
    import torch

    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return 2 * source.nbytes / statistics.median(times)


def speeds(runner: Any, rows: list[int], context: int, rate: float, trunk: int = 0) -> dict[int, dict[str, Any]]:
    """Tokens per second of greedy decoding through `execute`, time of the bare graph, and its share of the floor.

    The floor is all weights once and the KV of every row, a shared trunk once, and recurrent state read and written, at
    the rate of a copy.
    """
    spec = runner.spec
    found: dict[int, dict[str, Any]] = {}
    for count in rows:
        runner.release(range(10_000))
        decoding = Decoding(runner, count, context, trunk)
        for _ in range(4):
            decoding.step()
        whole = statistics.median(decoding.seconds() for _ in range(5)) * 1e6
        decoding.step()
        decoding.step()
        bare = graph_us(runner)
        tokens = count * (context - trunk) + trunk
        moved = spec.weight_bytes + tokens * spec.kv_bytes_per_token + 2 * count * spec.checkpoint_bytes
        floor = moved / rate * 1e6
        found[count] = {
            "us": round(whole),
            "tok_s": round(count / whole * 1e6),
            "graph_us": round(bare),
            "engine_over_graph": round(bare / whole, 2),
            "share_of_floor": round(floor / bare, 2),
        }
    return found


def graph_us(runner: Any) -> float:
    """Of the graph that was captured for the step that runs ahead; positions go back, so that it stays in its shape."""
    import torch

    shape = runner._ahead.shape
    graph, positions = runner._step._graphs[shape], runner._step.inputs(shape).tensors["positions"]
    kept, times = positions.clone(), []
    for _ in range(7):
        positions.copy_(kept)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda.synchronize()
        events[0].record()
        for _ in range(4):
            graph.replay()
        events[1].record()
        torch.cuda.synchronize()
        times.append(float(events[0].elapsed_time(events[1]) / 4 * 1e3))
    positions.copy_(kept)
    return statistics.median(times)


def kernel_shares(runner: Any, rows: int, context: int, rate: float) -> list[dict[str, Any]]:
    """Of each kernel in a step: launches, microseconds, what its bytes take at the rate of a copy, and the share.

    Where bytes are few the floor is that of empty launches.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    runner.release(range(10_000))
    decoding = Decoding(runner, rows, context, 0)
    for _ in range(4):
        decoding.step()
    graph = runner._step._graphs[runner._ahead.shape]
    repeats = 4
    with profile(activities=[ProfilerActivity.CUDA]) as session:
        for _ in range(repeats):
            graph.replay()
        torch.cuda.synchronize()
    spec, model = runner.spec, runner._model
    each = rows * model.width
    moved = {
        "product": spec.weight_bytes,
        "expert_product": spec.weight_bytes,  # all experts: with few rows it reads fewer, and may pass 1
        "attend_rows": rows * context * spec.kv_bytes_per_token,
        "norm": (2 * len(model.layers) + 2) * each * 14,
        "embed": each * 6,
    }
    totals: dict[str, list[float]] = {}
    for event in session.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            totals.setdefault(event.name[:24], []).append(event.time_range.end - event.time_range.start)
    found = []
    for name, times in sorted(totals.items(), key=lambda item: -sum(item[1])):
        us, launches = sum(times) / repeats, len(times) / repeats
        floor = max(moved.get(name, 0) / rate * 1e6, launches * LAUNCH_US)
        facts = {"kernel": name, "launches": round(launches), "us": round(us, 1)}
        found.append(facts | {"floor_us": round(floor, 1), "share_of_floor": round(floor / us, 2)})
    return found


def engine_speed(decoder: Any, rows: list[int]) -> dict[str, Any]:
    """The whole engine: greedy tokens per second by batch, and whether a request writes what it writes alone."""
    from shoal import Engine, EngineConfig, Request, SamplingParams
    from shoal.runners.cuda.backend import load_decoder

    most = max(rows)
    config = EngineConfig(max_batch=most, kv_memory="16GiB", max_step_tokens=4096, max_queue=4 * most)

    def load() -> Any:
        return load_decoder(
            decoder, "cuda:0", key="engine", kv_bytes=16 << 30, memory_bytes=None, max_batch=most, max_step_tokens=4096
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


def workload(decoder: Any) -> dict[str, Any]:
    """nano-vllm's: 256 requests of 100 to 1,024 tokens in and out, greedy, all at once; output tokens a second.

    Twice, with other prompts of the same lengths: the first time kernels are compiled and graphs captured.
    """
    import torch

    from shoal import Engine, EngineConfig, Request, SamplingParams
    from shoal.runners.cuda.backend import load_decoder

    rng = random.Random(0)
    sizes = [(rng.randint(100, 1024), rng.randint(100, 1024)) for _ in range(256)]

    def requests() -> list[Request]:
        return [
            Request(
                prompt_tokens=[rng.randrange(10_000) for _ in range(fed)],
                sampling=SamplingParams(max_tokens=written, ignore_eos=True),
            )
            for fed, written in sizes
        ]

    torch.cuda.reset_peak_memory_stats()
    config = EngineConfig(max_batch=256, kv_memory="48GiB", max_step_tokens=8192, max_queue=512)

    def load() -> Any:
        return load_decoder(
            decoder, "cuda:0", key="workload", kv_bytes=48 << 30, memory_bytes=None, max_batch=256, max_step_tokens=8192
        )

    seconds = []
    with Engine(load, None, config) as engine:
        for _ in range(2):
            fed = requests()
            begin = time.perf_counter()
            results = engine.run(fed).results
            seconds.append(time.perf_counter() - begin)
    written = sum(len(result.tokens) for result in results)
    assert written == sum(size for _, size in sizes), "somebody wrote less than was asked for"
    return {
        "output_tokens": written,
        "input_tokens": sum(size for size, _ in sizes),
        "seconds": round(seconds[1], 1),
        "first_seconds": round(seconds[0], 1),
        "output_tok_s": round(written / seconds[1]),
        "peak_bytes": int(torch.cuda.max_memory_allocated()),
    }


def formats(folder: Path, rows: list[int], rate: float) -> dict[str, Any]:
    """The same shape in bf16, Q4_0, Q4_K and Q8_0, with KV in 8 bits, a hybrid, a mixture: speeds, weights, memory."""
    import torch

    kinds = [("qwen3-0.6b", name, False) for name in ("bf16", "q4_0", "q4_k_m", "q8_0")]
    kinds += [("qwen3.5-4b-8l", "q4_k_m", False)]
    kinds += [("qwen3-0.6b", "bf16", True), ("qwen3-30b-a3b-4l", "bf16", False), ("qwen3-30b-a3b-4l", "q4_k_m", False)]
    found = {}
    for shape, name, eight in kinds:
        torch.cuda.reset_peak_memory_stats()
        decoder = dataclasses.replace(decoder_of(shape, name, folder), context_length=4096)
        runner = runner_of(decoder, blocks=9000, slots=256, rows=2048, eight=eight)
        found[f"{shape} {name}{' KV in 8 bits' if eight else ''}"] = {
            "weight_bytes": runner.spec.weight_bytes,
            "kv_bytes_per_token": runner.spec.kv_bytes_per_token,
            "short": speeds(runner, rows, 40, rate),
            "context_1000": speeds(runner, rows, 1000, rate),
            "peak_bytes": runner.peak_bytes,
        }
        runner.close()
    return found


def llama(folder: Path) -> dict[str, Any]:
    """llama.cpp's CUDA build on the same files, where its programs are on PATH; {} where they are not."""
    found: dict[str, Any] = {}
    for name in ("q4_0", "q4_k_m", "bf16"):
        decoder_of("qwen3-0.6b", name, folder)
        model = ["-m", str(folder / f"qwen3-0.6b-{name}.gguf"), "-ngl", "99", "-fa", "1"]
        bench, batched = shutil.which("llama-bench"), shutil.which("llama-batched-bench")
        if bench:
            told = _told([bench, *model, "-p", "2048", "-n", "128", "-r", "5", "-o", "json"])
            found[f"{name} llama-bench"] = json.loads(told) if told.startswith("[") else told
        if batched:
            sizes = ["-c", "16384", "-npp", "40", "-ntg", "128", "-npl", "1,8,32,64", "--output-format", "jsonl"]
            found[f"{name} llama-batched-bench"] = _told([batched, *model, *sizes]).splitlines()
    return found


def _told(command: list[str]) -> str:
    """What a program prints, or the end of what it complained of."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.stdout.strip() if ended.returncode == 0 else f"exit {ended.returncode}: {ended.stderr[-500:]}"
