"""The files of a folder that hold rows: one split of a data set, without the files that describe
it; the others are named.

Folders are people's own, snapshots of the hub
(https://huggingface.co/docs/hub/datasets-data-files-configuration), or written by `save_to_disk` of
`datasets`.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tether.core.errors import DataError

SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
ENDINGS = f"{', '.join(SUFFIXES)}, each also .gz or .zst"
TRAIN = "train"
_SPLITS = {
    TRAIN: "training",
    "validation": "valid val dev",
    "test": "testing eval evaluation heldout",
}
SPLIT_OF = {word: split for split, words in _SPLITS.items() for word in (split, *words.split())}
"""The split that a word in a file's name means."""
_SHARD = re.compile(r"(?P<split>\w[\w.-]*?)-\d{5}-of-\d{5}(?:-[0-9a-f]+)?\..*")
_WORD = re.compile(r"[a-z]+")
_OTHER_KINDS = {
    ".xlsx .xls .ods .numbers": "is a spreadsheet. Export it as CSV",
    ".zip .tar .tgz .7z .rar .xz .bz2 .lz4": "is an archive. Unpack it",
    ".yaml .yml .toml .xml": "is no table of rows. Write a JSON object a line",
    ".pkl .pickle .pt .pth .joblib .npy .npz .h5 .hdf5": "holds objects of a program. Save rows as JSON lines or Parquet",
    ".db .sqlite .sqlite3 .duckdb": "is a database. Export a table as CSV or Parquet",
    ".feather .orc .avro .tfrecord": "is a table of a kind that is not read. Save it as Parquet",
    ".docx .doc .pdf .rtf .html .htm": "is a document. Write a JSON object a line",
}
_ADVICE = {
    suffix: advice for suffixes, advice in _OTHER_KINDS.items() for suffix in suffixes.split()
}
_DESCRIPTIONS = (
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
    "croissant.json",
    "requirements.txt",
)
_TEXTS = re.compile(r"(readme|license|licence|notice|citation|changelog|authors)\b.*")


@dataclass(frozen=True)
class FilesOfFolder:
    """The files to read, in sorted order, and why others are left out."""

    files: tuple[Path, ...]
    left_out: Mapping[Path, str] = field(default_factory=dict)


def suffix_of(path: Path) -> str:
    """The ending that gives a file's kind."""
    return Path(path.name.lower().removesuffix(".gz").removesuffix(".zst")).suffix


def unknown_kind(path: Path) -> str:
    """The sentence about a file that is not read by its ending."""
    return (
        f"{_advice(path)}."
        if _advice(path)
        else f"unknown kind of file. Data files end on {ENDINGS}."
    )


def _advice(path: Path) -> str:
    return _ADVICE.get(Path(path.name.lower()).suffix) or _ADVICE.get(suffix_of(path), "")


def data_files(path: Path) -> FilesOfFolder:
    """The files of a folder, of one split.

    Raises:
        DataError: it holds no data file, or several splits none of which is the training's.
    """
    if (saved := path / "dataset_dict.json").is_file():
        return data_files(path / _only(_listed(saved, "splits"), path, "splits of a DatasetDict"))
    if (path / "snapshots").is_dir() and (path / "refs").is_dir():
        return data_files(path / "snapshots" / _snapshot(path))
    if (saved := path / "state.json").is_file():
        return FilesOfFolder(
            tuple(path / shard["filename"] for shard in _listed(saved, "_data_files")),
        )
    everything = sorted(p for p in path.rglob("*") if p.is_file() and not _is_hidden(p, path))
    files = [file for file in everything if not _describes(file)]
    rows = [file for file in files if suffix_of(file) in SUFFIXES]
    if not rows:
        near = "; ".join(f"{file.name} {unknown_kind(file)}" for file in files if _advice(file))
        raise DataError(
            f"{path} holds no data file. Data files end on {ENDINGS}. {near:.200}".strip(),
        )
    others = {file: unknown_kind(file) for file in files if suffix_of(file) not in SUFFIXES}
    described = (file for file in everything if _describes(file) and suffix_of(file) in SUFFIXES)
    return _one_split(path, rows, others | dict.fromkeys(described, "describes the data"))


def _one_split(path: Path, files: Sequence[Path], others: Mapping[Path, str]) -> FilesOfFolder:
    by_split: dict[str, list[Path]] = defaultdict(list)
    for file in files:
        by_split[split_of(file.relative_to(path))].append(file)
    named = [split for split in by_split if split]
    if len(by_split) < 2 or (named == [TRAIN]):
        return FilesOfFolder(tuple(files), others)
    read = by_split.get("", []) + by_split.get(TRAIN, [])
    if not read:
        first = ", ".join(f"{split} ({by_split[split][0].name})" for split in sorted(named))
        raise DataError(f"{path} holds several splits: {first}. Name the files of one of them.")
    given = "training rows" if TRAIN in by_split else "files without a split's name"
    reason = "another split ({}): of a folder with several, the {} are read"
    left_out = {
        file: reason.format(split, given)
        for split in named
        if split != TRAIN
        for file in by_split[split]
    }
    return FilesOfFolder(tuple(sorted(read)), {**left_out, **others})


def split_of(file: Path) -> str:
    """The split that a file's name, or else a folder above it, says; empty if none does."""
    if shard := _SHARD.fullmatch(file.name):
        name = shard["split"].lower()
        return (
            SPLIT_OF.get(name, name)
            if any(word in SPLIT_OF for word in _WORD.findall(name))
            else _split_in(file.parts[:-1])
        )
    return _split_in(file.parts)


def _split_in(parts: Iterable[str]) -> str:
    for part in reversed([*parts]):
        if splits := [SPLIT_OF[word] for word in _WORD.findall(part.lower()) if word in SPLIT_OF]:
            return splits[0]
    return ""


def _only(names: Sequence[str], path: Path, kind: str) -> str:
    if len(names) == 1:
        return names[0]
    raise DataError(
        f"{path} holds several {kind}: {', '.join(names)}. Name the folder of one of "
        f"them: {path / names[0]}",
    )


def _snapshot(path: Path) -> str:
    """Of a data set in the cache of the hub, the version that `main` was last."""
    main = path / "refs" / "main"
    return (
        main.read_text().strip()
        if main.is_file()
        else _only(sorted(os.listdir(path / "snapshots")), path, "snapshots")
    )


def _listed(file: Path, key: str) -> list:
    """A list in a file that `save_to_disk` wrote.

    Raises:
        DataError: it is not there.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, KeyError, TypeError):
        values = None
    if not isinstance(values, list) or not values:
        raise DataError(f"{file} is damaged: it has no list {key}. Save the data set again.")
    return values


def _is_hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _describes(path: Path) -> bool:
    name = path.name.lower()
    return name in _DESCRIPTIONS or _TEXTS.fullmatch(name) is not None
