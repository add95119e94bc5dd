"""Settings of the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import ConfigError

SCOPES = ("generate", "manage", "history")
"""What a key may do: generate text, manage models and settings, read and change the history of runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How the server treats its clients. Checked when built; raises `ConfigError`.

    api_key: what clients must present as a bearer token (None: no key is needed); it may do everything. keys:
    further keys, each with what it may do (`SCOPES`). share_prefixes: let the calls of different keys share
    prefixes; what a call found cached is then told in whole blocks, for exact counts would let one guess another's
    prompt token by token. max_body_bytes and max_depth bound a request's JSON. body_timeout_s: how long a client
    may take to send it, and before that the head of the call; write_timeout_s: how long it may leave a piece of an
    answer unread before it counts as gone. keepalive_s: a comment goes out on a silent stream that often.
    request_timeout_s: deadline of requests that bring none. max_choices: most answers of one call. max_connections:
    clients at a time; more are hung up on. drain_s: how long requests in flight may go on when the server stops.
    cors_origins: browsers' origins that may call (none). log_prompts: put prompts into the log. history: the file
    that swarm runs, stored responses and conversations are kept in (None: memory, until the end); at most
    max_stored responses, of max_stored_bytes together, and max_stored conversations: what was used longest ago
    goes. state: the directory in which a stop puts stored responses in flight aside, to be taken up at the next
    start (None: they end). allowed_hosts: names under which browsers may reach the server, beside addresses and
    names without a dot.
    """

    api_key: str | None = field(default=None, repr=False)
    keys: Mapping[str, frozenset[str]] = field(default_factory=dict, repr=False)
    share_prefixes: bool = False
    max_body_bytes: int = 8 * 2**20
    max_depth: int = 100
    body_timeout_s: float = 30.0
    write_timeout_s: float = 30.0
    keepalive_s: float = 10.0
    request_timeout_s: float | None = None
    max_choices: int = 64
    max_connections: int = 1024
    drain_s: float = 20.0
    cors_origins: tuple[str, ...] = ()
    log_prompts: bool = False
    history: Path | None = None
    max_stored: int = 1000
    max_stored_bytes: int = 256 * 2**20
    state: Path | None = None
    allowed_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("the API key is empty", hint="give one, or none at all")
        for scopes in self.keys.values():
            unknown = sorted(set(scopes) - set(SCOPES))
            if unknown:
                raise ConfigError(f"unknown scope {unknown[0]!r}", value=unknown[0], limit=SCOPES, hint="see SCOPES")
        if any(not key.strip() for key in self.keys):
            raise ConfigError("an API key is empty", hint="give one, or none at all")
        for name in ("max_body_bytes", "max_depth", "max_choices", "max_connections", "max_stored", "max_stored_bytes"):
            self._check(name, getattr(self, name) >= 1, "1 or more")
        for name in ("body_timeout_s", "write_timeout_s", "keepalive_s"):
            self._check(name, getattr(self, name) > 0, "above 0 seconds")
        self._check("drain_s", self.drain_s >= 0, "0 or more seconds")
        self._check("request_timeout_s", self.request_timeout_s is None or self.request_timeout_s > 0, "above 0")

    @property
    def all_keys(self) -> Mapping[str, frozenset[str]]:
        """Every key with what it may do; none when nobody needs one."""
        everything = {} if self.api_key is None else {self.api_key: frozenset(SCOPES)}
        return {**self.keys, **everything}

    def _check(self, name: str, ok: bool, limit: str) -> None:
        if not ok:
            value = getattr(self, name)
            raise ConfigError(f"{name} is {value!r}", value=value, limit=limit, hint=f"it must be {limit}")


def read_keys(path: Path) -> dict[str, frozenset[str]]:
    """Keys from a file, one a line, each with its scopes behind it: `s3cret generate,history`. ConfigError."""
    keys: dict[str, frozenset[str]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the keys cannot be read: {error}", value=str(path), hint="give a text file") from error
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:
            raise ConfigError(f"{path}:{number} is no key with its scopes", value=number, hint="KEY generate,history")
        keys[words[0]] = frozenset(words[1].split(","))
    return keys
