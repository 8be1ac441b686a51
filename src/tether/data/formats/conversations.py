"""Demonstrations and prompts: whole conversations, prompt and response, instructions,
prompts alone.

- OpenAI's `messages`: https://platform.openai.com/docs/guides/supervised-fine-tuning
- ShareGPT's `conversations`: https://github.com/lm-sys/FastChat/blob/main/docs/training.md
- prompt and response: https://huggingface.co/docs/trl/dataset_formats#prompt-completion
- Alpaca: https://github.com/tatsu-lab/stanford_alpaca
- Dolly: https://huggingface.co/datasets/databricks/databricks-dolly-15k
- OpenEnv's captures: https://github.com/huggingface/OpenEnv
- self-instruct: https://github.com/yizhongw/self-instruct
- AlpacaEval's instructions: https://github.com/tatsu-lab/alpaca_eval
- MT-bench: https://github.com/lm-sys/FastChat/tree/main/fastchat/llm_judge,
  https://arxiv.org/abs/2306.05685
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from tether.core.errors import DataError
from tether.core.types import Conversation, Demonstration, Message, Prompt, Row, assistant, user
from tether.data.formats import fields
from tether.data.formats.cells import leave_out
from tether.data.formats.fields import (
    LeftOutError,
    as_text,
    attempt,
    checked_prompt,
    checked_response,
    from_text,
    has,
    optional,
    prompt_turns,
    sequence,
    system_turn,
    text,
    turns_at,
    until_reply,
    up_to_reply,
    with_input,
)
from tether.data.formats.messages import is_dialogue, read_message, thinks, thought_column
from tether.data.formats.table import LISTS
from tether.data.formats.values import inner, listed_in

RESPONSES = LISTS["judged"][:4]
"""Columns of answers that are given for prompts of another file."""
MOST = 512
"""Ranked responses of one row, and ranked replies to one turn; so many give 130,816 pairs."""
PROMPTS = LISTS["prompts"]
"""Columns of a prompt, as rows with answers beside it name them."""
TURNS_BEFORE = LISTS["turns_before"]
"""Columns of the turns before the answers, where no column of `PROMPTS` holds anything."""
_DIALOGUES = LISTS["conversations"]
"""Columns that hold whole conversations; beside the first two only where they do."""


def _column(row: Row) -> str:
    """The column of the conversation."""
    return next((name for name in _DIALOGUES[:2] if has(row, name)), "") or next(
        (name for name in _DIALOGUES[2:] if is_dialogue(row, name)),
        _DIALOGUES[0],
    )


def has_dialogue(row: Row) -> bool:
    """True if a column holds messages, questions with their answers, or texts by turns; `data` only
    where no prompt is beside.
    """
    names = (
        _DIALOGUES[2:]
        if not has(row, *PROMPTS)
        else [name for name in _DIALOGUES[2:] if name != "data"]
    )
    return any(is_dialogue(row, name) for name in names)


def conversation(row: Row) -> Conversation:
    """All turns of a row, with its system text first where that is a column of its own. Of plain
    texts the first is a user's.
    """
    name, _ = fields.first(row, _column(row))
    texts = listed_in(row, name)
    if texts and all(isinstance(t, str) for t in texts) and from_text(texts, name) is texts:
        messages = tuple(
            Message("assistant" if place % 2 else "user", words)
            for place, words in enumerate(texts)
        )
    else:
        messages = turns_at(row, name, "user")
    return messages if messages and messages[0].role == "system" else system_turn(row) + messages


def read_conversation(row: Row) -> Demonstration:
    """Turns after the last assistant turn are left out: nothing is learned from them."""
    demonstration = up_to_reply(conversation(row), row)
    checked_response(demonstration.messages, "the last assistant turn")
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
    return demonstration


def read_opening(row: Row) -> Prompt:
    """The conversation up to its last assistant turn if it ends on one, else all of it."""
    return Prompt(until_reply(conversation(row), row))


def read_response(
    row: Row,
    asked: str,
    replies: str,
) -> Demonstration:
    """A prompt, and the response in the first of these columns that holds something, with its
    thought where a column has one. Both names are those of lists.
    """
    prompt = checked_prompt(prompt_turns(row, *LISTS[asked]))
    name, _ = fields.first(row, *LISTS[replies])
    reply = checked_response(turns_at(row, name, "assistant"), "the response")
    thought = thought_column(row)
    if thought and not any(turn.reasoning or thinks(turn.content) for turn in reply):
        reply = (replace(reply[0], reasoning=text(row, thought)), *reply[1:])
    return Demonstration(prompt + reply)


def read_calls(row: Row) -> Demonstration:
    """A question and the calls of tools that answer it, as xLAM's function calls have them."""
    prompt = checked_prompt(prompt_turns(row, "query"))
    return Demonstration(
        prompt
        + read_message(
            {"role": "assistant", "tool_calls": listed_in(row, "answers")},
            "answers",
        ),
    )


def read_reading(row: Row) -> Demonstration:
    """A question about a text, with the list of its answers: the first one."""
    return fields.demonstration(prompt_turns(row, "question"), first_answer(row))


def first_answer(row: Row) -> str:
    """The first of SQuAD's answers; others are alternatives.

    Raises:
        DataError: the list is empty, so the text has no answer.
    """
    answers = sequence(inner(row, "answers").get("text"), "answers.text")
    if not answers:
        raise DataError("no answer: answers.text is an empty list")
    if any(answer != answers[0] for answer in answers):
        leave_out(row, "answers.text after the first")
    return as_text(answers[0], "answers.text")


def has_spans(row: Row) -> bool:
    """True if `answers` is an object with texts and their places, as SQuAD has it."""
    return isinstance(row["answers"], dict) and {"text", "answer_start"} <= row["answers"].keys()


def read_helpsteer(row: Row) -> Demonstration:
    """HelpSteer's `prompt` and `response`; the scores of the response stay in the metadata,
    whatever they say.
    """
    return fields.demonstration(marked_turns(row, "prompt"), text(row, "response"))


_TURN = re.compile(r"\s*<extra_id_1>(User|Assistant)\s*")


def marked_turns(row: Row, *names: str) -> Conversation:
    """HelpSteer's prompt, where <extra_id_1>Assistant and <extra_id_1>User begin the turns after
    the first.
    """
    prompt = prompt_turns(row, *names)
    first, *rest = _TURN.split(prompt[-1].content) if prompt else ("",)
    if not rest or prompt[-1].role != "user":
        return prompt
    turns = zip(rest[::2], rest[1::2], strict=True)
    return (
        *prompt[:-1],
        user(first),
        *(user(words) if who == "User" else assistant(words) for who, words in turns),
    )


def read_prompt(row: Row, *columns: str) -> Prompt:
    """The first of these columns that holds something."""
    return Prompt(prompt_turns(row, *columns))


def lists_questions(row: Row) -> bool:
    """True for MT-bench's turns, which are questions alone."""
    return not is_dialogue(row, "turns")


def read_turns(row: Row) -> Prompt:
    """MT-bench: the first of `turns`; the later ones wait in the metadata as `later_turns`."""
    listed = sequence(row.get("turns"), "turns")
    questions = [
        text(turn, "content") if isinstance(turn, dict) else as_text(turn, "turns")
        for turn in listed
    ]
    if not questions:
        raise DataError("empty prompt: turns is an empty list")
    if len(questions) > 1:
        leave_out(row, "turns after the first")
    return Prompt(
        (user(questions[0]),),
        metadata={"later_turns": tuple(questions[1:])},
    )


def read_capture(row: Row) -> Iterator[Demonstration | DataError]:
    """OpenEnv's record of a rollout, a graph of calls of a model: each path of the agent, as its last
    call has it.
    """
    calls = listed_in(row, "turns")
    leave_out(row, "turns off the agent's paths")

    def one(path: Row) -> Demonstration:
        try:
            if path["role"] != "agent":
                raise LeftOutError("no path of the agent: a retry, or another program's call")
            call = {call["node_id"]: call for call in calls}[path["node_ids"][-1]]
            request = {"messages": call["request_messages"], "tools": call["request_tools"]}
            reply = {"choices": [{"message": call["response_message"]}]}
        except (LookupError, TypeError) as error:
            raise DataError(
                f"unreadable capture: a path has no {error}; include_messages writes all",
            ) from error
        return read_call({"request": request, "response": reply})

    yield from attempt(one, listed_in(row, "sequences"))


def read_trace(row: Row) -> Iterator[Demonstration | DataError]:
    """OpenEnv's TrainingTrace, calls of a model with their tokens: each call whose tokens no later
    one continues, as the messages that it was made of.
    """
    calls = listed_in(row, "turns")
    leave_out(row, "the turns' tokens")

    def one(call: Row) -> Demonstration:
        if 1 not in call["loss_mask"]:
            raise LeftOutError("a call of which no token is to be trained")
        return read_call(call)

    try:
        starts = [call["prompt_token_ids"] for call in calls]
        for call in calls:
            whole = call["prompt_token_ids"] + call["completion_token_ids"]
            if not any(start[: len(whole)] == whole for start in starts):
                yield from attempt(one, [call])
    except (LookupError, TypeError) as error:
        yield DataError(f"unreadable trace: a turn has no {error}")


def holds_call(row: Row) -> bool:
    """True where what was asked are messages, not a text."""
    return isinstance(dict.get(row, "request"), dict)


def read_call(row: Row) -> Demonstration:
    """A call of a model as OpenAI's API has it: what was asked, and the first choice of the reply.

    Raises:
        DataError: it has no messages, or no reply.
    """
    try:
        request = row["request"]
        reply = {"role": "assistant", **row["response"]["choices"][0]["message"]}
        messages = [*request["messages"], reply]
        messages[0] = {**messages[0], "tools": request.get("tools")}
    except (LookupError, TypeError, AttributeError) as error:
        raise DataError(
            "unreadable call: no messages, or no reply; include_messages writes both",
        ) from error
    return read_conversation({"messages": messages})


def read_self_instruct(row: Row) -> Iterator[Demonstration | DataError]:
    """One demonstration for each of the task's instances."""
    instances = sequence(row.get("instances"), "instances")
    if not instances:
        raise DataError("empty response: the task has no instances")

    def one(instance: object) -> Demonstration:
        if not isinstance(instance, dict):
            raise DataError("not an instance: instances need input and output")
        words = with_input(
            text(row, "instruction"),
            optional(instance, "input"),
        )
        return fields.demonstration((user(words),), text(instance, "output"))

    yield from attempt(one, instances)
