"""Quality of a policy on prompts that it never learns from: measured before, during and after
training.
"""

from __future__ import annotations

import hashlib
import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tether.core.errors import ConfigError, DataError
from tether.core.keeping import remove
from tether.core.rundir import RunDirectory, read_jsonl
from tether.core.types import Json, Metrics, Prompt
from tether.evaluation.best_of_n import over_best_of_n
from tether.evaluation.decoding import control, other_temperatures, sharpening
from tether.evaluation.held_out import ANSWER_ENTROPY, ANSWER_LENGTH, HeldOutAnswers
from tether.evaluation.peaks import (
    Measured,
    best_step,
    chosen_by_others,
    has_fallen,
    peak_interval,
    without_none,
)
from tether.evaluation.suite import MeasuredPolicy, Moment, Record, Suite
from tether.evaluation.winrate import before_and_after, mean_estimate
from tether.settings.evaluation import EvaluateConfig
from tether.stages.learner.checkpoint import complete_checkpoints, load_checkpoint, save_checkpoint
from tether.stages.learner.local import LocalLearner

_log = logging.getLogger(__name__)
SEED = 7919
"""Added to the stage's: the held-out samples share no randomness with those of training."""


def held_out_split(prompts: Sequence[Prompt], count: int) -> tuple[list[Prompt], list[Prompt]]:
    """(training, held-out) prompts: `count` different ones, chosen by their words alone, and
    everything that says none of them.

    Raises:
        DataError: nothing would be left to train on.
    """
    different = {prompt.messages: prompt for prompt in reversed(prompts)}
    order = sorted(
        different,
        key=lambda messages: hashlib.blake2b(repr(messages).encode(), digest_size=16).digest(),
    )
    if len(order) <= count:
        raise DataError(
            f"of {len(order)} different prompts {count} cannot be held out with some left to "
            "train on. Set evaluate.prompts lower, or give more prompts",
        )
    held_out = set(order[:count])
    return [p for p in prompts if p.messages not in held_out], [
        different[messages] for messages in order[:count]
    ]


Scores = list[float | None]
COLUMNS = ("held_out", "kl")
"""Evaluators that have a number for each held-out answer."""


@dataclass(eq=False, kw_only=True)
class HeldOut:
    """A suite of evaluators along a training: the first of them on held-out prompts, which decide
    what is kept and when training ends.

    The scores of the answers are also kept in `heldout.jsonl`, a line a measurement.

    Args:
        suite: has `held_out`, and what else is measured.
        policy: as it is at every measurement; its weights change.
        learner: whose weights are kept where `keep = "best"`.
        name: of the scores in the metrics: for a judge outside of the training `gold`, for the
            training's own reward `heldout`.
        averaged: the weights that are measured at the last step are not yet those of the result.
    """

    config: EvaluateConfig
    suite: Suite
    answers: HeldOutAnswers
    policy: MeasuredPolicy
    run: RunDirectory
    learner: LocalLearner | None = None
    name: str = "heldout"
    averaged: bool = False

    def __post_init__(self) -> None:
        self.learner = self.learner if self.config.keep == "best" else None
        self.groups = self.answers.groups

    def decode(self, step: int) -> None:
        """Answer, score and note down at the other temperatures, where that is not done yet: the
        control of `summary`.
        """
        if "decoding" not in self.suite.evaluators:
            return
        moment = "after" if step else "before"
        record = self.suite.one("decoding", self._now(), step, moment)
        done = self.run.decoded()
        for temperature in other_temperatures(self.answers.sampling, self.config.temperatures):
            if (step, temperature) not in done:
                start = f"{temperature:g}/"
                row = {
                    "temperature": temperature,
                    **_lengths(record, start),
                    "scores": {
                        key.removeprefix(start): list(column.values())
                        for key, column in record["rows"].items()
                        if key.startswith(start)
                    },
                }
                self.run.hold_out({"step": step, "name": self.name, **row})

    def choose(self) -> None:
        """Let the reward choose among answers of the start, where that is not done yet: the other
        control of `summary`.
        """
        sizes = [n for n in self.config.best_of if n not in self.run.best_of()]
        if not sizes or "best_of_n" not in self.suite.evaluators:
            return
        record = self.suite.one("best_of_n", self._now(), 0, "before")
        for n in sizes:
            column = record["rows"][f"best_of_{n}"].values()
            scores = [score for score in column for _ in range(self.answers.samples)]
            row = {"best_of": n, "scores": {"score": scores}}
            self.run.hold_out({"step": 0, "name": self.name, **row})

    def _now(self) -> MeasuredPolicy:
        """A new object for the present weights. `HeldOutAnswers` keeps the answers of one object,
        so the same object would get old answers.
        """
        return replace(self.policy)

    def measure(self, step: int, moment: Moment | None = None) -> Metrics:
        """Answer, score and note down; the metrics of that.

        Raises:
            ConfigError: nothing measures the figure of `keep_by`.
        """
        policy = self._now()
        moment = moment or ("along" if step else "before")
        records = {
            name: self.suite.one(name, policy, step, moment) for name in self.suite.due("along")
        }
        columns = {
            key: list(column.values())
            for name in COLUMNS
            if name in records
            for key, column in records[name]["rows"].items()
        }
        if self.learner is not None:
            _, evaluator, figure = self.config.kept_figure
            own = columns if evaluator in COLUMNS else records[evaluator]["figures"]
            if figure not in own and without_none(columns["score"]):
                raise ConfigError(
                    f"evaluate.keep_by = {self.config.keep_by!r}: {evaluator} has no figure "
                    f"{figure!r}. Figures: {', '.join(own)}",
                )
            if best_step(self._choice({**self.run.held_out(), step: columns})) == step:
                self._keep(step, self.learner)
        lengths = _lengths(records["held_out"])
        row: Json = {"step": step, "name": self.name, **lengths, "scores": columns}
        premises = records.get("sycophancy")
        if premises:
            row["sycophancy"] = premises["figures"]
        self.run.hold_out(row)
        metrics = {f"{self.name}/length": lengths["length"]}
        for key, column in columns.items():
            if values := without_none(column):
                metrics[f"{self.name}/{key}"] = statistics.fmean(values)
        metrics |= {
            f"{name}/{key}": fields["value"]
            for name, record in records.items()
            if name not in COLUMNS
            for key, fields in record["figures"].items()
            if fields["value"] is not None
        }
        if premises:
            metrics["sycophancy/start"] = min(self._premises().items())[1]["shift"]["value"]
            low, high = (premises["figures"]["shift"][end] for end in ("low", "high"))
            if low is not None and high is not None:
                metrics["sycophancy/error"] = (high - low) / 3.92
        if step:
            metrics |= self._sharpening(lengths["entropy"], columns)
        return metrics

    def _choice(self, measured: Measured) -> dict[int, dict[str, Scores]]:
        """By step the numbers by whose mean the best weights are chosen, high ones being good."""
        sign, evaluator, figure = self.config.kept_figure
        if evaluator in COLUMNS:
            columns = {step: rows[figure] for step, rows in measured.items() if figure in rows}
        else:
            columns = {
                record["step"]: [record["figures"][figure]["value"]]
                for record in self.suite.records
                if record["evaluator"] == evaluator and figure in record["figures"]
            }
        return {
            step: {"score": [None if value is None else sign * value for value in column]}
            for step, column in columns.items()
        }

    def _sharpening(self, entropy: float, columns: Mapping[str, Scores]) -> Metrics:
        """The metrics of the detector of that name: how much of the gain so far a temperature of
        the start would explain.
        """
        key = _headline(columns)
        own = self.answers.sampling.temperature
        start = {}
        for row in read_jsonl(self.run.path / "heldout.jsonl"):
            if row["step"] == 0 and "entropy" in row:
                start[row.get("temperature", own)] = (row["entropy"], row["scores"][key])
        if own not in start:
            return {}
        sharper = sharpening(start, (entropy, columns[key]), self.groups, own)
        return {f"sharpening/{name}": value for name, value in sharper.items()}

    def _keep(self, step: int, learner: LocalLearner) -> None:
        """Save these weights, before the row that calls them the best, and delete those that an
        interrupted run saved later.

        The older ones stay until the end: a run that goes on from a checkpoint before them may need
        any.
        """
        folder = self.run.path / "best"
        for stale in complete_checkpoints(folder):
            if int(stale.name.removeprefix("step-")) >= step:
                remove(stale)
        tensors = {str(i): p for i, p in enumerate(learner.parameters)}
        save_checkpoint(folder, step, tensors, {}, keep=1_000_000)

    def at(self, step: int, last: int) -> Metrics:
        """The measurement of a step, where one is due."""
        if step == last:
            return self.measure(step, "along" if self.averaged else "after")
        return {} if step % self.config.every else self.measure(step)

    @property
    def kept(self) -> int:
        """The step of the weights that the run ends with."""
        measured = self.run.held_out()
        best = None if self.learner is None else best_step(self._choice(measured))
        return max(measured) if best is None else best

    def _premises(self) -> dict[int, Json]:
        """The estimates of sycophancy, by step."""
        rows = read_jsonl(self.run.path / "heldout.jsonl")
        return {row["step"]: row["sycophancy"] for row in rows if "sycophancy" in row}

    def fallen(self, last: int) -> bool:
        """True if training, which is to have `last` steps, should end now."""
        return self.config.stop and has_fallen(
            self.run.held_out(),
            self.groups,
            -(-last // self.config.every),
        )

    def restore(self) -> None:
        """Put the best weights in place; the last ones stay where no answer of any measurement has
        a score.
        """
        assert self.learner is not None
        if best_step(self._choice(self.run.held_out())) is None:
            _log.warning(
                "evaluate.keep = 'best': no held-out answer got a score at any step, so the last "
                "weights are kept. Mend the judge",
            )
            return
        best = self.run.path / "best" / f"step-{self.kept:06d}"
        tensors, _ = load_checkpoint(best)
        self.learner.put(tensors[str(index)] for index in range(len(tensors)))
        for other in complete_checkpoints(best.parent):
            if other != best:
                remove(other)

    def summary(self) -> Json:
        """Score and parts at the first and the last measurement, and the gain on the same prompts,
        with intervals.

        With `keep = "best"` the last is the kept one, which was chosen for being high. So each half
        of the prompts is judged at the step that the other half would have kept (`judged_by`).
        `measured` has the means of all prompts at every step.
        """
        measured = self.run.held_out()
        end = self.kept
        groups = self.groups
        start = min(measured)
        choice = self._choice(measured)
        of_answers = self.config.kept_figure[1] in COLUMNS
        halves = self.learner is not None and of_answers
        choices = chosen_by_others(choice, groups) if halves else [None] * len(groups)
        steps = [end if step is None else step for step in choices]
        result: Json = {
            "judge": self.name,
            "num_prompts": len(self.answers.prompts),
            "kept_step": end,
            "best_step": best_step(choice),
            "judged_by": "the prompts that did not choose the step" if halves else "all prompts",
            "best_step_interval": peak_interval(choice, groups) if of_answers else None,
            "measured": {
                str(step): mean_estimate(rows["score"], groups).as_dict()
                for step, rows in sorted(measured.items())
                if without_none(rows["score"])
            },
        }
        if "keep_by" in self.config.model_fields_set:
            result["kept_by"] = self.config.keep_by
        if premises := self._premises():
            result["sycophancy"] = {"before": premises[start], "after": premises[end]}
        for key in measured[start].keys() & measured[end].keys():
            before = measured[start][key]
            after = [
                measured[step][key][place] if key in measured[step] else None
                for place, step in enumerate(steps)
            ]
            if (moved := before_and_after(before, after, groups)) is not None:
                result[key] = moved
            if key == _headline(measured[start]):
                result |= self._control(key, before, after, end)
            if key == "score" and (best_of_n := over_best_of_n(self.run.best_of(), after, groups)):
                result["best_of_n"] = best_of_n
        return result

    def _control(self, key: str, before: Scores, after: Scores, end: int) -> Json:
        """The control of decoding: this column of start and policy beside those at the other
        temperatures.
        """
        own = self.answers.sampling.temperature
        first = {own: before}
        last = {own: after}
        for (step, temperature), rows in self.run.decoded().items():
            if step == 0:
                first[temperature] = rows[key]
            if step == end:
                last[temperature] = rows[key]
        if len(first) == 1 or len(last) == 1:
            return {}
        return control(first, last, self.groups, own)


def _headline(columns: Mapping[str, Scores]) -> str:
    """The column that the controls are about: right answers where they are checked, else the
    score.
    """
    return "correct" if "correct" in columns else "score"


def _lengths(record: Record, start: str = "") -> Metrics:
    """Mean length of answers in tokens, and their entropy in nats a token."""
    figures = record["figures"]
    values = {
        "length": figures[f"{start}{ANSWER_LENGTH}"]["value"],
        "entropy": figures[f"{start}{ANSWER_ENTROPY}"]["value"],
    }
    return {name: math.nan if value is None else value for name, value in values.items()}
