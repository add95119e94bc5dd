"""Agents as a graph: plans with dependencies, priorities, deadlines and fallbacks, run inside the scheduler."""

from shoal.agents.build.agent import Agent
from shoal.agents.build.graph import Graph
from shoal.agents.build.node import Input, Node, Ref
from shoal.agents.build.policy import default, fail, fallback, retry, skip
from shoal.agents.rollout.plan import RolloutPlan
from shoal.agents.rollout.rollout import Rollout
from shoal.agents.run.engines import AgentEngine, LocalEngine
from shoal.agents.run.events import EventKind, GraphEvent, GraphResult, Outcome, State
from shoal.agents.run.run import Run
from shoal.agents.trace.trace import Trace, read_trace

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
    "Rollout",
    "RolloutPlan",
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
