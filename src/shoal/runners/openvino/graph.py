"""Models with paged attention: built here from converted weights, or made from a stateful OpenVINO model.

Either way the model has the inputs `input_ids`, `position_ids` [T], `past_lens` [B], `subsequence_begins`,
`block_indices_begins` [B + 1], `block_indices`, `max_context_len`, `rows` [R] (which of the T tokens get logits) and a
pair `key_cache.N`, `value_cache.N` per layer, and the output `logits`. Building directly spares a cold start the
reading of XML and the transformation; its result cannot be kept instead, as OpenVINO 2026.4 writes the paged
operation to a file but cannot read it back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from shoal.errors import BackendError, ModelFormatError, UnsupportedModelError
from shoal.runners.affine import GROUP
from shoal.runners.openvino.store import ConvertedModel

Pair: TypeAlias = tuple[Any, Any]


def build(converted: ConvertedModel) -> Any:
    """An `openvino.Model` over the arrays of `converted`, which must outlive it and what is compiled from it."""
    return _Builder(converted).model()


class _Builder:
    """Builds one decoder. Activations are [T, size]; equal constants are one node, which halves the compile time."""

    def __init__(self, converted: ConvertedModel) -> None:
        import openvino as ov
        from openvino import opset13

        self.ov: Any = ov
        self.ops: Any = opset13
        self.about = converted.description
        self.arrays = converted.arrays
        self.shared: dict[tuple[str, tuple[int, ...], bytes], Any] = {}
        self.parameters: list[Any] = []

    def model(self) -> Any:
        ops, i32 = self.ops, self.ov.Type.i32
        tokens, positions = self.input("input_ids", [-1], i32), self.input("position_ids", [-1], i32)
        rows = self.input("rows", [-1], i32)
        paging = {name: self.input(name, [-1], i32) for name in _PAGING}
        paging["max_context_len"] = self.input("max_context_len", [], i32)
        embed = self.weight("embed")
        cos_sin = self.cos_sin(positions)
        x = ops.gather(embed, tokens, self.const(0, np.int32))
        for layer in range(self.about.n_layers):
            x = self.layer(x, f"{layer}.", cos_sin, self.caches(layer), paging)
        x = ops.gather(x, rows, self.const(0, np.int32))
        x = self.norm(x, "output_norm")
        logits = self.product(x, embed if self.about.tied else self.weight("output"))
        logits.output(0).set_names({"logits"})
        return self.ov.Model([ops.result(logits)], self.parameters, "shoal")

    def layer(
        self, x: Any, at: str, cos_sin: tuple[Any, Any], caches: tuple[Any, Any], paging: Mapping[str, Any]
    ) -> Any:
        about, ops = self.about, self.ops
        sizes = [about.n_heads * about.head_dim, about.n_kv_heads * about.head_dim]
        qkv = self.product(self.norm(x, at + "attn_norm"), self.weight(at + "qkv"))
        if about.qkv_bias:
            qkv = ops.add(qkv, self.array(at + "qkv_bias", 1, -1))
        q, k, v = self.split(qkv, [sizes[0], sizes[1], sizes[1]], axis=1)
        q = self.rotated(q, about.n_heads, at + "q_norm", cos_sin)
        k = self.rotated(k, about.n_kv_heads, at + "k_norm", cos_sin)
        attended = self.attention([q, k, v, *caches], paging)
        x = ops.add(x, self.product(attended, self.weight(at + "attn_out")))
        both = self.product(self.norm(x, at + "ffn_norm"), self.weight(at + "gate_up"))
        gate, up = self.split(both, [about.n_ff, about.n_ff], axis=1)
        return ops.add(x, self.product(ops.multiply(ops.swish(gate), up), self.weight(at + "down")))

    def input(self, name: str, shape: list[int], dtype: Any) -> Any:
        parameter = self.ops.parameter(self.ov.PartialShape(shape), dtype, name=name)
        parameter.output(0).set_names({name})
        self.parameters.append(parameter)
        return parameter

    def caches(self, layer: int) -> Pair:
        dynamic = self.ov.Type.dynamic  # the plugin decides type and shape of the cache
        return self.input(f"key_cache.{layer}", [-1] * 4, dynamic), self.input(
            f"value_cache.{layer}", [-1] * 4, dynamic
        )

    def const(self, value: Any, dtype: Any) -> Any:
        array = np.asarray(value, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self.shared:
            self.shared[key] = self.ops.constant(array)
        return self.shared[key]

    def array(self, name: str, *shape: int) -> Any:
        return self.ops.constant(self.arrays[name].reshape(shape), shared_memory=True)

    def weight(self, name: str) -> Any:
        """The [N, K] of three arrays, in the form that the plugin keeps compressed."""
        ops, f16, f32 = self.ops, self.ov.Type.f16, self.ov.Type.f32
        n, k = self.arrays[f"{name}.codes"].shape
        groups = (n, k // GROUP)
        values = ops.convert(self.array(f"{name}.codes", *groups, GROUP), f16)
        if f"{name}.zeros" in self.arrays:
            values = ops.subtract(values, ops.convert(self.array(f"{name}.zeros", *groups, 1), f16))
        values = ops.multiply(values, self.array(f"{name}.scales", *groups, 1))
        return ops.convert(ops.reshape(values, self.const([n, k], np.int64), special_zero=False), f32)

    def product(self, x: Any, weight: Any) -> Any:
        return self.ops.matmul(x, weight, transpose_a=False, transpose_b=True)

    def split(self, x: Any, sizes: list[int], axis: int) -> list[Any]:
        parts: list[Any] = self.ops.variadic_split(x, self.const(axis, np.int64), self.const(sizes, np.int64)).outputs()
        return parts

    def norm(self, x: Any, name: str) -> Any:
        """RMS norm over the last axis, in the form that becomes one operation of the plugin."""
        ops = self.ops
        mean = ops.reduce_mean(ops.power(x, self.const(2, np.float32)), self.const([-1], np.int64), keep_dims=True)
        root = ops.sqrt(ops.add(mean, self.const(self.about.rms_eps, np.float32)))
        scaled = ops.multiply(x, ops.divide(self.const(1, np.float32), root))
        return ops.multiply(scaled, self.array(name, *[1] * (x.get_output_partial_shape(0).rank.get_length() - 1), -1))

    def cos_sin(self, positions: Any) -> Pair:
        """Each [T, 1, 1, D], both halves alike, computed in float32 whatever the precision of the rest."""
        ops = self.ops
        column = ops.unsqueeze(ops.convert(positions, self.ov.Type.f32), self.const(1, np.int64))
        angles = ops.multiply(column, self.array("inv_freq", 1, -1))
        shape = self.const([-1, 1, 1, self.about.head_dim], np.int64)
        both = ops.reshape(ops.concat([angles, angles], axis=1), shape, special_zero=False)
        return ops.cos(both), ops.sin(both)

    def rotated(self, x: Any, heads: int, norm: str, cos_sin: Pair) -> Any:
        """Heads of x [T, H * D], normalised where the model does that, rotated: element i with i + D/2."""
        ops, half = self.ops, self.about.head_dim // 2
        x = ops.reshape(x, self.const([0, heads, 1, 2 * half], np.int64), special_zero=True)
        if self.about.qk_norm:
            x = self.norm(x, norm)
        first, second = self.split(x, [half, half], axis=3)
        turned = ops.concat([ops.multiply(second, self.const([[[[-1]]]], np.float32)), first], axis=-1)
        x = ops.add(ops.multiply(x, cos_sin[0]), ops.multiply(turned, cos_sin[1]))
        return ops.reshape(x, self.const([0, heads * 2 * half], np.int64), special_zero=True)

    def attention(self, qkv_caches: list[Any], paging: Mapping[str, Any]) -> Any:
        """[T, H * D]. The inputs after the scale switch off what is not used: windows, ALiBi, rotation, scores."""
        about = self.about
        none_f, none_i = self.const([], np.float32), self.const([], np.int32)
        zero, flat = self.const(0, np.int32), self.const(np.zeros((0, 0, 0, 0)), np.float32)
        scale = self.const(about.head_dim**-0.5, np.float32)
        inputs = [*qkv_caches, *(paging[name] for name in _PAGING), scale, zero, none_f, paging["max_context_len"]]
        inputs += [none_i, none_i, none_i, none_f, none_f, zero, zero, flat, zero, none_i, none_i, none_i, none_i]
        inputs += [self.const([], np.uint8), none_i]
        node = _paged_attention()([each if isinstance(each, self.ov.Output) else each.output(0) for each in inputs])
        for key, value in (("k_head_size", about.head_dim), ("v_head_size", about.head_dim)):
            node.get_rt_info()[key] = value
        for key in ("num_k_heads", "num_v_heads"):
            node.get_rt_info()[key] = about.n_kv_heads
        return node.output(0)


_PAGING = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")


def _paged_attention() -> Callable[[list[Any]], Any]:
    try:
        from openvino._pyopenvino.op import _PagedAttentionExtension
    except ImportError as error:
        raise BackendError(
            "this OpenVINO has no paged attention for Python", hint="install openvino 2026.4 or another release with it"
        ) from error
    node: Callable[[list[Any]], Any] = _PagedAttentionExtension
    return node


def paged_from_ir(core: Any, xml: Path) -> Any:
    """Read a stateful OpenVINO model (as the hub and optimum-intel have them) and page its attention.

    Raises `ModelFormatError` when it cannot be read, `UnsupportedModelError` when it is no decoder of the known form.
    """
    from openvino import _offline_transformations as transformations
    from openvino import opset13 as ops

    try:
        model = core.read_model(str(xml))
    except RuntimeError as error:
        raise ModelFormatError(f"{xml} cannot be read", value=str(xml), hint="fetch the model again") from error
    try:
        transformations.paged_attention_transformation(model)
    except RuntimeError as error:
        raise UnsupportedModelError(
            f"{xml}: its attention cannot be paged", value=str(xml), hint="it must be a stateful text decoder"
        ) from error
    projection = _last_product(model, xml)
    rows = ops.parameter([-1], np.int32, name="rows")
    rows.output(0).set_names({"rows"})
    wanted = ops.gather(projection.input_value(0), rows, ops.constant(np.int32(0)))
    projection.input(0).replace_source_output(wanted.output(0))
    model.add_parameters([rows])
    for name in ("input_ids", "position_ids"):
        _take_int32(model, name)
    model.validate_nodes_and_infer_types()
    return model


def _take_int32(model: Any, name: str) -> None:
    """Let an int64 input take int32, as all others do."""
    from openvino import opset13 as ops

    old = model.input(name).node
    new = ops.parameter([-1], np.int32, name=name)
    wide = ops.convert(new, old.get_element_type())
    for reader in old.output(0).get_target_inputs():
        reader.replace_source_output(wide.output(0))
    model.remove_parameter(old)
    new.output(0).set_names({name})
    model.add_parameters([new])


def _last_product(model: Any, xml: Path) -> Any:
    """The product that gives the logits: from the output back along first inputs."""
    node = model.output("logits").node if len(model.outputs) > 1 else model.outputs[0].node
    while node.get_type_name() != "MatMul":
        if node.get_input_size() == 0:
            raise UnsupportedModelError(f"{xml} has no projection to the vocabulary", value=str(xml))
        node = node.input_value(0).node
    return node
