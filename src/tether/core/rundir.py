"""The run directory: everything a run leaves behind, readable without tether.

config.json       the resolved config            metrics.jsonl   one object a step
manifest.json     versions, seeds, digests       samples.jsonl   texts, with the step they come from
summary.json      what the run amounts to        checkpoints/    see learner.checkpoint
heldout.jsonl     scores on held-out prompts     alarms.jsonl    what the detectors noticed
model/            the result                     report.html
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from tether import __version__
from tether.core.config import digest
from tether.core.errors import RunError
from tether.core.types import Alarm

REPORTED_PACKAGES = ("torch", "transformers", "peft", "tokenizers", "safetensors", "datasets", "numpy", "pydantic")


def write_json(path: str | Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of either."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(_finite(value), file, indent=2, ensure_ascii=False, default=_plain)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_json(path: str | Path) -> Any:
    """Read JSON, with an error that names the file."""
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path} does not exist. Is {path.parent} a run directory of tether?") from None
    except json.JSONDecodeError as error:
        raise RunError(f"{path} is damaged ({error}). Delete it, or restore it from a copy.") from error


def read_jsonl(path: str | Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a JSONL file; a last line cut by a crash is left out."""
    path = Path(path)
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        return value.item()
    return str(value)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: such numbers become null, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


class RunDirectory:
    """One run's folder. Opening an existing one continues it if its config is the same."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    def open(cls, path: str | Path, config: Mapping[str, Any], **manifest: Any) -> RunDirectory:
        """Create the folder, or continue it.

        Raises:
            RunError: the folder holds a run of another config; the differing keys are named.
        """
        run = cls(path)
        stored = run.path / "config.json"
        if stored.is_file():
            differences = list(_differences(read_json(stored), json.loads(json.dumps(config, default=_plain))))
            if differences:
                raise RunError(
                    f"{run.path} holds a run of another config: {'; '.join(differences[:5])}. "
                    "Choose another run directory, or delete this one."
                )
            return run
        if run.path.exists() and (not run.path.is_dir() or any(p.name != "log.txt" for p in run.path.iterdir())):
            raise RunError(f"{run.path} exists and is not a run directory of tether. Choose another path.")
        run.path.mkdir(parents=True, exist_ok=True)
        write_json(stored, config)
        write_json(run.path / "manifest.json", {**environment(), "config_digest": digest(config), **manifest})
        return run

    @property
    def complete(self) -> bool:
        return (self.path / "summary.json").is_file()

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Append one line to metrics.jsonl."""
        self._append("metrics.jsonl", [{"step": step, "time": time.time(), **metrics}])

    def sample(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append texts to samples.jsonl."""
        self._append("samples.jsonl", rows)

    def hold_out(self, row: Mapping[str, Any]) -> None:
        """Append the scores of one measurement on held-out prompts to heldout.jsonl."""
        self._append("heldout.jsonl", [row])

    def held_out(self) -> dict[int, dict[str, list[float | None]]]:
        """The scores of every measurement by its step; of one that was made twice, the later."""
        return {row["step"]: row["scores"] for row in read_jsonl(self.path / "heldout.jsonl")}

    def alarm(self, alarms: Iterable[Alarm]) -> None:
        """Append to alarms.jsonl."""
        self._append("alarms.jsonl", [asdict(alarm) for alarm in alarms])

    def alarms(self) -> list[dict[str, Any]]:
        return list(read_jsonl(self.path / "alarms.jsonl"))

    def _append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        lines = [json.dumps(_finite(row), ensure_ascii=False, default=_plain) + "\n" for row in rows]
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.writelines(lines)

    def metrics(self) -> list[dict[str, Any]]:
        return list(read_jsonl(self.path / "metrics.jsonl"))

    def seconds(self, start: float) -> float:
        """How long a stage has taken: since `start` (perf_counter), or what its steps took in all starts, whichever is more."""
        return max(time.perf_counter() - start, sum(row.get("time/step", 0.0) for row in self.metrics()))

    def truncate(self, last_step: int) -> None:
        """Forget metrics, samples, measurements and alarms after `last_step`: a resumed run writes them anew."""
        for name in ("metrics.jsonl", "samples.jsonl", "heldout.jsonl", "alarms.jsonl"):
            path = self.path / name
            if path.is_file():
                kept = [row for row in read_jsonl(path) if row.get("step", 0) <= last_step]
                path.unlink()
                self._append(name, kept)

    def update_manifest(self, **values: Any) -> None:
        path = self.path / "manifest.json"
        write_json(path, {**read_json(path), **values})

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json; its presence says that the run is complete."""
        write_json(self.path / "summary.json", summary)

    def summary(self) -> dict[str, Any]:
        return read_json(self.path / "summary.json")


def _differences(old: Any, new: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from _differences(old.get(key), new.get(key), f"{prefix}{key}.")
    elif old != new:
        yield f"{prefix.rstrip('.')} was {old!r} and is now {new!r}"


def environment() -> dict[str, Any]:
    """Versions and machine, without importing any of the packages named."""
    versions = {}
    for name in REPORTED_PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "tether": __version__,
        "code_digest": code_digest(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "packages": versions,
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def code_digest() -> str:
    """A digest of tether's own source files."""
    root = Path(__file__).resolve().parent.parent
    return digest([[str(p.relative_to(root)), p.read_text(encoding="utf-8")] for p in sorted(root.rglob("*.py"))])


def file_digest(paths: Sequence[str | Path]) -> dict[str, str]:
    """SHA-256 of each file (folders: of every file in them)."""
    import hashlib

    result = {}
    for path in map(Path, paths):
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                with file.open("rb") as handle:
                    result[str(file)] = hashlib.file_digest(handle, "sha256").hexdigest()
    return result
