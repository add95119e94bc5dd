"""Graphs of agents: nodes, dependencies between them, and rules that add nodes while the graph runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.agents.build.agent import Agent, check_seconds, placeholders
from shoal.agents.build.node import Input, Node, NodeLike, Ref, Rule, Source, nodes_of
from shoal.agents.build.rules import Branch, FunctionRule, Loop, Map, Reduce
from shoal.errors import CycleError, GraphError
from shoal.types import Namespace

if TYPE_CHECKING:
    from shoal.agents.run.engines import AgentEngine
    from shoal.agents.run.events import GraphEvent, GraphResult
    from shoal.agents.run.run import Run
    from shoal.agents.trace.trace import Trace
    from shoal.types import Message

RESERVED = ("engine", "trace", "task_id", "deadline_s", "seed", "earlier", "checkpoint", "resumed")


class GraphBuilder:
    """What a graph and a run of it have in common: nodes by id, what each of them needs, and ways to add more.

    Invariant: no node needs itself, directly or through others.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self._needs: dict[Node, list[Node]] = {}

    def needs(self, node: Node) -> Sequence[Node]:
        """The nodes it waits for."""
        return self._needs[node]

    def add(self, agent: Agent, *, after: NodeLike = (), continues: Node | None = None) -> Node:
        """One agent, to run when all of `after` have ended; their outputs are put into its prompt.

        With `continues` its prompt is that node's whole conversation with its own task as the next turn, so that it
        goes on from the KV that is there.
        """
        if continues is not None and continues.agent is None:
            raise GraphError(f"{continues.id} is no single agent to continue", value=continues.id)
        before = [] if continues is None else [continues]
        return self._enter(Node(self._name(agent.name), agent=agent, continues=continues), [*before, *nodes_of(after)])

    def map(self, agent: Agent, *, over: Source, after: NodeLike = ()) -> Node:
        """One agent for each item of a list (a field of a node's output, an input, or a list): `{item}`, `{index}`.

        The node's output is the list of theirs, in order.
        """
        return self._rule(agent.name, Map(agent, over, tuple(nodes_of(after))), [over], after)

    def reduce(self, agent: Agent, *, over: Node, width: int = 8, after: NodeLike = ()) -> Node:
        """One agent over each `width` outputs of a map, again over theirs, until one is left."""
        return self._rule(agent.name, Reduce(agent, over, width, tuple(nodes_of(after))), [over], after)

    def loop(
        self,
        *agents: Agent,
        until: Callable[[Any], bool],
        at_most: int,
        after: NodeLike = (),
        name: str | None = None,
    ) -> Node:
        """The agents one after another, again and again, until `until(the last one's output)` or `at_most` rounds.

        Each agent sees what the one before it wrote. The node's output is that of the last agent of the last round.
        """
        rule = Loop(agents, until, at_most, tuple(nodes_of(after)))
        return self._rule(name or f"{agents[-1].name}-loop", rule, [], after)

    def branch(
        self,
        on: Ref | Input | Node,
        cases: Mapping[Any, Agent],
        *,
        otherwise: Agent | None = None,
        after: NodeLike = (),
        name: str | None = None,
    ) -> Node:
        """The agent of the case that `on` turns out to be; without such a case and `otherwise` the node is skipped."""
        rule = Branch(on, dict(cases), otherwise, tuple(nodes_of(after)))
        return self._rule(name or "branch", rule, [on], after)

    def call(self, function: Callable[..., Any], *, after: NodeLike = (), name: str | None = None) -> Node:
        """A function (plain or async) of the run and the outputs of `after`: `function(run, *outputs)`.

        It may add nodes to the run. It returns a value, or the node or nodes whose outputs become this node's. A
        skipped output is None. What it raises ends the run, unless it is a `ShoalError`: then its node fails.
        """
        sources = tuple(nodes_of(after))
        return self._rule(
            name or str(getattr(function, "__name__", "call")), FunctionRule(function, sources), [], after
        )

    def depend(self, node: Node, *, on: NodeLike) -> None:
        """Let `node` wait for more nodes. `CycleError` names the path when one of them waits for it."""
        for other in nodes_of(on):
            self._own(node)
            self._own(other)
            self._refuse_cycle(node, other)
            if other not in self._needs[node]:
                self._needs[node].append(other)

    # -- inside -------------------------------------------------------------------------------------------------

    def _rule(self, name: str, rule: Rule, sources: Sequence[Source], after: NodeLike) -> Node:
        before = []
        for source in sources:
            if isinstance(source, Ref):
                before.append(source.node)
            elif isinstance(source, Node):
                before.append(source)
        return self._enter(Node(self._name(name), rule=rule), [*before, *nodes_of(after)])

    def _name(self, wanted: str) -> str:
        name, number = wanted, 1
        while name in self.nodes:
            number += 1
            name = f"{wanted}-{number}"
        return name

    def _own(self, node: Node) -> None:
        if self.nodes.get(node.id) is not node:
            raise GraphError(f"{node.id} is no node of this graph", value=node.id, hint="add it first")

    def _enter(self, node: Node, needs: Iterable[Node]) -> Node:
        """Take a new node in. Nothing can need it yet, so it closes no cycle."""
        unique = list(dict.fromkeys(needs))
        for other in unique:
            self._own(other)
        self.nodes[node.id] = node
        self._needs[node] = unique
        return node

    def _refuse_cycle(self, node: Node, need: Node) -> None:
        """`CycleError` if `need` waits for `node`, which is about to wait for it."""
        came_from: dict[Node, Node | None] = {need: None}
        stack = [need]
        while stack:
            at = stack.pop()
            if at is node:
                path = [at.id]
                while (before := came_from[at]) is not None:
                    at = before
                    path.append(at.id)
                raise CycleError((node.id, *reversed(path)))
            for other in self._needs[at]:
                if other not in came_from:
                    came_from[other] = at
                    stack.append(other)


class Graph(GraphBuilder):
    """Agents and what they wait for. Build it once, run it as often as you like, on any engine.

    `shared` is text that every agent begins with: rules, context, inputs in braces. `deadline_s` bounds a run; of it
    `reserve_s` is kept back for the final nodes (those nothing depends on), a fifth if not given. Prefixes are shared
    inside `namespace`. `inputs` names inputs that only functions read; those in braces need no mention.
    """

    def __init__(
        self,
        shared: str = "",
        *,
        name: str = "graph",
        deadline_s: float | None = None,
        reserve_s: float | None = None,
        namespace: Namespace | None = None,
        inputs: Sequence[str] = (),
    ) -> None:
        super().__init__()
        check_seconds("deadline_s", deadline_s)
        check_seconds("reserve_s", reserve_s)
        if reserve_s is not None and (deadline_s is None or reserve_s >= deadline_s):
            raise GraphError(f"reserve_s is {reserve_s}", value=reserve_s, limit=deadline_s, hint="below deadline_s")
        self.shared = shared
        self.name = name
        self.deadline_s = deadline_s
        self.reserve_s = reserve_s
        self.namespace = namespace or Namespace()
        self._declared = tuple(inputs)

    @property
    def inputs(self) -> frozenset[str]:
        """The names of the inputs that its prompts and rules use."""
        found = {*self._declared, *(path[0] for path in placeholders(self.shared))}
        for node in self.nodes.values():
            found |= self.inputs_of(node)
        return frozenset(found)

    def check(self) -> None:
        """Refuse a graph that cannot run: no nodes, prompts naming nodes that they do not wait for."""
        if not self.nodes:
            raise GraphError("the graph has no nodes", hint="add an agent")
        for name in self.inputs:
            if name in RESERVED:
                raise GraphError(f"{{{name}}} cannot be an input", value=name, limit=RESERVED, hint="rename it")

    def inputs_of(self, node: Node) -> set[str]:
        """The inputs that a node's prompts and rule use. GraphError when they name a node it does not wait for."""
        known = {need.id for need in self._needs[node]}
        found = set()
        if node.rule is not None:
            known.update(node.rule.provides)
            found = {source.name for source in node.rule.sources if isinstance(source, Input)}
        for agent in node.agents:
            for path in (*placeholders(agent.role), *placeholders(agent.task)):
                if path[0] in known:
                    continue
                if path[0] in self.nodes:
                    message = f"{agent.name} names {{{'.'.join(path)}}}, but does not wait for it"
                    raise GraphError(message, value=path[0], hint=f"give it after={path[0]}")
                found.add(path[0])
        return found

    def start(
        self,
        engine: AgentEngine,
        *,
        trace: Trace | None = None,
        task_id: str | None = None,
        deadline_s: float | None = None,
        seed: int | None = None,
        earlier: Sequence[Message] = (),
        checkpoint: str | Path | None = None,
        resumed: bool = False,
        **inputs: Any,
    ) -> Run:
        """A run, to be used with `async with`: iterate over it for events, add nodes to it, cancel nodes of it.

        `task_id` names the run in traces and towards the engine, unique among the runs under way; `seed` makes it
        repeatable; `earlier` are turns of a conversation that all prompts go on from, after the shared part and before
        what is their own. What has ended is kept in the new file `checkpoint`; with `resumed` that file is there, and
        only what is left is done. Raises `GraphError` for missing or unknown inputs, and as `check`; `CheckpointError`.
        """
        from shoal.agents.run.run import Run

        return Run(
            self,
            engine,
            inputs,
            trace=trace,
            task_id=task_id,
            deadline_s=deadline_s,
            seed=seed,
            earlier=earlier,
            checkpoint=None if checkpoint is None else Path(checkpoint),
            resumed=resumed,
        )

    async def run(self, engine: AgentEngine, **settings: Any) -> GraphResult:
        """Run it to its end. Settings and inputs as `start`. `GraphFailedError` when a final node failed."""
        async with self.start(engine, **settings) as run:
            result = await run.result()
        result.raise_for_failure()
        return result

    async def resume(self, engine: AgentEngine, path: str | Path, /, **settings: Any) -> GraphResult:
        """Go on with a run that had `checkpoint=path` and broke off, here or in another process.

        Inputs need not be given again where JSON can hold them. Other settings as `start`, errors as `run`.
        """
        return await self.run(engine, checkpoint=path, resumed=True, **settings)

    async def stream(self, engine: AgentEngine, **settings: Any) -> AsyncIterator[GraphEvent]:
        """Events of a run as they come; the last one has the result. Leaving early cancels the run."""
        async with self.start(engine, **settings) as run:
            async for event in run:
                yield event
