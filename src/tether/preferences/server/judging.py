"""The pages on which people judge: a task, what they say of it, and the experts' queue."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.responses import Response

from tether.preferences.server import markdown
from tether.preferences.server.guard import Form
from tether.preferences.server.joining import EVERYBODY
from tether.preferences.server.progress import shown_conversation, side_on_left, taken_back, waiting
from tether.preferences.server.site import Sent, Visitor, go, page, sent_by, site_of, visitor, visitor_in
from tether.preferences.store import DAY
from tether.preferences.tables import AnnotatorRow, GuidelineRow
from tether.preferences.work import MAX_COMMENT, Assigned, Verdict

router = APIRouter()
Judge = Annotated[AnnotatorRow, Depends(visitor_in(*EVERYBODY))]
Expert = Annotated[AnnotatorRow, Depends(visitor_in("expert", "admin"))]
JudgeSent = Annotated[Sent, Depends(sent_by(*EVERYBODY))]
SAID = {
    "kept": "Your judgment is kept.",
    "skipped": "Skipped: this task goes to somebody else.",
    "flagged": "Flagged: an expert will look at it.",
    "undone": "Taken back: judge this task again.",
    "nothing": "There is no judgment to take back.",
}
STRENGTHS = {1: "slightly", 2: "clearly", 3: "by far"}
SIDES = {"left": "Answer 1", "right": "Answer 2", "tie": "Tie", "both_bad": "Both bad"}
MAX_TURNS = 40


@router.get("/judge")
def task(request: Request, found: Annotated[Visitor, Depends(visitor)], person: Judge, done: str = "") -> Response:
    """The person's task, or word that there is none."""
    site = site_of(request)
    assigned, progress = site.work.next(person.id or 0), site.work_count.of(person)
    common: dict[str, Any] = {"said": SAID.get(done, ""), "progress": progress, "expert": person.role != "annotator"}
    if assigned is None:
        return page(request, "nothing.html", found, **common)
    before = taken_back(site.store, assigned.assignment)
    ratings = {_shown_rating(assigned, name): value for name, value in (before.ratings if before else {}).items()}
    # A conversation's latest turns say what is asked for.
    left, right = assigned.sides
    return page(
        request, "judge.html", found, assigned=assigned, left=left, right=right, guidelines=site.store.guidelines(),
        earlier=max(len(assigned.prompt) - MAX_TURNS, 0), turns=assigned.prompt[-MAX_TURNS:], opened=site.store.clock(),
        before=before, ratings=ratings, others=[_seen(assigned, dict(said)) for said in assigned.others],
        STRENGTHS=STRENGTHS, SIDES=SIDES, MAX_COMMENT=MAX_COMMENT, **common,
    )  # fmt: skip


@router.post("/judge")
def judge(request: Request, sent: JudgeSent) -> Response:
    site, person, form = site_of(request), sent.person, sent.form
    assignment = form.whole("assignment", 1)
    left = side_on_left(site.store, assignment, person.id or 0)
    guidelines = site.store.guidelines(form.whole("guidelines"))
    strength = form.whole("strength", 0, 3) if form.text("strength") else 0
    verdict = Verdict(
        Assigned(assignment, 0, (), (), (), left, 0.0).chosen(form.text("choice")),
        strength=strength if strength and form.text("choice") in ("left", "right") else None,
        ratings=_ratings(form, guidelines, left),
        comment=form.text("comment").strip(),
        seconds=_seconds(form, site.store.clock()),
        guidelines=guidelines.version or 0,
    )
    site.work.judge(assignment, person.id or 0, verdict)
    every = site.settings.rest_every
    if every and site.work_count.of(person).mine % every == 0:
        return go("/rest")
    return go("/judge?done=kept#task")


@router.post("/undo")
def undo(request: Request, sent: JudgeSent) -> Response:
    site = site_of(request)
    assigned = site.work.undo(sent.person.id or 0)
    site.work_count.forget(sent.person)
    return go("/judge?done=undone#task" if assigned else "/judge?done=nothing#task")


@router.post("/skip")
def skip(request: Request, sent: JudgeSent) -> Response:
    site_of(request).work.skip(sent.form.whole("assignment", 1), sent.person.id or 0)
    site_of(request).work_count.forget(sent.person)
    return go("/judge?done=skipped#task")


@router.post("/flag")
def flag(request: Request, sent: JudgeSent) -> Response:
    site_of(request).work.flag(sent.form.whole("assignment", 1), sent.person.id or 0, sent.form.text("reason"))
    site_of(request).work_count.forget(sent.person)
    return go("/judge?done=flagged#task")


@router.get("/rest")
def rest(request: Request, found: Annotated[Visitor, Depends(visitor)], person: Judge) -> Response:
    return page(request, "rest.html", found, progress=site_of(request).work_count.of(person))


@router.get("/whole/{assignment}/{part}")
def whole(
    request: Request, found: Annotated[Visitor, Depends(visitor)], person: Judge, assignment: str, part: str, turn: str = ""
) -> Response:
    """All of a text that the task's page shows the beginning of."""
    names = {"prompt": "The whole conversation", "left": "The whole of answer 1", "right": "The whole of answer 2"}
    number = Form({"n": assignment}).whole("n", 1)
    turns = shown_conversation(site_of(request).store, number, person.id or 0, part) if part in names else None
    if turns is None:
        raise HTTPException(404, "There is no such text, or it is not yours to read.")
    if turn:
        place = Form({"n": turn}).whole("n", 0, max(len(turns) - 1, 0))
        turns = turns[place : place + 1]
    texts = [
        (m.role, markdown.plain(m.content) if part == "prompt" and not turn else markdown.rendered(m.content)) for m in turns
    ]
    return page(request, "whole.html", found, title=names[part], texts=texts)


@router.get("/experts")
def experts(request: Request, found: Annotated[Visitor, Depends(visitor)], person: Expert) -> Response:
    """What waits for an expert."""
    site = site_of(request)
    rows = waiting(site.store, person)
    return page(request, "experts.html", found, rows=rows, total=site.store.counts()["tasks_expert"], said_of=_summary)


def _ratings(form: Form, guidelines: GuidelineRow, left: str) -> dict[str, int]:
    """Ratings by `criterion/first` and `criterion/second`, of the criteria that stood on the page."""
    right = "second" if left == "first" else "first"
    fields = {f"rating-{place}-{side}": f"{name}/{answer}" for place, name in enumerate(guidelines.criteria)
              for side, answer in (("left", left), ("right", right))}  # fmt: skip
    return {name: form.whole(field, 1, 5) for field, name in fields.items() if form.text(field)}


def _shown_rating(assigned: Assigned, name: str) -> str:
    criterion, _, answer = name.rpartition("/")
    return f"{criterion}/{'left' if answer == assigned.left else 'right'}"


def _seconds(form: Form, now: float) -> float:
    """What the script measured while the page was in view; without it, since the page was made."""
    passed = min(max(now - (form.number("opened") or now), 0.0), DAY)
    measured = form.number("seconds")
    return round(min(measured, passed + 1) if measured is not None and measured > 0 else passed, 2)


def _seen(assigned: Assigned, said: dict[str, Any]) -> dict[str, str]:
    """What another person said, by where the answers stand on this screen."""
    choice = said["choice"]
    side = choice if choice in ("tie", "both_bad") else "left" if choice == assigned.left else "right"
    return {"what": SIDES[side], "how": STRENGTHS.get(said["strength"], ""), "comment": said["comment"]}


def _summary(choices: dict[str, int]) -> str:
    """`2 for one answer, 1 for the other, 1 tie`: which is which is seen on the task's own page."""
    counts = Counter(choices)
    ties, sides = counts["tie"] + counts["both_bad"], sorted((counts["first"], counts["second"]), reverse=True)
    parts = [f"{sides[0]} for one answer"] * bool(sides[0]) + [f"{sides[1]} for the other"] * bool(sides[1])
    return ", ".join(parts + [f"{ties} undecided"] * bool(ties)) or "no judgments yet"
