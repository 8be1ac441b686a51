"""Runs that weigh objectives differently, side by side: which of them no other is better than throughout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from tether.algorithms.objectives import pareto_front
from tether.core.errors import RunError
from tether.core.rundir import read_json
from tether.stats import EstimateFields


class Placed(NamedTuple):
    """A run, the mean of each objective with its interval on held-out prompts, and whether no other run dominates it."""

    run: Path
    means: dict[str, EstimateFields]
    on_front: bool


def front_of_runs(runs: Sequence[str | Path], objectives: Sequence[str]) -> list[Placed]:
    """Where the policies of finished runs ended, on the same held-out prompts and by the same reward models or judge.

    Args:
        runs: folders of stages that sampled and measured (`evaluate`).
        objectives: parts of their scores, of each of which more is better.

    Raises:
        RunError: a run is not finished, or has not measured one of the objectives.
    """
    means = [_means(Path(run), objectives) for run in runs]
    points = [[row[name]["value"] for name in objectives] for row in means]
    front = set(pareto_front(torch.tensor(points, dtype=torch.float64).reshape(len(points), len(objectives))).tolist())
    return [Placed(Path(run), row, number in front) for number, (run, row) in enumerate(zip(runs, means, strict=True))]


def _means(run: Path, objectives: Sequence[str]) -> dict[str, EstimateFields]:
    summary = read_json(run / "summary.json")
    measured = summary.get("gold") or summary.get("heldout") or {}
    missing = [name for name in objectives if "after" not in measured.get(name, {})]
    if missing:
        raise RunError(f"{run} has not measured {', '.join(missing)} on held-out prompts: give its section an evaluate table")
    return {name: measured[name]["after"] for name in objectives}
