"""Notes of a checkpoint on a run's records. A run that continues from the checkpoint detects by
them which rows have gone since.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from tether.core.keeping import flush
from tether.core.rundir import RECORDS, RunDirectory, read_jsonl
from tether.core.types import Facts, Json

logger = logging.getLogger(__name__)
CHANGED = "records_changed"
"""The entry of manifest and summary that names what changed between two starts."""


def note_records(run: RunDirectory) -> Json:
    """Of each file of records its bytes, rows and digest, once all that was appended is on the
    disk.
    """
    paths = [run.path / name for name in RECORDS if (run.path / name).is_file()]
    for path in (*paths, run.path):
        flush(path)
    texts = {path.name: path.read_bytes() for path in paths}
    return {
        name: {"bytes": len(text), "rows": text.count(b"\n"), "sha256": _digest(text)}
        for name, text in texts.items()
    }


def report_changes(run: RunDirectory, before: Facts | None, step: int) -> None:
    """Name in the log and in the manifest each file that no longer begins as it did when `step` was
    saved.

    Args:
        before: what `note_records` gave then; None: the checkpoint is of a tether that noted
            nothing.
    """
    faults = [
        fault
        for name, entry in (before or {}).items()
        if (fault := _fault(run.path / name, entry, step))
    ]
    for fault in faults:
        logger.warning("%s", fault)
    if faults:
        run.update_manifest(**{CHANGED: faults})


def report_beginning(run: RunDirectory) -> None:
    """Log that steps were made without a saved one, so that all of them are repeated."""
    if rows := sum(row.get("step", 0) > 0 for row in read_jsonl(run.path / "metrics.jsonl")):
        logger.warning(
            "%s holds %d steps and no checkpoint: the training begins anew, and these rows go",
            run.path,
            rows,
        )


def _fault(path: Path, before: Facts, step: int) -> str:
    """A sentence on a file that is not what it was, or nothing."""
    text = path.read_bytes() if path.is_file() else b""
    if _digest(text[: before["bytes"]]) == before["sha256"]:
        return ""
    rows = sum(row.get("step", 0) <= step for row in read_jsonl(path))
    what = (
        f"has {rows} of the {before['rows']} rows"
        if rows != before["rows"]
        else "has rows other than those"
    )
    return (
        f"{path} {what} that it had when step {step} was saved: it was cut or changed between two "
        "starts. The weights are those of the checkpoint; summary and page are made of what is "
        "left. To have all, restore the file and resume."
    )


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]
