"""Reads a source by a family's page: tensors checked against the sizes that the keys give, before anything is made.

The parts of a layer are made by functions that take a `Builder`: `attention`, `feedforward` and `recurrent` here.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shoal.errors import ModelFormatError, UnsupportedModelError
from shoal.models.decoder import Activation, Decoder, Linear, Norm, Rotary, StoredTensor, Weight
from shoal.models.families.family import Family, Pairs
from shoal.models.families.source import HINT, Facts, Source

Rows = NDArray[np.intp]
Transform = Literal["plus_one", "minus_exp"]

_ACTIVATIONS: dict[str, Activation] = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu_tanh"),
    "gelu": "gelu",
    "relu2": "relu2",
}
"""By the names of `transformers`."""

_UNUSED = re.compile(
    r"(blk|model\.layers|layers|mtp|model\.mtp)\.[\w.]*(nextn|eh_proj|shared_head|enorm|hnorm)[\w.]*"
    r"|mtp\..*|model\.mtp\..*|(model\.)?(visual|vision_tower|vision_model|multi_modal_projector|audio_tower)\..*"
    r"|.*rotary_emb\.inv_freq|rope_freqs\.weight|rope_factors_(long|short)\.weight"
)
"""Tensors that a file may hold and that text generation does not read: draft heads, towers for images and sound."""


class Builder:
    """Makes a `Decoder` from a source by a page. Methods raise `ModelFormatError` for what is missing or misshapen.

    `width`, `layers`, `heads[i]` and `kv_heads[i]` are read once; layers of draft heads behind the last are left out.
    """

    def __init__(self, family: Family, source: Source, name: str) -> None:
        self.family, self.source, self.name = family, source, name
        self.facts = Facts(source)
        self.gguf = source.format == "gguf"
        self.pairs: Pairs = family.pairs[0 if self.gguf else 1]
        self.width = self.facts.count("embedding_length")
        drafts = self.facts.count("nextn_predict_layers", 0, least=0) if self.gguf else 0
        blocks = self.facts.count("block_count")
        self.layers = blocks - drafts
        if self.layers < 1 or blocks > source.tensors:  # before anything is made for each of them
            self.facts.fail("block_count", blocks, f"no more than {source.tensors} tensors")
        self.eps = self._eps()
        self.heads = self.facts.counts("attention.head_count", self.layers)  # 0 where a layer has no attention
        self.kv_heads = self.facts.counts("attention.head_count_kv", self.layers, max(self.heads))
        self.rotaries: dict[tuple[float, int, bool], Rotary] = {}

    def _eps(self) -> float:
        value = self.source.value("attention.layer_norm_rms_epsilon")
        key = "attention.layer_norm_rms_epsilon" if value is not None else "attention.layer_norm_epsilon"
        eps = self.facts.real(key)
        if not 0 < eps < 1:
            self.facts.fail(key, eps, "between 0 and 1")
        return eps

    def activation(self, usual: Activation) -> Activation:
        """The activation that config.json names; `usual` in the family where nothing does.

        `UnsupportedModelError` for one that is not known.
        """
        said = self.source.value("activation")
        if said is None or (usual, said) == ("swiglu_clipped", "silu"):  # gpt-oss calls its own so
            return usual
        if not isinstance(said, str) or said not in _ACTIVATIONS or usual == "swiglu_clipped":
            raise UnsupportedModelError(
                f"{self.source.where}: activation {said!r}", value=said, limit=sorted(_ACTIVATIONS), hint="not known"
            )
        return _ACTIVATIONS[said]

    # Tensors.

    def stored(self, name: str) -> StoredTensor:
        """The tensor `name`, which must be there."""
        tensor = self.source.tensor(name)
        if tensor is None:
            raise ModelFormatError(f"{self.source.where}: tensor {name} is missing", value=name, hint=HINT)
        return tensor

    def weight(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: Rows | None = None,
        stored: int | None = None,
        *,
        axis: Literal[-1, -2] = -2,
        transform: Transform | None = None,
        factor: float = 1.0,
    ) -> Weight:
        """The tensor `name` as a weight of `shape`; with `rows`, the file has `stored` along `axis`.

        Axes of one element in the file are looked over: a convolution may be stored as [channels, 1, kernel].
        """
        tensor = self.stored(name)
        expected = list(shape)
        if rows is not None and stored is not None:
            expected[axis] = stored
        if [n for n in tensor.shape if n != 1] != [n for n in expected if n != 1]:
            raise ModelFormatError(
                f"{self.source.where}: tensor {name} has shape {list(tensor.shape)}",
                value=tensor.shape,
                limit=tuple(expected),
                hint=f"its shape must be {expected}",
            )
        return Weight(tensor, shape, rows, axis, transform, factor)

    def has(self, name: str) -> bool:
        """Whether the file has the tensor `name`."""
        return self.source.tensor(name) is not None

    def vector(self, name: str, size: int, rows: Rows | None = None, stored: int | None = None, **kind: Any) -> Weight:
        """A weight of one axis."""
        return self.weight(name, (size,), rows, stored, axis=-1, **kind)

    def linear(
        self, name: str, outputs: int, inputs: int, rows: Rows | None = None, stored: int | None = None
    ) -> Linear:
        """`name`.weight with the bias `name`.bias where there is one; both take `rows` of `stored` outputs."""
        bias = f"{name}.bias"
        return Linear(
            self.weight(f"{name}.weight", (outputs, inputs), rows, stored),
            self.vector(bias, outputs, rows, stored) if self.has(bias) else None,
        )

    def norm(self, name: str, size: int, rows: Rows | None = None, *, plus_one: bool | None = None) -> Norm:
        """The norm whose weight is `name`.weight."""
        shifted = self.family.norms_plus_one if plus_one is None else plus_one
        transform: Transform | None = "plus_one" if shifted and not self.gguf else None
        bias = f"{name}.bias"
        return Norm(
            self.eps,
            self.vector(f"{name}.weight", size, rows, size, transform=transform),
            self.vector(bias, size) if self.has(bias) else None,
        )

    def layer_norm(self, i: int, name: str) -> Norm:
        """A norm of layer `i` over the residual stream."""
        return self.norm(f"blk.{i}.{name}", self.width)

    # The whole.

    def decoder(self) -> Decoder:
        """All of it. `UnsupportedModelError` when the file has tensors that this page knows nothing of."""
        family, facts = self.family, self.facts
        table = self.stored("token_embd.weight")
        vocab = table.shape[0]
        embedding = self.weight("token_embd.weight", (vocab, self.width))
        head = Linear(embedding)
        if self.has("output.weight"):
            head = self.linear("output", vocab, self.width)
        made = Decoder(
            name=self.name,
            family=family.name,
            width=self.width,
            vocab_size=vocab,
            context_length=facts.count("context_length"),
            embedding=embedding,
            layers=tuple(family.layer(self, i) for i in range(self.layers)),
            # Lfm2 files have it under the name of another norm.
            norm=self.norm("output_norm" if self.has("output_norm.weight") else "token_embd_norm", self.width),
            head=head,
            **({} if family.whole is None else family.whole(self)),
        )
        self._refuse_unread()
        return made

    def _refuse_unread(self) -> None:
        drafts = re.compile(r"(blk|(.*\.)?layers)\.(\d+)\..*")
        for name in self.source.unread():
            layer = drafts.fullmatch(name)
            if _UNUSED.fullmatch(name) or (layer is not None and int(layer[3]) >= self.layers):
                continue
            raise UnsupportedModelError(
                f"{self.source.where}: tensor {name!r} is no part of family {self.family.name!r} as it is known here",
                value=name,
                hint="this variant is not supported",
            )


def root(size: int) -> float:
    """sqrt(size) as float32 holds it: what models multiply their embeddings with."""
    return float(np.float32(math.sqrt(size)))
