"""The checks of `gpu.py`: against the numpy oracle, and bit for bit whatever the batch."""

from __future__ import annotations

import time
from typing import Any

from gpu_common import plan_of, runner_of, seq

FORMS: list[dict[str, Any]] = [
    {},
    {"kind": "Q4_K", "bias": True},
    {"window": 40, "sinks": True, "post_norms": True, "qk_norm": False},
    {"kind": "Q6_K"},
    {"kind": "Q4_0", "soft_cap": 20.0},
    {"kind": "Q8_0", "heads": 8, "kv_heads": 1},
    {"heads": 6, "kv_heads": 2},
    {"width": 1024, "ff": 3072, "heads": 16, "kv_heads": 8},
    {"width": 1024, "ff": 1024, "heads": 16, "kv_heads": 4, "bias": True, "eight": True},
    {"eight": True},
    {"layers": 4, "nets": (2, 4, 128, 128)},
    {"kind": "Q8_0", "dim": 256, "nets": (1, 4, 48, 64), "mixture": {"experts": 8, "used": 2, "shared": True}},
    {"eight": True, "nets": (2, 4, 64, 128)},
    {"eight": True, "window": 40, "sinks": True},
    {"mixture": {"experts": 8, "used": 2}},
    {"kind": "Q4_K", "mixture": {"experts": 8, "used": 4, "shared": True, "gated": True}},
    {"mixture": {"experts": 6, "used": 3, "scoring": "sigmoid", "selection": True, "scale": 1.5}},
    {
        **{"bias": True, "sinks": True},
        "mixture": {"experts": 8, "used": 4, "scoring": "chosen", "activation": "swiglu_clipped"},
    },
]
"""Of tiny decoders, what `check_tiny` goes through."""


def check_products() -> list[str]:
    """Forms and sizes of a weight whose product differs between numbers of rows, or from a float32 product."""
    import torch
    from tests.cuda.tiny import random_weight

    from shoal.runners.cuda import kernels as k
    from shoal.runners.cuda.step import product
    from shoal.runners.cuda.weights import stacked

    wrong = []
    for form in ("BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"):
        for n, size in ((640, 512), (96, 2304), (96, 1024), (64, 2048), (64, 3072), (64, 9728)):
            weight = random_weight(form, n, size)
            matrix = stacked([weight], torch.device("cuda"))[0]
            x = torch.randn(2048, size, device="cuda").bfloat16()
            exact = x[0].float() @ torch.from_numpy(weight.values()).cuda().bfloat16().float().T
            base = None
            for rows in (1, 2, 16, 17, 33, 600, 2048):
                out = torch.zeros(rows, n, device="cuda")
                product(x, matrix, out, k.SUMS, rows, split=False)
                sums = out[0]
                base = sums if base is None else base
                error = ((sums - exact).norm() / exact.norm()).item()
                if not torch.equal(sums, base) or error > 1e-5:
                    wrong.append(f"{form} {n}x{size} rows {rows}: {error:.1e}, {torch.equal(sums, base)}")
    return wrong


def check_draws() -> dict[str, Any]:
    """Tokens drawn on the device from rows of a real vocabulary's size, and how many of them are not the sampler's."""
    import numpy as np
    import torch

    from shoal.runners.cuda.choices import DeviceRows
    from shoal.runners.plan import Draw
    from shoal.sampling.sampler import SamplerState, inverse, sample
    from shoal.types import SamplingParams

    rng, count, vocabulary = np.random.default_rng(1), 256, 151_936
    found: dict[str, Any] = {}
    for spread in (1.0, 3.0, 6.0):
        rows = rng.normal(0, spread, (count, vocabulary)).astype(np.float32)
        states, draws = [], {}
        for i in range(count):
            params = SamplingParams(temperature=(0.3, 0.7, 1.0, 1.5)[i % 4], min_p=0.01 if i % 3 == 0 else 0.0)
            states.append(SamplerState(params, seed=i, vocab_size=vocabulary))
            draws[i] = Draw(float(inverse(params.temperature)), params.min_p, states[i].next_uniform())
        held = DeviceRows(torch.from_numpy(rows).cuda(), {i: i for i in range(count)})
        expected, _ = sample(rows, states)
        held.draw(draws)
        begin = time.perf_counter()
        drawn = held.draw(draws)
        took = time.perf_counter() - begin
        told = {i: token for i, token in drawn.items() if isinstance(token, int)}
        wrong = sum(token != expected[i] for i, token in told.items())
        found[f"logits of spread {spread}"] = {
            "told": len(told),
            "of": count,
            "wrong": wrong,
            "ms": round(took * 1e3, 2),
        }
    return found


def check_tiny() -> list[dict[str, Any]]:
    """Tiny decoders: prefill, chunks, single tokens and batches against the oracle, and bit for bit.

    Rows over a trunk go on from its blocks, and of recurrent state from a checkpoint.
    """
    import numpy as np
    from tests.cuda.tiny import prompts, tiny_decoder

    from shoal.models import oracle

    found = []
    for form in FORMS:
        decoder = tiny_decoder(**{name: value for name, value in form.items() if name != "eight"})
        runner = runner_of(decoder, blocks=512, slots=32, rows=512, eight=form.get("eight", False))
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
        if runner.spec.recurrent:
            kept = seq(2, prompt[:384], 0, range(12), "nothing")._replace(save=0)
            runner.execute(plan_of(kept))
        for item in trunk:
            rest = seq(item.seq_id, prompt[384:-1], 384, item.block_table, "nothing")
            runner.execute(plan_of(rest._replace(load=0)))
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
    from tests.cuda.tiny import tiny_decoder

    return all(_ahead_equal(tiny_decoder(**form)) for form in ({}, {"nets": (2, 4, 64, 64)}))


def _ahead_equal(decoder: Any) -> bool:
    from tests.cuda.tiny import prompts

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


def check_schedules(schedules: int) -> dict[str, Any]:
    """Random schedules through the engine's loop: every row's logits and every output against what it gets alone."""
    from tests.cuda.tiny import tiny_decoder
    from tests.parity.equality import run

    forms: dict[str, dict[str, Any]] = {
        "bf16": {},
        "norms in products": {"width": 1024, "ff": 3072, "heads": 16, "kv_heads": 8},
        "Q4_K, KV in 8 bits": {"kind": "Q4_K", "eight": True},
        "windows and sinks": {"window": 40, "sinks": True},
        "experts": {"mixture": {"experts": 8, "used": 2, "shared": True, "gated": True}},
        "hybrid": {"layers": 4, "nets": (2, 4, 64, 64)},
    }
    found = {}
    for name, form in forms.items():
        eight = form.pop("eight", False)
        runner = runner_of(tiny_decoder(**form), blocks=160, slots=32, rows=2048, eight=eight)
        outcome = run(runner, schedules=schedules, requests=24, say=True)
        runner.close()
        found[name] = {
            "schedules": outcome.schedules,
            "rows": outcome.rows,
            "rows_differing": outcome.rows_differing,
            "outputs_differing": outcome.outputs_differing,
            "seen": dict(outcome.seen),
        }
    return found
