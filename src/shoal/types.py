"""What a caller asks and what comes back. What a step is stands in `runners/plan.py`.

Times are in the unit their name ends in.
Nothing here imports a backend, or anything but `errors` and `checks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

from shoal.checks import is_number, is_whole
from shoal.errors import InvalidRequestError, ShoalError

Message: TypeAlias = Mapping[str, Any]
"""One chat message: `role`, `content`, and whatever else the chat template reads."""


MAX_KEEP_S = 86400
"""The longest that `Request.keep_s` may ask for: a day."""


class FinishReason(StrEnum):
    """Why a request ended. Each ends exactly once, with exactly one of these."""

    STOP = "stop"  # a stop token or stop string, or the model's end token
    LENGTH = "length"  # max_tokens or the context is used up
    ABORTED = "aborted"  # the caller went away
    TIMEOUT = "timeout"  # its deadline passed
    ERROR = "error"  # `Result.error` says what


class Priority(StrEnum):
    """Priority classes, most urgent first."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


def _check(ok: bool, param: str, value: object, limit: str) -> None:
    if not ok:
        raise InvalidRequestError(
            f"{param} is {value!r}", param=param, value=value, limit=limit, hint=f"it must be {limit}"
        )


@dataclass(frozen=True, slots=True)
class Thinking:
    """A bound on what a model thinks before it answers: `budget` tokens, then `end` is written for it.

    Thinking begins with the output, or where `begin` is not empty, with that text at the output's beginning; it ends by
    itself where the text `end` occurs. A grammar goes before the bound: `end` is written as soon as that allows it.
    """

    budget: int
    begin: str
    end: str

    def __post_init__(self) -> None:
        _check(is_whole(self.budget, 0), "thinking", self.budget, "a budget of 0 or more tokens")
        for text in (self.begin, self.end):
            _check(isinstance(text, str), "thinking", text, "marked by strings")
        _check(self.end != "", "thinking", self.end, "ended by a text that is not empty")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen. Checked when built; raises `InvalidRequestError`.

    temperature 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. The filters apply in the order penalties,
    bias, temperature, top-k, top-p, min-p. `repetition_penalty` (Keskar et al., 2019) looks at prompt and output,
    `presence_penalty` and `frequency_penalty` (as OpenAI defines them) at the output only. `logprobs` is how many
    alternatives to report per token (0: only the chosen one; None: nothing), `prompt_logprobs` the same for the prompt,
    whose tokens are all computed then, also those whose KV is cached; beside it `max_tokens` may be 0. Without a `seed`
    the engine draws one and reports it in the result. The stop token is not part of the output; a stop string is cut
    from it.
    At most one of `json_schema`, `regex` and `grammar` (Lark) constrains the output to that language; JSON has
    little white space. Such an output ends when the grammar does, or short of that at a limit. `thinking` bounds
    what a reasoning model thinks.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    json_schema: Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    thinking: Thinking | None = None
    speculate: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.thinking, Mapping):  # as it was saved
            object.__setattr__(self, "thinking", Thinking(**self.thinking))
        _check(self.thinking is None or isinstance(self.thinking, Thinking), "thinking", self.thinking, "a Thinking")
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            _check(isinstance(value, list | tuple), name, value, "a list")
            object.__setattr__(self, name, tuple(value))
        self._check_numbers()
        _check(all(isinstance(s, str) and s for s in self.stop), "stop", self.stop, "non-empty strings")
        _check(len(self.stop) <= 16, "stop", f"{len(self.stop)} strings", "at most 16 strings")
        ids = self.stop_token_ids
        _check(all(is_whole(t, 0) for t in ids), "stop_token_ids", ids, "token ids of 0 or more")
        _check(isinstance(self.logit_bias, Mapping), "logit_bias", self.logit_bias, "a mapping of token id to bias")
        for token, bias in self.logit_bias.items():
            _check(is_whole(token, 0), "logit_bias", token, "keyed by token id")
            _check(is_number(bias, -1000, 1000), "logit_bias", bias, "between -1000 and 1000")
        most = self.max_tokens
        _check(self.min_tokens <= most, "min_tokens", self.min_tokens, f"at most max_tokens ({most})")
        self._check_structure()

    def _check_numbers(self) -> None:
        whole = {
            "max_tokens": (1 if self.prompt_logprobs is None else 0, 2**31),
            "top_k": (0, 2**31),
            "min_tokens": (0, 2**31),
            "logprobs": (0, 20),
            "prompt_logprobs": (0, 20),
            "seed": (0, 2**63 - 1),
        }
        real = {
            "temperature": (0.0, 100.0),
            "top_p": (0.0, 1.0),
            "min_p": (0.0, 1.0),
            "repetition_penalty": (0.01, 100.0),
            "presence_penalty": (-100.0, 100.0),
            "frequency_penalty": (-100.0, 100.0),
        }
        for name, (low, high) in whole.items():
            value = getattr(self, name)
            if value is None and name in ("logprobs", "prompt_logprobs", "seed"):
                continue
            _check(is_whole(value, low, high), name, value, f"a whole number from {low} to {high}")
        for name, (lowest, highest) in real.items():
            value = getattr(self, name)
            _check(is_number(value, lowest, highest), name, value, f"a number from {lowest} to {highest}")
        _check(self.top_p > 0, "top_p", self.top_p, "above 0")
        for name in ("ignore_eos", "speculate"):
            _check(isinstance(getattr(self, name), bool), name, getattr(self, name), "true or false")

    def _check_structure(self) -> None:
        given = [name for name in ("json_schema", "regex", "grammar") if getattr(self, name) is not None]
        if not given:
            return
        _check(len(given) == 1, given[-1], " and ".join(given), "the only one of json_schema, regex and grammar")
        value = getattr(self, given[0])
        if given[0] == "json_schema":
            _check(isinstance(value, Mapping), "json_schema", value, "a JSON schema as a mapping")
        else:
            _check(isinstance(value, str) and value != "", given[0], value, "a non-empty string")
        # The grammar decides when the output may end: a second opinion would leave no token to choose.
        _check(self.min_tokens == 0, "min_tokens", self.min_tokens, f"0 beside {given[0]}")
        _check(not self.ignore_eos, "ignore_eos", self.ignore_eos, f"false beside {given[0]}")

    @property
    def structured(self) -> bool:
        """True when a schema, regular expression or grammar constrains the output."""
        return self.json_schema is not None or self.regex is not None or self.grammar is not None

    @property
    def greedy(self) -> bool:
        """True when the next token is the arg-max of the raw logits and nothing else is asked of them."""
        return self.temperature == 0 and not self.shapes_logits and self.logprobs is None

    @property
    def top(self) -> int:
        """How many of the largest raw logits decide the next token, 0 where all may."""
        alone = self.temperature > 0 and not self.shapes_logits and self.logprobs is None
        return self.top_k if alone else 0

    @property
    def draws(self) -> bool:
        """True when a token is drawn from all raw logits by temperature, min-p and seed alone."""
        alone = self.temperature > 0 and not self.shapes_logits and self.logprobs is None
        return alone and self.top_k == 0 and self.top_p == 1.0

    @property
    def shapes_logits(self) -> bool:
        """True when penalties, biases, a grammar or a minimum length change the logits before the choice."""
        return (
            self.structured
            or self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or bool(self.logit_bias)
            or self.min_tokens > 0
            or self.thinking is not None
        )


@dataclass(frozen=True, slots=True)
class Namespace:
    """Where a prefix may be shared: only inside one (task, agent), and only within one version of it.

    The first request with a higher version frees what the older versions had cached; a request of an older version
    is served, but neither finds nor leaves a prefix.
    """

    task: str = ""
    agent: str = ""
    version: int = 0

    def __post_init__(self) -> None:
        _check(isinstance(self.task, str), "namespace.task", self.task, "a string")
        _check(isinstance(self.agent, str), "namespace.agent", self.agent, "a string")
        _check(is_whole(self.version, 0), "namespace.version", self.version, "a whole number of 0 or more")


@dataclass(frozen=True, slots=True)
class Request:
    """What a caller submits: exactly one of `prompt`, `prompt_tokens` and `messages`, and how to sample.

    `id` is the caller's name for it, unique among the requests in flight; without one the engine makes one.
    `arrival_s` delays the arrival by that many seconds after `run` begins (replay of staggered load); the other ways to
    submit a request refuse it.
    `deadline_s` counts from the arrival, waiting included, and also orders the queue; `timeout_s` counts from the
    moment the request joins the batch. Past either it ends with `FinishReason.TIMEOUT`. Groups of equal priority
    are served equally: a fleet of agents that belong together share one `group`. Inside a group the request with the
    longest `critical_path` goes first: how many tokens must still be written one after another, its own and those of
    what waits for it. For `keep_s` seconds after its end the KV of its prompt and output is evicted last, for a next
    turn that is sure to come (the result of a tool, say); nothing is held, and memory that is needed is still found.
    `predicted` are tokens that the output is expected to be like, as when a text is to come back with few changes: it
    never changes what is written, only how fast.
    """

    prompt: str | None = None
    prompt_tokens: Sequence[int] | None = None
    messages: Sequence[Message] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    id: str | None = None
    arrival_s: float = 0.0
    priority: Priority = Priority.NORMAL
    deadline_s: float | None = None
    timeout_s: float | None = None
    group: str = ""
    namespace: Namespace = Namespace()
    critical_path: int = 0
    predicted: Sequence[int] = ()
    keep_s: float = 0.0

    def __post_init__(self) -> None:
        given = [n for n in ("prompt", "prompt_tokens", "messages") if getattr(self, n) is not None]
        _check(len(given) == 1, "prompt", given, "given as exactly one of prompt, prompt_tokens and messages")
        value = getattr(self, given[0])
        if given[0] == "prompt":
            _check(isinstance(value, str), "prompt", value, "a string")
        else:
            _check(isinstance(value, Sequence) and not isinstance(value, str), given[0], value, "a list")
        _check(len(value) > 0, given[0], value, "not empty")
        _check(self.id is None or (isinstance(self.id, str) and self.id != ""), "id", self.id, "a non-empty string")
        _check(isinstance(self.sampling, SamplingParams), "sampling", self.sampling, "a SamplingParams")
        _check(is_number(self.arrival_s, 0), "arrival_s", self.arrival_s, "0 or more seconds")
        _check(self.priority in tuple(Priority), "priority", self.priority, f"one of {', '.join(Priority)}")
        object.__setattr__(self, "priority", Priority(self.priority))
        for name in ("deadline_s", "timeout_s"):
            value = getattr(self, name)
            _check(value is None or (is_number(value) and value > 0), name, value, "above 0 seconds, or None")
        _check(isinstance(self.group, str), "group", self.group, "a string")
        path = self.critical_path
        _check(is_whole(path, 0), "critical_path", path, "0 or more tokens")
        _check(is_number(self.keep_s, 0, MAX_KEEP_S), "keep_s", self.keep_s, f"from 0 to {MAX_KEEP_S} seconds")
        _check(isinstance(self.namespace, Namespace), "namespace", self.namespace, "a Namespace")
        predicted = self.predicted
        _check(isinstance(predicted, Sequence) and not isinstance(predicted, str), "predicted", predicted, "a list")
        _check(all(is_whole(t, 0, 2**31 - 1) for t in predicted), "predicted", predicted, "token ids of 0 or more")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token, and the most likely alternatives as (token, log-probability)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Receipt:
    """What sharing saved one request, in tokens of forward passes.

    `cached_tokens` were taken from the prefix tree when the request first joined the batch, `computed_tokens`
    were fed to the model (again after each of `preemptions`), `shared_with` other requests held its first block
    with it. `miss` is why no more was cached: `cold` (nothing alike was seen), `diverged` (the tokens differ from
    there on), `evicted` (it was there, memory ran out), `checkpoint` (more is there, but recurrent state was not kept
    at that token), `stale` (an old version of its namespace), `scored` (log-probabilities of the prompt were asked for,
    which no KV has), `off`, or None when nothing was missing.

    `drafted` output tokens were tried before they were chosen, and `accepted` of them came out right: each is a pass
    that the request did not need. `foretold` tokens of its output stood where `Request.predicted` had them. Of the
    cached tokens, `host_tokens` and `disk_tokens` had left the device and were brought back for this request.
    """

    cached_tokens: int = 0
    computed_tokens: int = 0
    shared_with: int = 0
    preemptions: int = 0
    miss: str | None = None
    drafted: int = 0
    accepted: int = 0
    foretold: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """How one request ended. `tokens` and `text` are the whole output; a stop token or string is in neither.

    `prompt_logprobs`, where asked for, has an entry for each token of the prompt but the first.

    Times count from submission (or from the scheduled arrival). `ttft_s` is None when no token came, `queue_s` (until
    it first joined the batch) when it never joined or a remote server does not tell.
    """

    id: str
    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    ttft_s: float | None
    latency_s: float
    seed: int
    receipt: Receipt = Receipt()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: ShoalError | None = None
    queue_s: float | None = None

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else f"{self.text[:57]}..."
        why = self.finish_reason if self.error is None else f"{self.finish_reason}: {self.error}"
        return f"<Result {self.id!r}: {len(self.tokens)} tokens, {why}, {text!r}>"

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix tree."""
        return self.receipt.cached_tokens


class Event(NamedTuple):
    """News of one request: tokens that appeared, the text they completed, and at the end its result.

    Exactly one event of a request has a `result`, and it is the last. The joined `text` of all its events is
    `result.text`; a token whose bytes are not yet a whole character brings an empty text. The first event has the
    `prompt_logprobs`, all of them.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    result: Result | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def finished(self) -> bool:
        """True for the last event of a request."""
        return self.result is not None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step was, for reports. `batch` counts sequences, `prefill_tokens` prompt tokens among those fed.

    `ms` is the whole step; `execute_ms` the part spent in the runner. Of the `drafted` tokens tried in it the
    `accepted` ones were right, and are among the `decode_tokens`.
    """

    step: int
    batch: int
    prefill_tokens: int
    decode_tokens: int
    ms: float
    execute_ms: float
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What `Engine.run` returns: results in the order of the requests, and what it took."""

    results: tuple[Result, ...]
    wall_s: float
    steps: tuple[StepRecord, ...]

    @property
    def output_tokens(self) -> int:
        """Tokens written, all requests together."""
        return sum(len(r.tokens) for r in self.results)

    @property
    def decode_tokens_per_s(self) -> float:
        """Aggregate decode rate: tokens of the steps that only decode, over the time of those steps."""
        pure = [s for s in self.steps if s.decode_tokens and not s.prefill_tokens]
        seconds = sum(s.ms for s in pure) / 1e3
        return sum(s.decode_tokens for s in pure) / seconds if seconds else 0.0


@dataclass(frozen=True, slots=True)
class TierStats:
    """What the tiers outside the device hold, and what went through them since the engine was loaded.

    `restored_*_blocks` were brought back, for `given_up` requests not all that was there, since it took too long or was
    gone. `dropped_blocks` were not kept: evicted before their turn, or refused by a disk that was full, slow or gone.
    `disk_fault` is why the disk is left alone at the moment.
    """

    host_blocks: int = 0
    host_bytes: int = 0
    disk_blocks: int = 0
    disk_queued_bytes: int = 0
    disk_written_bytes: int = 0
    disk_read_bytes: int = 0
    restored_host_blocks: int = 0
    restored_disk_blocks: int = 0
    dropped_blocks: int = 0
    given_up: int = 0
    disk_fault: str | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine holds now, and totals since it was loaded. Token counts are of ended requests, but for drafts.

    Passes tried `drafted_tokens`, of which `accepted_tokens` came out right: so many fewer rows of passes were needed.
    `peak_bytes` is the most memory the backend had in use at once, None where it does not count. `tiers` is None where
    KV is kept on the device only.
    """

    waiting: int
    running: int
    finished: int
    steps: int
    cached_tokens: int
    computed_tokens: int
    preemptions: int
    evictions: int
    kv_bytes: int
    kv_held_bytes: int
    kv_cached_bytes: int
    weight_bytes: int
    step_bytes: int
    checkpoint_bytes: int = 0
    peak_bytes: int | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    tiers: TierStats | None = None

    @property
    def hit_rate(self) -> float:
        """Share of all needed prompt and output tokens that came from the prefix tree."""
        total = self.cached_tokens + self.computed_tokens
        return self.cached_tokens / total if total else 0.0

    @property
    def memory_bytes(self) -> int:
        """What the memory budget counts: weights, all KV blocks and checkpoints, and the transient of a step."""
        return self.weight_bytes + self.kv_bytes + self.checkpoint_bytes + self.step_bytes
