"""Multiple-choice questions from local files or a hub, in the wordings that lm-eval gives them.

Layouts:

- HellaSwag: `ctx_a`, `ctx_b`, `activity_label`, `endings`, `label`
- ARC: `question`, `choices` of texts and labels, `answerKey`
- MMLU: `question`, `subject`, `choices` or columns A to D, `answer`
- plain: `question`, `choices`, `answer`, perhaps `context`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tether.core.errors import DataError
from tether.core.types import Json
from tether.data.formats.containers import Sources
from tether.data.formats.fields import has, text
from tether.data.formats.solved import right_place
from tether.data.formats.values import sequence, structure_in
from tether.data.sources import Quarantine, read_rows

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Question:
    """A context, the texts that may follow it, and the place of the right one.

    `choices` are without the space before each of them; `id` names the question among all of its
    source.
    """

    id: str
    context: str
    choices: tuple[str, ...]
    answer: int
    layout: str


def read_questions(
    sources: Sources,
    quarantine: Quarantine | None = None,
    limit: int | None = None,
) -> list[Question]:
    """The questions of files, folders or `hub:owner/name:split`, the first `limit` of each.

    Raises:
        MissingFileError, DataError: as `data.sources.read`; also when two layouts are mixed.
    """
    named = [sources] if isinstance(sources, str | Path) else sources
    read = [
        question
        for source in named
        for question in read_rows(source, _questions, quarantine, limit)
    ]
    questions = [
        replace(question, id=question.id or f"q{number}") for number, question in enumerate(read, 1)
    ]
    layouts = sorted({question.layout for question in questions})
    if len(layouts) > 1:
        raise DataError(
            f"the questions have the layouts {' and '.join(layouts)}. Measure each by itself: an "
            "accuracy over both compares with nothing",
        )
    return questions


def _questions(row: Json) -> Iterator[Question]:
    for fits, make in LAYOUTS:
        if all(has(row, *names) for names in fits):
            yield make(row)
            return
    raise DataError(
        "no multiple-choice question: the columns are neither question, choices and answer nor "
        "those of HellaSwag (ctx_a, endings, label)",
    )


def _hellaswag(row: Json) -> Question:
    """lm-eval's `hellaswag`: activity and context without the marks of WikiHow."""
    first = text(row, "ctx_a", "ctx")
    second = text(row, "ctx_b").capitalize() if has(row, "ctx_b") else ""
    body = f"{first} {second}" if "ctx_a" in row else first
    head = f"{text(row, 'activity_label')}: " if has(row, "activity_label") else ""
    choices = [_without_marks(str(ending)) for ending in sequence(row["endings"], "endings")]
    return _made(row, "hellaswag", _without_marks(head + body), choices, row["label"])


def _without_marks(words: str) -> str:
    words = words.strip().replace(" [title]", ". ")
    lines = words.split("\n")
    return "\n".join(map(_without_brackets, lines)).replace("  ", " ")


def _without_brackets(line: str) -> str:
    r"""The line without its matches of `\[.*?\]`, in time that grows with its length alone."""
    pieces = []
    end = 0
    while (start := line.find("[", end)) >= 0 and (close := line.find("]", start)) >= 0:
        pieces.append(line[end:start])
        end = close + 1
    return "".join([*pieces, line[end:]])


def _arc(row: Json) -> Question:
    """lm-eval's `arc_easy` and `arc_challenge`: the choices' texts follow "Answer:"."""
    choices = structure_in(row["choices"])
    if not isinstance(choices, Mapping) or not {"text", "label"} <= choices.keys():
        raise DataError("choices beside an answerKey are an object of text and label")
    labels = [str(label) for label in sequence(choices["label"], "choices.label")]
    texts = [str(choice) for choice in sequence(choices["text"], "choices.text")]
    if len(labels) != len(texts):
        raise DataError(f"uneven lists: {len(labels)} labels but {len(texts)} texts in choices")
    context = f"Question: {text(row, 'question')}\nAnswer:"
    return _made(row, "arc", context, texts, row["answerKey"], labels)


def _mmlu(row: Json) -> Question:
    """lm-eval's `mmlu`: the choices are in the context, and letters follow "Answer:"."""
    texts = _choices(row)
    if len(texts) > len(LETTERS):
        raise DataError(f"too many choices: {len(texts)}, and there are {len(LETTERS)} letters")
    letters = LETTERS[: len(texts)]
    lines = [f"{letter}. {choice}" for letter, choice in zip(letters, texts, strict=True)]
    head = ""
    if has(row, "subject"):
        subject = text(row, "subject").replace("_", " ")
        head = f"The following are multiple choice questions (with answers) about {subject}.\n\n"
    context = "\n".join([head + text(row, "question").strip(), *lines, "Answer:"])
    return _made(row, "mmlu", context, list(letters), row["answer"], list(letters))


def _plain(row: Json) -> Question:
    """The wording of ARC, behind a passage where there is one."""
    texts = _choices(row)
    passage = (
        f"{text(row, 'context', 'passage').strip()}\n" if has(row, "context", "passage") else ""
    )
    context = f"{passage}Question: {text(row, 'question').strip()}\nAnswer:"
    return _made(row, "plain", context, texts, row["answer"], list(LETTERS[: len(texts)]))


Layout = tuple[tuple[tuple[str, ...], ...], Callable[[Json], Question]]
LAYOUTS: tuple[Layout, ...] = (
    ((("ctx_a", "ctx"), ("endings",), ("label",)), _hellaswag),
    ((("question",), ("choices",), ("answerKey",)), _arc),
    ((("question",), ("subject",), ("choices", "A"), ("answer",)), _mmlu),
    ((("question",), ("A",), ("B",), ("answer",)), _mmlu),
    ((("question",), ("choices",), ("answer",)), _plain),
)
"""For each layout the columns of which it needs one of every group, and its reader; the first that
fits is taken.
"""


def _choices(row: Json) -> list[str]:
    if has(row, "choices"):
        return [str(choice) for choice in sequence(row["choices"], "choices")]
    columns = [letter for letter in LETTERS[:10] if has(row, letter)]
    if columns != list(LETTERS[: len(columns)]):
        raise DataError(f"choices have gaps: the columns are {', '.join(columns)}")
    return [str(row[letter]) for letter in columns]


def _made(
    row: Json,
    layout: str,
    context: str,
    choices: Sequence[str],
    answer: object,
    labels: Sequence[str] = (),
) -> Question:
    """Refuse a question without a right answer, or with equal choices."""
    if len(choices) < 2:
        raise DataError(f"too few choices: {len(choices)}")
    if not all(choice.strip() for choice in choices):
        raise DataError("empty choice: a text of nothing has no likelihood")
    if len(set(choices)) < len(choices):
        raise DataError("equal choices: two of them are the same text")
    name = next((str(row[key]) for key in ("id", "question_id", "ind") if has(row, key)), "")
    return Question(name, context, tuple(choices), _place(answer, choices, labels), layout)


def _place(answer: object, choices: Sequence[str], labels: Sequence[str]) -> int:
    """The place that an answer names: by its label, as a number from 0, or by the text itself."""
    place = right_place(answer, choices, labels)
    if place is not None:
        return place
    if isinstance(answer, int):
        raise DataError(f"answer out of range: {answer} of {len(choices)} choices, from 0")
    raise DataError(f"unknown answer: {answer!r:.40} is no label, number or text of the choices")
