"""llama.cpp as a peer: its low-level API with parallel sequences, which is what its server does without the HTTP."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from pathlib import Path

import llama_cpp as api
import numpy as np


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _quiet(level: int, text: bytes, data: object) -> None:
    pass


class Llama:
    """One GGUF in llama.cpp with `streams` sequences of up to `length` tokens each, `threads` threads."""

    def __init__(self, path: Path, *, streams: int, length: int, threads: int) -> None:
        api.llama_log_set(_quiet, ctypes.c_void_p(0))
        api.llama_backend_init()
        params = api.llama_model_default_params()
        self.model = api.llama_model_load_from_file(str(path).encode(), params)
        context = api.llama_context_default_params()
        context.n_ctx = streams * length
        context.n_batch = 2048
        context.n_ubatch = 512
        context.n_seq_max = streams
        context.n_threads = context.n_threads_batch = threads
        self.context = api.llama_init_from_model(self.model, context)
        self.vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(2048, 0, 1)

    def clear(self) -> None:
        api.llama_memory_clear(api.llama_get_memory(self.context), True)

    def share(self, source: int, target: int, length: int) -> None:
        """Let sequence `target` begin with the KV of `source`, as its server does for a cached prompt."""
        api.llama_memory_seq_cp(api.llama_get_memory(self.context), source, target, 0, length)

    def feed(self, items: Sequence[tuple[int, int, int, bool]]) -> None:
        """(token, position, sequence, logits wanted) in one batch."""
        for i, (token, position, sequence, wanted) in enumerate(items):
            self.batch.token[i] = token
            self.batch.pos[i] = position
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = sequence
            self.batch.logits[i] = wanted
        self.batch.n_tokens = len(items)
        code = api.llama_decode(self.context, self.batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")

    def best(self, i: int) -> int:
        row = np.ctypeslib.as_array(api.llama_get_logits_ith(self.context, i), (self.vocab,))
        return int(row.argmax())

    def prefill(self, prompts: Sequence[Sequence[int]], starts: Sequence[int] | None = None) -> list[int]:
        """Compute prompts in batches of at most 512 tokens; the first output token of each."""
        starts = starts or [0] * len(prompts)
        first: dict[int, int] = {}
        flat = [
            (token, at, sequence, at == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for at, token in enumerate(prompt)
            if at >= starts[sequence]
        ]
        for begin in range(0, len(flat), 512):
            part = flat[begin : begin + 512]
            self.feed(part)
            for i, (_, _, sequence, wanted) in enumerate(part):
                if wanted:
                    first[sequence] = self.best(i)
        return [first[sequence] for sequence in range(len(prompts))]

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, starts: Sequence[int] | None = None
    ) -> tuple[list[list[int]], float, float]:
        """Greedy outputs of `count` tokens, seconds of prefill, seconds of decoding."""
        begin = time.perf_counter()
        outputs = [[token] for token in self.prefill(prompts, starts)]
        middle = time.perf_counter()
        for _ in range(count - 1):
            self.feed(
                [(o[-1], len(p) + len(o) - 1, i, True) for i, (p, o) in enumerate(zip(prompts, outputs, strict=True))]
            )
            for i, output in enumerate(outputs):
                output.append(self.best(i))
        return outputs, middle - begin, time.perf_counter() - middle

    def close(self) -> None:
        api.llama_batch_free(self.batch)
        api.llama_free(self.context)
        api.llama_model_free(self.model)


def requantised(path: Path, target: Path) -> Path:
    """The same model at 8 bits (Q8_0), made once."""
    if not target.exists():
        params = api.llama_model_quantize_default_params()
        params.ftype = 7  # LLAMA_FTYPE_MOSTLY_Q8_0
        params.allow_requantize = True
        api.llama_model_quantize(str(path).encode(), str(target).encode(), ctypes.byref(params))
    return target
