"""Containers of rows: files of several kinds, folders of them, data sets on the hub; each becomes a
stream of numbered rows.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import logging
import os
import re
import reprlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO

from tether.core.errors import DataError, MissingFileError, one_line
from tether.core.once import once
from tether.core.types import Facts, Row
from tether.data.formats import json_rows
from tether.data.formats.arrow import check_growth, table_rows, without_added_nulls
from tether.data.formats.folders import SUFFIXES, data_files, suffix_of, unknown_kind
from tether.data.formats.json_rows import BadRow, Numbered
from tether.data.formats.json_tables import no_column_twice, unwrapped

Sources = str | Path | Sequence[str | Path]
"""Files, folders, and data sets of the hub."""
_NAMED = 8
"""Files that are left out for one reason, of which the log has the names."""
_LOG = logging.getLogger("tether.data")
_HUB = re.compile(
    r"hub:(?P<name>\w[\w.-]*/\w[\w.-]*)(?:/(?P<config>[\w.-]+))?(?::(?P<split>[\w.\[\]%:+-]+))?",
)
_LONGEST_CELL = 1 << 24  # an unclosed quote would otherwise read the rest of the file into one cell
_FOREIGN = {
    codecs.BOM_UTF16_LE: "text in UTF-16. Save it as UTF-8",
    codecs.BOM_UTF16_BE: "text in UTF-16. Save it as UTF-8",
    b"PAR1": "a Parquet file. Let its name end on .parquet",
    b"PK\x03\x04": "a zip archive or a spreadsheet. Unpack it, or export it as CSV",
    b"\xfd7zXZ": "packed with xz. Unpack it, or pack it with gzip or zstd",
    b"BZh9": "packed with bzip2. Unpack it, or pack it with gzip or zstd",
    b"\x1f\x8b": "packed twice. Unpack it once",
    b"\x28\xb5\x2f\xfd": "packed twice. Unpack it once",
}
"""First bytes of files that are no text in UTF-8."""
_BINARY = "binary, or text in UTF-16 or UTF-32. Export it as JSON lines in UTF-8"


@dataclass(frozen=True)
class Place:
    """One file, or one split of a data set on the hub. `name` is for messages, `stem` for the ids
    of its rows.

    `numbered` opens it. `source` is the file, the folder or the data set that names it.
    """

    name: str
    stem: str
    numbered: Callable[[], Numbered]
    source: str = ""

    def rows(self) -> Numbered:
        """The rows with their 1-based numbers: the line in text files, the element or row
        elsewhere.

        Raises:
            DataError: the file is cut off, damaged or cannot be read.
        """
        for number, row in self.numbered():
            reason = "" if isinstance(row, BadRow) else json_rows.fault(row)
            yield number, BadRow(reason, reprlib.repr(row)) if reason else row


def places(sources: Sources) -> list[Place]:
    """All files and hub data sets that the sources name; of a folder every known file, in sorted
    order.

    Raises:
        MissingFileError: a path does not exist.
        DataError: nothing is named, a folder holds no data file, or the kind of a file is unknown.
    """
    if isinstance(sources, str | Path):
        sources = [sources]
    all_places = [
        replace(place, source=str(source)) for source in sources for place in _resolve(source)
    ]
    if not all_places:
        raise DataError("no data source is given. Name a file, a folder or hub:owner/name.")
    totals = Counter(place.stem for place in all_places)
    counts = Counter()
    for index, place in enumerate(all_places):  # so that no two rows have one id
        counts[place.stem] += 1
        if totals[place.stem] > 1:
            all_places[index] = replace(place, stem=f"{place.stem}#{counts[place.stem]}")
    return all_places


def left_out(sources: Sources) -> dict[str, str]:
    """The files of folders among the sources that are not read, each with the reason; `places`
    names them in the log.
    """
    named = [sources] if isinstance(sources, str | Path) else sources
    folders = (Path(source).expanduser() for source in named if not str(source).startswith("hub:"))
    return {
        str(file): why
        for path in folders
        if path.is_dir()
        for file, why in data_files(path).left_out.items()
    }


def _resolve(source: str | Path) -> list[Place]:
    if isinstance(source, str) and source.startswith("hub:"):
        return [_hub(source)]
    if not str(source).strip():
        raise DataError(
            "the name of a data source is empty. Name a file, a folder or hub:owner/name.",
        )
    try:
        path = Path(source).expanduser()
        # `rglob` is silent about folders that it may not read
        entries = os.listdir(path) if path.is_dir() else None
        exists = path.exists()
        is_file = path.is_file()
    except (OSError, RuntimeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise DataError(
            f"{source!s:.200} cannot be read: {reason}. Mend that, or name another file or folder.",
        ) from None
    if entries is not None:
        folder = data_files(path)
        for reason in dict.fromkeys(folder.left_out.values()):
            names = [
                str(file.relative_to(path))
                for file, why in folder.left_out.items()
                if why == reason
            ]
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            once(
                _LOG.warning,
                "%s: left out: %s%s: %s",
                str(path),
                ", ".join(names[:_NAMED]),
                more,
                reason,
            )
        return [_file(file) for file in folder.files]
    if not exists:
        raise MissingFileError(
            f"data file not found: {path}. Give the path of a file or a folder, or hub:owner/name.",
        )
    if not is_file:
        raise DataError(
            f"{path} is neither a file nor a folder, and data is read more than once. "
            "Save it in a file.",
        )
    if suffix_of(path) not in SUFFIXES:
        raise DataError(f"{path}: {unknown_kind(path)}")
    return [_file(path)]


def _hub(source: str) -> Place:
    """The data set in hub:owner/name, hub:owner/name:split or hub:owner/name/config:split; the
    split is train unless named.
    """
    address = _HUB.fullmatch(source)
    if address is None:
        raise DataError(
            f"{source!r} is no data set on the hub. Write hub:owner/name, hub:owner/name:split or "
            "hub:owner/name/config:split.",
        )
    name, config, split = address.groups()
    return Place(
        source,
        name.rpartition("/")[2],
        partial(_hub_rows, name, config, split or "train"),
    )


def _hub_rows(
    name: str,
    config: str | None,
    split: str,
) -> Numbered:
    """The rows of a split as they arrive, streamed through `datasets`."""
    try:
        stream = _stream(name, config, split)
        for number, row in enumerate(stream, 1):
            yield number, without_added_nulls(dict(row))
    except Exception as error:
        place = f"{name}{'/' + config if config else ''}, split {split}"
        raise DataError(
            f"the hub data set {place} cannot be read: {type(error).__name__}: {str(error)[:300]}. "
            "Check the name and the connection; without one, download it elsewhere and give the "
            "path of its files.",
        ) from error


def _stream(
    name: str,
    config: str | None,
    split: str,
) -> Iterable[Facts]:
    """The rows of a split; a configuration that a data set does not have may be one of its
    folders.
    """
    import datasets

    try:
        return datasets.load_dataset(name, config, split=split, streaming=True)
    except ValueError as error:
        if config is None or "BuilderConfig" not in str(error):
            raise
    return datasets.load_dataset(name, data_dir=config, split=split, streaming=True)


def _file(path: Path) -> Place:
    return Place(
        str(path),
        path.name[: path.name.lower().rindex(suffix_of(path))],
        partial(_file_rows, path),
    )


def _file_rows(path: Path) -> Numbered:
    try:
        with path.open("rb") as stream:
            yield from _rows(_unpacked(stream), suffix_of(path), str(path))
    except (EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise DataError(
                f"{path} cannot be read: {error.strerror}. Mend that, or name another file.",
            ) from error
        raise DataError(
            f"{path} is cut off or damaged ({one_line(error)}). Copy or download the file again.",
        ) from error


def _unpacked(stream: io.BufferedReader) -> io.BufferedReader:
    """The bytes of a file, unpacked if they begin as gzip or zstd does, whatever the name says."""
    head = stream.peek(4)[:4]
    if head.startswith(b"\x1f\x8b"):
        return io.BufferedReader(_Unpacking(gzip.GzipFile(fileobj=stream), stream), json_rows.CHUNK)
    if head == b"\x28\xb5\x2f\xfd":
        import pyarrow as pa

        return io.BufferedReader(
            _Unpacking(pa.CompressedInputStream(stream, "zstd"), stream),
            json_rows.CHUNK,
        )
    return stream


class _Unpacking(io.RawIOBase):
    """An unpacked stream that ends with an error where a small file becomes very large: texts
    shrink to a tenth or so.
    """

    def __init__(
        self,
        unpacked: io.BufferedIOBase,
        packed: io.BufferedReader,
    ) -> None:
        self.unpacked = unpacked
        self.packed = packed
        self.read_bytes = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self.unpacked.seekable()

    def seek(self, place: int, whence: int = 0, /) -> int:
        return self.unpacked.seek(place, whence)

    def readinto(self, buffer: memoryview, /) -> int:
        """See io.RawIOBase.

        Raises:
            DataError: the file grows beyond all measure.
        """
        content = self.unpacked.read(len(buffer))
        buffer[: len(content)] = content
        self.read_bytes += len(content)
        check_growth(self.packed.name, self.read_bytes, self.packed.tell())
        return len(content)


def _rows(
    stream: io.BufferedReader,
    suffix: str,
    where: str,
) -> Numbered:
    if suffix in (".parquet", ".arrow"):
        return table_rows(stream, suffix, where)
    head = bytes(stream.peek(8)[:8])
    foreign = next(
        (what for begin, what in _FOREIGN.items() if head.startswith(begin)),
        _BINARY if b"\0" in head else "",
    )
    if foreign:
        raise DataError(f"{where} is {foreign}.")
    if suffix in (".csv", ".tsv"):
        return _table(stream, "\t" if suffix == ".tsv" else ",", where)
    if suffix == ".txt":
        return json_rows.text_lines(stream, where, lambda line: {"prompt": line})
    rows = json_rows.rows(stream, suffix != ".json", where)
    return unwrapped(rows, where) if suffix == ".json" else rows


def _table(
    stream: IO[bytes],
    delimiter: str,
    where: str,
) -> Numbered:
    """The number of a row is the line on which it begins; cells may span lines."""
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL))
    lines = io.TextIOWrapper(
        stream,
        encoding="utf-8-sig",
        errors="surrogateescape",
        newline="",
    )
    reader = csv.reader(lines, delimiter=delimiter)
    try:
        header = list(no_column_twice(next(reader, []), where))
        if len(header) == 1 and (other := next((mark for mark in ";\t|" if mark in header[0]), "")):
            raise DataError(
                f"{where}: its columns are parted by {other!r}. Part them by commas, "
                "or by tabs in a .tsv file.",
            )
        begins = reader.line_num + 1
        for cells in reader:
            if cells:
                yield begins, _cells(cells, header)
            begins = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{where}, line {reader.line_num}: {error}. A quote is probably not closed.",
        ) from error


def _cells(cells: list[str], header: list[str]) -> Row | BadRow:
    if len(cells) != len(header):
        return BadRow(
            f"uneven row: {len(cells)} cells under {len(header)} columns",
            ascii("|".join(cells)[:200]),
        )
    return dict(zip(header, cells, strict=True))
