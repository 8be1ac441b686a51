"""One loop for every supervised stage: an objective says what an update is, `SupervisedLoop` does
the rest.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from tether.core.budget import BUDGET, time_limit
from tether.core.errors import TrainingError
from tether.core.protocols import Progress, doing, now_doing
from tether.core.records import note_records, report_beginning, report_changes
from tether.core.rundir import RunDirectory
from tether.core.stopping import Stopping
from tether.core.types import Facts, Json, Metrics
from tether.core.watchdog import Watchdog
from tether.data.prepare import Split
from tether.models.sharded import cut, local
from tether.models.trunk import Role
from tether.settings.learner import SupervisedConfig
from tether.stages.learner.checkpoint import Checkpoints, numbered, unnumbered
from tether.stages.learner.local import LocalLearner
from tether.stages.learner.loop import draws_schedule, go_on_within, plan_updates, replayable
from tether.stages.learner.ranks import Ranks

HEADLINE = "loss", "accuracy"
"""Figures of an evaluation that are shown beside an update's metrics."""
Micro = TypeVar("Micro")
Row = TypeVar("Row")
Row_contra = TypeVar("Row_contra", contravariant=True)


@dataclass(frozen=True)
class Update(Generic[Micro]):
    """The rows of one optimizer step, prepared.

    Denominators are counted over all its micro-batches, and whatever needs the whole update (KTO's
    z0, ODIN's correlation) is computed before the first. The losses of the micro-batches add up to
    that of the update.

    loss: gives the loss of a micro-batch, and numbers measured beside it, a tensor; `metrics` makes
        metrics of the numbers of all micro-batches, in order.
    """

    micro_batches: Iterable[Micro]
    loss: Callable[[Micro], tuple[Tensor, Tensor]]
    metrics: Callable[[list[list[float]]], Metrics] = lambda measured: {}


class Objective(Protocol[Row_contra]):
    """A role, what an update of it is, and how held-out rows judge it.

    dropout: whether updates have it; evaluations never do.
    ranks: those that share the micro-batches of an update.
    """

    role: Role
    dropout: bool
    ranks: Ranks

    @property
    def config(self) -> SupervisedConfig: ...
    def update(self, rows: Sequence[Row_contra], /) -> Update[Any]: ...
    def evaluate(self, rows: Sequence[Row_contra], /) -> Facts: ...


def accumulate(
    update: Update[Micro],
    ranks: Ranks,
    learner: LocalLearner | None = None,
) -> tuple[float, list[list[float]]]:
    """The update's loss, and with a learner its gradient, micro-batch by micro-batch; with what was
    measured of each.

    Every rank has the loss and the measurements of all micro-batches, and the gradient of its
    share. The host reads the numbers of all its micro-batches together, after the last.
    """

    def pass_through(micro: Micro) -> dict[str, Tensor]:
        loss, measured = update.loss(micro)
        if learner is not None:
            learner.backward(loss)
        return {"loss": loss.detach(), "measured": measured.detach()}

    rows = ranks.measure(pass_through, update.micro_batches)
    return sum((row["loss"][0] for row in rows), 0.0), [row["measured"] for row in rows]


def make_step(
    objective: Objective[Row],
    learner: LocalLearner,
    rows: Sequence[Row],
) -> Metrics:
    """One optimizer step over the rows."""
    update = objective.update(rows)
    loss, measured = accumulate(update, learner.ranks, learner)
    norms = learner.step()
    return {"loss": loss, **update.metrics(measured), **norms}


@torch.no_grad()
def measure(update: Update[Micro], ranks: Ranks) -> Metrics:
    """Loss and metrics of an update that is not made."""
    loss, measured = accumulate(update, ranks)
    return {"loss": loss, **update.metrics(measured)}


def heldout(objective: Objective[Row], rows: Sequence[Row]) -> Json:
    """The evaluation on held-out rows, if there are any, as a summary has it."""
    if not rows:
        return {}
    now_doing(f"evaluating on {len(rows)} held-out rows")
    return {f"heldout_{key}": value for key, value in objective.evaluate(rows).items()}


@contextmanager
def evaluating(role: Role) -> Iterator[None]:
    """Without dropout and gradients; afterwards the mode is as before."""
    training = role.model.training
    role.train_mode(False)
    with torch.no_grad():
        yield
    role.train_mode(training)


def headline(
    objective: Objective[Any],
    rows: Sequence[object],
    watched: Sequence[str] = HEADLINE,
) -> Metrics:
    """The watched numbers of an evaluation, as eval_*."""
    with evaluating(objective.role):
        result = objective.evaluate(rows)
    values = {key: result[key] for key in watched if key in result}
    return {
        f"eval_{key}": value["value"] if isinstance(value, Mapping) else value
        for key, value in values.items()
    }


def go_through(
    objective: Objective[Row],
    split: Split[Row],
    run: RunDirectory,
    progress: Progress | None,
    plan: list[list[int]] | int,
    config: SupervisedConfig | None = None,
    watched: Sequence[str] = HEADLINE,
) -> SupervisedLoop:
    """The loop of an objective, once it has ended.

    Args:
        plan: see SupervisedLoop, as for `watched`; a number: rows of each update, in epochs.
        config: in place of the objective's own.
    """
    own = config or objective.config
    if isinstance(plan, int):
        plan = plan_updates(len(split.train), plan, own.epochs, own.seed)
    return SupervisedLoop(
        objective=objective,
        split=split,
        plan=plan,
        config=own,
        run=run,
        watched=watched,
        progress=progress,
    ).train()


@dataclass(kw_only=True)
class SupervisedLoop:
    """Trains an objective, evaluates, keeps the weights that were best on held-out rows, and can be
    killed at any time.

    Args:
        plan: places in `split.train` of the rows of every update.
        config: what an update draws (dropout) depends on its seed and the update's number alone;
            without evaluate_every nothing is evaluated during the training.
        watched: what of an evaluation is logged with the update's metrics, as eval_*; the smallest
            `eval_loss` is best.

    After `train`: `losses` of all updates that were made, and `best_loss` with the update,
    `best_update`, that it followed.
    """

    objective: Objective[Any]
    split: Split[Any]
    plan: list[list[int]]
    config: SupervisedConfig
    run: RunDirectory
    watched: Sequence[str] = HEADLINE
    progress: Progress | None = None

    def __post_init__(self) -> None:
        role = self.objective.role
        config = self.config
        self.learner = LocalLearner(
            role.parameters(),
            config.optimizer_for(role.adapter),
            len(self.plan),
            ranks=self.objective.ranks,
        )
        self.every = config.evaluate_every if self.split.test else 0
        self.made = 0
        self.tail = len(self.split.test) / max(1, len(self.plan[0]))
        """Updates that learn from as many rows as are held out."""

    def summary(self, start: float) -> Json:
        """Entries that the summaries of all stages on rows share.

        They are the mean loss of the last ten updates, the number of updates, and the seconds.
        """
        train_loss = statistics.fmean(self.losses[-10:])
        return {"train_loss": train_loss, "updates": self.made, "seconds": self.run.seconds(start)}

    def train(self) -> SupervisedLoop:
        """Go through the plan from wherever a checkpoint left off; the best weights are in place
        afterwards.

        Raises:
            TrainingError: too many updates had a loss or a gradient that was not finite.
            Interrupted: a signal came; the update in hand is finished and saved.
        """
        every = self.every
        objective = self.objective
        plan = self.plan
        rows = self.split.train
        run = self.run
        folder = run.path
        keep = self.config.keep_checkpoints
        limit = time_limit()
        ranks = objective.ranks
        objective.role.train_mode(objective.dropout)
        with (
            Stopping(folder) as stopping,
            Checkpoints(folder / "checkpoints", keep, ranks=ranks) as saved,
        ):
            number = self._resume(saved)
            watchdog = Watchdog(folder / "stacks.txt")
            limit.begin(number, len(plan))
            run.expect(len(plan))
            doing(self.progress, f"update {number + 1}")
            while (stop := ranks.agreed(stopping.asked)) or (
                number < len(plan) and not ranks.once(limit.over)
            ):
                if stop:
                    self._save(saved, number)
                    saved.wait()
                    stopping.leave(number, len(plan), folder, stop)
                began = time.perf_counter()
                chosen = [rows[i] for i in plan[number]]
                with watchdog.step("update"):
                    metrics = self._update(chosen, number)
                number, last = number + 1, number + 1 == len(plan)
                due = every and (last or number % every == 0)
                evaluated = self._evaluated() if due else {}
                metrics |= {**evaluated, "time/step": time.perf_counter() - began}
                if "loss" in metrics and "skipped_updates" not in metrics:
                    self.losses.append(metrics["loss"])
                    run.log(metrics, number)
                elif evaluated:  # an update that was left out has no loss
                    run.log(evaluated, number)
                # reading held-out rows takes no longer than to learn from as many
                limit.reserve = (1 + self.tail) * (limit.pace.step or metrics["time/step"])
                drawn = draws_schedule(limit, self.learner, number, run)
                due = drawn or last or number % self.config.checkpoint_every == 0
                if due or ranks.once(lambda: stopping.to_save):
                    self._save(saved, number)
                if self.progress:
                    self.progress(number, limit.drawn or len(plan), metrics)
            self.made = number
            if number < len(plan):  # time has ended it: saved as it goes on, evaluated as it ends
                self._save(saved, number)
                saved.wait()
                if every and number % every:
                    self._evaluated()
        if not self.losses:
            raise TrainingError(
                f"no update could be made: {self.learner.fault or 'there are no rows'}",
            )
        if every and not self.best:
            raise TrainingError(
                "eval_loss was never finite: what was learned is of no use. Lower "
                "optimizer.learning_rate, in another run directory.",
            )
        self.learner.put(self.best)
        objective.role.train_mode(False)
        return self

    def _update(self, rows: Sequence[object], number: int) -> Metrics:
        """A step whose torch generators start from seed and number; afterwards they have their old
        states again.
        """
        device = self.learner.masters[0].device
        with (
            replayable(self.run, self.learner, number + 1, rows),
            torch.random.fork_rng([device] * (device.type == "cuda")),
        ):
            rank = self.objective.ranks.rank
            torch.manual_seed(1_000_003 * self.config.seed + number + 15_485_863 * rank)
            return make_step(self.objective, self.learner, rows)

    def _evaluated(self) -> Metrics:
        now_doing(f"evaluating on {len(self.split.test)} held-out rows")
        metrics = headline(self.objective, self.split.test, self.watched)
        if metrics["eval_loss"] < self.best_loss:
            self.best_loss = metrics["eval_loss"]
            self.best_update = self.learner.updates
            self.best = [local(parameter).detach().clone() for parameter in self.learner.parameters]
        return metrics

    def _save(self, saved: Checkpoints, number: int) -> None:
        tensors, counts = self.learner.state()
        values = {
            **counts,
            "best_value": self.best_loss if self.best else None,
            "best_update": self.best_update,
            "records": note_records(self.run),
            BUDGET: time_limit().state(),
        }
        best = [self.learner.distributed(place, part) for place, part in enumerate(self.best)]
        saved.save(number, {**tensors, **numbered("best", best)}, values)

    def _resume(self, saved: Checkpoints) -> int:
        """Put the newest checkpoint in place; the number of updates that were made."""
        self.best: list[Tensor] = []
        self.best_loss = math.inf
        self.best_update = -1
        run = self.run
        learner = self.learner
        checkpoint = saved.latest(learner.parameters)
        updates = 0
        if checkpoint is not None:
            tensors, values = checkpoint
            learner.load_state(tensors, values)
            go_on_within(time_limit(), learner, values, run)
            whole = unnumbered("best", tensors)
            updates = values["updates"]
            self.best = [
                cut(tensor, parameter)
                for tensor, parameter in zip(whole, learner.parameters, strict=False)
            ]
            if self.best:
                self.best_loss = values["best_value"]
                self.best_update = values["best_update"]
            report_changes(run, values.get("records"), updates)
        else:
            report_beginning(run)
        run.truncate(updates)
        self.losses: list[float] = [row["loss"] for row in run.metrics() if "loss" in row]
        return updates
