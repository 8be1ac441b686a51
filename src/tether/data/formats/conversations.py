"""Demonstrations and prompts: whole conversations, trees of them, prompt and response,
instructions, prompts alone.

- OpenAI's `messages`: https://platform.openai.com/docs/guides/supervised-fine-tuning
- ShareGPT's `conversations`: https://github.com/lm-sys/FastChat/blob/main/docs/training.md
- prompt and response: https://huggingface.co/docs/trl/dataset_formats#prompt-completion
- Alpaca: https://github.com/tatsu-lab/stanford_alpaca
- Dolly: https://huggingface.co/datasets/databricks/databricks-dolly-15k
- self-instruct: https://github.com/yizhongw/self-instruct
- AlpacaEval's instructions: https://github.com/tatsu-lab/alpaca_eval
- MT-bench: https://github.com/lm-sys/FastChat/tree/main/fastchat/llm_judge,
  https://arxiv.org/abs/2306.05685
- OpenAssistant's trees, in which people ranked replies to the same message:
  https://github.com/LAION-AI/Open-Assistant/tree/main/oasst-data, https://arxiv.org/abs/2304.07327
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations

from tether.core.errors import DataError
from tether.core.types import (
    Comparison,
    Conversation,
    Demonstration,
    Message,
    Prompt,
    assistant,
    user,
)
from tether.data.formats import fields, nested
from tether.data.formats.cells import leave_out
from tether.data.formats.fields import LeftOutError
from tether.data.formats.json_rows import Row
from tether.data.formats.messages import ROLES, read_message

RESPONSES = ("response", "completion", "output", "answer")
"""Columns of answers that are given for prompts of another file."""
MOST = 512
"""Ranked responses of one row, and ranked replies to one turn; so many give 130,816 pairs."""
PROMPTS = ("prompt", "question", "instruction", "query", "problem", "input", "conversations")
"""Columns of a prompt, as rows with answers beside it name them."""
TURNS_BEFORE = ("trajectory", "messages", "conversation", "context")
"""Columns of the turns before the answers, where no column of `PROMPTS` holds anything."""
_PROMPTS = ("prompt", "question", "query")


CONVERSATIONS = (
    "messages",
    "conversations",
    "conversation",
    "dialog",
    "dialogue",
    "chat",
    "data",
    "contents",
    "turns",
)
"""Columns that hold whole conversations; beside the first two only where they do."""
REPLIES = (
    "response",
    "completion",
    "output",
    "assistant",
    "gpt",
    "generated_solution",
    "targets_pretokenized",
    "targets",
    "target",
    "message_2",
)
ASKED = (
    *_PROMPTS,
    "input",
    "inputs_pretokenized",
    "inputs",
    "message_1",
    "user",
    "human",
    "problem",
)
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")


def _column(row: Row) -> str:
    """The column of the conversation."""
    return next((name for name in CONVERSATIONS[:2] if fields.has(row, name)), "") or next(
        (name for name in CONVERSATIONS[2:] if nested.is_dialogue(row, name)),
        CONVERSATIONS[0],
    )


def has_dialogue(row: Row) -> bool:
    """True if a column holds messages, questions with their answers, or texts by turns; `data` only
    where no prompt is beside.
    """
    names = (
        CONVERSATIONS[2:]
        if not fields.has(row, *PROMPTS)
        else [name for name in CONVERSATIONS[2:] if name != "data"]
    )
    return any(nested.is_dialogue(row, name) for name in names)


def conversation(row: Row) -> Conversation:
    """All turns of a row, with its system text first where that is a column of its own. Of plain
    texts the first is a user's.
    """
    name, _ = fields.first(row, _column(row))
    texts = nested.listed_in(row, name)
    if texts and all(isinstance(words, str) for words in texts):
        messages = tuple(
            Message("assistant" if place % 2 else "user", words)
            for place, words in enumerate(texts)
        )
    else:
        messages = fields.turns_at(row, name, "user")
    return (
        messages
        if messages and messages[0].role == "system"
        else fields.system_turn(row) + messages
    )


def read_conversation(row: Row) -> Iterator[Demonstration]:
    """Turns after the last assistant turn are left out: nothing is learned from them."""
    messages = conversation(row)
    demonstration = fields.up_to_reply(messages)
    if len(demonstration.messages) < len(messages):
        leave_out(row, "turns after the last reply")
    fields.checked_response(demonstration.messages, "the last assistant turn")
    replies = [turn for turn in demonstration.messages if turn.role == "assistant"]
    if len(demonstration.messages) == 1:
        raise DataError("empty prompt: the conversation is a single assistant turn")
    if all(turn.content.strip() in ("+", "-") for turn in replies):
        raise DataError(
            "verdicts in place of replies: each assistant turn is + or -, which "
            "judges a step of the turn before",
        )
    if not any(turn.train for turn in replies):
        raise LeftOutError("no turn to learn: a flag keeps each assistant turn out of the loss")
    yield demonstration


def read_opening(row: Row) -> Iterator[Prompt]:
    """The conversation up to its last assistant turn if it ends on one, else all of it."""
    messages = conversation(row)
    if messages and messages[-1].role == "assistant":
        leave_out(row, "last reply")
        messages = messages[:-1]
    yield Prompt(fields.checked_prompt(messages))


def read_prompt_response(row: Row) -> Iterator[Demonstration]:
    prompt = fields.checked_prompt(fields.prompt_turns(row, *ASKED))
    yield Demonstration(prompt + _reply(row, *REPLIES))


def _reply(row: Row, *names: str) -> Conversation:
    """The first of these columns that holds something, as the assistant's turn, with its thought
    where a column has one.
    """
    name, _ = fields.first(row, *names)
    reply = fields.checked_response(fields.turns_at(row, name, "assistant"), "the response")
    thought = next(
        (
            own
            for own in _THOUGHTS
            if isinstance(dict.get(row, own), str) and fields.filled(row, own)
        ),
        "",
    )
    if not thought or any(turn.reasoning for turn in reply):
        return reply
    return (
        tuple(replace(turn, reasoning=fields.text(row, thought)) for turn in reply[:1]) + reply[1:]
    )


def read_calls(row: Row) -> Iterator[Demonstration]:
    """A question and the calls of tools that answer it, as xLAM's function calls have them."""
    prompt = fields.checked_prompt(fields.prompt_turns(row, "query"))
    yield Demonstration(
        prompt
        + read_message(
            {"role": "assistant", "tool_calls": nested.listed_in(row, "answers")},
            "answers",
        ),
    )


def read_reading(row: Row) -> Iterator[Demonstration]:
    """A question about a text, with the list of its answers: the first one."""
    yield fields.demonstration(fields.prompt_turns(row, "question"), first_answer(row))


def first_answer(row: Row) -> str:
    """The first of SQuAD's answers; others are alternatives.

    Raises:
        DataError: the list is empty, so the text has no answer.
    """
    answers = fields.sequence(nested.inner(row, "answers").get("text"), "answers.text")
    if not answers:
        raise DataError("no answer: answers.text is an empty list")
    if any(answer != answers[0] for answer in answers):
        leave_out(row, "answers.text after the first")
    return fields.as_text(answers[0], "answers.text")


def has_spans(row: Row) -> bool:
    """True if `answers` is an object with texts and their places, as SQuAD has it."""
    return isinstance(row["answers"], dict) and {"text", "answer_start"} <= row["answers"].keys()


def read_helpsteer(row: Row) -> Iterator[Demonstration]:
    """HelpSteer's `prompt` and `response`; the scores of the response stay in the metadata,
    whatever they say.
    """
    yield fields.demonstration(marked_turns(row, "prompt"), fields.text(row, "response"))


_TURN = re.compile(r"\s*<extra_id_1>(User|Assistant)\s*")


def marked_turns(row: Row, name: str) -> Conversation:
    """HelpSteer's prompt, where <extra_id_1>Assistant and <extra_id_1>User begin the turns after
    the first.
    """
    prompt = fields.prompt_turns(row, name)
    first, *rest = _TURN.split(prompt[-1].content) if prompt else ("",)
    if not rest or prompt[-1].role != "user":
        return prompt
    turns = zip(rest[::2], rest[1::2], strict=True)
    return (
        *prompt[:-1],
        user(first),
        *(user(words) if who == "User" else assistant(words) for who, words in turns),
    )


def prompt_reader(*columns: str) -> fields.Reader[Prompt]:
    """A reader of the first of these columns that holds something."""

    def read(row: Row) -> Iterator[Prompt]:
        yield Prompt(fields.checked_prompt(fields.prompt_turns(row, *columns)))

    return read


def read_turns(row: Row) -> Iterator[Prompt]:
    """MT-bench: the first of `turns`; the later ones wait in the metadata as `later_turns`."""
    listed = fields.sequence(row.get("turns"), "turns")
    questions = [
        fields.text(turn, "content") if isinstance(turn, dict) else fields.as_text(turn, "turns")
        for turn in listed
    ]
    if not questions:
        raise DataError("empty prompt: turns is an empty list")
    if len(questions) > 1:
        leave_out(row, "turns after the first")
    yield Prompt(
        fields.checked_prompt((user(questions[0]),)),
        metadata={"later_turns": tuple(questions[1:])},
    )


def read_instruction(row: Row) -> Iterator[Demonstration]:
    """Alpaca's `instruction`, `input`, `output` or Dolly's `instruction`, `context`, `response`;
    `history` and `system` as LLaMA-Factory writes them.
    """
    fields.first(row, "instruction")
    prompt = fields.checked_prompt(fields.prompt_turns(row, "instruction"))
    yield Demonstration(prompt + _reply(row, "output", "response", "completion"))


def read_self_instruct(row: Row) -> Iterator[Demonstration | DataError]:
    """One demonstration for each of the task's instances."""
    instances = fields.sequence(row.get("instances"), "instances")
    if not instances:
        raise DataError("empty response: the task has no instances")

    def one(instance: object) -> Demonstration:
        if not isinstance(instance, dict):
            raise DataError("not an instance: instances need input and output")
        words = fields.with_input(
            fields.text(row, "instruction"),
            fields.optional(instance, "input"),
        )
        return fields.demonstration((user(words),), fields.text(instance, "output"))

    yield from fields.attempt(one, instances)


Node = Row


def read_tree(row: Row) -> Iterator[Comparison | DataError]:
    """All pairs of ranked assistant siblings, at every depth; 0 is the best rank and equal ranks
    tie.

    Unranked siblings give no pair. A tree without ranked siblings is no comparison at all.
    """
    questions = list(_questions(_root(row), ()))
    rivals = [
        sorted((reply for reply in replies if fields.has(reply, "rank")), key=_rank)
        for _, replies in questions
    ]
    if (most := max(map(len, rivals), default=0)) > MOST:
        raise DataError(f"too many replies: {most} to one turn, and a ranking has at most {MOST}")
    ranked = [
        (path, two)
        for (path, _), of_path in zip(questions, rivals, strict=True)
        for two in combinations(of_path, 2)
    ]
    if not ranked:
        raise DataError("no ranked siblings: the tree holds no comparison")
    if sum(len(replies) for _, replies in questions) > sum(
        len(of_path) for of_path in rivals if len(of_path) > 1
    ):
        leave_out(row, "prompt.replies without a ranked sibling")
    yield from fields.attempt(_pair, ranked)


def _pair(ranked: tuple[Conversation, tuple[Node, Node]]) -> Comparison:
    prompt, (better, worse) = ranked
    tie = _rank(better) == _rank(worse)
    sides = ((_message(better),), (_message(worse),))
    return fields.checked_comparison(
        Comparison(prompt, *sides, tie=tie, probability=0.5 if tie else 1.0),
    )


def read_best_path(row: Row) -> Iterator[Demonstration]:
    """The path that follows the best-ranked reply at every turn, up to its last assistant turn."""
    node: Node | None = _root(row)
    path: list[Message] = []
    while node is not None:
        path.append(_message(node))
        node = min(_replies(node), key=_rank, default=None)
    yield fields.up_to_reply(tuple(path))
    leave_out(row, "prompt.replies off the best path")


def read_prompt(row: Row) -> Iterator[Prompt]:
    """The prompt at the root of the tree."""
    yield Prompt(fields.checked_prompt((_message(_root(row)),)))


def _root(row: Row) -> Node:
    root = row.get("prompt")
    if not isinstance(root, dict):
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
    return [reply for reply in replies if isinstance(reply, dict) and not reply.get("deleted")]


def _rank(node: Node) -> float:
    return fields.number(node["rank"], "rank") if fields.has(node, "rank") else math.inf


def _message(node: Node) -> Message:
    role = ROLES.get(str(node.get("role")))
    if role is None:
        raise DataError(f"unknown role: {node.get('role')!r:.40}")
    return Message(role, fields.as_text(node.get("text"), "text"))


def is_tree(row: Row) -> bool:
    """True if a row is a tree: its prompt is a node, and it says so or has replies."""
    return isinstance(row["prompt"], Mapping) and (
        "message_tree_id" in row or "replies" in row["prompt"]
    )
