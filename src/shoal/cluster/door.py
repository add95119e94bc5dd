"""The door of a cluster: the whole server, over an engine that is elsewhere; and what a replica serves."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from shoal.cluster.config import TOY, ClusterConfig
from shoal.cluster.engine import BLOCK_TOKENS, ClusterEngine
from shoal.cluster.links import Link, ReplicaLink, ServerLink
from shoal.config import EngineConfig
from shoal.engine.engine import Engine
from shoal.engine.inputs import Codec
from shoal.engine.loading import ModelCodec, open_model
from shoal.errors import BackendError, ConfigError
from shoal.runners.fake import ByteTokenizer, FakeRunner
from shoal.runners.plan import ModelSpec, StepPlan
from shoal.server.generation import Api
from shoal.server.hub import ModelHub
from shoal.server.run import bind, make_server
from shoal.server.swarmbench.routes import add_page

Mount = Callable[[FastAPI, Api], None]


def load_replica(model: str, settings: Mapping[str, Any]) -> Engine:
    """The engine of one replica; the name `toy` gives the toy model, to try a cluster without a real one.

    The toy's settings have `step_s` beside those of an engine, which it sleeps in each step, and `fail_every`: so many
    passes from one that runs out of memory to the next.
    """
    if model != TOY:
        return Engine.load(model, **settings)
    given = dict(settings)
    step_s, every = float(given.pop("step_s", 0.0)), int(given.pop("fail_every", 0))

    def starve(plan: StepPlan) -> None:
        if every and plan.step % every == 0:
            raise MemoryError("the toy is out of memory")

    config = EngineConfig.of(**given)
    return Engine(lambda: FakeRunner(step_s=step_s, num_blocks=1024, fault=starve), ByteTokenizer(), config)


def codec_of(config: ClusterConfig) -> Codec:
    """The tokenizer of the model, without its weights."""
    if config.model == TOY:
        return ByteTokenizer()
    return open_model(config.model, config.engine_config()).codec


def open_door(config: ClusterConfig, spec: ModelSpec) -> ClusterEngine:
    """An engine for requests to replicas that are as `spec` says. None is connected yet."""
    return ClusterEngine(
        spec,
        codec_of(config),
        config.engine_config(),
        routing=config.router(),
        silence_s=config.silence_s,
    )


def hub_of(engine: Engine, name: str) -> ModelHub:
    """A hub that has one model, for good."""
    return ModelHub(_no_switch, name, engine, _no_switch)


def _no_switch(name: str) -> Engine:
    raise ConfigError(f"a cluster cannot be switched to {name!r}", value=name, hint="run another cluster for it")


def door_mounts(engine: ClusterEngine) -> Sequence[Mount]:
    """What the door has beside the API: the page, and the state of the cluster."""

    def add_cluster(app: FastAPI, api: Api) -> None:  # noqa: ARG001 - the face of a mount
        @app.get("/cluster")
        async def cluster() -> dict[str, Any]:
            return engine.describe()

    return (add_page, add_cluster)


async def ask(url: str, config: ClusterConfig) -> tuple[bool, ModelSpec]:
    """Whether a server is a replica of ours, and what it says of its model. BackendError when it does not answer."""
    key = config.server().api_key
    for ours, link in ((True, ReplicaLink("", url, key)), (False, ServerLink("", url, config.served_as, key))):
        try:
            return ours, await link.card()
        except BackendError:
            if not ours:
                raise
        finally:
            await link.close()
    raise AssertionError("neither")


def serve_addresses(config: ClusterConfig, ready: Callable[[int], None]) -> None:
    """A door in this process before servers that run already, until a signal comes. BackendError when one is not there.

    `ready` hears of the port.
    """
    listening = bind(config.host, config.port)
    told = [asyncio.run(ask(url, config)) for url in config.addresses]
    key, links = config.server().api_key, dict[str, Link]()
    for number, (url, (ours, _)) in enumerate(zip(config.addresses, told, strict=True)):
        name = f"replica-{number}"
        links[name] = ReplicaLink(name, url, key) if ours else ServerLink(name, url, config.served_as, key)
    spec = _described(told[0][1], config)
    engine = open_door(config, spec)
    engine.connect(links)
    server = dataclasses.replace(config.server(), history=history_path())
    make_server(hub_of(engine, config.model), server, listening, ready, mounts=door_mounts(engine)).run()


def _described(spec: ModelSpec, config: ClusterConfig) -> ModelSpec:
    """Facts that other servers do not tell, from the model's tokenizer and from what routing needs."""
    if spec.block_size:
        return spec
    codec = codec_of(config)
    vocabulary = codec.tokenizer.vocab_size if isinstance(codec, ModelCodec) else 2**31
    length = spec.context_length or 2**17
    blocks = 64 * -(-length // BLOCK_TOKENS)  # a door refuses no prompt for want of KV: its replicas do
    return dataclasses.replace(
        spec, vocab_size=vocabulary, context_length=length, block_size=BLOCK_TOKENS, num_blocks=blocks
    )


def history_path() -> Path:
    """Where the door keeps what its page has run."""
    from shoal.models.store import default_root

    return default_root() / "history.db"
