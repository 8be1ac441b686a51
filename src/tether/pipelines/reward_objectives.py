"""Several reward models on one base, each of its own objective's comparisons, each an ordinary reward stage in `reward/NAME`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tether.assemble import RewardSection
from tether.core.errors import TrainingError
from tether.models.memory import release
from tether.models.saving import save_ensemble
from tether.pipelines.measured import Progress


def train_objectives(
    section: RewardSection, folder: Path, train: Callable[..., dict[str, Any]], progress: Progress | None = None
) -> dict[str, Any]:
    """Train those that are not complete and name them in `folder/model`; returns the summary of each and of all.

    The models are left as they are. What brings their scores to mean 0 and deviation 1 is measured on held-out responses and
    stands beside their names.

    Args:
        train: a section with data of its own and a folder -> the summary of that reward stage.

    Raises:
        TrainingError: a model gives every held-out response the same score, or none was held out.
    """
    assert section.objectives is not None
    found: dict[str, dict[str, Any]] = {}
    for number, (name, data) in enumerate(section.objectives.items()):
        own = section.model_copy(update={"data": data, "objectives": None})
        found[name] = summary = train(
            section=own, folder=folder / name, progress=_part(progress, number, len(section.objectives))
        )
        release()
        if not summary.get("score_std"):
            raise TrainingError(
                f"the reward model of {name!r} tells no two held-out responses apart. Train longer, or hold more prompts out"
            )
    known = [{"name": name, "mean": one["score_mean"], "deviation": one["score_std"]} for name, one in found.items()]
    save_ensemble(folder / "model", [folder / name / "model" for name in found], known)
    return {
        **{f"{name}/heldout_accuracy": one["heldout_accuracy"] for name, one in found.items()},
        "objectives": found,
        "seconds": sum(one["seconds"] for one in found.values()),
    }


def _part(progress: Progress | None, number: int, count: int) -> Progress | None:
    """Counts the updates of all, as if each had as many."""
    return None if progress is None else lambda done, total, metrics: progress(number * total + done, count * total, metrics)
