"""Every error the package raises on purpose, as one tree.

An error is part of the interface: it carries the offending value, the limit it broke and what to do
about it, and its message says all three. Catch `ShoalError` for any of them.
"""

from __future__ import annotations

from typing import Any


class ShoalError(Exception):
    """Base of all errors of this package.

    `message` says what is wrong; `value` is the offending value, `limit` what it had to respect and
    `hint` the knob to turn or the step to take. The last three may be None where there is none.
    """

    def __init__(self, message: str, *, value: object = None, limit: object = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.value = value
        self.limit = limit
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are copied and pickled by calling their class with `args`; ours also need keywords.
        return _rebuilt, (type(self), self.args, dict(vars(self)))


def _rebuilt(kind: type[ShoalError], args: tuple[object, ...], fields: dict[str, object]) -> ShoalError:
    """An error as it was, without calling its `__init__`."""
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(fields)
    return error


class ConfigError(ShoalError):
    """A setting of the engine or of the command line is unknown, contradictory or out of range."""


class RequestError(ShoalError):
    """A request cannot be served as asked; the others are unharmed. `param` names the field at fault."""

    def __init__(
        self, message: str, *, param: str, value: object = None, limit: object = None, hint: str | None = None
    ) -> None:
        super().__init__(message, value=value, limit=limit, hint=hint)
        self.param = param


class InvalidRequestError(RequestError):
    """A field of the request or of its sampling parameters has a wrong type, value or combination."""


class PromptTooLongError(RequestError):
    """The prompt does not fit the model's context. `value` and `limit` count tokens."""


class KVBudgetError(RequestError):
    """The request could never fit the KV blocks, even alone. `value` and `limit` count tokens."""


class QueueFullError(RequestError):
    """As many requests wait as may. `retry_after_s` is an estimate of when a place will be free.

    `param` is the limit: "max_queue", or "max_queue_tokens" for the tokens of their prompts.
    """

    def __init__(
        self, message: str, *, value: object, limit: object, retry_after_s: float, param: str = "max_queue"
    ) -> None:
        super().__init__(
            message,
            param=param,
            value=value,
            limit=limit,
            hint=f"retry in about {retry_after_s:.1f} s or raise {param}",
        )
        self.retry_after_s = retry_after_s


class PowerLimitError(RequestError):
    """The machine is too hot or out of energy, and takes nothing new. `value` is the reading, `limit` the level."""

    def __init__(self, message: str, *, value: object, limit: object, retry_after_s: float) -> None:
        hint = f"retry in about {retry_after_s:.0f} s, or give the governor another policy"
        super().__init__(message, param="governor", value=value, limit=limit, hint=hint)
        self.retry_after_s = retry_after_s


class MemoryPressureError(RequestError):
    """The machine is out of memory, and nothing new is taken. `value` is what the sensors say, `limit` the level."""

    def __init__(self, message: str, *, value: object, limit: object, retry_after_s: float) -> None:
        hint = f"retry in about {retry_after_s:.0f} s, or free memory: a smaller kv_memory, a smaller model"
        super().__init__(message, param="memory", value=value, limit=limit, hint=hint)
        self.retry_after_s = retry_after_s


class SensorError(ShoalError):
    """A sensor of heat, power or energy is not there, or cannot be read by this user."""


class ModelError(ShoalError):
    """Base of what can be wrong with a model: name, files, format, architecture, tokenizer."""


class ModelNotFoundError(ModelError):
    """No model of that name in the store, on disk or on the hub."""


class ModelFormatError(ModelError):
    """The model's files are broken, truncated, incomplete, or their checksum does not match."""


class UnsupportedModelError(ModelError):
    """The files are sound, but their architecture, tensor type or tokenizer is not one this package runs."""


class StoreError(ModelError):
    """The model store on disk cannot be read or written."""


class HistoryError(ShoalError):
    """The history of runs on disk cannot be read or written: a full disk, a damaged file, a newer version."""


class DownloadError(ModelError):
    """A model could not be fetched: no network, no package index, no such file there."""


class BackendError(ShoalError):
    """The backend a runner needs is not installed or does not run on this machine."""


class RunnerError(ShoalError):
    """A forward pass failed. The requests that were in it end with this; the engine says if it goes on."""


class CallbackError(ShoalError):
    """The sink of a request raised, and so the request ended. `__cause__` is what it raised."""


class EngineClosedError(ShoalError):
    """The engine is closed, or has failed, and takes no more requests. `__cause__` is why, if it failed."""


class ReplicaLostError(ShoalError):
    """The replica of a cluster that served a request died or fell silent. `value` is its name.

    Raised where the answer had begun, or where a second replica was lost as well: a request is sent elsewhere once.
    """


class BenchmarkError(ShoalError):
    """A measurement could not be made, or a result file is not one. `value` names the system, level or file."""


class GraphError(ShoalError):
    """A graph of agents is wrong as it is built or asked to run: a name, a reference, a policy, an input."""


class CycleError(GraphError):
    """A dependency would close a cycle. `path` names its nodes in order, the first again at the end."""

    def __init__(self, path: tuple[str, ...]) -> None:
        super().__init__(
            f"the nodes wait for each other: {' -> '.join(path)}", value=list(path), hint="take one dependency out"
        )
        self.path = path


class GraphFileError(GraphError):
    """A graph file is wrong. `file` and `line` (from 1) say where, `value` is the offending key or value."""

    def __init__(self, message: str, *, file: str, line: int, value: object = None, hint: str | None = None) -> None:
        super().__init__(f"{file}:{line}: {message}", value=value, hint=hint)
        self.file = file
        self.line = line


class CheckpointError(GraphError):
    """A checkpoint of a run cannot be read or written, is in use, or is of another graph or other inputs."""


class GraphFailedError(ShoalError):
    """A final node of a graph failed. `result` is the whole `GraphResult`, what the other nodes wrote included."""

    def __init__(self, message: str, *, result: object, value: object = None, hint: str | None = None) -> None:
        super().__init__(message, value=value, hint=hint)
        self.result = result
