"""Random schedules on a real model, each request held against what it gets alone: tokens, and logits bit for bit.

Requests join and leave at random, are cancelled, forked and preempted, hit cached prefixes or lose them, and are
computed in random chunks or brought back from host memory; random numbers of tokens are drafted for them, right and
wrong ones, while alone nothing is.
`python -m tests.parity.equality --schedules 1000` is the large form.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from shoal.config import EngineConfig
from shoal.core.audit import check_integrity
from shoal.core.commands import PreemptAll
from shoal.engine.inflight import Output, RequestState
from shoal.engine.inputs import Codec, InputProcessor
from shoal.engine.kv.buffers import Buffers
from shoal.engine.kv.host import HostTier
from shoal.engine.kv.tiering import Tiering
from shoal.engine.loop import StepLoop
from shoal.runners.base import BlockAccess, Runner
from shoal.runners.fake import ByteTokenizer, FakeRunner
from shoal.runners.plan import ModelSpec, SeqId, StepOutput, StepPlan, Want
from shoal.sampling.sampler import INVALID_TOKEN
from shoal.types import Event, FinishReason, Priority, Request, Result, SamplingParams
from tests.support.drafting import draft_anything

TRUNKS = (0, 20, 80, 160)  # lengths of the beginnings that requests share
OUTPUT = 12


class Watched:
    """A runner that asks for the logits of every row and notes their bits by the tokens they follow."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.spec: ModelSpec = replace(runner.spec, max_top=0, draws=False)
        self.peak_bytes: int | None = None
        self.access: BlockAccess | None = runner.access
        self.tokens: dict[SeqId, list[int]] = {}
        self.rows: list[tuple[int, ...]] = []  # the tokens before each row seen
        self.known: dict[tuple[int, ...], str] = {}
        self.differing: list[tuple[int, ...]] = []

    def execute(self, plan: StepPlan) -> StepOutput:
        """The plan with LOGITS in place of ARGMAX, and the answer as it was asked for."""
        asked = [item for item in plan.sequences if item.want is not Want.NOTHING]
        wide = tuple(i._replace(want=Want.LOGITS if i.want is Want.ARGMAX else i.want) for i in plan.sequences)
        output = self._runner.execute(StepPlan(plan.step, wide, plan.copies, window_copies=plan.window_copies))
        for item in plan.sequences:
            written = self.tokens.setdefault(item.seq_id, [])
            del written[item.start :]
            written += item.tokens
        if output.logits is None:
            return output
        logits = output.logits.copy()
        full: list[int] = []
        argmax: dict[SeqId, tuple[int, ...]] = {}
        at = 0
        for item in asked:
            rows = range(at, at + item.rows)
            at += item.rows
            for row in rows:
                self._note(item.seq_id, at - 1 - row, logits[row].tobytes())
            if item.want is Want.LOGITS:
                full += rows
            else:
                best = (int(logits[i].argmax()) if np.isfinite(logits[i].max()) else INVALID_TOKEN for i in rows)
                argmax[item.seq_id] = tuple(best)
        return StepOutput(argmax, logits[full] if full else None)

    def _note(self, seq_id: SeqId, back: int, bits: bytes) -> None:
        """The row after all of a sequence's tokens but the last `back`."""
        tokens = self.tokens[seq_id]
        key = tuple(tokens[: len(tokens) - back])
        digest = hashlib.blake2b(bits, digest_size=16).hexdigest()
        self.rows.append(key)
        if self.known.setdefault(key, digest) != digest:
            self.differing.append(key)

    def know(self, seq: SeqId, tokens: Sequence[int]) -> None:
        """A sequence that joins with a hit: the tokens before its first fed one."""
        self.tokens[seq] = list(tokens)

    def release(self, seq_ids: Sequence[SeqId]) -> None:
        self._runner.release(seq_ids)

    def close(self) -> None:
        self._runner.close()


@dataclass
class Outcome:
    """What a run of schedules found."""

    schedules: int = 0
    requests: int = 0
    rows: int = 0
    rows_differing: int = 0
    outputs_differing: int = 0
    seen: Counter[str] = field(default_factory=Counter)


def any_sampling(rng: random.Random, vocab: int, seed: int, *, grammar: bool) -> SamplingParams:
    """Greedy or sampled, with whatever changes the choice of a token."""
    fields: dict[str, Any] = {"temperature": rng.choice((0.0, 0.8)), "top_p": rng.choice((1.0, 0.9))}
    if rng.random() < 0.5:
        fields |= {
            "top_k": rng.choice((0, 0, 7)),
            "min_p": rng.choice((0.0, 0.05)),
            "frequency_penalty": rng.choice((0.0, 0.0, 0.5)),
            "repetition_penalty": rng.choice((1.0, 1.0, 1.1)),
            "logit_bias": rng.choice(({}, {}, {rng.randrange(vocab): 3.0})),
            "logprobs": rng.choice((None, None, 0, 3)),
        }
    if grammar and rng.random() < 0.3:
        fields["regex"] = rng.choice(("[ab]{1,4}(, [ab]{1,4})*", "(yes|no, not at all|perhaps) or (never|not yet)[.]"))
    else:
        fields |= {"ignore_eos": rng.random() < 0.8, "stop_token_ids": (rng.randrange(vocab),)}
    return SamplingParams(max_tokens=OUTPUT, seed=seed, **fields)


def make_requests(rng: random.Random, vocab: int, count: int, *, grammar: bool = False) -> list[Request]:
    """Prompts that share trunks of several lengths, greedy and sampled."""
    trunks = [[rng.randrange(3, vocab) for _ in range(n)] for n in TRUNKS]
    requests = []
    for i in range(count):
        prompt = [*rng.choice(trunks), *(rng.randrange(3, vocab) for _ in range(rng.choice((1, 2, 9, 33, 70))))]
        sampling = any_sampling(rng, vocab, i, grammar=grammar)
        requests.append(Request(prompt_tokens=prompt, sampling=sampling, priority=rng.choice(list(Priority))))
    return requests


def solo(watched: Watched, requests: Sequence[Request], codec: Codec | None = None) -> list[Result]:
    """Each request alone, nothing shared, nothing drafted; its rows become the reference."""
    config = EngineConfig(max_batch=1, prefix_sharing=False, speculation=False, max_step_tokens=2048)
    outputs = []
    for request in requests:
        loop = StepLoop(watched, InputProcessor(watched.spec, codec, 0), config)
        events: list[Event] = []
        watched.tokens.clear()
        loop.add("solo", loop.inputs.prepare(request), events.append)
        while not loop.idle:
            loop.step()
        result = events[-1].result
        assert result is not None
        assert result.error is None
        outputs.append(result)
    return outputs


def predict(rng: random.Random, request: Request, tokens: Sequence[int], vocab: int) -> Request:
    """The request with a prediction of what it will write, with mistakes in it: so that drafts are right and wrong."""
    wrong = rng.choice((0.0, 0.1, 0.4))
    guess = [rng.randrange(vocab) if rng.random() < wrong else token for token in tokens]
    return replace(request, predicted=guess if rng.random() < 0.8 else ())


def one_schedule(
    watched: Watched,
    rng: random.Random,
    requests: Sequence[Request],
    alone: Sequence[Result],
    out: Outcome,
    codec: Codec | None = None,
    host: HostTier | None = None,
) -> None:
    """Some of the requests in one random schedule; differences are counted in `out`.

    Where the runner's blocks can be read, half of the schedules bring back from `host` what others left there.
    """
    config = EngineConfig(
        max_batch=rng.randint(1, 12),
        max_step_tokens=rng.choice((16, 50, 128, 512)),
        prefix_sharing=rng.random() < 0.9,
        max_stall_ms=rng.choice((5, 50, 1000)),
    )
    loop = StepLoop(watched, InputProcessor(watched.spec, codec, 0), config)
    draft_anything(loop, rng)
    if watched.access is not None and host is not None and config.prefix_sharing and rng.random() < 0.5:
        loop.tiering = Tiering(loop.scheduler, watched.access, host, None, Buffers(watched.access.block_bytes, 0))
    watched.tokens.clear()
    coming = [rng.randrange(len(requests)) for _ in range(rng.randint(2, 14))]
    events: list[tuple[int, list[Event]]] = []

    def join(i: int, state: RequestState | None = None) -> None:
        events.append((i, []))
        written = loop.share(state) if state is not None else Output()
        request = predict(rng, requests[i], alone[i].tokens, watched.spec.vocab_size)
        added = loop.add(f"r{len(events)}", loop.inputs.prepare(request), events[-1][1].append, before=written)
        watched.know(added.seq.seq_id, added.seq.tokens)

    places: dict[str, int] = {}
    while coming or not loop.idle:
        if coming and (loop.idle or rng.random() < 0.4):
            join(coming.pop())
            places[f"r{len(events)}"] = events[-1][0]
        dice = rng.random()
        if dice < 0.03 and loop.states:
            loop.abort(rng.choice(loop.states))
            out.seen["cancel"] += 1
        elif dice < 0.06 and loop.states:
            parent = rng.choice(loop.states)
            place = places[parent.request_id]
            join(place, parent)
            places[f"r{len(events)}"] = place
            out.seen["fork"] += 1
        elif dice < 0.08:
            loop.scheduler.apply(PreemptAll(drop_cached=rng.random() < 0.5))
        loop.step()
        check_integrity(loop.scheduler)
        kept = loop.scheduler.kv.windows
        if kept is not None and watched.access is not None:  # a pass that reads what is nobody's now fails
            watched.access.discard_blocks((), kept.free)
    if loop.scheduler.kv.windows is not None:
        out.seen["window blocks lost"] += loop.scheduler.kv.windows.lost
    for i, log in events:
        result = log[-1].result
        assert result is not None
        assert result.error is None, result.error
        out.requests += 1
        out.seen["hit"] += result.cached_tokens > 0
        out.seen["brought back"] += result.receipt.host_tokens > 0
        out.seen["preemption"] += result.receipt.preemptions
        out.seen["drafted"] += result.receipt.drafted
        out.seen["accepted"] += result.receipt.accepted
        reached = result.finish_reason is not FinishReason.ABORTED
        same = result.text == alone[i].text if reached else alone[i].text.startswith(result.text)
        same &= not reached or result.finish_reason is alone[i].finish_reason
        for got, wanted in ((result.tokens, alone[i].tokens), (result.logprobs, alone[i].logprobs)):
            same &= got == (wanted if reached else wanted[: len(got)])
        out.outputs_differing += not same
    out.schedules += 1


def run(
    runner: Runner, *, schedules: int, requests: int, seed: int = 0, say: bool = False, codec: Codec | None = None
) -> Outcome:
    """Many random schedules over one set of requests; some are constrained where there is a tokenizer."""
    rng = random.Random(seed)
    watched = Watched(runner)
    wanted = make_requests(rng, runner.spec.vocab_size, requests, grammar=codec is not None)
    alone = solo(watched, wanted, codec)
    references = len(watched.rows)
    out = Outcome()
    host = HostTier(runner.spec.num_blocks * (runner.spec.block_bytes + runner.spec.window_bytes))  # outlives the loops
    begin = time.monotonic()
    for _ in range(schedules):
        one_schedule(watched, rng, wanted, alone, out, codec, host)
        if say and out.schedules % 50 == 0:
            print(f"{out.schedules} schedules, {time.monotonic() - begin:.0f} s", flush=True)
    out.rows = len(watched.rows) - references
    out.rows_differing = len(watched.differing)
    return out


def main() -> None:
    from tests.support.native_tiny import tiny_native, windowed
    from tests.support.runners import real_codec, real_runner

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runner", default="openvino")
    parser.add_argument("--kv-memory", default="64MiB")
    parser.add_argument("--kv-precision", default="auto")
    parser.add_argument(
        "--tiny", help="a model of tests/support/tiny_models.py on the native runner, in place of a real one"
    )
    parser.add_argument("--windows", type=int, default=0, help="of a tiny model with a window: so few window blocks")
    options = parser.parse_args()
    runner: Runner
    codec: Codec | None = None
    if options.tiny and options.windows:
        folder = Path(tempfile.mkdtemp())
        runner = windowed(options.tiny, folder, windows=options.windows, kv=options.kv_precision)
    elif options.tiny:
        runner = tiny_native(options.tiny, Path(tempfile.mkdtemp()), kv=options.kv_precision)
    elif options.runner == "fake":
        runner, codec = FakeRunner(num_blocks=160), ByteTokenizer()
    else:
        runner = real_runner(options.runner, kv_memory=options.kv_memory, kv_precision=options.kv_precision)
        codec = real_codec()
    fields = {"schedules": options.schedules, "requests": options.requests, "seed": options.seed}
    outcome = run(runner, **fields, say=True, codec=codec)
    runner.close()
    print(outcome)
    print(f"{outcome.rows_differing} of {outcome.rows} rows and {outcome.outputs_differing} outputs differ")
    raise SystemExit(1 if outcome.outputs_differing or (runner.spec.exact and outcome.rows_differing) else 0)


if __name__ == "__main__":
    main()
