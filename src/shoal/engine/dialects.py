"""How servers spell what goes beyond the OpenAI API: ours, vLLM's, SGLang's; and those that know nothing of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from shoal.types import Priority, Request

_SAMPLING = frozenset(("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"))
_SHORT_S = 600.0  # what a server of ours takes "in-memory" for
_TIERS = {Priority.HIGH: "priority", Priority.LOW: "flex"}


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a server takes beside the API's own fields.

    `sampling` are fields of `SamplingParams` that it has under the same names, `token_ids` that it tells the ids of
    tokens when asked. `structures` maps fields that constrain the output to where they stand in `structured_outputs`.
    `urgent` is what its `priority` is for class high (and the opposite for class low), 0 where it has classes of
    service instead. `salted`: what divides its prefix cache is `cache_salt`.
    """

    sampling: frozenset[str] = frozenset()
    token_ids: bool = False
    structures: dict[str, str] = field(default_factory=dict)
    own_fields: bool = False  # SGLang's: `json_schema` as text, `regex`
    urgent: int = 0
    salted: bool = False
    planned: bool = False  # takes Dynamo's hints of an agent's harness, and how long a prefix will be wanted

    def structure(self, name: str, value: Any, *, chat: bool) -> dict[str, Any] | None:
        """The fields that hold an output to a schema, expression or grammar; None where the server has none for it."""
        if name in self.structures:
            return {"structured_outputs": {self.structures[name]: value}}
        if self.own_fields and name == "regex":
            return {"regex": value}
        if self.own_fields and name == "json_schema" and not chat:
            return {"json_schema": json.dumps(value)}
        if name == "json_schema":
            schema = {"name": "answer", "schema": value, "strict": True}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
        return None

    def hints(self, request: Request) -> dict[str, Any]:
        """What a server may go by: the class of a request, whose it is, and with whom it shares prefixes."""
        told: dict[str, Any] = {}
        if self.urgent and request.priority is not Priority.NORMAL:
            told["priority"] = self.urgent if request.priority is Priority.HIGH else -self.urgent
        elif request.priority in _TIERS:
            told["service_tier"] = _TIERS[request.priority]
        space = request.namespace
        if space.task or space.agent or space.version:
            name = f"{space.task}/{space.agent}/{space.version}"
            told["prompt_cache_key"] = name
            if self.salted:
                told["cache_salt"] = name
        if request.group:
            told["user"] = request.group
        if self.planned and request.critical_path:
            told["nvext"] = {"agent_hints": {"osl": request.critical_path}}
        if self.planned and request.keep_s:
            told["prompt_cache_retention"] = "in-memory" if request.keep_s <= _SHORT_S else "24h"
        return told


_OURS = {"json_schema": "json", "regex": "regex", "grammar": "grammar"}
OPENAI = Dialect()
SHOAL = Dialect(_SAMPLING, token_ids=True, structures=_OURS, planned=True)
VLLM = Dialect(_SAMPLING, token_ids=True, structures=_OURS, urgent=-1, salted=True)
SGLANG = Dialect(_SAMPLING, own_fields=True, urgent=1, salted=True)
BY_OWNER = {"shoal": SHOAL, "vllm": VLLM, "sglang": SGLANG}
"""By who a server says owns its models."""
EXTENDED = SHOAL
"""What a server is taken for of which the caller says that it knows more than the API."""
