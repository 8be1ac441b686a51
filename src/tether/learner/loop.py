"""The loop that supervised stages share: deterministic order, evaluation, best-so-far, checkpoints, resume."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from tether.core.errors import TrainingError
from tether.core.protocols import doing
from tether.core.rundir import RunDirectory, read_json, write_json
from tether.core.stopping import Stopping
from tether.core.watchdog import Watchdog
from tether.learner.checkpoint import Checkpoints, copy_tensors, prefixed, unprefixed
from tether.learner.config import SupervisedConfig
from tether.learner.local import LocalLearner

RowT = TypeVar("RowT")
Metrics = Mapping[str, float]
SPIKE_WINDOW = 20
MAX_REWINDS = 10


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
    return [list(order[len(order) * k // parts : len(order) * (k + 1) // parts]) for k in range(parts)]


def plan_updates(count: int, per_update: int, epochs: int, seed: int) -> list[list[int]]:
    """Row indices of every update of a whole training, in order; each epoch's last update may be smaller."""
    plan = []
    for epoch in range(epochs):
        order = epoch_order(count, seed, epoch)
        plan += [order[i : i + per_update] for i in range(0, count, per_update)]
    return plan


@dataclass
class SupervisedLoop:
    """Runs `step` over a plan, evaluates, keeps the best weights and can be killed at any time.

    Args:
        step: rows -> metrics of one update, `loss` among them.
        evaluate: metrics on held-out rows, or None.
        criterion: the evaluation metric whose smallest value is best.
        seed: of what a step draws (dropout), which depends on it and the update's number alone; default: the config's.
    """

    run: RunDirectory
    learner: LocalLearner
    step: Callable[[list[Any]], Metrics]
    config: SupervisedConfig
    evaluate: Callable[[], Metrics] | None = None
    criterion: str = "eval_loss"
    evaluate_every: int = 0
    progress: Callable[[int, int, Metrics], None] | None = None
    seed: int | None = None
    best: dict[str, Tensor] = field(default_factory=dict)
    best_value: float = float("inf")
    best_update: int = -1

    def train(self, rows: Sequence[Any], plan: list[list[int]]) -> None:
        """Go through the plan from wherever a checkpoint left off; the best weights are in place afterwards.

        Raises:
            TrainingError: too many updates had a loss or a gradient that was not finite.
            Interrupted: a signal came; the update in hand is finished and saved.
        """
        with Stopping() as stopping, Checkpoints(self.run.path / "checkpoints", self.config.keep_checkpoints) as saved:
            number, watchdog = self._resume(saved), Watchdog(self.run.path / "stacks.txt")
            doing(self.progress, f"update {number + 1}")
            while number < len(plan) or stopping.asked:
                if stopping.asked:
                    self._save(saved, number)
                    saved.wait()
                    stopping.leave(number, len(plan), self.run.path)
                began, skipped, chosen = time.perf_counter(), self.learner.skipped, [rows[i] for i in plan[number]]
                metrics: dict[str, float] = {}
                with watchdog.step("update"), replayable(self.run, self.learner, number + 1, chosen):
                    if number in self._left_out:
                        self.learner.updates += 1
                    else:
                        metrics = self._drawn(chosen, number)
                if self._is_spike(metrics.get("loss", math.nan)):
                    number = self._rewind(saved, number, chosen)
                    continue
                number, last = number + 1, number + 1 == len(plan)
                if self.evaluate and (last or (self.evaluate_every and number % self.evaluate_every == 0)):
                    metrics.update(self._evaluated())
                if "loss" in metrics and self.learner.skipped == skipped:
                    self._losses.append(metrics["loss"])
                    self.run.log({**metrics, "time/step": time.perf_counter() - began}, number)
                if last or number % self.config.checkpoint_every == 0:
                    self._save(saved, number)
                if self.progress:
                    self.progress(number, len(plan), metrics)
        if not self._losses:
            raise TrainingError(f"no update could be made: {self.learner.fault or 'there are no rows'}")
        if self.best:
            self._weights_from(self.best)
        elif self.evaluate:
            raise TrainingError(
                f"{self.criterion} was never finite: what was learned is of no use. Lower optimizer.learning_rate, in another "
                "run directory."
            )

    def _drawn(self, rows: list[Any], number: int) -> dict[str, float]:
        """A step whose torch generators start from what the seed and its number say; they stand as before after it."""
        device = self.learner.masters[0].device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(1_000_003 * (self.config.seed if self.seed is None else self.seed) + number)
            return dict(self.step(rows))

    def _evaluated(self) -> Metrics:
        assert self.evaluate is not None
        metrics = self.evaluate()
        if metrics[self.criterion] < self.best_value:
            self.best_value, self.best_update = metrics[self.criterion], self.learner.updates
            self.best = copy_tensors({str(i): p for i, p in enumerate(self.learner.parameters)})
        return metrics

    def _weights_from(self, tensors: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for index, parameter in enumerate(self.learner.parameters):
                parameter.copy_(tensors[str(index)])

    def _save(self, saved: Checkpoints, number: int) -> None:
        tensors, values = self.learner.state()
        values = {**values, "best_value": self.best_value if self.best else None, "best_update": self.best_update}
        self.run.flush()
        saved.save(number, {**tensors, **prefixed("best", self.best)}, values)

    def _resume(self, saved: Checkpoints) -> int:
        """What the newest checkpoint holds, in place; the number of updates that were made."""
        path = self.run.path / "left_out.json"
        self._left_out: set[int] = set(read_json(path)) if path.is_file() else set()
        found = saved.latest()
        if found is None and self.config.rewind_spike:
            self._save(saved, 0)
        tensors, values = found or ({}, {"updates": 0})
        if found is not None:
            self.learner.load_state(tensors, values)
            self.best = unprefixed("best", tensors)
            if self.best:
                self.best_value, self.best_update = values["best_value"], values["best_update"]
        self.run.truncate(values["updates"])
        self._losses = [row["loss"] for row in self.run.metrics()]
        return values["updates"]

    def _is_spike(self, loss: float) -> bool:
        recent = self._losses[-SPIKE_WINDOW:]
        return (
            self.config.rewind_spike is not None
            and len(recent) == SPIKE_WINDOW
            and loss > self.config.rewind_spike * statistics.median(recent)
        )

    def _rewind(self, saved: Checkpoints, number: int, rows: Sequence[Any]) -> int:
        """Back to the last checkpoint; this update will be left out."""
        keep_for_replay(self.run, number + 1, "its loss was a spike", rows)
        if len(self._left_out) >= MAX_REWINDS:
            raise TrainingError(
                f"{MAX_REWINDS + 1} spikes of the loss: the last is no accident of one update. Look at the rows in "
                f"{self.run.path / 'skipped'}, lower optimizer.learning_rate, or leave rewind_spike out."
            )
        write_json(self.run.path / "left_out.json", sorted({*self._left_out, number}))
        self.best, self.best_value, self.best_update = {}, float("inf"), -1
        return self._resume(saved)


@contextlib.contextmanager
def replayable(run: RunDirectory, learner: LocalLearner, step: int, rows: Sequence[Any]) -> Iterator[None]:
    """Rows with which an update fails, or has to be left out, are kept in `skipped/`, with the reason."""
    skipped = learner.skipped
    try:
        yield
    finally:
        if learner.skipped != skipped:
            keep_for_replay(run, step, learner.fault, rows)


def keep_for_replay(run: RunDirectory, step: int, reason: str, rows: Sequence[Any]) -> None:
    """Write a step's rows to `skipped/step-N.json`: token ids and all, so that it can be made again."""
    path = run.path / "skipped" / f"step-{step:06d}.json"
    plain = [asdict(row) if is_dataclass(row) and not isinstance(row, type) else row for row in rows]
    write_json(path, {"step": step, "reason": reason, "rows": plain})
    logging.getLogger(__name__).warning("step %d: %s; left out, its rows are in %s", step, reason, path)
