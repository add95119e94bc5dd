"""Runs in a Python that has torch and transformers: tiny models of the library's own, and their logits.

python scripts/outside/transformers_tiny.py FOLDER TOKENS.npy [NAME ...]

For each name it leaves FOLDER/NAME (a directory as the hub has it, its numbers those of tests/support/tiny_hub.py) and
FOLDER/NAME.npy (logits [tokens, vocabulary] in float32).
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support.tiny_hub import drawn

SMALL = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 3}
LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 1, "mamba_expand": 2}
GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.1,
    "logits_scaling": 2.0,
    "tie_word_embeddings": True,
}


def rope(theta: float = 10000.0, kind: str = "default", **more: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_theta": theta, "rope_type": kind, **more}}


MODELS = {
    "llama": ("LlamaConfig", rope()),
    "llama-3.1": (
        "LlamaConfig",
        rope(
            kind="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "mistral": ("MistralConfig", {"sliding_window": 8, **rope()}),
    "mixtral": ("MixtralConfig", {**LOCAL, "intermediate_size": 32, **rope()}),
    "ministral3": (
        "Ministral3Config",
        rope(
            kind="yarn",
            factor=16.0,
            original_max_position_embeddings=16,
            beta_fast=4.0,
            beta_slow=0.1,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.1,
        ),
    ),
    "qwen2": ("Qwen2Config", {"head_dim": 16, "tie_word_embeddings": True, **rope()}),
    "qwen3": ("Qwen3Config", rope()),
    "qwen3moe": ("Qwen3MoeConfig", {**EXPERTS, "norm_topk_prob": True, **rope()}),
    "qwen3next": (
        "Qwen3NextConfig",
        {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 96, **rope(partial_rotary_factor=0.5)},
    ),
    "qwen35": ("Qwen3_5TextConfig", {**LINEAR, **rope(partial_rotary_factor=0.5, mrope_section=[3, 3, 2])}),
    "qwen35moe": (
        "Qwen3_5MoeTextConfig",
        {
            **EXPERTS,
            **LINEAR,
            "shared_expert_intermediate_size": 96,
            **rope(partial_rotary_factor=0.5, mrope_section=[3, 3, 2]),
        },
    ),
    "gemma2": (
        "Gemma2Config",
        {
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 6.0,
            "tie_word_embeddings": True,
            **rope(),
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 7,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "sliding_window": 8,
            "global_head_dim": 64,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "final_logit_softcapping": 6.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4-small": (
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 9,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 3,
            "sliding_window": 8,
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 288,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4-mixture": (
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "sliding_window": 8,
            "global_head_dim": 64,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
            "tie_word_embeddings": True,
        },
    ),
    "gpt-oss": (
        "GptOssConfig",
        {
            **LOCAL,
            "intermediate_size": 32,
            "sliding_window": 8,
            **rope(
                150000.0,
                "yarn",
                factor=32.0,
                original_max_position_embeddings=64,
                beta_fast=32.0,
                beta_slow=1.0,
                truncate=False,
            ),
        },
    ),
    "phi3": ("Phi3Config", {"head_dim": None, "sliding_window": 8, **rope(partial_rotary_factor=0.75)}),
    "phi3-long": (
        "Phi3Config",
        {
            "head_dim": None,
            "original_max_position_embeddings": 16,
            **rope(
                kind="longrope",
                partial_rotary_factor=0.75,
                long_factor=[1.1, 1.5, 2.0, 3.0, 5.0, 9.0],
                short_factor=[1.0, 1.0, 1.1, 1.2, 1.5, 2.0],
                original_max_position_embeddings=16,
            ),
        },
    ),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 1, 1, 0], "tie_word_embeddings": True, **rope()}),
    "olmo2": ("Olmo2Config", {"head_dim": None, **rope()}),
    "olmo3": (
        "Olmo3Config",
        {
            "head_dim": None,
            "sliding_window": 8,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 64,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "granite": ("GraniteConfig", {"head_dim": None, **GRANITE, **rope()}),
    "granitemoe": ("GraniteMoeConfig", {"head_dim": None, **GRANITE, **LOCAL, "intermediate_size": 32, **rope()}),
    "granitemoe-shared": (
        "GraniteMoeSharedConfig",
        {"head_dim": None, **GRANITE, **LOCAL, "intermediate_size": 32, "shared_intermediate_size": 96, **rope()},
    ),
    "granitehybrid": (
        "GraniteMoeHybridConfig",
        {
            "head_dim": None,
            **GRANITE,
            **LOCAL,
            **MAMBA,
            "intermediate_size": 32,
            "shared_intermediate_size": 96,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "position_embedding_type": "nope",
        },
    ),
    "granitehybrid-dense": (
        "GraniteMoeHybridConfig",
        {
            "head_dim": None,
            **GRANITE,
            **MAMBA,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 96,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "position_embedding_type": "rope",
            **rope(),
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {
            "head_dim": None,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.0,
            "intermediate_size": 144,
            "tie_word_embeddings": True,
            **rope(1e6),
        },
    ),
    "lfm2moe": (
        "Lfm2MoeConfig",
        {
            **EXPERTS,
            "head_dim": None,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "num_dense_layers": 2,
            "norm_topk_prob": True,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.0,
            "tie_word_embeddings": True,
            **rope(1e6),
        },
    ),
    "glm4": ("Glm4Config", {"attention_bias": True, **rope(partial_rotary_factor=0.5)}),
    "glm4moe": (
        "Glm4MoeConfig",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
            "use_qk_norm": True,
            **rope(partial_rotary_factor=0.5),
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "layers_block_type": ["mamba", "moe", "mamba", "attention", "moe", "mamba"],
            "num_hidden_layers": 6,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "ssm_state_size": 32,
            "n_groups": 2,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 96,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}


def make(folder: Path, name: str) -> Path:
    """A directory with the library's names and shapes, and numbers drawn by name."""
    kind, values = MODELS[name]
    given = {key: value for key, value in {**SMALL, **values}.items() if value is not None}
    config = getattr(transformers, kind)(**given)
    config.dtype = torch.float32
    model = transformers.AutoModelForCausalLM.from_config(config)
    path = folder / name
    model.save_pretrained(path)
    file = path / "model.safetensors"
    tensors = {key: torch.from_numpy(drawn(key, tuple(value.shape))) for key, value in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def logits(path: Path, tokens: list[int]) -> np.ndarray:
    """Logits after each token, in float32."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    missing = set(info["missing_keys"]) - {"lm_head.weight"}
    if missing or info["unexpected_keys"]:
        raise SystemExit(f"{path}: {missing} missing, {info['unexpected_keys']} unexpected")
    with torch.no_grad():
        return model.eval()(torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()


def main() -> None:
    folder, tokens = Path(sys.argv[1]), np.load(sys.argv[2]).tolist()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in sys.argv[3:] or MODELS:
        try:
            np.save(folder / f"{name}.npy", logits(make(folder, name), tokens))
            print(f"{name}: made", flush=True)
        except Exception as error:  # noqa: BLE001 - one family that the library cannot build must not stop the others
            print(f"{name}: FAILED {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
