"""Pairs of a store by what is in them, found by the database."""

# SQLModel types columns as the values in them, so that conditions on columns look like plain bools.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import json
from itertools import islice
from typing import Annotated, Literal

from pydantic import Field
from sqlalchemy import ColumnElement, String, cast, exists, func, or_

from tether.people.annotation.exchange import Case, cases
from tether.people.annotation.queries import FIRST, JUDGED, SECOND, TASKS
from tether.people.annotation.store import Store
from tether.people.annotation.tables import AnnotatorRow, JudgmentRow, PromptRow, TaskRow
from tether.settings.config import Config

Word = Annotated[str, Field(max_length=200)]
PAGE = 20


class Search(Config):
    """The conditions that pairs must meet; empty: none."""

    text: Word = ""
    """In a turn of the prompt or of an answer; of ASCII letters the case is ignored."""
    state: Literal["", "open", "done", "expert", "settled"] = ""
    annotator: Word = ""
    """The name of a person who has judged them."""
    tag: Word = ""
    """Their round, their strategy, or a text among the facts on them: its value, or `name=value`."""
    after: int = Field(0, ge=0, lt=2**31)
    """The task that they come after."""


def search(store: Store, wanted: Search, *, names: bool = True) -> tuple[int, list[Case]]:
    """The number of pairs that meet all conditions, and the first ones, in order."""
    texts = PromptRow.messages, FIRST.messages, SECOND.messages
    judged = JUDGED.where(JudgmentRow.task_id == TaskRow.id, AnnotatorRow.name == wanted.annotator)
    tag = wanted.tag
    name, _, value = map(json.dumps, tag.partition("="))
    facts = (
        cast(details, String).contains(written, autoescape=True)
        for details in (PromptRow.details, TaskRow.details)
        for written in (json.dumps(tag), f"{name}: {value}")
    )
    only = (
        or_(not wanted.text, *(_says(store, column, wanted.text) for column in texts)),
        or_(not wanted.state, TaskRow.state == wanted.state),
        or_(not wanted.annotator, judged.exists()),
        or_(not tag, TaskRow.round == tag, TaskRow.strategy == tag, *facts),
    )
    with store.reading() as session:
        number = session.scalar(TASKS.where(*only).with_only_columns(func.count())) or 0
    rows = cases(
        store,
        *only,
        TaskRow.id > wanted.after,
        names=names,
        at_once=PAGE,
    )
    return number, list(islice(rows, PAGE))


def _says(store: Store, messages: object, text: str) -> ColumnElement[bool]:
    """A condition: a turn of a conversation contains the text."""
    each = func.json_each if store.sqlite else func.json_array_elements
    turn = each(messages).table_valued("value").c.value
    content = (
        func.json_extract(turn, "$.content")
        if store.sqlite
        else func.json_extract_path_text(turn, "content")
    )
    return exists().where(content.icontains(text, autoescape=True))
