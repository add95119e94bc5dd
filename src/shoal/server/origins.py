"""Whether a call may come from a browser's page of another origin."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.types import Scope

from shoal.server.config import ServerConfig
from shoal.server.errors import ApiError, bad_request

_READING = frozenset({"GET", "HEAD", "OPTIONS"})


def check_origin(scope: Scope, config: ServerConfig) -> None:
    """ApiError 403 for a call that a page of another site makes in the name of its reader.

    Two ways are closed. A page elsewhere that posts here brings its own `Origin`. A page whose name was made to point
    at this machine (DNS rebinding) brings that name as `Host`: without an API key, which such a page could not have,
    only addresses, names without a dot and names that were allowed are served.
    """
    headers = dict(scope["headers"])
    host = headers.get(b"host", b"").decode("latin-1")
    if not config.all_keys and not _is_ours(host, config.allowed_hosts):
        raise ApiError(
            403, f"the host {host[:100]!r} is not one of this server's; --allow-host adds it", code="forbidden_host"
        )
    origin = headers.get(b"origin")
    if origin is None or scope["method"] in _READING:
        return
    told = origin.decode("latin-1")
    try:
        place = urlsplit(told).netloc
    except ValueError:
        raise bad_request(f"the Origin {told[:100]!r} is no address", None, "invalid_origin") from None
    if place.lower() != host.lower() and told not in config.cors_origins and "*" not in config.cors_origins:
        raise ApiError(403, f"pages of {told[:100]!r} may not call this server", code="forbidden_origin")


def _is_ours(host: str, allowed: tuple[str, ...]) -> bool:
    name = _name(host).lower().rstrip(".")
    if not name or "." not in name or name.endswith(".localhost") or name in allowed:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name(host: str) -> str:
    """The host without its port; an IPv6 address without its brackets."""
    if host.startswith("["):
        return "0.0.0.0" if "]" in host else host  # an address of any form is one that no page elsewhere can have
    return host.partition(":")[0]
