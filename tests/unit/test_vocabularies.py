"""Each kind of vocabulary from GGUF metadata, small ones; real ones are checked by `scripts/check_tokenizers.py`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ModelFormatError
from shoal.models.merges import SPACE, Merges
from shoal.models.pretokenize import pre_tokenizer
from shoal.models.tokenizer import Tokenizer
from shoal.models.vocabulary import tokenizer_from_metadata
from tests.unit.test_tokenizer import gguf

HEX = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["a", "b", SPACE, "ab", f"{SPACE}a", f"{SPACE}ab", "ba", "aa", SPACE * 2, f"b{SPACE}a"]


def kind(model: str, tokens: list[str], types: list[int], **changes: Any) -> Tokenizer:
    values = {"model": model, "tokens": tuple(tokens), "token_type": np.array(types, np.int32), "merges": None}
    ids = {"bos_token_id": None, "eos_token_id": None}
    return tokenizer_from_metadata(gguf(**values, **ids, **changes), Path("toy.gguf"))


def llama(**changes: Any) -> Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", *HEX, *PIECES, "<tag>"]
    scores = np.array([0.0] * 259 + [-float(i // 2) for i in range(len(PIECES))] + [-1000.0], np.float32)
    return kind("llama", tokens, [2, 3, 3] + [6] * 256 + [1] * len(PIECES) + [4], **{"scores": scores, **changes})


def spelt(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_bytes(i, special=True).decode("latin-1") for i in ids]


def test_sentencepiece() -> None:
    tokenizer = llama()
    assert tokenizer.encode("ab", add_special=True) == [1, tokenizer.token_id(f"{SPACE}ab")]
    assert spelt(tokenizer, tokenizer.encode("ab  a\u00e9", add_special=False)) == [" ab", " ", " a", "\xc3", "\xa9"]
    assert tokenizer.decode(tokenizer.encode("ab  a\u00e9\n", add_special=True)) == "ab  a\u00e9\n"
    # After a special token the space comes again; one that spells itself is found either way.
    assert spelt(tokenizer, tokenizer.encode("a</s>a<tag>b", add_special=False)) == [
        " a",
        "</s>",
        " a",
        "<tag>",
        " ",
        "b",
    ]
    unparsed = tokenizer.encode("</s><tag>", add_special=False, parse_special=False)
    assert spelt(tokenizer, unparsed) == [" ", "<", "/", "s", ">", "<tag>"]
    assert tokenizer.bos_id == 1
    assert tokenizer.eos_ids == {2}


def test_sentencepiece_without_the_space() -> None:
    tokenizer = llama(add_space_prefix=False)
    assert spelt(tokenizer, tokenizer.encode("ab a", add_special=False)) == ["ab", " a"]
    assert tokenizer.decode(tokenizer.encode(" ab", add_special=False)) == " ab"


def test_every_byte_alone() -> None:
    tokenizer = llama()
    for character in map(chr, (*range(0x20, 0x250), 0xFFFD, 0x1F600)):
        ids = tokenizer.encode(character, add_special=False)
        assert b"".join(map(tokenizer.token_bytes, ids)) == b" " + character.encode()


@given(st.text("ab \u00e9\n", min_size=1, max_size=24))
def test_sentencepiece_is_exact(text: str) -> None:
    """As the rule says it: of all neighbours that make a token, join those of the best score, the leftmost first."""
    tokenizer = llama()
    parts = list(SPACE + text.replace(" ", SPACE))
    scores = {piece: -(i // 2) for i, piece in enumerate(PIECES)}
    while joins := [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]:
        _, at = min(joins)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    expected = b"".join(part.replace(SPACE, " ").encode() for part in parts)
    ids = tokenizer.encode(text, add_special=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == expected
    assert [i for i in ids if i >= 259] == [tokenizer.token_id(part) for part in parts if part in scores]
    assert tokenizer.decode(ids) == text


def test_merges_of_pairs_and_runs_of_newlines() -> None:
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *HEX, "a", "b", "ab", SPACE, f"{SPACE}ab", "\n", "\n\n", "\n\n\n"]
    merges = ("a b", f"{SPACE} ab")
    types = [3] * 4 + [6] * 256 + [1] * 8
    changes = {"unknown_token_id": 3}
    metadata = gguf(
        model="gemma4", tokens=tuple(tokens), token_type=np.array(types, np.int32), merges=merges, **changes
    )
    tokenizer = tokenizer_from_metadata(metadata, Path("toy.gguf"))
    assert spelt(tokenizer, tokenizer.encode("ab ab\n\n\nb", add_special=False)) == ["ab", " ab", "\n\n\n", "b"]
    # A run that is no token is not merged: the file has no merges of newlines.
    assert spelt(tokenizer, tokenizer.encode("\n" * 4, add_special=False)) == ["\n"] * 4
    assert tokenizer.add_bos
    assert tokenizer.decode(tokenizer.encode(" a\u00e9", add_special=False)) == " a\u00e9"


def test_words_are_cut_only_where_no_token_crosses() -> None:
    ids = {"a": 0, SPACE: 1, f"a{SPACE}": 2, "b": 3, f"{SPACE}b": 4}
    merges = Merges(ids, {f"a{SPACE}": 0, f"{SPACE}b": 1}, separator="", bytes_=[None] * 256, unknown=9)
    assert merges.encode("a b", first=True) == [2, 3]
    assert merges.encode("b b", first=True) == [3, 4]
    assert merges.encode("\u00e9", first=True) == [9, 9]


def test_a_long_text_of_one_word_takes_no_square_of_time() -> None:
    assert len(llama().encode("ab" * 100_000, add_special=False)) == 100_000


def test_unigram() -> None:
    tokens = ["<pad>", "</s>", "<unk>", f"{SPACE}ab", "c", SPACE, "<s>", "s", "<", ">"]
    scores = np.array([0, 0, 0, -1, -2, -3, 0, -4, -4, -4], np.float32)
    changes = {"scores": scores, "remove_extra_whitespaces": True}
    tokenizer = kind("t5", tokens, [3, 3, 2, 1, 1, 1, 3, 1, 1, 1], **changes)
    assert tokenizer.encode("  ab  c ", add_special=True) == [3, 5, 4, 1]
    assert tokenizer.encode("<s>c", add_special=False) == [6, 5, 4]
    assert tokenizer.encode("<s>", add_special=False, parse_special=False) == [5, 8, 7, 9]  # its score is the best
    assert tokenizer.encode("c\u00e9\u00e8c", add_special=False) == [5, 4, 2, 4]
    assert tokenizer.encode("  ", add_special=False) == []


def test_word_piece() -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", f"{SPACE}ab", "cd", "ab", f"{SPACE}cd", f"{SPACE},", f"{SPACE}\u5929"]
    ids = {"unknown_token_id": 1, "cls_token_id": 2, "seperator_token_id": 3}
    metadata = gguf(
        model="bert",
        tokens=tuple(tokens),
        token_type=np.array([3] * 4 + [1] * 6, np.int32),
        merges=None,
        bos_token_id=2,
        eos_token_id=None,
        **ids,
    )
    tokenizer = tokenizer_from_metadata(metadata, Path("toy.gguf"))
    assert tokenizer.encode("ABcd, cd\u5929xy", add_special=True) == [2, 4, 5, 8, 7, 9, 1, 3]
    assert tokenizer.encode("\u00e1b", add_special=False) == [4]
    assert tokenizer.encode("abab" * 1000, add_special=False) == [4] + [6] * 1999


def test_channels_are_shown_but_never_written_by_content() -> None:
    tokens = [*gguf()["tokenizer.ggml.tokens"], "<|channel|>", "<|end|>", "<|return|>", "<|call|>"]  # type: ignore[misc]
    types = [*gguf()["tokenizer.ggml.token_type"], 3, 3, 3, 3]  # type: ignore[misc]
    tokenizer = tokenizer_from_metadata(gguf(tokens=tuple(tokens), token_type=np.array(types)), Path("toy.gguf"))
    channel, end = tokenizer.token_id("<|channel|>"), tokenizer.token_id("<|end|>")
    assert channel is not None
    assert tokenizer.token_bytes(channel) == b"<|channel|>"
    assert end not in tokenizer.eos_ids
    assert tokenizer.token_id("<|return|>") in tokenizer.eos_ids
    assert channel not in tokenizer.encode("<|channel|>", add_special=False, parse_special=False)
    assert tokenizer.encode("<|channel|>", add_special=False) == [channel]


@pytest.mark.parametrize(
    ("model", "change", "says"),
    [
        ("llama", {"scores": None}, "scores"),
        ("llama", {"scores": np.zeros(2, np.float32)}, "scores"),
        ("gemma4", {"scores": np.zeros(3, np.float32)}, "merges"),
        ("t5", {"scores": None}, "scores"),
        ("bert", {"unknown_token_id": 99}, "unknown"),
        ("t5", {"scores": np.zeros(3), "precompiled_charsmap": np.full(9, 255, np.uint8)}, "precompiled_charsmap"),
        ("t5", {"scores": np.zeros(3), "precompiled_charsmap": np.array([4, 0, 0, 0, *[9] * 4, 0])}, "precompiled_"),
    ],
)
def test_a_broken_vocabulary_is_refused(model: str, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelFormatError, match=says):
        kind(model, ["<unk>", "<s>", "</s>"], [2, 3, 3], **change)


def test_control_tokens_that_nest_without_end_are_refused() -> None:
    tokens = ["a" * n for n in range(1, 3000)]
    with pytest.raises(ModelFormatError, match="without end"):
        kind("llama", tokens, [3] * len(tokens), scores=np.zeros(len(tokens), np.float32))


CUTS = [
    ("tekken", "camelCase 12345 ok!?\n\n  end", ["camel", "Case", " ", *"12345", " ok", "!?\n\n", " ", " end"]),
    ("gpt-4o", "camelCase's 12345 ok", ["camel", "Case's", " ", "123", "45", " ok"]),
    ("glm4", "I'LL 12345", ["I", "'LL", " ", "123", "45"]),
    ("deepseek-v3", "f(x) 12345 \u6f22\u3042a", ["f", "(x", ")", " ", "123", "45", " ", "\u6f22\u3042", "a"]),
    ("deepseek-coder", "if x:\n 42", ["if", " x", ":", "\n", " ", "4", "2"]),
    ("kimi-k2", "\u6f22\u5b57Ab 1234", ["\u6f22\u5b57", "Ab", " ", "123", "4"]),
    ("falcon", "12345 a`b", ["123", "45", " a", "`", "b"]),
    ("qwen35", "ne\u0301e 12", ["ne\u0301e", " ", "1", "2"]),
    ("seed-coder", "a!\n\nb", ["a", "!", "\n\n", "b"]),
    ("bailingmoe", "a\n\n\tb", ["a", "\n\n", "\tb"]),
    ("viking", "a b1, c", ["a", " b", "1", ",", " c"]),
    ("laguna", "a!\nb", ["a", "!", "\n", "b"]),
]


@pytest.mark.parametrize(("name", "text", "pieces"), CUTS)
def test_pieces_of_more_pre_tokenizers(name: str, text: str, pieces: list[str]) -> None:
    cut = pre_tokenizer(name, Path("x")).build().pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == pieces
