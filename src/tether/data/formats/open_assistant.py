"""OpenAssistant's conversation trees, where people ranked the sibling replies of the assistant.

https://github.com/LAION-AI/Open-Assistant/tree/main/oasst-data (paper: https://arxiv.org/abs/2304.07327)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from tether.core.errors import DataError
from tether.core.types import Comparison, Conversation, Demonstration, Message, Prompt
from tether.data.formats import fields
from tether.data.formats.json_rows import Row

Node = Mapping[str, Any]


def read_tree(row: Row) -> Iterator[Comparison | DataError]:
    """All pairs of ranked assistant siblings, at every depth; 0 is the best rank and equal ranks tie.

    Unranked siblings give no pair. A tree without ranked siblings is no comparison at all.
    """
    ranked = [
        (prompt, two)
        for prompt, replies in _questions(_root(row), ())
        for two in combinations(sorted((reply for reply in replies if not fields.missing(reply.get("rank"))), key=_rank), 2)
    ]
    if not ranked:
        raise DataError("no ranked siblings: the tree holds no comparison")
    yield from fields.attempt(_pair, ranked)


def _pair(ranked: tuple[Conversation, tuple[Node, Node]]) -> Comparison:
    prompt, (better, worse) = ranked
    tie, sides = _rank(better) == _rank(worse), ((_message(better),), (_message(worse),))
    return fields.checked_comparison(Comparison(prompt, *sides, tie=tie, probability=0.5 if tie else 1.0))


def read_best_path(row: Row) -> Iterator[Demonstration]:
    """The path that follows the best-ranked reply at every turn, up to its last assistant turn."""
    node: Node | None = _root(row)
    path: list[Message] = []
    while node is not None:
        path.append(_message(node))
        node = min(_replies(node), key=_rank, default=None)
    yield fields.up_to_reply(tuple(path))


def read_prompt(row: Row) -> Iterator[Prompt]:
    """The prompt at the root of the tree."""
    yield Prompt(fields.checked_prompt((_message(_root(row)),)))


def _root(row: Row) -> Node:
    root = row.get("prompt")
    if not isinstance(root, Mapping):
        raise DataError("not a tree: column prompt holds no message")
    return root


def _questions(node: Node, before: Conversation) -> Iterator[tuple[Conversation, list[Node]]]:
    """Every prompter turn with the conversation up to it and the replies to it."""
    path = (*before, _message(node))
    replies = _replies(node)
    if path[-1].role == "user":
        yield path, replies
    for reply in replies:
        yield from _questions(reply, path)


def _replies(node: Node) -> list[Node]:
    replies = fields.sequence(node.get("replies") or (), "replies")
    return [reply for reply in replies if isinstance(reply, Mapping) and not reply.get("deleted")]


def _rank(node: Node) -> float:
    return math.inf if fields.missing(node.get("rank")) else fields.number(node["rank"], "rank")


def _message(node: Node) -> Message:
    role = fields.ROLES.get(str(node.get("role")))
    if role is None:
        raise DataError(f"unknown role: {node.get('role')!r:.40}")
    return Message(role, fields.as_text(node.get("text"), "text"))


def is_tree(row: Row) -> bool:
    """True if a row is a tree: its prompt is a node, and it says so or has replies."""
    return isinstance(row["prompt"], Mapping) and ("message_tree_id" in row or "replies" in row["prompt"])
