"""The cluster as an application of Ray Serve: it places replicas, replaces dead ones, and makes more when much waits.

    shoal cluster up cluster.yaml                               # or, with Ray's own command:
    serve run shoal.cluster.rayserve:application file=cluster.yaml

A replica is one engine with our server on a port of its own, which it tells a small registry; the door asks that and
sends requests there itself. So what a token passes through is the same as without Ray. Other programs on the same Ray
may call replicas by a handle; `rayrouter` chooses for them.
"""

# No `from __future__ import annotations`: Ray looks at annotations.
import asyncio
import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from shoal.cluster.config import ClusterConfig, cluster_config, read_config
from shoal.cluster.door import door_mounts, history_path, hub_of, load_replica, open_door
from shoal.cluster.links import ReplicaLink
from shoal.cluster.rayrouter import BLOCK_SIZE, URL
from shoal.cluster.replica import add_replica
from shoal.engine.aio import AsyncEngine
from shoal.errors import BackendError, EngineClosedError
from shoal.runners.plan import ModelSpec
from shoal.server.app import create_app
from shoal.server.config import ServerConfig
from shoal.server.run import bind, make_server
from shoal.types import Event, Request, Result

log = logging.getLogger("shoal.cluster")

QUEUED = "queued_tokens"
_TELL_S = 0.5  # between two words of a replica to the registry
_FORGET_S = 15.0  # a replica that said nothing for so long is gone
_MORE_S, _FEWER_S = 10.0, 300.0  # that more, or fewer, replicas must be wanted before Ray acts
_SPACE = "shoal"
_AT_ONCE = 4096  # requests that Ray lets through to one replica: what waits, waits in its engine
_FIRST_S = 600.0  # that the first replica may take to load


class _Registry:
    """Which replicas there are, by their addresses. Of one that is silent nothing is kept."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._told: dict[str, tuple[str, float]] = {}

    def tell(self, name: str, url: str) -> None:
        """A replica is there."""
        self._told[name] = (url, time.monotonic())

    def replicas(self) -> tuple[bool, dict[str, str]]:
        """Whether all that live have had time to tell, and name to address."""
        now = time.monotonic()
        self._told = {name: told for name, told in self._told.items() if now - told[1] < _FORGET_S}
        return now - self._began > _FORGET_S, {name: url for name, (url, _) in self._told.items()}


def registry(application: str) -> Any:
    """The registry of an application; made where there is none. It outlives who made it, which may be a replica."""
    options = {"name": f"registry-{application}", "namespace": _SPACE, "get_if_exists": True, "num_cpus": 0}
    return ray.remote(_Registry).options(lifetime="detached", **options).remote()


class ServedReplica:
    """One engine and its server, in a process of Ray."""

    def __init__(self, model: str, settings: dict[str, Any], api_key: str | None, application: str) -> None:
        self._engine = load_replica(model, settings)
        # Without a key nobody else must reach it: replicas on several machines need one.
        listening = bind("127.0.0.1" if api_key is None else ray.util.get_node_ip_address(), 0)
        host, port = listening.getsockname()[:2]
        config = ServerConfig(api_key=api_key, drain_s=5.0, allowed_hosts=(host,))
        self._server = make_server(hub_of(self._engine, model), config, listening, mounts=(add_replica,))
        self._serving = threading.Thread(target=self._server.run, name="shoal-server", daemon=True)
        self._serving.start()
        self._name = serve.get_replica_context().replica_id.unique_id
        self._url = f"http://{host}:{port}"
        self._telling = asyncio.get_running_loop().create_task(self._tell(application))

    async def _tell(self, application: str) -> None:
        there = registry(application)
        while True:
            try:
                await there.tell.remote(self._name, self._url)
            except ray.exceptions.RayError as error:
                log.warning("the registry does not answer, another is made: %s", error)
                there = registry(application)
            await asyncio.sleep(_TELL_S)

    def check_health(self) -> None:
        """Ray replaces a replica whose engine has failed, or whose server has ended."""
        if self._engine.failure is not None or not self._serving.is_alive():
            raise RuntimeError(f"the replica has failed: {self._engine.failure or 'its server ended'}")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the number of replicas follows."""
        queued, _ = self._engine.load_tokens()
        return {QUEUED: float(queued)}

    def record_routing_stats(self) -> dict[str, str | int]:
        """What `PrefixRouter` asks: where the replica tells of its blocks, and how long they are."""
        return {URL: self._url, BLOCK_SIZE: self._engine.spec.block_size}

    async def complete(self, request: Request) -> Result:
        """Run one request to its end, for callers with a handle of Ray's. Raises as `Engine.submit`."""
        return await AsyncEngine(self._engine).complete(request)

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Events of one request as they come, for `handle.options(stream=True)`. Raises as `Engine.submit`."""
        async with aclosing(AsyncEngine(self._engine).generate(request)) as events:
            async for event in events:
                yield event

    def __del__(self) -> None:
        self._server.should_exit = True
        self._engine.close()


def wanted_replicas(ctx: Any, queued_tokens: int, least: int, most: int) -> int:
    """So many replicas that each has at most `queued_tokens` waiting; one fewer at a time when less waits."""
    told = ctx.aggregated_metrics.get(QUEUED, {}) or {}
    needed: int = math.ceil(sum(told.values()) / queued_tokens)
    now = int(ctx.target_num_replicas)
    wanted = max(needed, now - (needed < now))
    return max(least, min(most, wanted))


class QueuedTokens:
    """`wanted_replicas` as a policy of Ray's."""

    def __init__(self, queued_tokens: int, least: int, most: int) -> None:
        self._limits = queued_tokens, least, most

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        """How many replicas there should be."""
        return wanted_replicas(ctx, *self._limits), {}


class Doorkeeper:
    """Keeps a door connected to the replicas that the registry knows."""

    def __init__(self, config: ClusterConfig, application: str) -> None:
        self._application = application
        self._registry = registry(application)
        self._key = config.server().api_key
        self.engine = open_door(config, self._first_card())
        self._links: dict[str, ReplicaLink] = {}
        self.look()
        threading.Thread(target=self._keep, name="shoal-doorkeeper", daemon=True).start()

    def _first_card(self) -> ModelSpec:
        """What the first replica that answers says of its model."""
        end = time.monotonic() + _FIRST_S
        while time.monotonic() < end:
            for name, url in ray.get(self._registry.replicas.remote())[1].items():
                with contextlib.suppress(BackendError):  # one that has gone a moment ago
                    return asyncio.run(self._card(name, url))
            time.sleep(0.2)
        raise EngineClosedError(f"no replica is there after {_FIRST_S:g} s", hint="see the replicas' logs")

    async def _card(self, name: str, url: str) -> ModelSpec:
        link = ReplicaLink(name, url, self._key)
        try:
            return await link.card()
        finally:
            await link.close()

    def look(self) -> None:
        """Connect who is new, leave who is gone."""
        whole, there = ray.get(self._registry.replicas.remote())
        links = {name: self._links.get(name) or ReplicaLink(name, url, self._key) for name, url in there.items()}
        if not whole:
            links = {**self._links, **links}
        if links.keys() != self._links.keys():
            self.engine.connect(links)
            self._links = links

    def _keep(self) -> None:
        while not self.engine.closed:
            time.sleep(_TELL_S)
            try:
                self.look()
            except ray.exceptions.RayError as error:
                log.warning("the registry does not answer, another is made: %s", error)
                self._registry = registry(self._application)


def door_app(config: ClusterConfig, application: str) -> FastAPI:
    """The door, where its process begins."""
    with ThreadPoolExecutor(1) as aside:  # Ray calls this on an event loop
        engine = aside.submit(Doorkeeper, config, application).result().engine
    server = dataclasses.replace(config.server(), history=history_path())
    return create_app(hub_of(engine, config.model), server, mounts=door_mounts(engine))


def build(config: ClusterConfig, name: str = "shoal") -> Any:
    """The application, for `serve.run(build(config), name=name)`."""
    settings = {"max_ongoing_requests": _AT_ONCE, "ray_actor_options": {"num_cpus": 0}}
    scaling: dict[str, Any] = {"num_replicas": config.replicas}
    if config.max_replicas is not None:
        limits = {"queued_tokens": config.queued_tokens, "least": config.replicas, "most": config.max_replicas}
        policy = AutoscalingPolicy(policy_function=QueuedTokens, policy_kwargs=limits)
        bounds = {"min_replicas": config.replicas, "max_replicas": config.max_replicas}
        delays = {"upscale_delay_s": _MORE_S, "downscale_delay_s": _FEWER_S}
        scaling = {"autoscaling_config": AutoscalingConfig(policy=policy, **bounds, **delays)}
    router = RequestRouterConfig(
        request_router_class="shoal.cluster.rayrouter:PrefixRouter",
        request_router_kwargs={"api_key": config.server().api_key, **config.routing},
        request_routing_stats_period_s=1.0,
    )
    health = {"health_check_period_s": 2, "health_check_timeout_s": 10}
    most = {"max_ongoing_requests": _AT_ONCE, "request_router_config": router}
    replica = serve.deployment(
        ServedReplica, name="Replica", ray_actor_options={"num_cpus": 1}, **health, **most, **scaling
    )
    bound = replica.bind(config.model, dict(config.engine), config.server().api_key, name)
    door = serve.ingress(lambda: door_app(config, name))(_Door)
    return serve.deployment(door, name="Door", **settings).bind(bound)


class _Door:
    """What Ray calls the door; all is in its application."""

    def __init__(self, replicas: Any) -> None:
        """`replicas` makes Ray run them."""


def application(arguments: dict[str, str]) -> Any:
    """For `serve run shoal.cluster.rayserve:application file=cluster.yaml`."""
    return build(read_config(Path(arguments["file"])) if "file" in arguments else cluster_config(arguments))


def start(config: ClusterConfig, name: str = "shoal") -> None:
    """Run the application here until `stop`; Ray is started where it does not run."""
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": config.host, "port": config.port})
    serve.run(build(config, name), name=name)


def stop(name: str = "shoal") -> None:
    """End what `start` began."""
    serve.shutdown()
    if ray.is_initialized():
        ray.kill(registry(name))
    ray.shutdown()
