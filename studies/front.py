"""Runs that weigh objectives differently, side by side: which of them no other is better than
throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tether.core.errors import RunError
from tether.core.rundir import read_json
from tether.stats import EstimateFields


class Placed(NamedTuple):
    """A run, the mean of each objective with its interval on held-out prompts, and whether no other
    run dominates it.
    """

    run: Path
    means: dict[str, EstimateFields]
    on_front: bool


def front_of_runs(runs: Sequence[str | Path], objectives: Sequence[str]) -> list[Placed]:
    """Where the policies of finished runs ended, on the same held-out prompts and by the same
    reward models or judge.

    Args:
        runs: folders of stages that sampled and measured (`evaluate`).
        objectives: parts of their scores, of each of which more is better.

    Raises:
        RunError: a run is not finished, or has not measured one of the objectives.
    """
    means = [_means(Path(run), objectives) for run in runs]
    points = [[row[name]["value"] for name in objectives] for row in means]
    front = set(
        pareto_front(
            torch.tensor(points, dtype=torch.float64).reshape(len(points), len(objectives)),
        ).tolist(),
    )
    return [
        Placed(Path(run), row, number in front)
        for number, (run, row) in enumerate(zip(runs, means, strict=True))
    ]


def _means(run: Path, objectives: Sequence[str]) -> dict[str, EstimateFields]:
    summary = read_json(run / "summary.json")
    measured = summary.get("gold") or summary.get("heldout") or {}
    missing = [name for name in objectives if "after" not in measured.get(name, {})]
    if missing:
        raise RunError(
            f"{run} has not measured {', '.join(missing)} on held-out prompts: give "
            "its section an evaluate table",
        )
    return {name: measured[name]["after"] for name in objectives}


def pareto_front(points: Float[Tensor, "points objectives"]) -> Int[Tensor, " front"]:
    """Find the points that no other dominates, that is, is at least as good in every objective and
    better in one.

    Equation: ``{i : no j with p_j ≥ p_i everywhere and p_j > p_i somewhere}``; equal points do not
        dominate each other.
    Paper: Roijers et al. 2013, https://arxiv.org/abs/1402.0590.
    Shapes: (points, objectives) -> indices in ascending order; no points have no front.
    Raises: ``ValueError`` for a point with NaN, which nothing compares with.
    Trap: with measured points membership is noisy, and with many objectives nearly everything is on
        the front.
    """
    if bool(points.isnan().any()):
        raise ValueError("a point with NaN has no place in an order")
    dominated = [bool(((points >= p).all(-1) & (points > p).any(-1)).any()) for p in points]
    return torch.tensor(
        [i for i, beaten in enumerate(dominated) if not beaten],
        dtype=torch.long,
        device=points.device,
    )
