"""What physics allows: bytes over bandwidth and operations over the peak of matrix products, for one workload."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.bench.workloads import Job, Workload
from shoal.models import families
from shoal.models.decoder import Attention, Decoder, Mixture
from shoal.models.gguf import read_gguf


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a pass reads and multiplies: `weights` for each token; of these, `head` only where logits are wanted.

    Of a mixture, what one token needs: several that need the same experts are the best case.
    """

    weights: int
    head: int
    weight_bytes: int
    kv_bytes_per_token: int

    @classmethod
    def of(cls, path: Path) -> ModelFacts:
        """Facts of a GGUF. KV is reckoned in 16 bits. Raises `ModelFormatError`s."""
        file = read_gguf(path)
        model = families.describe(file)
        matrices = {name: tensor for name, tensor in file.tensors.items() if len(tensor.shape) == 2}
        experts = [tensor for tensor in file.tensors.values() if len(tensor.shape) == 3]
        mixtures = [layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, Mixture)]
        used = mixtures[0].used / mixtures[0].experts if mixtures else 0
        head = model.vocab_size * model.width
        embedding = matrices["token_embd.weight"]
        body = sum(tensor.shape[0] * tensor.shape[1] for tensor in matrices.values()) - head
        body -= 0 if model.tied else head
        size = sum(tensor.data.nbytes for tensor in matrices.values())
        size -= 0 if model.tied else embedding.data.nbytes  # looked up, a row a token
        body += int(used * sum(math.prod(tensor.shape) for tensor in experts))
        size += int(used * sum(tensor.data.nbytes for tensor in experts))
        return cls(body + head, head, size, _kv_bytes(model))


def _kv_bytes(model: Decoder) -> int:
    own = [layer.mixer for layer in model.layers if isinstance(layer.mixer, Attention) and layer.mixer.k is not None]
    return sum(mixer.kv_heads * (mixer.key_dim + mixer.value_dim) * 2 for mixer in own)


def ceiling(workload: Workload, jobs: Sequence[Job], model: ModelFacts, machine: Mapping[str, Any]) -> dict[str, float]:
    """The best this machine could do: `decode_tokens_per_s`, `prefill_tokens_per_s`, `wall_s` (if all come at once).

    A decode step reads all weights and the KV of its contexts once, a shared trunk once for all, and multiplies every
    weight for every row; whichever takes longer bounds it. A prompt token multiplies all but the head; a shared trunk
    is computed once. Attention's own operations, norms and all outside the model are left out: no system gets here.
    """
    bandwidth, peak = machine["read_bytes_per_s"], machine["int8_ops_per_s"]
    rows = min(workload.batch, workload.requests)
    own = statistics.fmean(len(job.prompt) - workload.trunk + job.max_tokens / 2 for job in jobs if job.counted)
    context = workload.trunk + rows * own
    step_s = max((model.weight_bytes + context * model.kv_bytes_per_token) / bandwidth, 2 * rows * model.weights / peak)
    prompt_s = 2 * (model.weights - model.head) / peak
    computed = sum(len(job.prompt) for job in jobs) - (len(jobs) - 1) * workload.trunk
    found = {"decode_tokens_per_s": rows / step_s}
    if not workload.trunk:
        found["prefill_tokens_per_s"] = 1 / prompt_s
    if not (workload.rate or workload.dependent or workload.schema):
        steps = max(sum(job.max_tokens - 1 for job in jobs if job.counted) / rows, 0)
        found["wall_s"] = computed * prompt_s + steps * step_s
    return found
