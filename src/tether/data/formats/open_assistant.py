"""OpenAssistant's conversation trees, where people ranked the sibling replies of the assistant.

https://github.com/LAION-AI/Open-Assistant/tree/main/oasst-data (paper: https://arxiv.org/abs/2304.07327)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from tether.core.errors import DataError
from tether.core.types import Comparison, Conversation, Demonstration, Feedback, Message, Prompt
from tether.data.formats.fields import ROLES, as_text, checked_prompt, comparison, leftover, missing, number, sequence
from tether.data.formats.format import Format, Row

Node = Mapping[str, Any]


def read_pairs(row: Row) -> Iterator[Comparison | DataError]:
    """All pairs of ranked assistant siblings, at every depth; 0 is the best rank and equal ranks tie.

    Unranked siblings give no pair. A tree without ranked siblings is no comparison at all.
    """
    metadata = leftover(row, ("prompt", "message_tree_id"))
    count = 0
    for prompt, replies in _asked(_root(row), ()):
        ranked = sorted((reply for reply in replies if not missing(reply.get("rank"))), key=_rank)
        for better, worse in combinations(ranked, 2):
            count += 1
            try:
                tie = _rank(better) == _rank(worse)
                yield comparison(prompt, (_message(better),), (_message(worse),), tie=tie, metadata=metadata)
            except DataError as error:
                yield error
    if not count:
        raise DataError("no ranked siblings: the tree holds no comparison")


def read_best_path(row: Row) -> Iterator[Demonstration]:
    """The path that follows the best-ranked reply at every turn, up to its last assistant turn."""
    node: Node | None = _root(row)
    path: list[Message] = []
    while node is not None:
        path.append(_message(node))
        node = min(_replies(node), key=_rank, default=None)
    while path and path[-1].role != "assistant":
        path.pop()
    if not path:
        raise DataError("no assistant turn: nobody has answered this prompt")
    yield Demonstration(tuple(path), metadata=leftover(row, ("prompt", "message_tree_id")))


def read_prompt(row: Row) -> Iterator[Prompt]:
    """The prompt at the root of the tree."""
    yield Prompt(checked_prompt((_message(_root(row)),)), metadata=leftover(row, ("prompt", "message_tree_id")))


def _root(row: Row) -> Node:
    root = row.get("prompt")
    if not isinstance(root, Mapping):
        raise DataError("not a tree: column prompt holds no message")
    return root


def _asked(node: Node, before: Conversation) -> Iterator[tuple[Conversation, list[Node]]]:
    """Every prompter turn with the conversation up to it and the replies to it."""
    path = (*before, _message(node))
    replies = _replies(node)
    if path[-1].role == "user":
        yield path, replies
    for reply in replies:
        yield from _asked(reply, path)


def _replies(node: Node) -> list[Node]:
    replies = sequence(node.get("replies") or (), "replies")
    return [reply for reply in replies if isinstance(reply, Mapping) and not reply.get("deleted")]


def _rank(node: Node) -> float:
    return math.inf if missing(node.get("rank")) else number(node["rank"], "rank")


def _message(node: Node) -> Message:
    role = ROLES.get(str(node.get("role")))
    if role is None:
        raise DataError(f"unknown role: {node.get('role')!r:.40}")
    return Message(role, as_text(node.get("text"), "text"))


FORMATS = (
    Format(
        "open_assistant",
        lambda row: isinstance(row.get("prompt"), Mapping) and ("message_tree_id" in row or "replies" in row["prompt"]),
        {Comparison: read_pairs, Demonstration: read_best_path, Prompt: read_prompt},
        refuses=(Feedback,),
    ),
)
