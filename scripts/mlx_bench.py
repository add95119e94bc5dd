"""The engine on MLX against a hand-written static batch and `mlx-lm`'s batch generator, in one run, in turns.

    python scripts/mlx_bench.py --bits 4 8 --batch 1 2 4 8 16 32
    python scripts/mlx_bench.py --shared        # eight streams over one prefix of 1,000 tokens

The model has the shape of Qwen3-0.6B and random weights (`--layers` and `--hidden` make it smaller); nothing is
fetched. Prints tables, then one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import qwen3
from mlx_lm.models.cache import make_prompt_cache

from shoal import Engine, EngineConfig, Event, Request, Result, SamplingParams
from shoal.runners.mlx.loading import describe, spec_of
from shoal.runners.mlx.runner import MLXRunner

KV_BYTES = 8 << 30
PROMPT = 64


def make_model(options: argparse.Namespace, bits: int) -> Any:
    """Random bf16 weights, quantised in groups of 64."""
    mx.random.seed(0)
    arguments = qwen3.ModelArgs(
        model_type="qwen3", hidden_size=options.hidden, num_hidden_layers=options.layers,
        intermediate_size=3 * options.hidden, num_attention_heads=16, rms_norm_eps=1e-6, vocab_size=options.vocab,
        num_key_value_heads=8, max_position_embeddings=40960, rope_theta=1e6, head_dim=128, tie_word_embeddings=True,
    )  # fmt: skip
    model = qwen3.Model(arguments)
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=64, bits=bits)
    mx.eval(model.parameters())
    return model


def engine_over(model: Any, **settings: Any) -> Engine:
    """An engine, with a thread of its own, over a runner on this model."""

    def make_runner() -> MLXRunner:
        loaded = describe(model, "random", "qwen3", 40960)
        return MLXRunner(loaded, spec_of(loaded, KV_BYTES, None, 4096))

    return Engine(make_runner, None, EngineConfig.of(max_batch=32, max_step_tokens=4096, **settings))


def prompts(count: int, length: int, seed: int, *, uneven: bool = False) -> list[list[int]]:
    """Random prompts, of one length or of up to half as many tokens more."""
    rng = random.Random(seed)
    lengths = [length + (rng.randrange(length // 2) if uneven else 0) for _ in range(count)]
    return [[rng.randrange(10, 900) for _ in range(n)] for n in lengths]


class Window:
    """Counts tokens and time from the moment every stream has its first token."""

    def __init__(self, streams: int) -> None:
        self.waiting = set(range(streams))
        self.begin = 0.0
        self.tokens = 0
        self.end = 0.0

    def note(self, stream: int, count: int) -> None:
        self.end = time.perf_counter()
        if self.waiting:
            self.waiting.discard(stream)
            self.begin = self.end
        else:
            self.tokens += count

    @property
    def rate(self) -> float:
        return self.tokens / (self.end - self.begin)


def by_engine(engine: Engine, batch: Sequence[Sequence[int]], steps: int) -> float:
    """Decode tokens per second over all streams. All arrive at one moment, as in a static batch."""
    window, ended = Window(len(batch)), queue.SimpleQueue[Result]()
    sampling = SamplingParams(max_tokens=steps, ignore_eos=True)

    def sink(event: Event) -> None:
        if event.tokens:
            window.note(int(event.request_id), len(event.tokens))
        if event.result is not None:
            ended.put(event.result)

    engine.suspend()
    for i, prompt in enumerate(batch):
        engine.submit(Request(prompt_tokens=tuple(prompt), sampling=sampling, id=str(i)), sink=sink)
    engine.resume()
    for _ in batch:
        result = ended.get()
        if result.error is not None:
            raise result.error
    return window.rate


def by_generator(model: Any, batch: Sequence[Sequence[int]], steps: int) -> float:
    """The same with `mlx-lm`'s own batch generator."""
    generator = BatchGenerator(model, max_tokens=steps, completion_batch_size=32, prefill_batch_size=32)
    names = {uid: i for i, uid in enumerate(generator.insert([list(p) for p in batch]))}
    window, left = Window(len(batch)), len(batch)
    while left:
        _, responses = generator.next()
        for response in responses:
            window.note(names[response.uid], 1)
            left -= response.finish_reason is not None
    generator.close()
    return window.rate


def by_hand(model: Any, batch: Sequence[Sequence[int]], steps: int, chain: int, *, ahead: bool = True) -> float:
    """A static batch: prompts of one length, nobody joins or leaves. `ahead`: a step starts before the last is read."""
    cache = make_prompt_cache(model)
    fed = mx.array(batch)
    model(fed[:, :-1], cache=cache)
    mx.eval([c.state for c in cache])
    tokens = mx.argmax(model(fed[:, -1:], cache=cache)[:, -1, :], axis=-1)
    mx.eval(tokens)
    begin, pending, written = time.perf_counter(), [tokens], 0
    while written < steps - 1:
        upcoming = []
        for _ in range(min(chain, steps - 1 - written)):
            tokens = mx.argmax(model(tokens[:, None], cache=cache)[:, -1, :], axis=-1)
            mx.async_eval(tokens)
            upcoming.append(tokens)
        for done in pending if ahead else upcoming:
            done.tolist()
        pending = upcoming if ahead else []
        written += len(upcoming)
    for done in pending:
        done.tolist()
    return len(batch) * (steps - 1) / (time.perf_counter() - begin)


def in_turns(rounds: int, measures: dict[str, Callable[[int], float]]) -> dict[str, list[float]]:
    """Each measure `rounds` times, in turns and in changing order, after one round that does not count."""
    values: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(rounds + 1):
        names = list(measures) if number % 2 else list(reversed(measures))
        for name in names:
            value = measures[name](number)
            if number:
                values[name].append(value)
    return values


def decode_table(options: argparse.Namespace, bits: int) -> list[dict[str, Any]]:
    """Tokens per second at each batch size, medians."""
    model, rows = make_model(options, bits), []
    engines = {f"engine, chain {chain}": engine_over(model, decode_chunk=chain) for chain in options.chain}
    for size in options.batch:

        def same(number: int, size: int = size) -> list[list[int]]:
            return prompts(size, PROMPT, 100 * size + number, uneven=options.uneven)

        measures: dict[str, Callable[[int], float]] = {
            name: lambda n, e=engine: by_engine(e, same(n), options.steps)  # type: ignore[misc]
            for name, engine in engines.items()
        }
        if not options.uneven:
            measures["static"] = lambda n: by_hand(model, same(n), options.steps, 1)
        if options.modes:
            measures["static, step by step"] = lambda n: by_hand(model, same(n), options.steps, 1, ahead=False)
            measures["static, chain 16"] = lambda n: by_hand(model, same(n), options.steps, 16, ahead=False)
        measures["mlx-lm"] = lambda n: by_generator(model, same(n), options.steps)
        values = in_turns(options.rounds, measures)
        row = {"bits": bits, "batch": size, **{name: round(statistics.median(v), 1) for name, v in values.items()}}
        row["ms"] = {name: round(1e3 * size / statistics.median(v), 3) for name, v in values.items()}
        rows.append(row)
        print(json.dumps(row), flush=True)
    for engine in engines.values():
        engine.close()
    return rows


def shared_prefix(options: argparse.Namespace, bits: int) -> list[dict[str, Any]]:
    """Seconds from submission to the last token: eight streams over 1,000 common tokens, the cache cold each time."""
    model, rows = make_model(options, bits), []
    engine = engine_over(model, decode_chunk=max(options.chain))

    def batch(number: int) -> list[list[int]]:
        trunk = prompts(1, 1000, number)[0]
        return [[*trunk, *own] for own in prompts(8, 24, 1000 + number)]

    for steps in options.outputs:

        def ours(number: int, steps: int = steps) -> float:
            engine.suspend(drop_kv=True)
            engine.resume()
            streams = batch(number)
            begin = time.perf_counter()
            with engine.cache_prefix(streams[0][:1000]):
                by_engine(engine, streams, steps)
            return time.perf_counter() - begin

        def theirs(number: int, steps: int = steps) -> float:
            begin = time.perf_counter()
            by_generator(model, batch(number), steps)
            return time.perf_counter() - begin

        values = in_turns(options.rounds, {"engine": ours, "mlx-lm": theirs})
        row = {
            "bits": bits,
            "tokens out": steps,
            **{name: round(statistics.median(v), 4) for name, v in values.items()},
        }
        row["times"] = round(row["mlx-lm"] / row["engine"], 2)
        rows.append(row)
        print(json.dumps(row), flush=True)
    engine.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--chain", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--outputs", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--modes", action="store_true", help="also the static batch step by step, and in chains")
    parser.add_argument("--uneven", action="store_true", help="prompts of different lengths; no static batch then")
    parser.add_argument("--shared", action="store_true", help="the shared prefix instead of the decode table")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=151936)
    options = parser.parse_args()
    measure = shared_prefix if options.shared else decode_table
    rows = [row for bits in options.bits for row in measure(options, bits)]
    print(json.dumps({"device": str(mx.default_device()), "mlx": mx.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
