"""A real GGUF model on the native runner, against the exact float32 of its own weights and llama.cpp; not CI.

python scripts/compare_real.py FILE.gguf [--tokens 512] [--llama PYTHON]

For each precision of KV: mean KL to the oracle and how often the most likely token is the same, over English text.
With `--llama` (an interpreter that has llama-cpp-python) both write greedily, and where they part the two tokens'
logits must be closer together than the two programs' logits are apart there: then it is a tie up to rounding.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shoal.bench.workloads import TEXT
from shoal.models import load_tokenizer, oracle
from shoal.models.files import local_files
from shoal.runners.native.runner import KvPrecision, NativeRunner
from shoal.runners.plan import ScheduledSequence, StepPlan, Want
from shoal.runners.registry import LocalModel

Rows = NDArray[np.float32]
PRECISIONS: tuple[KvPrecision, ...] = ("bf16", "u8")
AT_ONCE = 32  # rows of logits: of a large vocabulary more take gigabytes
_PEER = """
import json, sys
import numpy as np
from llama_cpp import Llama
file, prompts, count, out = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
model = Llama(file, n_ctx=max(map(len, prompts)) + count + 8, n_threads=2, verbose=False, logits_all=True)
rows, tokens = [], []
for prompt in prompts:
    model.reset()
    model.eval(prompt)
    for _ in range(count):
        rows.append(model.scores[model.n_tokens - 1].copy())
        tokens.append(int(rows[-1].argmax()))
        model.eval([tokens[-1]])
np.savez(out, rows=np.array(rows), tokens=np.array(tokens).reshape(len(prompts), count))
"""


def feed(runner: NativeRunner, tokens: list[int], start: int) -> Rows:
    """The logits after each of `tokens`, which begin at `start`."""
    table = tuple(range((start + len(tokens)) // runner.spec.block_size + 1))
    part = ScheduledSequence(1, tuple(tokens), start, table, Want.LOGITS, rows=len(tokens))
    logits = runner.execute(StepPlan(start, (part,))).logits
    assert logits is not None
    return logits


def fidelity(runner: NativeRunner, tokens: list[int], exact: Rows) -> tuple[float, float]:
    """Mean KL to `exact`, and the share of rows with the same most likely token."""
    divergence, same = [], []
    for start in range(0, len(tokens), AT_ONCE):
        rows, wanted = feed(runner, tokens[start : start + AT_ONCE], start), exact[start : start + AT_ONCE]
        divergence += [oracle.mean_kl(a[None], b[None]) for a, b in zip(wanted, rows, strict=True)]
        same += list(rows.argmax(-1) == wanted.argmax(-1))
    return float(np.mean(divergence)), float(np.mean(same))


def against_llama(python: str, file: Path, runner: NativeRunner, prompts: list[list[int]], count: int) -> None:
    """Write greedily after each prompt and print where the two part, and how close the two tokens are there."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.npz"
        subprocess.run([python, "-c", _PEER, str(file), json.dumps(prompts), str(count), str(out)], check=True)
        peer = np.load(out)
        rows, tokens = peer["rows"].reshape(len(prompts), count, -1), peer["tokens"].tolist()
    for number, prompt in enumerate(prompts):
        for start in range(0, len(prompt), AT_ONCE):
            row = feed(runner, prompt[start : start + AT_ONCE], start)[-1]
        for at in range(count):
            ours, theirs = int(row.argmax()), tokens[number][at]
            if ours != theirs:
                gap, apart = float(row[ours] - row[theirs]), np.abs(row - rows[number, at])[[ours, theirs]]
                told = "a tie up to rounding" if gap <= float(apart.sum()) else "A DIFFERENCE"
                print(f"prompt {number}: parts after {at} tokens, {gap:.3f} between the two, {apart} apart: {told}")
                break
            row = feed(runner, [ours], len(prompt) + at)[-1]
        else:
            print(f"prompt {number}: the same {count} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--llama", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--count", type=int, default=64, help="tokens that both write after each prompt")
    chosen = parser.parse_args()
    files = local_files("real", chosen.file)
    text = TEXT.read_text("utf-8")
    tokens = load_tokenizer(files).encode(text, add_special=True)[: chosen.tokens]
    model = LocalModel.read(files)
    exact = oracle.logits(model.decoder(), tokens)
    with tempfile.TemporaryDirectory() as folder:
        for kv in PRECISIONS:
            runner = NativeRunner.load(model, kv_bytes=1 << 30, cache_dir=Path(folder), kv_precision=kv)
            divergence, same = fidelity(runner, tokens, exact)
            print(f"KV in {kv}: mean KL {divergence:.5f}, top-1 {same:.4f} over {len(tokens)} tokens", flush=True)
            if chosen.llama and kv == "bf16":
                prompts = [tokens[:length] for length in (16, 64, 128, 256) if length <= len(tokens)]
                against_llama(chosen.llama, chosen.file, runner, prompts, chosen.count)
            runner.close()


if __name__ == "__main__":
    main()
