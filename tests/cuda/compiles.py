"""Compile every kernel as a step launches it, for a GPU that is not here: `python -m tests.cuda.compiles [--arch 80]`.

Tiny models are stepped on the CPU with each launch replaced by a compilation down to machine code, whose shared
memory must fit the GPU. Nothing is computed.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from shoal.runners.cuda import (
    attention,
    choices,
    delta,
    kernels,
    kernels_attention,
    kernels_attention_few,
    kernels_attention_many,
    kernels_few,
    kernels_many,
    kernels_mixture,
    kernels_recurrent,
    kernels_sampling,
    mixtures,
    products,
    step,
)
from shoal.runners.cuda.backend import load_decoder
from shoal.runners.plan import Draw, ScheduledSequence, StepPlan, Want
from tests.cuda.tiny import prompts, tiny_decoder

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int16: "i16"}
TYPES |= {torch.int8: "i8", torch.float64: "fp64"}
SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}
"""The most shared memory of one program, in bytes, by compute capability."""

EVERYTHING: dict[str, Any] = {"window": 40, "sinks": True, "bias": True, "soft_cap": 20.0, "post_norms": True}
FORMS: list[dict[str, Any]] = [
    {},
    {"eight": True, **EVERYTHING},
    {"kind": "Q4_0", "heads": 6},
    {"kind": "Q4_K", "mixture": {"experts": 6, "used": 2, "shared": True, "gated": True}},
    {"kind": "Q6_K", "mixture": {"experts": 8, "used": 3, "scoring": "sigmoid", "selection": True}},
    {"width": 1024, "ff": 1024, "layers": 2, "heads": 16, "dim": 128, "kv_heads": 8},
    {"width": 1024, "ff": 3072, "layers": 2, "heads": 16, "kv_heads": 8, "bias": True, "eight": True},
    {"width": 1024, "ff": 1024, "layers": 1, "kind": "Q4_K", "bias": True},
    {"kind": "Q8_0", "bias": True, "mixture": {"experts": 8, "used": 4, "scoring": "chosen"}},
    {"kind": "Q4_K", "dim": 256, "nets": (2, 4, 128, 128)},
    {"eight": True, "nets": (1, 3, 48, 64)},
    {"dim": 128, "bias": True, "mixture": {"experts": 8, "used": 4, "activation": "swiglu_clipped"}},
]


class Compiled:
    """Stands in for a kernel: a launch compiles it for the arguments given, once for equal ones."""

    def __init__(self, kernel: Any, target: GPUTarget, counts: Counter[str]) -> None:
        self.kernel, self.target, self.counts = kernel, target, counts
        self.seen: set[str] = set()

    def __getitem__(self, grid: Any) -> Any:
        return self.launch

    def launch(self, *given: Any, **options: Any) -> None:
        names = [p.name for p in self.kernel.params]
        arguments = dict(zip(names, given, strict=False)) | {n: options.pop(n) for n in names if n in options}
        constants = {p.name: _plain(arguments[p.name]) for p in self.kernel.params if p.is_constexpr}
        # As a launch does: a size of 1 is a constant.
        constants |= {n: 1 for n, v in arguments.items() if n not in constants and isinstance(v, int) and v == 1}
        signature = {n: "constexpr" if n in constants else self.type_of(arguments[n]) for n in names}
        key = f"{signature} {constants} {options}"
        if key in self.seen:
            return
        self.seen.add(key)
        aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
        kind = GluonASTSource if self.kernel.is_gluon() else ASTSource
        source = kind(fn=self.kernel, signature=signature, constexprs=constants, attrs=aligned)
        made = triton.compile(source, target=self.target, options=options)
        if made.metadata.shared > SHARED[self.target.arch]:  # a launch would refuse it
            raise RuntimeError(f"{self.kernel.__name__} {constants}: {made.metadata.shared} bytes of shared memory")
        self.counts[self.kernel.__name__] += 1

    @staticmethod
    def type_of(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"*{TYPES[value.dtype]}"
        if isinstance(value, TensorDescriptor):
            return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)},{value.layout!r}>"
        return "fp32" if isinstance(value, float) else "i32"


class View:
    """A module of kernels as those who launch them see it; kernels call each other as they are."""

    def __init__(self, module: Any, target: GPUTarget, counts: Counter[str]) -> None:
        self.__dict__.update(vars(module))
        for name, value in vars(module).items():
            if isinstance(value, triton.runtime.JITFunction):
                setattr(self, name, Compiled(value, target, counts))


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, tl.constexpr) else value


def compile_all(arch: int) -> Counter[str]:
    """How many variants of each kernel were compiled; raises what the compiler does."""
    counts: Counter[str] = Counter()
    target = GPUTarget("cuda", arch, 32)
    view = View(kernels, target, counts)
    for launcher in (step, products, mixtures):
        vars(launcher)["k"] = view
    vars(products)["kf"] = View(kernels_few, target, counts)
    vars(products)["km"] = View(kernels_many, target, counts)
    vars(products)["runs_many"] = lambda device: arch == 90
    vars(products)["runs_few"] = lambda device, form: form == 0 or arch == 90
    vars(attention)["ka"] = View(kernels_attention, target, counts)
    vars(attention)["kaf"] = View(kernels_attention_few, target, counts)
    vars(attention)["kam"] = View(kernels_attention_many, target, counts)
    vars(attention)["runs_many"] = lambda device: arch == 90
    vars(attention)["runs_few"] = lambda device, form: True
    vars(delta)["kr"] = View(kernels_recurrent, target, counts)
    vars(choices)["ks"] = View(kernels_sampling, target, counts)
    choices.DeviceRows(torch.zeros(2, 300), {1: 0}).draw({1: Draw(1.0, 0.0, 0.5)})
    vars(mixtures)["km"] = View(kernels_mixture, target, counts)
    for form in FORMS:
        form = {"layers": 2, "width": 256, "vocab": 300, "ff": 256, **form}
        eight = form.pop("eight", False)
        runner: Any = load_decoder(
            tiny_decoder(**form),
            "cpu",
            key="tiny",
            kv_bytes=16 << 20,
            memory_bytes=None,
            max_batch=128,
            max_step_tokens=1024,
            eight=eight,
        )
        runner._step._dependent = arch >= 90
        if runner.spec.recurrent:  # where the many of `batches` go on from
            runner.access.write_checkpoint(0, 290, np.zeros(runner.spec.checkpoint_bytes, np.uint8))
        for number, batch in enumerate(batches()):
            runner.execute(StepPlan(number, tuple(batch)))
        runner.close()
        print(f"{dict(counts)}", flush=True)
    return counts


def batches() -> list[list[Any]]:
    """A long prompt, a short one, one row, many rows over a trunk that they share, and many with nothing shared."""
    prompt, table = prompts(1, [600])[0], tuple(range(19))
    lone = ScheduledSequence(1, prompt[:1], 300, table, Want.ARGMAX)
    many = [lone._replace(seq_id=10 + i, start=290, load=0) for i in range(100)]
    apart = [row._replace(block_table=tuple((7 * i + j) % 40 for j in range(10))) for i, row in enumerate(many)]
    whole = ScheduledSequence(1, prompt, 0, table, Want.LOGITS)
    return [[whole], [whole._replace(tokens=prompt[:300])], [lone], many, apart]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, default=90, choices=SHARED)
    begin = time.monotonic()
    counts = compile_all(parser.parse_args().arch)
    print(f"{sum(counts.values())} variants of {len(counts)} kernels, {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
