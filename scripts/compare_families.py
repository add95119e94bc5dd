"""Every family's tiny models through the oracle and through implementations from outside; not part of CI.

python scripts/compare_families.py --llama PYTHON --transformers PYTHON [--real FILE.gguf ...] [--write]

PYTHON are interpreters that have llama-cpp-python, and torch with transformers. GGUF files go through llama.cpp in
float32, directories through transformers in float32. `--write` renews the table in docs/models.md and what the tests
expect (tests/data/families). `--real` files are compared in their own types and as a float32 copy.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFWriter
from gguf.constants import GGUFValueType
from tests.support.tiny_models import MODELS, some_tokens, write_model

from shoal.models import oracle
from shoal.models.families import FAMILIES, describe, family_of
from shoal.models.gguf import GgufModel, read_gguf
from shoal.models.safetensors import SafetensorsModel, read_safetensors

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests/data/families"
PAGE = ROOT / "docs/models.md"
BEGIN, END = "<!-- families: made by scripts/compare_families.py -->", "<!-- end of families -->"
COLUMNS = range(0, 288, 41)
ROWS = (0, 7, 19, 30, 39)
LIMIT = 1e-4


class Comparison:
    """One model: how far the oracle is from `outside`, and whether they name the same tokens."""

    def __init__(self, family: str, name: str, ours: np.ndarray, outside: np.ndarray) -> None:
        self.family, self.name = family, name
        self.kl = oracle.mean_kl(outside, ours)
        best = np.take_along_axis(outside, outside.argmax(-1)[:, None], -1)
        chosen = np.take_along_axis(outside, ours.argmax(-1)[:, None], -1)
        self.same = float(np.mean(best - chosen < 1e-3))  # ties are the same

    @property
    def good(self) -> bool:
        return self.kl < LIMIT and self.same == 1.0


def logits_of(model: GgufModel | SafetensorsModel, tokens: list[int]) -> np.ndarray:
    return oracle.logits(describe(model), tokens)


def through_llama(python: str, tokens: Path, files: dict[str, Path]) -> dict[str, np.ndarray]:
    """Logits of each file, by name; one process each, since a failed check in llama.cpp ends its process."""
    found = {}
    for name, file in files.items():
        out = file.with_suffix(".npy")
        command = [python, str(ROOT / "scripts/outside/llama_logits.py"), str(tokens), str(file), str(out)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if out.is_file():
            found[name] = np.load(out)
        else:
            print(f"llama.cpp could not run {name}: {(ran.stdout + ran.stderr)[-300:]}")
    return found


def compare_gguf(python: str, folder: Path, tokens: list[int], at: Path) -> tuple[list[Comparison], dict[str, Any]]:
    """All tiny GGUF files. Quantised ones are compared as the float32 that they stand for."""
    files, sources = {}, {}
    for name in MODELS:
        sources[name] = read_gguf(write_model(folder / f"{name}.gguf", name))
        types = {tensor.type for tensor in sources[name].tensors.values()}
        files[name] = sources[name].path if types == {"F32"} else float32_copy(sources[name].path)
    outside = through_llama(python, at, files)
    made = [
        Comparison(family_of(sources[name]).name, name, logits_of(sources[name], tokens), logits)
        for name, logits in outside.items()
    ]
    return made, {name: expected(logits) for name, logits in outside.items()}


def float32_copy(path: Path) -> Path:
    """The same file with every tensor in float32, beside it."""
    model, out = read_gguf(path), path.with_suffix(".f32.gguf")
    writer = GGUFWriter(str(out), model.architecture)
    for key, field in GGUFReader(str(path)).fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind = field.types[0]
        writer.add_key_value(key, field.contents(), kind, field.types[-1] if kind == GGUFValueType.ARRAY else None)
    for name, tensor in model.tensors.items():
        writer.add_tensor(name, tensor.dequantize())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def compare_hub(python: str, folder: Path, tokens: list[int], at: Path) -> tuple[list[Comparison], dict[str, Any]]:
    """All tiny directories of transformers' own making."""
    command = [python, str(ROOT / "scripts/outside/transformers_tiny.py"), str(folder), str(at)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    print("\n".join(line for line in ran.stdout.splitlines() if "FAILED" in line))
    if ran.returncode:
        raise SystemExit(ran.stderr[-2000:])
    made, kept = [], {}
    for file in sorted(folder.glob("*.npy")):
        model, outside = read_safetensors(file.with_suffix("")), np.load(file)
        made.append(Comparison(family_of(model).name, file.stem, logits_of(model, tokens), outside))
        config = json.loads((model.path / "config.json").read_text())
        shapes = {name: list(tensor.shape) for name, tensor in model.tensors.items()}
        kept[file.stem] = {"config": config, "tensors": folded(shapes), **expected(outside)}
    return made, kept


def expected(logits: np.ndarray) -> dict[str, Any]:
    """A little of the outside logits: the token after each position, and some numbers."""
    some = logits[list(ROWS)][:, list(COLUMNS)]
    return {"argmax": logits.argmax(-1).tolist(), "logits": np.round(some.astype(float), 4).tolist()}


def folded(shapes: dict[str, list[int]]) -> list[list[Any]]:
    """[name with # for each number, shape, numbers for each #], over all their products."""
    groups: dict[tuple[str, tuple[int, ...]], list[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        numbers = tuple(int(n) for n in re.findall(r"(?<=\.)\d+(?=\.)", name))
        groups.setdefault((re.sub(r"(?<=\.)\d+(?=\.)", "#", name), tuple(shape)), []).append(numbers)
    out: list[list[Any]] = []
    for (pattern, shape), numbers in groups.items():
        axes = [sorted(set(axis)) for axis in zip(*numbers, strict=True)]
        if sorted(product(*axes)) != sorted(numbers):
            raise SystemExit(f"{pattern}: its numbers {numbers} are no product")
        out.append([pattern, list(shape), axes])
    return out


def compare_real(python: str, file: Path) -> None:
    """A published file: 512 tokens, against llama.cpp as it runs it, and against its float32 copy there."""
    model = read_gguf(file)
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / file.name
        copy.symlink_to(file)
        tokens = np.random.default_rng(0).integers(1000, 20_000, 512)
        np.save(Path(temporary) / "tokens.npy", tokens)
        ours = logits_of(model, tokens.tolist())
        files = {"own types": copy, "float32": float32_copy(copy)}
        for name, outside in through_llama(python, Path(temporary) / "tokens.npy", files).items():
            same = np.mean(outside.argmax(-1) == ours.argmax(-1))
            print(
                f"{file.name}, llama.cpp in {name}: mean KL {oracle.mean_kl(ours, outside):.2e}, same token {same:.4f}"
            )


def table(gguf: list[Comparison], hub: list[Comparison]) -> str:
    """A row a family: what it is for, and the worst of its tiny models."""
    lines = [
        "| family | GGUF architectures | hub's model types | GGUF v llama.cpp | safetensors v transformers |",
        "|---|---|---|---|---|",
    ]
    for family in FAMILIES:
        cells = []
        for rows in (gguf, hub):
            mine = [row for row in rows if row.family == family.name]
            worst = max((row.kl for row in mine), default=None)
            tied = all(row.same == 1.0 for row in mine)
            said = "not compared" if worst is None else f"KL {worst:.0e}, {'same tokens' if tied else 'OTHER TOKENS'}"
            cells.append(f"{said} ({len(mine)})" if mine else said)
        lines.append(
            f"| {family.name} | {', '.join(family.gguf)} | {', '.join(family.safetensors)} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def write(gguf: dict[str, Any], hub: dict[str, Any], text: str) -> None:
    DATA.mkdir(parents=True, exist_ok=True)
    for name, kept in (("gguf", gguf), ("hub", hub)):
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(kept.items())]
        (DATA / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    page = PAGE.read_text()
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", required=True)
    parser.add_argument("--transformers", required=True)
    parser.add_argument("--real", type=Path, nargs="*", default=[])
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    tokens = some_tokens()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "hub").mkdir()
        np.save(folder / "tokens.npy", np.array(tokens))
        gguf, kept_gguf = compare_gguf(chosen.llama, folder, tokens, folder / "tokens.npy")
        hub, kept_hub = compare_hub(chosen.transformers, folder / "hub", tokens, folder / "tokens.npy")
    for row in (*gguf, *hub):
        mark = "" if row.good else "   <-- above the limit"
        print(f"{row.family:14} {row.name:24} KL {row.kl:.2e}, same token {row.same:.3f}{mark}")
    text = table(gguf, hub)
    print(text)
    if chosen.write:
        write(kept_gguf, kept_hub, text)
    for file in chosen.real:
        compare_real(chosen.llama, file)
    if not all(row.good for row in (*gguf, *hub)):
        raise SystemExit("some models are further from the outside than they may be")


if __name__ == "__main__":
    main()
