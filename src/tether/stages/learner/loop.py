"""The order of rows and prompts in a training, and the updates that are left out of it."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, is_dataclass

from tether.core.budget import BUDGET, TimeLimit
from tether.core.rundir import RunDirectory, write_json
from tether.core.types import Facts
from tether.stages.learner.local import LocalLearner


def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """The order of an epoch: a function of seed and epoch alone."""
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def endless(count: int, places: Sequence[int], seed: int) -> list[int]:
    """Rows at these places of epochs without end, one after another."""
    orders = {epoch: epoch_order(count, seed, epoch) for epoch in {p // count for p in places}}
    return [orders[p // count][p % count] for p in places]


def split_evenly(order: Sequence[int], parts: int) -> list[list[int]]:
    """Nearly equal, never empty, in order."""
    parts = min(parts, len(order))
    return [
        list(order[len(order) * k // parts : len(order) * (k + 1) // parts]) for k in range(parts)
    ]


def plan_updates(count: int, per_update: int, epochs: int, seed: int) -> list[list[int]]:
    """Row indices of every update of a whole training, in order; each epoch's last update may be
    smaller.
    """
    orders = [epoch_order(count, seed, epoch) for epoch in range(epochs)]
    return [order[i : i + per_update] for order in orders for i in range(0, count, per_update)]


def go_on_within(limit: TimeLimit, learner: LocalLearner, values: Facts, run: RunDirectory) -> None:
    """Take over the time and the schedule that a checkpoint's `values` hold, if there was a
    budget.
    """
    if before := values.get(BUDGET):
        limit.load_state(before, run.path)
        if limit.drawn is not None:
            learner.draw_over(limit.drawn, before["total"])


def draws_schedule(limit: TimeLimit, learner: LocalLearner, done: int, run: RunDirectory) -> bool:
    """Note a step; True where the schedule was drawn over the steps that fit, and is to be
    saved.
    """
    if not limit.bounded:
        return False
    newly, limit.drawn = learner.ranks.once(lambda: (limit.step(done), limit.drawn))
    if newly and limit.drawn is not None:
        learner.draw_over(limit.drawn, limit.total)
        run.expect(limit.drawn)
    return newly


@contextlib.contextmanager
def replayable(
    run: RunDirectory,
    learner: LocalLearner,
    step: int,
    rows: Sequence[object],
) -> Iterator[None]:
    """Write the rows of an update that is left out to `skipped/step-N.json`, token ids and all, so
    that it can be made again.
    """
    skipped = learner.skipped
    try:
        yield
    finally:
        if learner.skipped != skipped:
            path = run.path / "skipped" / f"step-{step:06d}.json"
            plain = [
                asdict(row) if is_dataclass(row) and not isinstance(row, type) else row
                for row in rows
            ]
            write_json(path, {"step": step, "reason": learner.fault, "rows": plain})
            logging.getLogger(__name__).warning(
                "step %d: %s; left out, its rows are in %s",
                step,
                learner.fault,
                path,
            )
