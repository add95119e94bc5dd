"""A GGUF file as one of `mlx-lm`'s models: the description's weights under the names that the model has for them.

Four- and eight-bit types keep their codes, steps and offsets; floats stay floats; what MLX has no form for is rounded
to eight bits with a step and an offset for each 32.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from shoal.errors import UnsupportedModelError
from shoal.models import families
from shoal.models.decoder import Decoder, Linear, Weight
from shoal.models.gguf import GgufModel
from shoal.runners.affine import GROUP, affine
from shoal.runners.plain import Plain, PlainLayer, plain

_FLOATS = ("F32", "F16", "BF16")


class GivenRope(nn.Module):  # type: ignore[misc]
    """Rotary positions with a frequency for each pair (i, i + D/2), whatever made them."""

    def __init__(self, frequencies: tuple[float, ...]) -> None:
        super().__init__()
        self.dims = 2 * len(frequencies)
        self._periods = mx.array(1 / np.array(frequencies), dtype=mx.float32)

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotate x, [B, H, T, D], from position `offset` on; one offset, or one a row."""
        return mx.fast.rope(x, self.dims, traditional=False, base=None, scale=1.0, offset=offset, freqs=self._periods)


def refusal(model: GgufModel) -> str | None:
    """Why MLX cannot run this file, or None. Looks at no weight. Raises what `families.describe` raises."""
    decoder = families.describe(model)
    found = plain(decoder)
    if isinstance(found, str):
        return f"{found}: of GGUF files the MLX runner takes plain decoders"
    if min(found.frequencies) <= 0:
        return "pairs of a head that are not rotated"
    if found.qkv_bias and found.qk_norm:
        return "biases and norms of queries and keys together"
    if found.qkv_bias and found.head_dim * found.heads != decoder.width:
        return f"{found.heads} heads of {found.head_dim} with biases over {decoder.width}"
    for _, weight in decoder.weights():
        if weight.shape[-1] % GROUP and weight.type not in _FLOATS:
            return f"tensor {weight.name} has rows of {weight.shape[-1]}"
    return None


def load_gguf(model: GgufModel, dtype: mx.Dtype) -> nn.Module:
    """Build the model and load its weights; floats, scales and offsets become `dtype`.

    `UnsupportedModelError` for what MLX or its model lacks, `ModelFormatError` for tensors missing or misshapen.
    """
    reason = refusal(model)
    if reason is not None:
        raise UnsupportedModelError(
            f"{model.path}: {reason}", value=reason, hint="use runner='native', or the model's directory from the hub"
        )
    decoder = families.describe(model)
    about = plain(decoder)
    assert isinstance(about, Plain)
    kind = "qwen3" if about.qk_norm else "qwen2" if about.qkv_bias else "llama"
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    made: nn.Module = module.Model(module.ModelArgs.from_dict(_config(decoder, about, kind)))
    weights = dict(_weights(decoder, about))

    def quantised(path: str, layer: nn.Module) -> bool | dict[str, int]:
        if f"{path}.scales" not in weights or not hasattr(layer, "to_quantized"):
            return False
        columns = layer.weight.shape[-1]
        return {"group_size": GROUP, "bits": 32 * weights[f"{path}.weight"].shape[-1] // columns}

    nn.quantize(made, group_size=GROUP, class_predicate=quantised)
    made.load_weights(list(weights.items()), strict=True)
    made.set_dtype(dtype)
    for layer in made.layers:
        layer.self_attn.rope = GivenRope(about.frequencies)
    made.eval()
    mx.eval(made.parameters())
    return made


def _config(model: Decoder, about: Plain, kind: str) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": model.width,
        "num_hidden_layers": len(model.layers),
        "intermediate_size": about.size,
        "num_attention_heads": about.heads,
        "num_key_value_heads": about.kv_heads,
        "head_dim": about.head_dim,
        "rms_norm_eps": about.eps,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.context_length,
        "rope_theta": 10000.0,  # `GivenRope` takes its place
        "tie_word_embeddings": model.tied,
    }


def _weights(model: Decoder, about: Plain) -> Iterator[tuple[str, mx.array]]:
    yield from _matrix("model.embed_tokens", model.embedding)
    if not model.tied:
        yield from _matrix("lm_head", model.head.weight)
    yield from _vector("model.norm.weight", model.norm.weight)
    for i, layer in enumerate(about.layers):
        yield from _layer(f"model.layers.{i}.", layer)


def _layer(at: str, layer: PlainLayer) -> Iterator[tuple[str, mx.array]]:
    mixer, ff = layer.mixer, layer.feed_forward
    linears: dict[str, Linear | None] = {
        "self_attn.q_proj": mixer.q,
        "self_attn.k_proj": mixer.k,
        "self_attn.v_proj": mixer.v,
        "self_attn.o_proj": mixer.out,
        "mlp.gate_proj": ff.gate,
        "mlp.up_proj": ff.up,
        "mlp.down_proj": ff.down,
    }
    for name, part in linears.items():
        assert part is not None
        yield from _matrix(at + name, part.weight)
        yield from _vector(f"{at}{name}.bias", part.bias)
    yield from _vector(f"{at}input_layernorm.weight", layer.mixer_norm.weight)
    yield from _vector(f"{at}post_attention_layernorm.weight", layer.ff_norm.weight)
    for name, norm in (("q_norm", mixer.q_norm), ("k_norm", mixer.k_norm)):
        yield from _vector(f"{at}self_attn.{name}.weight", None if norm is None else norm.weight)


def _vector(name: str, weight: Weight | None) -> Iterator[tuple[str, mx.array]]:
    if weight is not None:
        yield name, mx.array(weight.values())


def _matrix(name: str, weight: Weight) -> Iterator[tuple[str, mx.array]]:
    if weight.type in _FLOATS:
        yield f"{name}.weight", mx.array(weight.values())
        return
    raw = weight.encoded()
    held = affine(weight.type, raw)
    if held is not None:  # MLX keeps NumPy's strides, and its CUDA kernels take only steps that lie row by row
        arrays = _packed(held[0], 4), *(mx.array(np.ascontiguousarray(part)) for part in held[1:])
    elif weight.type == "Q8_0":
        blocks = raw.reshape(len(raw), -1, 34)
        step = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0].astype(np.float32)
        arrays = _packed(blocks[..., 2:] ^ np.uint8(128), 8), mx.array(step), mx.array(-128 * step)
    else:
        arrays = mx.quantize(mx.array(weight.values()), group_size=GROUP, bits=8)
    yield from zip((f"{name}.weight", f"{name}.scales", f"{name}.biases"), arrays, strict=True)


def _packed(codes: NDArray[np.uint8], bits: int) -> mx.array:
    """Codes [N, G, 32] in words of 32 bits [N, ..], the first of each in the lowest bits."""
    flat = codes.reshape(len(codes), -1, 8 // bits)
    pairs = flat[..., 0] if bits == 8 else flat[..., 0] | flat[..., 1] << 4
    return mx.array(np.ascontiguousarray(pairs, dtype=np.uint8).view(np.uint32))
