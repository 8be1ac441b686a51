"""The files of a folder that hold rows: one split of a data set, without the files that describe
it; the others are named.

Folders are people's own, snapshots of the hub
(https://huggingface.co/docs/hub/datasets-data-files-configuration,
https://huggingface.co/docs/hub/datasets-manual-configuration), or written by `save_to_disk` of
`datasets`.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tether.core.errors import DataError, one_line
from tether.core.types import Facts
from tether.data.formats.table import LISTS, TABLES

README = "README.md"
_HEAD = re.compile(r"^configs\s*:", re.MULTILINE)
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
_ADVICE: dict[str, str] = {
    suffix: advice
    for suffixes, advice in TABLES["other_files"].items()
    for suffix in suffixes.split()
}
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
        return data_files(
            path
            / _only(
                _listed(saved, "splits"),
                path,
                "splits of a DatasetDict",
            ),
        )
    if (path / "snapshots").is_dir() and (path / "refs").is_dir():
        return data_files(path / "snapshots" / _snapshot(path))
    if (saved := path / "state.json").is_file():
        return FilesOfFolder(
            tuple(path / shard["filename"] for shard in _listed(saved, "_data_files")),
        )
    everything = sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and not any(p.startswith(".") for p in file.relative_to(path).parts)
    )
    files = [file for file in everything if not _describes(file)]
    rows = [file for file in files if suffix_of(file) in SUFFIXES]
    if not rows:
        near = "; ".join(f"{file.name} {unknown_kind(file)}" for file in files if _advice(file))
        raise DataError(
            f"{path} holds no data file. Data files end on {ENDINGS}. {near:.200}".strip(),
        )
    by_split = _splits(path, rows)
    others = {file: unknown_kind(file) for file in files if suffix_of(file) not in SUFFIXES}
    described = (file for file in everything if _describes(file) and suffix_of(file) in SUFFIXES)
    others |= dict.fromkeys(described, "describes the data")
    unnamed = sorted(set(rows).difference(*by_split.values()))
    others |= dict.fromkeys(unnamed, f"{README} has it in another configuration, or in none")
    return _one_split(path, by_split, others)


def _splits(path: Path, rows: Sequence[Path]) -> Mapping[str, Sequence[Path]]:
    """The files of each split: as README.md has them, else by the names of files and folders."""
    folder, given = configured(path)
    by_split: dict[str, list[Path]] = defaultdict(list)
    for split, named in given.items():
        by_split[SPLIT_OF.get(split.lower(), split)] += [
            f for f in named if suffix_of(f) in SUFFIXES
        ]
    for file in () if given else rows:
        if folder in file.parents:
            by_split[split_of(file.relative_to(path))].append(file)
    return by_split


def _one_split(
    path: Path,
    by_split: Mapping[str, Sequence[Path]],
    others: Mapping[Path, str],
) -> FilesOfFolder:
    named = [split for split in by_split if split]
    one = len(by_split) < 2 or named == [TRAIN]
    read = [
        file for split, files in by_split.items() if one or split in ("", TRAIN) for file in files
    ]
    if not read:
        shown = (
            f"{s} ({by_split[s][0].name if by_split[s] else 'no file'})" for s in sorted(named)
        )
        several = len(by_split) > 1 and TRAIN not in named
        what = "several splits" if several else f"none of the files that {README} names"
        raise DataError(
            f"{path} holds {what}: {', '.join(shown)}. Name the files of one of them.",
        )
    given = "training rows" if TRAIN in by_split else "files without a split's name"
    reason = "another split ({}): of a folder with several, the {} are read"
    left_out = {
        file: reason.format(split, given)
        for split in named
        if not one and split != TRAIN
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


def _only(
    names: Sequence[str],
    path: Path,
    kind: str,
) -> str:
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


def _describes(path: Path) -> bool:
    name = path.name.lower()
    return name in LISTS["descriptions"] or _TEXTS.fullmatch(name) is not None


def configured(path: Path) -> tuple[Path, Mapping[str, Sequence[Path]]]:
    """The folder of the rows and, where the head of README.md names them, the files of each split.

    Raises:
        DataError: the head cannot be read, or gives several configurations of which none is the
            default.
    """
    readme = path / README
    if not readme.is_file() or not _HEAD.search(readme.read_text("utf-8", "replace")):
        return path, {}
    from huggingface_hub import metadata_load

    try:
        given = (metadata_load(readme) or {}).get("configs")
        return _resolved(path, _default(given)) if given else (path, {})
    except Exception as error:
        raise DataError(
            f"{readme}: the configurations in its head cannot be followed ({one_line(error)}). Mend "
            "the head, or name files in place of the folder.",
        ) from error


def _default(given: Sequence[Facts]) -> Facts:
    """The only configuration, or the default one.

    Raises:
        ValueError: none of several is the default.
    """
    default = [own for own in given if own.get("default") or own.get("config_name") == "default"]
    if len(given) > 1 and len(default) != 1:
        files = (f"{own['config_name']} ({own.get('data_files', 'a folder')})" for own in given)
        raise ValueError(f"none of several is the default: {'; '.join(files):.600}")
    return (default or given)[0]


def _resolved(path: Path, own: Facts) -> tuple[Path, Mapping[str, Sequence[Path]]]:
    from datasets.data_files import resolve_pattern, sanitize_patterns

    if "data_files" not in own:
        return path / (own.get("data_dir") or ""), {}
    by_split = {}
    for split, patterns in sanitize_patterns(own["data_files"]).items():
        files: dict[str, None] = {}
        for pattern in patterns:
            with suppress(FileNotFoundError):  # of a split that was not downloaded
                files |= dict.fromkeys(resolve_pattern(pattern, str(path.absolute())))
        by_split[split] = [path / os.path.relpath(file, path) for file in files]
    return path, by_split
