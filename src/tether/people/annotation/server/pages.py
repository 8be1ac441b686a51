"""The pages: how people come in and leave, where they judge, the experts' queue, and what
administrators see and do.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, get_args

from fastapi import APIRouter, Depends, HTTPException, Path, Query
from fastapi.responses import Response

from tether.people.annotation.searching import PAGE, Search, search
from tether.people.annotation.server import markdown
from tether.people.annotation.server.figures import Overview
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
from tether.people.annotation.store import DAY, StoreError, question_of
from tether.people.annotation.tables import GuidelineRow, Role
from tether.people.labels.votes import TEXTS, Opinion, answer_on
from tether.settings.reading import build

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
    guidelines = site.store.guidelines()
    # A conversation's latest turns say what is asked for.
    return page(
        "judge.html", assigned=assigned, guidelines=guidelines, questions=list(map(question_of, guidelines.criteria)),
        earlier=max(len(assigned.prompt) - MAX_TURNS, 0), turns=assigned.prompt[-MAX_TURNS:], opened=site.store.clock(),
        ratings=ratings, others=[other.placed(assigned.places) for other in assigned.others],
        STRENGTHS=STRENGTHS, SIDES=SIDES, TEXTS=TEXTS,
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
    seconds = _seconds(form, site.store.clock())
    opinion = Opinion(
        answer_on(choice, left),
        strength,
        ratings,
        form["comment"].strip(),
        correction=form["correction"].strip(),
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
def experts(visit: Expert, after: Place = None) -> Response:
    """The tasks that wait for an expert, without names."""
    return _pairs(
        visit,
        "experts.html",
        Search(state="expert", after=after or 0),
        names=False,
    )


def _pairs(visit: Visit, template: str, wanted: Search, *, names: bool = True) -> Response:
    """A page of the pairs that a search finds, with the address of the next."""
    store = visit.site.store
    total, rows = search(store, wanted, names=names)
    url = visit.request.url.include_query_params(after=rows[-1].number if rows else 0)
    return visit.page(
        template,
        wanted=wanted,
        names=names,
        total=total,
        rows=rows,
        following=f"?{url.query}" if len(rows) == PAGE else "",
        people=store.annotators(),
        STRENGTHS=STRENGTHS,
    )


def _ratings(form: Form, guidelines: GuidelineRow, left: str) -> dict[str, int]:
    """Ratings by `criterion/first` and `criterion/second`, of the page's criteria, which may be left
    out; and the answers to its questions, by `question/better/first`.
    """
    ratings = {}
    for place, entry in enumerate(guidelines.criteria):
        name, answers = question_of(entry)
        for side in () if answers else ("left", "right"):
            if form[field := f"rating-{place}-{side}"]:
                ratings[f"{name}/{answer_on(side, left)}"] = form.whole(field, 1, 5)
        if answers:
            answer = answers[form.whole(f"question-{place}", 0, len(answers) - 1)]
            ratings[f"{name}/better/{answer_on(answer[:-1], left)}"] = int(answer[-1])
    return ratings


def _seconds(form: Form, now: float) -> float:
    """The time that the script measured while the page was in view; without it, the time since the
    page was made.
    """
    passed = min(max(now - (form.number("opened") or now), 0.0), DAY)
    measured = form.number("seconds")
    return round(min(measured, passed + 1) if measured is not None and measured > 0 else passed, 2)


# Administration.


@router.get("/admin")
def overview_page(visit: Admin, done: str = "") -> Response:
    figures = visit.site.overview.of("all", partial(Overview, visit.site.store))
    hours = ("Judgments an hour, the last day", "hour")
    days = ("Judgments a day, the last two weeks", "day")
    charts = [(*hours, figures.hours), (*days, figures.days)]
    return visit.page("admin.html", o=figures, charts=charts, said=DONE.get(done, ""), ROLES=ROLES)


@router.get("/admin/records")
def records(visit: Admin) -> Response:
    """Pairs with a text, a state, a person or a tag, and what people said of them."""
    wanted = build(
        Search,
        dict(visit.request.query_params),
        where="the search",
    )
    return _pairs(visit, "records.html", wanted)


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
