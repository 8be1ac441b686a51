"""Budgets of a whole run and of its stages: the time that each training may take, by the price."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tether.build.data.fitting import MEASURED_PROMPTS, measurements_cut
from tether.core.budget import BUDGET, TimeLimit, is_short, logger, stays_short
from tether.core.rundir import EVALUATIONS, RunDirectory, is_control, read_jsonl, write_jsonl
from tether.core.types import Facts
from tether.learner.checkpoint import complete_checkpoints
from tether.planning.shares import Price, StagePrice, need, seconds_of, share_out
from tether.runner.jobs import Job
from tether.settings.rounds import RoundsSection
from tether.settings.sampling import OnlineSection
from tether.settings.section import PromptedSection, Section, TimedSection


class Budgets:
    """The limits of the jobs of one start, in their order.

    Args:
        jobs: of one recipe.
        price: what each stage is expected to take; stages without a price count as the mean of the
            others.
        began: the time on the clock at which this start began.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        price: Price,
        clock: Callable[[], float],
        began: float,
    ) -> None:
        self.price, self.clock, self.began = price, clock, began
        self.budget = jobs[0].recipe.budget
        self.before = {job.folder: seconds_of(job.folder) for job in jobs}
        self.left = [job for job in jobs if not (job.folder / "summary.json").is_file()]
        self.limits: list[TimeLimit] = []
        self.first = True

    def limit(self, job: Job) -> TimeLimit:
        """Begin a job: take it off those that are left, and return its limit. Without a budget, or
        where the job is not timed, the limit never ends.
        """
        section, budget = job.settings, self.budget
        cost = self._price(job)
        began = self.began if self.first else self.clock()
        closing = self.price.closing
        self.first = False
        self.left = [other for other in self.left if other.folder != job.folder]
        own = section.budget if isinstance(section, TimedSection) else None
        if not isinstance(section, TimedSection) or (own is None and budget is None):
            return TimeLimit(clock=self.clock)
        seconds = math.inf if own is None else own.minutes * 60
        if budget is not None:
            share = self._share(job, budget.minutes * 60)
            seconds = min(seconds, share + self.before[job.folder])
            # the report is taken off the whole
            began, closing = self.clock(), 0.0
        minutes = min(given.minutes for given in (own, budget) if given is not None)
        limit = TimeLimit(
            seconds,
            minutes=minutes,
            after=cost.after if cost else 0.0,
            each=cost.step if cost else 0.0,
            closing=closing,
            clock=self.clock,
            began=began,
        )
        self.limits.append(limit)
        return limit

    def _share(self, job: Job, whole: float) -> float:
        """Seconds of a job: its share of what is left of the whole, by the speed of the last steps
        that were measured.
        """
        left = whole - sum(self.before.values()) - (self.clock() - self.began) - self.price.closing
        slow = next((last.slowness for last in reversed(self.limits) if last.pace.count > 1), 1.0)
        needs = [
            need(each.settings, self._price(each), self.price.usual).times(slow)
            for each in (job, *self.left)
        ]
        return share_out(needs, left)[0]

    def _price(self, job: Job) -> StagePrice | None:
        return next((cost for cost in self.price.stages if cost.name == job.name), None)


def reopen(run: RunDirectory, section: Section, limit: TimeLimit) -> None:
    """Delete the summary of a stage that time ended, if its budget is larger now and its training
    can continue. Otherwise the log names the reason.
    """
    before: Facts = run.summary().get(BUDGET) or {}
    if isinstance(section, PromptedSection):
        _warn_of_kept_answers(run, limit, before)
        return
    if (
        not before
        or (limit.minutes and limit.minutes <= before["minutes"])
        or not isinstance(section, TimedSection)
    ):
        return
    optimizer: Any = dict(section).get("optimizer")
    again = isinstance(section, RoundsSection) or complete_checkpoints(run.path / "checkpoints")
    if optimizer is not None and optimizer.counts_updates and is_short(before):
        logger.warning("%s", stays_short(run.path, before))
        return
    evaluate: Any = dict(section).get("evaluate")
    cut = measurements_cut(run.path / MEASURED_PROMPTS, evaluate.prompts) if evaluate else ""
    if evaluate and evaluate.keep == "best" and before["ended_at"] % evaluate.every:
        cut = "its best weights were chosen at its end"
    if cut or not again or _stood_on(run.path):
        why = cut or ("later stages stand on it" if again else "its models have no checkpoint")
        logger.warning(
            "%s keeps its budget: %s. To train longer, start anew with run=PATH.",
            run.path,
            why,
        )
        return
    _forget_end(run, section, before["ended_at"])
    (run.path / "summary.json").unlink()


def _warn_of_kept_answers(run: RunDirectory, limit: TimeLimit, before: Facts) -> None:
    """Log that a stage keeps its answers, which were as many as fitted, if the budget is larger
    now.
    """
    if before and (not limit.minutes or limit.minutes > before["minutes"]):
        logger.warning(
            "%s keeps its answers to %d of %d prompts, which its budget of %g minutes allowed. To "
            "answer more, start anew with run=PATH.",
            run.path,
            before["ended_at"],
            before["total"],
            before["minutes"],
        )


def _stood_on(folder: Path) -> bool:
    """True if another stage of the run was finished later."""
    own = (folder / "summary.json").stat().st_mtime
    others = [path for path in folder.parent.glob("*/summary.json") if path.parent != folder]
    return any(path.stat().st_mtime > own for path in others)


def _forget_end(run: RunDirectory, section: Section, step: int) -> None:
    """Take away the result, and the measurements that a training without this end would not have
    made.
    """
    for name in ("policy", "model"):
        shutil.rmtree(run.path / name, ignore_errors=True)
    if not isinstance(section, OnlineSection) or section.evaluate is None:
        return
    due = step % section.evaluate.every == 0
    for name, is_extra in (("heldout.jsonl", is_control), (EVALUATIONS, _is_last)):
        path = run.path / name
        rows = read_jsonl(path) if path.is_file() else []
        keep = [row for row in rows if row["step"] < step or (due and not is_extra(row))]
        if rows:
            write_jsonl(path, keep)


def _is_last(record: Facts) -> bool:
    """True of a measurement that only the end of a training makes."""
    return record["moment"] == "after"
