"""Checkpoints: tensors in safetensors, values in JSON, visible only when whole.

A checkpoint is written into a temporary folder, flushed and renamed; `COMPLETE` is written last, so a folder without it
never counts.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tether.core.errors import RunError
from tether.core.rundir import read_json, write_json


def save_checkpoint(folder: Path, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any], *, keep: int = 1) -> Path:
    """Write `folder/step-N`, then drop all but the newest `keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    target, temporary = folder / f"step-{step:06d}", folder / f".step-{step:06d}.partial"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    save_file({k: v.detach().contiguous().cpu() for k, v in tensors.items()}, temporary / "state.safetensors")
    write_json(temporary / "state.json", {**values, "step": step})
    (temporary / "COMPLETE").touch()
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    for old in complete_checkpoints(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def complete_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(p for p in folder.glob("step-*") if (p / "COMPLETE").is_file())


def load_latest(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The newest whole checkpoint's tensors and values, or None."""
    found = complete_checkpoints(folder)
    return load_checkpoint(found[-1]) if found else None


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """One checkpoint's tensors and values.

    Raises:
        RunError: it is damaged.
    """
    try:
        return load_file(path / "state.safetensors"), read_json(path / "state.json")
    except Exception as error:
        raise RunError(f"checkpoint {path} is damaged ({error}). Delete that folder to go on from the one before.") from error


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{key}": value for key, value in tensors.items()}


def unprefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}."
    return {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}


def copy_tensors(source: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Detached clones, as a best-so-far needs them."""
    with torch.no_grad():
        return {key: value.detach().clone() for key, value in source.items()}
