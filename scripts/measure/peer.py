"""Against llama.cpp on the same file, and at 8 bits level for level."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from scripts.measure.common import MODEL, THREADS, forget, interleaved, load, median, model_path, prompts, run, spread

from shoal import Engine
from shoal.models import Store

DECODED = 48


def peer(runs: int) -> dict[str, Any]:
    """Aggregate decode tok/s at 1, 8 and 32 streams of 40-token prompts, and prefill tok/s of 512-token chunks."""
    from scripts.measure.llama import Llama, requantised

    path = model_path()
    eight = requantised(path, Store().cache_dir("peers") / f"{MODEL}.Q8_0.gguf")
    figures: dict[str, Any] = {}
    with load(max_batch=32) as engine:
        for streams in (1, 8, 32):
            tokens = prompts(streams, 40)
            peers = {
                name: Llama(file, streams=streams, length=128, threads=THREADS)
                for name, file in (("llama_q4_1", path), ("llama_q8_0", eight))
            }
            measures = {name: partial(_decode, llama, tokens) for name, llama in peers.items()}
            measures["shoal"] = partial(_ours, engine, tokens)
            values = interleaved(runs, **measures)
            for llama in peers.values():
                llama.close()
            figures[f"decode_{streams}"] = _ratios(values)
        figures["prefill"] = _prefill(engine, runs, path, eight)
    return figures


def _ours(engine: Engine, tokens: list[list[int]]) -> float:
    return run(engine, tokens, DECODED).decode_tokens_per_s


def _decode(llama: Any, tokens: list[list[int]]) -> float:
    llama.clear()
    _, _, seconds = llama.generate(tokens, DECODED)
    return len(tokens) * (DECODED - 1) / float(seconds)


def _prefill(engine: Engine, runs: int, path: Any, eight: Any) -> dict[str, Any]:
    from scripts.measure.llama import Llama

    tokens = prompts(4, 512, seed=1)
    peers = {name: Llama(p, streams=4, length=600, threads=THREADS) for name, p in (("q4_1", path), ("q8_0", eight))}

    def ours() -> float:
        forget(engine)
        return 4 * 512 / run(engine, tokens, 1).wall_s

    def theirs(llama: Llama) -> float:
        llama.clear()
        begin = time.perf_counter()
        llama.prefill(tokens)
        return 4 * 512 / (time.perf_counter() - begin)

    values = interleaved(
        runs, shoal=ours, llama_q4_1=lambda: theirs(peers["q4_1"]), llama_q8_0=lambda: theirs(peers["q8_0"])
    )
    for llama in peers.values():
        llama.close()
    return _ratios(values)


def burst(runs: int) -> dict[str, Any]:
    """16 requests of 1,000 to 1,080 prompt tokens, 128 out: seconds of wall time; llama.cpp in two waves of eight."""
    from scripts.measure.llama import Llama

    tokens = [p[: 1000 + 5 * i] for i, p in enumerate(prompts(16, 1080, seed=2))]
    llama = Llama(model_path(), streams=8, length=1300, threads=THREADS)
    with load(max_batch=16, kv_memory="1GiB") as engine:

        def ours() -> float:
            forget(engine)
            return run(engine, tokens, 128).wall_s

        def theirs() -> float:
            begin = time.perf_counter()
            for wave in (tokens[:8], tokens[8:]):
                llama.clear()
                llama.generate(wave, 128)
            return time.perf_counter() - begin

        values = interleaved(runs, shoal=ours, llama_q4_1=theirs)
    llama.close()
    return {
        "wall_s": {k: spread(v) for k, v in values.items()},
        "ratio": median(values["shoal"]) / median(values["llama_q4_1"]),
    }


def _ratios(values: dict[str, list[float]]) -> dict[str, Any]:
    ours = median(values["shoal"])
    return {
        "tokens_per_s": {name: spread(v) for name, v in values.items()},
        "ratio": {name: round(ours / median(v), 2) for name, v in values.items() if name != "shoal"},
    }
