"""One run of a graph: nodes become ready, run, end, and make others ready."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from shoal.agents.build.agent import Agent, check_seconds
from shoal.agents.build.graph import Graph
from shoal.agents.build.node import NOTHING, Node, NodeLike, Ref
from shoal.agents.build.policy import attempts_of
from shoal.agents.build.schema import plain
from shoal.agents.run.attempt import pursue, settle
from shoal.agents.run.cache import Memo
from shoal.agents.run.checkpoint import Checkpoint
from shoal.agents.run.engines import LocalEngine
from shoal.agents.run.events import EventKind, GraphEvent, GraphResult, Outcome, State
from shoal.agents.run.prefixes import make_keeper
from shoal.agents.run.state import RunState, check_inputs, task_id_of
from shoal.agents.trace.spans import make_spans
from shoal.agents.trace.trace import Trace
from shoal.errors import CheckpointError, GraphError, ShoalError

if TYPE_CHECKING:
    from shoal.agents.run.engines import AgentEngine
    from shoal.types import Message

_adding: ContextVar[tuple[Run | None, Node | None]] = ContextVar("adding", default=(None, None))
_RESERVE = 0.2  # share of a graph's deadline that is kept back for its final nodes, unless told


class Run(RunState):
    """One run. Use it with `async with`; iterate over it for events, or await `result`. All on one event loop.

    Invariant: a node enters exactly one final state, once, through `_end`; when all have, the run is over. What
    becomes of a node with a failed, skipped or cancelled need is decided when it is ready, like everything else.
    """

    def __init__(
        self,
        graph: Graph,
        engine: AgentEngine,
        inputs: Mapping[str, Any],
        *,
        trace: Trace | None,
        task_id: str | None,
        deadline_s: float | None,
        seed: int | None,
        earlier: Sequence[Message],
        checkpoint: Path | None,
        resumed: bool,
    ) -> None:
        graph.check()
        check_seconds("deadline_s", deadline_s)
        if resumed and (checkpoint is None or seed is not None or task_id is not None or earlier):
            message = "a resumed run has its seed, task_id and earlier turns from its checkpoint"
            raise GraphError(message, hint="give checkpoint alone")
        self.checkpoint = Checkpoint(graph, checkpoint, resumed=resumed, inputs=inputs, earlier=earlier)
        self._kept = checkpoint is not None
        past = self.checkpoint.past
        check_inputs(graph, past.inputs)
        super().__init__(graph, past.inputs, past.earlier)
        self.engine = engine
        self.task_id = past.task_id if resumed else task_id_of(graph, task_id)
        self.seed = past.seed if resumed else secrets.randbits(62) if seed is None else seed
        self.trace = trace or Trace()
        self.records: list[Mapping[str, Any]] = []
        self.chats: dict[Node, list[Message]] = {}  # what each agent was asked, for those that go on from it
        self.memo = Memo(past.memo, self.checkpoint.keep_call)
        self.local = isinstance(engine, LocalEngine)  # it takes hints, and counts timeouts from joining the batch
        self.keeper = make_keeper(self)
        self.spans = make_spans(self.task_id, graph.name)
        self._deadline_s = graph.deadline_s if deadline_s is None else deadline_s
        self._tasks: dict[Node, asyncio.Task[None]] = {}
        self._single: set[Node] = set()  # rules' nodes that became one node, not a list
        self._attempts: dict[Node, int] = {}
        self._started_ms: dict[Node, float] = {}
        self._events: deque[GraphEvent] = deque()
        self._streaming = False
        self._news = asyncio.Event()
        self._crash: BaseException | None = None
        self._result: GraphResult | None = None
        self._begun: float | None = None
        self._over = False
        self._interrupted = False
        self._held = True  # no node begins yet

    # -- living -------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._kept:  # a disk may be slow
            await asyncio.to_thread(self.checkpoint.begin, self.task_id, self.seed)
        self._begun = self.checkpoint.start_clock()
        self.record({"kind": "graph", "graph": self.graph.name, "state": "begun", "deadline_s": self._deadline_s})
        self.keeper.begin()
        for name in self.checkpoint.past.ended:
            if name in self.nodes:
                self._take_up(self.nodes[name])
        self._held = False
        for node in [node for node, count in self.open.items() if not count]:
            self._ready(node)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._wind_up("the run was left")

    async def result(self) -> GraphResult:
        """Wait for the end of the run. What a function of yours raised is raised here."""
        while self.open and self._crash is None:
            self._news.clear()
            await self._news.wait()
        return await self._conclude()

    def __aiter__(self) -> AsyncIterator[GraphEvent]:
        return self._stream()

    async def _stream(self) -> AsyncIterator[GraphEvent]:
        """Events as they come. The run is not over before all were taken: the reader of one may still add nodes."""
        self._streaming = True
        while self._crash is None:
            if self._events:
                yield self._events.popleft()
            elif not self.open:
                break
            else:
                self._news.clear()
                await self._news.wait()
        yield GraphEvent(EventKind.FINISHED, result=await self._conclude())

    async def _conclude(self) -> GraphResult:
        if self._result is None:
            await self._wind_up("the run broke off")
        if self._crash is not None:
            raise self._crash
        if not self._interrupted:
            self.checkpoint.check_claimed(self.nodes)
        assert self._result is not None
        return self._result

    async def _wind_up(self, cause: str) -> None:
        """Cancel what has not ended, wait for what is on its way out, and sum up. Idempotent."""
        if self._over:
            return
        self._over = True
        self.checkpoint.close()  # what is cut off here is left to a resume
        for node in list(self.open):
            self._end(node, Outcome(State.CANCELLED, cause=cause))
        while self._tasks:
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self.keeper.end()
        outcomes = {node.id: self._outcomes[node] for node in self._needs}
        wall_s = self.now_ms / 1e3
        result = GraphResult(self.task_id, outcomes, self.finals, (), wall_s)
        state = State.DONE if result.ok else State.FAILED
        self.record({"kind": "graph", "graph": self.graph.name, "state": state, "wall_s": round(wall_s, 6)})
        self.spans.end(state)
        self._result = GraphResult(self.task_id, outcomes, self.finals, tuple(self.records), wall_s)

    # -- what callers may do ------------------------------------------------------------------------------------

    def state(self, node: Node) -> State:
        """Where a node stands."""
        outcome = self.outcome(node)
        if outcome is not None:
            return outcome.state
        return State.RUNNING if node in self._started_ms else State.WAITING

    def interrupt(self) -> None:
        """End the run here: what has not ended is cancelled, and left to a resume."""
        self._interrupted = True
        self.checkpoint.close()
        for node in list(self.open):
            self._end(node, Outcome(State.CANCELLED, cause="the run was interrupted"))

    def cancel(self, node: Node) -> None:
        """Cancel a node and everything that depends on it. Requests end at the next token; what has ended stays."""
        self._own(node)
        for other in self.subtree(node):
            cause = "cancelled" if other is node else f"{node.id} was cancelled"
            self._end(other, Outcome(State.CANCELLED, cause=cause))

    def discard(self, node: Node) -> None:
        """End a node that is not needed any more as skipped: its dependants go on without it. What has ended stays."""
        self._own(node)
        for other in self.offspring(node):
            self._end(other, Outcome(State.SKIPPED, cause="discarded"))

    def depend(self, node: Node, *, on: NodeLike) -> None:
        """As `GraphBuilder.depend`. GraphError for a node that has begun."""
        if node in self._started_ms or node not in self.open:
            raise GraphError(f"{node.id} has begun", value=node.id, hint="let it wait before its inputs are there")
        super().depend(node, on=on)

    # -- what rules and attempts ask ----------------------------------------------------------------------------

    def is_running(self, node: Node) -> bool:
        """True while an agent writes for it, or for a node that it stands for."""
        return any(
            part.agent is not None and part in self._started_ms and part in self.open for part in self.members(node)
        )

    def next_attempt(self, node: Node) -> int:
        """The number of the attempt that begins now, from 1."""
        self._attempts[node] = self._attempts.get(node, 0) + 1
        return self._attempts[node]

    @property
    def now_ms(self) -> float:
        """Milliseconds since the run began."""
        return 0.0 if self._begun is None else (time.perf_counter() - self._begun) * 1e3

    def limit(self, node: Node) -> float:
        """Until when a node may take, on the clock of `time.perf_counter`; a part is kept back for final nodes."""
        if self._deadline_s is None or self._begun is None:
            return float("inf")
        if self.is_final(node):
            return self._begun + self._deadline_s
        reserve = self.graph.reserve_s
        if reserve is None or reserve >= self._deadline_s:
            reserve = self._deadline_s * _RESERVE
        return self._begun + self._deadline_s - reserve

    def spawn(self, parent: Node, agent: Agent, name: str, needs: Sequence[Node], values: Mapping[str, Any]) -> Node:
        """Add a node on behalf of another one's rule."""
        return self._enter(Node(self._name(name), agent=agent, values=values, parent=parent), needs)

    def decide(self, what: str, node: Node, facts: Mapping[str, Any]) -> None:
        """Put a decision into the trace."""
        shown = {name: plain(value) for name, value in facts.items()}
        self.record({"kind": "decision", "decision": what, "agent_id": node.id, **shown})

    def record(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Put a record into the trace; it gets the task's id and the time since the run began."""
        full = self.trace.write({**record, "task_id": self.task_id, "at_ms": round(self.now_ms, 3)})
        self.records.append(full)
        return full

    def tell(self, event: GraphEvent) -> None:
        """Put an event into the stream, if there is a reader."""
        if self._streaming or event.kind is not EventKind.TEXT:
            self._events.append(event)
        self._news.set()

    # -- the life of a node -------------------------------------------------------------------------------------

    def _enter(self, node: Node, needs: NodeLike) -> Node:
        if self._over or self._crash is not None:
            raise GraphError("the run is over", value=node.id, hint="add nodes while it runs, or to the graph")
        super()._enter(node, needs)
        if self._begun is not None:
            self.checkpoint.entered(node, self._needs[node], self._adder)
            self.tell(GraphEvent(EventKind.ADDED, node))
            if not self._take_up(node) and not self.open[node]:
                self._ready(node)
        return node

    @property
    def _adder(self) -> Node | None:
        """Whose rule adds nodes at the moment; None: the caller."""
        run, node = _adding.get()
        return node if run is self else None

    def _name(self, wanted: str) -> str:
        known = self.checkpoint.named(self._adder, wanted)
        if known is not None:
            return known
        name = wanted
        while (name := super()._name(name)) in self.checkpoint.past.added:  # another rule will claim it
            name += "-2"
        return name

    def _take_up(self, node: Node) -> bool:
        """Let a node end as it had before this run was resumed; False when it had not."""
        outcome = self.checkpoint.outcome(node)
        if outcome is None:
            return False
        if node.id in self.checkpoint.past.chats:
            self.chats[node] = self.checkpoint.past.chats[node.id]
        self._end(node, outcome)
        return True

    def _ready(self, node: Node) -> None:
        if self._over or self._held:
            return
        task = asyncio.get_running_loop().create_task(self._live(node), name=node.id)
        self._tasks[node] = task
        task.add_done_callback(lambda done: self._gone(node, done))

    def _gone(self, node: Node, task: asyncio.Task[None]) -> None:
        if self._tasks.get(node) is task:
            del self._tasks[node]
        if not task.cancelled() and task.exception() is not None:
            self._crash = self._crash or task.exception()
            self._news.set()

    async def _live(self, node: Node) -> None:
        if node not in self.open:
            return
        if node not in self._started_ms:
            self._started_ms[node] = self.now_ms
            self.spans.begin_node(node.id)
            self.tell(GraphEvent(EventKind.STARTED, node))
        _adding.set((self, node))  # for this task, which is the node's own
        outcome = await self._outcome(node)
        if outcome is not None:
            self._end(node, self.checkpoint.settled(node, outcome))

    async def _outcome(self, node: Node) -> Outcome | None:
        """What becomes of a node whose needs have all ended; None when it now waits for nodes that it added."""
        if node in self._members:
            return self._proceeded(node, self._joined(node, node in self._single))
        needs = [(need, self._outcomes[need]) for need in self._needs[node]]
        if any(outcome.state is State.CANCELLED for _, outcome in needs):
            return Outcome(State.CANCELLED, cause="an input was cancelled")
        failed = [need.id for need, outcome in needs if outcome.state is State.FAILED]
        cause = f"{', '.join(failed)} failed" if failed else None
        if node.agent is None:
            return Outcome(State.FAILED, cause=cause) if cause else await self._expanded(node)
        limit = min(self.limit(node), time.perf_counter() + (node.agent.deadline_s or float("inf")))
        if cause is not None:
            return await settle(self, node, attempts_of(node.agent.on_failure)[1], cause, limit)
        if needs and all(outcome.state is State.SKIPPED for _, outcome in needs):
            return Outcome(State.SKIPPED, cause="all its inputs were skipped")
        self.keeper.started(node)
        return await pursue(self, node, node.agent, limit)

    async def _expanded(self, node: Node) -> Outcome | None:
        """Let a rule's node become what its rule says; None when that is nodes to wait for."""
        rule = node.rule
        assert rule is not None
        for source in rule.sources:
            need = source.node if isinstance(source, Ref) else source
            if isinstance(need, Node) and self._outcomes[need].state is State.SKIPPED:
                return Outcome(State.SKIPPED, cause=f"{need.id} was skipped")
        limit = self.limit(node)
        try:
            async with asyncio.timeout(None if limit == float("inf") else max(limit - time.perf_counter(), 0)) as guard:
                given = await rule.expand(self, node)
            if given is NOTHING:
                return Outcome(State.SKIPPED, cause="no case fits")
            members = _nodes_in(given)
            if members is None:
                return Outcome(State.DONE, given)
            RunState.depend(self, node, on=members)
        except TimeoutError:
            if not guard.expired():
                raise
            return self._give_up(node, "the deadline of the graph has passed")
        except CheckpointError:
            raise
        except ShoalError as error:
            return self._give_up(node, str(error))
        self._members[node] = members
        if isinstance(given, Node):
            self._single.add(node)
        return None if self.open[node] else self._proceeded(node, self._joined(node, node in self._single))

    def _proceeded(self, node: Node, outcome: Outcome) -> Outcome | None:
        """The outcome, or None when the rule goes on with one more node: a loop's next round."""
        assert node.rule is not None
        while outcome.state in (State.DONE, State.DEFAULTED):
            try:
                following = node.rule.proceed(self, node, outcome.value)
            except CheckpointError:
                raise
            except ShoalError as error:
                return self._give_up(node, str(error))
            if following is None:
                break
            RunState.depend(self, node, on=following)
            self._members[node] = [following]
            if self.open[node]:
                return None
            outcome = self._joined(node, node in self._single)
        return outcome

    def _give_up(self, node: Node, cause: str) -> Outcome:
        """A rule failed: what it has added already is cancelled."""
        for other in self.offspring(node)[1:]:
            self._end(other, Outcome(State.CANCELLED, cause=f"{node.id} failed"))
        return Outcome(State.FAILED, cause=cause)

    def _end(self, node: Node, outcome: Outcome) -> None:
        """The only way into a final state. Nothing happens to a node that has ended."""
        if node not in self.open:
            return
        self.checkpoint.ended(node, outcome, self.chats.get(node), joined=node in self._members)
        ready = self._book(node, outcome)
        task = self._tasks.get(node)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        started = self._started_ms.get(node)
        self.record(
            {
                "kind": "node",
                "agent_id": node.id,
                "agent": None if node.agent is None else node.agent.name,
                "state": outcome.state,
                "cause": outcome.cause,
                "waited_for": [need.id for need in self._needs[node]],
                "started_at_ms": None if started is None else round(started, 3),
            }
        )
        self.spans.end_node(node.id, outcome.state, outcome.cause)
        self.tell(GraphEvent(EventKind.ENDED, node, outcome=outcome))
        self.keeper.ended(node)
        for other in ready:
            self._ready(other)


def _nodes_in(given: Any) -> list[Node] | None:
    """The nodes that a rule gave; None when it gave a value."""
    if isinstance(given, Node):
        return [given]
    if isinstance(given, list) and given and all(isinstance(part, Node) for part in given):
        return given
    return None
