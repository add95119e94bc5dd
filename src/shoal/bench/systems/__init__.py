"""Systems that can be measured, by name."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from shoal.errors import BenchmarkError
from shoal.runners.registry import RUNNERS


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of system: where its class is, and all else that is said of it anywhere.

    `label` is what tables call it, `flavours` what may stand behind its name after an @, `peer` whether it takes part
    unasked where it is installed. `tells_logits`: fidelity is measured.
    """

    module: str
    name: str
    label: str
    flavours: tuple[str, ...] = ()
    peer: bool = False
    tells_logits: bool = True


FILES = {
    "q8": "Q8_0",
    "q4_0": "Q4_0",
    "q4_1": "Q4_1",
    "q4_k_m": "Q4_K_M",
    "q5_k_m": "Q5_K_M",
    "q6_k": "Q6_K",
}
"""Other files of the model under measurement, made from it: what stands behind an @, and the format of the file."""
KINDS = {
    "shoal": Kind("ours", "Shoal", "shoal", (*RUNNERS, *FILES)),
    "shoal-http": Kind("http", "ShoalServer", "shoal, over HTTP", tells_logits=False),
    "shoal-agents": Kind("agents", "Agents", "shoal", tells_logits=False),
    "langgraph": Kind("framework", "FrameworkOnShoal", "shoal", tells_logits=False),
    "langgraph-llama": Kind("framework", "FrameworkOnLlama", "llama-server", tells_logits=False),
    "llama": Kind("llama", "LlamaCpp", "llama.cpp", tuple(FILES), peer=True),
    "ik": Kind("ik", "IkLlamaCpp", "ik_llama.cpp", peer=True),
    "llama-server": Kind("http", "LlamaServer", "llama-server", ("q8",), peer=True, tells_logits=False),
    "genai": Kind("genai", "GenAI", "OpenVINO GenAI", ("q8",), peer=True),
    "mlx": Kind("mlx", "MlxLm", "mlx-lm", peer=True),
    "url": Kind("http", "AnyServer", "server", tells_logits=False),
}
"""A peer more is a module of this folder and a line here."""


def system_class(kind: str) -> Any:
    """The class of a kind of system; its module imports no library before one is made."""
    return getattr(importlib.import_module(f"shoal.bench.systems.{KINDS[kind].module}"), KINDS[kind].name)


BITS = {"": "same file", **FILES, "q8": "8 bits (Q8_0)"}
"""Which weights a peer runs: the very file, or the same model requantised."""
DEFAULT_PEERS = tuple(
    key for kind, told in KINDS.items() if told.peer for key in (kind, *[f"{kind}@q8"] * ("q8" in told.flavours))
)


@dataclass(frozen=True, slots=True)
class Named:
    """A system as the command line names it: `KIND`, `KIND@q8`, `shoal@openvino`, `shoal@q4_k_m`, or `url=http://...`."""

    key: str
    kind: str
    flavour: str = ""
    url: str = ""

    @property
    def other_file(self) -> bool:
        """Whether it runs other weights than the file under measurement."""
        return self.flavour in FILES

    @property
    def label(self) -> str:
        """What it is called in tables."""
        base = KINDS[self.kind].label
        if self.kind == "shoal":
            if self.other_file:
                return f"{base}, {BITS[self.flavour]}"
            return f"{base} on {self.flavour}" if self.flavour else base
        if self.kind == "url":
            return f"{base} at {self.url}"
        return base if self.kind.startswith(("shoal-", "langgraph")) else f"{base}, {BITS[self.flavour]}"


def named(text: str) -> Named:
    """Parse the name of a system. BenchmarkError says which are known."""
    if text.startswith("url="):
        return Named(text, "url", url=text.removeprefix("url=").rstrip("/"))
    kind, _, flavour = text.partition("@")
    if kind not in KINDS or kind == "url" or flavour not in ("", *KINDS[kind].flavours):
        known = [f"{k}@{flavour}" for k in KINDS for flavour in KINDS[k].flavours]
        told = f"{', '.join(k for k in KINDS if k != 'url')}, {', '.join(known)}, or url=http://HOST/v1"
        raise BenchmarkError(f"no system {text!r}", value=text, limit=told, hint=f"known: {told}")
    return Named(text, kind, flavour)
