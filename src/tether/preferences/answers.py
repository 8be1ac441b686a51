"""Prompts with several answers, into the store; and which of their pairs people are asked about."""

# SQLModel types columns as the values in them, so that conditions on columns look like plain bools.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import select

from tether.core.errors import DataError
from tether.core.types import Conversation, Message, Prompt
from tether.data.formats.conversation import RESPONSES
from tether.data.formats.fields import checked_prompt, checked_response, missing, number, optional, sequence, turns
from tether.data.formats.format import Row
from tether.data.formats.preference import prompt_turns
from tether.data.sources import Quarantine, read
from tether.preferences.carried import told
from tether.preferences.importing import Imported, parsed, plain
from tether.preferences.pairs import PairsConfig, Response, choose_pairs
from tether.preferences.store import PART, Answer, Question, Store
from tether.preferences.tables import ResponseRow, TaskRow

Facts = Mapping[str, Any]
PROMPTS = ("prompt", "question", "instruction", "messages")
_LISTS = {"scores": "score", "spreads": "spread", "models": "model", "checkpoints": "checkpoint", "members": "members"}
_ORIGIN = ("model", "checkpoint", "sampling", "score", "spread", "members")


def read_answers(
    files: str | Path | Sequence[str | Path],
    *,
    prompts: str | Path | None = None,
    quarantine: Quarantine | None = None,
    limit: int | None = None,
    **origin: Any,
) -> Iterator[Answer]:
    """Answers out of files, one at a time.

    A row has a prompt (text or messages) and `responses`: texts, or objects of a text with `model`, `checkpoint`, `sampling`,
    `score` and `spread`; beside texts may stand lists `scores`, `spreads`, `members` (one score a member of an ensemble). Or it
    has one `response`, as `tether generate --output` writes it. What stands in the row itself holds for all of its answers.

    Args:
        prompts: a file of prompts with ids, for rows that name their prompt by `id` alone.
        limit: so many rows of each file.
        origin: `model`, `checkpoint`, `sampling` of answers that do not say.

    Raises:
        DataError, MissingFileError: a file is missing, damaged or has no row that can be used.
    """
    known: dict[str, Conversation | None] = {}
    for row in [] if prompts is None else read(prompts, Prompt):
        own, mark, _ = row.id.rpartition("@")  # as `read` marks an id that another row had already
        known[row.id] = row.messages
        if mark and known.get(own, row.messages) != row.messages:
            known[own] = None
    return parsed(files, lambda row, _: _answers(row, known, origin), quarantine, limit)


def _answers(row: Row, known: Mapping[str, Conversation | None], origin: Mapping[str, Any]) -> Iterator[Answer]:
    named = next((name for name in PROMPTS if not missing(row.get(name))), None)
    asked = prompt_turns(row, *PROMPTS) if named else known.get(str(row.get("id", "")), ())
    if asked is None:
        raise DataError(f"ambiguous prompt: several rows of --prompts have the id {row['id']!r:.40}")
    if not asked:
        raise DataError("no prompt in the row, and its id is of none in --prompts")
    prompt = checked_prompt(asked)
    single = next((name for name in RESPONSES if not missing(row.get(name))), None)
    used = {"responses", "group", "system", *PROMPTS, *_LISTS, *_ORIGIN, *([single] if single else [])}
    rest = plain({name: value for name, value in row.items() if name not in used and value is not None})
    common = {**origin, **{name: row[name] for name in _ORIGIN if not missing(row.get(name))}}
    if missing(row.get("responses")):
        if single is None:
            raise DataError("no answer: the row has neither responses nor a response")
        yield _answer(prompt, row[single], common, optional(row, "group"), {}, rest)
        return
    # What is said of a prompt divides the pairs into groups, and an id would make one of each row.
    about = {"id": rest.pop("id")} if "id" in rest else {}
    texts = sequence(row["responses"], "responses")
    lists = {field: sequence(row[name], name) for name, field in _LISTS.items() if not missing(row.get(name))}
    if uneven := [field for field, values in lists.items() if len(values) != len(texts)]:
        raise DataError(f"uneven lists: {len(texts)} responses but {len(lists[uneven[0]])} of {uneven[0]}")
    found = []
    for place, text in enumerate(texts):
        mine = {**common, **{field: values[place] for field, values in lists.items() if not missing(values[place])}}
        if not (isinstance(text, str) and not text.strip()):  # a model may say nothing, and nobody is asked about that
            found.append(_answer(prompt, text, mine, optional(row, "group"), rest, about))
    if not found:
        raise DataError("empty response: all of the row's responses are empty")
    yield from found


def _answer(prompt: Conversation, said: Any, origin: Facts, group: str, about_prompt: Facts, about: Facts) -> Answer:
    if isinstance(said, Mapping) and "role" not in said:
        name = next((name for name in (*RESPONSES, "text", "content", "messages") if not missing(said.get(name))), None)
        if name is None:
            raise DataError(f"no answer: a response has none of {', '.join(RESPONSES)}, text, content or messages")
        origin = {**origin, **{key: said[key] for key in _ORIGIN if not missing(said.get(key))}}
        rest = {key: value for key, value in said.items() if key not in (*_ORIGIN, name) and value is not None}
        about = {**about, **plain(rest)}
        said = said[name]
    response = checked_response(turns(said, "assistant", "responses"), "the response")
    members = [number(value, "members") for value in sequence(origin.get("members") or [], "members")]
    scores = {"score": statistics.fmean(members), "spread": statistics.pstdev(members)} if members else {}
    details = {**about, "members": members} if members else about
    known = {**scores, **told({name: value for name, value in plain(origin).items() if name in _ORIGIN})}
    return Answer(prompt, response, group, prompt_details=about_prompt, details=details, **known)


def import_answers(store: Store, answers: Iterable[Answer]) -> Imported:
    """Put answers into the store; of one that is there already, a score that is given replaces the one before."""
    total, rows = Imported(), iter(answers)
    while part := list(islice(rows, PART)):
        total += Imported(rows=len(part), answers=store.add_answers(part))
        scored = {answer.id: answer for answer in part if answer.score is not None}
        with store.transaction() as session:
            for row in session.execute(select(ResponseRow).where(ResponseRow.id.in_(scored))).scalars():
                new, kept = scored[row.id], {name: value for name, value in row.details.items() if name != "members"}
                row.score, row.spread = new.score, new.spread
                row.details = {**kept, "members": list(new.details["members"])} if "members" in new.details else kept
    return total


def ask(store: Store, config: PairsConfig, *, round: str = "", priority: float = 0.0) -> int:
    """Choose pairs among the store's answers and make tasks of them; returns how many. Pairs that were ever asked are left out.

    All texts are held at once while pairs are chosen. The most telling pair of a batch is asked first; batches go by `priority`.

    Raises:
        ConfigError: the strategy needs scores that an answer lacks.
    """
    with store.reading() as session:
        asked = {"/".join((prompt, pair)) for prompt, pair in session.execute(select(TaskRow.prompt_id, TaskRow.pair))}
        responses: dict[str, list[Response]] = {}
        columns = (ResponseRow.id, ResponseRow.prompt_id, ResponseRow.messages, ResponseRow.score, ResponseRow.spread)
        for key, prompt, messages, score, spread, details in session.execute(select(*columns, ResponseRow.details)):
            text = "\n\n".join(Message(m["role"], m["content"]).content for m in messages)
            members = tuple(details.get("members") or ())
            responses.setdefault(prompt, []).append(Response(key, text, score, spread, members))
    several = {prompt: some for prompt, some in sorted(responses.items()) if len(some) > 1}
    chosen = choose_pairs(several, config, asked=asked)
    size = max(1, len(chosen))
    return store.add_questions(
        Question(p.prompt, p.first, p.second, p.people, None, p.strategy, priority + place / size, round)
        for place, p in enumerate(chosen)
    )
