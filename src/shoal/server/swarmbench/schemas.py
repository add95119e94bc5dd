"""Bodies of the calls that the page makes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shoal.agents.cards import Specialist
from shoal.agents.graphcards import MAX_NODES
from shoal.server.openai.fields import Finite, Strict

MAX_AGENTS = 8
MAX_GRAPH = 50_000  # characters of a graph file


class OrderedAgent(Strict):
    """One specialist: its name, and the line that asks for its view."""

    name: Annotated[str, Field(min_length=1, max_length=60)]
    task: Annotated[str, Field(min_length=1, max_length=1000)]

    def specialist(self) -> Specialist:
        """The same for the engine's side."""
        return Specialist(self.name, self.task)


class SwarmRequest(Strict):
    """`POST /swarmbench/runs`: a question and who answers it; `after`: the run that it goes on from."""

    model: str | None = None
    after: Annotated[str, Field(max_length=64)] | None = None
    question: Annotated[str, Field(min_length=1, max_length=20_000)]
    agents: Annotated[list[OrderedAgent], Field(min_length=1, max_length=MAX_AGENTS)]
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 160
    temperature: Annotated[Finite, Field(ge=0, le=2)] = 0.4
    seed: Annotated[int, Field(ge=0, le=2**62)] | None = None
    synthesis: bool = True
    one_by_one: bool = False
    sharing: bool = True


class GraphFile(Strict):
    """`POST /swarmbench/graphs`: the name and the text of a graph file, as `shoal graph run` takes it."""

    file: Annotated[str, Field(min_length=1, max_length=200)]
    text: Annotated[str, Field(min_length=1, max_length=MAX_GRAPH)]


class GraphRequest(GraphFile):
    """`POST /swarmbench/graphs/runs`: such a file and its inputs, texts as `shoal graph run --input` takes them."""

    model: str | None = None
    after: Annotated[str, Field(max_length=64)] | None = None
    inputs: Annotated[dict[str, Annotated[str, Field(max_length=20_000)]], Field(default_factory=dict, max_length=20)]
    seed: Annotated[int, Field(ge=0, le=2**62)] | None = None
    sharing: bool = True


class StopRequest(Strict):
    """`POST /swarmbench/runs/{id}/stop`: one card, or all."""

    card: Annotated[int, Field(ge=0, le=MAX_NODES)] | None = None


class RenameRequest(Strict):
    """`PATCH /swarmbench/runs/{id}`."""

    title: Annotated[str, Field(min_length=1, max_length=200)]


class SettingsRequest(Strict):
    """`POST /swarmbench/state`: settings of the engine that can change while it runs."""

    max_stall_ms: Annotated[Finite, Field(gt=0, le=60_000)]


class PullRequest(Strict):
    """`POST /swarmbench/storage`: fetch a model into the store, or make one that is there at another precision."""

    name: Annotated[str, Field(min_length=1, max_length=300)]
    precision: Literal["q8_0", "q4_1", "q4_0"] | None = None
