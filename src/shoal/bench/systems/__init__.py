"""Systems that can be measured, by name."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from shoal.errors import BenchmarkError


@dataclass(frozen=True, slots=True)
class Kind:
    """Where a system's class is, what it is called in tables, and whether it can tell logits."""

    module: str
    name: str
    label: str
    tells_logits: bool = True


KINDS = {
    "shoal": Kind("ours", "Shoal", "shoal"),
    "shoal-http": Kind("http", "ShoalServer", "shoal, over HTTP", tells_logits=False),
    "shoal-agents": Kind("agents", "Agents", "shoal", tells_logits=False),
    "llama": Kind("llama", "LlamaCpp", "llama.cpp"),
    "llama-server": Kind("http", "LlamaServer", "llama-server", tells_logits=False),
    "genai": Kind("genai", "GenAI", "OpenVINO GenAI"),
    "mlx": Kind("mlx", "MlxLm", "mlx-lm"),
    "url": Kind("http", "Server", "server", tells_logits=False),
}


def system_class(kind: str) -> Any:
    """The class of a kind of system; its module imports no library before one is made."""
    return getattr(importlib.import_module(f"shoal.bench.systems.{KINDS[kind].module}"), KINDS[kind].name)


BITS = {"": "same file", "q8": "8 bits (Q8_0)"}
"""Which weights a peer runs: the very file, or the same model requantised to 8 bits by llama.cpp."""
DEFAULT_PEERS = ("llama", "llama@q8", "genai", "genai@q8", "llama-server", "mlx")


@dataclass(frozen=True, slots=True)
class Named:
    """A system as the command line names it: `KIND`, `KIND@q8`, `shoal@openvino`, or `url=http://...`."""

    key: str
    kind: str
    flavour: str = ""
    url: str = ""

    @property
    def label(self) -> str:
        """What it is called in tables."""
        base = KINDS[self.kind].label
        if self.kind == "shoal":
            return f"{base} on {self.flavour}" if self.flavour else base
        if self.kind == "url":
            return f"{base} at {self.url}"
        return f"{base}, {BITS[self.flavour]}" if not self.kind.startswith("shoal-") else base


def named(text: str) -> Named:
    """Parse the name of a system. BenchmarkError says which are known."""
    if text.startswith("url="):
        return Named(text, "url", url=text.removeprefix("url=").rstrip("/"))
    kind, _, flavour = text.partition("@")
    flavours = ("", "native", "openvino") if kind == "shoal" else ("", "q8")
    if kind not in KINDS or flavour not in flavours or kind == "url":
        known = "llama, genai, llama-server, mlx, each with @q8, shoal@openvino, or url=http://HOST/v1"
        raise BenchmarkError(f"no system {text!r}", value=text, limit=known, hint=f"known: {known}")
    return Named(text, kind, flavour)
