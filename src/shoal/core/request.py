"""What a request is to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.types import Namespace, Priority, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """One request as it was admitted: its prompt in tokens, its limits made exact, its seed drawn.

    Made once, where a request comes in; held by its `Sequence`, and written as it is to records and saved states.
    `deadline_s` counts from the arrival, `timeout_s` from joining the batch, None: no limit. With `prefill_only` the
    prompt is computed, pinned, and nothing is written. `predicted` is what the output is expected to be like. A new
    field of requests is added here and to `Request`, and read where it matters.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int = 0
    id: str | None = None
    priority: Priority = Priority.NORMAL
    group: str = ""
    namespace: Namespace = Namespace()  # noqa: RUF009 - frozen
    deadline_s: float | None = None
    timeout_s: float | None = None
    critical_path: int = 0
    keep_s: float = 0.0
    prefill_only: bool = False
    predicted: tuple[int, ...] = ()
