"""Tokenizers from GGUF metadata (ids against llama.cpp's) and from directories, byte-level and SentencePiece-like."""

from __future__ import annotations

import codecs
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from shoal.errors import ModelError, ModelFormatError, ModelNotFoundError, UnsupportedModelError
from shoal.models import Store, load_model_files, load_tokenizer
from shoal.models.gguf import Value
from shoal.models.pretokenize import pre_tokenizer
from shoal.models.tokenizer import Tokenizer
from shoal.models.tokenizer_json import tokenizer_from_directory
from shoal.models.vocabulary import tokenizer_from_metadata

# Ids by llama.cpp (llama-cpp-python 0.3.36) on the default model, special tokens parsed.
GOLDEN = [
    ("Hello world 123", [19556, 905, 216, 33, 34, 35]),
    (" ", [216]),
    ("   two  spaces   ", [256, 827, 216, 5600, 333]),
    (
        "P\u0159\xedli\u0161 \u017elu\u0165ou\u010dk\xfd k\u016f\u0148",
        [64, 144, 243, 6160, 1418, 20848, 18811, 139, 1374, 144, 115, 279, 30033, 91, 47546, 501, 144, 124, 144, 226],
    ),
    ("\u6211\u80fd\u541e\u4e0b\u73bb\u7483", [19805, 235, 47093, 16357, 248, 42080, 40072, 136, 178, 236, 221]),
    (
        "\U0001f469\U0001f3fd\u200d\U0001f4bb\U0001f44d\U0001f3ff\U0001f1e8\U0001f1ff",
        [
            10813,
            235,
            119,
            10813,
            233,
            138,
            321,
            231,
            10813,
            236,
            136,
            10813,
            235,
            231,
            10813,
            233,
            140,
            10813,
            225,
            118,
            10813,
            225,
            140,
        ],
    ),
    ("3.14159 1,000 \xbd \xb2", [35, 30, 33, 36, 33, 37, 41, 216, 33, 28, 32, 32, 32, 216, 16738, 216, 19133]),
    ("def f(x):\n    return x**2\n\n\n\tpass", [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 16506, 197, 5467]),
    ("\n\n\n", [16506]),
    ("\t\t  \r\n  \t", [1656, 256, 2738, 256, 197]),
    ("a\xa0b\u3000c", [81, 15442, 82, 12109, 218, 83]),
    ("I'm you're WE'LL can't\u2019s", [57, 5248, 346, 2316, 26587, 23, 16421, 416, 982, 417, 99]),
    ("<|im_start|>user\nHi<|im_end|>\n", [1, 4093, 198, 26843, 2, 198]),
    ("x<|endoftext|><|im_en|>", [104, 0, 44, 108, 306, 79, 264, 108, 46]),
    ("e\u0301 \xe9", [85, 151, 219, 26411]),
    ("$100 \u20ac5 <=> ~^|`", [20, 33, 32, 32, 24927, 37, 10204, 46, 11417, 78, 108, 80]),
    (
        "\u0661\u0662\u0663 \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
        [164, 111, 164, 112, 164, 113, 27819, 34966, 20602, 31462, 23339, 43463],
    ),
    ("\u0939\u093f\u0928\u094d\u0926\u0940", [4300, 134, 27011, 30658, 16525, 44757, 37189]),
    ("\x00\x7f\ufeff", [190, 217, 186, 136, 140]),
    ("!!!??? ... ---", [29646, 16693, 47, 4563, 21749]),
    ("https://a.io/b?c=d&e#f_g", [4687, 1742, 81, 30, 1119, 31, 82, 47, 83, 45, 84, 22, 85, 19, 86, 79, 87]),
]
BYTES = [chr(c) for c in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144))]


@pytest.fixture(scope="module")
def default() -> Tokenizer:
    try:
        Store().resolve("smollm2-135m", pull=False)
    except ModelNotFoundError:
        pytest.skip("the default model is not in the store")
    return load_tokenizer(load_model_files("smollm2-135m", pull=False))


def gguf(**changes: Any) -> dict[str, Value]:
    """Metadata with the byte alphabet, a merge, and a token of each type; `changes` are to tokenizer.ggml.*"""
    tokens = (*BYTES, "ab", "<s>", "</s>", "<|im_end|>", "<tool>", "unused", "")
    types = [1] * (len(BYTES) + 1) + [3, 3, 1, 4, 5, 1]
    values: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": np.array(types, np.int32),
        "merges": ("a b",),
        "bos_token_id": tokens.index("<s>"),
        "eos_token_id": tokens.index("</s>"),
    }
    return {f"tokenizer.ggml.{k}": v for k, v in (values | changes).items() if v is not None}


def from_gguf(metadata: dict[str, Value]) -> Tokenizer:
    return tokenizer_from_metadata(metadata, Path("toy.gguf"))


@pytest.mark.parametrize(("text", "ids"), GOLDEN)
def test_ids_are_those_of_llama_cpp(default: Tokenizer, text: str, ids: list[int]) -> None:
    assert default.encode(text, add_special=False) == ids
    assert default.decode(ids, special=True) == text
    plain = default.encode(text, add_special=False, parse_special=False)
    assert b"".join(map(default.token_bytes, plain)) == text.encode()


def test_unparsed_special_tokens_are_text(default: Tokenizer) -> None:
    ids = default.encode("<|im_start|>user\nHi<|im_end|>\n", add_special=False, parse_special=False)
    assert ids == [44, 108, 306, 79, 3738, 108, 46, 4093, 198, 26843, 44, 108, 306, 79, 486, 108, 46, 198]


def test_facts_of_the_default_model(default: Tokenizer) -> None:
    assert (default.vocab_size, default.bos_id, default.add_bos) == (49152, 1, False)
    assert default.eos_ids == {0, 2}
    assert default.special_ids == set(range(17))
    assert default.token_id("<|im_end|>") == 2
    assert default.encode("a", add_special=True) == default.encode("a", add_special=False)
    prompt = default.chat_template.render([{"role": "user", "content": "Hi"}])
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert default.encode_chat(prompt)[0] == 1


def test_tokens_without_text(default: Tokenizer) -> None:
    assert default.token_bytes(2) == b""
    assert default.token_bytes(2, special=True) == b"<|im_end|>"
    assert [default.token_bytes(i) for i in (49152, 10**12, -1)] == [b"", b"", b""]
    assert default.decode([2, 19556, 905, 2]) == "Hello world"


def test_bytes_of_split_characters(default: Tokenizer) -> None:
    ids = default.encode("👩🏽", add_special=False)
    assert len(ids) > 2
    assert b"".join(map(default.token_bytes, ids)).decode() == "👩🏽"
    assert default.decode(ids[:1]) == "\ufffd"


def test_surrogates_do_not_raise(default: Tokenizer) -> None:
    assert default.encode("\ud83d\ude00", add_special=False) == default.encode("😀", add_special=False)
    assert default.decode(default.encode("a\ud83d", add_special=False)) == "a\ufffd"


SPELT = st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs", "Cc"])  # this vocabulary lacks some bytes


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    text=st.text(SPELT, max_size=40),
    pieces=st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", " ", "\u0159", "👩🏽"])),
)
def test_content_comes_back_and_streams_without_replacement(default: Tokenizer, text: str, pieces: list[str]) -> None:
    """Whatever a message says: no control token of it, its very text back, and no broken character on the way."""
    content = text + "".join(pieces)
    benign = default.encode_chat(default.chat_template.render([{"role": "user", "content": "x"}]))
    ids = default.encode_chat(default.chat_template.render([{"role": "user", "content": content}]))
    control = [token for token in ids if token in default.special_ids]
    assert control == [token for token in benign if token in default.special_ids]
    assert f"user\n{content}\n" in default.decode(ids)
    decoder = codecs.getincrementaldecoder("utf-8")()  # strict: raises where a stream would show U+FFFD
    assert f"user\n{content}\n" in "".join(decoder.decode(default.token_bytes(token)) for token in ids)


def test_threads_do_not_share_the_special_switch(default: Tokenizer) -> None:
    wrong = []

    def work(parse: bool, want: list[int]) -> None:
        for _ in range(300):
            ids = default.encode("<|im_end|>", add_special=False, parse_special=parse)
            if ids != want:
                wrong.append(ids)

    plain = default.encode("<|im_end|>", add_special=False, parse_special=False)
    threads = [threading.Thread(target=work, args=a) for a in ((True, [2]), (False, plain)) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_token_types_of_gguf() -> None:
    tokenizer = from_gguf(gguf())
    at = {name: tokenizer.token_id(name) for name in ("ab", "<s>", "</s>", "<|im_end|>", "<tool>", "unused")}
    assert None not in at.values()
    ids = tokenizer.encode("ab<tool></s><|im_end|>", add_special=True)
    assert ids == [at["ab"], at["<tool>"], at["</s>"], at["<|im_end|>"]]
    assert tokenizer.eos_ids == {at["</s>"], at["<|im_end|>"]}  # the second is typed as text, but never meant as such
    assert tokenizer.decode(ids) == "ab<tool>"
    assert tokenizer.token_bytes(at["unused"] or 0) == b""
    unparsed = tokenizer.encode("<tool></s>", add_special=False, parse_special=False)
    assert unparsed[0] == at["<tool>"]
    assert len(unparsed) == 5


def test_beginning_token_once() -> None:
    tokenizer = from_gguf(gguf(add_bos_token=True, add_eos_token=True))
    bos, eos = tokenizer.bos_id, tokenizer.token_id("</s>")
    assert tokenizer.encode("", add_special=True) == [bos, eos]
    assert tokenizer.encode_chat("<s>ab")[:2] == [bos, tokenizer.token_id("ab")]
    assert tokenizer.encode_chat("ab")[:2] == [bos, tokenizer.token_id("ab")]
    assert from_gguf(gguf(pre="llama3")).add_bos
    assert not from_gguf(gguf(pre="llama3", add_bos_token=False)).add_bos
    assert from_gguf(gguf(bos_token_id=10**6)).bos_id is None


def test_text_that_equals_html_is_not_an_end() -> None:
    types = gguf()["tokenizer.ggml.token_type"]
    assert isinstance(types, np.ndarray)
    plain = np.where(types == 3, 1, types)
    tokenizer = from_gguf(gguf(token_type=plain, eos_token_id=None))
    assert tokenizer.eos_ids == {tokenizer.token_id("<|im_end|>")}


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("gpt-2", ["I", "'", "LL", " pay", " 12345", ".", "67", " ok", "!?", "\n\n ", " end"]),
        ("smollm", ["I", "'", "LL", " pay", " ", *"12345", ".", "6", "7", " ok", "!?", "\n\n ", " end"]),
        ("default", ["I", "'", "LL", " pay", " ", "123", "45", ".", "67", " ok", "!?", "\n\n ", " end"]),
        ("llama-bpe", ["I", "'LL", " pay", " ", "123", "45", ".", "67", " ok", "!?\n\n", " ", " end"]),
        ("qwen2", ["I", "'LL", " pay", " ", *"12345", ".", "6", "7", " ok", "!?\n\n", " ", " end"]),
    ],
)
def test_pieces_of_each_pre_tokenizer(name: str, pieces: list[str]) -> None:
    text = "I'LL pay 12345.67 ok!?\n\n  end"
    cut = pre_tokenizer(name, Path("x")).build().pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == pieces


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"model": "rwkv"}, UnsupportedModelError, "tokenizer model 'rwkv'"),
        ({"pre": "brand-new"}, UnsupportedModelError, "'brand-new'"),
        ({"pre": 7}, UnsupportedModelError, "7"),
        ({"tokens": None}, ModelFormatError, "tokenizer.ggml.tokens"),
        ({"merges": None}, ModelFormatError, "tokenizer.ggml.merges"),
        ({"merges": ("ab",)}, ModelFormatError, "not a pair"),
        ({"merges": ("zz zz",)}, ModelFormatError, "do not fit"),
        ({"token_type": np.zeros(3, np.int32)}, ModelFormatError, "token_type"),
        ({"token_type": "x"}, ModelFormatError, "token_type"),
        ({"tokens": (*BYTES, *["ab"] * 7)}, ModelFormatError, "twice"),
    ],
)
def test_a_bad_vocabulary_is_refused(change: dict[str, Any], error: type[ModelError], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        from_gguf(gguf(**change))
    assert caught.value.hint


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(BYTES)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("<|eot_id|>"), AddedToken("<stop>")])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
    return backend


def metaspace() -> tokenizers.Tokenizer:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    vocab |= {piece: 259 + i for i, piece in enumerate("▁ab")} | {"▁a": 262}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return backend


def save(path: Path, backend: tokenizers.Tokenizer, **files: object) -> Path:
    backend.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_directory_with_byte_level_bpe(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    save(
        tmp_path,
        backend,
        tokenizer_config={"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}{{ messages[0].content }}"},
        generation_config={"eos_token_id": [258]},
    )
    tokenizer = tokenizer_from_directory(tmp_path)
    assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.vocab_size) == (256, True, 259)
    assert tokenizer.eos_ids == {257, 258}
    text = "Šíp 箭 <|eot_id|>"
    ids = tokenizer.encode(text, add_special=True)
    assert (ids[0], ids[-1], len(ids)) == (256, 257, 2 + len("Šíp 箭 ".encode()))
    assert tokenizer.decode(ids) == "Šíp 箭 "
    rendered = tokenizer.chat_template.render([{"role": "user", "content": "hi"}])
    assert rendered == "<s>hi"
    assert tokenizer.encode_chat(rendered).count(256) == 1


def test_directory_with_sentencepiece(tmp_path: Path) -> None:
    save(tmp_path, metaspace(), tokenizer_config={"eos_token": "</s>", "add_bos_token": False})
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}")
    tokenizer = tokenizer_from_directory(tmp_path)
    ids = tokenizer.encode("ab a箭", add_special=True)
    assert ids[:3] == [262, 261, 262]
    assert tokenizer.token_bytes(262) == b" a"
    assert [tokenizer.token_bytes(i) for i in ids[3:]] == [bytes([b]) for b in "箭".encode()]
    assert tokenizer.decode(ids) == "ab a箭"
    assert tokenizer.eos_ids == {2}
    assert (tokenizer.bos_id, tokenizer.add_bos) == (1, False)
    assert tokenizer.chat_template.render([{"role": "user", "content": "x"}]) == "</s>"


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@given(pieces=st.lists(st.sampled_from(["a", "b", " ", "\u00e9", "</s>", "<s>", "<m>", "<r>", "<think>"])))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
def test_special_tokens_of_a_directory_are_found_as_the_library_does(
    tmp_path_factory: pytest.TempPathFactory, scheme: str, pieces: list[str]
) -> None:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    vocab |= {piece: 259 + i for i, piece in enumerate(["▁", "a", "b", "▁a", "ab", "▁ab"])}
    merges = [("▁", "a"), ("a", "b"), ("▁", "ab")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.ByteFallback()
    backend.add_special_tokens(["<unk>", "<s>", "</s>", AddedToken("<m>", lstrip=True), AddedToken("<r>", rstrip=True)])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer = tokenizer_from_directory(save(tmp_path_factory.mktemp("model"), backend))
    text = "".join(pieces)
    assert tokenizer.encode(text, add_special=False) == backend.encode(text, add_special_tokens=False).ids


def test_named_templates_in_a_config(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    save(tmp_path, byte_level(), tokenizer_config={"chat_template": named})
    assert tokenizer_from_directory(tmp_path).chat_template.source == "D"


def word_piece(path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    save(path, backend)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda p: None, ModelFormatError),
        (lambda p: (p / "tokenizer.json").write_text("{}"), ModelFormatError),
        (lambda p: (p / "tokenizer.json").write_bytes(b"\xff"), ModelFormatError),
        (lambda p: (save(p, byte_level()) / "tokenizer_config.json").write_text("[]"), ModelFormatError),
        (lambda p: (save(p, byte_level()) / "generation_config.json").write_text("{"), ModelFormatError),
        (lambda p: (save(p, byte_level()) / "chat_template.jinja").write_bytes(b"\xff"), ModelFormatError),
        (word_piece, UnsupportedModelError),
    ],
)
def test_a_bad_directory_is_refused(tmp_path: Path, spoil: Callable[[Path], object], error: type[ModelError]) -> None:
    spoil(tmp_path)
    with pytest.raises(error, match=str(tmp_path)):
        tokenizer_from_directory(tmp_path)
