"""Tiny random models in `mlx-lm`'s format, one of each kind of cache that it batches, and a runner over each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.models.files import ModelFiles, local_files
from shoal.runners.base import Runner

VOCAB = 260
_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"model_type": "qwen3"},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    "gemma3_text": {"sliding_window": 48, "sliding_window_pattern": 3, "num_hidden_layers": 3},
    "qwen3_5": {
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
    },
    "falcon_h1": {
        "attention_bias": False,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_chunk_size": 32,
        "mamba_expand": 1,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "mamba_rms_norm": False,
        "mamba_norm_before_gate": True,
        "mamba_use_mlp": True,
        "mlp_bias": False,
        "projectors_bias": False,
    },
    "lfm2": {
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"],
    },
}
"""What is added to the common settings, by model type."""


def write_tiny(path: Path, family: str, **changes: Any) -> ModelFiles:
    """A directory as the hub has them, with random float32 weights that make logits depend on every token."""
    mx = pytest.importorskip("mlx.core")
    from mlx.utils import tree_flatten, tree_map
    from mlx_lm.utils import _get_classes

    config = {**_COMMON, **FAMILIES[family], **changes}
    config |= {"model_type": family, "architectures": ["Tiny"]}
    model_class, args_class = _get_classes(config)
    if family == "qwen3_5":
        config = {"model_type": family, "text_config": config, "architectures": ["Tiny"]}
    model = model_class(args_class.from_dict(config))
    mx.random.seed(3)
    drawn = tree_map(lambda a: mx.random.normal(a.shape) * 0.25 if a.ndim > 1 else a, model.parameters())
    path.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(drawn)), {"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    return local_files(family, path)


def tiny_runner(path: Path, family: str) -> Runner:
    """A runner over such a model, with room for 400 blocks."""
    from shoal.errors import BackendError
    from shoal.runners.mlx.backend import import_mlx

    try:
        runner: Runner = import_mlx("runner").MLXRunner.load(write_tiny(path, family), kv_bytes=8 << 20)
    except BackendError as error:
        pytest.skip(str(error))
    return runner
