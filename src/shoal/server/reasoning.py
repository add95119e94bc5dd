"""What a model thinks, apart from what it says: how its family marks it, found while it streams or all at once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from shoal.engine.inputs import Codec
from shoal.engine.loading import ModelCodec
from shoal.server.errors import bad_request
from shoal.types import Thinking


class Markers(NamedTuple):
    """The texts around a family's thinking."""

    begin: str
    end: str


_FAMILIES = (
    Markers("<think>", "</think>"),  # Qwen, DeepSeek, GLM, SmolLM3, Nemotron and most others
    Markers("[THINK]", "[/THINK]"),  # Mistral
    Markers("<seed:think>", "</seed:think>"),  # Seed
    Markers("<|START_THINKING|>", "<|END_THINKING|>"),  # Command
    Markers("◁think▷", "◁/think▷"),  # Kimi-VL
)
_LEVELS = {"minimal": 256, "low": 1024, "medium": 4096}  # tokens of thinking, where the template knows no levels
_FIELDS = ("reasoning_content", "thinking", "reasoning")  # of a message of history, as templates call it
_TAIL = 32  # tokens at a prompt's end that a marker may take
_WHITE = " \r\n\t"


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of thinking."""

    text: str


def template_of(codec: Codec) -> str:
    """The model's chat template; empty where there is none."""
    return (codec.tokenizer.chat_template.source or "") if isinstance(codec, ModelCodec) else ""


def markers_of(template: str) -> Markers | None:
    """How a model thinks, read off its chat template; None for one that does not think apart from its answer."""
    return next((markers for markers in _FAMILIES if markers.end in template), None)


def history_field(template: str) -> str | None:
    """The field of an assistant's message from which a template takes what was thought; None when it takes none."""
    return next((name for name in _FIELDS if re.search(rf"\.{name}\b|\[['\"]{name}|get\(['\"]{name}", template)), None)


def effort_variables(template: str, effort: str | None) -> dict[str, Any]:
    """The variables by which a template is told how much to think: "none" is not at all, None leaves it to itself."""
    if effort is None:
        return {}
    thinks = effort != "none"
    values: dict[str, Any] = {"enable_thinking": thinks, "thinking": thinks}
    if thinks:
        values["reasoning_effort"] = effort
    return {name: value for name, value in values.items() if re.search(rf"\b{name}\b", template)}


def prompt_thinks(codec: Codec, prompt: Sequence[int]) -> bool:
    """True when a prompt ends inside the thinking: the template has opened it for the model."""
    markers = markers_of(template_of(codec))
    if markers is None:
        return False
    tail = b"".join(map(codec.token_bytes, prompt[-_TAIL:])).decode("utf-8", "replace")
    return tail.rstrip().endswith(markers.begin)


@dataclass(frozen=True, slots=True)
class Effort:
    """What a call says of thinking, and the fields it says it in. `level` "none" is not at all, None leaves it open."""

    level: str | None = None
    budget: int | None = None
    level_field: str = "reasoning_effort"
    budget_field: str = "thinking_budget"

    def sampling(self, codec: Codec, prompt: Sequence[int], arguments: Mapping[str, Any]) -> dict[str, Any]:
        """`arguments` for `SamplingParams` with the bound on thinking, and with what holds the answer behind it.

        ApiError when the served model does not think and is asked to.
        """
        template = template_of(codec)
        markers = markers_of(template)
        if markers is None:
            field = self.level_field if self.level not in (None, "none") else self.budget_field
            if self.budget is not None or self.level not in (None, "none"):
                raise bad_request("the served model does not reason apart from its answer", field, "unsupported_value")
            return dict(arguments)
        opened = prompt_thinks(codec, prompt)
        held = _behind(arguments, markers) if opened else dict(arguments)
        tokens = self.budget
        if tokens is None and "reasoning_effort" not in effort_variables(template, self.level):
            tokens = _LEVELS.get(self.level or "")
        if tokens is not None and self.level != "none":
            held["thinking"] = Thinking(tokens, "" if opened else markers.begin, markers.end)
        return held


def _behind(arguments: Mapping[str, Any], markers: Markers) -> dict[str, Any]:
    """Arguments whose grammar holds what comes behind the thinking, which has begun."""
    held = dict(arguments)
    if "json_schema" in held:
        answer = f"held: %json {json.dumps(held.pop('json_schema'))}\n"
    elif "regex" in held:
        answer = f"held: /{held.pop('regex').replace('/', chr(92) + '/')}/\n"
    elif "grammar" in held:
        answer = re.sub(r"^start\b", "held", held.pop("grammar"), count=1, flags=re.MULTILINE)
    else:
        return held
    thought = f"thought[lazy]: /(.|\\n)*/ {json.dumps(markers.end, ensure_ascii=False)}\n"
    held["grammar"] = f"start: thought GAP held\n{thought}GAP: /[ \\n]{{0,3}}/\n{answer}"
    return held


class _State(Enum):
    START = "start"  # only white space so far: thinking may begin
    THINKING = "thinking"
    ENDED = "ended"  # behind it, white space is nobody's
    SAYING = "saying"


class ThoughtSplitter:
    """Splits text into what is thought, at its beginning only, and what is said.

    White space around the thinking belongs to neither. What the pieces add up to does not depend on how the text is
    cut. Without `markers` everything is said; with `opened` the thinking has begun before the first character.
    """

    def __init__(self, markers: Markers | None, *, opened: bool = False) -> None:
        self._markers = markers or _FAMILIES[0]
        self._held = ""
        self._begun = False  # something was thought
        self._state = _State.SAYING if markers is None else _State.THINKING if opened else _State.START

    @property
    def thought(self) -> bool:
        """True when anything was."""
        return self._begun

    def count(self, tokens: Sequence[int], token_bytes: Callable[[int], bytes]) -> int:
        """How many of an answer's tokens were thought, the marks among them."""
        end, tail = self._markers.end.encode(), b""
        for number, token in enumerate(tokens, 1):
            tail += token_bytes(token)
            if end in tail:
                return number
            tail = tail[-len(end) :]
        return len(tokens)

    def push(self, text: str) -> list[Thought | str]:
        """Take more text; give what it completed."""
        if self._state is _State.SAYING:
            return [text] if text else []
        self._held += text
        pieces: list[Thought | str] = []
        while self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[Thought | str]:
        """The text has ended: give what is left."""
        held, self._held = self._held, ""
        if self._state is _State.THINKING:
            held = held.rstrip(_WHITE) if self._begun else held.strip(_WHITE)
            return [Thought(held)] if held else []
        return [held] if held and self._state is not _State.ENDED else []

    def _step(self, pieces: list[Thought | str]) -> bool:
        """One move; False when more text is needed."""
        if self._state is _State.START:
            return self._start()
        if self._state is _State.THINKING:
            return self._think(pieces)
        rest = self._held.lstrip(_WHITE) if self._state is _State.ENDED else self._held
        self._held = ""
        if rest:
            self._state = _State.SAYING
            pieces.append(rest)
        return False

    def _start(self) -> bool:
        begin = self._markers.begin
        seen = self._held.lstrip(_WHITE)
        if seen.startswith(begin):
            self._held, self._state = seen[len(begin) :], _State.THINKING
            return True
        if begin.startswith(seen):
            return False
        self._state = _State.SAYING
        return True

    def _think(self, pieces: list[Thought | str]) -> bool:
        at = self._held.find(self._markers.end)
        ended = at >= 0
        ready = self._held[:at] if ended else self._held[: self._ready()]
        rest = self._held[at + len(self._markers.end) :] if ended else self._held[len(ready) :]
        if not self._begun:
            ready = ready.lstrip(_WHITE)
        if ended:
            ready = ready.rstrip(_WHITE)
            self._state = _State.ENDED
        if ready:
            self._begun = True
            pieces.append(Thought(ready))
        self._held = rest
        return ended

    def _ready(self) -> int:
        """How much of the held text is thought for certain: not what may begin the end mark, nor white space there."""
        end, held = self._markers.end, self._held
        size = next((n for n in range(min(len(end) - 1, len(held)), 0, -1) if held.endswith(end[:n])), 0)
        return len(held[: len(held) - size].rstrip(_WHITE))
