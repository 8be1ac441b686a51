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
from typing import Any

import torch
from torch import Tensor

from tether.core.errors import TrainingError
from tether.core.protocols import doing
from tether.core.rundir import RunDirectory, read_json, write_json
from tether.core.stopping import Stopping
from tether.core.watchdog import Watchdog
from tether.learner.checkpoint import Checkpoints, numbered, unnumbered
from tether.learner.config import SupervisedConfig
from tether.learner.local import LocalLearner
from tether.learner.ranks import here
from tether.models.sharded import cut, local

Metrics = Mapping[str, float]
Progress = Callable[[int, int, Metrics], None]
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
    orders = [epoch_order(count, seed, epoch) for epoch in range(epochs)]
    return [order[i : i + per_update] for order in orders for i in range(0, count, per_update)]


@dataclass
class SupervisedLoop:
    """Runs `step` over a plan, evaluates, keeps the best weights and can be killed at any time.

    Args:
        step: rows -> metrics of one update, `loss` among them.
        evaluate: metrics on held-out rows, or None; the smallest `eval_loss` is best.
        seed: of what a step draws (dropout), which depends on it and the update's number alone.

    After `train`: `losses` of all updates that were made, and `best_loss` with the update, `best_update`, that it followed.
    """

    run: RunDirectory
    learner: LocalLearner
    step: Callable[[list[Any]], Metrics]
    config: SupervisedConfig
    seed: int
    evaluate: Callable[[], Metrics] | None = None
    evaluate_every: int = 0
    progress: Progress | None = None
    losses: list[float] = field(default_factory=list)
    best: list[Tensor] = field(default_factory=list)
    best_loss: float = math.inf
    best_update: int = -1
    _left_out: set[int] = field(default_factory=set)

    @property
    def train_loss(self) -> float:
        """The mean over the last ten updates."""
        return statistics.fmean(self.losses[-10:])

    def train(self, rows: Sequence[Any], plan: list[list[int]]) -> None:
        """Go through the plan from wherever a checkpoint left off; the best weights are in place afterwards.

        Raises:
            TrainingError: too many updates had a loss or a gradient that was not finite.
            Interrupted: a signal came; the update in hand is finished and saved.
        """
        with Stopping() as stopping, Checkpoints(self.run.path / "checkpoints", self.config.keep_checkpoints) as saved:
            number, watchdog = self._resume(saved), Watchdog(self.run.path / "stacks.txt")
            doing(self.progress, f"update {number + 1}")
            while (stop := here().agreed(stopping.asked)) or number < len(plan):
                if stop:
                    self._save(saved, number)
                    saved.wait()
                    stopping.leave(number, len(plan), self.run.path, stop)
                began, chosen = time.perf_counter(), [rows[i] for i in plan[number]]
                with watchdog.step("update"):
                    metrics = self._update(chosen, number)
                if self._is_spike(metrics.get("loss", math.nan)):
                    number = self._rewind(saved, number, chosen)
                    continue
                number, last = number + 1, number + 1 == len(plan)
                if self.evaluate and (last or (self.evaluate_every and number % self.evaluate_every == 0)):
                    metrics |= self._evaluated(self.evaluate())
                if "loss" in metrics and "skipped_updates" not in metrics:
                    self.losses.append(metrics["loss"])
                    self.run.log({**metrics, "time/step": time.perf_counter() - began}, number)
                if last or number % self.config.checkpoint_every == 0:
                    self._save(saved, number)
                if self.progress:
                    self.progress(number, len(plan), metrics)
        if not self.losses:
            raise TrainingError(f"no update could be made: {self.learner.fault or 'there are no rows'}")
        if self.evaluate and not self.best:
            raise TrainingError(
                "eval_loss was never finite: what was learned is of no use. Lower optimizer.learning_rate, in another run "
                "directory."
            )
        with torch.no_grad():
            for parameter, weights in zip(self.learner.parameters, self.best, strict=False):
                local(parameter).copy_(weights)

    def _update(self, rows: list[Any], number: int) -> dict[str, float]:
        """A step whose torch generators start from what seed and number say; they stand as before after it."""
        if number in self._left_out:
            self.learner.updates += 1
            return {}
        device = self.learner.masters[0].device
        with replayable(self.run, self.learner, number + 1, rows), torch.random.fork_rng([device] * (device.type == "cuda")):
            torch.manual_seed(1_000_003 * self.seed + number + 15_485_863 * here().rank)
            return dict(self.step(rows))

    def _evaluated(self, metrics: Metrics) -> Metrics:
        if metrics["eval_loss"] < self.best_loss:
            self.best_loss, self.best_update = metrics["eval_loss"], self.learner.updates
            self.best = [local(parameter).detach().clone() for parameter in self.learner.parameters]
        return metrics

    def _save(self, saved: Checkpoints, number: int) -> None:
        tensors, values = self.learner.state()
        values = {**values, "best_value": self.best_loss if self.best else None, "best_update": self.best_update}
        self.run.flush()
        best = [self.learner.distributed(place, part) for place, part in enumerate(self.best)]
        saved.save(number, {**tensors, **numbered("best", best)}, values)

    def _resume(self, saved: Checkpoints) -> int:
        """Put the newest checkpoint in place; the number of updates that were made."""
        path = self.run.path / "left_out.json"
        self._left_out = set(read_json(path)) if path.is_file() else set()
        checkpoint, updates = saved.latest(self.learner.parameters), 0
        if checkpoint is not None:
            tensors, values = checkpoint
            self.learner.load_state(tensors, values)
            whole, updates = unnumbered("best", tensors), values["updates"]
            self.best = [cut(tensor, parameter) for tensor, parameter in zip(whole, self.learner.parameters, strict=False)]
            if self.best:
                self.best_loss, self.best_update = values["best_value"], values["best_update"]
        elif self.config.rewind_spike:
            self._save(saved, 0)
        self.run.truncate(updates)
        self.losses = [row["loss"] for row in self.run.metrics()]
        return updates

    def _is_spike(self, loss: float) -> bool:
        recent, factor = self.losses[-SPIKE_WINDOW:], self.config.rewind_spike
        return factor is not None and len(recent) == SPIKE_WINDOW and loss > factor * statistics.median(recent)

    def _rewind(self, saved: Checkpoints, number: int, rows: Sequence[Any]) -> int:
        """Back to the last checkpoint; this update will be left out."""
        keep_for_replay(self.run, number + 1, "its loss was a spike", rows)
        if len(self._left_out) >= MAX_REWINDS:
            raise TrainingError(
                f"{MAX_REWINDS + 1} spikes of the loss: the last is no accident of one update. Look at the rows in "
                f"{self.run.path / 'skipped'}, lower optimizer.learning_rate, or leave rewind_spike out."
            )
        write_json(self.run.path / "left_out.json", sorted({*self._left_out, number}))
        self.best, self.best_loss, self.best_update = [], math.inf, -1
        return self._resume(saved)


@contextlib.contextmanager
def replayable(run: RunDirectory, learner: LocalLearner, step: int, rows: Sequence[Any]) -> Iterator[None]:
    """Write the rows of an update that is left out to `skipped/`, with the reason."""
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
