"""Feed-forwards on the device, from their description."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.models.decoder import Dense, FeedForward, Linear, Mixture
from shoal.runners.cuda.supports import ACTIVATIONS, SCORINGS
from shoal.runners.cuda.weights import Matrix, paired, paired_experts, stacked, vector


@dataclass(frozen=True, slots=True, eq=False)
class DeviceDense:
    """`gate_up` [2 size, width], gates first; `down` [width, size]."""

    gate_up: Matrix
    down: Matrix
    activation: int
    parts = 1
    """Sums of a row that it leaves, where there are many rows."""

    @property
    def inner(self) -> int:
        """Values of a row between its products."""
        return self.down.k

    @property
    def matrices(self) -> list[Matrix]:
        """All of its weights."""
        return [self.gate_up, self.down]


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMixture:
    """Experts one below the other: `gate_up` [experts * 2 size, width], `down` [experts * width, size].

    `router` [experts, width], or with one row more: the gate of the `shared` feed-forward. Biases are float32, one an
    output; `selection` and `expert_scales` float32 [experts].
    """

    experts: int
    used: int
    scoring: int
    normalise: bool
    scale: float
    activation: int
    router: Matrix
    router_bias: torch.Tensor | None
    selection: torch.Tensor | None
    expert_scales: torch.Tensor | None
    gate_up: Matrix
    gate_up_bias: torch.Tensor | None
    down: Matrix
    down_bias: torch.Tensor | None
    shared: DeviceDense | None

    @property
    def size(self) -> int:
        """Values inside of one expert."""
        return self.down.k

    @property
    def gated(self) -> bool:
        """Whether the shared feed-forward has a gate."""
        return self.router.n > self.experts

    @property
    def inner(self) -> int:
        """Values of a row between its products: those of the experts, or of the shared one, which comes after them."""
        return max(self.used * self.size, 0 if self.shared is None else self.shared.inner)

    @property
    def parts(self) -> int:
        """Sums of a row that it leaves."""
        return self.used + (self.shared is not None)

    @property
    def matrices(self) -> list[Matrix]:
        """All of its weights."""
        return [self.router, self.gate_up, self.down, *([] if self.shared is None else self.shared.matrices)]


def upload_feed_forward(ff: FeedForward, device: torch.device) -> DeviceDense | DeviceMixture:
    """Bring a feed-forward that `refusal` has nothing against to the device."""
    return _mixture(ff, device) if isinstance(ff, Mixture) else _dense(ff, device)


def _dense(ff: Dense, device: torch.device) -> DeviceDense:
    assert ff.gate is not None
    down = stacked([ff.down.weight], device)[0]
    return DeviceDense(paired(ff.gate.weight, ff.up.weight, device), down, ACTIVATIONS[ff.activation])


def _mixture(ff: Mixture, device: torch.device) -> DeviceMixture:
    assert ff.gate is not None
    shared_gate = [] if ff.shared_gate is None else [ff.shared_gate.weight]
    return DeviceMixture(
        experts=ff.experts,
        used=ff.used,
        scoring=SCORINGS[ff.scoring],
        normalise=ff.normalise,
        scale=ff.scale,
        activation=ACTIVATIONS[ff.activation],
        router=stacked([ff.router.weight, *shared_gate], device, plain=True)[0],
        router_bias=None if ff.router.bias is None else vector(ff.router.bias, device),
        selection=None if ff.selection_bias is None else vector(ff.selection_bias, device),
        expert_scales=None if ff.expert_scales is None else vector(ff.expert_scales, device),
        gate_up=paired_experts([ff.gate.weight, ff.up.weight], device),
        gate_up_bias=_biases([ff.gate, ff.up], device),
        down=paired_experts([ff.down.weight], device),
        down_bias=_biases([ff.down], device),
        shared=None if ff.shared is None else _dense(ff.shared, device),
    )


def _biases(linears: list[Linear], device: torch.device) -> torch.Tensor | None:
    """Biases of experts side by side, [experts, outputs of all]; None where none has any."""
    found = [
        torch.zeros(linear.weight.shape[:2], device=device) if linear.bias is None else vector(linear.bias, device)
        for linear in linears
    ]
    return torch.cat(found, dim=1).contiguous() if any(linear.bias is not None for linear in linears) else None
