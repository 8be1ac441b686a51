"""Rows of right and wrong: responses with a verdict, solutions with a verdict on every step,
questions with their answer.

KTO: `messages` + `label`, or `prompt`, `completion`, `label`
(https://huggingface.co/docs/trl/dataset_formats#unpaired-preference,
https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md,
https://arxiv.org/abs/2402.01306).
TruthfulQA: InstructGPT's answers with the scores of two judges
(https://github.com/openai/following-instructions-human-feedback, https://arxiv.org/abs/2203.02155).
Steps: PRMBench (https://github.com/ssmisya/PRMBench, https://arxiv.org/abs/2501.03124) and plain
rows (https://huggingface.co/docs/trl/dataset_formats#stepwise-supervision).
Problems: GSM8K (https://github.com/openai/grade-school-math, paper:
https://arxiv.org/abs/2110.14168), MATH (https://github.com/hendrycks/math, paper:
https://arxiv.org/abs/2103.03874) and plain question/answer rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from tether.core.errors import DataError
from tether.core.types import (
    Conversation,
    Demonstration,
    Feedback,
    Problem,
    StepLabels,
    assistant,
    user,
)
from tether.data.formats import fields
from tether.data.formats.json_rows import Row
from tether.data.formats.rated import with_labels
from tether.data.formats.solved import ANSWERS, final_answer


def read_prmbench(row: Row) -> Iterator[StepLabels]:
    """The modified question and solution; `error_steps` are 1-based and all other steps are right.
    The group is the problem that was modified, so all its variants are on one side of a split.

    Raises:
        DataError: an error step is outside the solution, so the annotation belongs to another
            text.
    """
    steps = fields.texts(row, "modified_process")
    errors = {
        fields.number(step, "error_steps")
        for step in fields.sequence(row.get("error_steps"), "error_steps")
    }
    outside = sorted(step for step in errors if step != int(step) or not 1 <= step <= len(steps))
    if outside:
        raise DataError(
            f"error step out of range: step {outside[0]:g} of a solution of {len(steps)} steps",
        )
    labels = tuple(position not in errors for position in range(1, len(steps) + 1))
    question = (user(fields.text(row, "modified_question", "question")),)
    original = fields.optional(row, "question")
    yield replace(
        with_labels(question, steps, labels, group=original),
        metadata={"question": original} if original else {},
    )


def read_steps(row: Row) -> Iterator[StepLabels]:
    """`steps` or `completions` with `labels`: booleans, 0/1, +/- or null for a step without a
    judgment.
    """
    steps = fields.texts(row, "steps" if fields.has(row, "steps") else "completions")
    labels = tuple(
        None if fields.missing(label) else _verdict(label)
        for label in fields.sequence(row.get("labels"), "labels")
    )
    yield with_labels(fields.prompt_turns(row, "prompt", "question", "problem"), steps, labels)


def _verdict(label: object) -> bool:
    """A step's label; numbers that are no verdict have a column of their own.

    Raises:
        DataError: it is none; the message says so, and the way out.
    """
    try:
        value = fields.number(label, "labels")
    except DataError:
        value = 0.0  # a word
    if value not in (0.0, 1.0):
        kind = "a probability" if 0 < value < 1 else "a rating"
        raise DataError(
            f"unreadable label: labels holds {value:g}, {kind} and no verdict. Put such numbers "
            "into a column of their own and name it by label_column (ratings -1, 0, 1 with "
            "classes = 3). In labels write true or false, or null for an unjudged step",
        )
    return fields.boolean(label, "labels")


SOLUTIONS = ("solution", "generated_solution")
"""Columns of a worked solution."""
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")


def gsm8k_answer(solution: str) -> str:
    """The text after the last ####, without thousands commas."""
    _, mark, answer = solution.rpartition("####")
    answer = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", answer.strip())
    if not mark or not answer:
        raise DataError("no final answer: nothing after ####")
    return answer


def boxed_answer(solution: str) -> str:
    r"""The content of the last \boxed{} (or \fbox{}), whose braces may nest; also the old form
    \boxed 5.
    """
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
    """The solution keeps its calculator marks and its last line, so that a model learns to end on
    ####.
    """
    solution = fields.text(row, "answer")
    yield Problem(
        fields.checked_prompt(fields.prompt_turns(row, "question")),
        gsm8k_answer(solution),
        solution,
    )


def has_final_line(row: Row) -> bool:
    return isinstance(row["answer"], str) and "####" in row["answer"]


def read_math(row: Row) -> Iterator[Problem]:
    solution = fields.text(row, "solution")
    answer = (
        final_answer(row["answer"], "answer")
        if fields.filled(row, "answer")
        else boxed_answer(solution)
    )
    yield Problem(fields.checked_prompt(fields.prompt_turns(row, "problem")), answer, solution)


def has_answer(row: Row) -> bool:
    """True if a row has an answer beside its solution, or in a box of the solution."""
    return fields.filled(row, "answer") or _BOX.search(str(row["solution"])) is not None


def read_question_answer(row: Row) -> Iterator[Problem]:
    r"""A question and its answer; an answer that is a whole solution gives the content of its
    \boxed{}.
    """
    name, value = fields.first(row, *ANSWERS)
    prompt = fields.checked_prompt(
        fields.prompt_turns(row, "question", "prompt", "problem", "instruction"),
    )
    solution = _solution(row)
    if isinstance(value, str) and _BOX.search(value) and not solution:
        yield Problem(prompt, boxed_answer(value), value)
    else:
        yield Problem(prompt, final_answer(value, name), solution)


def _solution(row: Row) -> str:
    """The worked solution of a row, where a column holds one or a list of one."""
    name = next((name for name in SOLUTIONS if fields.filled(row, name)), "")
    listed = row[name] if name else ""
    return fields.as_text(
        listed[0] if isinstance(listed, list) and len(listed) == 1 else listed,
        name,
    )


def read_worked(row: Row) -> Iterator[Demonstration]:
    """The worked solution of a question, or its bare answer."""
    prompt = fields.checked_prompt(
        fields.prompt_turns(row, "question", "prompt", "problem", "instruction"),
    )
    names = (*SOLUTIONS, *ANSWERS[::-1])
    full = next((name for name in names if fields.filled(row, name)), "")
    yield fields.demonstration(
        prompt,
        _solution(row) or fields.text(row, full or fields.first(row, *names)[0]),
    )


def _is_judged(value: object) -> bool:
    return isinstance(value, Mapping) and "is_correct" in value


def has_judged_solutions(row: Row) -> bool:
    """True if a column holds a model's solution and whether it is right."""
    return any(map(_is_judged, row.values()))


def read_gsm8k_solutions(row: Row) -> Iterator[Feedback | DataError]:
    """Several models' solutions of a question, each in a column with `solution` and
    `is_correct`.
    """
    prompt = _ask(fields.text(row, "question"))
    models = [name for name in row if _is_judged(dict.get(row, name))]

    def one(model: str) -> Feedback:
        response = (assistant(fields.as_text(row[model].get("solution"), f"{model}.solution")),)
        verdict = fields.feedback(
            prompt,
            response,
            fields.boolean(row[model]["is_correct"], f"{model}.is_correct"),
        )
        return replace(verdict, metadata={"model": model})

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
