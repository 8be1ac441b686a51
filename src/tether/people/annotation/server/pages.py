"""The pages: how people come in and leave, where they judge, the experts' queue, and what
administrators see and do.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Annotated, get_args

from fastapi import APIRouter, Depends, HTTPException, Path, Query
from fastapi.responses import Response

from tether.people.annotation.server import markdown
from tether.people.annotation.server.figures import Overview, waiting
from tether.people.annotation.server.guard import Form, check_token
from tether.people.annotation.server.site import (
    SESSION,
    VISIT,
    Anybody,
    Posted,
    Visit,
    go,
    seen_by,
    sent,
)
from tether.people.annotation.store import DAY, StoreError
from tether.people.annotation.tables import GuidelineRow, Role
from tether.people.annotation.work import Assigned
from tether.people.labels.votes import MAX_COMMENT, Opinion, answer_on

router = APIRouter()
ROLES: tuple[str, ...] = get_args(Role)
Judge = Annotated[Visit, seen_by(*ROLES)]
Expert = Annotated[Visit, seen_by("expert", "admin")]
Admin = Annotated[Visit, seen_by("admin")]
Sent = Annotated[Form, Depends(sent)]
Number = Annotated[int, Path(ge=1, lt=2**31)]
Place = Annotated[int | None, Query(ge=0, lt=2**31)]
DONE = {
    "kept": "Your judgment is kept.",
    "skipped": "Skipped: this task goes to somebody else.",
    "flagged": "Flagged: an expert will look at it.",
    "undone": "Taken back: judge this task again.",
    "nothing": "There is no judgment to take back.",
    "locked": "Locked out; what they judged stays.",
    "open": "Let in again.",
    "guidelines": "The new version is in force.",
}
STRENGTHS = {1: "slightly", 2: "clearly", 3: "by far"}
SIDES = {"left": "Answer 1", "right": "Answer 2", "tie": "Tie", "both_bad": "Both bad"}
SESSION_DAYS = 7.0
MAX_TURNS = 40
MAX_GUIDELINES = 50_000
NO_WAY_IN = (
    "This invitation is not valid: it may be incomplete, have run out, or have been replaced by a "
    "newer one. Ask for another."
)


# In and out: an invitation stands behind the # of its link, which browsers send to nobody.


@router.get("/")
def start(visit: Anybody) -> Response:
    home = {"annotator": "/judge", "expert": "/experts", "admin": "/admin"}
    return go(home[visit.somebody.role] if visit.somebody else "/join")


@router.get("/join")
def join(visit: Anybody) -> Response:
    return visit.page("join.html", problem="")


@router.post("/join")
def enter(visit: Anybody, form: Posted) -> Response:
    site = visit.site
    client = visit.request.client
    address = client.host if client else ""
    # who follows a link from elsewhere shows no session, and sends it with the form
    check_token(form, *visit.cookies)
    if not site.attempts.take(address):
        response = visit.page(
            "join.html",
            429,
            problem="Too many invitations were wrong. Wait a minute and try again.",
        )
        response.headers["retry-after"] = "60"
        return response
    secret = form["code"].rpartition("#")[2].strip()
    session = site.store.enter(secret, SESSION_DAYS) if 0 < len(secret) <= 200 else None
    if session is None:
        return visit.page("join.html", 403, problem=NO_WAY_IN)
    site.attempts.give_back(address)
    if visit.somebody is not None:
        site.store.leave(visit.secret)
    response = go("/")
    site.set_cookie(response, SESSION, session, SESSION_DAYS * DAY)
    response.delete_cookie(VISIT, path="/")
    return response


@router.post("/leave")
def leave(visit: Judge, _: Sent) -> Response:
    visit.site.store.leave(visit.secret)
    response = go("/join")
    response.delete_cookie(SESSION, path="/")
    return response


# Judging.


@router.get("/judge")
def task(visit: Judge, done: str = "") -> Response:
    """The person's task, or word that there is none."""
    site = visit.site
    person = visit.person
    assigned = site.work.next(visit.person.id)
    progress = site.work_count.of(person)
    page = partial(
        visit.page,
        said=DONE.get(done, ""),
        progress=progress,
        expert=person.role != "annotator",
    )
    if assigned is None:
        return page("nothing.html", quota=site.settings.quota)
    ratings = assigned.before.placed(assigned.places).ratings if assigned.before else {}
    # A conversation's latest turns say what is asked for.
    return page(
        "judge.html", assigned=assigned, guidelines=site.store.guidelines(),
        earlier=max(len(assigned.prompt) - MAX_TURNS, 0), turns=assigned.prompt[-MAX_TURNS:], opened=site.store.clock(),
        ratings=ratings, others=[_seen(assigned, other) for other in assigned.others],
        STRENGTHS=STRENGTHS, MAX_COMMENT=MAX_COMMENT,
    )  # fmt: skip


@router.post("/judge")
def keep_judgment(visit: Judge, form: Sent) -> Response:
    site = visit.site
    assignment = form.whole("assignment", 1)
    choice = form["choice"]
    left = site.work.shown(assignment, visit.person.id).left
    guidelines = site.store.guidelines(form.whole("guidelines"))
    strength = form.whole("strength", 0, 3) if form["strength"] else 0
    strength = (strength or None) if choice in ("left", "right") else None
    ratings = _ratings(form, guidelines, left)
    comment = form["comment"].strip()
    seconds = _seconds(form, site.store.clock())
    opinion = Opinion(
        answer_on(choice, left),
        strength,
        ratings,
        comment,
        seconds=seconds,
        guidelines=guidelines.version,
    )
    site.work.judge(assignment, visit.person.id, opinion)
    every = site.settings.rest_every
    rest = every and site.work_count.of(visit.person).mine % every == 0
    return go("/rest" if rest else "/judge?done=kept#task")


@router.post("/undo")
def undo(visit: Judge, _: Sent) -> Response:
    return _moved_on(visit, "undone" if visit.site.work.undo(visit.person.id) else "nothing")


@router.post("/skip")
def skip(visit: Judge, form: Sent) -> Response:
    visit.site.work.skip(form.whole("assignment", 1), visit.person.id)
    return _moved_on(visit, "skipped")


@router.post("/flag")
def flag(visit: Judge, form: Sent) -> Response:
    visit.site.work.flag(form.whole("assignment", 1), visit.person.id, form["reason"])
    return _moved_on(visit, "flagged")


def _moved_on(visit: Visit, done: str) -> Response:
    visit.site.work_count.forget(visit.person)
    return go(f"/judge?done={done}#task")


@router.get("/rest")
def rest(visit: Judge) -> Response:
    return visit.page("rest.html", progress=visit.site.work_count.of(visit.person))


@router.get("/whole/{assignment}/{part}")
def whole_text(visit: Judge, assignment: Number, part: str, turn: Place = None) -> Response:
    """All of a text that the task's page shows the beginning of."""
    names = {
        "prompt": "The whole conversation",
        "left": "The whole of answer 1",
        "right": "The whole of answer 2",
    }
    try:
        shown = visit.site.work.shown(assignment, visit.person.id)
        turns = {"prompt": shown.prompt, "left": shown.sides[0], "right": shown.sides[1]}[part]
        turns = turns if turn is None else (turns[turn],)
    except (StoreError, LookupError):
        raise HTTPException(404, "There is no such text, or it is not yours to read.") from None
    show = markdown.as_written if part == "prompt" and turn is None else markdown.rendered
    return visit.page(
        "whole.html",
        title=names[part],
        texts=[(m.role, show(m.spoken)) for m in turns],
    )


@router.get("/experts")
def experts(visit: Expert) -> Response:
    """The tasks that wait for an expert."""
    store = visit.site.store
    total = store.counts()["tasks_expert"]
    return visit.page(
        "experts.html",
        rows=waiting(store, visit.person),
        total=total,
        said_of=_summary,
    )


def _ratings(form: Form, guidelines: GuidelineRow, left: str) -> dict[str, int]:
    """Ratings by `criterion/first` and `criterion/second`, of the page's criteria."""
    criteria = [
        (place, name, side)
        for place, name in enumerate(guidelines.criteria)
        for side in ("left", "right")
    ]
    fields = {
        f"rating-{place}-{side}": f"{name}/{answer_on(side, left)}"
        for place, name, side in criteria
    }
    return {name: form.whole(field, 1, 5) for field, name in fields.items() if form[field]}


def _seconds(form: Form, now: float) -> float:
    """The time that the script measured while the page was in view; without it, the time since the
    page was made.
    """
    passed = min(max(now - (form.number("opened") or now), 0.0), DAY)
    measured = form.number("seconds")
    return round(min(measured, passed + 1) if measured is not None and measured > 0 else passed, 2)


def _seen(assigned: Assigned, opinion: Opinion) -> dict[str, str]:
    """The opinion of another person, by the places of the answers on this screen."""
    side = assigned.places.get(opinion.choice, opinion.choice)
    return {
        "what": SIDES[side],
        "how": STRENGTHS.get(opinion.strength or 0, ""),
        "comment": opinion.comment,
    }


def _summary(choices: Counter[str]) -> str:
    """`2 for one answer, 1 for the other, 1 tie`: which is which is seen on the task's own page."""
    ties = choices["tie"] + choices["both_bad"]
    sides = sorted((choices["first"], choices["second"]), reverse=True)
    parts = [f"{sides[0]} for one answer"] * bool(sides[0]) + [f"{sides[1]} for the other"] * bool(
        sides[1],
    )
    return ", ".join(parts + [f"{ties} undecided"] * bool(ties)) or "no judgments yet"


# Administration.


@router.get("/admin")
def overview_page(visit: Admin, done: str = "") -> Response:
    figures = visit.site.overview.of("all", partial(Overview, visit.site.store))
    hours = ("Judgments an hour, the last day", "hour")
    days = ("Judgments a day, the last two weeks", "day")
    charts = [(*hours, figures.hours), (*days, figures.days)]
    return visit.page("admin.html", o=figures, charts=charts, said=DONE.get(done, ""), ROLES=ROLES)


@router.post("/admin/invite")
def invite_person(visit: Admin, form: Sent) -> Response:
    """Make an invitation and show its link, this one time."""
    site = visit.site
    request = visit.request
    name = form["name"].strip()
    role = form["role"] or None
    days = form.whole("days", 1, 365)
    if name == visit.person.name:
        raise StoreError(
            "a new invitation for yourself would log you out. Ask another "
            "administrator or the command line",
        )
    secret = site.store.invite(name, role, days)  # type: ignore[arg-type]
    role = next(person.role for person in site.store.annotators() if person.name == name)
    base = (
        site.settings.origin
        if site.settings.address
        else f"{request.url.scheme}://{request.headers['host']}"
    )
    until = site.store.clock() + days * DAY
    return visit.page(
        "invited.html",
        name=name,
        role=role,
        link=f"{base}/join#{secret}",
        until=until,
    )


@router.post("/admin/access")
def access(visit: Admin, form: Sent) -> Response:
    name = form["name"]
    lock = form["lock"] == "1"
    if name == visit.person.name:
        raise StoreError(
            "you cannot lock yourself out. Another administrator or the command line can",
        )
    visit.site.store.lock_out(name, lock)
    return go(f"/admin?done={'locked' if lock else 'open'}")


@router.get("/admin/guidelines")
def guidelines_page(visit: Admin, version: Place = None) -> Response:
    """The guidelines in force or a former version, and a form to write the next."""
    store = visit.site.store
    shown = store.guidelines(version)
    if version and shown.version != version:
        raise HTTPException(404, "There is no such version of the guidelines.")
    return visit.page(
        "guidelines.html",
        shown=shown,
        versions=store.all_guidelines()[::-1],
        MAX=MAX_GUIDELINES,
    )


@router.post("/admin/guidelines")
def write(visit: Admin, form: Sent) -> Response:
    text = form["text"].strip()
    if len(text) > MAX_GUIDELINES:
        raise StoreError(
            f"guidelines have at most {MAX_GUIDELINES} characters; these have "
            f"{len(text)}. Nobody reads as many",
        )
    visit.site.store.set_guidelines(text, visit.person.name, form["criteria"].split("\n"))
    return go("/admin?done=guidelines")
