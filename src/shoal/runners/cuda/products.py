"""How products are launched: their chunks, loads and tiles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton

from shoal.runners.cuda import kernels as k
from shoal.runners.cuda import kernels_few as kf
from shoal.runners.cuda import kernels_many as km
from shoal.runners.cuda.copies import boxes
from shoal.runners.cuda.supports import SPLIT_ROWS
from shoal.runners.cuda.weights import BF16, Matrix

FEW_ROWS = 32  # up to here a narrow product gives each segment of K a program of its own
HEAD_N = 128  # tokens of the vocabulary that one program takes
LEAST_ROWS = 16  # of x that an instruction takes: fewer are filled up; up to here `product_few` is taken
NORMED_ROWS = 8  # up to here a product norms what it reads of the residual, or adds to it: a kernel less
SQUARES = int(k.SQUARES.value)  # neighbours of a row of the residual whose squares are summed
_GROUP_ROWS, _LOAD = int(km.GROUP_ROWS.value), int(km.LOAD.value)
_RING = 6  # loads of `product_many` in flight
_ROUNDS = 6  # chunks that a warp of `product_few` takes: each is written out in its code
UNPACKING_STAGES = 3  # loads in flight where weights are unpacked: they wait in registers
_PROGRAMS = 128  # of a product of few rows: the processors of a large GPU, about


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


@dataclass(frozen=True, slots=True)
class Few:
    """How `product_few` is launched: outputs and rows of a program, and its warps, which take a chunk each."""

    outputs: int
    rows: int
    warps: int


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
    """Launch a product of `rows` rows; returns in how many sums an output of SUMS is left (see `kernels.product`).

    With `shares`, float32 [rows], the sums of a row are multiplied by its share. Without `split` they are left in one.
    A `Residual` is for products that `few_of` finds a way for.
    """
    gated = epilogue == k.GATED
    n = w.n // 2 if gated else w.n
    few = few_of(w, rows, gated) if epilogue != k.PICK and shares is None else None
    if few is not None:
        _launch_few(few, x, w, out, epilogue, rows, n, bias=bias, ld=ld or n, act=act, dependent=dependent)
        return 1
    assert isinstance(x, torch.Tensor)
    copied = (ld or n) % 8 == 0 and out.data_ptr() % 16 == 0  # what the copy engine asks of a matrix
    if shares is None and copied and takes_many(w, rows, epilogue, split=split):
        how = bias, ld or n, act, cap, logit_scale, logits, split
        return _launch_many(x, w, out, epilogue, rows, best or (w.scales, w.scales), *how)
    bm, bn, warps = tile_of(rows, epilogue == k.PICK)
    segments = segments_of(w.k)
    parts = segments if split and epilogue == k.SUMS and rows <= FEW_ROWS else 1
    values, places = best or (out, out)
    k.product[(triton.cdiv(w.n, bn), triton.cdiv(rows, bm), parts)](
        *(x, w.data, w.scales, w.supers, w.data if bias is None else bias, out if shares is None else shares),
        *(out, values, places),
        *(rows, ld or n, cap or 0.0, logit_scale),
        *(n, w.k, segments, parts, chunk_of(w.k), w.form, epilogue, bias is not None, shares is not None),
        *(act, cap is not None, logits),
        *(bm, bn, load_of(w.k, rows), dependent),
        num_warps=warps,
        num_stages=min(stages_of(w.form, rows, bn), max(w.k // load_of(w.k, rows), 2)),
        launch_pdl=dependent,
        enable_fp_fusion=False,
    )
    return parts


def adds(w: Matrix, rows: int) -> bool:
    """Whether a product can be added to the residual by itself."""
    if rows <= NORMED_ROWS:
        return w.n % SQUARES == 0 and few_of(w, rows, gated=False) is not None
    return takes_many(w, rows, k.SUMS, split=True) and many_of(w, rows, split=True)[1] == 1


def add_product(
    x: torch.Tensor, w: Matrix, to: Residual, rows: int, bias: torch.Tensor | None, dependent: bool
) -> None:
    """Add a product that `adds` to the residual. Of few rows it leaves the squares, too: what follows can norm then."""
    few = few_of(w, rows, gated=False)
    if few is None:
        none = w.scales, w.scales
        _launch_many(x, w, to.x, k.ADD, rows, none, bias, w.n, 0, None, to.scale, logits=False, split=False)
        return
    _launch_few(few, x, w, to, k.ADD, rows, w.n, bias=bias, ld=w.n, act=0, dependent=dependent)


def _launch_few(
    few: Few,
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
    data, norm = w.data, x if isinstance(x, Residual) else out if isinstance(out, Residual) else None
    gain, squares = (data, data) if norm is None else (norm.gain, norm.squares)
    eps, scale = (0.0, 1.0) if norm is None else (norm.eps, norm.scale)
    kf.product_few[(triton.cdiv(n, few.outputs), triton.cdiv(rows, few.rows))](
        *(x.x if isinstance(x, Residual) else x, data, w.scales, w.supers, data if bias is None else bias),
        *(gain, squares, out.x if isinstance(out, Residual) else out, ld, eps, scale),
        *(rows, n, w.k, w.form, epilogue, bias is not None, act, isinstance(x, Residual)),
        *(segments_of(w.k), chunk_of(w.k), few.rows, few.outputs, triton.next_power_of_2(w.k // SQUARES)),
        *(few.warps, dependent),
        num_warps=few.warps,
        maxnreg=128,  # so that the next kernel's programs find place beside these
        launch_pdl=dependent,
        enable_fp_fusion=False,
    )


def _launch_many(
    x: torch.Tensor,
    w: Matrix,
    out: torch.Tensor,
    epilogue: Any,
    rows: int,
    best: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None,
    ld: int,
    act: int,
    cap: float | None,
    scale: float,
    logits: bool,
    split: bool,
) -> int:
    """Returns in how many sums an output is left."""
    n = w.n // 2 if epilogue == k.GATED else w.n
    wide, parts = many_of(w, rows, split=split and epilogue == k.SUMS) if epilogue != k.PICK else (HEAD_N, 1)
    m_tiles, n_tiles = triton.cdiv(rows, 2 * _GROUP_ROWS), triton.cdiv(w.n, wide)
    target: Any = out
    if epilogue in (k.STORE, k.GATED):
        target = boxes(out, rows, n, (_GROUP_ROWS, wide // 2 if epilogue == k.GATED else wide), ld)
    km.product_many[(min(m_tiles * n_tiles * parts, multiprocessors(w.data.device)),)](
        boxes(x, rows, w.k, (_GROUP_ROWS, _LOAD)),
        boxes(w.data, w.n, w.k, (wide // 2, _LOAD)),
        *(w.data if bias is None else bias, target, *best, rows, ld, m_tiles, n_tiles, cap or 0.0, scale),
        *(n, w.k, segments_of(w.k), parts, chunk_of(w.k), epilogue, bias is not None, act, cap is not None, logits),
        *(wide, _RING),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return parts


def many_of(w: Matrix, rows: int, *, split: bool) -> tuple[int, int]:
    """Outputs of a tile of `product_many`, and in how many parts K is cut: so that the processors have work."""
    processors = multiprocessors(w.data.device)

    cut = segments_of(w.k) if split and rows <= SPLIT_ROWS else 1

    def worth(how: tuple[int, int]) -> float:
        wide, parts = how
        tiles = triton.cdiv(rows, 2 * _GROUP_ROWS) * triton.cdiv(w.n, wide) * parts
        busy = tiles / (triton.cdiv(tiles, processors) * processors)
        return float(busy * (1.0 if wide == 128 else 0.85) * (1.0 if parts == 1 else 0.8))  # as measured, about

    return max(((wide, parts) for wide in (128, 64) for parts in {1, cut}), key=worth)


def takes_many(w: Matrix, rows: int, epilogue: Any, *, split: bool) -> bool:
    """Whether `product_many` takes a product; `product` must else, which is quicker where rows are fewer."""
    least = 256
    if split and epilogue == k.SUMS:
        least = FEW_ROWS + 1
    elif epilogue == k.PICK:
        least = 128
    whole = w.form == BF16 and w.k % 128 == 0 and w.n % 16 == 0
    return rows >= least and whole and runs_many(w.data.device)


def segments_of(inputs: int) -> int:
    """Segments that a product of so many inputs is cut into: of its shape only."""
    return next(size for size in (4, 2, 1) if inputs % (size * chunk_of(inputs)) == 0)


def chunk_of(inputs: int) -> int:
    """Inputs of one chain of instructions: of a product's shape only."""
    return next(size for size in (128, 64, 32) if inputs % size == 0 or size == 32)


def few_of(w: Matrix, rows: int, gated: bool) -> Few | None:
    """How `product_few` takes a weight; None where `product` must: many rows, more weights than shared memory holds."""
    if rows > LEAST_ROWS or w.k % 32 or not runs_few(w.data.device, w.form):
        return None
    chunk = chunk_of(w.k)
    chunks, outputs = w.k // chunk, w.n // 2 if gated else w.n
    least = min(triton.next_power_of_2(rows), LEAST_ROWS)
    limit = shared_of(w.data.device)
    for warps in (8, 16):
        warps = min(warps, triton.next_power_of_2(chunks))
        rounds = -(-chunks // warps)
        if rounds > _ROUNDS:
            continue
        for each in (32, 16, 8) if rows > 1 else (16, 8):  # every program reads all of x: fewer where x is more
            held = (each * (2 if gated else 1) + least) * rounds * warps * chunk * 2  # weights, and rows of x
            if (held <= limit // 2 and outputs >= each * _PROGRAMS) or (each == 8 and held <= limit):
                return Few(each, least, warps)
    return None


@cache
def shared_of(device: torch.device) -> int:
    """Bytes of shared memory that a program's operands may take; the rest is for what is exchanged."""
    if device.type != "cuda":
        return 200 << 10
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["max_shared_mem"]) - (27 << 10)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run side by side where each fills a processor."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@cache
def runs_many(device: torch.device) -> bool:
    """Whether the kernels of many rows run there: they are written for the instructions of one generation."""
    return device.type == "cuda" and bool(torch.cuda.get_device_capability(device)[0] == 9)


@cache
def runs_few(device: torch.device, form: int) -> bool:
    """Whether the kernels of few rows run there, with the bits of `product`.

    What is unpacked reaches older GPUs' instructions with its inputs in another order.
    """
    if device.type != "cuda":  # Triton's interpreter knows no Gluon
        return False
    return form == BF16 or torch.cuda.get_device_capability(device)[0] == 9


def load_of(inputs: int, rows: int) -> int:
    """Inputs of one load: a chunk, or half of it where a program has many rows.

    Not where K is short: Triton's interpreter adds up a load at once, and small models are tested bit for bit there.
    """
    chunk = chunk_of(inputs)
    return chunk // 2 if chunk == 128 and rows > 64 and inputs > 256 else chunk


def stages_of(form: int, rows: int, outputs: int = 64) -> int:
    """Loads in flight."""
    if form != k.BF16 or (outputs == HEAD_N and rows <= 64):
        return UNPACKING_STAGES
    return 6 if rows <= 32 else 4


def tile_of(rows: int, head: bool) -> tuple[int, int, int]:
    """Rows and outputs of one program, and its warps. They choose who sums what, never in which order."""
    if rows <= 64:
        few = max(LEAST_ROWS, triton.next_power_of_2(rows))
        return (few, HEAD_N, 8) if head else (few, 64, 4)
    if head:
        return 64, HEAD_N, 4
    return 64 if rows <= 512 else 128, 64, 4
