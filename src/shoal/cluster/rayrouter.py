"""The router behind Ray Serve's own interface: for calls that reach replicas by a handle of Ray's.

A deployment takes it as its request router; `shoal.cluster.rayserve` does so with its replicas:

    RequestRouterConfig(request_router_class="shoal.cluster.rayrouter:PrefixRouter", request_router_kwargs={...})

A replica tells in `record_routing_stats` where its `/v1/events` is (`url`) and how long its blocks are (`block_size`),
and the router follows that. Before one has told, Ray's choice is by the length of queues.
"""

# No `from __future__ import annotations`: Ray looks at annotations.
import asyncio
import time
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from shoal.cluster.links import ReplicaLink, follow
from shoal.cluster.loop import session_of
from shoal.cluster.router import Route, Router, RouterConfig
from shoal.core.journal import content_hashes
from shoal.types import Request

URL, BLOCK_SIZE = "url", "block_size"


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Ranks replicas by `shoal.cluster.router.Router`: the one it chooses, then all others.

    Looks at the first argument of a call that is a `Request` with `prompt_tokens`; any other call goes where least is
    to do. Maps Ray's number of a request to its route, from the choice to the request's end.
    """

    def initialize_state(self, api_key: str | None = None, **routing: Any) -> None:
        """Ray calls this with `request_router_kwargs`: the key of replicas, and fields of `RouterConfig`."""
        self._config = RouterConfig(**routing)
        self._core: Router | None = None
        self._api_key = api_key
        self._routes: dict[str, Route] = {}
        self._following: dict[str, asyncio.Task[None]] = {}

    def update_replicas(self, replicas: Sequence[RunningReplica]) -> None:
        """Ray calls this when replicas come, go, or tell something new."""
        super().update_replicas(replicas)
        told = {each.replica_id.unique_id: each.routing_stats for each in replicas if each.routing_stats}
        if told and self._core is None:
            self._core = Router(next(iter(told.values()))[BLOCK_SIZE], self._config)
        if self._core is None:
            return
        for name in set(self._core.replicas) - set(told):
            self._core.remove(name)
            self._following.pop(name).cancel()
        for name in set(told) - set(self._core.replicas):
            self._core.add(name)
            self._following[name] = self._event_loop.create_task(self._follow(self._core, name, told[name][URL]))

    async def _follow(self, core: Router, name: str, url: str) -> None:
        link = ReplicaLink(name, url, self._api_key)
        try:
            await follow(link, core)
        finally:
            await link.close()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ray calls this for a request, and again while those it was given are full."""
        there = {each.replica_id.unique_id: each for each in candidate_replicas}
        if pending_request is None or self._core is None:
            return [candidate_replicas]
        route = self._choose(self._core, pending_request, set(there))
        if route is None:
            return [candidate_replicas]
        return [[there.pop(route.replica)], list(there.values())]

    def _choose(self, core: Router, pending: PendingRequest, there: set[str]) -> Route | None:
        number = pending.metadata.internal_request_id
        self._end(number)
        request = _request_of(pending)
        tokens, hashes, key = [0], list[int](), ""
        if request is not None:
            tokens = list(request.prompt_tokens or tokens)
            hashes = content_hashes(tokens, request.namespace, core.block_size)
            key = session_of(request.namespace, request.group)
        without = set(core.replicas) - there
        route = core.route(hashes, len(tokens), time.monotonic(), key=key, without=without)
        if route is not None:
            self._routes[number] = route
            pending.future.add_done_callback(lambda future: self._end(number) if future.cancelled() else None)
        return route

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Ray calls this when a replica has ended a request, or refused it for it was full."""
        super().on_request_completed(replica_id, internal_request_id)
        route = self._routes.get(internal_request_id)
        if route is not None and route.replica == replica_id.unique_id:
            self._end(internal_request_id)

    def _end(self, number: str) -> None:
        route = self._routes.pop(number, None)
        if route is not None and self._core is not None:
            self._core.ended(route)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Ray calls this when a replica has taken a request: perhaps another than was chosen, which was full."""
        super().on_request_routed(pending_request, replica_id, result)
        number, taken = pending_request.metadata.internal_request_id, replica_id.unique_id
        route = self._routes.get(number)
        if self._core is not None and route is not None and route.replica != taken:
            self._choose(self._core, pending_request, {taken})


def _request_of(pending: PendingRequest) -> Request | None:
    arguments = [*pending.args, *pending.kwargs.values()]
    return next((each for each in arguments if isinstance(each, Request)), None)
