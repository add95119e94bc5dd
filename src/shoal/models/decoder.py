"""What a decoder is, as data: every runner and the numpy oracle read this, and no other file knows a model's shape.

A page under `families/` fills it in from the keys and tensors of one family. Nothing here computes, except that a
`Weight` can give its numbers. Sizes count elements, shapes are in numpy order (the last axis is contiguous), so a
matrix is [outputs, inputs] and `y = x @ W.T + b`. `n` below is `Decoder.width`, the size of the residual stream.

A decoder computes, for one sequence of T tokens:

    x = embedding[tokens] * embedding_scale                                    [T, n]
    for each layer:
        x = x + residual_scale * mixer_post_norm(mixer(mixer_norm(x)))         where it has a mixer
        x = x + residual_scale * ff_post_norm(feed_forward(ff_norm(x)))        where it has a feed-forward
        x = x + norm(project(gelu_tanh(gate(x)) * its per-layer input))        where it has a `LayerInput`
        x = x * output_scale
    logits = soft_cap(head(norm(x)) * logit_scale)                             [T, vocab_size]

A norm that is None is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Float: TypeAlias = NDArray[np.float32]


@runtime_checkable
class StoredTensor(Protocol):
    """A tensor as its file holds it: `data` is the encoded bytes, uint8 [nbytes]; `type` is a GGML name, as "Q4_K"."""

    @property
    def name(self) -> str:
        """As its file calls it."""
        ...

    @property
    def type(self) -> str:
        """A GGML type."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Counted in elements."""
        ...

    @property
    def data(self) -> NDArray[np.uint8]:
        """The encoded bytes, uint8 [nbytes]; a view where the file allows it."""
        ...

    def encoded_rows(self, index: slice | NDArray[np.intp]) -> NDArray[np.uint8]:
        """The encoded bytes of some rows, uint8 [rows, row bytes]; matrices of experts lie one under the other.

        A view where `index` is a slice and the file allows it.
        """
        ...

    def dequantize(self) -> Float:
        """A fresh float32 array of `shape`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """One weight of the description: a stored tensor, or some of its rows in the order that the description wants.

    `shape` is what it is here: [n] for a vector, [outputs, inputs] for a matrix, [experts, outputs, inputs] for
    matrices of experts, [experts, outputs] for their biases. `rows` picks along `axis`: -2 for matrices (the outputs;
    inputs are never reordered, so that blocks of quantised columns stay whole), -1 for vectors and biases. None takes
    all as they are stored. `transform` and `factor` change vectors only: "plus_one" is w + 1 (norms that are stored
    around zero), "minus_exp" is -exp(w) (the decay of a recurrence, stored as a logarithm).
    """

    tensor: StoredTensor = field(repr=False)
    shape: tuple[int, ...]
    rows: NDArray[np.intp] | None = field(default=None, repr=False)
    axis: Literal[-1, -2] = -2
    transform: Literal["plus_one", "minus_exp"] | None = None
    factor: float = 1.0

    @property
    def name(self) -> str:
        """The stored tensor's name; several weights may share one tensor."""
        return self.tensor.name

    @property
    def type(self) -> str:
        """The stored tensor's GGML type."""
        return self.tensor.type

    @property
    def plain(self) -> bool:
        """True when the stored bytes, with `rows` picked, are the weight: no arithmetic on its values."""
        return self.transform is None and self.factor == 1.0

    def encoded(self) -> NDArray[np.uint8]:
        """The stored bytes of a matrix, or of matrices of experts, its rows picked: uint8 [..., outputs, row bytes].

        A view of the file when `rows` is None, else a copy.
        """
        stored_rows = math.prod(self.tensor.shape) // self.shape[-1]
        data = self.tensor.data
        view = data.reshape(*self.shape[:-2], -1, data.nbytes // stored_rows)
        return view if self.rows is None else np.take(view, self.rows, axis=-2)

    def encoded_rows(self, first: int, count: int) -> NDArray[np.uint8]:
        """Rows first .. first + count - 1 of what `encoded` gives, matrices one under the other; no more is read."""
        count = min(count, math.prod(self.shape[:-1]) - first)
        if self.rows is None:
            return self.tensor.encoded_rows(slice(first, first + count))
        stored = math.prod(self.tensor.shape) // self.shape[-1] // math.prod(self.shape[:-2])  # rows of one matrix
        matrix, row = np.divmod(np.arange(first, first + count), self.shape[-2])
        return self.tensor.encoded_rows(matrix * stored + self.rows[row])

    def values(self) -> Float:
        """A fresh float32 array of `shape`."""
        values = self.tensor.dequantize()
        if self.rows is None:
            values = values.reshape(self.shape)
        else:
            stored = [*self.shape]
            stored[self.axis] = -1
            values = np.take(values.reshape(stored), self.rows, axis=self.axis)
        if self.transform == "plus_one":
            values = values + np.float32(1)
        elif self.transform == "minus_exp":
            values = -np.exp(values)
        return values if self.factor == 1.0 else values * np.float32(self.factor)


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x @ weight.T + bias. `weight` [outputs, inputs], or [experts, outputs, inputs]; `bias` [.., outputs]."""

    weight: Weight
    bias: Weight | None = None


@dataclass(frozen=True, slots=True)
class Norm:
    """Over the last axis, "rms": x / sqrt(mean(x^2) + eps), or "layer": (x - mean) / sqrt(variance + eps).

    Then times `weight` and plus `bias`, each [size] or None.
    """

    eps: float
    weight: Weight | None = None
    bias: Weight | None = None
    kind: Literal["rms", "layer"] = "rms"


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary positions in "halves" form: element i of a head is turned with element i + pairs, for i < pairs.

    The rest of a head, behind 2 * pairs, is left alone. Weights of files that store pairs (2i, 2i + 1) come with
    `Weight.rows` that undo it. `frequencies` [pairs] is radians a position; zero turns nothing. All scaling (linear,
    Llama 3, YaRN, LongRoPE, proportional) is in it already, and in `factor`, which multiplies cosine and sine.
    """

    frequencies: tuple[float, ...] = field(repr=False)
    factor: float = 1.0

    @property
    def pairs(self) -> int:
        """How many pairs of a head are turned: half the rotary dimension."""
        return len(self.frequencies)


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Queries at position p are multiplied by 1 + beta * log(1 + floor(p / length)), natural (Llama 4, Mistral 3)."""

    beta: float
    length: int


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention of `heads` query heads over `kv_heads` (head h reads KV head h // (heads / kv_heads)).

    `q` [heads * key_dim, n], `k` [kv_heads * key_dim, n], `v` [kv_heads * value_dim, n], `out` [n, heads * value_dim].
    In order: project, `q_norm` and `k_norm` and `v_norm` (over each head, or over all heads together when
    `norm_over_heads`), rotate q and k, `query_scale`, scores = q . k * scale, soft cap (cap * tanh(scores / cap)),
    mask, softmax, weigh v, gate (times sigmoid(gate(x)), [heads * value_dim]), out.

    `window` w: position p sees p - w + 1 to p. `sinks` [heads]: one more score a head, with no value. `v` None: values
    are the keys before `k_norm` and rotation. `kv_layer` is the layer whose K and V are read; when it is not None this
    layer has none of its own (`k`, `v`, `k_norm`, `v_norm` are None). `rotary` None: no positions.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    q: Linear
    k: Linear | None
    v: Linear | None
    out: Linear
    scale: float
    rotary: Rotary | None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    norm_over_heads: bool = False
    gate: Linear | None = None
    sinks: Weight | None = None
    window: int | None = None
    soft_cap: float | None = None
    query_scale: QueryScale | None = None
    kv_layer: int | None = None


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Gated delta net, a linear attention whose state is a matrix [key_dim, value_dim] for each value head.

    `q` and `k` [key_heads * key_dim, n], `v` and `z` [value_heads * value_dim, n], `alpha` and `beta` [value_heads, n],
    `conv` [2 * key_heads * key_dim + value_heads * value_dim, kernel] over the channels q, k, v in that order,
    `decay` and `dt_bias` [value_heads], `norm` over [value_dim], `out` [n, value_heads * value_dim]. `key_of` says
    for each value head which key head it reads. For a value head at position t:

        q, k, v = silu(causal convolution: sum over j of conv[:, j] * input[t - kernel + 1 + j], zero before the start)
        q, k = each head divided by sqrt(sum of squares + l2_eps);  q = q / sqrt(key_dim)
        g = exp(decay * softplus(alpha(x) + dt_bias));  b = sigmoid(beta(x))
        S = g * S;  S = S + outer(k, b * (v - S.T @ k));  o = S.T @ q              (S starts at zero)
        y = out(norm(o) * silu(z))
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    key_of: tuple[int, ...] = field(repr=False)
    q: Linear
    k: Linear
    v: Linear
    z: Linear
    alpha: Linear
    beta: Linear
    conv: Weight
    decay: Weight
    dt_bias: Weight
    norm: Norm
    out: Linear
    l2_eps: float

    @property
    def channels(self) -> int:
        """Of the convolution: q, k and v of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class Mamba2:
    """State-space layer: a state [head_dim, state] for each head; head h reads group h // (heads / groups).

    `z` and `x` [heads * head_dim, n], `b` and `c` [groups * state, n], `dt` [heads, n]; `conv` [channels, kernel] and
    `conv_bias` [channels] over the channels x, b, c in that order; `decay` (below zero), `skip` and `dt_bias` [heads];
    `out` [n, heads * head_dim]. At position t, for each head:

        x, b, c = silu(causal convolution + conv_bias)                              (as in `DeltaNet`)
        d = softplus(dt(x) + dt_bias), held within dt_limits
        S = exp(d * decay) * S + outer(d * x, b);  y = S @ c + skip * x
        y = out(norm(y * silu(z)))

    `norm` goes over each of `norm_groups` equal parts of all heads' elements together; its weight is
    [heads * head_dim].
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int
    z: Linear
    x: Linear
    b: Linear
    c: Linear
    dt: Linear
    conv: Weight
    conv_bias: Weight | None
    decay: Weight
    skip: Weight
    dt_bias: Weight
    norm: Norm | None
    norm_groups: int
    out: Linear
    dt_limits: tuple[float, float] = (0.0, math.inf)


@dataclass(frozen=True, slots=True)
class ShortConv:
    """A gated short convolution: out(c(x) * causal convolution of (b(x) * x(x))).

    `b`, `c`, `x` and `out` [n, n], `conv` [n, kernel] (as in `DeltaNet`, without an activation), `conv_bias` [n].
    """

    kernel: int
    b: Linear
    c: Linear
    x: Linear
    conv: Weight
    conv_bias: Weight | None
    out: Linear


Mixer: TypeAlias = Attention | DeltaNet | Mamba2 | ShortConv

Activation: TypeAlias = Literal["silu", "gelu_tanh", "gelu", "relu2", "swiglu_clipped"]
"""What `Dense` and experts do with `gate` and `up`: act(gate) * up, or act(up) where there is no gate.

"gelu_tanh" is gelu's tanh form, "gelu" the exact one, "relu2" is max(0, x)^2. "swiglu_clipped" (gpt-oss) is
g = min(gate, 7), u = clip(up, -7, 7), g * sigmoid(1.702 * g) * (u + 1).
"""


@dataclass(frozen=True, slots=True)
class Dense:
    """down(act(gate(x)) * up(x)). `gate` and `up` [size, n], `down` [n, size]."""

    size: int
    activation: Activation
    gate: Linear | None
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Mixture:
    """Of `experts` feed-forwards each row goes through `used`, chosen by a router, and their outputs are summed.

    `router` [experts, n]; `gate` and `up` [experts, size, n], `down` [experts, n, size]; biases [experts, outputs].
    s = router(x) makes a score of every expert, by `scoring`: "softmax" over all, "sigmoid" of each, or "chosen": the
    raw s chooses, and the weights are a softmax over the chosen. The largest of score + `selection_bias` [experts] are
    chosen; with `groups` > 1 only from the `groups_used` groups (consecutive experts) with the largest sums of their
    two best. Their weights are the scores without the bias; `normalise` divides them by their sum; then times `scale`,
    and times `expert_scales` [experts] where it is there. Of equal scores the expert with the lower number wins.

    `shared` is a feed-forward that every row goes through, its output times sigmoid(shared_gate(x)) ([1, n]) where
    there is one. Router, experts and shared each have a norm of their own input, and the latter two of their output,
    where it is not None (Gemma 4; the layer has no `ff_norm` then). `latent_in` [m, n] and `latent_out` [n, m] stand
    around the experts where they are there: the experts then work in m elements.
    """

    experts: int
    used: int
    size: int
    activation: Activation
    scoring: Literal["softmax", "sigmoid", "chosen"]
    router: Linear
    gate: Linear | None
    up: Linear
    down: Linear
    normalise: bool
    scale: float = 1.0
    selection_bias: Weight | None = None
    groups: int = 1
    groups_used: int = 1
    expert_scales: Weight | None = None
    shared: Dense | None = None
    shared_gate: Linear | None = None
    router_norm: Norm | None = None
    experts_norm: Norm | None = None
    experts_post_norm: Norm | None = None
    shared_norm: Norm | None = None
    shared_post_norm: Norm | None = None
    latent_in: Linear | None = None
    latent_out: Linear | None = None


FeedForward: TypeAlias = Dense | Mixture


@dataclass(frozen=True, slots=True)
class LayerInput:
    """A layer's use of the per-layer embeddings: x + norm(project(gelu_tanh(gate(x)) * input)).

    `gate` [p, n], `project` [n, p]; `input` is this layer's [T, p] part of what `LayerInputs` makes.
    """

    gate: Linear
    project: Linear
    norm: Norm


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Per-layer embeddings (Gemma 3n and 4), [T, layers, p], made once from tokens and the first x.

        (norm(project(x) * project_scale, over each p) + embedding[tokens] * embedding_scale) * scale

    `embedding` [vocabulary, layers * p], `project` [layers * p, n].
    """

    size: int
    embedding: Weight
    embedding_scale: float
    project: Linear
    project_scale: float
    norm: Norm
    scale: float


@dataclass(frozen=True, slots=True)
class Layer:
    """A mixer and a feed-forward, either of which may be missing, with norms before and after (see the module)."""

    mixer: Mixer | None
    feed_forward: FeedForward | None
    mixer_norm: Norm | None = None
    mixer_post_norm: Norm | None = None
    ff_norm: Norm | None = None
    ff_post_norm: Norm | None = None
    residual_scale: float = 1.0
    layer_input: LayerInput | None = None
    output_scale: Weight | None = None


@dataclass(frozen=True, slots=True)
class Decoder:
    """A whole model. `head.weight` is the very object `embedding` where they are tied.

    `vocab_size` is the number of rows of `embedding`, which may be more than there are tokens. `context_length` is what
    the model was made for, in tokens.
    """

    name: str
    family: str
    width: int
    vocab_size: int
    context_length: int
    embedding: Weight
    layers: tuple[Layer, ...] = field(repr=False)
    norm: Norm
    head: Linear
    embedding_scale: float = 1.0
    embedding_norm: Norm | None = None
    logit_scale: float = 1.0
    soft_cap: float | None = None
    layer_inputs: LayerInputs | None = None

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.head.weight is self.embedding

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """Every weight with its path in the description, as ("layers.3.mixer.q.weight", ...); a tied head once."""
        seen: set[int] = set()
        for path, weight in _walk("", self):
            if id(weight) not in seen:
                seen.add(id(weight))
                yield path, weight


def replace_weights(model: Decoder, change: Callable[[str, Weight], Weight]) -> Decoder:
    """The model with every weight as `change` gives it for (path, weight); a weight that is shared stays shared."""
    changed: dict[int, Weight] = {}

    def visit(path: str, node: Any) -> Any:
        if isinstance(node, Weight):
            if id(node) not in changed:
                changed[id(node)] = change(path, node)
            return changed[id(node)]
        if isinstance(node, tuple):
            return tuple(visit(f"{path}.{index}", item) for index, item in enumerate(node))
        if not is_dataclass(node) or isinstance(node, type):
            return node
        parts = {part.name: getattr(node, part.name) for part in fields(node)}
        return replace(
            node, **{name: visit(f"{path}.{name}" if path else name, value) for name, value in parts.items()}
        )

    made: Decoder = visit("", model)
    return made


def _walk(path: str, node: Any) -> Iterator[tuple[str, Weight]]:
    if isinstance(node, Weight):
        yield path, node
    elif isinstance(node, tuple):
        for index, item in enumerate(node):
            if is_dataclass(item):
                yield from _walk(f"{path}.{index}", item)
    elif is_dataclass(node):
        for part in fields(node):
            yield from _walk(f"{path}.{part.name}" if path else part.name, getattr(node, part.name))
