"""What all pages share: the store, who is looking, and how a page is made."""

from __future__ import annotations

import datetime
import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fastapi import Depends, HTTPException, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tether.preferences.server import markdown
from tether.preferences.server.guard import Attempts, Form, check_token, form_token, posted_form
from tether.preferences.server.overview import Remembered
from tether.preferences.server.progress import WorkCount
from tether.preferences.server.settings import ServerConfig
from tether.preferences.store import Store
from tether.preferences.tables import AnnotatorRow
from tether.preferences.work import Work

FOLDER = Path(__file__).parent
STATIC = {"judge.css": "text/css; charset=utf-8", "judge.js": "text/javascript; charset=utf-8"}
SESSION, VISIT = "tether_session", "tether_visit"
"""Cookies: a session that an invitation opened; and a random mark of a browser that has none yet, for the form of /join."""


class Site:
    """The objects behind the pages."""

    def __init__(self, store: Store, settings: ServerConfig) -> None:
        self.store, self.settings = store, settings
        self.work = Work(store, lease=60 * settings.lease_minutes, gold_every=settings.gold_every, seed=settings.seed)
        self.attempts = Attempts(settings.tries)
        self.work_count, self.overview = WorkCount(store), Remembered(store)
        self.static = {name: (FOLDER / "static" / name).read_bytes() for name in STATIC}
        self.version = hashlib.sha256(b"".join(self.static.values())).hexdigest()[:12]

    @cached_property
    def templates(self) -> Environment:
        loader = FileSystemLoader(FOLDER / "templates")
        made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        made.filters |= {"markdown": markdown.rendered, "beginning": markdown.beginning, "readable": markdown.readable}
        made.filters |= {"moment": _moment, "thousands": lambda number: f"{number:,}"}
        made.globals |= {"version": self.version, "CUT": markdown.CUT}
        return made


@dataclass(frozen=True)
class Visitor:
    """Whoever looks: a person if a session says so, and the secret of their cookie."""

    person: AnnotatorRow | None
    secret: str
    fresh: bool = False
    """Whether the browser has to be given the cookie."""


@dataclass(frozen=True)
class Sent:
    """A form of somebody who may send it."""

    person: AnnotatorRow
    form: Form


class NotInvitedError(Exception):
    """Nobody is signed in; the page to enter an invitation is shown instead."""


def site_of(request: Request) -> Site:
    return request.app.state.site


def visitor(request: Request) -> Visitor:
    """Who looks. A cookie of a session that has ended counts for nothing."""
    session = request.cookies.get(SESSION, "")
    person = site_of(request).store.who(session) if session else None
    if person is not None:
        return Visitor(person, session)
    visit = request.cookies.get(VISIT, "")
    return Visitor(None, visit or secrets.token_urlsafe(24), fresh=not visit)


def visitor_in(*roles: str) -> Callable[..., Any]:
    """A dependency: the person who looks, if they have one of these roles."""

    async def allowed(found: Visitor = Depends(visitor)) -> AnnotatorRow:  # noqa: B008  (async: not worth a thread)
        return _checked(found, roles)

    return allowed


def sent_by(*roles: str) -> Callable[..., Any]:
    """A dependency: a form of one's own pages, sent by a person with one of these roles."""

    async def sent(form: Form = Depends(posted_form), found: Visitor = Depends(visitor)) -> Sent:  # noqa: B008
        person = _checked(found, roles)
        check_token(form, found.secret)
        return Sent(person, form)

    return sent


def _checked(found: Visitor, roles: tuple[str, ...]) -> AnnotatorRow:
    if found.person is None:
        raise NotInvitedError
    if found.person.role not in roles:
        raise HTTPException(403, f"This page is for {' and '.join(f'{role}s' for role in roles)}.")
    return found.person


def page(request: Request, template: str, found: Visitor, status: int = 200, **values: Any) -> Response:
    """A template filled in; `token` and `person` are there for all of them."""
    site = site_of(request)
    text = site.templates.get_template(template).render(
        person=found.person, token=form_token(found.secret), path=request.url.path, **values
    )
    response = HTMLResponse(text.encode("utf-8", "replace"), status)
    if found.fresh:
        set_cookie(response, site, VISIT, found.secret, 3600)
    return response


def message(request: Request, status: int, title: str, text: str, link: tuple[str, str] = ("/", "Go on")) -> Response:
    """A page with a sentence and a way on, which needs nothing that could be broken."""
    template = site_of(request).templates.get_template("message.html")
    filled = template.render(person=None, token="", path="", title=title, text=text, link=link)
    return HTMLResponse(filled.encode("utf-8", "replace"), status)


def go(path: str) -> Response:
    return RedirectResponse(path, 303)


def set_cookie(response: Response, site: Site, name: str, value: str, seconds: float | None) -> None:
    secure = site.settings.secure
    response.set_cookie(name, value, int(seconds) if seconds else None, httponly=True, samesite="strict", secure=secure, path="/")


def _moment(seconds: float | None) -> str:
    if not seconds:
        return "–"
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
