"""How a mixture of experts is launched, and the memory that it needs between its kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from shoal.runners.cuda import kernels as k
from shoal.runners.cuda import kernels_mixture as km
from shoal.runners.cuda.feed import DeviceMixture
from shoal.runners.cuda.products import UNPACKING_STAGES, chunk_of, load_of, product, segments_of
from shoal.runners.cuda.weights import Matrix

_CHUNK = 1024  # pairs that an expert looks at at once
_LEAST_PAIRS, _MOST_PAIRS = 16, 64  # of one tile


class MixtureBuffers:
    """Memory that the mixtures of all layers share, for at most `rows` rows; graphs hold its addresses."""

    def __init__(self, mixtures: Sequence[DeviceMixture], rows: int, device: torch.device) -> None:
        experts, used = (max(getattr(m, name) for m in mixtures) for name in ("experts", "used"))

        def numbers(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self.scores = torch.zeros(rows * max(m.router.n for m in mixtures), device=device)
        self.weights = torch.zeros(rows * used, device=device)
        self.shares = torch.zeros(rows, device=device)
        self.chosen = numbers(rows * used)
        self.lists = numbers(experts * rows)
        self.counts = numbers(experts)
        self.work = numbers(3 * (experts + rows * used // _LEAST_PAIRS))


def launch_mixture(
    m: DeviceMixture,
    b: MixtureBuffers,
    x: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    slots: torch.Tensor,
    spare: int,
    rows: int,
    options: dict[str, bool],
) -> int:
    """Leaves float32 [m.parts, rows, width] in `out`, to be added in order; returns m.parts.

    `x` are the rows, bf16 [rows, width], and memory for what is between the products. Rows whose slot is `spare` go
    nowhere.
    """
    normed, inner = x
    dependent = options["PDL"]
    product(normed, m.router, b.scores, k.SUMS, rows, split=False, dependent=dependent)
    none = b.weights
    km.route[(rows,)](
        *(b.scores, *(none if t is None else t for t in (m.router_bias, m.selection, m.expert_scales)), slots),
        *(b.chosen, b.weights, b.shares, spare, m.scale),
        *(m.experts, triton.next_power_of_2(m.experts), m.used, triton.next_power_of_2(m.used), m.router.n),
        *(m.scoring, m.router_bias is not None, m.selection is not None, m.expert_scales is not None, m.normalise),
        num_warps=1,
        **options,
    )
    tile = tile_pairs(rows * m.used, m.experts)
    items = min(rows * m.used, m.experts + rows * m.used // tile)
    km.list_pairs[(m.experts,)](b.chosen, b.lists, b.counts, rows, rows * m.used, _CHUNK, num_warps=4, **options)
    experts = triton.next_power_of_2(m.experts)
    km.deal_tiles[(m.experts + 1,)](b.counts, b.work, m.experts, experts, items, tile, num_warps=1, **options)
    for source, w, bias, target, epilogue in (
        (normed, m.gate_up, m.gate_up_bias, inner, k.GATED),
        (inner, m.down, m.down_bias, out, k.SUMS),
    ):
        _experts(m, b, source, w, bias, target, epilogue, rows, (tile, items), options)
    if m.shared is not None:
        width = m.shared.down.n
        place = out.view(-1)[m.used * rows * width :]
        shares = b.shares if m.gated else None
        product(normed, m.shared.gate_up, inner, k.GATED, rows, act=m.shared.activation, dependent=dependent)
        product(inner, m.shared.down, place, k.SUMS, rows, shares=shares, split=False, dependent=dependent)
    return m.parts


def _experts(
    m: DeviceMixture,
    b: MixtureBuffers,
    x: torch.Tensor,
    w: Matrix,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    epilogue: object,
    rows: int,
    work: tuple[int, int],
    options: dict[str, bool],
) -> None:
    """One product of all pairs, in `work` = (pairs of a tile, items)."""
    tile, items = work
    outputs = w.n // m.experts
    km.expert_product[(triton.cdiv(outputs, 64), items)](
        *(x, w.data, w.scales, w.supers, w.data if bias is None else bias, b.work, b.lists, b.weights, out, rows),
        *(outputs // 2 if epilogue == k.GATED else outputs, w.k, segments_of(w.k), chunk_of(w.k), m.used, w.form),
        *(epilogue, bias is not None, m.activation, tile, 64, load_of(w.k, tile)),
        num_warps=4,
        num_stages=4 if w.form == k.BF16 else UNPACKING_STAGES,
        **options,
    )


def tile_pairs(pairs: int, experts: int) -> int:
    """Pairs of one tile: what an expert has on average. It chooses who sums what, never in which order."""
    return max(_LEAST_PAIRS, min(_MOST_PAIRS, int(triton.next_power_of_2(-(-pairs // experts)))))
