"""Gated delta nets on the device, and how they are launched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import triton

from shoal.models.decoder import DeltaNet
from shoal.runners.cuda import kernels_recurrent as kr
from shoal.runners.cuda.states import StateStore
from shoal.runners.cuda.weights import Matrix, stacked, vector

_HEADS_EACH = 4  # heads of one program, where heads do not wait for each other
_COLUMNS = 16  # of a state, that one program takes through a run: one warp, 64 bytes of each row


@dataclass(frozen=True, slots=True, eq=False)
class DeviceDelta:
    """One gated delta net. `products`' outputs lie side by side: q, k, v, z, alpha, beta (see `kernels_recurrent`).

    `taps` float32 [kernel, channels]; `decay`, `dt_bias` float32 and `key_of` int32 [value_heads]; `norm` float32
    [value_dim]. `inputs` and `matrices` are this layer's part of a `StateStore`, `entries` the elements from one entry
    of each to the next.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    products: list[tuple[Matrix, torch.Tensor | None]]
    out: Matrix
    taps: torch.Tensor
    decay: torch.Tensor
    dt_bias: torch.Tensor
    key_of: torch.Tensor
    norm: torch.Tensor
    norm_eps: float
    l2_eps: float
    inputs: torch.Tensor
    matrices: torch.Tensor
    entries: tuple[int, int]
    out_bias = None

    @property
    def channels(self) -> int:
        """Of q, k and v together."""
        return 2 * self.key_heads * self.key_dim + self.inner

    @property
    def inner(self) -> int:
        """What goes into `out`."""
        return self.value_heads * self.value_dim

    @property
    def width(self) -> int:
        """Outputs of all products together."""
        return self.channels + self.inner + 2 * self.value_heads


def upload_delta(d: DeltaNet, states: StateStore, number: int, device: torch.device) -> DeviceDelta:
    """Bring one to the device: the `number`th layer of the model that has a state."""
    parts = (d.q, d.k, d.v, d.z, d.alpha, d.beta)
    assert d.norm.weight is not None
    return DeviceDelta(
        d.key_heads,
        d.value_heads,
        d.key_dim,
        d.value_dim,
        [(matrix, None) for matrix in stacked([part.weight for part in parts], device)],
        stacked([d.out.weight], device)[0],
        torch.from_numpy(d.conv.values()).to(device).T.contiguous(),
        vector(d.decay, device),
        vector(d.dt_bias, device),
        torch.tensor(d.key_of, dtype=torch.int32, device=device),
        vector(d.norm.weight, device),
        d.norm.eps,
        d.l2_eps,
        states.inputs[:, number],
        states.matrices[:, number],
        (states.inputs.stride(0), states.matrices.stride(0)),
    )


class DeltaBuffers:
    """Memory that the delta nets of all layers share, for at most `rows` rows; graphs hold its addresses."""

    def __init__(self, nets: Sequence[DeviceDelta], rows: int, device: torch.device) -> None:
        heads = rows * max(net.value_heads for net in nets)
        self.mixed = torch.zeros(rows * max(net.channels for net in nets), dtype=torch.bfloat16, device=device)
        self.out = torch.zeros(rows * max(net.inner for net in nets), device=device)
        self.decays = torch.zeros(heads, device=device)
        self.betas = torch.zeros(heads, device=device)


def launch_delta(
    d: DeviceDelta,
    b: DeltaBuffers,
    columns: torch.Tensor,
    out: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
    rows: int,
    runs: int,
    options: dict[str, bool],
) -> None:
    """From the products' outputs `columns`, bf16 [rows, d.width], to what goes into `d.out`, bf16 [rows, d.inner].

    `inputs` are the step's: `runs`, `run_of`, `positions`.
    """
    sizes = (d.key_heads, d.value_heads, d.key_dim, d.value_dim)
    key, value = triton.next_power_of_2(d.key_dim), triton.next_power_of_2(d.value_dim)
    kr.convolve[(rows, triton.cdiv(2 * d.key_heads + d.value_heads, _HEADS_EACH))](
        *(columns, d.taps, d.inputs, d.decay, d.dt_bias, inputs["runs"], inputs["run_of"], inputs["positions"]),
        *(b.mixed, b.decays, b.betas, d.width, d.entries[0], d.l2_eps, d.key_dim**-0.5),
        *(*sizes, d.taps.shape[0], max(key, value), _HEADS_EACH),
        num_warps=4,
        **options,
    )
    kr.recur[(d.value_dim // _COLUMNS, d.value_heads, runs)](
        *(b.mixed, b.decays, b.betas, d.key_of, d.matrices, inputs["runs"], inputs["positions"], b.out, d.entries[1]),
        *(*sizes, key, _COLUMNS),
        num_warps=1,
        **options,
    )
    gates = columns.view(-1)[d.channels :]
    launch_gates(b.out, gates, d.width, out, (d.value_heads, d.value_dim), rows, options, norm=(d.norm, d.norm_eps))


def launch_gates(
    x: torch.Tensor,
    gates: torch.Tensor,
    ld: int,
    out: torch.Tensor,
    heads: tuple[int, int],
    rows: int,
    options: dict[str, bool],
    *,
    norm: tuple[torch.Tensor, float] | None = None,
) -> None:
    """See `kernels_recurrent.gate_heads`: gates bf16 [rows, ld], heads (how many, size), `norm` weight and epsilon."""
    count, size = heads
    weight, eps = (gates, 0.0) if norm is None else norm
    kr.gate_heads[(rows, triton.cdiv(count, _HEADS_EACH))](
        *(x, gates, weight, out, ld, eps),
        *(count, size, triton.next_power_of_2(size), _HEADS_EACH, norm is not None),
        num_warps=4,
        **options,
    )
