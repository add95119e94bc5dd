"""One step on the device: its buffers, the order of its kernels, and the graphs it is captured in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from shoal.runners.cuda import kernels as k
from shoal.runners.cuda.attention import launch_attention, leaves_shares
from shoal.runners.cuda.delta import DeltaBuffers, DeviceDelta, launch_delta, launch_gates
from shoal.runners.cuda.device import prefer_shared
from shoal.runners.cuda.feed import DeviceDense, DeviceMixture
from shoal.runners.cuda.mixtures import MixtureBuffers, launch_mixture
from shoal.runners.cuda.model import DecoderLayer, DeviceAttention, DeviceModel
from shoal.runners.cuda.products import (
    FEW_ROWS,
    HEAD_N,
    LEAST_ROWS,
    SQUARES,
    Residual,
    add_product,
    adds,
    few_of,
    product,
)
from shoal.runners.cuda.supports import SPLIT_ROWS
from shoal.runners.cuda.weights import Matrix

BLOCK = 32  # token slots of a KV block
SPLIT = 128  # tokens of an attention split
UPDATES = 256  # block-table entries that a step can change inside its graph
_GRAPHS = 96  # captured shapes kept


@dataclass(frozen=True, slots=True)
class Shape:
    """What a graph is captured for; every number is a bucket, filled up with rows that write to a spare block.

    `lone` rows come first, each alone in its sequence, over at most `splits` splits of context (a lone one of `span`
    tokens), `trunks` shared splits among them; then `fed` rows in `tiles` tiles, neighbours of one sequence each;
    `wanted` rows go on to the vocabulary. `logits`: all of them are kept. `feeds`: the chosen tokens are the next
    step's. `runs`: of a model with recurrent state, how many sequences there may be, see `kernels_recurrent`.
    """

    lone: int
    splits: int
    span: int
    trunks: int
    fed: int
    tiles: int
    wanted: int
    logits: bool
    feeds: bool
    runs: int = 0

    @property
    def rows(self) -> int:
        """All rows."""
        return self.lone + self.fed

    @property
    def tokens(self) -> int:
        """Positions that a lone row can see."""
        return self.span if self.splits == 1 else self.splits * SPLIT

    def sections(self) -> Iterator[tuple[str, int]]:
        """Names and lengths (int32) of the step's inputs, one after the other in one buffer."""
        yield from (("tokens", self.rows), ("positions", self.rows), ("slots", self.rows), ("wanted", self.wanted))
        yield from (("trunk_splits", self.lone), ("trunks", self.trunks * 4))
        yield from (("tiles", self.tiles * 2), ("updates", UPDATES * 2))
        yield from (("runs", self.runs * 4), ("run_of", self.rows if self.runs else 0))


class Inputs:
    """The int32 inputs of one shape: arrays on the host (pinned), and the same sections on the device."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        sections = list(shape.sections())
        size = sum(-(-length // 4) * 4 for _, length in sections)
        self.host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.device = torch.zeros(size, dtype=torch.int32, device=device)
        self.arrays: dict[str, NDArray[np.int32]] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        at = 0
        for name, length in sections:
            self.arrays[name] = self.host.numpy()[at : at + length]
            self.tensors[name] = self.device[at : at + max(length, 1)]
            at += -(-length // 4) * 4  # 16 bytes: what a vector load wants

        self._spare = [torch.zeros(UPDATES * 2, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(2)]

    def send(self) -> None:
        """Copy the host's arrays over."""
        self.device.copy_(self.host, non_blocking=True)

    def send_updates(self, write: Callable[[NDArray[np.int32]], None]) -> None:
        """Copy changed table entries alone; tokens and positions are on the device already.

        Two buffers take turns: the copy before may still be under way, the one before that is not.
        """
        self._spare.reverse()
        write(self._spare[0].numpy())
        self.tensors["updates"].copy_(self._spare[0], non_blocking=True)


class StepBuffers:
    """Memory that all steps share, for at most `rows` rows of which `wanted` want logits.

    Invariant: graphs hold its addresses, so nothing in it is ever replaced but `partials`, which says so.
    """

    def __init__(self, model: DeviceModel, rows: int, wanted: int) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=model.device)

        heads = max(a.inner for a in model.attentions)
        self.x = empty(rows, model.width, dtype=torch.float32)
        self.normed = empty(rows, model.width)
        self.squares = empty(LEAST_ROWS, -(-model.width // SQUARES), dtype=torch.float32)
        self.columns = empty(rows * max(layer.mixer.width for layer in model.layers))
        self.q = empty(rows, heads)
        self.attended = empty(rows * max(layer.mixer.inner for layer in model.layers))
        self.gates = empty(rows * max(0 if a.gate is None else a.inner for a in model.attentions))
        self.delta = DeltaBuffers(model.nets, rows, model.device) if model.nets else None
        feeds = [layer.feed_forward for layer in model.layers]
        self.inner = empty(rows * max(ff.inner for ff in feeds))
        self.parts = empty(
            max(rows * max(ff.parts for ff in feeds), 4 * min(rows, SPLIT_ROWS)), model.width, dtype=torch.float32
        )
        mixtures = [ff for ff in feeds if isinstance(ff, DeviceMixture)]
        self.mixture = MixtureBuffers(mixtures, rows, model.device) if mixtures else None
        self.final = empty(wanted, model.width)
        self.logits = empty(wanted, model.vocab_size, dtype=torch.float32)
        self.tiles = -(-model.vocab_size // HEAD_N)
        self.best = empty(wanted, self.tiles, dtype=torch.float32)
        self.best_at = empty(wanted, self.tiles, dtype=torch.int32)
        self.chosen = empty(wanted, dtype=torch.int32)
        self.arrived = empty(FEW_ROWS * max(a.kv_heads for a in model.attentions), dtype=torch.int32)
        self.partials: tuple[torch.Tensor, ...] = ()
        self._heads, self._dim, self._device = heads, min(a.dim for a in model.attentions), model.device

    def hold(self, lone: int, splits: int) -> bool:
        """Make room for the shares of that many splits of that many rows; True when addresses changed."""
        shares = lone * splits * (self._heads // self._dim)
        if self.partials and len(self.partials[0]) >= shares:
            return False
        self.partials = tuple(
            torch.zeros(shares * width, dtype=torch.float32, device=self._device)
            for width in (1, 1, self._heads * lone * splits // shares)
        )
        return True


class Step:
    """Launches the kernels of a step, directly or as a captured graph. Leaves plans and sequences to the runner."""

    def __init__(self, model: DeviceModel, tables: torch.Tensor, rows: int, wanted: int) -> None:
        """`tables` int32 [slots, T]: the block tables, one row a sequence."""
        self.model = model
        self.tables = tables
        self.buffers = StepBuffers(model, rows, wanted)
        self._inputs: dict[Shape, Inputs] = {}
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        self.captured = 0  # graphs so far, each after its kernels were compiled
        cuda = model.device.type == "cuda"
        self._dependent = cuda and torch.cuda.get_device_capability(model.device) >= (9, 0)

    def inputs(self, shape: Shape) -> Inputs:
        """Where to put the numbers of a step of this shape."""
        found = self._inputs.pop(shape, None)
        if found is None:
            found = Inputs(shape, self.model.device)
        self._inputs[shape] = found  # last used, last
        return found

    def run(self, shape: Shape) -> None:
        """Run a step over `inputs(shape)`, which are on the device; `buffers.chosen` and `.logits` are its outcome."""
        m = self.model
        if leaves_shares(m, shape) and self.buffers.hold(shape.lone, shape.splits):
            self._graphs = {old: graph for old, graph in self._graphs.items() if not leaves_shares(m, old)}
        if self.model.device.type != "cuda":
            self._launch(shape)
            return
        graph = self._graphs.get(shape)
        if graph is None:
            graph = self._capture(shape)
        graph.replay()

    def _capture(self, shape: Shape) -> torch.cuda.CUDAGraph:
        inputs = self._inputs[shape]
        kept = inputs.device.clone()
        loaded = triton.knobs.runtime.kernel_load_end_hook
        loaded.add(_share)
        try:
            self._launch(shape)  # compiles what is new; the same inputs written twice give the same KV
        finally:  # also where memory is out: the engine goes on
            loaded.remove(_share)
        inputs.device.copy_(kept)
        torch.cuda.synchronize(self.model.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # nothing is allocated in it
            self._launch(shape)
        while len(self._graphs) >= _GRAPHS:
            oldest = next(iter(self._graphs))
            del self._graphs[oldest], self._inputs[oldest]
        self._graphs[shape] = graph
        self.captured += 1
        return graph

    # -- the kernels, in order ----------------------------------------------------------------------------------

    def _launch(self, shape: Shape) -> None:
        m, b, t = self.model, self.buffers, self._inputs[shape].tensors
        k.update_tables[(1,)](self.tables, t["updates"], UPDATES, num_warps=4, **self._options(shape))
        width = triton.next_power_of_2(m.width)
        k.embed[(shape.rows,)](
            t["tokens"], m.embedding, b.x, m.embedding_scale, m.width, width, num_warps=4, **self._options(shape)
        )
        segments = None
        for layer in m.layers:
            x = self._norm(shape, layer, segments, first=True)
            self._mix(shape, layer.mixer, x)
            segments = self._add(shape, b.attended, layer.mixer.out, layer.mixer_post_norm, layer.mixer.out_bias)
            x = self._norm(shape, layer, segments, first=False)
            segments = self._feed_forward(shape, layer, x)
        self._norm(shape, None, segments, first=True)
        self._head(shape)

    def _feed_forward(self, shape: Shape, layer: DecoderLayer, x: torch.Tensor | Residual) -> int:
        """Leaves its output as `_add` does."""
        b, ff = self.buffers, layer.feed_forward
        if isinstance(ff, DeviceMixture):
            assert b.mixture is not None
            slots, spare = self._inputs[shape].tensors["slots"], len(self.tables) - 1
            assert isinstance(x, torch.Tensor)
            return launch_mixture(ff, b.mixture, (x, b.inner), b.parts, slots, spare, shape.rows, self._options(shape))
        self._product(shape, x, ff.gate_up, b.inner, k.GATED, act=ff.activation)
        return self._add(shape, b.inner, ff.down, layer.ff_post_norm, None)

    def _add(
        self, shape: Shape, x: torch.Tensor, w: Matrix, post: torch.Tensor | None, bias: torch.Tensor | None
    ) -> int:
        """The last product of a mixer or a feed-forward: added to the residual (returns 0); else left in `parts`, in so
        many sums, for `_norm` to norm with `post` and add.
        """
        m, b = self.model, self.buffers
        if post is None and adds(w, shape.rows):
            to = Residual(b.x, b.squares, m.norm, m.eps, m.residual_scale)
            add_product(x, w, to, shape.rows, bias, self._options(shape)["PDL"])
            return 0
        return self._product(shape, x, w, b.parts, k.SUMS)

    def _options(self, shape: Shape) -> dict[str, bool]:
        """How kernels are launched: with few rows each starts while the one before ends; more would take its place."""
        few = self._dependent and shape.rows <= FEW_ROWS
        return {"PDL": few, "launch_pdl": few, "enable_fp_fusion": False}

    def _norm(
        self, shape: Shape, layer: DecoderLayer | None, segments: int | None, *, first: bool
    ) -> torch.Tensor | Residual:
        """What products of a mixer (`first`) or a feed-forward read: x with what the last product left, normed.

        `segments` as `_add` gave it, None before the first layer. Where products of few rows follow upon one that has
        added its own, they norm what they read.
        """
        m, b = self.model, self.buffers
        weight = m.norm if layer is None else layer.mixer_norm if first else layer.ff_norm
        if segments == 0 and (layer is None or _reads_residual(layer, shape.rows, first=first)):
            return Residual(b.x, b.squares, weight, m.eps)
        post = bias = None
        if layer is not None and not first:
            post, bias = layer.mixer_post_norm, layer.mixer.out_bias
        elif segments:
            before = m.layers[-1] if layer is None else m.layers[m.layers.index(layer) - 1]
            post = before.ff_post_norm
        k.norm[(shape.rows,)](
            *(b.x, b.parts, weight if bias is None else bias, weight if post is None else post, weight, b.x, b.normed),
            *(shape.rows * m.width, m.eps, m.residual_scale, m.width, triton.next_power_of_2(m.width)),
            *(segments or 0, bias is not None, post is not None, False, layer is not None),
            num_warps=_warps(m.width),
            **self._options(shape),
        )
        return b.normed

    def _mix(self, shape: Shape, mixer: DeviceAttention | DeviceDelta, x: torch.Tensor | Residual) -> None:
        """Leaves what goes into the mixer's last product in `attended`."""
        b, column = self.buffers, 0
        for matrix, bias in mixer.products:
            self._product(shape, x, matrix, b.columns[column:], k.STORE, bias=bias, ld=mixer.width)
            column += matrix.n
        if isinstance(mixer, DeviceAttention):
            self._attention(shape, mixer)
            return
        assert b.delta is not None
        inputs, options = self._inputs[shape].tensors, self._options(shape)
        launch_delta(mixer, b.delta, b.columns, b.attended, inputs, shape.rows, shape.runs, options)

    def _attention(self, shape: Shape, a: DeviceAttention) -> None:
        b, options = self.buffers, self._options(shape)
        launch_attention(self.model, b, a, shape, self._inputs[shape].tensors, self.tables, options)
        if a.gate is not None:
            self._product(shape, b.normed, a.gate, b.gates, k.STORE)
            launch_gates(b.attended, b.gates, a.inner, b.attended, (a.heads, a.dim), shape.rows, options)

    def _head(self, shape: Shape) -> None:
        m, b, t = self.model, self.buffers, self._inputs[shape].tensors
        if not shape.wanted:
            return
        k.norm[(shape.wanted,)](
            *(b.x, b.parts, m.norm, m.norm, m.norm, t["wanted"], b.final),
            *(0, m.eps, 1.0, m.width, triton.next_power_of_2(m.width), 0, False, False, True, True),
            num_warps=_warps(m.width),
            **self._options(shape),
        )
        product(
            *(b.final, m.head, b.logits, k.PICK, shape.wanted),
            best=(b.best, b.best_at),
            cap=m.soft_cap,
            logit_scale=m.logit_scale,
            logits=shape.logits,
            dependent=self._options(shape)["PDL"],
        )
        k.pick[(shape.wanted,)](
            *(b.best, b.best_at, t["tokens"], t["positions"], t["slots"], b.chosen, len(self.tables) - 1),
            *(b.tiles, triton.next_power_of_2(b.tiles), shape.feeds),
            num_warps=4,
            **self._options(shape),
        )

    def _product(
        self, shape: Shape, x: torch.Tensor | Residual, w: Matrix, out: torch.Tensor, epilogue: Any, **how: Any
    ) -> int:
        """`product` over all rows of the step."""
        return product(x, w, out, epilogue, shape.rows, dependent=self._options(shape)["PDL"], **how)


def _share(_module: object, function: int, *_: object) -> None:
    """What Triton calls when it has loaded a kernel."""
    prefer_shared(function)


def _reads_residual(layer: DecoderLayer, rows: int, *, first: bool) -> bool:
    """Whether all products of a layer's mixer (`first`) or feed-forward can norm what they read."""
    if not first:
        ff = layer.feed_forward
        return isinstance(ff, DeviceDense) and few_of(ff.gate_up, rows, gated=True) is not None
    mixer = layer.mixer
    if not isinstance(mixer, DeviceAttention) or mixer.gate is not None:
        return False
    return all(few_of(matrix, rows, gated=False) is not None for matrix, _ in mixer.products)


def tile_tokens(group: int) -> int:
    """Tokens of a prompt's attention tile: with `group` heads each they are 128 queries, or nearly."""
    return 2 * readers_at_once(group)


def readers_at_once(group: int) -> int:
    """Readers of a trunk's split in one program: with `group` heads each they are 64 queries."""
    return 64 // group


def _warps(width: int) -> int:
    return min(max((1 << (width - 1).bit_length()) // 128, 1), 8)
