"""The settings of a server of a preference store, checked before it starts."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import Field, model_validator

from tether.core.config import Config
from tether.core.errors import ConfigError

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class SiteConfig(Config):
    """The address to listen at and the rules of handing out work; people open `address` where that is not `http://host:port`."""

    host: str = "127.0.0.1"
    port: int = Field(default=8765, ge=0, le=65535)
    address: str = ""
    lease_minutes: float = Field(default=30.0, gt=0)
    gold_every: int = Field(default=10, ge=0)
    rest_every: int = Field(default=50, ge=0)
    """The number of a person's judgments after which a pause is offered; 0: never."""
    seed: int = 0
    tries: int = Field(default=10, ge=1)
    """Invitations that one network address may get wrong in a minute."""

    @model_validator(mode="after")
    def _reachable(self) -> SiteConfig:
        if self.address and not _good(self.address):
            raise ValueError("address is what people open, such as https://judge.example.org, without a path")
        if self.host in ("0.0.0.0", "::", "") and not self.address:
            raise ValueError(f"host {self.host!r} listens everywhere; give the address that people open as well")
        return self

    @property
    def origin(self) -> str:
        """Scheme, host and port of the links that people get."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return _as_browsers_say(self.address or f"http://{host}:{self.port}")

    @property
    def secure(self) -> bool:
        return self.origin.startswith("https://")

    @property
    def hosts(self) -> frozenset[str]:
        """Names by which a browser may ask for this server; any other was put there by somebody else's DNS."""
        return LOOPBACK | {self.host, urlsplit(self.origin).hostname or self.host}

    @property
    def local(self) -> bool:
        return self.host in LOOPBACK


def checked_criteria(names: list[str]) -> list[str]:
    """The criteria without blanks around them and without empty ones.

    Raises:
        ConfigError: too many, too long, or one twice.
    """
    criteria = [name.strip() for name in names if name.strip()]
    odd = any(len(name) > 30 or not name.isprintable() for name in criteria)
    if len(criteria) > 10 or len(set(criteria)) < len(criteria) or odd:
        raise ConfigError("criteria: at most 10 different ones, each of at most 30 characters")
    return criteria


def _as_browsers_say(address: str) -> str:
    """In lower case, and without the port that its scheme has anyway."""
    parts = urlsplit(address)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    is_usual = parts.port in (None, {"http": 80, "https": 443}.get(parts.scheme))
    return f"{parts.scheme}://{host}" + ("" if is_usual else f":{parts.port}")


def _good(address: str) -> bool:
    try:
        parts = urlsplit(address)
        host = bool(parts.hostname) and parts.port != 0 and parts.path in ("", "/")
        return host and parts.scheme in ("http", "https") and not (parts.query or parts.username)
    except ValueError:
        return False
