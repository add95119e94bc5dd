"""What a model needs of memory, counted by hand for one layer of each kind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from shoal.models.decoder import Attention, Decoder, DeltaNet, Mamba2, ShortConv
from shoal.models.needs import needs


def mixer(kind: type, **values: Any) -> Any:
    """A mixer with only the sizes that are counted."""
    made: Any = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def attention(window: int | None = None, kv_layer: int | None = None) -> Any:
    return mixer(Attention, kv_heads=2, key_dim=8, value_dim=4, window=window, kv_layer=kv_layer)


@pytest.mark.parametrize(
    ("layers", "token", "context", "states"),
    [
        ([attention()], 48, 48 * 100, 0),
        ([attention(), attention(window=10)], 96, 48 * 100 + 48 * 42, 0),
        ([attention(window=10), attention(window=20, kv_layer=0)], 48, 48 * 52, 0),
        ([attention(window=10), attention(kv_layer=0)], 48, 48 * 100, 0),
        ([attention(window=500)], 48, 48 * 100, 0),
        ([None], 0, 0, 0),
        (
            [mixer(DeltaNet, value_heads=3, key_heads=2, key_dim=4, value_dim=5, kernel=4)],
            0,
            0,
            4 * (3 * 4 * 5 + (2 * 2 * 4 + 3 * 5) * 3),
        ),
        ([mixer(Mamba2, heads=3, head_dim=4, groups=2, state=5, kernel=4)], 0, 0, 4 * (3 * 4 * 5 + (12 + 20) * 3)),
        ([mixer(ShortConv, kernel=3, conv=SimpleNamespace(shape=(16, 3)))], 0, 0, 4 * 16 * 2),
    ],
)
def test_bytes_of_one_sequence(layers: list[Any], token: int, context: int, states: int) -> None:
    decoder = SimpleNamespace(context_length=100, layers=[SimpleNamespace(mixer=layer) for layer in layers])
    need = needs(cast(Decoder, decoder), kv_element_bytes=2)
    assert (need.kv_token_bytes, need.kv_context_bytes, need.state_bytes) == (token, context, states)
