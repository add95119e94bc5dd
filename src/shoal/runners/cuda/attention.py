"""How attention is launched: which of its kernels, and with how many programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import triton

from shoal.runners.cuda import kernels_attention as ka
from shoal.runners.cuda import kernels_attention_few as kaf
from shoal.runners.cuda import kernels_attention_many as kam
from shoal.runners.cuda.copies import boxes
from shoal.runners.cuda.model import DeviceAttention, DeviceModel
from shoal.runners.cuda.products import FEW_ROWS, multiprocessors, runs_few, runs_many, shared_of
from shoal.runners.cuda.weights import BF16

if TYPE_CHECKING:
    from shoal.runners.cuda.step import Shape, StepBuffers

_WALKERS = 256  # programs that are enough to read all splits of a row and KV head in one, and merge them there
_RING = 4  # keys or values of a split in flight in a program of many rows
_WALK_RING = 3  # the same where one row walks: two programs share a processor
_HEADS_EACH = 4  # heads that one program norms and rotates


def launch_attention(
    model: DeviceModel,
    b: StepBuffers,
    a: DeviceAttention,
    shape: Shape,
    inputs: Mapping[str, torch.Tensor],
    tables: torch.Tensor,
    options: Mapping[str, bool],
) -> None:
    """From `columns`, what the products left, to `attended`; new keys and values go to their KV blocks."""
    if _takes_few(model, a, shape):
        _attend_few(model, b, a, shape, inputs, tables, options)
        return
    fresh = shape.rows == shape.lone <= FEW_ROWS and shape.splits == 1  # a kernel less where rows are few
    if not fresh:
        ka.rotate_and_keep[(shape.rows, triton.cdiv(a.heads + 2 * a.kv_heads, _HEADS_EACH))](
            *(b.columns, a.q_norm, a.k_norm, a.cosines, a.sines, inputs["positions"], inputs["slots"], tables),
            *(*a.kv, b.q, model.eps, tables.shape[1]),
            *(a.heads, a.kv_heads, a.dim, 2 * a.cosines.shape[1], a.normed, model.eight, _HEADS_EACH),
            num_warps=1,
            **options,
        )
    if shape.lone:
        _attend_lone(model, b, a, shape, inputs, tables, options, fresh=fresh)
    if shape.tiles:
        _attend_tiles(model, b, a, shape, inputs, tables, options)


def _attend_tiles(
    model: DeviceModel,
    b: StepBuffers,
    a: DeviceAttention,
    shape: Shape,
    inputs: Mapping[str, torch.Tensor],
    tables: torch.Tensor,
    options: Mapping[str, bool],
) -> None:
    """Attention of neighbours in one sequence."""
    rows, limits = (inputs["positions"], inputs["slots"], inputs["tiles"]), _limits(a, tables)
    if _copies(model, a):
        programs = min(multiprocessors(model.device), shape.tiles * a.kv_heads)
        kam.attend_many[(programs,)](
            *(b.q, *_boxes(a), tables, *rows, a.sinks, b.attended, *limits, shape.tiles),
            *(a.heads, a.kv_heads, a.dim, a.heads // a.kv_heads, *_kinds(a), _RING),
            num_warps=4,
            enable_fp_fusion=False,
        )
        return
    ka.attend_tiles[(shape.tiles, a.kv_heads, 2)](
        *(b.q, *a.kv, tables, *rows, a.sinks, b.attended, *limits, *_sizes(model, a), *_kinds(a)),
        num_warps=4,
        num_stages=1,
        **options,
    )


def _copies(model: DeviceModel, a: DeviceAttention) -> bool:
    """Whether the copy engine can bring KV to the kernels that are written for it."""
    return runs_many(model.device) and not model.eight and a.dim <= 128


def _boxes(a: DeviceAttention) -> tuple[Any, Any]:
    """Keys and values for the copy engine."""
    slots, box = a.kv[0].numel() // a.dim, (int(ka.BLOCK.value), int(kam.PANEL.value))
    return boxes(a.kv[0], slots, a.dim, box), boxes(a.kv[1], slots, a.dim, box)


def _takes_few(model: DeviceModel, a: DeviceAttention, shape: Shape) -> bool:
    """Whether one kernel does it all: few rows, each alone in its sequence, no trunk, KV in bf16."""
    few = shape.rows == shape.lone <= FEW_ROWS and not _trunks(a, shape) and not _walks(a, shape)
    few = few and shape.span * a.dim * 4 <= shared_of(model.device)  # keys and values
    return few and not model.eight and a.heads <= 14 * a.kv_heads and runs_few(model.device, BF16)


def _attend_few(
    model: DeviceModel,
    b: StepBuffers,
    a: DeviceAttention,
    shape: Shape,
    inputs: Mapping[str, torch.Tensor],
    tables: torch.Tensor,
    options: Mapping[str, bool],
) -> None:
    """`kernels_attention_few.attend_few`."""
    group = a.heads // a.kv_heads
    kaf.attend_few[(a.kv_heads, shape.splits, shape.lone)](
        *(b.columns, *a.kv[:2], tables, inputs["positions"], inputs["slots"], a.sinks, b.attended),
        *(*_partials(b, shape), b.arrived, a.q_norm, a.k_norm, a.cosines, a.sines, *_limits(a, tables), model.eps),
        *(shape.splits, shape.span, a.heads, a.kv_heads, a.dim, group, *_kinds(a)),
        *(triton.next_power_of_2(group), triton.next_power_of_2(group + 2), 2 * a.cosines.shape[1], a.normed),
        num_warps=4,
        **options,
    )


def _trunks(a: DeviceAttention, shape: Shape) -> int:
    return shape.trunks if a.window is None else 0  # a window reads little: each row its own


def _walks(a: DeviceAttention, shape: Shape) -> bool:
    """Whether one program reads all splits of a row and KV head."""
    return shape.splits > 1 and not _trunks(a, shape) and shape.lone * a.kv_heads >= _WALKERS


def leaves_shares(model: DeviceModel, shape: Shape) -> bool:
    """Whether splits of rows leave shares in `StepBuffers.partials`: where no program walks all of them."""
    return shape.splits > 1 and not all(_walks(a, shape) for a in model.attentions)


def _partials(b: StepBuffers, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Where splits leave their shares; anything where there is one."""
    return b.partials if shape.splits > 1 else (b.parts, b.parts, b.parts)


def _limits(a: DeviceAttention, tables: torch.Tensor) -> tuple[int, float, float, int]:
    return tables.shape[1], a.scale, a.soft_cap or 0.0, a.window or 0


def _sizes(model: DeviceModel, a: DeviceAttention) -> tuple[int, int, int, int, bool]:
    return a.heads, a.kv_heads, a.dim, a.heads // a.kv_heads, model.eight


def _kinds(a: DeviceAttention) -> tuple[bool, bool, bool]:
    return a.soft_cap is not None, a.window is not None, a.has_sinks


def _attend_lone(
    model: DeviceModel,
    b: StepBuffers,
    a: DeviceAttention,
    shape: Shape,
    inputs: Mapping[str, torch.Tensor],
    tables: torch.Tensor,
    options: Mapping[str, bool],
    *,
    fresh: bool,
) -> None:
    """Attention of the rows that are alone in their sequence: each walked by one program, or by splits and trunks.

    With `fresh` queries and keys are turned here, and keys and values kept.
    """
    limits, sizes, kinds = _limits(a, tables), _sizes(model, a), _kinds(a)
    positions, slots = inputs["positions"], inputs["slots"]
    walk = _walks(a, shape)
    if (walk or shape.tokens == int(ka.SPLIT.value)) and not fresh and _copies(model, a):
        programs = min(2 * multiprocessors(model.device), shape.lone * a.kv_heads)
        kam.attend_walk[(programs,)](
            *(b.q, *_boxes(a), tables, positions, slots, a.sinks, b.attended, *limits, shape.lone),
            *(a.heads, a.kv_heads, a.dim, sizes[3], *kinds, _WALK_RING),
            num_warps=4,
            maxnreg=128,  # two programs share a processor
            enable_fp_fusion=False,
        )
    elif walk or shape.splits == 1:
        ka.attend_rows[(a.kv_heads, shape.lone)](
            *(b.columns if fresh else b.q, *a.kv, tables, positions, slots, a.sinks, b.attended),
            *(a.q_norm, a.k_norm, a.cosines, a.sines, *limits, model.eps, shape.span, *sizes, *kinds),
            *(walk, fresh, triton.next_power_of_2(sizes[3]), 2 * a.cosines.shape[1], a.normed),
            num_warps=4,
            num_stages=1,  # three programs share a processor: more in flight than one that loads ahead
            **options,
        )
    else:
        trunks = _trunks(a, shape)
        skipped = inputs["trunk_splits"] if trunks else model.zeros
        ka.attend_splits[(trunks + shape.splits * shape.lone, a.kv_heads)](
            *(b.q, *a.kv, tables, positions, slots, skipped, inputs["trunks"], *b.partials, *limits),
            *(trunks, shape.splits, *sizes, *kinds[:2]),
            num_warps=4,
            num_stages=1,
            **options,
        )
        ka.merge_rows[(a.heads, shape.lone)](
            *(positions, a.sinks, b.attended, *b.partials, limits[3], shape.splits, a.heads, a.dim, *kinds[1:]),
            num_warps=1,
            **options,
        )
