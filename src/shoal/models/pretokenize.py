"""Pre-tokenizers by their GGUF name: how text is cut into words before byte pairs are merged.

Names and their grouping follow llama.cpp; the patterns are those of the models' own `tokenizer.json` files. Like
llama.cpp, and unlike Qwen's `tokenizer.json`, nothing is normalised to NFC first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, pre_tokenizers

from shoal.errors import UnsupportedModelError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Patterns applied one after the other, each cutting the pieces of the one before; what none matches stays.

    `ignore_merges`: a whole word that is a token is that token, whatever the merges say. `add_bos` is the default
    where the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The pre-tokenizer of the `tokenizers` library, byte alphabet included."""
        splits: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns
        ]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_RULES: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2 phi-2 gigachat mpt olmo jais": PreTokenizer((_GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b": PreTokenizer((r"\p{N}", _GPT2)),
    "llama-bpe llama3 llama-v3 falcon3": PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    "dbrx smaug-bpe": PreTokenizer((_LLAMA3,)),
    "qwen2 deepseek-r1-qwen megrez stablelm2": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_QWEN35,)),
}
_BY_NAME = {name: rule for names, rule in _RULES.items() for name in names.split()}


def pre_tokenizer(name: object, path: Path) -> PreTokenizer:
    """The rule called `name` in `tokenizer.ggml.pre` of the file at `path`.

    Raises `UnsupportedModelError` for any other: guessing would give plausible, subtly wrong ids.
    """
    rule = _BY_NAME.get(name) if isinstance(name, str) else None
    if rule is None:
        raise UnsupportedModelError(
            f"{path}: pre-tokenizer {name!r} is not known",
            value=name,
            limit=sorted(_BY_NAME),
            hint="use a model with one of " + ", ".join(sorted(_BY_NAME)),
        )
    return rule
