"""How products are launched: their segments, loads and tiles."""

from __future__ import annotations

from typing import Any

import torch
import triton

from shoal.runners.cuda import kernels as k
from shoal.runners.cuda.weights import Matrix

FEW_ROWS = 32  # up to here a narrow product gives each segment of K a program of its own
HEAD_N = 128  # tokens of the vocabulary that one program takes
LEAST_ROWS = 16  # of x that an instruction takes: fewer are filled up
FEW_LOAD = 256  # inputs of one load of `product_few`
UNPACKING_STAGES = 3  # loads in flight where weights are unpacked: they wait in registers


def product(
    x: torch.Tensor,
    w: Matrix,
    out: torch.Tensor,
    epilogue: Any,
    rows: int,
    *,
    bias: torch.Tensor | None = None,
    ld: int | None = None,
    act: int = 0,
    best: tuple[torch.Tensor, torch.Tensor] | None = None,
    cap: float | None = None,
    logit_scale: float = 1.0,
    logits: bool = False,
    shares: torch.Tensor | None = None,
    split: bool = True,
    dependent: bool = False,
) -> int:
    """Launch a product of `rows` rows; returns in how many sums an output of PARTS is left (see `kernels.product`).

    With `shares`, float32 [rows], the sums of a row are multiplied by its share. Without `split` they are left in one.
    """
    gated = epilogue == k.GATED
    n = w.n // 2 if gated else w.n
    segments = segments_of(w.k)
    few = few_of(w, rows, gated) if epilogue != k.PICK and shares is None else None
    if few is not None:
        bn, warps = few
        k.product_few[(triton.cdiv(w.n, bn),)](
            *(x, w.data, w.data if bias is None else bias, out, rows, ld or n),
            *(
                n,
                w.k,
                epilogue,
                bias is not None,
                act,
                LEAST_ROWS,
                bn,
                FEW_LOAD,
                w.k // segments // FEW_LOAD,
                dependent,
            ),
            num_warps=warps,
            launch_pdl=dependent,
            enable_fp_fusion=False,
        )
        return 1
    bm, bn, warps, stages = tile_of(rows, epilogue == k.PICK)
    stages = stages if w.form == k.BF16 else UNPACKING_STAGES
    parts = segments if split and epilogue == k.PARTS and rows <= FEW_ROWS else 1
    values, places = best or (out, out)
    k.product[(triton.cdiv(w.n, bn), triton.cdiv(rows, bm), parts)](
        *(x, w.data, w.scales, w.supers, w.data if bias is None else bias, out if shares is None else shares),
        *(out, values, places),
        *(rows, ld or n, cap or 0.0, logit_scale),
        *(n, w.k, segments, parts, w.form, epilogue, bias is not None, shares is not None),
        *(act, cap is not None, logits),
        *(bm, bn, load_of(w.k, rows), dependent),
        num_warps=warps,
        num_stages=stages,
        launch_pdl=dependent,
        enable_fp_fusion=False,
    )
    return int(parts)


def segments_of(inputs: int) -> int:
    """Segments that a product of so many inputs is cut into: of its shape only."""
    return next(s for s in (4, 2, 1) if inputs % (s * 64) == 0 or s == 1)


def few_of(w: Matrix, rows: int, gated: bool) -> tuple[int, int] | None:
    """Outputs of a program of `product_few`, and its warps; None where `product` is as fast or must be.

    A program asks for all its weights at once: so many must fit its registers. Only bf16 weights: what was unpacked
    reaches the small instruction with its inputs in another order than the large one (seen on an H200: the last bit).
    """
    segment = w.k // segments_of(w.k)
    if w.form != k.BF16 or rows > LEAST_ROWS or segments_of(w.k) != 4:
        return None
    if segment % FEW_LOAD or segment > 4 * FEW_LOAD or (rows > 2 and segment > 2 * FEW_LOAD):
        return None
    if segment == FEW_LOAD:
        return 32, 4
    return (32 if gated else 16), 8


def load_of(inputs: int, rows: int) -> int:
    """Inputs of one load. A segment is two or more of them: a compiler would make one chain of segments of a single
    product.
    """
    length = inputs // segments_of(inputs)
    most = 128 if rows <= 64 else 64
    return next(size for size in (128, 64, 32) if size <= most and length % size == 0 and (length > size or size == 32))


def tile_of(rows: int, head: bool) -> tuple[int, int, int, int]:
    """Rows and outputs of one program, its warps, and loads in flight. They choose who sums what, never in which
    order.
    """
    if rows <= 64:
        few = max(LEAST_ROWS, triton.next_power_of_2(rows))
        return (few, HEAD_N, 8, 3) if head else (few, 64, 4, 6 if few <= 32 else 4)
    if head:
        return 64, HEAD_N, 4, 4
    return (64 if rows <= 512 else 128), 64, 4, 4
