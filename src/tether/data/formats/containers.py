"""Where rows lie: files of several kinds, folders of them, data sets on the hub; each becomes a stream of numbered rows."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tether.core.errors import DataError, MissingFileError
from tether.data.formats import hub, json_rows
from tether.data.formats.format import Row
from tether.data.formats.json_rows import BadRow

Numbered = Iterator[tuple[int, Row | BadRow]]

SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".txt")
_LONGEST_CELL = 1 << 24  # an unclosed quote would otherwise read the rest of the file into one cell
_BATCH = 256


@dataclass(frozen=True, slots=True)
class Place:
    """One file, or one split of a data set on the hub. `name` is for messages, `stem` for the ids of its rows."""

    name: str
    stem: str
    location: Path | hub.Address

    def rows(self) -> Numbered:
        """The rows with their 1-based numbers: the line in text files, the element or row elsewhere.

        Raises:
            DataError: the file is cut off, damaged or cannot be read.
        """
        if isinstance(self.location, hub.Address):
            yield from hub.rows(self.location)
            return
        try:
            with closing(_binary(self.location)) as stream:
                yield from _rows(stream, self.location, self.name)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{self.name} is cut off or damaged ({error}). Copy or download the file again.") from error
        except OSError as error:
            raise DataError(f"{self.name} cannot be read: {error.strerror or error}.") from error


def places(sources: str | Path | Sequence[str | Path]) -> list[Place]:
    """All files and hub data sets that the sources name; of a folder every known file, in sorted order.

    Raises:
        MissingFileError: a path does not exist.
        DataError: nothing is named, a folder holds no data file, or the kind of a file is unknown.
    """
    if isinstance(sources, str | Path):
        sources = [sources]
    found = [place for source in sources for place in _resolve(source)]
    if not found:
        raise DataError("no data source is given. Name a file, a folder or hub:owner/name.")
    return found


def _resolve(source: str | Path) -> list[Place]:
    if isinstance(source, str) and source.startswith(hub.SCHEME):
        address = hub.parse(source)
        return [Place(source, address.name.rpartition("/")[2], address)]
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and _suffix(p) in SUFFIXES and not _hidden(p, path))
        if not files:
            raise DataError(f"{path} holds no data file ({', '.join(SUFFIXES)}, each also .gz).")
        return [_file(file) for file in files]
    if not path.exists():
        raise MissingFileError(f"data file not found: {path}. Give the path of a file or a folder, or hub:owner/name.")
    if _suffix(path) not in SUFFIXES:
        raise DataError(f"{path}: unknown kind of file. Data files end on {', '.join(SUFFIXES)}, each also .gz.")
    return [_file(path)]


def _file(path: Path) -> Place:
    stem = path.name
    for ending in (".gz", _suffix(path)):
        if stem.lower().endswith(ending):
            stem = stem[: -len(ending)]
    return Place(str(path), stem, path)


def _suffix(path: Path) -> str:
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _binary(path: Path) -> Any:
    """The bytes of a file, unpacked if they begin as gzip does, whatever the name says."""
    stream = path.open("rb")
    if stream.peek(2)[:2] == b"\x1f\x8b":
        return io.BufferedReader(_Unpacked(stream), json_rows.CHUNK)
    return stream


class _Unpacked(gzip.GzipFile):
    """A gzip stream that closes the file below it."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(fileobj=stream, mode="rb")
        self._below = stream

    def close(self) -> None:
        super().close()
        self._below.close()


def _rows(stream: Any, path: Path, where: str) -> Numbered:
    suffix = _suffix(path)
    if suffix == ".parquet":
        return _parquet(stream, where)
    if suffix in (".csv", ".tsv"):
        return _table(stream, "\t" if suffix == ".tsv" else ",", where)
    if suffix == ".txt":
        return _prompt_lines(stream)
    return json_rows.rows(stream, suffix != ".json", where)


def _prompt_lines(stream: IO[bytes]) -> Numbered:
    for number, line in enumerate(stream, 1):
        try:
            words = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            yield number, BadRow(f"not UTF-8: byte {line[error.start]:#04x} at {error.start}", repr(line[:200]))
            continue
        if words:
            yield number, {"prompt": words}


def _table(stream: IO[bytes], delimiter: str, where: str) -> Numbered:
    """The number of a row is the line on which it begins; cells may span lines."""
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL))
    lines = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    reader = csv.reader(lines, delimiter=delimiter)
    try:
        header = next(reader, [])
        begins = reader.line_num + 1
        for cells in reader:
            if cells:
                yield begins, _cells(cells, header)
            begins = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{where}, line {reader.line_num}: {error}. A quote is probably not closed.") from error


def _cells(cells: list[str], header: list[str]) -> Row | BadRow:
    whole = "|".join(cells)
    if len(cells) != len(header):
        return BadRow(f"uneven row: {len(cells)} cells under {len(header)} columns", ascii(whole[:200]))
    try:
        whole.encode("utf-8")
    except UnicodeEncodeError:
        return BadRow("not UTF-8: undecodable byte", ascii(whole[:200]))
    return dict(zip(header, cells, strict=True))


def _parquet(stream: Any, where: str) -> Numbered:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DataError(f"{where}: Parquet files need pyarrow. Install it with `pip install pyarrow`.") from error
    number = 0
    try:
        for batch in pq.ParquetFile(stream).iter_batches(batch_size=_BATCH, use_threads=False):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except pa.ArrowException as error:
        raise DataError(f"{where}: not a readable Parquet file ({error}). Copy or download the file again.") from error
