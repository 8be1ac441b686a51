"""The client by which a run asks servers over HTTP.

An answer is bounded in time and size, and requests go to the named address alone.

Redirects are not followed, cookies are not kept, and a compressed body is unpacked up to the bound.
The head of an answer is bounded by httpx2 (100 kB).
"""

from __future__ import annotations

import asyncio
import re
import threading
import zlib
from collections.abc import Coroutine, Sequence
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import NamedTuple, TypeVar

import httpx2

from tether.core.types import Texts

T = TypeVar("T")
CONNECT = 10.0
"""Seconds until a connection must be open."""
EXCHANGES = httpx2.HTTPError, OSError, ValueError, zlib.error
"""Errors of an exchange for which the machine, the network or a garbled answer is to blame."""
_WORDS = re.compile(
    r'"(?:error|detail|message|msg|param)"\s*:\s*"((?:[^"\\]|\\.)*)"|"loc"\s*:\s*\[([^\]]*)\]',
)


class HttpReply(NamedTuple):
    """A whole answer, unpacked; the names of headers are in lower case."""

    status: int
    headers: Texts
    content: bytes

    @property
    def words(self) -> str:
        """The fields that a refusal names, and its messages, in one line. OpenAI calls them `param`
        and `message`, FastAPI `loc` and `msg`.
        """
        text = self.content[:100_000].decode(errors="replace")
        named = "; ".join(filter(None, map("".join, _WORDS.findall(text))))
        words = named or self.headers.get("location", "") or text
        words = words.replace("\\n", " ").replace('\\"', '"')
        return " ".join(words.split())[:400]


class HttpClient:
    """A client whose requests run in a thread of their own, so that any thread may ask.

    Args:
        largest: bytes of an unpacked answer.
        socket_options: of connections without a proxy; unset: through the proxies that the
            environment names.
    """

    def __init__(
        self,
        headers: Texts,
        largest: int,
        socket_options: Sequence[tuple[int, int, int]] | None = None,
    ) -> None:
        self.largest = largest
        limits = httpx2.Limits(max_connections=None)
        self._client = httpx2.AsyncClient(
            headers={"Accept-Encoding": "gzip, deflate", "Content-Type": "application/json"}
            | dict(headers),
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            timeout=httpx2.Timeout(None, connect=CONNECT),
            limits=limits,
            transport=None
            if socket_options is None
            else httpx2.AsyncHTTPTransport(limits=limits, socket_options=socket_options),
        )
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._live, daemon=True, name="http client")
        self._thread.start()

    def _live(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._over.wait())
            runner.run(self._client.aclose())

    def close(self) -> None:
        """Give up what is under way, and close the connections."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join()

    def run(self, work: Coroutine[object, object, T], seconds: float | None = None) -> T:
        """The result of work in the client's thread, at the latest after these seconds."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(seconds)
        finally:
            future.cancel()

    def ask(self, method: str, url: str, seconds: float, content: bytes = b"") -> HttpReply:
        """See `send`, from any thread."""
        return self.run(self.send(method, url, seconds, content), seconds + CONNECT)

    async def send(self, method: str, url: str, seconds: float, content: bytes = b"") -> HttpReply:
        """A whole answer within these seconds.

        Raises:
            TimeoutError: it did not come in time.
            HTTPError: there was no connection, or no answer of HTTP. The class is that of httpx2.
            ValueError: the body is too large, or cannot be unpacked.
        """
        try:
            async with (
                asyncio.timeout(seconds),
                self._client.stream(method, url, content=content) as answer,
            ):
                return HttpReply(answer.status_code, answer.headers, await self._body(answer))
        except TimeoutError:
            raise TimeoutError(f"no whole answer within {seconds:g} s") from None

    async def _body(self, answer: httpx2.Response) -> bytes:
        coding = answer.headers.get("content-encoding", "identity").strip().lower()
        unpacked = zlib.decompressobj(wbits=47)
        body = bytearray()
        async for chunk in answer.aiter_raw():
            left = self.largest + 1 - len(body)
            body += chunk if coding == "identity" else unpacked.decompress(chunk, left)
            if len(body) > self.largest:
                raise ValueError(f"the body has more than {self.largest >> 20} MB")
        return bytes(body)
