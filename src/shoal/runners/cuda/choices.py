"""Which tokens the logits of a step choose."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.runners.cuda import kernels_sampling as ks
from shoal.runners.plan import Draw, SeqId

_DRAWN_AT_ONCE = 2048  # logits that a program sums at once


def until_invalid(tokens: list[int]) -> tuple[int, ...]:
    """What follows a token that is none (-1) is none either."""
    if -1 in tokens:
        first = tokens.index(-1)
        tokens = tokens[:first] + [-1] * (len(tokens) - first)
    return tuple(tokens)


class DeviceRows:
    """Rows of logits on the device, float32 [rows, V], and whose they are."""

    def __init__(self, logits: torch.Tensor, places: Mapping[SeqId, int]) -> None:
        self._logits = logits
        self._places = places

    def draw(self, draws: Mapping[SeqId, Draw]) -> dict[SeqId, int | NDArray[np.float32]]:
        """See `HeldRows`."""
        device, logits = self._logits.device, self._logits
        rows = [self._places[seq_id] for seq_id in draws]
        how = torch.tensor(list(draws.values()), dtype=torch.float64, device=device)
        chosen = torch.empty(len(rows), dtype=torch.int32, device=device)
        place = torch.tensor(rows, dtype=torch.int32, device=device)
        ks.draw[(len(rows),)](
            logits, place, how, chosen, logits.shape[1], _DRAWN_AT_ONCE, num_warps=8, enable_fp_fusion=False
        )
        tokens = chosen.tolist()
        found: dict[SeqId, int | NDArray[np.float32]] = dict(zip(draws, tokens, strict=True))
        unsure = [i for i, token in enumerate(tokens) if token == int(ks.UNSURE.value)]
        if unsure:
            whole = logits[torch.tensor([rows[i] for i in unsure], device=device)].cpu().numpy()
            seq_ids = list(draws)
            found.update((seq_ids[i], row) for i, row in zip(unsure, whole, strict=True))
        return found


def draws_rightly(device: torch.device) -> bool:
    """Whether this device draws as `Draw` says: of 64 rows it is sure of most, and none of those is another token."""
    rng, rows, vocabulary = np.random.default_rng(1), 64, 2 * _DRAWN_AT_ONCE + 5
    logits = rng.normal(0, 3, (rows, vocabulary)).astype(np.float32)
    draws = {i: Draw((2.0, 1.0, 0.5)[i % 3], (0.0, 0.02)[i % 2], float(rng.random())) for i in range(rows)}
    drawn = DeviceRows(torch.from_numpy(logits).to(device), {i: i for i in range(rows)}).draw(draws)
    sure = 0
    for i, token in drawn.items():
        if not isinstance(token, int):
            continue
        weights = np.exp((logits[i] - logits[i].max()).astype(np.float64) * draws[i].scale)
        ends = np.where(weights >= draws[i].min_p, weights, 0.0).cumsum()
        if token != np.searchsorted(ends, ends[-1] * draws[i].number, side="right"):
            return False
        sure += 1
    return sure > rows // 2


def largest(
    logits: torch.Tensor, rows: list[int], counts: list[int], seq_ids: list[SeqId]
) -> dict[SeqId, tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """The largest logits of each row, of equals the lowest tokens, in rising order of tokens; none where not finite."""
    picked = logits[torch.tensor(rows, device=logits.device)]
    bits = picked.view(torch.int32).to(torch.int64)
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)  # rises with the float
    vocabulary = logits.shape[1]
    keys = ordered * (1 << 20) + (vocabulary - 1 - torch.arange(vocabulary, device=logits.device))
    _, tokens = torch.topk(keys, max(counts), dim=1)
    finite = torch.isfinite(picked).all(dim=1).tolist()
    values = torch.gather(picked, 1, tokens).cpu().numpy()
    ids = tokens.cpu().numpy()
    out = {}
    for i, (seq_id, count) in enumerate(zip(seq_ids, counts, strict=True)):
        best, shown = ids[i, :count], values[i, :count]
        order = np.argsort(best) if finite[i] else np.array([], np.int64)
        out[seq_id] = (best[order].astype(np.int64), shown[order])
    return out
