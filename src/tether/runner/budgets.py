"""Budgets of a whole run and of its stages: each stage has a deadline."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tether.core.budget import ANEW, BUDGET, TimeLimit, logger
from tether.core.rundir import read_if_there, read_json
from tether.core.types import Prompt
from tether.data.sources import Quarantine
from tether.runner.assembly.data.fitting import FITTING
from tether.runner.assembly.data.rows import load_rows
from tether.runner.assembly.job import AnyJob
from tether.settings.budget import Budget, BudgetConfig
from tether.stages.learner.checkpoint import complete_checkpoints

PAGE = 3.0
"""Seconds that are kept for the report."""


class Budgets:
    """The limits of the jobs of one start, in their order.

    A budget of the whole run is divided before each job: what is left of it goes to that job and
    the later ones by `StageKind.share`, so that they have the time that it leaves. The part of an
    evaluation shrinks to what a measurement by the same judge says that it needs.

    Args:
        jobs: of one recipe.
        began: the time on the clock at which this start began.
        budget: of the whole run.
    """

    def __init__(
        self,
        jobs: Sequence[AnyJob],
        clock: Callable[[], float],
        began: float,
        budget: Budget = None,
    ) -> None:
        self.clock = clock
        self.began = began
        self.budget = budget
        self.before = {job.folder: seconds_of(job.folder) for job in jobs}
        self.left = [job for job in jobs if not job.finished]
        self.first = True

    def limit(self, job: AnyJob) -> TimeLimit:
        """The limit of a job that begins; without a budget it never ends."""
        share = job.kind.share
        own = dict(job.settings).get("budget")
        whole = self.budget
        began = self.began if self.first and whole is None else self.clock()
        self.first = False
        self.left = [other for other in self.left if other.folder != job.folder]
        most = math.inf if own is None else 60 * own.minutes - PAGE
        seconds = most
        reserved = 0.0
        answers = 0.0
        if whole is not None:
            left = 60 * whole.minutes - PAGE - sum(self.before.values()) - (began - self.began)
            judged = {o.folder: count for o in self.left if (count := _answers(job, o))}
            others = share + sum(o.kind.share for o in self.left if o.folder not in judged)
            part = share / (others + len(judged))
            seconds = min(most, self.before[job.folder] + part * max(1.0, left))
            reserved = min(most - seconds, part * left * len(judged) / others)
            answers = share / others * sum(judged.values())
        minutes = min((given.minutes for given in (own, whole) if given is not None), default=0.0)
        if job.finished:
            _warn_of_end(job, minutes)
        return TimeLimit(
            seconds,
            minutes=minutes,
            clock=self.clock,
            began=began,
            kept=reserved,
            answers=answers,
        )


def last_share(jobs: Sequence[AnyJob], seconds: Mapping[str, float], minutes: float) -> float:
    """The share of its work that the last of some jobs does in a budget, where each takes so many
    seconds without one.
    """
    passed = share = 0.0
    budgets = Budgets(jobs, lambda: passed, 0.0, BudgetConfig(minutes=minutes))
    for job in jobs:
        needs = max(1.0, seconds[job.name])
        share = min(1.0, budgets.limit(job).seconds / needs)
        passed += share * needs
    return share


def _answers(job: AnyJob, later: AnyJob) -> int:
    """The answers of an evaluation, of all sides at all temperatures; 0 where they are not judged
    as those that the job measures.
    """
    here = job.settings.measurement
    there = later.settings.measurement
    alike = ("judge", "evaluators", "sycophancy")
    if (
        later.kind.makes != "verdict"
        or here is None
        or any(getattr(here, key) != getattr(there, key) for key in alike)
    ):
        return 0
    prompts = len(load_rows(there.data, Prompt, Quarantine(keep=0)))
    return prompts * there.samples * (1 + len(there.temperatures)) * (1 + len(later.policies))


def _warn_of_end(job: AnyJob, minutes: float) -> None:
    """Log that a finished stage keeps its end where it has more time now."""
    ended = read_json(job.folder / "summary.json").get(BUDGET)
    if ended and not 0 < minutes <= ended["minutes"]:
        logger.warning(
            "%s",
            f"{job.folder} is finished: its budget of {ended['minutes']:g} minutes ended it at "
            f"{ended['ended_at']} of {ended['total']}. {ANEW}",
        )


def seconds_of(folder: Path) -> float:
    """The time that a stage has taken in earlier starts, as far as its summary or its newest
    checkpoint has it.
    """
    if summary := read_if_there(folder / "summary.json"):
        return float(summary.get("seconds", 0.0))
    if fitting := read_if_there(folder / FITTING):
        return float(fitting["spent"])
    whole = complete_checkpoints(folder / "checkpoints")
    values = read_json(whole[-1] / "state.json") if whole else {}
    spent = values.get(BUDGET, {}).get("spent")
    return float(spent or sum(map(seconds_of, folder.glob("*-[0-9]*"))))
