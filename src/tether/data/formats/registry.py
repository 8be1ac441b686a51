"""All formats, the narrow ones before the wide ones, and how the first rows of a file tell which one it is."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence

from tether.core.errors import DataError
from tether.data.formats import (
    conversation,
    hh,
    instruction,
    judged_pairs,
    kto,
    open_assistant,
    preference,
    problems,
    prompts,
    ranking,
    steps,
    truthful_qa,
    webgpt,
)
from tether.data.formats.conversions import reader_for
from tether.data.formats.format import KINDS, Format, Reader, Row

FORMATS: tuple[Format, ...] = (
    *hh.FORMATS,
    *preference.FORMATS,
    *ranking.FORMATS,
    *webgpt.FORMATS,
    *judged_pairs.FORMATS,
    *open_assistant.FORMATS,
    *kto.FORMATS,
    *steps.FORMATS,
    *truthful_qa.FORMATS,
    *(layout for layout in prompts.FORMATS if layout.name != "prompts"),
    *instruction.FORMATS,
    *conversation.FORMATS,
    *problems.FORMATS,
    *(layout for layout in prompts.FORMATS if layout.name == "prompts"),
)


def named(name: str) -> Format:
    """A format by its name.

    Raises:
        DataError: no format has this name.
    """
    known = {layout.name: layout for layout in FORMATS}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known formats: {', '.join(sorted(known))}"
    raise DataError(f"unknown data format {name!r} ({hint}); or leave it at 'auto'.")


def detect(rows: Sequence[Row], kind: type | None, where: str) -> Format:
    """The format that most of these rows have; of a row's several, the narrowest that can give `kind`.

    Raises:
        DataError: no format has such columns.
    """
    votes: Counter[str] = Counter()
    for row in rows:
        fitting = [layout for layout in FORMATS if layout.matches(row)]
        if fitting:
            able = [layout for layout in fitting if kind is not None and reader_for(layout, kind) is not None]
            votes[(able or fitting)[0].name] += 1
    if not votes:
        raise DataError(
            f"{where}: no known format has the columns {_columns(rows[0])}. Name the columns as one of them does, for example "
            "prompt, chosen, rejected (preferences), messages (demonstrations) or prompt (prompts)."
        )
    return named(votes.most_common(1)[0][0])


def kind_reader(layout: Format, kind: type, where: str, row: Row) -> Reader:
    """The reader of a file of this format for `kind`.

    Raises:
        DataError: this format holds something else; the message says what it looks like and what `kind` needs.
    """
    reader = reader_for(layout, kind)
    if reader is None:
        wanted, needs = KINDS[kind]
        held = KINDS[layout.kind][0]
        found = held if layout.name.rstrip("s") in held else f"{layout.name} {held}"
        raise DataError(f"{where} looks like {found} (columns {_columns(row)}), not {wanted}. {needs}")
    return reader


def _columns(row: Row) -> str:
    names = ["".join(c if c.isprintable() else "?" for c in name[:40]) or "(unnamed)" for name in row]
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
