"""OLMo 2 and 3: norms only behind each part, Q and K normalised over all heads; OLMo 3 has windows in most layers."""

from shoal.models.decoder import Layer
from shoal.models.families.attention import attention, windows
from shoal.models.families.builder import Builder
from shoal.models.families.family import Family
from shoal.models.families.feedforward import dense
from shoal.models.families.gemma import local_layers


def layer(b: Builder, i: int) -> Layer:
    """Attention and a gated feed-forward; a window's layers do not stretch their positions."""
    window = windows(b, 4)[i]
    return Layer(
        mixer=attention(b, i, window=window, local=window is not None, qk_norm="all"),
        feed_forward=dense(b, i),
        mixer_post_norm=b.layer_norm(i, "post_attention_norm"),
        ff_post_norm=b.layer_norm(i, "post_ffw_norm"),
    )


FAMILY = Family(
    name="olmo2",
    gguf=("olmo2",),
    safetensors=("olmo2", "olmo3"),
    layer=layer,
    keys={"attention.sliding_window_pattern": local_layers},
    names={
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    defaults={"rms_norm_eps": 1e-5},
)
