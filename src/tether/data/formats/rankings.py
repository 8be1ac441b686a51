"""Several responses to one prompt, with a score or a rank each; they are unfolded into all their
pairs, which are one group.

- UltraFeedback: https://huggingface.co/datasets/openbmb/UltraFeedback,
  https://arxiv.org/abs/2310.01377
- Nectar: https://huggingface.co/datasets/berkeley-nest/Nectar
- answers of Stack Exchange: https://huggingface.co/datasets/HuggingFaceH4/stack-exchange-preferences
- trees of OpenAssistant, in which people ranked replies to the same message. A row is a tree
  (https://github.com/LAION-AI/Open-Assistant/tree/main/oasst-data,
  https://arxiv.org/abs/2304.07327), or a message of one, as on the hub
  (https://huggingface.co/datasets/OpenAssistant/oasst2)
- plain lists, also as distilabel writes them: https://distilabel.argilla.io
- Gemini's tuning on Vertex AI:
  https://cloud.google.com/vertex-ai/generative-ai/docs/models/gemini-preference-tuning
- Amazon Nova's on Bedrock:
  https://docs.aws.amazon.com/nova/latest/userguide/customize-fine-tune-prepare-data.html
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

from tether.core.errors import DataError
from tether.core.types import (
    Comparison,
    Conversation,
    Demonstration,
    Json,
    JsonValue,
    Message,
    Prompt,
    Record,
    Row,
)
from tether.data.formats import fields
from tether.data.formats.cells import leave_out
from tether.data.formats.conversations import MOST, PROMPTS, TURNS_BEFORE
from tether.data.formats.feedback import is_good
from tether.data.formats.fields import (
    LeftOutError,
    RowReader,
    as_text,
    attempt,
    checked_prompt,
    checked_response,
    first,
    has,
    prompt_turns,
    sequence,
    system_turn,
    turns,
    up_to_reply,
)
from tether.data.formats.json_rows import BadRow, Numbered
from tether.data.formats.judged import RowVerdict, compared
from tether.data.formats.messages import ROLES
from tether.data.formats.table import LISTS
from tether.data.formats.values import list_in, missing


@dataclass(frozen=True)
class Ranked:
    """One response; a higher `worth` is better."""

    response: Conversation
    worth: float
    model: JsonValue = None


@dataclass(frozen=True)
class RankedResponses:
    """A prompt with its responses. `measured` says whether differences of worth mean something
    (scores, not ranks).
    """

    prompt: Conversation
    responses: list[Ranked]
    measured: bool
    num_unscored: int = 0

    def pairs(self) -> Iterator[Comparison | DataError]:
        """All pairs, the better response first; equal worth is a tie. Responses without a score are
        in none.
        """
        if self.num_unscored:
            yield LeftOutError(
                f"response without a score: {self.num_unscored} of the row's are in no pair",
            )
        if not 2 <= (count := len(self.responses)) <= MOST:
            raise DataError(
                f"too {'few' if count < 2 else 'many'} responses: {count}, and a "
                f"ranking has 2 to {MOST}",
            )
        yield from attempt(self._pair, combinations(self.responses, 2))

    def _pair(self, two: tuple[Ranked, Ranked]) -> Comparison:
        lean = two[0].worth - two[1].worth
        models = [one.model for one in two]
        verdict = RowVerdict(
            lean,
            margin=lean if self.measured else None,
            models=models,
        )
        return compared(
            self.prompt,
            [one.response for one in two],
            verdict,
            beside=False,
        )

    def best(self) -> Demonstration:
        """The response of the highest worth, the first one among equals."""
        if not self.responses:
            raise DataError("too few responses: the ranking is empty")
        best = max(self.responses, key=lambda ranked: ranked.worth)
        return Demonstration(
            checked_prompt(self.prompt) + checked_response(best.response, "the response"),
        )


def lists_objects(
    row: Row,
    column: str,
    *keys: str,
) -> bool:
    """True if the column lists objects with these keys."""
    return any(
        isinstance(item, Mapping) and item.keys() >= {*keys} for item in list_in(row, column)
    )


def _ranked(
    prompt: Conversation,
    items: Sequence[tuple[JsonValue, JsonValue, JsonValue]],
    names: tuple[str, str],
    measured: bool,
    num_unscored: int = 0,
) -> RankedResponses:
    """Responses with their worths and models; `names` are those of both columns."""
    column, worth = names
    sign = -1.0 if worth in LISTS["ranks"] else 1.0
    ranked = [
        Ranked(
            turns(own, "assistant", column),
            sign * fields.number(value, worth),
            model,
        )
        for own, value, model in items
    ]
    return RankedResponses(prompt, ranked, measured, num_unscored)


def listed_objects(
    row: Row,
    prompt: str,
    column: str,
    text: str,
    worth: str,
    scale: str = "measured",
) -> RankedResponses:
    """The responses that a column lists as objects, each with a text and a worth; one without a
    score is left out, one without a rank is an error.
    """
    measured = scale == "measured"
    items = sequence(row.get(column), column)
    before = prompt_turns(row, prompt)
    if not all(isinstance(item, dict) for item in items):
        raise DataError(f"not a response: {column} need {text} and {worth}")
    used = [item for item in items if not measured or has(item, worth)]
    each = [(item.get(text), item.get(worth), item.get("model")) for item in used]
    return _ranked(
        before,
        each,
        (f"{column}.{text}", worth),
        measured,
        len(items) - len(used),
    )


def has_candidates(row: Row) -> bool:
    """True for messages whose last one lists candidates."""
    messages = row["messages"]
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and "candidates" in last


def read_nova(row: Row) -> Iterator[Comparison | DataError]:
    """`messages`, the last of which lists `candidates`, each with `content` and a
    `preferenceLabel`.
    """
    *before, last = sequence(row.get("messages"), "messages") or [None]
    items = sequence(last.get("candidates"), "candidates") if isinstance(last, dict) else []
    if not items or not all(isinstance(item, dict) for item in items):
        raise DataError("not a comparison: the last message lists no candidates")
    prompt: Conversation = system_turn(row) + turns(before, "user", "messages")
    names = ("candidates.content", "preferenceLabel")
    each = [
        ({"role": "assistant", "content": item.get("content")}, is_good(label, names[1]), None)
        for item in items
        for label in (item.get("preferenceLabel"),)
    ]
    return _ranked(prompt, each, names, measured=False).pairs()


def _keys(row: Row) -> tuple[str, str, str] | None:
    """The column that lists objects, and their keys of text and of worth."""
    for column in LISTS["objects"]:
        items = list_in(row, column)
        if items and all(isinstance(item, dict) for item in items):
            text, worth = (
                next((key for key in LISTS[keys] if all(key in item for item in items)), "")
                for keys in ("texts_of_objects", "worths")
            )
            if text and worth:
                return column, text, worth
    return None


def are_objects(row: Row) -> bool:
    """True for a list of objects with a text and a score, or a rank, each."""
    return _keys(row) is not None


def scored_objects(row: Row) -> RankedResponses:
    """A list of objects with a text and a score (higher is better) or a rank (1 is the best)
    each.
    """
    if (keys := _keys(row)) is None:
        raise DataError("not a ranking: no list of objects with a text and a score each")
    prompt = next((name for name in (*PROMPTS, *TURNS_BEFORE) if has(row, name)), PROMPTS[0])
    return listed_objects(row, prompt, *keys, "" if keys[2] == "rank" else "measured")


def lists(row: Row) -> RankedResponses:
    """Responses beside `scores` or `ratings` (higher is better) or `ranks` (1 is the best); one
    without a score is left out.
    """
    column, responses = first(row, *LISTS["responses"])
    measured = has(row, *LISTS["scores"])
    name, worths = first(row, *LISTS["scores" if measured else "ranks"])
    responses = sequence(responses, column)
    worths = sequence(worths, name)
    if len(responses) != len(worths):
        raise DataError(f"uneven lists: {len(responses)} {column} but {len(worths)} {name}")
    each = [
        (response, worth, None)
        for response, worth in zip(responses, worths, strict=True)
        if not measured or worth is not None
    ]
    before = prompt_turns(row, *PROMPTS, *TURNS_BEFORE)
    return _ranked(before, each, (column, name), measured, len(responses) - len(each))


def readers(parse: Callable[[Row], RankedResponses]) -> dict[type, RowReader[Record]]:
    """Readers of a ranking: all its pairs, its best response, its prompt."""

    def best(row: Row) -> Demonstration:
        leave_out(row, "rejected")
        return parse(row).best()

    def question(row: Row) -> Prompt:
        leave_out(row, "chosen", "rejected")
        return Prompt(parse(row).prompt)

    return {Comparison: lambda row: parse(row).pairs(), Demonstration: best, Prompt: question}


ORPHAN = (
    "orphan: the message that it answers is not among the neighbouring rows of its tree; sort the "
    "rows by message_tree_id, and keep whole trees"
)


def gather(rows: Numbered) -> Numbered:
    """Neighbouring rows of one tree as one row, `prompt` with `replies`, under the number of its
    root; any other row as it is.

    Parents may come after their children. Only one tree is in memory.
    """
    for tree, group in groupby(rows, _tree):
        if tree is None:
            yield from group
        else:
            yield from _linked([(number, row) for number, row in group if isinstance(row, dict)])


def _tree(numbered: tuple[int, Row | BadRow]) -> str | None:
    """The name of the tree of a message; None for any other row."""
    _, row = numbered
    if isinstance(row, BadRow) or not row.keys() >= {"message_id", "parent_id", "text", "role"}:
        return None
    return str(row.get("message_tree_id"))


def _linked(group: Sequence[tuple[int, Row]]) -> Numbered:
    """The tree that these rows make, and those whose parent is missing."""
    nodes: dict[str, Json] = {
        str(row["message_id"]): {**_filled(row), "replies": []} for _, row in group
    }
    roots: list[tuple[int, Row | BadRow]] = []
    for number, row in group:
        node = nodes[str(row["message_id"])]
        above = row.get("parent_id")
        if missing(above) or above == "":
            roots.append((number, {"message_tree_id": row.get("message_tree_id"), "prompt": node}))
        elif str(above) in nodes:
            nodes[str(above)]["replies"].append(node)
        else:
            roots.append((number, BadRow(ORPHAN, str(row.get("text"))[:400])))
    yield from roots


def _filled(row: Row) -> Json:
    """The keys of a message that hold something; what the tree itself says is left out."""
    structure = ("parent_id", "message_tree_id")
    return {
        name: value
        for name, value in row.items()
        if name not in structure and not missing(value) and value != ""
    }


def read_tree(row: Row) -> Iterator[Comparison | DataError]:
    """All pairs of ranked assistant siblings, at every depth; 0 is the best rank and equal ranks
    tie.

    Unranked siblings give no pair. A tree without ranked siblings is no comparison at all.
    """
    questions = list(_questions(_root(row), ()))
    rivals = [
        RankedResponses(
            path,
            [
                Ranked((_message(reply),), -_rank(reply))
                for reply in sorted(replies, key=_rank)
                if has(reply, "rank")
            ],
            measured=False,
        )
        for path, replies in questions
    ]
    used = [several for several in rivals if len(several.responses) > 1]
    if not used:
        raise DataError("no ranked siblings: the tree holds no comparison")
    if sum(len(replies) for _, replies in questions) > sum(len(one.responses) for one in used):
        leave_out(row, "prompt.replies without a ranked sibling")
    for several in used:
        yield from several.pairs()


def read_best_path(row: Row) -> Demonstration:
    """The path that follows the best-ranked reply at every turn, up to its last assistant turn."""
    node: Row | None = _root(row)
    path: list[Message] = []
    while node is not None:
        path.append(_message(node))
        node = min(_replies(node), key=_rank, default=None)
    leave_out(row, "prompt.replies off the best path")
    return up_to_reply(tuple(path), {})


def read_root(row: Row) -> Prompt:
    """The prompt at the root of the tree."""
    return Prompt((_message(_root(row)),))


def _root(row: Row) -> Row:
    root = row.get("prompt")
    if not isinstance(root, dict):
        raise DataError("not a tree: column prompt holds no message")
    return root


def _questions(node: Row, before: Conversation) -> Iterator[tuple[Conversation, list[Row]]]:
    """Every prompter turn with the conversation up to it and the replies to it."""
    path = (*before, _message(node))
    replies = _replies(node)
    if path[-1].role == "user":
        yield path, replies
    for reply in replies:
        yield from _questions(reply, path)


def _replies(node: Row) -> list[Row]:
    replies = sequence(node.get("replies") or (), "replies")
    return [reply for reply in replies if isinstance(reply, dict) and not reply.get("deleted")]


def _rank(node: Row) -> float:
    return fields.number(node["rank"], "rank") if has(node, "rank") else math.inf


def _message(node: Row) -> Message:
    role = ROLES.get(str(node.get("role")))
    if role is None:
        raise DataError(f"unknown role: {node.get('role')!r:.40}")
    return Message(role, as_text(node.get("text"), "text"))


def is_tree(row: Row) -> bool:
    """True if a row is a tree: its prompt is a node, and it says so or has replies."""
    return isinstance(row["prompt"], Mapping) and (
        "message_tree_id" in row or "replies" in row["prompt"]
    )
