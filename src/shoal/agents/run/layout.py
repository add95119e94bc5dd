"""The prompt of an agent, laid out so that as much of it as possible is shared: rules, role, task, in that order.

```
system   shared rules and context                   the same for every agent of the graph
...      earlier turns of a conversation            the same for every agent of the run
user     outputs that agents with other roles read too
         role
         outputs that only this role reads
         task                                        what differs comes last
```

An output that several roles read stands before the role, where they share it; one that only this role reads stands
after it, so that the role can be computed while that output is still being written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.types import Message


@dataclass(frozen=True, slots=True)
class Section:
    """An output in a prompt: under which name, and its text; None while it is not written."""

    title: str
    text: str | None

    def shown(self) -> str:
        """As the prompt has it."""
        return f"## {self.title}\n{self.text}"


@dataclass(frozen=True, slots=True)
class Layout:
    """The parts of one prompt, in order. `earlier` are the turns before the run, the same in all of its prompts;
    `history` is the whole chat that the prompt goes on from, if it does."""

    shared: str
    common: tuple[Section, ...]
    role: str
    own: tuple[Section, ...]
    task: str
    history: tuple[Message, ...] = ()
    earlier: tuple[Message, ...] = ()

    def messages(self) -> list[Message]:
        """The chat; every section must have its text."""
        parts = [*(s.shown() for s in self.common), self.role, *(s.shown() for s in self.own), self.task]
        return self._chat([part for part in parts if part])

    def parts(self, agent: str) -> list[tuple[str, str]]:
        """Its parts by name, in order, empty ones left out."""
        named = [
            ("shared", self.shared),
            *((f"output of {s.title}", s.shown()) for s in self.common),
            (f"role of {agent}", self.role),
            *((f"output of {s.title}", s.shown()) for s in self.own),
            (f"task of {agent}", self.task),
        ]
        return [(name, text) for name, text in named if text]

    def known(self) -> str:
        """How the last message begins, as far as that is certain: up to the first section that is not written."""
        parts = []
        every: tuple[Section | str, ...] = (*self.common, self.role, *self.own)
        for part in every:
            if isinstance(part, str):
                parts += [part] if part else []
            elif part.text is None:
                break
            else:
                parts.append(part.shown())
        return "\n\n".join(parts)

    def beginnings(self) -> list[list[Message]]:
        """Two chats that agree in just what is certain, and differ from there on."""
        known = self.known()
        lead = [known] if known else []
        return [self._chat([*lead, rest]) for rest in ("A", "7")]

    def _chat(self, parts: Sequence[str]) -> list[Message]:
        message: Message = {"role": "user", "content": "\n\n".join(parts)}
        if self.history:
            return [*self.history, message]
        rules: list[Message] = [{"role": "system", "content": self.shared}] if self.shared else []
        return [*rules, *self.earlier, message]
