"""`shoal serve`: one engine behind the OpenAI-compatible API."""

from __future__ import annotations

import gc
import importlib.util
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli import options
from shoal.cli.console import load_engine, note, setting
from shoal.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from shoal.cluster.kvevents import KVPublisher
    from shoal.engine.engine import Engine

_SWITCH_INTERVAL_S = 0.0005  # the engine's thread must not wait for the server's five milliseconds


def serve(
    model: options.Model = options.DEFAULT_MODEL,
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than loopback want an API key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one and prints it.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None, typer.Option(help="Clients must present this key.", envvar="SHOAL_API_KEY", show_envvar=True)
    ] = None,
    api_keys: Annotated[
        Path | None, typer.Option(help="A file of further keys, one a line: KEY generate,manage,history.")
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Requests that decode together.", min=1)] = setting("max_batch"),
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; more get 429.", min=1)] = setting("max_queue"),
    timeout: Annotated[float | None, typer.Option(help="Deadline in seconds of requests that bring none.")] = None,
    drain: Annotated[float, typer.Option(help="Seconds that requests may go on after a stop.", min=0)] = 20.0,
    cors: Annotated[list[str] | None, typer.Option(help="Allow this browser origin; may be given again.")] = None,
    rollout: options.Rollout = None,
    warmup: Annotated[bool, typer.Option(help="Run passes of representative shapes before taking calls.")] = True,
    governor: options.Governor = False,
    joules: options.Joules = None,
    battery: options.Battery = None,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Put request bodies into the log.")] = False,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Serve browsers that know the server by this name; may be given again.")
    ] = None,
    runner: Annotated[str, typer.Option(help="Backend.")] = setting("runner"),
    precision: options.Precision = options.PRECISION,
    kv_memory: options.KVMemory = options.KV_MEMORY,
    kv_cache: Annotated[
        str, typer.Option(help='KV kept on disk for later runs: bytes as in "4GiB", "auto" (up to 2 GiB), or "off".')
    ] = "auto",
    kv_host: Annotated[str | None, typer.Option(help='KV kept in host memory, as in "1GiB".')] = None,
    watch_memory: Annotated[
        bool, typer.Option(help="Give up KV, then class low, then new calls, if memory is short.")
    ] = True,
    threads: options.Threads = None,
    kv_events: Annotated[
        str | None, typer.Option(help="Publish what is held over ZeroMQ, as vLLM does: tcp://HOST:PORT, 0 a free port.")
    ] = None,
    kv_events_replay: Annotated[str | None, typer.Option(help="Send missed ones again: tcp://HOST:PORT.")] = None,
    kv_events_topic: Annotated[str, typer.Option(help="What block events are published under.")] = "",
) -> None:
    """Serve the OpenAI API: chat completions, completions, responses, models, metrics."""
    if importlib.util.find_spec("fastapi") is None or importlib.util.find_spec("uvicorn") is None:
        raise BackendError("the server's packages are not installed", hint="pip install 'shoal[server]'")
    from shoal.agents import Rollout
    from shoal.engine.aio import AsyncEngine
    from shoal.models import Store
    from shoal.models.store import default_root
    from shoal.power import Governor, PowerPolicy
    from shoal.server import logs
    from shoal.server.config import ServerConfig, read_keys
    from shoal.server.hub import ModelHub, local_candidate
    from shoal.server.logs import DecisionLog
    from shoal.server.run import bind, make_server

    config = ServerConfig(
        api_key=api_key,
        keys=read_keys(api_keys) if api_keys is not None else {},
        request_timeout_s=timeout,
        drain_s=drain,
        cors_origins=tuple(cors or ()),
        log_prompts=log_prompts,
        history=default_root() / "history.db",
        state=default_root() / "interrupted",
        allowed_hosts=(host, *(allow_host or ())),
    )
    logs.configure()
    _warn_if_open(host, api_key or next(iter(config.keys), None))
    publisher = _publisher(kv_events, kv_events_replay, kv_events_topic)
    listening = bind(host, port)

    settings = {"max_batch": max_batch, "max_queue": max_queue, "runner": runner, "kv_memory": kv_memory}
    power = options.power(governor, joules, battery)
    # One for all models that are switched to: a budget of joules does not begin anew.
    paced = Governor(policy=PowerPolicy.of(power)) if power else None
    settings |= {"kv_cache": None if kv_cache == "off" else kv_cache, "kv_host": kv_host, "watch_memory": watch_memory}
    settings |= {"precision": precision, "threads": threads, "warmup": warmup, "governor": paced}

    def load(name: str) -> Engine:
        return load_engine(name, **settings)

    note(f"loading {model}")
    engine = load(model)
    note("" if engine.warmup_s is None else f"warmed up in {engine.warmup_s:.2f} s")
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()  # what is loaded stays: walking it again and again holds up everybody for tens of milliseconds
    hub = ModelHub(load, model, engine, Store().info)  # clients switch among what is in the store, no further
    if publisher is not None:
        publisher.attach(hub)
    if rollout is not None:
        candidate = partial(local_candidate, governor=engine.governor)
        hub.rollout = Rollout(AsyncEngine(engine), rollout, trace=DecisionLog(), load=candidate)
    make_server(hub, config, listening, partial(_tell_address, model, host)).run()


def _publisher(publish: str | None, replay: str | None, topic: str) -> KVPublisher | None:
    """What publishes block events, listening already; None where nobody asked for it. ConfigError, BackendError."""
    if publish is None:
        if replay is not None or topic:
            raise ConfigError("--kv-events-replay and --kv-events-topic want --kv-events", hint="say where to publish")
        return None
    from shoal.cluster.kvevents import KVEventsConfig, KVPublisher

    config = KVEventsConfig(publish=publish, replay=replay, topic=topic)
    if config.open_to_others:
        print("shoal: block events tell what others have asked to whoever reaches their port; no key", file=sys.stderr)
    publisher = KVPublisher(config)
    again = "" if publisher.replay_address is None else f", missed ones on {publisher.replay_address}"
    print(f"block events on {publisher.publish_address}{again}", flush=True)
    return publisher


def _tell_address(model: str, host: str, port: int) -> None:
    place = f"[{host}]" if ":" in host else host
    print(f"shoal serves {model} on http://{place}:{port}/v1", flush=True)
    note(f"the page is at http://{place}:{port}/")


def _warn_if_open(host: str, api_key: str | None) -> None:
    loopback = host in ("localhost", "::1") or host.startswith("127.")
    if not loopback and not api_key:
        print(f"shoal: {host} is reachable by others and no API key is set", file=sys.stderr)
