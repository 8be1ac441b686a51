"""Questions with a checkable answer: GSM8K, MATH and plain question/answer rows.

https://github.com/openai/grade-school-math (paper: https://arxiv.org/abs/2110.14168),
https://github.com/hendrycks/math (paper: https://arxiv.org/abs/2103.03874)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from tether.core.errors import DataError
from tether.core.types import Conversation, Demonstration, Feedback, Problem, assistant, user
from tether.data.formats import fields
from tether.data.formats.json_rows import Row

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")


def gsm8k_answer(solution: str) -> str:
    """The text after the last ####, without thousands commas."""
    _, mark, answer = solution.rpartition("####")
    answer = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", answer.strip())
    if not mark or not answer:
        raise DataError("no final answer: nothing after ####")
    return answer


def boxed_answer(solution: str) -> str:
    r"""The content of the last \boxed{} (or \fbox{}), whose braces may nest; also the old form \boxed 5."""
    boxes = list(_BOX.finditer(solution))
    if not boxes:
        raise DataError(r"no final answer: no \boxed in the solution")
    rest = solution[boxes[-1].end() :]
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
    solution = fields.text(row, "answer")
    yield Problem(_ask(fields.text(row, "question")), gsm8k_answer(solution), solution)


def has_final_line(row: Row) -> bool:
    return isinstance(row["answer"], str) and "####" in row["answer"]


def read_math(row: Row) -> Iterator[Problem]:
    solution = fields.text(row, "solution")
    answer = boxed_answer(solution) if fields.missing(row.get("answer")) else fields.text(row, "answer")
    yield Problem(_ask(fields.text(row, "problem")), answer, solution)


def read_question_answer(row: Row) -> Iterator[Problem]:
    answer = fields.text(row, "answer", "ground_truth")
    if not answer.strip():
        raise DataError("no final answer: column answer is empty")
    prompt = fields.prompt_turns(row, "question", "prompt", "problem", "instruction")
    yield Problem(fields.checked_prompt(prompt), answer.strip(), fields.optional(row, "solution"))


def answer_demonstration(row: Row) -> Iterator[Demonstration]:
    """The solution, or the bare answer where there is none."""
    for problem in read_question_answer(row):
        yield fields.demonstration(problem.prompt, problem.solution or problem.answer)


def _is_judged(value: object) -> bool:
    return isinstance(value, Mapping) and "is_correct" in value


def has_judged_solutions(row: Row) -> bool:
    """True if a column holds a model's solution and whether it is right."""
    return any(map(_is_judged, row.values()))


def read_gsm8k_solutions(row: Row) -> Iterator[Feedback | DataError]:
    """Several models' solutions of a question, each in a column with `solution` and `is_correct`."""
    prompt = _ask(fields.text(row, "question"))
    models = [name for name, value in row.items() if _is_judged(value)]
    metadata = fields.leftover(row, {"id", "question", *models}.__contains__)

    def one(model: str) -> Feedback:
        response = (assistant(fields.as_text(row[model].get("solution"), f"{model}.solution")),)
        verdict = fields.feedback(prompt, response, fields.boolean(row[model]["is_correct"], f"{model}.is_correct"))
        return replace(verdict, metadata={**metadata, "model": model})

    yield from fields.attempt(one, models)


def read_gsm8k_truth(row: Row) -> Iterator[Problem]:
    r"""The question of a row of model solutions; the truth ends on "A: 18"."""
    truth = fields.text(row, "ground_truth")
    _, mark, final = truth.rstrip().rpartition("\nA:")
    if not mark or "\n" in final.strip():
        raise DataError("no final answer: ground_truth does not end on a line A:")
    yield Problem(_ask(fields.text(row, "question")), gsm8k_answer(f"#### {final}"), truth)


def _ask(question: str) -> Conversation:
    return fields.checked_prompt((user(question),))
