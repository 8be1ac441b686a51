"""Prompts with several answers, into the store; and which of their pairs people are asked about."""

# SQLModel types columns as the values in them, so that conditions on columns look like plain bools.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

from sqlalchemy import select

from tether.core.errors import DataError
from tether.core.types import Conversation, Facts, Prompt, Row
from tether.data.formats.containers import Sources
from tether.data.formats.conversations import RESPONSES
from tether.data.formats.fields import (
    checked_prompt,
    checked_response,
    missing,
    number,
    optional,
    prompt_turns,
    sequence,
    turns,
)
from tether.data.rows import turns_of
from tether.data.sources import Quarantine, read, read_rows
from tether.people.annotation.store import PART, Answer, Store
from tether.people.annotation.tables import ResponseRow, TaskRow
from tether.people.annotation.task_json import json_safe, origin_of, spoken
from tether.people.labels.pairs import PairsConfig, Response, choose_pairs

PROMPTS = ("prompt", "question", "instruction", "messages")
_LISTS = {
    "scores": "score",
    "spreads": "spread",
    "models": "model",
    "checkpoints": "checkpoint",
    "members": "members",
}
_ORIGIN = ("model", "checkpoint", "sampling", "score", "spread", "members")


def read_answers(
    files: Sources,
    *,
    prompts: str | Path | None = None,
    quarantine: Quarantine | None = None,
    limit: int | None = None,
    **origin: object,
) -> Iterator[Answer]:
    """Answers out of files, one at a time.

    A row has a prompt (text or messages) and `responses`: texts, or objects of a text with `model`,
    `checkpoint`, `sampling`, `score` and `spread`. Texts may have lists `scores`, `spreads`,
    `members` (one score a member of an ensemble) in the same row. Or a row has one `response`, as
    `tether generate --output` writes it. Columns of the row apply to all of its answers.

    Args:
        prompts: a file of prompts with ids. A row's `id` names its prompt there; a row with another
            id has a prompt of its own.
        limit: the number of rows of each file to read.
        origin: `model`, `checkpoint`, `sampling` of answers that do not say.

    Raises:
        DataError, MissingFileError: a file is missing, damaged or has no row that can be used.
    """
    by_id: dict[str, Conversation | None] = {}
    for row in [] if prompts is None else read(prompts, Prompt):
        own, mark, _ = row.id.rpartition("@")  # as `read` marks an id that another row had already
        by_id[row.id] = row.messages
        if mark and by_id.get(own, row.messages) != row.messages:
            by_id[own] = None
    return read_rows(files, lambda row: _answers(row, by_id, origin), quarantine, limit)


def _answers(
    row: Row,
    prompts: Mapping[str, Conversation | None],
    origin: Facts,
) -> Iterator[Answer]:
    question = prompts.get(str(row.get("id", "")), ())
    if question == () and any(not missing(row.get(name)) for name in PROMPTS):
        question = prompt_turns(row, *PROMPTS)
    if question is None:
        raise DataError(
            f"ambiguous prompt: several rows of --prompts have the id {row['id']!r:.40}",
        )
    if not question:
        raise DataError("no prompt in the row, and its id is of none in --prompts")
    prompt = checked_prompt(question)
    group = optional(row, "group")
    single = next((name for name in RESPONSES if not missing(row.get(name))), None)
    used = {
        "responses",
        "group",
        "system",
        *PROMPTS,
        *_LISTS,
        *_ORIGIN,
        *([single] if single else []),
    }
    rest = json_safe(
        {name: value for name, value in row.items() if name not in used and value is not None},
    )
    common = {**origin, **{name: row[name] for name in _ORIGIN if not missing(row.get(name))}}
    if missing(row.get("responses")):
        if single is None:
            raise DataError("no answer: the row has neither responses nor a response")
        yield _answer(prompt, row[single], common, group, {}, rest)
        return
    # Facts on a prompt divide the pairs into groups, and an id would make one of each row.
    about = {"id": rest.pop("id")} if "id" in rest else {}
    texts = sequence(row["responses"], "responses")
    lists = {
        field: sequence(row[name], name)
        for name, field in _LISTS.items()
        if not missing(row.get(name))
    }
    if uneven := [field for field, values in lists.items() if len(values) != len(texts)]:
        raise DataError(
            f"uneven lists: {len(texts)} responses but {len(lists[uneven[0]])} of {uneven[0]}",
        )
    # A model may say nothing, and nobody is asked about that.
    places = [
        place
        for place, text in enumerate(texts)
        if not (isinstance(text, str) and not text.strip())
    ]
    if not places:
        raise DataError("empty response: all of the row's responses are empty")
    for place in places:
        own = {
            field: values[place] for field, values in lists.items() if not missing(values[place])
        }
        yield _answer(prompt, texts[place], {**common, **own}, group, rest, about)


def _answer(
    prompt: Conversation,
    answer: object,
    origin: Facts,
    group: str,
    about_prompt: Facts,
    about: Facts,
) -> Answer:
    if isinstance(answer, Mapping) and "role" not in answer:
        name = next(
            (
                name
                for name in (*RESPONSES, "text", "content", "messages")
                if not missing(answer.get(name))
            ),
            None,
        )
        if name is None:
            raise DataError(
                f"no answer: a response has none of {', '.join(RESPONSES)}, text, "
                "content or messages",
            )
        origin = {**origin, **{key: answer[key] for key in _ORIGIN if not missing(answer.get(key))}}
        rest = {
            key: value
            for key, value in answer.items()
            if key not in (*_ORIGIN, name) and value is not None
        }
        about = {**about, **json_safe(rest)}
        answer = answer[name]
    response = checked_response(turns(answer, "assistant", "responses"), "the response")
    members = [
        number(value, "members") for value in sequence(origin.get("members") or [], "members")
    ]
    scores = (
        {"score": statistics.fmean(members), "spread": statistics.pstdev(members)}
        if members
        else {}
    )
    details = {**about, "members": members} if members else about
    origin = {**scores, **json_safe(origin), "details": details}
    return Answer(prompt, response, group, prompt_details=about_prompt, **origin_of(origin))


def import_answers(store: Store, answers: Iterable[Answer]) -> Counter[str]:
    """Put answers into the store; of one that is there already, a score that is given replaces the
    one before.

    Returns the number of `rows`, and of `answers` that are new.
    """
    total = Counter[str]()
    rows = iter(answers)
    while part := list(islice(rows, PART)):
        total.update(rows=len(part), answers=store.add_answers(part))
        scored = {answer.id: answer for answer in part if answer.score is not None}
        with store.transaction() as session:
            for row in session.scalars(select(ResponseRow).where(ResponseRow.id.in_(scored))):
                new = scored[row.id]
                rest = {name: value for name, value in row.details.items() if name != "members"}
                members = {name: new.details[name] for name in ("members",) if name in new.details}
                row.score = new.score
                row.spread = new.spread
                row.details = rest | members
    return total


def ask_pairs(store: Store, config: PairsConfig, *, round: str = "", priority: float = 0.0) -> int:
    """Choose pairs among the store's answers and make tasks of them; returns how many. Pairs that
    were ever asked are left out.

    All texts are held at once while pairs are chosen. The most telling pair of a batch is asked
    first; batches go by `priority`.

    Raises:
        ConfigError: the strategy needs scores that an answer lacks.
    """
    with store.reading() as session:
        before = {
            f"{prompt}/{pair}"
            for prompt, pair in session.execute(select(TaskRow.prompt_id, TaskRow.pair))
        }
        responses: dict[str, list[Response]] = defaultdict(list)
        for row in session.scalars(select(ResponseRow).execution_options(yield_per=PART)):
            text = spoken(turns_of(row.messages))
            members = tuple(row.details.get("members") or ())
            responses[row.prompt_id].append(
                Response(row.id, text, row.score, row.spread, members=members),
            )
    several = {prompt: some for prompt, some in sorted(responses.items()) if len(some) > 1}
    chosen = choose_pairs(several, config, asked=before)
    return store.add_tasks(
        TaskRow(
            prompt_id=p.prompt, first_id=p.first, second_id=p.second, needed=p.people, strategy=p.strategy,
            priority=priority + place / len(chosen), round=round,
        )
        for place, p in enumerate(chosen)
    )  # fmt: skip
