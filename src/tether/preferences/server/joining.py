"""How people come in and leave: an invitation stands behind the # of its link, which browsers send to nobody."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from tether.preferences.server.guard import Form, check_token, posted_form
from tether.preferences.server.site import SESSION, VISIT, Sent, Visitor, go, page, sent_by, set_cookie, site_of, visitor
from tether.preferences.store import DAY

router = APIRouter()
EVERYBODY = ("annotator", "expert", "admin")
SESSION_DAYS = 7.0
NO_WAY_IN = (
    "This invitation is not valid: it may be incomplete, have run out, or have been replaced by a newer one. Ask for another."
)


@router.get("/")
def start(found: Annotated[Visitor, Depends(visitor)]) -> Response:
    home = {"annotator": "/judge", "expert": "/experts", "admin": "/admin"}
    return go(home[found.person.role] if found.person else "/join")


@router.get("/join")
def join(request: Request, found: Annotated[Visitor, Depends(visitor)]) -> Response:
    return page(request, "join.html", found, problem="")


@router.post("/join")
def enter(request: Request, form: Annotated[Form, Depends(posted_form)], found: Annotated[Visitor, Depends(visitor)]) -> Response:
    site, address = site_of(request), request.client.host if request.client else ""
    check_token(form, found.secret)
    if site.attempts.blocked(address):
        response = page(request, "join.html", found, 429, problem="Too many invitations were wrong. Wait a minute and try again.")
        response.headers["retry-after"] = "60"
        return response
    secret = form.text("code").rpartition("#")[2].strip()
    session = site.store.enter(secret, SESSION_DAYS) if 0 < len(secret) <= 200 else None
    if session is None:
        site.attempts.fail(address)
        return page(request, "join.html", found, 403, problem=NO_WAY_IN)
    if found.person is not None:
        site.store.leave(found.secret)
    response = go("/")
    set_cookie(response, site, SESSION, session, SESSION_DAYS * DAY)
    response.delete_cookie(VISIT, path="/")
    return response


@router.post("/leave")
def leave(request: Request, sent: Annotated[Sent, Depends(sent_by(*EVERYBODY))]) -> Response:
    site_of(request).store.leave(request.cookies[SESSION])
    response = go("/join")
    response.delete_cookie(SESSION, path="/")
    return response
