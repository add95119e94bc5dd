"""From a request to tokens: everything that can be refused before a request joins, refused by name."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.checks import is_whole
from shoal.core.request import RequestSpec
from shoal.errors import InvalidRequestError, KVBudgetError, PromptTooLongError
from shoal.runners.plan import ModelSpec
from shoal.sampling.grammar import Grammar, GrammarCompiler
from shoal.sampling.sampler import SamplerState
from shoal.sampling.thinking import ThinkingLimit
from shoal.types import Message, Request, SamplingParams

_SLICE = 64 * 1024  # characters tokenised in one go, to find out whether a text is too long
_CUT = 64  # tokens that a cut through a text may add; generous


class Codec(Protocol):
    """What the engine needs of a tokenizer. Thread-safe."""

    @property
    def eos_ids(self) -> Collection[int]:
        """Tokens that end an output."""
        ...

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Token ids of a text; `add_special` puts a beginning-of-sequence token first where the model wants one."""
        ...

    def encode_messages(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a chat, up to where the assistant's answer begins."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; empty for one that is not shown."""
        ...


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that can be served: what the scheduler needs of it, and its grammar, compiled."""

    spec: RequestSpec
    grammar: Grammar | None = None
    codec: Codec | None = None

    def sampler(self, model: ModelSpec, eos_ids: Collection[int]) -> SamplerState:
        """A fresh sampling state for this request."""
        spec = self.spec
        constraint = self.grammar.start() if self.grammar is not None else None
        limit, bound = None, spec.sampling.thinking
        if bound is not None and self.codec is not None:
            end_ids = tuple(self.codec.encode(bound.end, add_special=False))
            limit = ThinkingLimit(bound, end_ids, self.codec.token_bytes)
        return SamplerState(spec.sampling, spec.seed, model.vocab_size, spec.prompt, eos_ids, constraint, limit)


def refuse_arrival(request: Request) -> None:
    """Refuse a request that asks for a later arrival where nothing waits for that."""
    if request.arrival_s:
        raise InvalidRequestError(
            f"arrival_s is {request.arrival_s:g}",
            param="arrival_s",
            value=request.arrival_s,
            limit=0,
            hint="only `run` delays arrivals: give the request to it, or submit it when its time has come",
        )


class InputProcessor:
    """Turns requests into `PreparedRequest` ones for one model. Thread-safe; holds no request."""

    def __init__(self, spec: ModelSpec, codec: Codec | None, seed: int | None) -> None:
        self.spec = spec
        self.codec = codec
        self.grammars = GrammarCompiler(codec, spec.vocab_size) if codec is not None else None
        self._seeds = random.Random(seed)

    @property
    def eos_ids(self) -> Collection[int]:
        """Tokens that end an output; none without a tokenizer."""
        return self.codec.eos_ids if self.codec is not None else ()

    def tokenize(self, request: Request) -> list[int]:
        """Token ids of the request's prompt. InvalidRequestError names the field that cannot be encoded."""
        if request.prompt_tokens is not None:
            return list(request.prompt_tokens)
        if self.codec is None:
            given = "prompt" if request.prompt is not None else "messages"
            raise InvalidRequestError(
                f"{given} needs a tokenizer and this engine has none", param=given, hint="give prompt_tokens"
            )
        if request.prompt is not None:
            return self.encode(request.prompt)
        assert request.messages is not None
        contents = [message.get("content") for message in request.messages if isinstance(message, Mapping)]
        self.check_text(*(content for content in contents if isinstance(content, str)))
        return self.codec.encode_messages(request.messages)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt in text. `PromptTooLongError` before all of one that is far too long is tokenised."""
        assert self.codec is not None
        self.check_text(text)
        return self.codec.encode(text, add_special=True)

    def check_text(self, *texts: str) -> None:
        """Refuse texts that make more tokens than a prompt may have, after about as much work as one that may costs.

        A text is tokenised in slices until it is known to be too long. What is close to the limit passes: the exact
        count is `check_tokens`'.
        """
        most = self._most_tokens
        if self.codec is None or sum(map(len, texts)) <= _SLICE:
            return
        total = 0
        for text in texts:
            for at in range(0, len(text), _SLICE):
                # A cut makes a few tokens more than there are without it.
                total += len(self.codec.encode(text[at : at + _SLICE], add_special=False)) - _CUT
                if total > most:
                    raise self._too_long(f"over {total}", total)

    @property
    def _most_tokens(self) -> int:
        """What a prompt may have: the context, less one token for the answer."""
        return self.spec.context_length - 1

    def _too_long(self, count: str, value: int) -> PromptTooLongError:
        most = self._most_tokens
        return PromptTooLongError(
            f"the prompt has {count} tokens and the model's context takes {most} and one answer token",
            param="prompt",
            value=value,
            limit=most,
            hint="shorten the prompt or load a model with a longer context",
        )

    def prepare(self, request: Request, *, prefill_only: bool = False) -> PreparedRequest:
        """Check a request against the model. Raises `InvalidRequestError`, `PromptTooLongError`, `KVBudgetError`."""
        seed = request.sampling.seed
        return self.admit(
            RequestSpec(
                prompt=tuple(self.tokenize(request)),
                sampling=request.sampling,
                seed=self._seeds.getrandbits(62) if seed is None else seed,
                id=request.id,
                priority=request.priority,
                group=request.group,
                namespace=request.namespace,
                deadline_s=request.deadline_s,
                timeout_s=request.timeout_s,
                critical_path=request.critical_path,
                keep_s=request.keep_s,
                prefill_only=prefill_only,
                predicted=tuple(request.predicted[: self.spec.context_length]),
            )
        )

    def admit(self, spec: RequestSpec) -> PreparedRequest:
        """Check what is asked against the model and compile its grammar. Raises as `prepare`."""
        self.check_tokens(spec.prompt)
        sampling = spec.sampling
        room = min(self.spec.context_length, self.spec.kv_capacity) - len(spec.prompt)
        if sampling.max_tokens > room:  # context or KV memory ends the output; `finish_reason` says `length`
            sampling = dataclasses.replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))
            spec = dataclasses.replace(spec, sampling=sampling)
        for token in sampling.stop_token_ids:
            self._check_token(token, "stop_token_ids")
        for token in spec.predicted:
            self._check_token(token, "predicted")
        grammar = self.compile(sampling) if sampling.structured else None
        prepared = PreparedRequest(spec, grammar, self.codec)
        prepared.sampler(self.spec, self.eos_ids)  # refuses a bias for a token the model lacks
        return prepared

    def compile(self, sampling: SamplingParams) -> Grammar:
        """The grammar of an output that is `structured`. Raises `InvalidRequestError`."""
        if self.grammars is None:
            raise InvalidRequestError(
                "a grammar needs a tokenizer and this engine has none", param="json_schema", hint="load a whole model"
            )
        return self.grammars.compile(sampling)

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Refuse a prompt that is empty, names tokens the model lacks, or does not fit context or KV memory."""
        if not tokens:
            raise InvalidRequestError("the prompt has no tokens", param="prompt", value=0, limit="at least 1 token")
        if len(tokens) > self._most_tokens:
            raise self._too_long(str(len(tokens)), len(tokens))
        self._check_budget(len(tokens))
        for token in tokens:
            self._check_token(token, "prompt_tokens")

    def _check_token(self, token: object, param: str) -> None:
        vocab = self.spec.vocab_size
        if not is_whole(token, 0, vocab - 1):
            raise InvalidRequestError(
                f"{param} has {token!r}", param=param, value=token, limit=vocab, hint=f"tokens go from 0 to {vocab - 1}"
            )

    def _check_budget(self, prompt_len: int) -> None:
        spec, needed = self.spec, prompt_len + 1
        capacity = spec.kv_capacity
        if needed > capacity:
            kv_bytes = needed * spec.kv_bytes_per_token + spec.num_windows * spec.window_bytes
            raise KVBudgetError(
                f"{prompt_len} prompt tokens and one answer token need KV for {needed}, there is {capacity}",
                param="prompt",
                value=needed,
                limit=capacity,
                hint=f"shorten the prompt or raise kv_memory above {kv_bytes} bytes",
            )
