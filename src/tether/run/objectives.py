"""Objectives in recipes: their names, and the reward source that they become."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

from pydantic import StringConstraints

from tether.core.errors import ConfigError
from tether.core.rundir import read_json
from tether.data.chat import ChatEncoder
from tether.models.saving import OBJECTIVES
from tether.models.trunk import Role
from tether.rewards.learned import ObjectiveConfig, ObjectivesReward, TrainedObjective

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][\w-]*$")]
"""Of an objective: a folder's and a metric's too."""


def check_names(stage: str, asked: Collection[str] | None, trained: Collection[str]) -> None:
    """Whether a stage asks for what there is.

    Raises:
        ConfigError: it asks for other objectives than were trained, or for none of several.
    """
    if set(asked or ()) == set(trained):
        return
    if asked is None:
        raise ConfigError(f"[{stage}] takes one reward, and [reward.objectives] has several: name them in {stage}.objectives")
    names, have = (", ".join(sorted(some)) or "none" for some in (asked, trained))
    raise ConfigError(f"{stage}.objectives names {names}, and [reward.objectives] has {have}: both name the same ones")


def objective_names(folder: Path) -> list[str]:
    """Those that a finished reward stage has trained into `folder`."""
    return [known["name"] for known in _known(folder)]


def objectives_reward(
    settings: dict[str, ObjectiveConfig] | None, scorers: tuple[Role, ...], folder: Path, encoder: ChatEncoder
) -> ObjectivesReward | None:
    """The reward source of what `folder` names; None where neither it nor the section knows of objectives."""
    known = _known(folder)
    check_names("a stage that samples", settings, [row["name"] for row in known])
    if settings is None:
        return None
    found = {row["name"]: TrainedObjective(role, row["mean"], row["deviation"]) for row, role in zip(known, scorers, strict=True)}
    return ObjectivesReward(settings, found, encoder)


def _known(folder: Path) -> list[dict[str, Any]]:
    return read_json(folder / OBJECTIVES)["members"] if (folder / OBJECTIVES).is_file() else []
