"""A server of JSON over HTTP, on the standard library: each path has a function from a body to a
status and an answer.

A request is read only if it comes from a program with the run's token: see `JsonServer`. A web page
cannot send one, because the token is secret and browsers send `Origin`. A foreign name in `Host` is
refused.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tether.core.types import Json, JsonValue

Answer = tuple[int, Json]
Route = Callable[[Json], Answer]
TOKEN = "TETHER_SERVER_TOKEN"
"""The environment variable that holds the token of a run's servers."""
LONGEST_BODY = 64 << 20
"""Bytes of a request; prompts of a million tokens take seven."""
BODY_SECONDS = 30.0
IDLE_SECONDS = 600.0
"""Seconds in which a body must come, and after which a connection without a request is closed."""


def new_token() -> str:
    """The token of servers to start: the one in the environment, so that runs and servers may share
    it, else a new one.
    """
    return os.environ.get(TOKEN) or secrets.token_urlsafe(32)


class JsonServer(ThreadingHTTPServer):
    """Answers every request in its own thread.

    `/health` is open. All other paths need `Authorization: Bearer TOKEN` if the server has a token.

    Args:
        address: host and port; port 0 takes a free one (`server_address`).
        get, post: by path. If a function cannot read a body (KeyError, TypeError, ValueError), the
            status is 400. Every other error gives 500.
        token: unset: the one in the environment. Without one, every program that reaches the port
            may send requests.
    """

    daemon_threads = True
    request_queue_size = 512

    def __init__(
        self,
        address: tuple[str, int],
        get: Mapping[str, Callable[[], Json]],
        post: Mapping[str, Route],
        token: str | None = None,
    ) -> None:
        super().__init__(address, _Handler)
        self.get = get
        self.post = post
        self.token = token or os.environ.get(TOKEN, "")
        self.names = {"localhost", address[0].lower(), socket.gethostname().lower()}

    def health(self) -> Answer:
        """Status and answer of `/health`."""
        return 200, {}


class _Handler(BaseHTTPRequestHandler):
    server: JsonServer
    protocol_version = "HTTP/1.1"
    # a body that follows its head would wait 40 ms for the other side's receipt
    disable_nagle_algorithm = True
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:
        if self.path == "/health":
            self._reply(*self.server.health())
        elif not self._refused():
            self._reply(*self._answer(self.server.get, lambda route: (200, route())))

    def do_POST(self) -> None:
        if self._refused() or (size := self._size()) is None:
            return
        self.connection.settimeout(BODY_SECONDS)
        try:
            content = self.rfile.read(size)
        finally:
            self.connection.settimeout(IDLE_SECONDS)
        self._reply(*self._answer(self.server.post, lambda route: route(_object(content))))

    def _answer(self, routes: Mapping[str, object], ask: Callable[[JsonValue], Answer]) -> Answer:
        route = routes.get(self.path)
        if route is None:
            return 404, {"error": f"nothing is at {self.path:.80}"}
        try:
            return ask(route)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            return 400, {"error": f"{type(error).__name__}: {error}"[:1000]}
        except Exception as error:  # noqa: BLE001  (whatever it is, the caller gets an answer and the server lives on)
            return 500, {"error": f"{type(error).__name__}: {error}"[:1000]}

    def _refused(self) -> bool:
        """True if the request does not come from a program that has the token; the answer is sent
        then.
        """
        if not _is_known(self.headers.get("Host", ""), self.server.names):
            return self._refuse(
                403,
                "this server has no such name: ask by its address, or by the "
                "name that it listens on",
            )
        if "Origin" in self.headers:
            return self._refuse(403, "web pages may not ask this server")
        given = self.headers.get("Authorization", "").encode("latin-1", errors="replace")
        if self.server.token and not hmac.compare_digest(
            given,
            f"Bearer {self.server.token}".encode(),
        ):
            return self._refuse(
                401,
                f"the request has not the token of this server: set {TOKEN} "
                "to it where the run starts",
            )
        return False

    def _size(self) -> int | None:
        """Bytes of the body; None where the request is refused for it."""
        kind = self.headers.get_content_type()
        length = self.headers.get("Content-Length", "")
        if kind != "application/json":
            self._refuse(415, "the body must be application/json")
        elif not length:
            self._refuse(411, "the request has no Content-Length")
        elif not (length.isascii() and length.isdigit() and len(length) < 20):
            self._refuse(400, "Content-Length is no number of bytes")
        elif int(length) > LONGEST_BODY:
            self._refuse(413, f"the body has more than {LONGEST_BODY >> 20} MB")
        else:
            return int(length)
        return None

    def _refuse(self, status: int, reason: str) -> bool:
        self.close_connection = True  # its body is not read
        self._reply(status, {"error": reason})
        return True

    def _reply(self, status: int, body: Json) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the client's own log has the failure."""


def _object(content: bytes) -> Json:
    """The object of a JSON body.

    Raises:
        ValueError: it is none.
    """
    body = json.loads(content)
    if not isinstance(body, dict):
        raise ValueError("the body is no object")
    return body


def _is_known(host: str, names: set[str]) -> bool:
    """True if a Host header is an address, or one of these names; a page of a foreign name that
    leads here is neither.
    """
    name = host.strip().lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.rpartition(":")[0] or name
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in names
    return True
