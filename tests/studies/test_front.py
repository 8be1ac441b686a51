"""The front over finished runs, on summaries written by hand, and over points by brute force."""

import itertools
import math
import random

import pytest
import torch
from studies.front import front_of_runs, pareto_front

from tether.algorithms.objectives import weighted
from tether.core.errors import RunError
from tether.core.rundir import write_json

FOUND = {
    "balanced": (0.5, 0.5),
    "helpful": (1.0, 0.0),
    "worse": (0.4, 0.5),
    "same": (0.5, 0.5),
    "safe": (-1.0, 2.0),
}


def summary(helpful, safe):
    """What a stage leaves behind; the score and what was before would order the runs otherwise."""
    parts = {"score": -helpful, "helpful": helpful, "safe": safe}
    return {
        name: {"before": {"value": -v}, "after": {"value": v, "low": v - 1, "high": v + 1}}
        for name, v in parts.items()
    }


def test_runs_that_no_other_dominates_are_on_the_front(tmp_path):
    for number, (name, values) in enumerate(FOUND.items()):
        write_json(
            tmp_path / name / "summary.json",
            {"gold" if number % 2 else "heldout": summary(*values)},
        )
    placed = front_of_runs([tmp_path / name for name in FOUND], ("helpful", "safe"))
    assert {row.run.name for row in placed if row.on_front} == {
        "balanced",
        "helpful",
        "same",
        "safe",
    }
    assert [row.means["safe"] for row in placed][:2] == [
        {"value": v, "low": v - 1, "high": v + 1} for v in (0.5, 0.0)
    ]
    assert [
        row.run.name
        for row in front_of_runs([str(tmp_path / name) for name in FOUND], ["safe"])
        if row.on_front
    ] == ["safe"]


def test_a_run_without_the_measurement_is_named(tmp_path):
    write_json(tmp_path / "summary.json", {"heldout": summary(1.0, 1.0)})
    with pytest.raises(RunError, match="has not measured polite on"):
        front_of_runs([tmp_path], ["safe", "polite"])
    write_json(tmp_path / "summary.json", {"steps": 3})
    with pytest.raises(RunError, match="evaluate table"):
        front_of_runs([tmp_path], ["safe"])


@pytest.mark.parametrize("dimensions", [1, 2, 3, 5])
def test_the_front_by_brute_force_duplicates_and_all(dimensions):
    """A point is off the front exactly where another is nowhere worse and not the same."""
    draw = random.Random(dimensions)
    for count in (0, 1, 2, 15, 40):
        points = [tuple(draw.randrange(4) for _ in range(dimensions)) for _ in range(count)]
        expected = [
            i
            for i, p in enumerate(points)
            if not any(q != p and all(b >= a for a, b in zip(p, q, strict=True)) for q in points)
        ]
        found = pareto_front(torch.tensor(points, dtype=torch.float64).reshape(count, dimensions))
        assert found.tolist() == expected


def test_the_front_has_infinities_and_no_nan():
    assert pareto_front(torch.tensor([[-math.inf, 1.0], [0.0, 1.0], [math.inf, 0.0]])).tolist() == [
        1,
        2,
    ]
    with pytest.raises(ValueError, match="NaN"):
        pareto_front(torch.tensor([[0.0, math.nan]]))


def test_no_weights_choose_a_point_in_a_dent_of_the_front_and_a_constraint_does():
    points = torch.tensor([[1.0, 0.0], [0.45, 0.45], [0.0, 1.0]])
    assert pareto_front(points).tolist() == [0, 1, 2]
    chosen = {
        int(weighted(points.T, torch.tensor([w, 1 - w])).argmax())
        for w in torch.linspace(0, 1, 101).tolist()
    }
    assert chosen == {0, 2}
    held = [i for i, (_, safe) in enumerate(points.tolist()) if safe >= 0.4]
    assert max(held, key=lambda i: float(points[i, 0])) == 1


def test_the_front_does_not_depend_on_the_order_of_points():
    points = torch.tensor([[0.0, 2.0], [1.0, 1.0], [1.0, 1.0], [0.0, 1.0]])
    for order in itertools.permutations(range(4)):
        assert {order[i] for i in pareto_front(points[list(order)]).tolist()} == {0, 1, 2}
