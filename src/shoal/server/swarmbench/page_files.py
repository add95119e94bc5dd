"""The page's own files, with the headers that keep what a model writes from becoming a program."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from starlette.responses import Response

from shoal.server.errors import ApiError

ROOT = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@cache
def _files() -> dict[str, tuple[bytes, str]]:
    """Name to content and type: only what is here can be asked for."""
    found = [path for path in sorted(ROOT.rglob("*")) if path.suffix in _TYPES]
    return {path.relative_to(ROOT).as_posix(): (path.read_bytes(), _TYPES[path.suffix]) for path in found}


def page_file(name: str) -> Response:
    """One file of the page. ApiError 404."""
    try:
        content, kind = _files()[name]
    except KeyError:
        raise ApiError(404, f"the page has no file {name[:100]!r}", code="not_found") from None
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    return Response(content, media_type=kind, headers={**_HEADERS, "ETag": tag})
