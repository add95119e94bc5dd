"""How a swarm is shown: a live grid of cards on a terminal, whole cards one by one elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from shoal.agents.cards import Card, CardState
from shoal.agents.swarm import Swarm
from shoal.cli.console import note, printable

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.panel import Panel
    from rich.segment import Segment

_COLOURS = {
    CardState.QUEUED: "dim",
    CardState.PREFILL: "yellow",
    CardState.DECODING: "cyan",
    CardState.DONE: "green",
    CardState.FAILED: "red",
    CardState.ABORTED: "magenta",
}
_MIN_WIDTH = 38  # of a card; below this, fewer columns


class Screen(Protocol):
    """Shows a swarm while it runs. A context manager that leaves the terminal as it was, whatever happens."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, ended: list[Card], pace: str = "") -> None:
        """Bring the screen up to date; `ended` are the cards that ended since the last call.

        `pace` is what a governor does to them at the moment.
        """
        ...

    def end(self) -> None:
        """Show what there is in full, and the summary."""
        ...


def make_screen(question: str, model: str, work: Swarm, *, quiet: bool) -> Screen:
    """The screen for where the output goes. `quiet` keeps it off standard output."""
    stream = sys.stderr if quiet else sys.stdout
    if stream.isatty():
        from rich.console import Console

        console = Console(file=stream, highlight=False, markup=False, emoji=False)
        if not console.is_dumb_terminal:
            return CardGrid(console, question, model, work)
    return Silent(model) if quiet else PlainScreen(model, work)


class Silent:
    """Shows nothing but a word that the model is being loaded."""

    def __init__(self, model: str) -> None:
        note(f"loading {model}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def show(self, ended: list[Card], pace: str = "") -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""


class PlainScreen(Silent):
    """Prints each card whole when it ends, as plain text without control characters."""

    def __init__(self, model: str, work: Swarm) -> None:
        super().__init__(model)
        self._work = work
        self._printed: set[str] = set()
        self._pace = ""

    def show(self, ended: list[Card], pace: str = "") -> None:
        """Print the cards that ended."""
        self._pace = pace or self._pace  # the last thing a governor did is told at the end
        for card in ended:
            self._printed.add(card.name)
            print(f"== {card.name} ({card_facts(card, time.perf_counter())})\n{card_text(card)}\n", flush=True)

    def end(self) -> None:
        """Print what was aborted before it began, and the summary."""
        self.show([card for card in self._work.cards if card.name not in self._printed])
        print(_with(summary_line(self._work), self._pace), flush=True)


class CardGrid:
    """A grid of cards, each with the end of its text while it streams and with all of it at the end."""

    def __init__(self, console: Console, question: str, model: str, work: Swarm) -> None:
        from rich.live import Live
        from rich.text import Text

        self._console = console
        self._work = work
        self._status = f"loading {model}"
        self._pace = ""
        self._drawn: dict[tuple[str, int, int | None], list[list[Segment]]] = {}
        console.print(Text(printable(question), style="bold"))
        # Drawn by the loop that follows the swarm: a thread of its own would compete with the engine.
        self._live = Live(self._cards(), console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, ended: list[Card], pace: str = "") -> None:  # noqa: ARG002 - all cards are drawn anew
        """Draw the next frame."""
        self._pace = pace
        self._status = _with(summary_line(self._work, time.perf_counter()), pace)
        self._live.update(self._cards(), refresh=True)

    def end(self) -> None:
        """Leave all cards in full on the screen, which may be more than fits it, and the summary."""
        self._live.stop()
        self._status = _with(summary_line(self._work), self._pace)
        self._console.print(self._cards(whole=True))

    def _cards(self, *, whole: bool = False) -> Group:
        from rich.console import Group
        from rich.segment import Segments
        from rich.text import Text

        columns, height = self._layout()
        cards, now = self._work.cards, time.perf_counter()
        segments: list[Segment] = []
        for first in range(0, len(cards), columns):
            segments += self._row(cards[first : first + columns], columns, None if whole else height, now)
        status = Text(self._status, style="bold" if whole else "dim", no_wrap=not whole, overflow="ellipsis")
        return Group(Segments(segments), status)

    def _layout(self) -> tuple[int, int]:
        """Columns of the grid, and lines of a card so that all fit the screen."""
        count = len(self._work.cards)
        columns = max(1, min(count, self._console.width // _MIN_WIDTH, 4))
        rows = -(-count // columns)
        return -(-count // rows), max(3, min(12, (self._console.height - 3) // rows))  # five cards are 3 + 2, not 4 + 1

    def _row(self, cards: list[Card], columns: int, height: int | None, now: float) -> list[Segment]:
        """Cards side by side. Put together here because a table would measure every text anew, in every frame."""
        from rich.segment import Segment

        width = self._console.width // columns
        drawn = [self._lines(card, width, height, now) for card in cards]
        if height is None:
            highest = max(map(len, drawn))
            drawn = [self._lines(card, width, highest, now, whole=True) for card in cards]
        return [segment for line in zip(*drawn, strict=True) for part in (*line, [Segment.line()]) for segment in part]

    def _lines(
        self, card: Card, width: int, height: int | None, now: float, *, whole: bool = False
    ) -> list[list[Segment]]:
        """A card as lines of one width; those of an ended card are kept."""
        key = (card.name, width, height)
        if card.finished and key in self._drawn:
            return self._drawn[key]
        panel = self._panel(card, width, height, now, whole=whole)
        lines = self._console.render_lines(panel, self._console.options.update(width=width, height=height))
        if card.finished:
            self._drawn[key] = lines
        return lines

    def _panel(self, card: Card, width: int, height: int | None, now: float, *, whole: bool) -> Panel:
        from rich.panel import Panel
        from rich.text import Text

        text = card_text(card)
        if height is not None and not whole:
            text = tail(text, width - 4, height - 2)
        return Panel(
            Text(text),
            title=Text(card.name, style="bold"),
            title_align="left",
            subtitle=Text(card_facts(card, now)),
            subtitle_align="right",
            height=height,
            border_style=_COLOURS[card.state],
        )


def tail(text: str, width: int, lines: int) -> str:
    """The last `lines` lines of the text, wrapped to `width` cells, as far as they go back."""
    from rich.cells import cell_len, chop_cells

    wrapped: list[str] = []
    for paragraph in text[-2 * width * lines :].split("\n"):
        line = ""
        for word in paragraph.split(" "):
            joined = f"{line} {word}" if line else word
            if cell_len(joined) <= width:
                line = joined
                continue
            if line:
                wrapped.append(line)
            *full, line = chop_cells(word, width) or [""]
            wrapped += full
        wrapped.append(line)
    return "\n".join(wrapped[-lines:])


def card_text(card: Card) -> str:
    """What a card shows: its text, or why there is none."""
    error = card.result.error if card.result is not None else None
    return printable(str(error)) if error is not None else printable(card.text).strip()


def card_facts(card: Card, now: float) -> str:
    """State, tokens and rate of a card."""
    facts = [str(card.state)]
    if card.tokens:
        facts.append(f"{card.tokens} tokens")
    rate = card.tokens_per_s(now)
    if rate:
        facts.append(f"{rate:.0f} tok/s")
    return ", ".join(facts)


def summary_line(work: Swarm, now: float | None = None) -> str:
    """Tokens, wall time, aggregate rate and shared prefix; up to `now` while the swarm runs."""
    summary = work.summary(now)
    line = f"{summary.tokens} tokens in {summary.wall_s:.2f} s, {summary.tokens_per_s:.0f} tok/s aggregate"
    if summary.prefix_tokens:
        line += f", shared prefix {summary.prefix_tokens} tokens ({summary.cached_tokens} not computed again)"
    return line


def _with(line: str, pace: str) -> str:
    """The summary, and what a governor does."""
    return f"{line}; {pace}" if pace else line
