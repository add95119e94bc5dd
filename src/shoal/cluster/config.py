"""A cluster as one YAML file says it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from shoal.checks import is_number, is_whole
from shoal.cluster.router import RouterConfig
from shoal.config import EngineConfig
from shoal.errors import ConfigError
from shoal.names import did_you_mean
from shoal.server.config import ServerConfig

TOY = "toy"
_TOYS_OWN = ("step_s", "fail_every")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """One model, its replicas, and the door before them. Checked when built; raises `ConfigError`.

    model: what they serve, by name; `toy` is the toy model. replicas: how many Ray Serve is to run, or the addresses of
    servers that run already (ours, vLLM, SGLang), without `/v1`. served_as: what those servers call the model.
    max_replicas: up to how many Ray adds while more than queued_tokens wait per replica (None: their number is fixed).
    engine: settings of each replica's engine, or of the toy (see `load_replica`). door: address and limits, fields of
    `ServerConfig`. routing: fields of `RouterConfig`. silence_s: how long a replica may answer nothing before it is
    given up.
    """

    model: str = "smollm2-135m"
    replicas: int | tuple[str, ...] = 2
    served_as: str | None = None
    max_replicas: int | None = None
    queued_tokens: int = 4000
    engine: Mapping[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 8000
    door: Mapping[str, Any] = field(default_factory=dict)
    routing: Mapping[str, Any] = field(default_factory=dict)
    silence_s: float = 5.0

    def __post_init__(self) -> None:
        if isinstance(self.replicas, list | tuple):
            object.__setattr__(self, "replicas", tuple(map(str, self.replicas)))
            good = bool(self.addresses) and all(a.startswith(("http://", "https://")) for a in self.addresses)
            self._check("replicas", good, "a number, or addresses that begin with http:// or https://")
        else:
            self._check("replicas", is_whole(self.replicas, 1, 4096), "a number of 1 or more, or a list of addresses")
        most = self.max_replicas
        self._check("max_replicas", most is None or is_whole(most, 1, 4096), "a number of 1 or more, or none")
        self._check("queued_tokens", is_whole(self.queued_tokens, 1), "1 or more")
        self._check("port", is_whole(self.port, 0, 65535), "a port")
        self._check("silence_s", is_number(self.silence_s) and self.silence_s > 0, "above 0 seconds")
        for name in ("engine", "door", "routing"):
            self._check(name, isinstance(getattr(self, name), Mapping), "a mapping of settings")
        self.engine_config()
        _known(self.routing, RouterConfig, "routing")
        self.server()

    def _check(self, name: str, ok: bool, limit: str) -> None:
        if not ok:
            value = getattr(self, name)
            raise ConfigError(f"{name} is {value!r}", value=value, limit=limit, hint=f"it must be {limit}")

    def engine_config(self) -> EngineConfig:
        """The settings of each replica's engine, without those that only the toy model has."""
        own = _TOYS_OWN if self.model == TOY else ()
        for name in own:
            value = self.engine.get(name, 0)
            if not is_number(value) or value < 0:
                raise ConfigError(f"{name} is {value!r}", value=value, limit=0, hint="it must be 0 or more")
        return EngineConfig.of(**{name: value for name, value in self.engine.items() if name not in own})

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of servers that run already; none where Ray runs them."""
        return self.replicas if isinstance(self.replicas, tuple) else ()

    def server(self) -> ServerConfig:
        """The door's settings; the key is also taken from SHOAL_API_KEY."""
        _known(self.door, ServerConfig, "door")
        settings: dict[str, Any] = dict(self.door)
        settings.setdefault("api_key", os.environ.get("SHOAL_API_KEY"))
        settings.setdefault("allowed_hosts", (self.host,))
        tuples: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in settings.items()}
        return ServerConfig(**tuples)

    def router(self) -> RouterConfig:
        """The router's settings."""
        return RouterConfig(**self.routing)


def read_config(path: Path) -> ClusterConfig:
    """The cluster that a file describes. ConfigError names what is wrong in it."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", value=str(path), hint="give a YAML file") from error
    return cluster_config(document)


def cluster_config(document: object) -> ClusterConfig:
    """The cluster that a document describes."""
    if not isinstance(document, dict):
        raise ConfigError("a cluster's file has fields at its top", value=document, hint="model: smollm2-135m")
    _known(document, ClusterConfig, "the file")
    return ClusterConfig(**document)


def _known(given: Mapping[str, Any], kind: type[Any], where: str) -> None:
    known = [f.name for f in fields(kind)]
    for name in given:
        if name not in known:
            raise ConfigError(
                f"{where} has an unknown field {name!r}", value=name, limit=known, hint=did_you_mean(str(name), known)
            )
