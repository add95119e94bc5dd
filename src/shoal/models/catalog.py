"""Small models that are worth a try, by hub name: a list made by hand, for whoever has none in mind.

Nobody asks the hub here, so that it works offline: sizes are rounded, and a repository may have changed since `DATE`.
Any other GGUF or safetensors repository of a family that is known can be pulled by its name just as well.
"""

from __future__ import annotations

from dataclasses import dataclass

DATE = "2026-11-30"


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One model: what `shoal models pull` takes, its size in bytes (rounded), and the licence of its weights."""

    name: str
    family: str
    bytes: int
    license: str


def _entry(name: str, family: str, megabytes: int, license_: str) -> CatalogEntry:
    return CatalogEntry(name, family, megabytes * 1_000_000, license_)


_LLAMA, _GEMMA, _LFM = "Llama 3.2 Community License", "Gemma Terms of Use", "LFM Open License 1.0"

CATALOG = (
    _entry("smollm2-135m", "llama", 98, "Apache-2.0"),
    _entry("ggml-org/gemma-3-270m-it-GGUF:Q8_0", "gemma3", 292, _GEMMA),
    _entry("Qwen/Qwen2.5-0.5B-Instruct-GGUF:q4_k_m", "qwen2", 491, "Apache-2.0"),
    _entry("Qwen/Qwen3-0.6B-GGUF:Q8_0", "qwen3", 639, "Apache-2.0"),
    _entry("LiquidAI/LFM2-1.2B-GGUF:Q4_K_M", "lfm2", 731, _LFM),
    _entry("ggml-org/gemma-3-1b-it-GGUF:Q4_K_M", "gemma3", 806, _GEMMA),
    _entry("bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M", "llama", 808, _LLAMA),
    _entry("HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF:q4_k_m", "llama", 1060, "Apache-2.0"),
    _entry("Qwen/Qwen3-1.7B-GGUF:Q8_0", "qwen3", 1830, "Apache-2.0"),
    _entry("ggml-org/SmolLM3-3B-GGUF:Q4_K_M", "smollm3", 1920, "Apache-2.0"),
    _entry("bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M", "llama", 2020, _LLAMA),
    _entry("microsoft/Phi-3-mini-4k-instruct-gguf:q4", "phi3", 2390, "MIT"),
    _entry("ggml-org/gemma-3-4b-it-GGUF:Q4_K_M", "gemma3", 2490, _GEMMA),
    _entry("Qwen/Qwen3-4B-GGUF:Q4_K_M", "qwen3", 2500, "Apache-2.0"),
    _entry("Qwen/Qwen3-8B-GGUF:Q4_K_M", "qwen3", 5030, "Apache-2.0"),
    _entry("ggml-org/gpt-oss-20b-GGUF", "gpt-oss", 12100, "Apache-2.0"),
    _entry("Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M", "qwen3moe", 18600, "Apache-2.0"),
)


def search(words: str) -> list[CatalogEntry]:
    """The entries that have every word of `words` in name, family or licence, the smallest first; all for ""."""
    wanted = words.lower().split()
    return [
        entry
        for entry in sorted(CATALOG, key=lambda entry: entry.bytes)
        if all(word in f"{entry.name} {entry.family} {entry.license}".lower() for word in wanted)
    ]
