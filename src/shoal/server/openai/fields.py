"""Request fields that the endpoints share. What is not declared here is refused by name; so is a wrong type."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from shoal.types import Namespace, Priority, SamplingParams

T = TypeVar("T")
Listed = Annotated[list[T], Field(fail_fast=True)]
"""A list of which the first wrong element is told: a fault for each of a million costs gigabytes."""

MAX_FIELDS = 64  # of one object that has fields of ours


def at_most(limit: int) -> BeforeValidator:
    """A check of how many entries an object or a list has, before any of them is looked at."""

    def check(given: Any) -> Any:
        if isinstance(given, dict | list) and len(given) > limit:
            told = {"count": len(given), "limit": limit}
            raise PydanticCustomError("too_many", "{count} entries are too many, the limit is {limit}", told)
        return given

    return BeforeValidator(check)


def _finite(given: dict[str, Any]) -> dict[str, Any]:
    """`given`, in which every number can be written as JSON again: it goes into answers, grammars and prompts."""
    pending: list[Any] = [given]
    while pending:
        value = pending.pop()
        if isinstance(value, float) and not math.isfinite(value):
            raise PydanticCustomError("not_finite", "{number} is no number that JSON has", {"number": str(value)})
        if isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    return given


FreeObject = Annotated[dict[str, Any], AfterValidator(_finite)]
"""An object whose fields are the caller's: a schema, arguments."""

Label = Annotated[str, Field(max_length=4096)]  # what is repeated in answers or in the log
StopString = Annotated[str, Field(min_length=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Strict(BaseModel):
    """Types are not coerced, unknown fields are refused, and null is the same as absent, whatever the field."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True, serialize_by_alias=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """SDKs send back what they were sent with a null for each field that they know and nobody set."""
        if isinstance(given, dict) and len(given) > MAX_FIELDS:
            told = {"count": len(given), "limit": MAX_FIELDS}
            raise PydanticCustomError("too_many", "{count} fields are too many, the limit is {limit}", told)
        if isinstance(given, dict) and None in given.values():
            return {name: value for name, value in given.items() if value is not None}
        return given


def contradiction(param: str, message: str) -> PydanticCustomError:
    """For a validator of a whole body: names the field among the others."""
    return PydanticCustomError("contradiction", "{param} {told}", {"param": param, "told": message})


class StreamOptions(Strict):
    """What a stream brings beside the text."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class StructuredOutputs(Strict):
    """vLLM's field for outputs that must follow a grammar: one of the three."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True, protected_namespaces=())

    json_: FreeObject | None = Field(None, alias="json")
    regex: str | None = None
    grammar: str | None = None


class AgentHints(Strict):
    """Dynamo's hints of an agent's harness."""

    priority: Annotated[int, Field(ge=-(2**31), le=2**31)] | None = None
    osl: Annotated[int, Field(ge=0, le=2**31)] | None = None
    latency_sensitivity: Annotated[Finite, Field(ge=0)] | None = None
    speculative_prefill: bool | None = None


class Extensions(Strict):
    """Dynamo's extensions: the hints among them."""

    agent_hints: AgentHints = AgentHints()


_RETENTION_S = {"in-memory": 600.0, "in_memory": 600.0, "24h": 86_400.0}


class Common(Strict):
    """Fields of every endpoint that generates."""

    model: Annotated[str, Field(max_length=300)] | None = None
    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    user: Label | None = None
    store: bool | None = None
    metadata: Annotated[dict[Label, Label], at_most(64)] | None = None
    safety_identifier: Label | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = None
    prompt_cache_retention: Literal["in-memory", "in_memory", "24h"] | None = None
    nvext: Extensions | None = None
    # Ours, and those that vLLM added to the API:
    task_id: Annotated[str, Field(max_length=256)] | None = None
    agent_id: Annotated[str, Field(max_length=256)] | None = None
    agent_version: Annotated[int, Field(ge=0, le=2**53)] | None = None
    private: bool | None = None
    priority: Literal["high", "normal", "low"] | None = None
    timeout: Annotated[Finite, Field(gt=0, le=86_400)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31)] | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Finite, Field(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None

    _unchecked: list[str] = PrivateAttr(default_factory=list)
    _caller: str = PrivateAttr("")
    _chat: Any = PrivateAttr(None)

    @model_validator(mode="after")
    def _whose(self) -> Self:
        if self.private and self.task_id is None and self.agent_id is None:
            raise contradiction("private", "needs a task_id or an agent_id: whose prefixes are meant?")
        if self.agent_version and not self.private and self.prompt_cache_key is None:
            raise contradiction("agent_version", "needs private or a prompt_cache_key: a new version frees the old")
        return self

    def note_unchecked(self, formats: Sequence[str]) -> None:
        """Remember formats of schemas that the answer is not held to; the answer's headers tell."""
        self._unchecked += [form for form in formats if form not in self._unchecked]

    @property
    def note(self) -> str | None:
        """What the headers of the answer tell beside it."""
        if not self._unchecked:
            return None
        shown = ", ".join(ascii(form)[:40] for form in self._unchecked[:8])
        return f"format not checked: {shown}"

    @property
    def hints(self) -> AgentHints:
        """Hints of the agent's harness; empty where there are none."""
        return AgentHints() if self.nvext is None else self.nvext.agent_hints

    @property
    def keep_s(self) -> float:
        """How long the KV of the call is evicted last, in seconds after its end."""
        return _RETENTION_S.get(self.prompt_cache_retention or "", 0.0)

    @property
    def chat_shown(self) -> Any:
        """The conversation as the template got it; None where there is none."""
        return self._chat

    def show_chat(self, chat: T) -> T:
        """Remember the conversation as the template gets it."""
        self._chat = chat
        return chat

    def priority_class(self) -> Priority:
        """`priority` where given, else what `service_tier` means, else the hints."""
        if self.priority is not None:
            return Priority(self.priority)
        hints = self.hints
        if self.service_tier is None and hints.priority:
            return Priority.HIGH if hints.priority > 0 else Priority.LOW
        if self.service_tier is None and hints.latency_sensitivity:
            return Priority.HIGH
        tiers = {"flex": Priority.LOW, "priority": Priority.HIGH, "scale": Priority.HIGH, "fast": Priority.HIGH}
        return tiers.get(self.service_tier or "auto", Priority.NORMAL)

    def namespace(self) -> Namespace:
        """Prefixes are shared only among calls with one `prompt_cache_key` and of one caller.

        With `private` also of one task and agent, and with `agent_version` of one version of them.
        """
        task, agent = self.prompt_cache_key or "", self._caller
        if self.private:  # as JSON: no two different pairs look alike
            task, agent = json.dumps([task, self.task_id]), json.dumps([agent, self.agent_id])
        return Namespace(task=task, agent=agent, version=self.agent_version or 0)

    def of_caller(self, caller: str) -> None:
        """Say whose call it is: a name of the API key."""
        self._caller = caller

    def agent(self) -> tuple[str | None, str | None]:
        """Task and agent: from their fields, the metadata, or the fields nearest to it."""
        told = self.metadata or {}
        task = told.get("task_id", self.prompt_cache_key) if self.task_id is None else self.task_id
        return task, told.get("agent_id", self.user) if self.agent_id is None else self.agent_id

    def sampling(self) -> dict[str, Any]:
        """Arguments for `SamplingParams`. Temperature is 1 unless given, as the API documents."""
        seed = None if self.seed is None else self.seed & (2**63 - 1)
        given = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "seed": None if seed == 2**63 - 1 else seed,
        }
        return {name: value for name, value in given.items() if value is not None}


class Sampled(Common):
    """Fields of chat and text completions."""

    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: StopString | Annotated[Listed[StopString], at_most(16)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Annotated[Finite, Field(ge=-100, le=100)]], at_most(10_000)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    stream_options: StreamOptions | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Listed[Annotated[int, Field(ge=0, le=2**31)]] | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise contradiction("stream_options", "needs stream to be true")
        if self.prompt_logprobs is not None and self.stream:
            raise contradiction("prompt_logprobs", "come with whole answers: leave stream out")
        return self

    def sampling(self) -> dict[str, Any]:
        """Arguments for `SamplingParams`, without limits on length."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        structure = self.structured_outputs
        given = {
            "stop": tuple(stop) if stop else None,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": {_token_id(t): bias for t, bias in self.logit_bias.items()} if self.logit_bias else None,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "stop_token_ids": tuple(self.stop_token_ids) if self.stop_token_ids else None,
            "json_schema": structure.json_ if structure else None,
            "regex": structure.regex if structure else None,
            "grammar": structure.grammar if structure else None,
        }
        return super().sampling() | {name: value for name, value in given.items() if value is not None}


def _token_id(key: str) -> int:
    from shoal.server.errors import bad_request

    if not (key.isascii() and key.isdecimal() and len(key) < 12):
        raise bad_request(f"logit_bias has the key {key[:40]!r}, which is not a token id", "logit_bias")
    return int(key)


def make_sampling(arguments: dict[str, Any]) -> SamplingParams:
    """Checked parameters; raises `InvalidRequestError`."""
    return SamplingParams(**arguments)
