"""Settings of an engine, with the defaults that the command line shows too. Nothing is read that is not here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, TypedDict, get_args

from shoal.checks import is_number, is_whole
from shoal.errors import ConfigError
from shoal.names import did_you_mean

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_bytes(value: object, name: str) -> int:
    """Bytes from a number or a text such as "512MiB"; ConfigError names the setting that has another form."""
    if is_whole(value, 1):
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value) if isinstance(value, str) else None
    if found is not None and found[2].lower() in _UNITS:
        size = int(float(found[1]) * _UNITS[found[2].lower()])
        if size > 0:
            return size
    raise ConfigError(
        f"{name} is {value!r}", value=value, hint='give bytes above 0, as a number or like "512MiB" or "2GB"'
    )


Precision: TypeAlias = Literal["auto", "bf16", "f32", "q8_0", "q4_1", "q4_0"]


class Settings(TypedDict, total=False):
    """The fields of `EngineConfig` as keyword arguments, for `Engine.load`."""

    max_batch: int
    kv_memory: int | str
    memory: int | str | None
    prefix_memory: int | str | None
    prefix_sharing: bool
    kv_host: int | str | None
    kv_cache: int | str | None
    watch_memory: bool
    speculation: bool
    max_step_tokens: int
    max_stall_ms: float
    max_queue: int
    max_queue_tokens: int
    decode_chunk: int
    ageing_s: float
    watchdog_s: float
    threads: int | None
    pin_threads: bool
    precision: Precision
    kv_precision: Literal["auto", "bf16", "u8"]
    runner: str
    runner_options: Mapping[str, int | float | str | bool]
    seed: int | None
    record: str | None
    power: bool | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine runs. Checked when built; raises `ConfigError`.

    max_batch: sequences that decode together. kv_memory: bytes of KV, cached prefixes included. memory: bytes of
    weights, KV and the transient of a step together; KV shrinks to fit (None: only kv_memory counts).
    prefix_memory: bytes of KV kept for prefixes that nobody uses at the moment (None: whatever is free).
    kv_host: bytes of KV kept in host memory beside that. kv_cache: bytes of KV kept on disk, below SHOAL_HOME, for
    later processes too; "auto" is a modest share of the disk where the runner can, and nothing where it cannot. Both
    are off where None. watch_memory: where the machine is short of memory, give up KV that nobody uses, then make class
    low wait, then refuse new requests (`docs/memory.md`).
    speculation: try tokens that are likely to come, where the model's runner keeps bits and where it pays; what is
    written stays the same (`docs/speculation.md`).
    max_step_tokens: the most tokens of one forward pass. max_stall_ms: the longest a running stream may wait for
    its next token because another prompt is being computed. decode_chunk: greedy tokens chained on the device
    where the runner can (1: strict streaming). max_queue: requests that may wait; max_queue_tokens: tokens of prompts
    that may wait, beyond what fits the KV memory. ageing_s: waiting this long lifts a request by one priority class.
    watchdog_s: a forward pass that takes longer is taken for hung. threads: of the runner (None: all cores).
    pin_threads: keep each on one core; for a machine, or an affinity mask, that nothing else uses.
    precision: "auto", weights as the files have them; "bf16" or "f32", the numbers that a runner computes with; "q8_0",
    "q4_1" or "q4_0", matrices of more bits a weight are quantised to this when they are loaded. A runner refuses what
    it has not (`shoal doctor` says what it has). kv_precision: of the KV, "auto" (bf16 on the native runner), "bf16" or
    "u8" (8 bits, half the memory; the native runner only). seed: where requests without one get theirs from (None: from
    the system). runner: which backend ("auto": the first that takes the model and honours what is set here).
    runner_options: settings that only one runner reads, by name (its module in `runners/` says which). record: a file
    to log arrivals, plans and samples to, for `shoal replay`. power: slow down, defer and refuse by this machine's heat
    and battery: true for the usual `shoal.power.PowerPolicy`, or fields of one, such as `{"joules": 600}`.
    """

    max_batch: int = 8
    kv_memory: int | str = "512MiB"
    memory: int | str | None = None
    prefix_memory: int | str | None = None
    prefix_sharing: bool = True
    kv_host: int | str | None = None
    kv_cache: int | str | None = None
    watch_memory: bool = False
    speculation: bool = True
    max_step_tokens: int = 512
    max_stall_ms: float = 150.0
    max_queue: int = 1024
    max_queue_tokens: int = 2**20
    decode_chunk: int = 1
    ageing_s: float = 10.0
    watchdog_s: float = 120.0
    threads: int | None = None
    pin_threads: bool = False
    precision: Precision = "auto"
    kv_precision: Literal["auto", "bf16", "u8"] = "auto"
    runner: str = "auto"
    runner_options: Mapping[str, int | float | str | bool] = field(default_factory=dict)
    seed: int | None = None
    record: str | None = None
    power: bool | Mapping[str, Any] = False

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_batch", 1, 1024),
            ("max_step_tokens", 16, 65536),
            ("max_queue", 1, 10**6),
            ("max_queue_tokens", 0, 2**40),
            ("decode_chunk", 1, 64),
            ("threads", 1, 1024),
            ("seed", 0, 2**63 - 1),
        ):
            value = getattr(self, name)
            if value is None and name in ("threads", "seed"):
                continue
            if not is_whole(value, low, high):
                raise _out_of_range(name, value, f"a whole number from {low} to {high}")
        for name in ("max_stall_ms", "ageing_s", "watchdog_s"):
            value = getattr(self, name)
            if not is_number(value) or value <= 0:
                raise _out_of_range(name, value, "a number above 0")
        for name in ("kv_memory", "memory", "prefix_memory", "kv_host", "kv_cache"):
            value = getattr(self, name)
            if value is not None and (name, value) != ("kv_cache", "auto"):
                object.__setattr__(self, name, parse_bytes(value, name))
        if self.precision not in get_args(Precision):
            raise _out_of_range("precision", self.precision, f"one of {', '.join(get_args(Precision))}")
        if self.kv_precision not in ("auto", "bf16", "u8"):
            raise _out_of_range("kv_precision", self.kv_precision, "auto, bf16 or u8")
        if not isinstance(self.runner_options, Mapping) or not all(isinstance(k, str) for k in self.runner_options):
            raise _out_of_range("runner_options", self.runner_options, "names of options with their values")
        if not isinstance(self.power, bool | Mapping):
            raise _out_of_range("power", self.power, "true, false, or fields of a power policy")
        for name in ("watch_memory", "prefix_sharing", "speculation", "pin_threads"):
            if not isinstance(getattr(self, name), bool):
                raise _out_of_range(name, getattr(self, name), "true or false")
        if self.max_batch > self.max_step_tokens:
            raise _out_of_range("max_batch", self.max_batch, f"at most max_step_tokens ({self.max_step_tokens})")

    @classmethod
    def of(cls, **settings: Any) -> EngineConfig:
        """A config from keyword settings; an unknown one is a ConfigError that names the nearest known."""
        known = [f.name for f in fields(cls)]
        for name in settings:
            if name not in known:
                hint = did_you_mean(name, known)
                raise ConfigError(f"unknown setting {name!r}", value=name, limit=known, hint=hint)
        return cls(**settings)

    def bytes_of(self, name: str) -> int | None:
        """A memory setting in bytes (they are parsed when the config is built), or None where none is set."""
        value = getattr(self, name)
        assert value is None or isinstance(value, int)
        return value


def _out_of_range(name: str, value: object, limit: str) -> ConfigError:
    return ConfigError(f"{name} is {value!r}", value=value, limit=limit, hint=f"it must be {limit}")
