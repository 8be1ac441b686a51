"""The administrators' pages: how it goes, who may work, and what they are told."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.responses import Response

from tether.core.errors import ConfigError
from tether.preferences.server.guard import Form
from tether.preferences.server.settings import checked_criteria
from tether.preferences.server.site import Sent, Visitor, go, page, sent_by, site_of, visitor, visitor_in
from tether.preferences.store import DAY, StoreError
from tether.preferences.tables import AnnotatorRow

router = APIRouter(prefix="/admin")
Admin = Annotated[AnnotatorRow, Depends(visitor_in("admin"))]
AdminSent = Annotated[Sent, Depends(sent_by("admin"))]
Found = Annotated[Visitor, Depends(visitor)]
ROLES = ("annotator", "expert", "admin")
MAX_GUIDELINES = 50_000
SAID = {"locked": "Locked out; what they judged stays.", "open": "Let in again.", "guidelines": "The new version is in force."}


@router.get("")
def overview(request: Request, found: Found, person: Admin, done: str = "") -> Response:
    values = site_of(request).overview.get()
    charts = [
        ("Judgments an hour, the last day", "hour", values.hours),
        ("Judgments a day, the last two weeks", "day", values.days),
    ]
    return page(request, "admin.html", found, o=values, charts=charts, said=SAID.get(done, ""), ROLES=ROLES)


@router.post("/invite")
def invite(request: Request, found: Found, sent: AdminSent) -> Response:
    """Make an invitation and show its link, this one time."""
    site, form = site_of(request), sent.form
    name, role, days = form.text("name").strip(), form.text("role", "annotator"), form.whole("days", 1, 365)
    if role not in ROLES:
        raise HTTPException(400, f"A role is one of {', '.join(ROLES)}.")
    if name == sent.person.name:
        raise StoreError("a new invitation for yourself would end this session. Ask another administrator or the command line")
    secret = site.store.invite(name, role, days)
    base = site.settings.address.rstrip("/") or f"{request.url.scheme}://{request.headers['host']}"
    return page(
        request, "invited.html", found, name=name, role=role, link=f"{base}/join#{secret}", until=site.store.clock() + days * DAY
    )


@router.post("/access")
def access(request: Request, sent: AdminSent) -> Response:
    name, lock = sent.form.text("name"), sent.form.text("lock") == "1"
    if name == sent.person.name:
        raise StoreError("you cannot lock yourself out. Another administrator or the command line can")
    site_of(request).store.lock_out(name, lock)
    return go(f"/admin?done={'locked' if lock else 'open'}")


@router.get("/guidelines")
def guidelines(request: Request, found: Found, person: Admin, version: str = "") -> Response:
    """The guidelines in force or a former version, and a form to write the next."""
    store = site_of(request).store
    shown = store.guidelines(Form({"n": version}).whole("n") if version else None)
    if version and str(shown.version) != version:
        raise HTTPException(404, "There is no such version of the guidelines.")
    values: dict[str, Any] = {"shown": shown, "versions": store.all_guidelines()[::-1], "MAX": MAX_GUIDELINES}
    return page(request, "guidelines.html", found, **values)


@router.post("/guidelines")
def write(request: Request, sent: AdminSent) -> Response:
    store, text = site_of(request).store, sent.form.text("text").strip()
    if len(text) > MAX_GUIDELINES:
        raise StoreError(f"guidelines have at most {MAX_GUIDELINES} characters; these have {len(text)}. Nobody reads as many")
    try:
        criteria = checked_criteria(sent.form.text("criteria").split("\n"))
    except ConfigError as error:
        raise StoreError(str(error)) from error
    store.set_guidelines(text, sent.person.name, criteria)
    return go("/admin?done=guidelines")
