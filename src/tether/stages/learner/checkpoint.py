"""Checkpoints: tensors in safetensors, values in JSON, visible only when whole.

A checkpoint is kept as a whole (`core.keeping`). `COMPLETE`, which is written last, has the digest
of each file. So a folder without `COMPLETE` never counts, and reading detects changed bytes. Each
rank writes its parts of sharded tensors
and reads the parts that it needs. The numbers of ranks may differ. The layout is that of torch's
distributed checkpoint, in safetensors.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tether.core.errors import RunError, TrainingError
from tether.core.keeping import durable, remove, remove_left, unfinished_folder
from tether.core.rundir import file_digest, read_json, write_json
from tether.core.types import Facts, Json
from tether.models.cpu.memory import machine_memory
from tether.models.sharded import distributed, local
from tether.models.trunk import is_cut
from tether.stages.learner.ranks import ALONE, Ranks

Tensors = Mapping[str, Tensor]
FORMAT = 1
IN_PARTS = 2
STATE = ("state.safetensors", "state.json")
PARTS = "parts"
"""The folder of what each rank wrote."""
ROOM = 8
"""If free memory holds so many copies of the tensors, a copy is saved in the background."""


class Checkpoints:
    """The checkpoints of one training: saves do not hold up the next step where memory allows a
    copy of what is saved.

    The error of a failed save is raised at the next one, or when the block ends.
    """

    def __init__(self, folder: Path, keep: int = 1, *, ranks: Ranks = ALONE) -> None:
        # a user's function may change the working directory meanwhile
        self.folder = folder.absolute()
        self.keep = keep
        self.ranks = ranks
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[Path] | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.wait()
        except Exception:
            if error is None:
                raise
        finally:
            self._writer.shutdown()

    def save(self, step: int, tensors: Tensors, values: Facts) -> None:
        """Save `step`, once the save before is done; of several ranks, the first does, and all
        where tensors are cut.

        Raises:
            RunError: there is no space for it, or for the one before.
            TrainingError: a number is not finite.
        """
        self.wait()
        if parts := {key: tensor for key, tensor in tensors.items() if is_cut(tensor)}:
            self._save_in_parts(step, tensors, parts, values)
            return
        if not self.ranks.first:
            return
        if machine_memory().available <= ROOM * _size(tensors):
            save_checkpoint(self.folder, step, tensors, values, keep=self.keep)
            return
        copies = {key: value.detach().to("cpu", copy=True) for key, value in tensors.items()}
        self._pending = self._writer.submit(
            save_checkpoint,
            self.folder,
            step,
            copies,
            dict(values),
            keep=self.keep,
        )

    def _save_in_parts(
        self,
        step: int,
        tensors: Tensors,
        parts: Tensors,
        values: Facts,
    ) -> None:
        """Every rank writes its parts into one folder, and the first adds the rest; none goes on
        before.
        """
        from torch.distributed import checkpoint as dcp

        ranks = self.ranks
        if fault := ranks.agreed(_not_finite(step, parts, self.folder)):
            raise TrainingError(fault)
        with contextlib.ExitStack() as stack:
            folder = ranks.once(lambda: self._for_parts(step, stack))
            if folder is None:
                return
            writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
            try:
                ranks.together(lambda: dcp.save(dict(parts), storage_writer=writer))
            except dcp.CheckpointException as error:
                raise RunError(
                    _no_space(self.folder, step, parts) if _disk_is_full(error) else str(error),
                ) from error
            if ranks.first:
                if (count := len(list(folder.iterdir()))) != ranks.size:
                    raise RunError(
                        f"{count} of {ranks.size} ranks have written into {folder}: it must be "
                        "one folder for all of them",
                    )
                rest = {key: tensor for key, tensor in tensors.items() if key not in parts}
                save_checkpoint(self.folder, step, rest, values, keep=self.keep, parts=folder)
            ranks.gather(None)

    def _for_parts(self, step: int, stack: contextlib.ExitStack) -> Path | None:
        """An empty folder for what ranks write, until the stack ends; None if that step is saved."""
        target = self.folder.resolve() / f"step-{step:06d}"
        if self.folder / target.name in complete_checkpoints(self.folder):
            return None
        folder = stack.enter_context(unfinished_folder(target)) / PARTS
        folder.mkdir()
        return folder

    def wait(self) -> None:
        """Until what was saved last is on the disk."""
        pending = self._pending
        self._pending = None
        if pending is not None:
            pending.result()

    def latest(self, weights: Sequence[Tensor] = ()) -> tuple[dict[str, Tensor], Json] | None:
        """The newest whole checkpoint's tensors and values, or None; of tensors in parts, `name.N`
        is cut as weight N is.
        """
        self.wait()
        newest = self.ranks.once(self._newest)
        if newest is None:
            return None
        tensors, values, parts = newest
        return {**tensors, **(read_parts(parts, weights) if parts else {})}, values

    def _newest(self) -> tuple[dict[str, Tensor], Json, Path | None] | None:
        whole = complete_checkpoints(self.folder)
        newest = _checked(whole[-1].resolve()) if whole else None
        _drop_old(self.folder, self.keep)
        return newest


def read_parts(folder: Path, weights: Sequence[Tensor] = ()) -> dict[str, Tensor]:
    """Tensors that ranks wrote, by name.

    `name.N` is a rank's part of its tensor if weight N is cut and has the same shape. Otherwise it
    is whole.
    """
    from torch.distributed import checkpoint as dcp

    reader = dcp.HuggingFaceStorageReader(str(folder))
    tensors = dict[str, Tensor]()
    for key, meta in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(meta, dcp.TensorStorageMetadata)
        number = int(key.rpartition(".")[2])
        like = weights[number] if number < len(weights) else None
        if like is not None and is_cut(like) and like.shape == meta.size:
            tensors[key] = distributed(
                torch.empty_like(local(like), dtype=meta.properties.dtype),
                like,
            )
        else:
            tensors[key] = torch.empty(meta.size, dtype=meta.properties.dtype)
    with warnings.catch_warnings():
        # a process alone is what is meant here
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: Tensors,
    values: Facts,
    *,
    keep: int = 1,
    parts: Path | None = None,
) -> Path:
    """Write `folder/step-N` unless it is there, then drop all but the newest `keep`.

    Args:
        parts: a folder with more tensors, which moves into it.

    Raises:
        RunError: no space is left; nothing half-written stays, and the checkpoints before do.
        TrainingError: a tensor has numbers that are not finite.
    """
    target = folder / f"step-{step:06d}"
    if target not in complete_checkpoints(folder):
        if fault := _not_finite(step, tensors, folder):
            raise TrainingError(fault)
        try:
            with durable(target, over=True) as unfinished:
                _write(unfinished, tensors, {**values, "step": step}, parts)
        except BaseException as error:
            if _disk_is_full(error):
                raise RunError(_no_space(folder, step, tensors)) from error
            raise
    _drop_old(folder, keep)
    return target


def _drop_old(folder: Path, keep: int) -> None:
    """Remove all but the newest checkpoints, and what a killed process was writing or removing."""
    remove_left(folder, "step-*")
    for old in complete_checkpoints(folder)[:-keep]:
        remove(old)


def _write(folder: Path, tensors: Tensors, values: Facts, parts: Path | None) -> None:
    folder.mkdir()
    if parts:
        parts.rename(folder / PARTS)
    save_file(
        {key: value.detach().contiguous().cpu() for key, value in tensors.items()},
        folder / STATE[0],
    )
    write_json(folder / STATE[1], values)
    files = {
        os.path.relpath(path, folder): {"bytes": os.path.getsize(path), "sha256": digest}
        for path, digest in file_digest([folder]).items()
    }
    write_json(folder / "COMPLETE", {"format": IN_PARTS if parts else FORMAT, "files": files})


def complete_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    whole = [
        path
        for path in folder.glob("step-*")
        if path.name[5:].isdecimal() and (path / "COMPLETE").is_file()
    ]
    return sorted(whole, key=lambda path: int(path.name[5:]))


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], Json]:
    """One checkpoint's tensors, whole, and its values.

    Raises:
        RunError: it is damaged, or of a newer tether.
    """
    tensors, values, parts = _checked(path)
    return {**tensors, **(read_parts(parts) if parts else {})}, values


def _checked(path: Path) -> tuple[dict[str, Tensor], Json, Path | None]:
    """A checkpoint's whole tensors and its values, and where it has more tensors."""
    try:
        complete = read_json(path / "COMPLETE")
        version = complete["format"]
        if version <= IN_PARTS:
            for name in dict.fromkeys([*STATE, *complete["files"]]):
                with (path / name).open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                if digest != complete["files"][name]["sha256"]:
                    raise ValueError(f"{name} is not what was written")
            return (
                load_file(path / STATE[0]),
                read_json(path / STATE[1]),
                path / PARTS if version == IN_PARTS else None,
            )
    except Exception as error:
        raise RunError(_damaged(path, error)) from error
    raise RunError(
        f"checkpoint {path} has format {version}, and this tether reads up to "
        f"{IN_PARTS}. Install a newer one.",
    )


def _damaged(path: Path, error: Exception) -> str:
    whole = complete_checkpoints(path.parent)
    older = whole[: whole.index(path)] if path in whole else whole
    rest = f"go on from {older[-1].name}" if older else "begin anew: there is none before it"
    return (
        f"checkpoint {path} is damaged ({error}). Restore it from a copy, or delete that "
        f"folder to {rest}."
    )


def _size(tensors: Tensors) -> int:
    return sum(local(value).numel() * value.element_size() for value in tensors.values())


def _not_finite(step: int, tensors: Tensors, folder: Path) -> str:
    """The message for tensors with numbers that are not finite; empty if all are finite."""
    bad = [
        key
        for key, value in tensors.items()
        if value.is_floating_point() and not local(value).isfinite().all()
    ]
    if not bad:
        return ""
    return (
        f"after step {step} {len(bad)} tensors have numbers that are not finite "
        f"({', '.join(bad[:3])}), so it is not saved. {folder} has the last good checkpoint: "
        "lower optimizer.learning_rate, in another run directory."
    )


def _disk_is_full(error: BaseException) -> bool:
    """True if the disk or a quota is full. safetensors reports this in its message alone."""
    by_number = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return by_number or "os error 28" in str(error) or "No space" in str(error)


def _no_space(folder: Path, step: int, tensors: Tensors) -> str:
    free = shutil.disk_usage(folder).free / 1e6
    whole = complete_checkpoints(folder)
    before = f"{whole[-1].name} is whole" if whole else "there is none before it"
    return (
        f"no space for the checkpoint of step {step} in {folder}: it takes "
        f"{_size(tensors) / 1e6:,.1f} MB, {free:,.1f} MB are "
        f"free; {before}. Free some space and start the same command again: it goes on from there."
    )


def numbered(name: str, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    """A list of tensors as a checkpoint holds it, `name.0` and so on."""
    return {f"{name}.{number}": tensor for number, tensor in enumerate(tensors)}


def unnumbered(name: str, tensors: Tensors) -> list[Tensor]:
    """The inverse of `numbered`; empty where there are none of this name."""
    return [
        tensors[f"{name}.{number}"]
        for number in range(sum(key.startswith(f"{name}.") for key in tensors))
    ]
