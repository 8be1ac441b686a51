"""Checkpoints: tensors in safetensors, values in JSON, visible only when whole.

A checkpoint is written into a temporary folder, each file is flushed to the disk and its digest noted, `COMPLETE` is written last
and the folder is renamed, so that one without `COMPLETE` never counts and one whose bytes have changed is noticed.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from tether.core.errors import RunError, TrainingError
from tether.core.rundir import flush, read_json, write_json
from tether.core.types import Json
from tether.learner.ranks import here

FORMAT = 1
STATE = ("state.safetensors", "state.json")
ROOM = 8
"""A copy in memory is written in the background where so many of them would fit into what is free."""


class Checkpoints:
    """The checkpoints of one training: saves do not hold up the next step where memory allows a copy of what is saved.

    A save that fails is told at the next one, or when the block ends.
    """

    def __init__(self, folder: Path, keep: int = 1) -> None:
        self.folder, self.keep = folder, keep
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[Path] | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.wait()
        except Exception:
            if error is None:
                raise
        finally:
            self._writer.shutdown()

    def save(self, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Save `step`, once the save before is done; of several ranks, which have the same, the first does.

        Raises:
            RunError: there is no space for it, or for the one before.
            TrainingError: a number is not finite.
        """
        self.wait()
        if not here().first:
            return
        if not _room_for(tensors):
            save_checkpoint(self.folder, step, tensors, values, keep=self.keep)
            return
        copies = {key: value.detach().to("cpu", copy=True) for key, value in tensors.items()}
        self._pending = self._writer.submit(save_checkpoint, self.folder, step, copies, dict(values), keep=self.keep)

    def wait(self) -> None:
        """Until what was saved last is on the disk."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def latest(self) -> tuple[dict[str, Tensor], Json] | None:
        """The newest whole checkpoint's tensors and values, or None."""
        self.wait()
        return here().once(self._newest)

    def _newest(self) -> tuple[dict[str, Tensor], Json] | None:
        whole = complete_checkpoints(self.folder)
        return load_checkpoint(whole[-1]) if whole else None


def save_checkpoint(folder: Path, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any], *, keep: int = 1) -> Path:
    """Write `folder/step-N` unless it is there, then drop all but the newest `keep`.

    Raises:
        RunError: no space is left; nothing half-written stays, and the checkpoints before do.
        TrainingError: a tensor has numbers that are not finite.
    """
    target, temporary = folder / f"step-{step:06d}", folder / f".step-{step:06d}.partial"
    folder.mkdir(parents=True, exist_ok=True)
    if target not in complete_checkpoints(folder):
        _check_finite(step, tensors, folder)
        for stray in (target, *folder.glob(".step-*.partial")):
            shutil.rmtree(stray, ignore_errors=True)
        try:
            _write(temporary, tensors, {**values, "step": step})
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if _disk_is_full(error):
                raise RunError(_no_space(folder, step, tensors)) from error
            raise
        temporary.rename(target)
        flush(folder)
    for old in complete_checkpoints(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def _write(folder: Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    folder.mkdir()
    save_file({key: value.detach().contiguous().cpu() for key, value in tensors.items()}, folder / STATE[0])
    flush(folder / STATE[0])
    write_json(folder / STATE[1], values)
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": _digest(folder / name)} for name in STATE}
    write_json(folder / "COMPLETE", {"format": FORMAT, "files": files})


def complete_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    whole = [path for path in folder.glob("step-*") if path.name[5:].isdecimal() and (path / "COMPLETE").is_file()]
    return sorted(whole, key=lambda path: int(path.name[5:]))


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], Json]:
    """One checkpoint's tensors and values.

    Raises:
        RunError: it is damaged, or of a newer tether.
    """
    try:
        complete = read_json(path / "COMPLETE")
        version = complete["format"]
        if version <= FORMAT:
            for name in STATE:
                if _digest(path / name) != complete["files"][name]["sha256"]:
                    raise ValueError(f"{name} is not what was written")
            return load_file(path / STATE[0]), read_json(path / STATE[1])
    except Exception as error:
        raise RunError(_damaged(path, error)) from error
    raise RunError(f"checkpoint {path} has format {version}, and this tether reads up to {FORMAT}. Install a newer one.")


def _damaged(path: Path, error: Exception) -> str:
    whole = complete_checkpoints(path.parent)
    older = whole[: whole.index(path)] if path in whole else whole
    rest = f"go on from {older[-1].name}" if older else "begin anew: there is none before it"
    return f"checkpoint {path} is damaged ({error}). Restore it from a copy, or delete that folder to {rest}."


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(value.numel() * value.element_size() for value in tensors.values())


def _room_for(tensors: Mapping[str, Tensor]) -> bool:
    import psutil

    return ROOM * _size(tensors) < psutil.virtual_memory().available


def _check_finite(step: int, tensors: Mapping[str, Tensor], folder: Path) -> None:
    bad = [key for key, value in tensors.items() if value.is_floating_point() and not value.isfinite().all()]
    if bad:
        raise TrainingError(
            f"after step {step} {len(bad)} tensors have numbers that are not finite ({', '.join(bad[:3])}), so it is not saved. "
            f"{folder} has the last good checkpoint: lower optimizer.learning_rate, in another run directory."
        )


def _disk_is_full(error: BaseException) -> bool:
    """Whether the disk or a quota is full; safetensors says so in words alone."""
    by_number = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return by_number or "os error 28" in str(error) or "No space" in str(error)


def _no_space(folder: Path, step: int, tensors: Mapping[str, Tensor]) -> str:
    free, whole = shutil.disk_usage(folder).free / 1e6, complete_checkpoints(folder)
    before = f"{whole[-1].name} is whole" if whole else "there is none before it"
    return (
        f"no space for the checkpoint of step {step} in {folder}: it takes {_size(tensors) / 1e6:,.1f} MB, {free:,.1f} MB are "
        f"free; {before}. Free some space and start the same command again: it goes on from there."
    )


def numbered(name: str, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    """A list of tensors as a checkpoint holds it, `name.0` and so on."""
    return {f"{name}.{number}": tensor for number, tensor in enumerate(tensors)}


def unnumbered(name: str, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """The inverse of `numbered`; empty where there are none of this name."""
    return [tensors[f"{name}.{number}"] for number in range(sum(key.startswith(f"{name}.") for key in tensors))]
