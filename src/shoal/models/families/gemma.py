"""Gemma 2 and 3: norms before and after, windows on most layers, scaled embeddings, soft caps in Gemma 2."""

import math
from collections.abc import Mapping
from typing import Any

from shoal.models.decoder import Layer
from shoal.models.families.attention import attention, head_sizes, windows
from shoal.models.families.builder import Builder, root
from shoal.models.families.family import Family, Keys, Names
from shoal.models.families.feedforward import dense

_LARGEST = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose queries are scaled by the width of a head's share. GGUF has no key for it."""


def layer(b: Builder, i: int) -> Layer:
    """Attention, of a window in all but every second (Gemma 2) or sixth layer, and a gated feed-forward."""
    second = b.family.name == "gemma2"
    window = windows(b, 2 if second else 6)[i]
    return Layer(
        mixer=attention(
            b,
            i,
            window=window,
            local=window is not None and not second,
            local_base=10_000.0,
            qk_norm="no" if second else "head",
            scale=query_scale(b),
            soft_cap=cap(b, "attn_logit_softcapping", 50.0 if second else 0),
        ),
        feed_forward=dense(b, i, activation="gelu_tanh"),
        mixer_norm=b.layer_norm(i, "attn_norm"),
        mixer_post_norm=b.layer_norm(i, "post_attention_norm"),
        ff_norm=b.layer_norm(i, "ffn_norm"),
        ff_post_norm=b.layer_norm(i, "post_ffw_norm"),
    )


def query_scale(b: Builder) -> float:
    """One over the root of a head's size, or of what the model names instead."""
    share = b.width // max(b.heads) if b.layers == _LARGEST[b.family.name] else head_sizes(b)[0]
    return 1 / math.sqrt(b.facts.count("attention.query_scalar", share))


def cap(b: Builder, key: str, default: float) -> float | None:
    """A soft cap, None where it is zero or not there."""
    return b.facts.real(key, default) or None


def whole(b: Builder) -> Mapping[str, Any]:
    """Scaled embeddings; Gemma 2 caps its logits."""
    return {
        "embedding_scale": root(b.width),
        "soft_cap": cap(b, "final_logit_softcapping", 30.0 if b.family.name == "gemma2" else 0),
    }


def local_layers(config: Mapping[str, Any]) -> list[bool] | None:
    """Which layers have a window, from config.json's kinds of layers."""
    kinds = config.get("layer_types")
    return None if kinds is None else [kind == "sliding_attention" for kind in kinds]


KEYS: Keys = {
    "activation": "hidden_activation",
    "attention.query_scalar": "query_pre_attn_scalar",
    "attention.sliding_window_pattern": lambda c: local_layers(c) or c.get("sliding_window_pattern"),
    "attn_logit_softcapping": lambda c: c.get("attn_logit_softcapping") or 0,
    "final_logit_softcapping": lambda c: c.get("final_logit_softcapping") or 0,
}
NAMES: Names = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SIZES = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def _family(name: str, kinds: tuple[str, ...], **own: float) -> Family:
    return Family(
        name=name,
        gguf=(name,),
        safetensors=kinds,
        layer=layer,
        whole=whole,
        keys=KEYS,
        names=NAMES,
        norms_plus_one=True,
        defaults={**_SIZES, **own},
    )


GEMMA2 = _family(
    "gemma2",
    ("gemma2",),
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
    max_position_embeddings=8192,
)
GEMMA3 = _family(
    "gemma3",
    ("gemma3", "gemma3_text"),
    rope_theta=1_000_000.0,
    rope_local_base_freq=10_000.0,
    max_position_embeddings=131_072,
)
