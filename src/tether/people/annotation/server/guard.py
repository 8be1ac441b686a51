"""Checks before every request: the host it asks for, its origin, its size, and the number of failed
attempts.

A page of another site must neither read nor post anything here, and a text of a model must stay a
text. So the headers below forbid inline scripts, frames, foreign resources and caching. Every form
has a token that only its own session can know.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from urllib.parse import parse_qsl

from fastapi import HTTPException, Request
from fastapi.responses import PlainTextResponse, Response

MAX_BODY = 1 << 20
MAX_FIELDS = 64
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src "
    "data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # `no-referrer` would make browsers send `Origin: null` with our own forms.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
NOT_OURS = "This server does not answer to that name. Open it by the address in your invitation.\n"


async def guarded(
    request: Request,
    call_next: Callable[[Request], Awaitable[Response]],
) -> Response:
    """Middleware: refuses names that are not ours (DNS rebinding) and puts the headers on every
    response.
    """
    names = [re.sub(r":\d*$", "", name).lower() for name in request.headers.getlist("host")]
    is_ours = len(names) == 1 and names[0].strip("[]") in request.app.state.site.settings.hosts
    response = await call_next(request) if is_ours else PlainTextResponse(NOT_OURS, 421)
    for name, value in {"cache-control": "no-store", **HEADERS}.items():
        response.headers.setdefault(name, value)
    return response


class Form(defaultdict[str, str]):
    """The fields of a form: texts without control characters, empty where there is none; numbers
    within their bounds.
    """

    def whole(self, name: str, low: int = 0, high: int = 2**31 - 1) -> int:
        """A whole number.

        Raises:
            HTTPException: 400, it is none or out of bounds.
        """
        text = self[name]
        if not re.fullmatch(r"[0-9]{1,10}", text) or not low <= int(text) <= high:
            raise HTTPException(
                400,
                "A field of this form does not hold what it should. Go back "
                "and load the page again.",
            )
        return int(text)

    def number(self, name: str) -> float | None:
        """A finite number, or None."""
        try:
            value = float(self[name][:40])
        except ValueError:
            return None
        return value if math.isfinite(value) else None


async def posted_form(request: Request) -> Form:
    """The fields of a form of ours.

    Raises:
        HTTPException: it comes from another site (403), is too large (413), or is no form (415,
            400).
    """
    _check_origin(request)
    if (
        request.headers.get("content-type", "").partition(";")[0].strip().lower()
        != "application/x-www-form-urlencoded"
    ):
        raise HTTPException(415, "Only the forms of these pages can be sent here.")
    announced = request.headers.get("content-length", "0")
    if not announced.isdecimal() or int(announced) > MAX_BODY:
        raise _too_large(close=len(announced) > 8)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise _too_large(close=True)
    try:
        pairs = parse_qsl(
            body.decode("utf-8", "replace"),
            keep_blank_values=True,
            max_num_fields=MAX_FIELDS,
            errors="replace",
        )
    except ValueError as error:
        raise HTTPException(400, "This form has more fields than any of these pages.") from error
    # Browsers send line ends as two characters but count them as one against a text field's limit.
    return Form(
        str,
        {
            name: re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", text.replace("\r\n", "\n"))
            for name, text in pairs
        },
    )


def _too_large(close: bool) -> HTTPException:
    """Browsers read an answer only after they have sent everything: what may be endless ends with
    the connection.
    """
    text = "This is larger than anything these pages send. Shorten it and try again."
    return HTTPException(413, text, {"connection": "close"} if close else None)


def form_token(secret: str) -> str:
    """The token that a form must carry, derived from a cookie that no other site can read."""
    return hashlib.sha256(f"form/{secret}".encode()).hexdigest()


def check_token(form: Form, *secrets: str) -> None:
    """Raises HTTPException 403 for a form that was made for none of these cookies of a browser."""
    if not any(
        s and hmac.compare_digest(form["token"].encode(), form_token(s).encode()) for s in secrets
    ):
        raise HTTPException(
            403,
            "This form belongs to an older visit. Load the page again and repeat what you did.",
        )


def _check_origin(request: Request) -> None:
    """Browsers say from which site a form comes; what says nothing is no browser that we know."""
    origin = request.headers.get("origin")
    site = request.headers.get("sec-fetch-site")
    ours = {
        f"{request.url.scheme}://{request.headers['host']}".lower(),
        request.app.state.site.settings.origin,
    }
    foreign = (origin is not None and origin not in ours) or (
        site is not None and site != "same-origin"
    )
    if foreign or (origin is None and site is None):
        raise HTTPException(
            403,
            "This was not sent from a page of this server, so nothing was done.",
        )


class Attempts:
    """Failed attempts by network address: `allowed` a minute, with at most `capacity` addresses
    remembered.
    """

    def __init__(
        self,
        allowed: int,
        capacity: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.allowed = allowed
        self.capacity = capacity
        self.clock = clock
        self.failed: dict[str, list[float]] = {}
        self.lock = threading.Lock()

    def take(self, address: str) -> bool:
        """Count an attempt as failed until `give_back`; False: no more are allowed now. Many at
        once get no more than one after the other.
        """
        with self.lock:
            now = self.clock()
            recent = [at for at in self.failed.pop(address, ()) if now - at < 60]
            allowed = len(recent) < self.allowed
            self.failed[address] = recent + [now] * allowed
            while len(self.failed) > self.capacity:
                del self.failed[next(iter(self.failed))]
        return allowed

    def give_back(self, address: str) -> None:
        """The last attempt has not failed."""
        with self.lock:
            self.failed[address] = self.failed.get(address, [])[:-1]
