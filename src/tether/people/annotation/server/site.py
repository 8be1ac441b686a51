"""The common part of all pages: the settings, the store, the visitor, and the making of a page."""

from __future__ import annotations

import datetime
import hashlib
import secrets
from pathlib import Path
from typing import Annotated

from fastapi import Depends, HTTPException, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import NonNegativeInt, PositiveFloat

from tether.people.annotation.server import markdown
from tether.people.annotation.server.address import Address
from tether.people.annotation.server.figures import Overview, Remembered, WorkCount
from tether.people.annotation.server.guard import (
    Attempts,
    Form,
    check_token,
    form_token,
    posted_form,
)
from tether.people.annotation.store import Store
from tether.people.annotation.tables import AnnotatorRow
from tether.people.annotation.work import Work
from tether.settings.config import FromOne

FOLDER = Path(__file__).parent
STATIC = {"judge.css": "text/css; charset=utf-8", "judge.js": "text/javascript; charset=utf-8"}
SESSION = "tether_session"
VISIT = "tether_visit"
"""Cookies: a session that an invitation opened; and a random mark of a browser that has none yet,
for the form of /join.
"""


class SiteConfig(Address):
    """The address to listen at and the rules of handing out work."""

    lease_minutes: PositiveFloat = 30.0
    gold_every: NonNegativeInt = 10
    rest_every: NonNegativeInt = 50
    """The number of a person's judgments after which a pause is offered; 0: never."""
    quota: NonNegativeInt = 0
    """The most judgments of one annotator; 0: any number."""
    seed: int = 0
    tries: FromOne = 10
    """Invitations that one network address may get wrong in a minute."""


class Site:
    """The objects behind the pages."""

    def __init__(self, store: Store, settings: SiteConfig) -> None:
        self.store = store
        self.settings = settings
        self.work = Work(
            store,
            lease=60 * settings.lease_minutes,
            gold_every=settings.gold_every,
            quota=settings.quota,
            seed=settings.seed,
        )
        self.attempts = Attempts(settings.tries)
        self.work_count = WorkCount(store, settings.quota)
        self.overview = Remembered[Overview](patience=20, quick=0.5)
        self.static = {name: (FOLDER / "static" / name).read_bytes() for name in STATIC}
        version = hashlib.sha256(b"".join(self.static.values())).hexdigest()[:12]
        loader = FileSystemLoader(FOLDER / "templates")
        self.templates = Environment(
            loader=loader,
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self.templates.filters |= {"markdown": markdown.rendered, "beginning": markdown.beginning}
        self.templates.filters |= {
            "readable": markdown.shown_text,
            "moment": _moment,
            "thousands": "{:,}".format,
        }
        self.templates.globals |= {"version": version, "CUT": markdown.CUT}

    def filled(self, template: str, status: int, **values: object) -> Response:
        text = self.templates.get_template(template).render(**values)
        return HTMLResponse(text.encode("utf-8", "replace"), status)

    def message(
        self,
        status: int,
        title: str,
        text: str,
        link: tuple[str, str] = ("/", "Go on"),
    ) -> Response:
        """A page with a sentence and a way on, which needs nothing that could be broken."""
        return self.filled(
            "message.html",
            status,
            person=None,
            token="",
            path="",
            title=title,
            text=text,
            link=link,
        )

    def set_cookie(self, response: Response, name: str, value: str, seconds: float) -> None:
        secure = self.settings.secure
        response.set_cookie(
            name,
            value,
            int(seconds),
            httponly=True,
            samesite="strict",
            secure=secure,
            path="/",
        )


class Visit:
    """A request and the person of its session, if it has one; a cookie of an ended session does not
    count.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.site = site_of(request)
        self.cookies = session, visit = tuple(
            request.cookies.get(name, "") for name in (SESSION, VISIT)
        )
        self.somebody = self.site.store.who(session) if session else None
        self.fresh = self.somebody is None and not visit
        self.secret = session if self.somebody else visit or secrets.token_urlsafe(24)

    @property
    def person(self) -> AnnotatorRow:
        """The visitor of a page that not everybody may see.

        Raises:
            HTTPException: 401, the visitor is not signed in; the page to enter an invitation is
                shown instead.
        """
        if self.somebody is None:
            raise HTTPException(401, "Your session has ended, so nothing was done.")
        return self.somebody

    def page(self, template: str, status: int = 200, **values: object) -> Response:
        """A template filled in; `token` and `person` are there for all of them."""
        path = self.request.url.path
        token = form_token(self.secret)
        response = self.site.filled(
            template,
            status,
            person=self.somebody,
            token=token,
            path=path,
            **values,
        )
        if self.fresh:
            self.site.set_cookie(response, VISIT, self.secret, 3600)
        return response


def site_of(request: Request) -> Site:
    return request.app.state.site


Anybody = Annotated[Visit, Depends()]
Posted = Annotated[Form, Depends(posted_form)]


def seen_by(*roles: str) -> object:
    """A dependency: the visit of a person with one of these roles."""

    async def seen(visit: Anybody) -> Visit:  # async: not worth a thread
        if visit.person.role not in roles:
            raise HTTPException(
                403,
                f"This page is for {' and '.join(f'{role}s' for role in roles)}.",
            )
        return visit

    return Depends(seen)


async def sent(visit: Anybody, form: Posted) -> Form:
    """A dependency: a form of the visitor's own pages."""
    check_token(form, visit.secret)
    return form


def go(path: str) -> Response:
    return RedirectResponse(path, 303)


def _moment(seconds: float | None) -> str:
    return (
        datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
        if seconds
        else "–"
    )
