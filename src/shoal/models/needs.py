"""What memory a model needs, from its description alone: its weights, the KV of one sequence, recurrent states."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.models.decoder import Attention, Decoder, DeltaNet, Layer, Mamba2, ShortConv

_BLOCK = 32  # tokens by which the native runner gives and frees KV
_FLOAT = 4  # recurrent states are kept in float32


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes: of one more token of KV, of the KV of one sequence that fills `context_length` tokens, of its states.

    A layer with a window keeps that many tokens and a block, as the native runner does; the others keep them all. One
    that reads another layer's KV keeps none.
    """

    context_length: int
    kv_token_bytes: int
    kv_context_bytes: int
    state_bytes: int


def needs(decoder: Decoder, kv_element_bytes: int) -> Needs:
    """What one sequence of `decoder` needs, with KV of `kv_element_bytes` an element (2 for bf16)."""
    token = context = 0
    for i, layer in enumerate(decoder.layers):
        mixer = layer.mixer
        if isinstance(mixer, Attention) and mixer.kv_layer is None:
            own = mixer.kv_heads * (mixer.key_dim + mixer.value_dim) * kv_element_bytes
            token += own
            context += own * min(_seen(decoder, i) + _BLOCK, decoder.context_length)
    states = sum(_state_elements(layer) for layer in decoder.layers) * _FLOAT
    return Needs(decoder.context_length, token, context, states)


def _seen(decoder: Decoder, layer: int) -> int:
    """How many tokens are seen of the KV that a layer keeps, by whichever layers read it."""
    mixers = [each.mixer for i, each in enumerate(decoder.layers) if i == layer or _reads(each, layer)]
    windows = [mixer.window for mixer in mixers if isinstance(mixer, Attention)]
    return max(window or decoder.context_length for window in windows)


def _reads(layer: Layer, other: int) -> bool:
    return isinstance(layer.mixer, Attention) and layer.mixer.kv_layer == other


def _state_elements(layer: Layer) -> int:
    """Elements of the state that a layer keeps of a sequence: its matrices, and the last inputs of its convolution."""
    mixer = layer.mixer
    if isinstance(mixer, DeltaNet):
        return mixer.value_heads * mixer.key_dim * mixer.value_dim + mixer.channels * (mixer.kernel - 1)
    if isinstance(mixer, Mamba2):
        channels = mixer.heads * mixer.head_dim + 2 * mixer.groups * mixer.state
        return mixer.heads * mixer.head_dim * mixer.state + channels * (mixer.kernel - 1)
    return mixer.conv.shape[0] * (mixer.kernel - 1) if isinstance(mixer, ShortConv) else 0
