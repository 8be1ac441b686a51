"""The common part of all pages: the store, the visitor, and the making of a page."""

from __future__ import annotations

import datetime
import hashlib
import secrets
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from fastapi import Depends, HTTPException, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tether.preferences.server import markdown
from tether.preferences.server.guard import Attempts, Form, check_token, form_token, posted_form
from tether.preferences.server.overview import CachedOverview
from tether.preferences.server.progress import WorkCount
from tether.preferences.server.settings import SiteConfig
from tether.preferences.store import Store
from tether.preferences.tables import AnnotatorRow
from tether.preferences.work import Work

FOLDER = Path(__file__).parent
STATIC = {"judge.css": "text/css; charset=utf-8", "judge.js": "text/javascript; charset=utf-8"}
SESSION, VISIT = "tether_session", "tether_visit"
"""Cookies: a session that an invitation opened; and a random mark of a browser that has none yet, for the form of /join."""


class Site:
    """The objects behind the pages."""

    def __init__(self, store: Store, settings: SiteConfig) -> None:
        self.store, self.settings = store, settings
        self.work = Work(store, lease=60 * settings.lease_minutes, gold_every=settings.gold_every, seed=settings.seed)
        self.attempts = Attempts(settings.tries)
        self.work_count, self.overview = WorkCount(store), CachedOverview(store)
        self.static = {name: (FOLDER / "static" / name).read_bytes() for name in STATIC}
        self.version = hashlib.sha256(b"".join(self.static.values())).hexdigest()[:12]

    @cached_property
    def templates(self) -> Environment:
        loader = FileSystemLoader(FOLDER / "templates")
        made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        made.filters |= {"markdown": markdown.rendered, "beginning": markdown.beginning, "readable": markdown.shown_text}
        made.filters |= {"moment": _moment, "thousands": lambda number: f"{number:,}"}
        made.globals |= {"version": self.version, "CUT": markdown.CUT}
        return made

    def filled(self, template: str, status: int, **values: Any) -> Response:
        text = self.templates.get_template(template).render(**values)
        return HTMLResponse(text.encode("utf-8", "replace"), status)

    def message(self, status: int, title: str, text: str, link: tuple[str, str] = ("/", "Go on")) -> Response:
        """A page with a sentence and a way on, which needs nothing that could be broken."""
        return self.filled("message.html", status, person=None, token="", path="", title=title, text=text, link=link)

    def set_cookie(self, response: Response, name: str, value: str, seconds: float) -> None:
        secure = self.settings.secure
        response.set_cookie(name, value, int(seconds), httponly=True, samesite="strict", secure=secure, path="/")


class NotInvitedError(Exception):
    """Nobody is signed in; the page to enter an invitation is shown instead."""


class Visit:
    """A request and whoever makes it, as far as a session says; a cookie of a session that has ended counts for nothing."""

    def __init__(self, request: Request) -> None:
        self.request, self.site, self.form = request, site_of(request), Form({})
        self.cookies = session, visit = tuple(request.cookies.get(name, "") for name in (SESSION, VISIT))
        self.somebody = self.site.store.who(session) if session else None
        self.fresh = self.somebody is None and not visit
        self.secret = session if self.somebody else visit or secrets.token_urlsafe(24)

    @property
    def person(self) -> AnnotatorRow:
        """The visitor of a page that not everybody may see; NotInvitedError where nobody is signed in."""
        if self.somebody is None:
            raise NotInvitedError
        return self.somebody

    @property
    def number(self) -> int:
        return self.person.id or 0

    def page(self, template: str, status: int = 200, **values: Any) -> Response:
        """A template filled in; `token` and `person` are there for all of them."""
        path, token = self.request.url.path, form_token(self.secret)
        response = self.site.filled(template, status, person=self.somebody, token=token, path=path, **values)
        if self.fresh:
            self.site.set_cookie(response, VISIT, self.secret, 3600)
        return response


def site_of(request: Request) -> Site:
    return request.app.state.site


def visit(request: Request) -> Visit:
    return Visit(request)


def seen_by(*roles: str) -> Callable[..., Any]:
    """A dependency: the visit of a person with one of these roles."""

    async def seen(visit: Visit = Depends(visit)) -> Visit:  # noqa: B008  (async: not worth a thread)
        if visit.person.role not in roles:
            raise HTTPException(403, f"This page is for {' and '.join(f'{role}s' for role in roles)}.")
        return visit

    return seen


def sent_by(*roles: str) -> Callable[..., Any]:
    """A dependency: the visit of a person with one of these roles, with a form of one's own pages."""

    async def sent(form: Form = Depends(posted_form), visit: Visit = Depends(seen_by(*roles))) -> Visit:  # noqa: B008
        check_token(form, visit.secret)
        visit.form = form
        return visit

    return sent


def go(path: str) -> Response:
    return RedirectResponse(path, 303)


def _moment(seconds: float | None) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC") if seconds else "–"
