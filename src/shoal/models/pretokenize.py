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
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # what English leaves of a word
_LLAMA3 = (
    _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+")
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _by_case(upper: str, lower: str, *, short: str, digits: str) -> str:
    """Words cut where a small letter is followed by a capital one, as GPT-4o's; `short` may end each."""
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{short}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{short}|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_TEKKEN = _by_case(f"[{_UPPER}]", f"[{_LOWER}]", short="", digits=r"\p{N}")
_GPT4O = _by_case(f"[{_UPPER}]", f"[{_LOWER}]", short=f"{_SHORT}?", digits=r"\p{N}{1,3}")
_KIMI = r"[\p{Han}]+|" + _by_case(
    f"[{_UPPER}&&[^\\p{{Han}}]]", f"[{_LOWER}&&[^\\p{{Han}}]]", short=f"{_SHORT}?", digits=r"\p{N}{1,3}"
).replace(r"[\r\n/]*", r"[\r\n]*")

_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_ASCII_MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK3 = (
    _ASCII_MARKS + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


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
    "gpt-2 phi-2 gigachat mpt olmo jais exaone4 trillion granite-docling a.x-4.0 mellum jina-es jina-de jina-v2-es "
    "jina-v2-de modern-bert jina-v1-en jina-v2-code roberta-bpe": PreTokenizer((_GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": PreTokenizer((r"\p{N}", _GPT2)),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": PreTokenizer(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "glm4 glm5": PreTokenizer((_LLAMA3,), ignore_merges=True),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")), ignore_merges=True),
    "qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan solar-open grok-2 kormo f2llmv2": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_QWEN35,)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)),
    "seed-coder": PreTokenizer((_QWEN2.replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+"),)),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer((_QWEN2.replace(r"\s*[\r\n]+", r"\s*[\r\n]"),)),
    "exaone-moe": PreTokenizer(
        (
            _QWEN2.replace(r"?\p{L}+", r"?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+")
            .replace(r"\s*[\r\n]+", r"\s*[\r\n]")
            .replace(r"[\r\n]*", r"[\r\n/]?"),
        )
    ),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((_GPT4O,)),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": PreTokenizer((r"\p{N}{1,3}", _KANA, _DEEPSEEK3)),
    "spark2_5": PreTokenizer(
        (r"\p{N}{1,3}", _KANA, _DEEPSEEK3.replace(r"[\r\n]*|\s*[\r\n]+", r"|[\r\n]"), r"\p{N}"),
    ),
    "poro-chat bloom gpt3-finnish": PreTokenizer((_WORDS,)),
    "viking": PreTokenizer((_WORDS, r"\p{N}")),
}
_BY_NAME = {name: rule for names, rule in _RULES.items() for name in names.split()}


def pre_tokenizer_names() -> list[str]:
    """All names that are known."""
    return sorted(_BY_NAME)


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
