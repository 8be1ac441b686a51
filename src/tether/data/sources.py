"""Files, folders and hub data sets -> a stream of typed records; what cannot be used goes to
quarantine, with its place.

The memory holds only the current row, a few first rows and a hash of each id, so files may be
larger. The columns of the first rows decide the format.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from tether.core.errors import DataError
from tether.core.once import once
from tether.core.rundir import append_jsonl
from tether.core.types import Demonstration, Json, Problem, Prompt, Record, Row, Texts
from tether.data.formats.cells import Cells
from tether.data.formats.columns import renamed, strange_names
from tether.data.formats.containers import Numbered, Place, Sources, places
from tether.data.formats.conversions import prompt_of
from tether.data.formats.evidence import Evidence
from tether.data.formats.fields import LeftOutError, Reader, prompt_digest, short_hash
from tether.data.formats.json_rows import BadRow
from tether.data.formats.rankings import gather
from tether.data.formats.registry import (
    FORMATS,
    Format,
    answer_like,
    detect,
    format_named,
    kind_reader,
)
from tether.data.formats.table import KINDS

T = TypeVar("T")

SNIFFED_ROWS = 32
LOOKED_AT = 16
LOOKED_AT_OF_HUB = 10_000
"""Rows of the hub that decide what a column means."""
_LOG = logging.getLogger("tether.data")
UNUSED_ANSWERS = (
    "%s is read as prompts alone; %s look like answers and are not used. If they are, name them by "
    'data.columns, for example { prompt = "question", chosen = "good", rejected = "bad" }.'
)
UNUSED_COLUMNS = "%s: columns not used: %s"
_IDS = ("id", "task_id", "question_id", "prompt_id", "message_tree_id")


class Quarantine:
    """The rows that could not be used: how many, why, and the first few of them; and the columns
    that no reader used.

    Reasons read "category: detail" and are counted by category, so that their number stays small.

    Args:
        path: a file to which every bad row is appended as a JSON line, with file, line, reason and
            an excerpt of the row. If that fails, a `DataError`.
        keep: number of examples that are kept in memory.
    """

    def __init__(self, path: str | Path | None = None, keep: int = 20) -> None:
        self.count = 0
        self.reasons: Counter[str] = Counter()
        self.examples: list[Json] = []
        self.unused: Counter[str] = Counter()
        """Of usable rows: names of columns and of inner keys that were not used, each with the
        number of such rows.
        """
        self._path = None if path is None else Path(path)
        self._keep = keep

    def add(self, file: str, line: int | None, reason: str, row: object) -> None:
        """Put one row away; `row` is the parsed row, or the text where that failed. Without a line,
        `file` is the row's id.
        """
        self.count += 1
        self.reasons[reason.partition(": ")[0]] += 1
        if self._path is None and len(self.examples) >= self._keep:
            return
        place = {"id": file} if line is None else {"file": file, "line": line}
        entry = {**place, "reason": reason, "row": _excerpt(row)}
        if len(self.examples) < self._keep:
            self.examples.append(entry)
        if self._path is not None:
            try:
                append_jsonl(self._path, [entry])
            except OSError as error:
                raise DataError(
                    f"bad rows cannot be written to {self._path}: {error.strerror}. "
                    "Name another file.",
                ) from None

    def absorb(self, other: Quarantine) -> None:
        """Count the rows of another quarantine, which has a file of its own, here too."""
        self.count += other.count
        self.reasons.update(other.reasons)
        self.unused.update(other.unused)
        self.examples += other.examples[: self._keep - len(self.examples)]

    def top_reasons(self) -> str:
        """The commonest reasons with their counts, as a phrase."""
        return "; ".join(f"{reason} ({count})" for reason, count in self.reasons.most_common(3))

    def unused_columns(self, limit: int = 12) -> str:
        """The names of columns that were not used, as a phrase; empty if all were used."""
        more = f" and {len(self.unused) - limit} more" if len(self.unused) > limit else ""
        return ", ".join([*self.unused][:limit]) + more

    def summary(self) -> Json:
        """Count, reasons (commonest first) and examples as plain JSON values."""
        return {
            "count": self.count,
            "reasons": dict(self.reasons.most_common()),
            "examples": list(self.examples),
        }


def _excerpt(row: object) -> str:
    words = row if isinstance(row, str) else json.dumps(row, ensure_ascii=False, default=str)
    return words if len(words) <= 400 else words[:399] + "…"


def read(
    sources: Sources,
    kind: type[T],
    *,
    format: str = "auto",
    quarantine: Quarantine | None = None,
    strict: bool = False,
    limit: int | None = None,
    check: Callable[[T], None] | None = None,
    columns: Texts | None = None,
) -> Iterator[T]:
    """Stream the records of one kind out of files, folders and hub data sets.

    Paths and names are checked at once; rows are read on demand. Without `format`, the first good
    rows of a file decide its format. Files of another kind are converted if possible. A comparison
    gives its chosen side as a demonstration, and every row gives its prompt. Ids are unique: if an
    earlier row has the id, the place of the row is added to it.

    Args:
        kind: Prompt, Demonstration, Comparison, Feedback, StepLabels or Problem.
        quarantine: collects unusable rows and the names of unused columns; without it the log names
            both.
        strict: the first such row is an error instead.
        limit: stop after so many records.
        check: refuses a record by raising a `DataError`. The record goes to quarantine like a bad
            row.
        columns: names of a format for the files' own columns: {"prompt": "question", "answer":
            "reward_model.ground_truth"}; see `renamed`.

    Raises:
        MissingFileError: a path does not exist.
        DataError: a file is empty, damaged or of another kind, or none of its rows can be used;
            with `strict`, any bad row.
    """
    if kind not in KINDS:
        raise DataError(
            f"cannot read {kind!r}: it is not one of {', '.join(k.__name__ for k in KINDS)}.",
        )
    if limit is not None and limit < 0:
        raise DataError(f"limit is {limit}; it must be 0 or more, or None for all records.")
    layout = None if format == "auto" else format_named(format)
    files = _files(sources, columns, quarantine, strict=strict)
    records = (r for file in files for r in replace(file, check=check).records(kind, layout))
    return itertools.islice(records, limit)


def read_rows(
    sources: Sources,
    parse: Reader[T],
    quarantine: Quarantine | None = None,
    limit: int | None = None,
) -> Iterator[T]:
    """Stream the values that `parse` makes of the rows (the first `limit` of each file); rows that
    it refuses go to quarantine.

    Raises:
        MissingFileError, DataError: as `read`.
    """
    for file in _files(sources, None, quarantine):
        yield from file.values(itertools.islice(file.place.rows(), limit), parse, named=False)


def look(
    sources: Sequence[str],
    kind: type,
    *,
    format: str = "auto",
    strict: bool = False,
    columns: Texts | None = None,
) -> None:
    """Read the first record of each file, so that a file of another kind is an error before
    anything is trained.

    Data of the hub is left for when it is needed; of a folder with many files the first ones count.

    Raises:
        DataError: as `read` does.
    """
    layout = None if format == "auto" else format_named(format)
    local = [source for source in sources if not source.startswith("hub:")]
    files = _files(local, columns, Quarantine(keep=0), strict=strict) if local else ()
    for file in files[:LOOKED_AT]:
        next(file.records(kind, layout), None)


def detect_format(source: str | Path, columns: Texts | None = None) -> Format:
    """The format of a file or of a hub data set; `columns` as in `read`."""
    (file,) = _files(source, columns, Quarantine(keep=0))
    return detect(file.sniff()[1], None, file.place.name)


def _files(
    sources: Sources,
    columns: Texts | None,
    quarantine: Quarantine | None,
    *,
    strict: bool = False,
) -> list[_File]:
    """The files of the sources. Those of one source share what all of its rows say together."""
    seen: set[int] = set()
    files: list[_File] = []
    for _, group in itertools.groupby(places(sources), lambda place: place.source):
        own = [_File(place, quarantine, strict, seen, columns=columns or {}) for place in group]
        evidence = Evidence(own[0].place.source, partial(_rows_of, own))
        files += [replace(file, evidence=evidence) for file in own]
    return files


def _rows_of(files: Sequence[_File]) -> Iterator[Row]:
    """The good rows of all these files under a format's names; of the hub the first ones."""
    for file in files:
        most = LOOKED_AT_OF_HUB if file.place.source.startswith("hub:") else None
        with suppress(DataError):  # which is raised where the file is read
            for _, row in itertools.islice(gather(file.place.rows()), most):
                if isinstance(of_format := file.named(row), dict):
                    yield of_format


@dataclass
class _File:
    """One place as it is read: its rows, its bad rows, and its complaints."""

    place: Place
    quarantine: Quarantine | None
    strict: bool
    seen: set[int]
    _: KW_ONLY
    columns: Texts
    check: Callable[[Any], None] | None = None
    evidence: Evidence = field(default_factory=lambda: Evidence("", list))
    bad: Quarantine = field(default_factory=lambda: Quarantine(keep=1))
    num_records: int = 0

    def records(self, kind: type[T], layout: Format | None) -> Iterator[T]:
        head, good, rest = self.sniff()
        try:
            layout = layout or detect(good, kind, self.place.name)
            reader = kind_reader(layout, kind, self.place.name, good)
        except DataError:
            self._check_names(self.columns)
            raise
        if layout.name == "prompts" and (answers := answer_columns(good)):
            once(_LOG.warning, UNUSED_ANSWERS, self.place.name, ", ".join(answers))
        try:
            yield from self.values(itertools.chain(head, rest), reader, named=True)
        finally:
            self._log()
        if not self.num_records:
            hint = f"no row gave one, read as {layout.name}. Name its format if that is wrong."
            raise DataError(f"{self.place.name} holds no {KINDS[kind].name}: {hint}")

    def _log(self) -> None:
        """Name bad rows and unused columns, also where a caller stops before the last row."""
        if self.quarantine is not None or not self.num_records:
            return
        if self.bad.count:
            _LOG.warning(
                "%s: %d rows cannot be used: %s",
                self.place.name,
                self.bad.count,
                self.bad.top_reasons(),
            )
        if self.bad.unused:
            once(_LOG.info, UNUSED_COLUMNS, self.place.name, self.bad.unused_columns())

    def values(self, rows: Numbered, parse: Reader[T], *, named: bool) -> Iterator[T]:
        """Values that `parse` makes of these rows. Each value gets an id if `named` is set.

        Raises:
            DataError: none of them can be used.
        """
        empty = True
        for line, row in rows:
            empty = False
            if isinstance(row, BadRow):
                self.reject(line, row)
            else:
                yield from self._row(line, row, parse, named)
        if not self.num_records and (empty or self.bad.count):
            raise self._unusable()

    def sniff(self) -> tuple[list[tuple[int, Row | BadRow]], list[Row], Numbered]:
        """The first rows, the good ones among them under a format's names, and the stream of all
        that follows.

        Bad rows stay in their place, so everything is reported in the order of the file. If there
        are only bad rows, they are rejected on the way.

        Raises:
            DataError: there is no good row.
        """
        stream = gather(self.place.rows())
        while head := list(itertools.islice(stream, SNIFFED_ROWS)):
            named = [(line, row, self.named(row)) for line, row in head]
            if good := [row for _, _, row in named if not isinstance(row, BadRow | DataError)]:
                return head, good, stream
            for line, row, fault in named:
                self.reject(line, row, fault if isinstance(fault, DataError) else None)
        raise self._unusable()

    def named(self, row: Row | BadRow) -> Row | BadRow | DataError:
        """The row under a format's names, or the reason why it has none."""
        try:
            return row if isinstance(row, BadRow) else self._renamed(row)
        except DataError as error:
            return error

    def _renamed(self, row: Row) -> Row:
        return renamed(row, self.columns) if self.columns else row

    def reject(self, line: int, row: Row | BadRow, error: Exception | None = None) -> None:
        reason, content = (
            (row.reason, row.excerpt) if isinstance(row, BadRow) else (str(error), row)
        )
        if self.strict and not isinstance(error, LeftOutError):
            raise DataError(
                f"{self.place.name}, line {line}: {reason}. Mend or remove the row, "
                "or read without strict.",
            )
        for quarantine in (self.bad, self.quarantine):
            if quarantine is not None:
                quarantine.add(self.place.name, line, reason, content)

    def _row(self, line: int, row: Row, parse: Reader[T], named: bool) -> Iterator[T]:
        try:
            of_format = self.evidence.settled(self._renamed(row))
        except DataError as error:
            self.reject(line, row, error)
            return
        cells = Cells(of_format)
        own = identity(cells) if named else ""
        try:
            parts = list(parse(cells if named else of_format))
        except (DataError, OverflowError) as error:
            self._check_names(cells.unread())
            too_large = DataError("not a number: the row has one that is too large")
            self.reject(line, row, error if isinstance(error, DataError) else too_large)
            return
        self._check_names(cells.unread())
        if named and not parts:
            self.reject(line, row, DataError("no record: read in this format, the row gives none"))
        place = f"{self.place.stem}:{line}"
        name = self._unique(own, place) if own else place
        before = self.num_records
        try:
            for number, part in enumerate(parts, 1):
                try:
                    if isinstance(part, DataError):
                        raise part
                    if self.check is not None:
                        self.check(part)
                except DataError as error:
                    self.reject(line, row, error)
                    continue
                self.num_records += 1
                if not (named and isinstance(part, Record)):
                    yield part
                    continue
                several = len(parts) > 1
                part = replace(
                    part,
                    id=self._unique(f"{name}:{number}", place) if several else name,
                )
                is_asked = isinstance(part, Prompt | Problem | Demonstration)
                yield (
                    replace(part, row={own: of_format[own] for own in self.columns} | row)
                    if is_asked
                    else part
                )
        finally:
            if named and self.num_records > before:
                for quarantine in filter(None, (self.bad, self.quarantine)):
                    quarantine.unused.update(cells.unused())

    def _check_names(self, unread: Iterable[str]) -> None:
        """Refuse a name that `columns` gives and that nothing reads.

        Raises:
            DataError: there is one; the message offers the nearest names of formats.
        """
        if name := next((name for name in self._strange if name in unread), ""):
            raise DataError(
                f"data.columns gives a column the name {name!r}, which no format has "
                f"({self._strange[name]}).",
            )

    @cached_property
    def _strange(self) -> dict[str, str]:
        return (
            strange_names(self.columns, (name for one in FORMATS for name in one.columns.split()))
            if self.columns
            else {}
        )

    def _unique(self, name: str, place: str) -> str:
        """The name, with the place of its row if an earlier one has it."""
        while short_hash(name) in self.seen:
            name = f"{name}@{place}"
        self.seen.add(short_hash(name))
        return name

    def _unusable(self) -> DataError:
        if not self.bad.count:
            return DataError(
                f"{self.place.name} is empty: it holds no rows. Give a file that has some.",
            )
        first = self.bad.examples[0]
        return DataError(
            f"{self.place.name}: none of its {self.bad.count} rows can be used: "
            f"{self.bad.top_reasons()}. The first, line {first['line']}: {first['reason']}. Mend "
            "the rows, or name their format if that is another.",
        )


def answer_columns(rows: Iterable[Row]) -> tuple[str, ...]:
    """The columns that by their names hold answers, and by their contents could."""
    columns = dict.fromkeys(
        name
        for row in rows
        for name, value in row.items()
        if name and isinstance(value, str | list) and value
    )
    return tuple(name for name in columns if answer_like(name))


def identity(row: Row) -> str:
    """The name that a row brings along, or nothing."""
    name = next(
        (name for name in _IDS if isinstance(own := dict.get(row, name), str | int) and own != ""),
        "",
    )
    return str(row[name]) if name else ""


def group_of(record: Any) -> str:
    """The name of the prompt a record belongs to: its own group, else a digest of the prompt
    without case and white space.

    A demonstration belongs to the text before its first reply. All replies are learned, and
    conversations with the same beginning may share more than that. A conversation that begins with
    a reply is its own group.
    """
    if isinstance(record, Demonstration):
        first = next(
            (i for i, turn in enumerate(record.messages) if turn.role == "assistant"),
            len(record.messages),
        )
        return prompt_digest(record.messages[:first] or record.messages)
    return (hasattr(record, "group") and record.group) or prompt_digest(prompt_of(record))


def split_by_group(rows: Iterable[T], fraction: float, seed: int = 0) -> tuple[list[T], list[T]]:
    """Two parts of `rows` in their order, the second with about `fraction` of the groups; no group
    is on both sides.

    The side is a function of seed and group alone, so it does not change when rows are added, taken
    away or reordered.

    Raises:
        DataError: `fraction` is not between 0 and 1.
    """
    if not 0.0 <= fraction <= 1.0:
        raise DataError(
            f"a part of {fraction} of the data is impossible; fraction lies between 0 and 1.",
        )
    parts: tuple[list[T], list[T]] = ([], [])
    for row in rows:
        parts[short_hash(str(seed), group_of(row)) < fraction * 2**64].append(row)
    return parts
