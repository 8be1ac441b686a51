"""Problems with a checkable answer, in the layouts of reinforcement learning and of benchmarks, and
questions with options.

GSM8K (https://github.com/openai/grade-school-math, https://arxiv.org/abs/2110.14168), MATH
(https://github.com/hendrycks/math, https://arxiv.org/abs/2103.03874) and plain question/answer rows.

verl's rows (https://verl.readthedocs.io/en/latest/preparation/prepare_data.html), DAPO
(https://arxiv.org/abs/2503.14476), RLVR
(https://huggingface.co/datasets/allenai/RLVR-GSM-MATH-IF-Mixed-Constraints), OpenAI's reinforcement
fine-tuning (https://platform.openai.com/docs/guides/reinforcement-fine-tuning), SVAMP
(https://arxiv.org/abs/2103.07191); options as in MMLU (https://huggingface.co/datasets/cais/mmlu),
ARC (https://huggingface.co/datasets/allenai/ai2_arc), AQuA
(https://github.com/google-deepmind/AQuA), MedMCQA
(https://huggingface.co/datasets/openlifescienceai/medmcqa).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tether.core.errors import DataError
from tether.core.types import Demonstration, Feedback, JsonValue, Problem, Row, assistant, user
from tether.data.formats import fields, values
from tether.data.formats.conversations import conversation, first_answer
from tether.data.formats.fields import (
    attempt,
    boolean,
    checked_prompt,
    demonstration,
    feedback,
    filled,
    first,
    has,
    optional,
    options,
    prompt_turns,
    until_reply,
)
from tether.data.formats.table import LISTS
from tether.data.formats.values import as_text, list_in, object_in, structure_in

ANSWERS = LISTS["answers"]
"""Columns of a checkable answer, the narrow ones before the wide one."""
CORRECT = LISTS["correct"]
_LETTERS = ("opa", "opb", "opc", "opd")
_UNKNOWN = {"proof", "notfound", "not found", "n/a", "unknown"}
_LONGEST = 60
_CHECKS = (
    "func_name instruction_id instruction_id_list kwargs constraint constraints constraint_id "
    "constraint_type checker checkers verifier verifiers"
)
"""Keys of objects that describe a check of the reply."""


def final_answer(value: object, name: str) -> str:
    """The text of an answer that can be compared; a list of one, also as JSON text, is its item.

    Raises:
        DataError: it is empty, no answer at all, a constraint, which no comparison checks, or so
            long that no reply will ever equal it.
    """
    inner = structure_in(value)
    if any(
        isinstance(i, Mapping) and not i.keys().isdisjoint(_CHECKS.split()) for i in _listed(inner)
    ):
        raise DataError(
            f"a constraint in place of an answer: column {name} names a function that "
            "checks; give a reward of yours",
        )
    value = _only(inner) or value
    answer = as_text(value, name).strip()
    if not answer:
        raise DataError(f"no final answer: column {name} is empty")
    if answer.lower() in _UNKNOWN:
        raise DataError(f"no final answer: column {name} says {answer!r}")
    if answer[0] not in "[{" and "\n" not in answer and len(answer.split()) > _LONGEST:
        raise DataError(
            f"no final answer: column {name} holds {len(answer.split())} words, and a checkable "
            "answer is short. Put it into a column of its own",
        )
    return answer


def _listed(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else [value]


def _only(value: JsonValue) -> str:
    """The text of a list's single item; empty for any other value."""
    is_single = (
        isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | int | float)
    )
    return as_text(value[0], "answer") if is_single else ""


def read_reward_model(row: Row) -> Problem:
    """verl's `reward_model` with its `ground_truth`."""
    prompt = prompt_turns(row, "prompt", "question", "problem")
    return Problem(
        prompt,
        final_answer(
            values.inner(row, "reward_model").get("ground_truth"),
            "reward_model.ground_truth",
        ),
    )


def has_ground_truth(row: Row) -> bool:
    """True if `reward_model` is an object with the answer."""
    return has(object_in(row, "reward_model"), "ground_truth")


def read_answered_messages(row: Row) -> Problem:
    """`messages` beside an answer; a reply at their end is left out."""
    prompt = until_reply(conversation(row), row)
    name, value = first(row, *ANSWERS)
    return Problem(
        prompt,
        final_answer(value, name),
        optional(row, "solution"),
    )


def asks_nothing(row: Row) -> bool:
    """False if the last of `messages` waits for a reply and the row has an answer: it is a problem
    and demonstrates nothing.
    """
    messages = list_in(row, "messages") if has(row, *ANSWERS) else []
    last = messages[-1] if messages else None
    role = str(last.get("role") or last.get("from")) if isinstance(last, dict) else ""
    return role.lower() not in ("user", "human")


def read_choice(row: Row) -> Problem:
    """A question with lettered options; the answer is the letter of the right one, whether the row
    names it by letter or place.

    Raises:
        DataError: the row has no right option, as in a hidden test split.
    """
    choices = options(row) or [
        ("ABCD"[place], fields.text(row, name)) for place, name in enumerate(_LETTERS)
    ]
    prompt = prompt_turns(row, "question", "problem", "query", "prompt")
    if not has(row, "choices", "options"):
        lines = [prompt[-1].content, *(f"{letter}. {choice}" for letter, choice in choices)]
        prompt = (*prompt[:-1], user("\n".join(lines)))
    name, value = first(row, *CORRECT)
    return Problem(
        prompt,
        _letter(value, name, choices),
        optional(row, "rationale", "explanation", "exp"),
    )


def has_choices(row: Row) -> bool:
    """True if a question has options, in a list or in columns of their own."""
    value = next((row[name] for name in ("choices", "options") if has(row, name)), None)
    return bool(value and isinstance(structure_in(value), list | dict)) or all(
        n in row for n in _LETTERS
    )


def right_place(
    answer: object,
    texts: Sequence[str],
    labels: Sequence[str],
) -> int | None:
    """The place of the right option, from its label, its number from 0, or its own text; None if
    these name no option, or two.
    """
    word = str(answer).strip()
    letter = word.strip("()[].:").upper()
    named = [labels.index(one) for one in (word, letter) if one in labels][:1]
    same = [place for place, text in enumerate(texts) if text.strip() == word]
    if isinstance(answer, int) and not isinstance(answer, bool) and not named:
        named = [answer] if 0 <= answer < len(texts) else []
    places = {*named, *(same if len(same) == 1 else ())}
    return places.pop() if len(places) == 1 else None


def _letter(
    value: object,
    name: str,
    choices: list[tuple[str, str]],
) -> str:
    letters, texts = map(list, zip(*choices, strict=True))
    place = right_place(value, texts, letters)
    if place is not None:
        return letters[place]
    given = (
        f"{value}, and {len(letters)} options count from 0"
        if isinstance(value, int)
        else f"{as_text(value, name)[:40]!r}, neither a letter nor the text of one option"
    )
    raise DataError(f"no right option: {name} is {given}")


def read_span(row: Row) -> Problem:
    """SQuAD: a question about a text, and the first of its answers."""
    return Problem(
        prompt_turns(row, "question"),
        final_answer(first_answer(row), "answers.text"),
    )


def read_svamp(row: Row) -> Problem:
    """A story in `Body` and a question about it; whole numbers lose their `.0`."""
    question = f"{fields.text(row, 'Body').strip()} {fields.text(row, 'Question').strip()}"
    return Problem(
        (user(question),),
        final_answer(row.get("Answer"), "Answer").removesuffix(".0"),
    )


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


def read_gsm8k(row: Row) -> Problem:
    """The solution keeps its calculator marks and its last line, so that a model learns to end on
    ####.
    """
    solution = fields.text(row, "answer")
    return Problem(
        prompt_turns(row, "question"),
        gsm8k_answer(solution),
        solution,
    )


def read_problem(
    row: Row,
    prompt: str,
    *answers: str,
) -> Problem:
    r"""A question with the first of these answers that is filled.

    An answer that is a whole solution gives the content of its \boxed{}. Without an answer, the box
    of the solution is one.
    """
    turns = prompt_turns(row, *prompt.split("|"))
    name = next((name for name in answers if filled(row, name)), "")
    solution = _solution(row)
    if not name and not solution:
        name, _ = first(row, *answers)
    value = row[name] if name else ""
    if name and (solution or not (isinstance(value, str) and _BOX.search(value))):
        return Problem(turns, final_answer(value, name), solution)
    return Problem(turns, boxed_answer(solution or value), solution or value)


def has_answer(row: Row) -> bool:
    """True if a row has an answer beside its solution, or in a box of the solution."""
    return filled(row, "answer") or _BOX.search(str(row["solution"])) is not None


def _solution(row: Row) -> str:
    """The worked solution of a row, where a column holds one or a list of one."""
    name = next((name for name in SOLUTIONS if filled(row, name)), "")
    listed = row[name] if name else ""
    return fields.as_text(
        listed[0] if isinstance(listed, list) and len(listed) == 1 else listed,
        name,
    )


def read_worked(row: Row) -> Demonstration:
    """The worked solution of a question, or its bare answer."""
    prompt = checked_prompt(
        prompt_turns(row, "question", "prompt", "problem", "instruction"),
    )
    names = (*SOLUTIONS, *ANSWERS[::-1])
    full = next((name for name in names if filled(row, name)), "")
    return demonstration(
        prompt,
        _solution(row) or fields.text(row, full or first(row, *names)[0]),
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
    prompt = (user(fields.text(row, "question")),)
    models = [name for name in row if _is_judged(dict.get(row, name))]

    def one(model: str) -> Feedback:
        response = (assistant(fields.as_text(row[model].get("solution"), f"{model}.solution")),)
        verdict = feedback(
            prompt,
            response,
            boolean(row[model]["is_correct"], f"{model}.is_correct"),
        )
        return replace(verdict, metadata={"model": model})

    yield from attempt(one, models)


def read_gsm8k_truth(row: Row) -> Problem:
    r"""The question of a row of model solutions; the truth ends on "A: 18"."""
    truth = fields.text(row, "ground_truth")
    _, mark, final = truth.rstrip().rpartition("\nA:")
    if not mark or "\n" in final.strip():
        raise DataError("no final answer: ground_truth does not end on a line A:")
    question = (user(fields.text(row, "question")),)
    return Problem(question, gsm8k_answer(f"#### {final}"), truth)
