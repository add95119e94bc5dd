"""A server as others write them: strict about fields, silent about usage, careless about connections."""

from __future__ import annotations

import json
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

CORE = {
    "model", "messages", "prompt", "stream", "max_tokens", "temperature", "top_p", "seed", "stop", "presence_penalty",
    "frequency_penalty", "logit_bias", "response_format", "user", "service_tier", "prompt_cache_key",
}  # fmt: skip


class Foreign:
    """Usable with `with`. `answer` is what it writes, word by word; `bodies` what it was sent.

    `frame` is what it makes of an event, `extra` what is in each.
    """

    def __init__(self, answer: str = "Hello there", *, known: set[str] = CORE) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.last_words = "[DONE]"
        self.dies_every = 0  # every so many calls one is not answered and its connection closed
        self.resets = False
        self.extra: dict[str, Any] = {}
        self.frame = "data:{}\n\n"
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing."""

            def _send(self, status: int, document: Any) -> None:
                data = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                self._send(200, {"data": [{"id": "theirs", "object": "model", "owned_by": "me"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.bodies.append(body)
                if outer.dies_every and len(outer.bodies) % outer.dies_every == 0:
                    if outer.resets:
                        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        self.connection.close()
                    self.close_connection = True
                    return
                unknown = sorted(set(body) - known)
                if unknown:
                    self._send(422, {"detail": f"extra fields not permitted: {unknown}"})
                    return
                self.send_response(200)
                self.send_header("Connection", "keep-alive")  # and yet it closes it, as some do
                self.end_headers()
                for word in outer.answer.split(" "):
                    content = {"delta": {"content": word}} if "messages" in body else {"text": word}
                    self._event({"choices": [{"index": 0, **content}]})
                self._event(
                    {"choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": "stop"}], "usage": None}
                )
                self.wfile.write(f"data:{outer.last_words}\n\n".encode())
                self.close_connection = True

            def _event(self, document: Any) -> None:
                text = json.dumps({**document, **outer.extra}, ensure_ascii=False)
                self.wfile.write(outer.frame.format(text).encode())

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
