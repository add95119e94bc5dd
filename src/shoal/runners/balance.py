"""What makes keys fit for 8 bits: a part of their norm's weights that can as well be the queries'."""

from __future__ import annotations

import numpy as np

from shoal.models.decoder import Attention, Decoder, Float, Layer, Norm


def kv_source(i: int, layer: Layer) -> int:
    """The layer whose K and V layer `i` reads."""
    shared = layer.mixer.kv_layer if isinstance(layer.mixer, Attention) else None
    return i if shared is None else shared


def balances(model: Decoder) -> dict[int, Float]:
    """By the layer that makes keys: [key_dim] by which queries are multiplied and keys divided, where both have norms.

    K in 8 bits has one scale for a head, which a few elements with large weights in K's norm make coarse for all
    others. Half of what sets K's norm off from Q's goes over to Q. Scores stay what they are: two elements that are
    turned together have one factor, and factors are powers of two, so that no bit changes where KV is bf16.
    """
    readers: dict[int, list[Attention]] = {}
    for i, layer in enumerate(model.layers):
        if isinstance(layer.mixer, Attention):
            readers.setdefault(kv_source(i, layer), []).append(layer.mixer)
    found = {}
    for i, mixers in readers.items():
        maker = model.layers[i].mixer
        assert isinstance(maker, Attention)
        pairs = {0 if mixer.rotary is None else mixer.rotary.pairs for mixer in mixers}
        norms = [maker.k_norm, *(mixer.q_norm for mixer in mixers)]
        if len(pairs) == 1 and not maker.norm_over_heads and all(_plain_norm(norm) for norm in norms):
            weights = [abs(norm.weight.values()) for norm in norms[:2] if norm is not None and norm.weight is not None]
            found[i] = _balance(weights[1], weights[0], pairs.pop())
    return found


def _plain_norm(norm: Norm | None) -> bool:
    return norm is not None and norm.weight is not None and norm.bias is None


def _balance(q: Float, k: Float, pairs: int) -> Float:
    tiny = np.float32(1e-3)
    q, k = q.copy(), k.copy()
    for weight in (q, k):  # elements i and i + pairs are turned together
        weight[:pairs] = weight[pairs : 2 * pairs] = np.maximum(weight[:pairs], weight[pairs : 2 * pairs])
    with np.errstate(all="ignore"):
        factors = np.exp2(np.rint(np.log2((k + tiny) / (q + tiny)) / 2)).astype(np.float32)
    return np.where((factors > 2.0**-12) & (factors < 2.0**12), factors, np.float32(1))
