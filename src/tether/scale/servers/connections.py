"""Connections of tether's servers: a request must arrive in time, and one client may hold only so
many connections.

Without these bounds, a few hundred half-sent requests hold all connections of the process
(Slowloris).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 20.0
"""Seconds in which a whole request must arrive, from the connection or from its first byte on."""
CONNECTIONS = 100
"""Connections of one network address at a time; a browser holds six."""


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol with a deadline for every request; `bounded_protocol` sets the numbers."""

    most: ClassVar[int | None] = CONNECTIONS
    seconds: ClassVar[float] = REQUEST_SECONDS
    held: ClassVar[defaultdict[str, dict[BoundedProtocol, None]]]
    """Connections by network address, the oldest first."""
    deadline: asyncio.TimerHandle | None = None

    @property
    def address(self) -> str:
        return self.client[0] if self.client else ""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        others = self.held[self.address]
        if self.most is not None and len(others) >= self.most:
            # the one that waits for its request longest, else this one
            ended = next((one for one in others if one.deadline is not None), self)
            others.pop(ended, None)
            ended.transport.abort()
        others[self] = None
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self.held[self.address].pop(self, None)
        if not self.held[self.address]:
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
        {"most": most, "seconds": seconds, "held": defaultdict(dict)},
    )
