"""NVIDIA GPUs as the registry sees them; this file imports neither torch nor Triton."""

from __future__ import annotations

import importlib.util
import logging
import sys
from dataclasses import replace
from pathlib import Path

from shoal.config import EngineConfig
from shoal.errors import BackendError, ConfigError, UnsupportedModelError
from shoal.models.decoder import Decoder
from shoal.models.files import Progress
from shoal.runners.base import Runner, kv_budget
from shoal.runners.cuda.device import capabilities, told
from shoal.runners.plan import ModelSpec
from shoal.runners.registry import LocalModel, RunnerCard

log = logging.getLogger(__name__)

WHY = "an NVIDIA GPU"
INSTALL = "pip install 'shoal[cuda]' on a machine with an NVIDIA GPU"
HONOURS = ("kv_precision", "kv_host", "kv_cache")
PRECISIONS = ("bf16",)
OPTIONS = ("device",)
"""`device`: which GPU, "cuda:0" unless given. One engine uses one GPU."""

LEAST_CAPABILITY = (8, 0)
MAX_CHECKPOINTS = 64
_MARGIN = 0.92  # of the free memory: what the driver, the compiler and graphs take is not ours to give


def refuses(model: LocalModel | None, config: EngineConfig) -> str | None:
    """Why no GPU can be used here, or not for this model."""
    missing = [module for module in ("torch", "triton") if importlib.util.find_spec(module) is None]
    if missing:
        return f"{' and '.join(missing)} not installed for {sys.executable}"
    found = capabilities()
    if not found:
        return "the NVIDIA driver finds no GPU"
    number = _number(config)
    if number >= len(found):
        return f"there is no device cuda:{number}, the driver finds {len(found)}"
    if found[number] < LEAST_CAPABILITY:
        have, need = (".".join(map(str, pair)) for pair in (found[number], LEAST_CAPABILITY))
        return f"cuda:{number} has compute capability {have}, the kernels need {need}"
    return None if model is None else _model_refusal(model)


def _model_refusal(model: LocalModel) -> str | None:
    try:
        decoder = model.decoder()
    except UnsupportedModelError as error:
        return error.message
    from shoal.runners.cuda.supports import refusal

    return refusal(decoder)


def load(model: LocalModel, config: EngineConfig, cache_dir: Path, progress: Progress | None = None) -> Runner:
    """Bring a model to the GPU. Nothing is kept in `cache_dir`; kernels are compiled when a step first needs them.

    Raises `ModelError`s, `ConfigError` for a budget below one block, `BackendError` when the GPU's free memory does
    not do.
    """
    kv_bytes = config.bytes_of("kv_memory")
    assert kv_bytes is not None
    return load_decoder(
        model.decoder(),
        f"cuda:{_number(config)}",
        key=model.files.key,
        kv_bytes=kv_bytes,
        memory_bytes=config.bytes_of("memory"),
        max_batch=config.max_batch,
        max_step_tokens=config.max_step_tokens,
        eight=config.kv_precision == "u8",
    )


def load_decoder(
    decoder: Decoder,
    device: str,
    *,
    key: str,
    kv_bytes: int,
    memory_bytes: int | None,
    max_batch: int,
    max_step_tokens: int,
    eight: bool = False,
) -> Runner:
    """The same from a description. `key` names the contents of its files, as `ModelFiles.key`.

    `max_batch` sequences are in the batch at once, `max_step_tokens` rows in a step. `eight` keeps KV in 8 bits. Of a
    model with recurrent state two states a sequence count to the step, and a quarter of the budget goes to checkpoints.
    """
    import torch

    from shoal.runners.cuda.access import identity_of
    from shoal.runners.cuda.choices import draws_rightly
    from shoal.runners.cuda.model import upload
    from shoal.runners.cuda.runner import CUDARunner, bucket
    from shoal.runners.cuda.supports import kv_bytes_per_token, state_bytes, step_bytes
    from shoal.runners.cuda.weights import device_bytes

    target = torch.device(device)
    per_block = kv_bytes_per_token(decoder, eight=eight) * 32
    rows, slots = bucket(max_step_tokens) + bucket(max_batch), 2 * max_batch
    weights = sum(device_bytes(weight) for _, weight in decoder.weights()) + 2 * decoder.vocab_size * decoder.width
    state = state_bytes(decoder)
    transient = step_bytes(decoder, rows, bucket(max_batch)) + 2 * max_batch * state
    budget = kv_budget(kv_bytes, memory_bytes, weights + transient)
    if target.type == "cuda":
        free = int(torch.cuda.mem_get_info(target)[0] * _MARGIN) - weights - transient
        if free < per_block + state:
            raise BackendError(
                f"{device} has too little free memory for {decoder.name}",
                value=free,
                limit=weights + transient + per_block + state,
                hint="free some, lower max_batch, or load a smaller model",
            )
        budget = min(budget, free)
    checkpoints = max(1, min(MAX_CHECKPOINTS, budget // 4 // state)) if state else 0
    blocks = min((budget - checkpoints * state) // per_block, 2**24)
    if blocks < 1:
        raise ConfigError(f"kv_memory is {kv_bytes:,} bytes", value=kv_bytes, limit=per_block + state, hint="raise it")
    try:
        context, states = decoder.context_length, (max_batch, checkpoints)
        model = upload(decoder, target, blocks, context, bucket(slots), eight=eight, states=states)
    except torch.cuda.OutOfMemoryError as error:
        raise BackendError(
            f"{device} ran out of memory while {decoder.name} was loaded",
            value=blocks * per_block,
            hint="lower kv_memory, or load a smaller model",
        ) from error
    spec = spec_of(decoder, blocks, model.weight_bytes, transient, eight=eight, checkpoints=checkpoints)
    if target.type == "cuda" and not draws_rightly(target):  # another exp than the one it was made for
        log.warning("%s draws other tokens than the sampler: they are drawn on the host", device)
        spec = replace(spec, draws=False)
    return CUDARunner(model, spec, identity_of(key, "u8" if eight else "bf16", target), slots=slots, rows=rows)


def spec_of(
    decoder: Decoder, blocks: int, weight_bytes: int, step_bytes: int, *, eight: bool, checkpoints: int
) -> ModelSpec:
    """The facts the core relies on."""
    from shoal.runners.cuda.supports import kv_bytes_per_token, state_bytes

    return ModelSpec(
        name=decoder.name,
        architecture=decoder.family,
        runner="cuda",
        precision="bf16",
        vocab_size=decoder.vocab_size,
        context_length=decoder.context_length,
        block_size=32,
        num_blocks=blocks,
        kv_bytes_per_token=kv_bytes_per_token(decoder, eight=eight),
        weight_bytes=weight_bytes,
        step_bytes=step_bytes,
        max_chain=16,
        max_top=128,
        max_rows=16,
        draws=True,
        lookahead=1,
        exact=True,
        recurrent=checkpoints > 0,
        num_checkpoints=checkpoints,
        checkpoint_bytes=state_bytes(decoder),
    )


def describe(model: LocalModel | None, config: EngineConfig, cache_dir: Path | None) -> RunnerCard:
    """The GPU, its driver and free memory; weights of the types that kernels unpack stay as the file has them."""
    number = _number(config)
    major, minor = capabilities()[number]
    return RunnerCard(
        devices=(told(number),),
        precision="bf16",
        why="products in bf16; Q4_0, Q4_K, Q6_K and Q8_0 weights stay at their bytes and are unpacked in them; "
        "KV in bf16 (kv_precision='u8' halves it)",
        kv=("bf16", "u8"),
        isa=(f"sm_{major}{minor}",),
        file_bytes=None if model is None else model.file_bytes,
    )


def _number(config: EngineConfig) -> int:
    """The number of the GPU that is asked for. `ConfigError` for another device."""
    device = config.runner_options.get("device", "cuda:0")
    name, _, number = str(device).partition(":")
    if name != "cuda" or not (number or "0").isdecimal():
        raise ConfigError(f"device is {device!r}", value=device, hint='give "cuda" or "cuda:1"')
    return int(number or 0)
