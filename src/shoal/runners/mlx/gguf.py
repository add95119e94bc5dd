"""A GGUF file as one of `mlx-lm`'s models: its tensors as MLX loads them, under the names the model has for them."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from shoal.errors import ModelFormatError, UnsupportedModelError
from shoal.models.gguf import GgufModel

ARCHITECTURES = ("llama", "qwen2", "qwen3")
TYPES = ("F32", "F16", "Q4_0", "Q4_1", "Q8_0")
"""Tensor types that MLX holds as they are: floats, and integers with a scale and an offset per 32."""

_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_FREQUENCIES = "rope_freqs.weight"
_GROUP = 32


class FactoredRope(nn.Module):  # type: ignore[misc]
    """Rotary positions whose frequencies the file divides one by one (Llama 3 does so for its long context)."""

    def __init__(self, dims: int, base: float, factors: np.ndarray[Any, Any], *, traditional: bool) -> None:
        super().__init__()
        self.dims = dims
        self.traditional = traditional
        self._periods = mx.array(base ** (np.arange(0, dims, 2) / dims) * factors, dtype=mx.float32)

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotate x, [B, H, T, D], from position `offset` on; one offset, or one a row."""
        return mx.fast.rope(
            x, self.dims, traditional=self.traditional, base=None, scale=1.0, offset=offset, freqs=self._periods
        )


def refusal(model: GgufModel) -> str | None:
    """Why MLX cannot run this file, or None. Looks at no weight."""
    if model.architecture not in ARCHITECTURES:
        return f"architecture {model.architecture!r}: of GGUF files the MLX runner knows {', '.join(ARCHITECTURES)}"
    for tensor in model.tensors.values():
        if tensor.type not in TYPES:
            return f"tensor {tensor.name} has type {tensor.type}; MLX holds {', '.join(TYPES)}"
    if model.rope_scaling is not None and model.rope_scaling.type != "linear":
        return f"rotary scaling {model.rope_scaling.type!r}"
    if model.rope_dim != model.head_dim:
        return f"{model.rope_dim} of {model.head_dim} elements of a head are rotated"
    if model.architecture == "qwen2" and model.head_dim * model.n_heads != model.n_embd:
        return f"heads of {model.head_dim} in a qwen2 of {model.n_heads} heads over {model.n_embd}"
    if f"{model.architecture}.expert_count" in model.metadata:
        return "a mixture of experts"
    window = model.metadata.get(f"{model.architecture}.attention.sliding_window")
    if isinstance(window, int) and 0 < window < model.context_length:
        return "sliding-window attention"
    return None


def load_gguf(model: GgufModel, dtype: mx.Dtype) -> nn.Module:
    """Build the model and load its weights; floats, scales and offsets become `dtype`.

    `UnsupportedModelError` for what MLX or its model lacks, `ModelFormatError` for tensors missing or misshapen.
    """
    reason = refusal(model)
    if reason is not None:
        raise UnsupportedModelError(
            f"{model.path}: {reason}", value=reason, limit=TYPES, hint="use runner='native' or 'openvino'"
        )
    module = importlib.import_module(f"mlx_lm.models.{model.architecture}")
    made: nn.Module = module.Model(module.ModelArgs.from_dict(_config(model)))
    try:
        weights = _renamed(mx.load(str(model.path), format="gguf"))
    except (RuntimeError, ValueError) as error:
        raise ModelFormatError(f"{model.path}: MLX cannot load it ({error})", hint="fetch the model again") from error

    def quantised(path: str, layer: nn.Module) -> bool | dict[str, int]:
        if f"{path}.scales" not in weights or not hasattr(layer, "to_quantized"):
            return False
        columns = layer.weight.shape[-1]
        return {"group_size": _GROUP, "bits": 32 * weights[f"{path}.weight"].shape[-1] // columns}

    nn.quantize(made, group_size=_GROUP, class_predicate=quantised)
    try:
        made.load_weights(list(weights.items()), strict=True)
    except ValueError as error:
        raise ModelFormatError(
            f"{model.path}: its tensors are not those of a {model.architecture} ({error})", hint="fetch it again"
        ) from error
    made.set_dtype(dtype)
    _factor_frequencies(made, model)
    made.eval()
    mx.eval(made.parameters())
    return made


def _config(model: GgufModel) -> dict[str, Any]:
    scaling = model.rope_scaling
    return {
        "model_type": model.architecture,
        "hidden_size": model.n_embd,
        "num_hidden_layers": model.n_layers,
        "intermediate_size": model.n_ff,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.n_kv_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.rms_eps,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.context_length,
        "rope_theta": model.rope_theta,
        "rope_traditional": model.architecture == "llama",  # its Q and K are stored for pairs (2i, 2i + 1)
        "rope_scaling": None if scaling is None else {"type": "linear", "factor": scaling.factor},
        "tie_word_embeddings": model.tied_embeddings,
    }


def _renamed(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Weights under the model's names; one it has no name for keeps its own, and is refused when loaded."""
    found = {}
    for name, array in weights.items():
        if name == _FREQUENCIES:
            continue
        part, _, kind = name.rpartition(".")
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", part)
        if layer is not None and layer[2] in _PARTS:
            found[f"model.layers.{layer[1]}.{_PARTS[layer[2]]}.{kind}"] = array
        else:
            found[f"{_TOP.get(part, part)}.{kind}"] = array
    return found


def _factor_frequencies(made: Any, model: GgufModel) -> None:
    tensor = model.tensors.get(_FREQUENCIES)
    if tensor is None:
        return
    factors = tensor.dequantize().reshape(-1)
    if len(factors) != model.head_dim // 2 or not np.isfinite(factors).all() or (factors == 0).any():
        raise ModelFormatError(
            f"{model.path}: {_FREQUENCIES} is damaged", value=len(factors), limit=model.head_dim // 2
        )
    if model.rope_scaling is not None:
        factors = factors * model.rope_scaling.factor
    for layer in made.layers:
        layer.self_attn.rope = FactoredRope(
            model.head_dim, model.rope_theta, factors, traditional=model.architecture == "llama"
        )
