"""Connections of the annotation server: a request must arrive in time, and one client may hold only
so many connections.

Without these bounds, a few hundred half-sent requests hold all connections of the process
(Slowloris).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 20.0
"""Seconds in which a whole request must arrive, from the connection or from its first byte on."""
CONNECTIONS = 100
"""Connections of one network address at a time; a browser holds six."""
_LOG = logging.getLogger("uvicorn.error")


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol with a deadline for every request; `bounded_protocol` sets the numbers."""

    most: ClassVar[int | None] = CONNECTIONS
    seconds: ClassVar[float] = REQUEST_SECONDS
    held: ClassVar[Counter[str]] = Counter()
    deadline: asyncio.TimerHandle | None = None

    @property
    def address(self) -> str:
        return self.client[0] if self.client else ""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.held[self.address] += 1
        if self.most is not None and self.held[self.address] > self.most:
            transport.abort()
        else:
            self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self.held[self.address] -= 1
        if self.held[self.address] <= 0:
            del self.held[self.address]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            self._expect()
        else:
            self._stop()

    def _expect(self) -> None:
        """The rest of a request must come in time."""
        if self.deadline is None:
            self.deadline = self.loop.call_later(self.seconds, self._give_up)

    def _stop(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def _give_up(self) -> None:
        _LOG.warning(
            "closed a connection from %s: no whole request within %g s",
            self.address,
            self.seconds,
        )
        self.transport.abort()


def bounded_protocol(
    most: int | None = CONNECTIONS,
    seconds: float = REQUEST_SECONDS,
) -> type[BoundedProtocol]:
    """The protocol of one server; `most` None: no bound of connections, as behind a proxy, where
    all come from one address.
    """
    return type(
        "BoundedProtocol",
        (BoundedProtocol,),
        {"most": most, "seconds": seconds, "held": Counter()},
    )
