"""The run directory: everything a run leaves behind, readable without tether.

- config.json: the resolved config
- manifest.json: versions, seeds, digests
- metrics.jsonl: one object a step
- samples.jsonl: texts, with the step they come from, and the turns of episodes
- tokens.jsonl: numbers of a few samples' tokens
- heldout.jsonl: scores on held-out prompts
- evaluations.jsonl: results of each evaluator
- alarms.jsonl: alarms of the detectors
- summary.json: the results of the run
- checkpoints/: see learner.checkpoint
- model/, policy/: the result
- best/: weights that a judge kept
- skipped/: updates that were left out
- report.html: the page, in the folder of the whole run
- .dashboard.json: tags and a note of the dashboard's users, which no run reads
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from difflib import SequenceMatcher
from functools import cache
from importlib import metadata
from pathlib import Path

from pydantic_core import to_json

from tether import __version__
from tether.core.digest import digest
from tether.core.errors import MissingFileError, RunError
from tether.core.keeping import entries, flush_all, make_folder, own_file, write_whole
from tether.core.secrets import redact_addresses, redact_value
from tether.core.types import Alarm, Entries, Facts, Json, JsonValue

ENGINE = "engine"
"""Of a config: what samples. It may change from one start to the next, and its folder holds no
result.
"""
MAY_CHANGE = (ENGINE, "budget")
"""Keys of a section that may change from one start to the next."""
Change = tuple[str, JsonValue, JsonValue]
"""A setting that differs from the first start's: key, former value, new value."""
BESIDE = ("log.txt", "command.json")
"""Files that a folder may hold when it becomes a run directory: those of the program that started
the run.
"""
SWEEP = "sweep.json"
"""The file of a run that names the combinations of its sweep."""
TOKENS = "tokens.jsonl"
"""Numbers of single tokens, of a few samples a step."""
ROUNDS = "round-[0-9]*"
"""The folders of rounds, whether of a stage or of a recipe that repeats."""
EVALUATIONS = "evaluations.jsonl"
RECORDS = (
    "metrics.jsonl",
    "samples.jsonl",
    "heldout.jsonl",
    EVALUATIONS,
    "alarms.jsonl",
    TOKENS,
)
REPORTED_PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "tokenizers",
    "safetensors",
    "datasets",
    "numpy",
    "pydantic",
)


def check_folder(path: Path) -> None:
    """Look whether a folder for a run is there or can be made; nothing is written.

    Raises:
        RunError: a file is in its place or above it, or the system refuses the path.
    """
    try:
        place = next(one for one in (path, *path.parents) if one.exists() or one.is_symlink())
        fault = "" if place.is_dir() else f"{place} is no folder"
    except StopIteration:  # the working directory was removed
        fault = "the working directory is gone"
    except OSError as error:
        fault = error.strerror or str(error)
    if fault:
        raise RunError(
            f"{path} cannot be a run directory: {fault}. Choose another path with run=PATH.",
        )


def made_folder(path: Path) -> Path:
    """The folder of a run, made with those above it where it is not there.

    Raises:
        RunError: see `check_folder`.
    """
    check_folder(path)
    make_folder(path)
    return path


def write_json(path: str | Path, value: object) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of either."""
    write_whole(Path(path), _json(value, indent=2))


def write_jsonl(path: str | Path, rows: Iterable[Entries]) -> None:
    """The same for a JSON object a line."""
    write_whole(Path(path), b"".join(map(_json, rows)))


def append_jsonl(path: Path, rows: Iterable[Entries]) -> None:
    """Add lines; a last one that was cut by a crash goes."""
    with own_file(path) as file:
        if size := file.seek(0, os.SEEK_END):
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        file.write(b"".join(map(_json, rows)))


def _json(value: object, indent: int | None = None) -> bytes:
    """A value and a line feed. JSON has neither NaN nor infinity: such numbers become null, at any
    depth.
    """
    return to_json(value, indent=indent, inf_nan_mode="null", fallback=_plain) + b"\n"


def _plain(value: JsonValue) -> JsonValue:
    """A value that JSON and pydantic do not know: a mapping, a number of numpy or torch, or
    whatever its text says.
    """
    if isinstance(value, Mapping):
        return dict(value)
    return value.item() if hasattr(value, "item") else str(value)


def read_json(path: str | Path) -> JsonValue:
    """Read JSON, with an error that names the file."""
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(
            f"{path} does not exist. Is {path.parent} a run directory of tether?",
        ) from None
    except json.JSONDecodeError as error:
        raise RunError(
            f"{path} is damaged ({error}). Delete it, or restore it from a copy.",
        ) from error


def read_if_there(path: Path) -> Json:
    """The values of a JSON file; none where there is no file."""
    return read_json(path) if path.is_file() else {}


def read_jsonl(path: str | Path) -> Iterator[Json]:
    """The complete lines of a JSONL file; a last line cut by a crash is left out.

    Raises:
        RunError: a line holds no JSON; the message has its number.
    """
    path = Path(path)
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if line.endswith("\n"):
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise RunError(
                        f"{path}, line {number}, is damaged ({error}). Remove the line, or "
                        "restore the file from a copy.",
                    ) from error


def in_sequence(rounds: Sequence[Sequence[Json]]) -> list[Json]:
    """The rows of rounds as those of one training: steps count on, and every row has the number of
    its round.
    """
    rows = []
    before = 0
    for number, own in enumerate(rounds, 1):
        rows += [{**row, "step": before + row.get("step", 0), "round": number} for row in own]
        before = max([before, *(row["step"] for row in rows[-len(own) :] if own)])
    return rows


def stage_folder(root: Path, name: str) -> Path:
    """Folder of a run's stage. If the recipe repeats, the folder is in the newest round that has
    the stage.
    """
    places = (root, *reversed(entries(root, ROUNDS)))
    return next((place / name for place in places if os.path.isdir(place / name)), root / name)


def nearby(run: Path) -> str:
    """A sentence on the runs beside a folder that is none and in `runs`, those written alike
    first.
    """
    there = {
        path.parent for home in (run.parent, Path("runs")) for path in home.glob("*/command.json")
    }
    near = sorted(there, key=lambda one: -SequenceMatcher(None, str(one), str(run)).ratio())
    return f"Runs there are: {', '.join(map(str, near[:3]))}." if near else ""


def missing_run(run: Path) -> MissingFileError:
    """The error for a run that is not there."""
    text = f"run directory not found: {run}. Give the folder of a run. {nearby(run)}"
    return MissingFileError(text.rstrip())


def is_control(row: Entries) -> bool:
    """True if a row of heldout.jsonl measures a control of decoding: another temperature, or the
    best of n of the start.
    """
    return "temperature" in row or "best_of" in row


class RunDirectory:
    """One run's folder. Opening an existing one continues it if its config is the same."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    def open(
        cls,
        path: str | Path,
        config: Entries,
        **manifest: object,
    ) -> RunDirectory:
        """Create the folder, or continue it.

        Args:
            config: plain values or config objects. A setting that an older tether did not have
                counts as equal if it has its default, or if the recipe does not name it.

        Raises:
            RunError: the folder holds a run of another config; the differing keys are named.
        """
        run = cls(path)
        stored = run.path / "config.json"
        noted = run.path / "manifest.json"
        is_own = noted.is_file() and "config_digest" in read_json(noted)
        now = _settings(config)
        if is_own and stored.is_file() and run.begun:
            if changes := run._changes(config, now):
                raise RunError(
                    f"{run.path} holds a run of another config: "
                    f"{'; '.join(f'{key} was {old!r} and is now {new!r}' for key, old, new in changes[:5])}. "
                    "Choose another run directory with run=PATH, or delete this one and what "
                    "stands on it.",
                )
            return run
        made_folder(run.path)
        if not is_own and any(
            p.name not in BESIDE and p.name[0] != "." for p in run.path.iterdir()
        ):
            raise RunError(
                f"{run.path} exists and is not a run directory of tether. Choose another path.",
            )
        start = {
            "argv": redact_value([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "config_digest": digest(now),
            "folder": str(path),
        }
        # the model that has answered is not opened again
        before = read_json(noted) if is_own and run.answered else {}
        write_json(noted, {**before, **environment(), **start, "cwd": os.getcwd(), **manifest})
        write_json(stored, now)
        return run

    def _changes(self, config: Facts, now: JsonValue) -> list[Change]:
        before = read_json(self.path / "manifest.json").get("folder", str(self.path))
        chosen = _settings(config, exclude_defaults=True, exclude_unset=True)
        old = read_json(self.path / "config.json")
        return list(_differences(old, now, chosen, (before, str(self.path))))

    @property
    def begun(self) -> bool:
        """True if anything was made here: pairs, a step, a checkpoint, a stage. A run that failed
        earlier may begin anew.
        """
        made = ("pairs.jsonl", "metrics.jsonl", "summary.json")
        inside = (folder for folder in entries(self.path, "*/") if folder.name != ENGINE)
        return any((self.path / name).is_file() for name in made) or any(
            p.is_file() for folder in inside for p in entries(folder, "**/*")
        )

    @property
    def answered(self) -> bool:
        """True if a model has sampled answers here, whose pairs are not made yet."""
        return (self.path / "answers.jsonl").is_file()

    @property
    def complete(self) -> bool:
        return (self.path / "summary.json").is_file()

    def log(self, metrics: Entries, step: int) -> None:
        """Append one line to metrics.jsonl."""
        append_jsonl(self.path / "metrics.jsonl", [{"step": step, "time": time.time(), **metrics}])

    def sample(self, rows: Iterable[Entries]) -> None:
        """Append texts to samples.jsonl."""
        append_jsonl(self.path / "samples.jsonl", rows)

    def note_tokens(self, rows: Iterable[Entries]) -> None:
        """Append the numbers of samples' tokens to tokens.jsonl."""
        append_jsonl(self.path / TOKENS, rows)

    def hold_out(self, row: Entries) -> None:
        """Append the scores of one measurement on held-out prompts to heldout.jsonl."""
        append_jsonl(self.path / "heldout.jsonl", [row])

    def held_out(self) -> dict[int, dict[str, list[float | None]]]:
        """The scores of every measurement by its step; of one that was made twice, the later."""
        return {
            row["step"]: row["scores"]
            for row in read_jsonl(self.path / "heldout.jsonl")
            if not is_control(row)
        }

    def decoded(self) -> dict[tuple[int, float], dict[str, list[float | None]]]:
        """The scores at other temperatures than that of the measurements, by step and
        temperature.
        """
        rows = (row for row in read_jsonl(self.path / "heldout.jsonl") if "temperature" in row)
        return {(row["step"], row["temperature"]): row["scores"] for row in rows}

    def best_of(self) -> dict[int, list[float | None]]:
        """The scores of the best of n answers of the model before, by n."""
        return {
            row["best_of"]: row["scores"]["score"]
            for row in read_jsonl(self.path / "heldout.jsonl")
            if "best_of" in row
        }

    def alarm(self, alarms: Iterable[Alarm]) -> None:
        """Append to alarms.jsonl."""
        append_jsonl(self.path / "alarms.jsonl", [asdict(alarm) for alarm in alarms])

    def alarms(self) -> list[Json]:
        return list(read_jsonl(self.path / "alarms.jsonl"))

    def metrics(self) -> list[Json]:
        """The rows of metrics.jsonl; of a stage in rounds those of its rounds, one after
        another.
        """
        rows = list(read_jsonl(self.path / "metrics.jsonl"))
        rounds = entries(self.path, f"{ROUNDS}/metrics.jsonl")
        return rows or in_sequence([list(read_jsonl(path)) for path in rounds])

    def seconds(self, start: float) -> float:
        """Seconds of a stage: since `start` (perf_counter), or what its steps took in all starts,
        whichever is more.
        """
        return max(
            time.perf_counter() - start,
            sum(row.get("time/step", 0.0) for row in self.metrics()),
        )

    def truncate(self, last_step: int) -> None:
        """Forget metrics, samples, measurements and alarms after `last_step`: a resumed run writes
        them anew.
        """
        for name in RECORDS:
            path = self.path / name
            if path.is_file():
                rows = zip(
                    read_jsonl(path),
                    path.read_bytes().splitlines(keepends=True),
                    strict=False,
                )
                write_whole(
                    path,
                    b"".join(line for row, line in rows if row.get("step", 0) <= last_step),
                )

    def update_manifest(self, **values: object) -> None:
        path = self.path / "manifest.json"
        write_json(path, {**read_json(path), **values})

    def expect(self, steps: int) -> None:
        """Note the number of steps of the training in the manifest, for progress displays."""
        if (self.path / "manifest.json").is_file():
            self.update_manifest(steps=steps)

    def finish(self, summary: Entries) -> None:
        """Write summary.json; its presence says that the run is complete, and all of it on the
        disk.
        """
        flush_all(self.path)
        write_json(self.path / "summary.json", summary)

    def summary(self) -> Json:
        return read_json(self.path / "summary.json")


def _settings(config: Facts, **options: JsonValue) -> JsonValue:
    """Plain JSON values, of config objects too."""
    dumped = {
        key: value.model_dump(mode="json", **options)
        for key, value in config.items()
        if hasattr(value, "model_dump")
    }
    return redact_addresses(json.loads(_json({**config, **dumped})))


def _differences(
    old: object,
    new: object,
    chosen: object,
    folders: tuple[str, str],
    prefix: str = "",
) -> Iterator[Change]:
    """The settings whose values differ. A path that moved along with the run's folder is the same.
    So is a default that the old run did not know.

    Args:
        chosen: the settings that the recipe names, without those that have their defaults.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        named = chosen if isinstance(chosen, dict) else {}
        for key in (key for key in old | named if key not in MAY_CHANGE):
            place = f"{prefix}{key}."
            yield from _differences(old.get(key), new.get(key), named.get(key), folders, place)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for place, (before, now) in enumerate(zip(old, new, strict=True)):
            yield from _differences(before, now, now, folders, f"{prefix}{place}.")
    elif old != new and not _same_place(old, new, folders):
        yield prefix.rstrip("."), old, new


def _same_place(old: object, new: object, folders: tuple[str, str]) -> bool:
    if not (
        isinstance(old, str) and isinstance(new, str) and os.sep in new and folders[0] != folders[1]
    ):
        return False
    return os.path.relpath(old, folders[0]) == os.path.relpath(new, folders[1])


def noted_path(folder: Path, path: str) -> Path | None:
    """The present place of the folder that the run in `folder` calls `path`: as it lay to the run,
    else where it lay.
    """
    manifest = read_json(folder / "manifest.json")
    home = Path(manifest.get("cwd", "."))
    places = [home / path]
    if "folder" in manifest:
        places.insert(0, folder / os.path.relpath(home / path, home / manifest["folder"]))
    return next((place.resolve() for place in places if place.is_dir()), None)


@cache
def environment() -> Json:
    """Versions and machine, without importing any of the packages named, as they were when it was
    first asked for.
    """
    return {
        "tether": __version__,
        "code_digest": code_digest(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cpu_count": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "packages": versions(REPORTED_PACKAGES),
    }


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those packages that were installed: code may also run from a folder.

    The version of torch names its build, such as `2.13.0+cu130`: what an installer noted lacks it.
    """
    installed = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    if "torch" in installed:
        installed["torch"] = _build_of_torch() or installed["torch"]
    return installed


def _build_of_torch() -> str | None:
    """The version that torch writes in itself, read without an import of torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    written = re.search(r"^__version__ = ['\"](.+)['\"]", text, re.MULTILINE)
    return written and written[1]


def _processor() -> str:
    """The processor's name by its maker, if the system reports it."""
    names = [line.partition(":")[2].strip() for line in cpuinfo() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cpuinfo() -> list[str]:
    """Lines in which Linux describes the first processor; none elsewhere."""
    with contextlib.suppress(OSError):
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    return []


def code_digest() -> str:
    """A digest of tether's own source files."""
    root = Path(__file__).resolve().parent.parent
    return digest(
        [
            [str(p.relative_to(root)), p.read_text(encoding="utf-8")]
            for p in entries(root, "**/*.py")
        ],
    )


def file_digest(paths: Sequence[str | Path]) -> dict[str, str]:
    """SHA-256 of each file (folders: of every file in them)."""
    result = {}
    for file in (
        file
        for path in map(Path, paths)
        for file in (sorted(path.rglob("*")) if path.is_dir() else [path])
    ):
        if file.is_file():
            with file.open("rb") as handle:
                result[str(file)] = hashlib.file_digest(handle, "sha256").hexdigest()
    return result
