"""Agents as a graph: plans with dependencies, priorities, deadlines and fallbacks, run inside the scheduler."""

from shoal.agents.agent import Agent
from shoal.agents.engines import AgentEngine, LocalEngine
from shoal.agents.events import EventKind, GraphEvent, GraphResult, Outcome, State
from shoal.agents.graph import Graph
from shoal.agents.node import Input, Node, Ref
from shoal.agents.policy import default, fail, fallback, retry, skip
from shoal.agents.run import Run
from shoal.agents.trace import Trace, read_trace

__all__ = [
    "Agent",
    "AgentEngine",
    "EventKind",
    "Graph",
    "GraphEvent",
    "GraphResult",
    "Input",
    "LocalEngine",
    "Node",
    "Outcome",
    "Ref",
    "Run",
    "State",
    "Trace",
    "default",
    "fail",
    "fallback",
    "read_trace",
    "retry",
    "skip",
]
