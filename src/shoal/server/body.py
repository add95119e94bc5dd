"""Bodies of calls, read in bounded time: first their shape, then parsed and checked beside the event loop.

Parsing JSON and checking it holds the interpreter, so what costs much must be known before: a count of what stands
outside strings tells, in pieces that let others run between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from shoal.server.errors import ApiError, bad_request

MAX_COST = 250_000  # of a body's JSON: at most about 25 ms of parsing; a list of so many token ids, 8,000 messages
_LARGE = 16 * 1024  # bytes; smaller bodies are done sooner than a thread is asked
_PIECE = 64 * 1024  # bytes looked at in one go
_BRACKETS = b"[]{}"
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in _BRACKETS)


# One thread for all large bodies: two would hold the interpreter in turn, and the event loop would wait for both. What
# they allocate also comes from, and goes back to, one place.
_lane = ThreadPoolExecutor(1, thread_name_prefix="shoal-bodies")


async def aside(size: int, work: Callable[[], Any]) -> Any:
    """The result of `work`, done on another thread where `size` bytes are many, one after the other."""
    return work() if size < _LARGE else await asyncio.get_running_loop().run_in_executor(_lane, work)


def check_shape(body: bytes, max_depth: int) -> None:
    """ApiError for JSON that is nested deeper than `max_depth` or has too many values; looks at each byte once."""
    cost = depth = 0
    for outside, strings in _outside_strings(body):
        brackets = outside.translate(None, _NOT_BRACKETS)
        # What parsing and checking takes: a list or an object as long as eight numbers, a member of an object as six,
        # a string with an escape as two, a number of hundreds of digits as dozens.
        cost += outside.count(b",") + 6 * outside.count(b":") + 4 * len(brackets) + strings + len(outside) // 16
        if cost > MAX_COST:
            raise bad_request("the JSON has too many values: send less in one call", None, "too_many_values")
        for byte in brackets:
            depth += 1 if byte in b"[{" else -1
            if depth > max_depth:
                raise bad_request(f"the JSON is nested deeper than {max_depth}", None, "nesting_too_deep")


def _outside_strings(body: bytes) -> Iterator[tuple[bytes, int]]:
    """What of a body stands outside of strings, in pieces, and how many strings end or begin in each piece."""
    inside, held = False, b""
    for at in range(0, len(body), _PIECE):
        piece = held + body[at : at + _PIECE]
        odd = (len(piece) - len(piece.rstrip(b"\\"))) % 2  # a backslash whose second half is in the next piece
        held, piece = piece[len(piece) - odd :], piece[: len(piece) - odd]
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        yield b"".join(parts[inside::2]), len(parts) // 2
        inside ^= len(parts) % 2 == 0


def _parsed(body: bytes) -> Any:
    """The document. ApiError for what is no JSON, or has half of a surrogate pair: no later step copes with that."""
    try:
        # Half the time of the standard library's parser, which no other thread runs in. Only keys are kept for later.
        return from_json(body, cache_strings="keys")
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}"[:300], None, "invalid_json") from None


class BodyRoute(APIRoute):
    """A route whose body is parsed and checked beside the event loop; the framework gets the finished model."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What serves one call."""
        inner = super().get_route_handler()
        model = self.body_field.field_info.annotation if self.body_field is not None else None
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return inner

        async def handle(request: Request) -> Response:
            checked = _Checked(request, model)
            try:
                return await inner(checked)
            except HTTPException:  # what the framework makes of an error while it asks for the body
                if checked.fault is not None:
                    raise checked.fault from None
                raise

        return handle


class _Checked(Request):
    """A request whose `json` is the checked model."""

    def __init__(self, request: Request, model: type[BaseModel]) -> None:
        super().__init__(request.scope, request.receive)
        self.fault: ApiError | RequestValidationError | None = None
        self._body_model = model

    async def json(self) -> Any:
        """The model. What is wrong with the body is noted in `fault`, since the framework hides it."""
        body = await self.body()
        try:
            return await aside(len(body), lambda: self._body_model.model_validate(_parsed(body)))
        except ValidationError as error:
            faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors(include_url=False)]
            self.fault = RequestValidationError(faults)
        except ApiError as error:
            self.fault = error
        raise HTTPException(400)
