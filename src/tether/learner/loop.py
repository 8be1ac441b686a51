"""The loop that supervised stages share: deterministic order, evaluation, best-so-far, checkpoints, resume."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from tether.core.rundir import RunDirectory
from tether.learner.checkpoint import copy_tensors, load_latest, prefixed, save_checkpoint, unprefixed
from tether.learner.local import LocalLearner

RowT = TypeVar("RowT")
Metrics = Mapping[str, float]


def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """The order of an epoch: a function of seed and epoch alone."""
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


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
        step: rows -> metrics of one update.
        evaluate: metrics on held-out rows, or None.
        criterion: the evaluation metric whose smallest value is best.
    """

    run: RunDirectory
    learner: LocalLearner
    step: Callable[[list[Any]], Metrics]
    evaluate: Callable[[], Metrics] | None = None
    criterion: str = "eval_loss"
    evaluate_every: int = 0
    checkpoint_every: int = 20
    progress: Callable[[int, int, Metrics], None] | None = None
    best: dict[str, Tensor] = field(default_factory=dict)
    best_value: float = float("inf")
    best_update: int = -1

    def train(self, rows: Sequence[Any], plan: list[list[int]]) -> None:
        """Go through the plan from wherever a checkpoint left off; the best weights are in place afterwards."""
        self._resume()
        start = self.learner.updates
        for number in range(start, len(plan)):
            began = time.perf_counter()
            metrics = dict(self.step([rows[i] for i in plan[number]]))
            last = number + 1 == len(plan)
            if self.evaluate and (last or (self.evaluate_every and (number + 1) % self.evaluate_every == 0)):
                metrics.update(self._evaluated())
            self.run.log({**metrics, "time/step": time.perf_counter() - began}, number + 1)
            if not last and (number + 1) % self.checkpoint_every == 0:
                self._save(number + 1)
            if self.progress:
                self.progress(number + 1, len(plan), metrics)
        self._save(len(plan))
        if self.best:
            self._weights_from(self.best)

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

    def _save(self, number: int) -> None:
        tensors, values = self.learner.state()
        values = {**values, "best_value": self.best_value if self.best else None, "best_update": self.best_update}
        save_checkpoint(self.run.path / "checkpoints", number, {**tensors, **prefixed("best", self.best)}, values)

    def _resume(self) -> None:
        found = load_latest(self.run.path / "checkpoints")
        if found is None:
            self.run.truncate(0)
            return
        tensors, values = found
        self.learner.load_state(tensors, values)
        self.best = unprefixed("best", tensors)
        if self.best:
            self.best_value, self.best_update = values["best_value"], values["best_update"]
        self.run.truncate(values["updates"])
