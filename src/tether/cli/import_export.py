"""The commands that import judgments and answers into a preference store, and export them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tether.cli.options import Options, as_options, columns_of, opened
from tether.cli.terminal.console import print_line, show_table
from tether.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from tether.people.annotation.store import Store

Record = TypeVar("Record")
IMPORTED = {
    "rows": "rows", "answers": "new answers", "tasks": "new tasks", "judgments": "new judgments",
    "widened": "earlier pairs that more people judge now",
    "not_gold": "earlier pairs with judgments, which did not become gold questions",
    "repeated": "repeated judgments: a person's latest one of a pair counts, without times the first",
    "held": "judgments of pairs on the person's screen, skipped, flagged or taken back: not kept",
    "replaced": "judgments in the store that later judgments of the same person replaced",
}  # fmt: skip
"""Counts that an import reports if they are above 0."""


@dataclass(frozen=True, kw_only=True)
class CaseOptions(Options):
    """Comparisons and tasks that are imported."""

    ask: int | None = None
    labels: str = ""
    gold: bool = False
    round: str | None = None
    prefix: str = ""
    fields: str = ""
    columns: str = ""

    def field_names(self) -> tuple[str, ...]:
        """The three names in `--fields`; empty without the option.

        Raises:
            ConfigError: the option has another number of names.
        """
        names = tuple(name.strip() for name in self.fields.split(",") if name.strip())
        if self.fields and len(names) != 3:
            raise ConfigError(
                f"--fields names three fields, PROMPT,FIRST,SECOND, not {self.fields!r}",
            )
        return names


@dataclass(frozen=True, kw_only=True)
class SourceOptions(Options):
    """Answers that are imported, and where they come from."""

    prompts: Path | None = None
    model: str = ""
    checkpoint: str = ""


def import_into(
    store: str,
    files: list[str],
    *,
    format: str = "auto",
    cases: CaseOptions,
    source: SourceOptions,
    limit: int | None = None,
    strict: bool = False,
) -> None:
    """Import comparisons with their judgments, or answers, into a store. Creates the store if there
    is none.
    """
    from tether.data.sources import Quarantine
    from tether.people.annotation.answers import import_answers, read_answers
    from tether.people.annotation.importing import import_cases, read_cases

    quarantine = Quarantine()
    answers = _holds_answers(files, format)
    _check_import(cases, source, answers=answers)
    if answers:
        responses = read_answers(
            files,
            prompts=source.prompts,
            quarantine=quarantine,
            limit=limit,
            model=source.model,
            checkpoint=source.checkpoint,
        )
        imported = _stored(store, responses, import_answers)
    else:
        comparisons = read_cases(
            files,
            format=format,
            quarantine=quarantine,
            fields=cases.field_names(),
            labels=cases.labels,
            gold=cases.gold,
            limit=limit,
            columns=columns_of(cases.columns),
        )
        imported = _stored(
            store,
            comparisons,
            partial(import_cases, ask=cases.ask, round=cases.round, prefix=cases.prefix),
        )
    counts = ((name, imported[key]) for key, name in IMPORTED.items())
    show_table([(name, f"{count:,}") for name, count in counts if count])
    if quarantine.count:
        print_line(f"{quarantine.count:,} rows were left out: {quarantine.top_reasons()}", err=True)
        if strict:
            raise DataError(
                f"{quarantine.count} rows cannot be used, and --strict was given. The "
                "others were imported",
            )


def _holds_answers(files: list[str], format: str) -> bool:
    """True for files of answers, False for files of comparisons.

    Raises:
        ConfigError: there are both.
    """
    from tether.people.annotation.importing import format_of

    layouts = {format_of(file) if format == "auto" else format for file in files}
    if "answers" in layouts and len(layouts) > 1:
        raise ConfigError(
            "some of these files contain answers, and others contain comparisons. "
            "Import them one after the other",
        )
    return layouts == {"answers"}


def _check_import(cases: CaseOptions, source: SourceOptions, *, answers: bool) -> None:
    useless = vars(cases if answers else source)
    if without := next((name for name, value in useless.items() if value), None):
        what = "answers: `tether prefs ask` makes pairs of them" if answers else "comparisons"
        raise ConfigError(f"--{without} has no effect on {what}")
    if cases.gold and cases.labels:
        raise ConfigError(
            "--gold and --labels both set the meaning of the labels in the file. Give "
            "only one of them",
        )


def _stored(
    store: str,
    rows: Iterator[Record],
    put: Callable[[Store, Iterator[Record]], Counter[str]],
) -> Counter[str]:
    """Put rows into a store. The first row is read before the store is opened: without a usable one
    no new store is made.
    """
    with as_options():
        first = list(islice(rows, 1))
        return put(opened(store, new=True), chain(first, rows))


def export_from(
    store: str,
    file: Path,
    format: str = "jsonl",
    how: str = "soft",
    round: str | None = None,
    names: bool = False,
    unfinished: bool = False,
    least: float = 0.0,
    question: str | None = None,
    demonstrations: Path | None = None,
) -> None:
    """Write judged pairs as comparisons with every vote, or as tasks for other tools. Comments and
    secrets stay in the store.
    """
    from tether.core.keeping import write_whole
    from tether.core.rundir import write_jsonl
    from tether.data.rows import record_row
    from tether.people.annotation import exporting
    from tether.people.annotation.label_studio import CONFIG

    which = {
        "round": round,
        "names": names,
        "unfinished": unfinished,
        "least": least,
        "question": question,
    }
    where = opened(store, round=round)
    written = list(map(record_row, exporting.demonstrations(where, round=round, names=names)))
    if demonstrations and not written:
        raise DataError(f"{store}: nobody has written a better answer. Leave --demonstrations out")
    count = exporting.export_labels(where, file, format, how=how, **which)  # type: ignore[arg-type]
    others = exporting.kept_back(where, count, format, how=how, **which)  # type: ignore[arg-type]
    print_line(f"{count:,} rows in {file}, of {count + sum(others.values()):,} pairs")
    rows = ((why, f"{number:,}", exporting.WHO_TAKES[why]) for why, number in others.items())
    show_table(rows, ("left out", "pairs", ""))
    if demonstrations:
        write_jsonl(demonstrations, written)
        print_line(f"{len(written):,} better answers that people wrote: {demonstrations}")
    elif written:
        print_line(
            f"{len(written):,} better answers that people wrote are not in it: "
            "--demonstrations FILE writes them",
        )
    if format == "label-studio":
        interface = file.with_suffix(".xml")
        write_whole(interface, CONFIG.encode())
        print_line(f"The labelling interface for these tasks is in {interface}")
