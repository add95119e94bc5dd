"""Which tokens the logits of a step choose."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.runners.plan import SeqId


def until_invalid(tokens: list[int]) -> tuple[int, ...]:
    """What follows a token that is none (-1) is none either."""
    if -1 in tokens:
        first = tokens.index(-1)
        tokens = tokens[:first] + [-1] * (len(tokens) - first)
    return tuple(tokens)


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
