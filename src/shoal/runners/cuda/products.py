"""How products are launched: their segments, loads and tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from shoal.runners.cuda import kernels as k
from shoal.runners.cuda.weights import Matrix

FEW_ROWS = 32  # up to here a narrow product gives each segment of K a program of its own
HEAD_N = 128  # tokens of the vocabulary that one program takes
LEAST_ROWS = 16  # of x that an instruction takes: fewer are filled up
FEW_LOAD = 256  # inputs of one load of `product_few`
NORMED_ROWS = 8  # up to here a product norms what it reads of the residual, or adds to it: a kernel less
LEAST_LOADED = 4  # rows of x that `product_few` has an own variant for: with fewer loads it is slower (one: a fifth)
SQUARES = int(k.SQUARES.value)  # neighbours of a row of the residual whose squares are summed
UNPACKING_STAGES = 3  # loads in flight where weights are unpacked: they wait in registers


@dataclass(frozen=True, slots=True, eq=False)
class Residual:
    """Rows of the residual x, float32 [rows, H], and the sums of their squares, float32 [rows, H / SQUARES].

    A product of few rows norms what it reads of it with `gain`, or adds its sums to it, times `scale`.
    """

    x: torch.Tensor
    squares: torch.Tensor
    gain: torch.Tensor
    eps: float
    scale: float = 1.0


def product(
    x: torch.Tensor | Residual,
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
    A `Residual` is for products that `few_of` finds a way for.
    """
    gated = epilogue == k.GATED
    n = w.n // 2 if gated else w.n
    segments = segments_of(w.k)
    few = few_of(w, rows, gated) if epilogue != k.PICK and shares is None else None
    if few is not None:
        _launch_few(few, x, w, out, epilogue, rows, n, bias=bias, ld=ld or n, act=act, dependent=dependent)
        return 1
    assert isinstance(x, torch.Tensor)
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


def adds(w: Matrix, rows: int) -> bool:
    """Whether a product can be added to the residual by itself; those that follow can norm what they read then."""
    return rows <= NORMED_ROWS and w.n % SQUARES == 0 and few_of(w, rows, gated=False) is not None


def add_product(
    x: torch.Tensor, w: Matrix, to: Residual, rows: int, bias: torch.Tensor | None, dependent: bool
) -> None:
    """Add a product that `adds` to the residual, and leave its squares."""
    few = few_of(w, rows, gated=False)
    assert few is not None
    _launch_few(few, x, w, to, k.ADD, rows, w.n, bias=bias, ld=w.n, act=0, dependent=dependent)


def _launch_few(
    few: tuple[int, int],
    x: torch.Tensor | Residual,
    w: Matrix,
    out: torch.Tensor | Residual,
    epilogue: Any,
    rows: int,
    n: int,
    *,
    bias: torch.Tensor | None,
    ld: int,
    act: int,
    dependent: bool,
) -> None:
    bn, warps = few
    data, norm = w.data, x if isinstance(x, Residual) else out if isinstance(out, Residual) else None
    gain, squares = (data, data) if norm is None else (norm.gain, norm.squares)
    eps, scale = (0.0, 1.0) if norm is None else (norm.eps, norm.scale)
    k.product_few[(triton.cdiv(w.n, bn),)](
        *(x.x if isinstance(x, Residual) else x, data, data if bias is None else bias, gain, squares),
        *(out.x if isinstance(out, Residual) else out, rows, ld, eps, scale),
        *(n, w.k, epilogue, bias is not None, act, isinstance(x, Residual)),
        *(max(triton.next_power_of_2(rows), LEAST_LOADED), LEAST_ROWS, bn, FEW_LOAD, w.k // 4 // FEW_LOAD),
        *(triton.next_power_of_2(w.k // SQUARES), dependent),
        num_warps=warps,
        launch_pdl=dependent,
        enable_fp_fusion=False,
    )


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
    loads = 4 if rows <= 2 else 3 if rows <= NORMED_ROWS and not gated else 2
    if segment % FEW_LOAD or segment > loads * FEW_LOAD:
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
