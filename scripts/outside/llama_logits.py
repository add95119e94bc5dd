"""Runs in a Python that has llama-cpp-python: logits of GGUF files in llama.cpp's float32.

python scripts/outside/llama_logits.py TOKENS.npy FILE.gguf OUT.npy [FILE OUT ...]

The cache is float32, no weight is repacked (AMX tiles trap on some virtual machines), and the rotary settings are the
file's. A file that cannot be loaded leaves no OUT and one line that says why.
"""

import sys
from pathlib import Path

import llama_cpp
import numpy as np


def plain_params() -> llama_cpp.llama_model_params:
    params = DEFAULT_PARAMS()
    params.use_extra_bufts = False
    return params


DEFAULT_PARAMS = llama_cpp.llama_model_default_params
llama_cpp.llama_cpp.llama_model_default_params = plain_params
YARN_OF_THE_FILE = dict.fromkeys(("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"), -1.0)


def main() -> None:
    tokens = np.load(sys.argv[1]).tolist()
    for file, out in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
        try:
            model = llama_cpp.Llama(
                file,
                n_ctx=max(512, len(tokens)),
                n_batch=512,
                logits_all=True,
                verbose=False,
                type_k=0,
                type_v=0,
                flash_attn=False,
                **YARN_OF_THE_FILE,
            )
        except ValueError as error:
            print(f"{Path(file).stem}: {error}", flush=True)
            continue
        model.eval(tokens)
        np.save(out, np.array(model.scores[: len(tokens)], dtype=np.float32))
        model.close()


if __name__ == "__main__":
    main()
