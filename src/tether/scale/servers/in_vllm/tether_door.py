"""The token of a run at every path of a server: tether's own, and vLLM's, whose own API key leaves
some paths open. Nothing of tether is needed.

In vLLM's own environment, `--middleware tether_door.Door` puts it before all of vLLM's paths. The
token is in the environment, as `TETHER_SERVER_TOKEN`; the name under which others reach the server,
if it is no address, as `TETHER_SERVER_NAME`. `/health` is there for everybody.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

Send = Callable[[Mapping[str, object]], Awaitable[None]]
Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Door:
    """An ASGI application before another one.

    Args:
        token: unset: that of the environment. An empty one lets every program in.
        name: of the server, beside its addresses.

    Raises:
        RuntimeError: the environment has no token.
    """

    def __init__(self, app: App, token: str | None = None, name: str = "") -> None:
        self.app = app
        self.token = os.environ.get("TETHER_SERVER_TOKEN", "") if token is None else token
        if token is None and not self.token:
            raise RuntimeError("tether_door.Door needs the token of the run in TETHER_SERVER_TOKEN")
        own = name or os.environ.get("TETHER_SERVER_NAME", "localhost")
        self.names = {"localhost", own.lower(), socket.gethostname().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] == "/health"):
            await self.app(scope, receive, send)
            return
        status, reason = self._refused(dict(scope["headers"]))
        if not status:
            await self.app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        else:
            body = json.dumps({"error": reason}).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
            ]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def _refused(self, headers: dict[bytes, bytes]) -> tuple[int, str]:
        """Status and reason; 0 for a program that has the token."""
        if not self._is_known(headers.get(b"host", b"").decode("latin-1")):
            return 403, "no such name: ask by address, or set TETHER_SERVER_NAME at the server"
        if b"origin" in headers:
            return 403, "web pages may not ask this server"
        if self.token and not hmac.compare_digest(
            headers.get(b"authorization", b""),
            f"Bearer {self.token}".encode(),
        ):
            return 401, "set TETHER_SERVER_TOKEN to the token of this server where the run starts"
        return 0, ""

    def _is_known(self, host: str) -> bool:
        """True if a Host header is an address or a name of this server. A page of a foreign name
        that leads here is neither.
        """
        name = host.strip().lower()
        bracketed = name[1:].partition("]")[0]
        name = bracketed if name.startswith("[") else name.rpartition(":")[0] or name
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self.names
        return True
