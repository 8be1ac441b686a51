"""One loop for every supervised stage: an objective says what an update is, `fit` does the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from tether.core.rundir import RunDirectory
from tether.core.types import Json
from tether.data.prepare import Split
from tether.learner.config import SupervisedConfig
from tether.learner.local import LocalLearner
from tether.learner.loop import Progress, SupervisedLoop
from tether.learner.ranks import here
from tether.models.trunk import Role

HEADLINE = "loss", "accuracy"
"""What of an evaluation is shown beside an update's metrics."""
Micro = TypeVar("Micro")
Row_contra = TypeVar("Row_contra", contravariant=True)


@dataclass(frozen=True)
class Update(Generic[Micro]):
    """The rows of one optimizer step, prepared.

    Denominators are counted over all its micro-batches, and whatever needs the whole update (KTO's z0, ODIN's correlation) is
    computed before the first. The losses of the micro-batches add up to that of the update.

    loss: the loss of a micro-batch, and beside it whatever `metrics` makes its numbers of, of all of them in order.
    """

    micro_batches: Iterable[Micro]
    loss: Callable[[Micro], tuple[Tensor, Any]]
    metrics: Callable[[list[Any]], dict[str, float]] = lambda measured: {}


class Objective(Protocol[Row_contra]):
    """A role, what an update of it is, and how held-out rows judge it.

    dropout: whether updates have it; evaluations never do.
    """

    role: Role
    dropout: bool

    def update(self, rows: Sequence[Row_contra], /) -> Update[Any]: ...
    def evaluate(self, rows: Sequence[Row_contra], /) -> Mapping[str, Any]: ...


def accumulate(update: Update[Any], learner: LocalLearner | None = None) -> tuple[float, list[Any]]:
    """The update's loss, and with a learner its gradient, micro-batch by micro-batch; with what was measured of each.

    Every rank has the loss and the measurements of all micro-batches, and the gradient of its share.
    """

    def pass_through(micro: Any) -> tuple[float, Any]:
        loss, part = update.loss(micro)
        if learner is not None:
            learner.backward(loss)
        return float(loss.detach()), part.cpu() if isinstance(part, Tensor) else part

    total, measured = 0.0, []
    for loss, part in here().map(pass_through, update.micro_batches):
        total += loss
        measured.append(part)
    return total, measured


def make_step(objective: Objective[Any], learner: LocalLearner, rows: Sequence[Any]) -> dict[str, float]:
    """One optimizer step over the rows."""
    update = objective.update(rows)
    loss, measured = accumulate(update, learner)
    norms = learner.step()
    return {"loss": loss, **update.metrics(measured), **norms}


@torch.no_grad()
def measure(update: Update[Any]) -> dict[str, float]:
    """Loss and metrics of an update that is not made."""
    loss, measured = accumulate(update)
    return {"loss": loss, **update.metrics(measured)}


def heldout(objective: Objective[Any], rows: Sequence[Any]) -> Json:
    """The evaluation on held-out rows, if there are any, as a summary has it."""
    return {f"heldout_{key}": value for key, value in objective.evaluate(rows).items()} if rows else {}


@contextmanager
def evaluating(role: Role) -> Iterator[None]:
    """Without dropout and gradients; afterwards the mode is as before."""
    training = role.model.training
    role.train_mode(False)
    with torch.no_grad():
        yield
    role.train_mode(training)


def headline(objective: Objective[Any], rows: Sequence[Any], watched: Sequence[str] = HEADLINE) -> dict[str, float]:
    """The watched numbers of an evaluation, as eval_*."""
    with evaluating(objective.role):
        result = objective.evaluate(rows)
    return {f"eval_{key}": _number(result[key]) for key in watched if key in result}


def fit(
    objective: Objective[Any],
    split: Split[Any],
    plan: list[list[int]],
    config: SupervisedConfig,
    run: RunDirectory,
    *,
    seed: int | None = None,
    evaluate_every: int = 0,
    watched: Sequence[str] = HEADLINE,
    progress: Progress | None = None,
) -> SupervisedLoop:
    """Train, or go on training, in `run`, and leave the weights that were best on held-out rows; the loop with its losses.

    Args:
        plan: places in `split.train` of the rows of every update.
        seed: of dropout; unset: the config's.
        evaluate_every: updates between evaluations on `split.test`; 0: as the config says, and never if that is 0 too.
        watched: what of an evaluation is logged with the update's metrics, as eval_*.
    """
    role, every = objective.role, evaluate_every or config.evaluate_every
    learner = LocalLearner(role.parameters(), config.optimizer_for(role.adapter), len(plan))
    step, seed = partial(make_step, objective, learner), config.seed if seed is None else seed
    evaluate = partial(headline, objective, split.test, watched) if split.test and every else None
    loop = SupervisedLoop(run, learner, step, config, seed, evaluate, every, progress)
    role.train_mode(objective.dropout)
    loop.train(split.train, plan)
    role.train_mode(False)
    return loop


def _number(value: Any) -> float:
    """The number itself, or that of an estimate with its interval."""
    return value["value"] if isinstance(value, Mapping) else value
