"""A server of JSON over HTTP, on the standard library: each path has a function from a body to a status and an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tether.core.types import Json

Answer = tuple[int, Json]
Route = Callable[[Json], Answer]


class JsonServer(ThreadingHTTPServer):
    """Answers every request in a thread of its own; `/health` is always there.

    Args:
        address: host and port; port 0 takes a free one (`server_address`).
        get, post: by path. What a function raises for a body that it cannot read (KeyError, TypeError, ValueError) becomes 400.
    """

    daemon_threads, request_queue_size = True, 512

    def __init__(self, address: tuple[str, int], get: Mapping[str, Callable[[], Json]], post: Mapping[str, Route]) -> None:
        super().__init__(address, _Handler)
        self.get, self.post = {"/health": dict, **get}, post


class _Handler(BaseHTTPRequestHandler):
    server: JsonServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body that follows its head would wait 40 ms for the other side's receipt

    def do_GET(self) -> None:
        self._reply(*((200, self.server.get[self.path]()) if self.path in self.server.get else self._nothing()))

    def do_POST(self) -> None:
        try:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._reply(*(self.server.post[self.path](body) if self.path in self.server.post else self._nothing()))
        except (KeyError, TypeError, ValueError) as error:
            self._reply(400, {"error": f"{type(error).__name__}: {error}"})

    def _nothing(self) -> Answer:
        return 404, {"error": f"nothing is at {self.path}"}

    def _reply(self, status: int, body: Json) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the log of whoever asks says what failed."""
