"""What sharing a prefix saves, what a hit costs, and how long a stream waits because another prompt joins."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import psutil
from scripts.measure.common import forget, greedy, interleaved, load, make_loop, median, prompts, run, spread

from shoal import Engine, Request
from shoal.core.audit import check_integrity


def fanout(runs: int) -> dict[str, Any]:
    """Eight branches of a 1,000-token trunk on a cold engine, sharing on and off: wall time and median TTFT."""
    trunk = prompts(1, 1000, seed=3)[0]
    tokens = [[*trunk, *branch] for branch in prompts(8, 20, seed=4)]
    with load() as shared, load(prefix_sharing=False) as alone:
        ttft: dict[str, list[float]] = {"on": [], "off": []}
        facts: dict[str, Any] = {}

        def measure(name: str, engine: Engine) -> float:
            forget(engine)
            report = run(engine, tokens, 32)
            ttft[name].append(median([r.ttft_s or 0.0 for r in report.results]))
            facts[f"computed_{name}"] = sum(r.receipt.computed_tokens for r in report.results)
            return report.wall_s

        values = interleaved(runs, on=lambda: measure("on", shared), off=lambda: measure("off", alone))
    return {
        "wall_s": {name: spread(v) for name, v in values.items()},
        "ttft_p50_s": {name: spread(v[1:]) for name, v in ttft.items()},
        "wall_ratio": round(median(values["on"]) / median(values["off"]), 3),
        "ttft_ratio": round(median(ttft["on"][1:]) / median(ttft["off"][1:]), 3),
        **facts,
    }


def second(runs: int) -> dict[str, Any]:
    """Tokens that a second identical request of 1,001 tokens computes, and milliseconds its admission takes."""
    loop = make_loop()
    tokens = prompts(1, 1001, seed=5)[0]
    computed, admission = [], []
    for number in range(20 * runs):
        ticket = loop.add(
            f"r{number}", loop.intake.admit(Request(prompt_tokens=tokens, sampling=greedy(1))), lambda e: None
        )
        begin = time.perf_counter()
        loop.scheduler._next_to_join(0.0)
        loop.scheduler._join(ticket.seq, 0.0)
        if number:
            admission.append((time.perf_counter() - begin) * 1e3)
        loop.scheduler._preempt(ticket.seq)
        while not loop.idle:
            loop.step()
        computed.append(ticket.seq.computed_tokens)
    loop.runner.close()
    return {"computed_tokens": computed[1], "first_computed": computed[0], "admission_ms": spread(admission)}


def stall(runs: int) -> dict[str, Any]:
    """Eight streams decode, a 4,000-token prompt joins: the worst gap of any stream, and what throughput it costs."""
    figures: dict[str, Any] = {}
    with load(max_batch=9) as engine:
        bound = engine.config.max_stall_ms
        alone, mixed, gaps = [], [], []
        prompt = prompts(1, 4000, seed=6)[0]
        for number in range(runs + 1):
            forget(engine)
            prefill = run(engine, [prompt], 1).wall_s
            forget(engine)
            undisturbed, _ = _streams(engine, None)
            forget(engine)
            disturbed, gap = _streams(engine, prompt)
            if number:
                alone.append(undisturbed + prefill)
                mixed.append(disturbed)
                gaps.append(gap * 1e3)
    figures["bound_ms"] = bound
    figures["worst_gap_ms"] = spread(gaps)
    figures["wall_s"] = {"streams, then the prompt": spread(alone), "together": spread(mixed)}
    figures["together_over_apart"] = round(median(mixed) / median(alone), 3)
    return figures


def _streams(engine: Engine, joining: list[int] | None) -> tuple[float, float]:
    """Seconds until eight streams of 200 tokens (and a joining prompt) have ended, and the longest gap in a stream."""
    done, last, worst, lock = threading.Event(), {}, [0.0], threading.Lock()
    open_requests = itertools.count(9 if joining else 8, -1)
    left = [next(open_requests)]

    def sink(event: Any) -> None:
        now = time.perf_counter()
        if event.tokens and event.request_id != "joining":
            worst[0] = max(worst[0], now - last.get(event.request_id, now))
            last[event.request_id] = now
        if event.finished:
            with lock:
                left[0] -= 1
                if not left[0]:
                    done.set()

    begin = time.perf_counter()
    for tokens in prompts(8, 40, seed=7):
        engine.submit(Request(prompt_tokens=tokens, sampling=greedy(200)), sink=sink)
    if joining:
        time.sleep(0.3)
        engine.submit(Request(prompt_tokens=joining, id="joining", sampling=greedy(1)), sink=sink)
    done.wait()
    return time.perf_counter() - begin, worst[0]


def distinct(runs: int) -> dict[str, Any]:
    """100,000 distinct prompts through a small budget of the toy model: memory and books."""
    from shoal.config import EngineConfig
    from shoal.intake import Intake
    from shoal.loop import StepLoop
    from shoal.runners.fake import ByteTokenizer, FakeRunner

    del runs
    runner = FakeRunner(num_blocks=64)
    loop = StepLoop(runner, Intake(runner.spec, ByteTokenizer(), 0), EngineConfig(max_batch=16))
    process, sizes = psutil.Process(), []
    for number in range(100_000):
        loop.add(
            str(number), loop.intake.admit(Request(prompt=f"{number:07d} " * 5, sampling=greedy(1))), lambda e: None
        )
        if number % 16 == 15:
            while not loop.idle:
                loop.step()
        if number % 10_000 == 9_999:
            check_integrity(loop.scheduler)
            sizes.append(round(process.memory_info().rss / 2**20, 1))
    return {
        "rss_mib_each_10000": sizes,
        "evictions": loop.stats().evictions,
        "cached_blocks": loop.scheduler.kv.pool.num_cached,
    }
