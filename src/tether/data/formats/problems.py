"""Questions with a checkable answer: GSM8K, MATH and plain question/answer rows.

https://github.com/openai/grade-school-math (paper: https://arxiv.org/abs/2110.14168),
https://github.com/hendrycks/math (paper: https://arxiv.org/abs/2103.03874)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from tether.core.errors import DataError
from tether.core.types import Conversation, Demonstration, Feedback, Message, Problem, Prompt
from tether.data.formats.fields import (
    as_text,
    boolean,
    checked_prompt,
    demonstration,
    feedback,
    leftover,
    missing,
    optional,
    text,
)
from tether.data.formats.format import Format, Row, having
from tether.data.formats.preference import prompt_turns

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_QUESTIONS = ("question", "prompt", "problem", "instruction")


def gsm8k_answer(solution: str) -> str:
    """What follows the last ####, without thousands commas."""
    _, mark, answer = solution.rpartition("####")
    answer = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", answer.strip())
    if not mark or not answer:
        raise DataError("no final answer: nothing after ####")
    return answer


def boxed_answer(solution: str) -> str:
    r"""The content of the last \boxed{} (or \fbox{}), whose braces may nest; also the old form \boxed 5."""
    found = list(_BOX.finditer(solution))
    if not found:
        raise DataError(r"no final answer: no \boxed in the solution")
    rest = solution[found[-1].end() :]
    if not rest.startswith("{"):
        bare = re.match(r"[^\s$.,;\\]+", rest)
        if bare is None:
            raise DataError(r"no final answer: nothing in \boxed")
        return bare[0]
    depth = 0
    for position, character in enumerate(rest):
        escaped = position > 0 and rest[position - 1] == "\\"
        depth += 0 if escaped else (character == "{") - (character == "}")
        if depth == 0:
            answer = rest[1:position].strip()
            if not answer:
                raise DataError(r"no final answer: nothing in \boxed{}")
            return answer
    raise DataError(r"no final answer: the braces of \boxed{ do not close")


def read_gsm8k(row: Row) -> Iterator[Problem]:
    """The solution keeps its calculator marks and its last line, so that a model learns to end on ####."""
    solution = text(row, "answer")
    yield Problem(
        _ask(text(row, "question")), gsm8k_answer(solution), solution, metadata=leftover(row, ("id", "question", "answer"))
    )


def read_math(row: Row) -> Iterator[Problem]:
    solution = text(row, "solution")
    answer = boxed_answer(solution) if missing(row.get("answer")) else text(row, "answer")
    used = ("id", "problem", "solution", "answer")
    yield Problem(_ask(text(row, "problem")), answer, solution, metadata=leftover(row, used))


def read_question_answer(row: Row) -> Iterator[Problem]:
    answer = text(row, "answer", "ground_truth")
    if not answer.strip():
        raise DataError("no final answer: column answer is empty")
    used = ("id", "system", "answer", "ground_truth", "solution", *_QUESTIONS)
    prompt = checked_prompt(prompt_turns(row, *_QUESTIONS))
    yield Problem(prompt, answer.strip(), optional(row, "solution"), metadata=leftover(row, used))


def answer_demonstration(row: Row) -> Iterator[Demonstration]:
    """The solution, or the bare answer where there is none."""
    for problem in read_question_answer(row):
        yield demonstration(problem.prompt, problem.solution or problem.answer, problem.metadata)


def read_gsm8k_solutions(row: Row) -> Iterator[Feedback | DataError]:
    """Several models' solutions of a question, each in a column with `solution` and `is_correct`."""
    prompt = _ask(text(row, "question"))
    judged = {name: value for name, value in row.items() if isinstance(value, Mapping) and "is_correct" in value}
    for name, value in judged.items():
        metadata = {**leftover(row, ("id", "question", *judged)), "model": name}
        try:
            response = (Message("assistant", as_text(value.get("solution"), f"{name}.solution")),)
            yield feedback(prompt, response, boolean(value["is_correct"], f"{name}.is_correct"), metadata)
        except DataError as error:
            yield error


def read_gsm8k_truth(row: Row) -> Iterator[Problem]:
    r"""The question of a row of model solutions; the truth ends on "A: 18"."""
    truth = text(row, "ground_truth")
    _, mark, final = truth.rstrip().rpartition("\nA:")
    if not mark or "\n" in final.strip():
        raise DataError("no final answer: ground_truth does not end on a line A:")
    yield Problem(_ask(text(row, "question")), gsm8k_answer(f"#### {final}"), truth, metadata={})


def read_gsm8k_question(row: Row) -> Iterator[Prompt]:
    yield Prompt(_ask(text(row, "question")))


def _ask(question: str) -> Conversation:
    return checked_prompt((Message("user", question),))


FORMATS = (
    Format(
        "gsm8k_solutions",
        lambda row: "question" in row and any(isinstance(value, Mapping) and "is_correct" in value for value in row.values()),
        {Feedback: read_gsm8k_solutions, Problem: read_gsm8k_truth, Prompt: read_gsm8k_question},
    ),
    Format(
        "gsm8k",
        lambda row: "question" in row and isinstance(row.get("answer"), str) and "####" in row["answer"],
        {Problem: read_gsm8k},
    ),
    Format("math", having("problem", "solution"), {Problem: read_math}),
    Format(
        "question_answer",
        having("question|prompt|problem|instruction", "answer|ground_truth"),
        {Problem: read_question_answer, Demonstration: answer_demonstration},
    ),
)
