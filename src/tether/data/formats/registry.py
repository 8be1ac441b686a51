"""All formats, the narrow ones before the wide ones. The first rows of a file decide its format,
and its rows become records of the wanted kind.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pkgutil import resolve_name
from typing import Any

from tether.core.errors import DataError
from tether.core.types import (
    Comparison,
    Demonstration,
    Feedback,
    Prompt,
    Record,
    Row,
    Texts,
)
from tether.data.formats import feedback, fields, judged, rankings
from tether.data.formats.cells import Cells, without_cells
from tether.data.formats.conversions import CONVERSIONS, Conversion, prompt_of
from tether.data.formats.fields import LeftOutError, Reader, RowReader, T, unfolded
from tether.data.formats.messages import template_arguments
from tether.data.formats.pairs import NAMES
from tether.data.formats.sides import two_answers
from tether.data.formats.table import KINDS, LISTS, TABLES
from tether.data.formats.values import FALSE, TRUE
from tether.settings.synonyms import alike


@dataclass(frozen=True)
class Format:
    """A published layout of rows, a table of formats.toml.

    `columns` are required: `a|b` means either. `readers` give the records by kind; the first kind
    is the native one. Other kinds may follow by conversion, except those in `refuses`, for which a
    conversion would mislead. `holds` is a further test of the contents of the columns. `doubts`
    gives the reason why the first rows of a file, taken together, have another meaning.
    """

    name: str
    columns: str
    readers: Mapping[type, RowReader[Record]]
    _: KW_ONLY
    holds: Callable[[Row], bool] | None = None
    refuses: tuple[type, ...] = ()
    doubts: Callable[[Sequence[Row]], str] | None = None

    @property
    def kind(self) -> type:
        return next(iter(self.readers))

    def matches(self, row: Row) -> bool:
        """True if a row has this layout."""
        wanted = (column.split("|") for column in self.columns.split())
        return all(any(name in row for name in choices) for choices in wanted) and (
            self.holds is None or self.holds(row)
        )


_SCALE = re.compile(
    r"(.*[_-])?(ratings?|scores?|stars?|grade|quality|rewards?|helpfulness|harmlessness|axes)",
    re.IGNORECASE,
)
_ANSWER = re.compile(
    r"(?<![a-z])(good|bad|better|worse|best|worst|winner|loser|win|lose|preferred|accepted|chosen|rejected|positive|negative"
    r"|answers?|responses?|completions?|reply|output)(?![a-z])",
)
_SEGMENTS = (
    "segments are pieces of a rendered text, which belong to one template. Write the conversation as "
    "messages, with train: false at turns that are not to be learned."
)


def _found(words: str) -> Any:
    """The function that a text of the table names, with the words behind it as further arguments."""
    name, *given = words.format_map(_SPACED).split()
    function = resolve_name(f"{__package__}.{name}")
    return (lambda row: function(row, *given)) if given else function


def _two_answers(row: Texts) -> tuple[str, RowReader[Record]]:
    """The columns of a layout with two answers and a verdict, and its reader."""
    answers, verdict, models = (
        row.get(key, "").split() for key in ("answers", "verdict", "models")
    )
    prompt = row.get("prompt", "{prompts} {turns_before}").format_map(_SPACED).split()
    maker, *given = row["coding"].split()
    coding = _found(" ".join((maker, *verdict, *given)))
    return (
        " ".join(("|".join(prompt), *answers, *verdict)),
        lambda cells: judged.read_sides(cells, answers, coding(cells), prompt, models),
    )


def _format(name: str, row: Texts) -> Format:
    """A row of the table."""
    columns = row.get("columns", "")
    readers: dict[type, RowReader[Record]] = {}
    refuses = row.get("refuses", "")
    if "answers" in row:
        columns, readers[Comparison] = _two_answers(row)
    if "ranking" in row:
        readers = rankings.readers(_found(row["ranking"]))
        refuses = "Feedback"
    readers |= {_KIND[key]: _found(words) for key, words in row.items() if key in _KIND}
    holds, doubts = (_found(row[key]) if key in row else None for key in ("holds", "doubts"))
    kinds = tuple(map(_KIND.__getitem__, refuses.split()))
    return Format(
        name,
        columns.format_map(_EITHER),
        readers,
        holds=holds,
        refuses=kinds,
        doubts=doubts,
    )


def has_final_line(row: Row) -> bool:
    """True for GSM8K's answers, unless they have a verdict."""
    answer = row["answer"]
    return isinstance(answer, str) and "####" in answer and is_unjudged(row)


def is_unjudged(row: Row) -> bool:
    """False if the row's answer has a verdict, so that it is an answer to judge and differs from
    the truth.
    """
    return not any(layout.matches(row) for layout in FORMATS if layout.kind is Feedback)


_KIND = {kind.__name__: kind for kind in KINDS}
_LISTS = {**LISTS, "pairs": sorted({name for pair in NAMES for name in pair})}
_SPACED, _EITHER = (
    {name: between.join(words) for name, words in _LISTS.items()} for between in (" ", "|")
)
FORMATS = tuple(_format(name, row) for name, row in TABLES["formats"].items())
"""The narrow ones before the wide ones: of several that fit a row, the first that can give what is
wanted is taken.
"""


_AS_IT_IS = Conversion(lambda record: (record,))


def _for_whole(record: Record, tools: str, template: str) -> Record:
    """The record whose first turn has these schemas and arguments of the chat template."""
    where = "messages" if isinstance(record, Prompt | Demonstration) else "prompt"
    turns = getattr(record, where)
    given = {name: text for name, text in (("tools", tools), ("template", template)) if text}
    return (
        replace(record, **{where: (replace(turns[0], **given), *turns[1:])})
        if given and turns
        else record
    )


def reader_for(layout: Format, kind: type[T]) -> Reader[T] | None:
    """The reader that gives `kind` from rows of this format, natively or by conversion; None if
    there is no way.

    Columns that the reader does not read become metadata of its records, beside what they bring
    along. Of a row given as `Cells` the caller can name them: `row.unused()`.
    """
    native = layout.readers.get(kind)
    convert = CONVERSIONS.get((layout.kind, kind)) if native is None else _AS_IT_IS
    if convert is None or kind in layout.refuses:
        return None
    parse = native or layout.readers[layout.kind]

    def read(row: Row) -> Iterator[T | DataError]:
        cells = row if isinstance(row, Cells) else Cells(row)
        if isinstance(dict.get(cells, "id"), str | int):
            cells.get("id")
        refuse_media(cells)
        if kind is Demonstration and native is not None:
            refuse_bad_reply(cells)
        tools, template = fields.row_tools(cells), template_arguments(cells)
        made = parse(cells)
        records = [made] if isinstance(made, Record) else [*made]
        unread = unfolded(cells.unread())
        for record in records:
            if isinstance(record, DataError):
                yield record
                continue
            record = _for_whole(record, tools, template)
            metadata = {**unread, **without_cells(dict(record.metadata))}
            for name in convert.lost(record):
                cells.leave_out(name)
            try:
                if not isinstance(record, Demonstration):
                    fields.checked_prompt(prompt_of(record))
                yield from (
                    replace(other, metadata={**metadata, **other.metadata})
                    for other in convert.make(record)
                )
            except DataError as error:
                yield error

    return read


def refuse_bad_reply(row: Row) -> None:
    """Leave a row out whose mark is false; a mark of another content than a verdict is not read.

    Raises:
        LeftOutError: a mark is false.
    """
    for name in LISTS["marks"]:
        word = str(dict.get(row, name)).strip().lower()
        if word in TRUE | FALSE and not fields.boolean(row[name], name):
            raise LeftOutError(
                f"marked as bad: column {name} is false, and demonstrations are imitated",
            )


def refuse_media(row: Row) -> None:
    """Refuse a row with pictures, sound or film beside its text.

    Raises:
        DataError: a column of such a name holds something; a text alone may be a mere label of the
            row.
    """
    for name in LISTS["media"]:
        value = dict.get(row, name)
        is_label = isinstance(value, bool | int | float) or (
            isinstance(value, str) and name[-1] != "s"
        )
        # the mark of its place in a text
        is_shown = any(f"<{name}>" in str(other) for other in dict.values(row))
        if fields.filled(row, name) and (is_shown or not is_label):
            raise DataError(
                f"not a text: column {name} holds more than text, and only text is "
                "read. Leave such rows out",
            )


def format_named(name: str) -> Format:
    """A format by its name.

    Raises:
        DataError: no format has this name.
    """
    layouts = {layout.name: layout for layout in FORMATS}
    if name in layouts:
        return layouts[name]
    hint = alike(name, layouts) or f"known formats: {', '.join(sorted(layouts))}"
    raise DataError(f"unknown data format {name!r} ({hint}); or leave it at 'auto'.")


def detect(
    rows: Sequence[Row],
    kind: type | None,
    where: str,
) -> Format:
    """The format that most of these rows have; of a row's several, the narrowest that can give
    `kind`.

    Raises:
        DataError: no format has such columns.
    """
    votes: Counter[str] = Counter()
    for row in rows:
        fitting = [layout for layout in FORMATS if layout.matches(row)]
        if fitting:
            able = [
                layout
                for layout in fitting
                if kind is not None and reader_for(layout, kind) is not None
            ]
            votes[(able or fitting)[0].name] += 1
    if not votes and "segments" in rows[0]:
        raise DataError(f"{where}: {_SEGMENTS}")
    if not votes:
        raise DataError(
            f"{where}: no known format has the columns {_columns(rows[0])}. Name the columns as "
            "one of them does, for example prompt, chosen, rejected (preferences), messages "
            f"(demonstrations) or prompt (prompts). {way_out(kind or Prompt, rows[0])}",
        )
    return format_named(votes.most_common(1)[0][0])


def kind_reader(
    layout: Format,
    kind: type[T],
    where: str,
    rows: Sequence[Row],
) -> Reader[T]:
    """The reader of a file of this format for `kind`; `rows` are its first ones.

    Raises:
        DataError: this format holds another kind. The message names the likely format and the
            columns that `kind` needs. Or these rows have another meaning than the format.
    """
    reader = reader_for(layout, kind)
    if reader is None:
        held = KINDS[layout.kind].name
        look = held if layout.name.rstrip("s") in held else f"{layout.name} {held}"
        held_by = (
            f"{where} looks like {look} (columns {_columns(rows[0])}), not {KINDS[kind].name}."
        )
        raise DataError(f"{held_by} {KINDS[kind].needs} {way_out(kind, rows[0])}")
    if layout.doubts is not None and kind is not Prompt and (doubt := layout.doubts(rows)):
        raise DataError(f"{where}: {doubt}.")
    return reader


def _columns(row: Row) -> str:
    names = [
        "".join(c if c.isprintable() else "?" for c in name[:40]) or "(unnamed)" for name in row
    ]
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")


def way_out(kind: type, row: Row) -> str:
    """One sentence, or two: the reason why these columns give no records of the kind, and the key
    that mends it.
    """
    reason = _REASONS[kind](row) if kind in _REASONS else ""
    return reason or (
        f"If columns have other names, name them by data.columns, for example {{ "
        f"{KINDS[kind].example} }}."
    )


def answer_like(name: str) -> bool:
    """True if a column by its name holds answers."""
    return bool(_ANSWER.search(name.lower()))


def _named(row: Row, test: Callable[[str], object]) -> str:
    return next((name for name in row if name and test(name) and fields.has(row, name)), "")


def _has_response(name: str) -> bool:
    return name in (*LISTS["judged"], "messages", "conversations", "conversation") or answer_like(
        name,
    )


def _no_comparison(row: Row) -> str:
    if two := two_answers(row):
        one, other = two.columns
        return (
            f"No column says which of {one} and {other} is better: add a column preference "
            f"that holds {one}, {other} or tie."
        )
    if (scale := _named(row, _SCALE.fullmatch)) and _named(row, _has_response):
        return (
            f"Column {scale} judges a single response: put all responses to a prompt into one row, "
            "with columns prompt, responses and scores."
        )
    return ""


def _no_feedback(row: Row) -> str:
    if (label := _named(row, LISTS["labels"].__contains__)) and not feedback.has_verdict(row):
        return (
            f"Column {label} holds {dict.get(row, label)!r:.40}, which is neither true nor "
            "false: write one of them."
        )
    if (scale := _named(row, _SCALE.fullmatch)) and _named(row, _has_response):
        return (
            f"Column {scale} is a scale and no verdict: add a column label, true for the "
            "responses that are good enough and false for the others."
        )
    return ""


_REASONS: dict[type, Callable[[Row], str]] = {Comparison: _no_comparison, Feedback: _no_feedback}
