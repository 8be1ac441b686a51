"""A server of JSON over HTTP, on uvicorn: each path has a function from a body to a status and an
answer.

A request is read only if it comes from a program with the run's token: see `JsonServer`. A web page
cannot send one, because the token is secret and browsers send `Origin`. A foreign name in `Host` is
refused. Half-sent requests hold no connection for long: see `connections.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import uvicorn
from pydantic import TypeAdapter

from tether.core.received import received
from tether.core.types import Json
from tether.scale.servers.connections import bounded_protocol
from tether.scale.servers.in_vllm.tether_door import Door, Receive, Scope, Send

Answer = tuple[int, Json]
Route = Callable[[Json], Answer]
TOKEN = "TETHER_SERVER_TOKEN"
"""The environment variable that holds the token of a run's servers."""
LONGEST_BODY = 64 << 20
"""Bytes of a request; prompts of a million tokens take seven."""
BODY_SECONDS = 30.0
IDLE_SECONDS = 600
"""Seconds in which a request must come, and after which a connection without one is closed."""
CONNECTIONS = 1024
"""Connections of one network address, at most; where a process may open fewer files, half of
these.
"""
_OBJECT = TypeAdapter(Json)


def new_token() -> str:
    """The token of servers to start: the one in the environment, so that runs and servers may share
    it, else a new one.
    """
    return os.environ.get(TOKEN) or secrets.token_urlsafe(32)


class JsonServer:
    """Answers every request in a thread.

    `/health` is open. All other paths need `Authorization: Bearer TOKEN` if the server has a token.

    Args:
        address: host and port; port 0 takes a free one (`server_address`).
        get, post: by path. If a function cannot read a body (KeyError, TypeError, ValueError), the
            status is 400. Every other error gives 500.
        token: unset: the one in the environment. Without one, every program that reaches the port
            may send requests.
    """

    def __init__(
        self,
        address: tuple[str, int],
        get: Mapping[str, Callable[[], Json]],
        post: Mapping[str, Route],
        token: str | None = None,
    ) -> None:
        self.get = get
        self.post = post
        self.token = token or os.environ.get(TOKEN, "")
        self.socket = socket.create_server(address, backlog=512)
        self.server_address = self.socket.getsockname()
        self.server_port = self.server_address[1]
        most = min(CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._threads = ThreadPoolExecutor(CONNECTIONS)
        self._ended = threading.Event()
        config = uvicorn.Config(
            Door(self._answer, self.token, address[0]),
            http=bounded_protocol(most, BODY_SECONDS),
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            proxy_headers=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)

    def serve_forever(self, poll_interval: float = 0.0) -> None:
        """Answer requests until `shutdown`, or a signal."""
        try:
            self._server.run([self.socket])
        finally:
            self._threads.shutdown(wait=False)
            self._ended.set()

    def shutdown(self) -> None:
        """End `serve_forever`, which runs in another thread."""
        self._server.should_exit = True
        self._ended.wait()

    def server_close(self) -> None:
        """Close the port."""
        self.socket.close()

    def health(self) -> Answer:
        """Status and answer of `/health`."""
        return 200, {}

    async def _answer(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        query = scope["query_string"].decode("latin-1")
        path = scope["path"] + (f"?{query}" if query else "")
        if scope["path"] == "/health":
            status, answer = self.health()
        else:
            content = await _content(scope, receive) if scope["method"] == "POST" else None
            work = partial(self._worked_out, path, content)
            loop = asyncio.get_running_loop()
            status, answer = await loop.run_in_executor(self._threads, work)
        body = json.dumps(answer).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _worked_out(self, path: str, content: bytes | Answer | None) -> Answer:
        """Status and answer of a request; of a GET there is no content."""
        try:
            if content is None and (get := self.get.get(path)):
                return 200, get()
            if isinstance(content, bytes) and (post := self.post.get(path)):
                return post(received(content, _OBJECT))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            return 400, {"error": f"{type(error).__name__}: {error}"[:1000]}
        except Exception as error:  # noqa: BLE001  (whatever it is, the caller gets an answer and the server lives on)
            return 500, {"error": f"{type(error).__name__}: {error}"[:1000]}
        refused = content if isinstance(content, tuple) else None
        return refused or (404, {"error": f"nothing is at {path:.80}"})


async def _content(
    scope: Scope,
    receive: Receive,
) -> bytes | Answer:
    """The body of a request, or the status and the reason for which it is refused."""
    headers = dict(scope["headers"])
    if headers.get(b"content-type", b"").partition(b";")[0].strip().lower() != b"application/json":
        return 415, {"error": "the body must be application/json"}
    announced = int(headers.get(b"content-length", b"0"))
    body = bytearray()
    more = True
    while more and max(announced, len(body)) <= LONGEST_BODY:
        part = await receive()
        body += part.get("body", b"")
        more = part.get("more_body", False)
    if more:
        return 413, {"error": f"the body has more than {LONGEST_BODY >> 20} MB"}
    return bytes(body)
