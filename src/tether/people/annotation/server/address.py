"""The address of a server of pages: where it listens, and by which names it may be opened."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import TypeVar

from pydantic import Field, HttpUrl, ValidationError

from tether.core.errors import ConfigError, one_line
from tether.settings.config import Config

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class Address(Config):
    """The address to listen at; people open `address` where that is not `http://host:port`."""

    host: str = "127.0.0.1"
    port: int = Field(default=8765, ge=0, le=65535)
    address: str = ""

    def faults(self) -> Iterator[str]:
        if self.address and not _is_plain(self.address):
            yield "address is what people open, such as https://judge.example.org, without a path"
        if self.host in ("0.0.0.0", "::", "") and not self.address:
            yield (
                f"host {self.host!r} listens everywhere. Also give the address that people open, "
                f"such as --address http://localhost:{self.port}"
            )

    @property
    def origin(self) -> str:
        """Scheme, host and port of the links that people get: in lower case, and without the port
        that the scheme has anyway.
        """
        return str(self._opened).rstrip("/")

    @property
    def _opened(self) -> HttpUrl:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return HttpUrl(self.address or f"http://{host}:{self.port}")

    @property
    def secure(self) -> bool:
        return self.origin.startswith("https://")

    @property
    def hosts(self) -> frozenset[str]:
        """Names by which a browser may ask for this server; any other comes from a foreign DNS."""
        return LOOPBACK | {self.host, (self._opened.host or self.host).strip("[]")}


def _is_plain(address: str) -> bool:
    try:
        url = HttpUrl(address)
    except ValidationError:
        return False
    return url.path == "/" and bool(url.port) and not (url.query or url.username or url.fragment)


Where = TypeVar("Where", bound=Address)


def listen(settings: Where) -> tuple[socket.socket, Where]:
    """A socket that listens, and the settings with its port, where 0 asked for any that is free.

    Raises:
        ConfigError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # Its kind is named in full: the event loop sends small packets at once only on sockets that say
    # they are TCP.
    opened = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind((settings.host, settings.port))
        opened.listen(512)
    except (OSError, UnicodeError, TypeError) as error:
        opened.close()
        where = f"{settings.host} port {settings.port}"
        raise ConfigError(
            f"cannot listen at {where}: {one_line(error)}. Choose another --port or --host",
        ) from error
    return opened, settings.model_copy(update={"port": opened.getsockname()[1]})
