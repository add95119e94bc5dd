"""A safetensors directory as a `Source`: config.json's keys and the hub's tensor names under those of GGUF."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from shoal.errors import ModelFormatError
from shoal.models.decoder import StoredTensor
from shoal.models.families.family import Family, Keys, Names
from shoal.models.families.rotary import Scaling
from shoal.models.families.source import HINT, Facts
from shoal.models.safetensors import Mxfp4, SafetensorsModel, SafetensorsTensor, Stacked, Transposed

KEYS: Keys = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "expert_count": lambda c: c.get("num_experts") or c.get("num_local_experts") or c.get("n_routed_experts"),
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "activation": lambda c: c.get("mlp_hidden_act") or c.get("hidden_act"),
    "rope.freq_base": lambda c: rope_of(c, False).get("rope_theta"),
    "rope.freq_base_swa": lambda c: rope_of(c, True).get("rope_theta"),
    "rope.dimension_count": lambda c: _turned(c),
}
NAMES: Names = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{e}.gate_proj",
    "ffn_up_exps": "mlp.experts.{e}.up_proj",
    "ffn_down_exps": "mlp.experts.{e}.down_proj",
}
_EMBEDDING = re.compile(r"(.*?)(embed_tokens|embeddings|embedding)\.weight")
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


class HubSource:
    """A parsed directory, read by a family's page."""

    format = "safetensors"

    def __init__(self, model: SafetensorsModel, family: Family) -> None:
        self.model, self.where, self.tensors = model, str(model.path), len(model.tensors)
        self.family = family
        self.config: dict[str, Any] = {**family.defaults, **model.config}
        self.keys, self.names = {**KEYS, **family.keys}, {**NAMES, **family.names}
        found = [match for name in model.tensors if (match := _EMBEDDING.fullmatch(name))]
        self.prefix = min((match[1] for match in found), key=len, default="model.")
        self._read: set[str] = set()

    def value(self, key: str) -> Any:
        """See `Source`."""
        how = self.keys.get(key)
        if how is None:
            return None
        try:
            return self.config.get(how) if isinstance(how, str) else how(self.config)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ModelFormatError(
                f"{self.where}/config.json: {key} cannot be told ({error!r})", value=key, hint=HINT
            ) from error

    def tensor(self, name: str) -> StoredTensor | None:
        """See `Source`."""
        if name == "output.weight":
            return self._head()
        layer = _LAYER.fullmatch(name)
        part = name if layer is None else layer[2]
        before = self.prefix if layer is None else f"{self.prefix}layers.{layer[1]}."
        for mapped in self._mapped(part):
            found = self._found(name, part, before + mapped)
            if found is not None:
                return found
        return None

    def _mapped(self, part: str) -> list[str]:
        """The names that `part`, as "attn_q.weight", may have here."""
        stem, _, kind = part.rpartition(".")
        whole, split = self.names.get(part, ()), self.names.get(stem, ())
        names = [whole] if isinstance(whole, str) else list(whole)
        return names + [f"{each}.{kind}" for each in ([split] if isinstance(split, str) else split)]

    def _found(self, name: str, part: str, mapped: str) -> StoredTensor | None:
        if "{e}" in mapped:
            return self._experts(name, mapped)
        found = self._take(mapped)
        if found is None:
            return self._mxfp4(mapped)
        return Transposed(found.name, found) if part in self.family.transposed else found

    def unread(self) -> list[str]:
        """See `Source`."""
        return [name for name in self.model.tensors if name not in self._read]

    def scaling(self, local: bool) -> Scaling:
        """See `Source`; by the names that `transformers` has for them."""
        try:
            return _scaling(self.config, local, Facts(self))
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise ModelFormatError(
                f"{self.where}/config.json: rotary scaling cannot be told ({error!r})", value=str(error), hint=HINT
            ) from error

    def _take(self, name: str) -> SafetensorsTensor | None:
        self._read.add(name)
        return self.model.tensors.get(name)

    def _head(self) -> StoredTensor | None:
        places = ("lm_head.weight", f"{self.prefix}lm_head.weight", "language_model.lm_head.weight")
        found = [tensor for name in places if (tensor := self._take(name)) is not None]
        return None if not found or self.config.get("tie_word_embeddings", False) else found[0]

    def _experts(self, name: str, pattern: str) -> StoredTensor | None:
        if self.model.tensors.get(pattern.format(e=0)) is None:
            return None
        count = Facts(self).count("expert_count")
        if count > self.tensors:
            Facts(self).fail("expert_count", count, f"no more than {self.tensors} tensors")
        parts = [self._take(pattern.format(e=e)) for e in range(count)]
        there = tuple(part for part in parts if part is not None)
        if len(there) != count or len({(part.type, part.shape) for part in there}) != 1:
            raise ModelFormatError(
                f"{self.where}: experts of {name} are missing or unlike each other",
                value=len(there),
                limit=count,
                hint=HINT,
            )
        return Stacked(pattern, there)

    def _mxfp4(self, name: str) -> StoredTensor | None:
        blocks, scales = self._take(f"{name}_blocks"), self._take(f"{name}_scales")
        if blocks is None or scales is None:
            return None
        if blocks.shape != (*scales.shape, 16) or blocks.type != "U8" or scales.type != "U8":
            raise ModelFormatError(
                f"{self.where}: tensor {blocks.name} has shape {list(blocks.shape)}",
                value=blocks.shape,
                limit=(*scales.shape, 16),
                hint=HINT,
            )
        return Mxfp4(name, blocks, scales)


def rope_of(config: Mapping[str, Any], local: bool) -> Mapping[str, Any]:
    """What config.json says of rotary positions, under the names of its newest form; `local` for windowed layers."""
    given = config.get("rope_parameters")
    if isinstance(given, dict):
        kind = "sliding_attention" if local else "full_attention"
        chosen = given.get(kind)
        if isinstance(chosen, dict):
            return chosen
        if "rope_theta" in given or "rope_type" in given:
            return {"rope_theta": config.get("rope_theta"), **given}
    theta = config.get("rope_theta")
    if local:
        return {"rope_theta": config.get("rope_local_base_freq", theta)}
    scaling = config.get("rope_scaling")
    scaling = scaling if isinstance(scaling, dict) else {}
    return {"rope_theta": theta, **scaling, "rope_type": scaling.get("rope_type") or scaling.get("type")}


def _turned(config: Mapping[str, Any]) -> int:
    """How many elements of a head are turned."""
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    share = rope_of(config, False).get("partial_rotary_factor", config.get("partial_rotary_factor"))
    return int(head * (1.0 if share is None else share))


_SCALINGS = ("default", "mrope", "dynamic", "linear", "llama3", "proportional", "yarn", "longrope", "su")


def _scaling(config: Mapping[str, Any], local: bool, facts: Facts) -> Scaling:
    rope = rope_of(config, local)
    kind, factor = rope.get("rope_type") or "default", float(rope.get("factor") or 1.0)
    if kind not in _SCALINGS:
        facts.fail("rope_type", kind, _SCALINGS)
    context = facts.count("context_length")
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or context
    attention = rope.get("attention_factor")
    if kind == "linear":
        return Scaling("linear", factor)
    if kind == "llama3":
        return Scaling("llama3", factor, original, low=rope["low_freq_factor"], high=rope["high_freq_factor"])
    if kind == "proportional":
        turned = int(rope.get("partial_rotary_factor", 1.0) * facts.count("attention.key_length") // 2)
        return Scaling("proportional", factor, turned=turned)
    if kind == "yarn":
        return Scaling(
            "yarn",
            factor,
            original,
            _yarn_attention(rope, factor) if attention is None else attention,
            fast=rope.get("beta_fast") or 32.0,
            slow=rope.get("beta_slow") or 1.0,
            whole=rope.get("truncate", True),
        )
    if kind in ("longrope", "su"):
        stretched = context / original
        if attention is None:
            attention = 1.0 if stretched <= 1 else math.sqrt(1 + math.log(stretched) / math.log(original))
        factors = rope["long_factor" if context > original else "short_factor"]
        return Scaling("longrope", 1.0, original, attention, factors=factors)
    return Scaling()  # dynamic stretches only what lies behind the context


def _yarn_attention(rope: Mapping[str, Any], factor: float) -> float | None:
    some, every = rope.get("mscale"), rope.get("mscale_all_dim")
    if not some or not every or factor <= 1:
        return None
    grown = 0.1 * math.log(factor)
    return float((some * grown + 1) / (every * grown + 1))
