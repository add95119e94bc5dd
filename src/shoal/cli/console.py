"""Small things every command shares: how errors, sizes and untrusted text are shown, what Ctrl-C does, loading."""

from __future__ import annotations

import json
import os
import signal
import sys
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from shoal.config import EngineConfig
from shoal.errors import ModelNotFoundError, ShoalError

if TYPE_CHECKING:
    from shoal.engine.engine import Engine

# Model output and questions may hold escape sequences that would drive the terminal.
_UNPRINTABLE = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """The text without control characters, except newline and tab."""
    return text.translate(_UNPRINTABLE)


def human_bytes(size: float) -> str:
    """A size with three digits or so: "98.4 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"


def describe(error: ShoalError) -> str:
    """An error in one or two lines: what is wrong, the value and the limit, then what to do."""
    line = _one_line(error.message)
    told = f"{line} {error.hint or ''}"
    extra = []
    for name, value in (("value", error.value), ("limit", error.limit)):
        text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        if value is not None and text not in told:
            extra.append(f"{name}: {_one_line(text)[:120]}")
    first = f"shoal: {line}" + (f" ({'; '.join(extra)})" if extra else "")
    return f"{first}\n  {_one_line(error.hint)}" if error.hint else first


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def print_json(document: Any) -> None:
    """One document on standard output, in the alphabet that the reader's encoding has."""
    ascii_only = "utf" not in (sys.stdout.encoding or "").lower()
    print(json.dumps(document, ensure_ascii=ascii_only, indent=2), flush=True)


def note(text: str) -> None:
    """A word to the person at the terminal, on standard error; nothing where that is no terminal."""
    if text and sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


class Interrupts:
    """What Ctrl-C does while a command runs: it is noted, to end the work cleanly; a second one quits at once.

    Until `hold` is called it raises `KeyboardInterrupt` as usual. Outside the main thread it changes nothing.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._held = False
        self._before: Any = None

    def hold(self) -> None:
        """From here on the first Ctrl-C only sets `wanted`."""
        self._held = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a signal handler's face
        if self.wanted or not self._held:
            if self.wanted:
                quit_now()
            raise KeyboardInterrupt
        self.wanted = True

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)


def quit_now() -> None:
    """Leave without waiting for the engine's thread, the cursor visible again."""
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), b"\x1b[?25h\n")
    os._exit(130)


def setting(name: str) -> Any:
    """The default of an engine setting, for the command line to show."""
    return EngineConfig.__dataclass_fields__[name].default


def load_engine(model: str, **settings: Any) -> Engine:
    """`Engine.load` that shows the fetching and packing of a model. Settings of None are left out."""
    from shoal.cli.progress import progress_bar
    from shoal.engine.engine import Engine

    with progress_bar(model) as show:
        return Engine.load(
            model, progress=show, **{name: value for name, value in settings.items() if value is not None}
        )


def pace(engine: Engine) -> str:
    """What the governor of an engine does at the moment; empty where there is none, or it does nothing."""
    return "" if engine.governor is None else printable(engine.governor.summary)


def ensure_model(model: str) -> None:
    """Fetch a model that is neither here nor a path, showing progress on standard error. Raises as `Store.pull`."""
    from shoal.models import Store

    store = Store()
    try:
        store.resolve(model, pull=False)
    except ModelNotFoundError:
        from shoal.cli.progress import pull_with_progress

        pull_with_progress(store, model)
