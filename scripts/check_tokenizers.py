#!/usr/bin/env python
"""Tokenizers against llama.cpp: cases beside vocabulary files, and random texts through an installed llama-cpp-python.

    scripts/check_tokenizers.py DIR_OR_GGUF... [--llama PYTHON [--names]] [--texts 300]

Beside `X.gguf`, `X.gguf.inp` holds texts divided by a line, and `X.gguf.out` the ids of each. `--llama` names the
Python of an environment with `llama_cpp`: there the same random texts are tokenised, special tokens parsed and not;
with `--names` also with every known name of a pre-tokenizer put into byte-level vocabularies. Prints a line a file;
the exit status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path

from shoal.errors import ModelError
from shoal.models.gguf import read_metadata
from shoal.models.pretokenize import pre_tokenizer_names
from shoal.models.tokenizer import Tokenizer
from shoal.models.vocabulary import tokenizer_from_metadata

DIVIDER = "\n__ggml_vocab_test__\n"
LLAMA = """
import json, sys
from llama_cpp import Llama
job = json.load(sys.stdin)
override = {"tokenizer.ggml.pre": job["pre"]} if job["pre"] else None
llama = Llama(job["path"], vocab_only=True, verbose=False, kv_overrides=override)
out = [[llama.tokenize(t.encode(), add_bos=False, special=s) for s in (False, True)] for t in job["texts"]]
json.dump(out, sys.stdout)
"""


def main() -> int:
    """Check each file; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--llama", help="a Python with llama_cpp")
    parser.add_argument("--names", action="store_true", help="every name of a pre-tokenizer")
    parser.add_argument("--texts", type=int, default=300)
    args = parser.parse_args()
    files = [file for path in args.paths for file in (sorted(path.glob("*.gguf")) if path.is_dir() else [path])]
    return int(sum(check(file, args) for file in files) > 0)


def check(path: Path, args: argparse.Namespace) -> bool:
    """Whether anything of this file differs; prints what."""
    began = time.perf_counter()
    try:
        metadata = read_metadata(path)
        tokenizer = tokenizer_from_metadata(metadata, path)
    except ModelError as error:
        print(f"{path.name:32} refused: {error}")
        return True
    loaded = time.perf_counter() - began
    cases = list(golden(path))
    wrong = [text for text, ids in cases if tokenizer.encode(text, add_special=False, parse_special=False) != ids]
    told = f"{len(cases) - len(wrong)} of {len(cases)} cases"
    if args.llama:
        byte_level = metadata.get("tokenizer.ggml.model") == "gpt2"
        names = ["", *(pre_tokenizer_names() if args.names and byte_level else [])]
        for name in names:
            with_name = {**metadata, "tokenizer.ggml.pre": name} if name else metadata
            other = tokenizer_from_metadata(with_name, path) if name else tokenizer
            differing = against_llama(args.llama, path, name, other, random_texts(other, args.texts))
            if differing is None:
                told += f"; {name}: llama.cpp does not load it"
            elif differing:
                wrong += differing
                told += (
                    f"; {name or 'itself'}: {len(differing)} of {args.texts} random texts differ, as {differing[0]!r}"
                )
        told += f"; {len(names)} x {args.texts} random texts against llama.cpp"
    print(f"{path.name:32} {told}; loaded in {loaded:.2f} s", flush=True)
    return bool(wrong)


def golden(path: Path) -> list[tuple[str, list[int]]]:
    """Texts and ids that lie beside a vocabulary."""
    texts, ids = Path(f"{path}.inp"), Path(f"{path}.out")
    if not texts.is_file() or not ids.is_file():
        return []
    split = texts.read_text("utf-8").split(DIVIDER)
    return [
        (text, list(map(int, line.split()))) for text, line in zip(split, ids.read_text().splitlines(), strict=False)
    ]


def random_texts(tokenizer: Tokenizer, count: int) -> list[str]:
    """Texts of letters, marks, digits and spaces of many scripts, tokens of the vocabulary among them."""
    draw = random.Random(1)
    pools = [
        "abcdefgh ",
        "ABCdef'st ",
        " \t\n\r ",
        "0123456789",
        "!?.,:;-_()<>|[]{}/\\\"'`~@#$%^&*+=",
        "\u00e9\u0159\u017e\u00df\u0130\u01c5",
    ]
    pools += [
        "\u4e00\u5929\u6c17\u3042\u30ab\uac00\ud55c",
        "\u0627\u0644\u0639\u0661\u0662",
        "\u0939\u093f\u0928\u094d",
        "\U0001f469\u200d\U0001f4bb\U0001f3fd",
        "e\u0301o\u0308",
    ]
    texts = []
    for _ in range(count):
        pieces = []
        for _ in range(draw.randrange(1, 12)):
            if draw.random() < 0.3:
                pieces.append(
                    tokenizer.token_bytes(draw.randrange(tokenizer.vocab_size), special=True).decode("utf-8", "ignore")
                )
            else:
                pool = draw.choice(pools)
                pieces.append("".join(draw.choice(pool) for _ in range(draw.randrange(1, 9))))
        texts.append("".join(pieces).replace("\0", ""))
    return texts


def against_llama(python: str, path: Path, pre: str, tokenizer: Tokenizer, texts: list[str]) -> list[str] | None:
    """The texts whose ids are others in llama.cpp; None where it cannot load the vocabulary."""
    job = json.dumps({"path": str(path), "pre": pre, "texts": texts})
    done = subprocess.run([python, "-c", LLAMA], input=job, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(done.stderr.strip().splitlines()[-1:], file=sys.stderr)
        return None
    theirs = json.loads(done.stdout)
    ours = [[tokenizer.encode(t, add_special=False, parse_special=s) for s in (False, True)] for t in texts]
    return [text for text, a, b in zip(texts, ours, theirs, strict=True) if a != b]


if __name__ == "__main__":
    sys.exit(main())
