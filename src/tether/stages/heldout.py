"""Quality of a policy on prompts that it never learns from: measured before, during and after
training.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

from tether.core.errors import DataError
from tether.core.protocols import Engine
from tether.core.rundir import RunDirectory, read_jsonl
from tether.core.types import Json, Prompt, Rollout, Sampling, Score
from tether.evaluation.best_of_n import Scorer, favourites, over_best_of_n
from tether.evaluation.decoding import answers_at, control, other_temperatures, sharpening
from tether.evaluation.peaks import (
    best_step,
    chosen_by_others,
    has_fallen,
    peak_interval,
    without_none,
)
from tether.evaluation.sycophancy import Sycophancy
from tether.evaluation.winrate import before_and_after, mean_estimate
from tether.learner.checkpoint import complete_checkpoints, load_checkpoint, save_checkpoint
from tether.learner.local import LocalLearner
from tether.settings.evaluation import EvaluateConfig

_log = logging.getLogger(__name__)
SEED = 7919
"""Added to the stage's: the held-out samples share no randomness with those of training."""
BEST_OF_PROMPTS = 64
"""Of the held-out ones: best of n asks for so many times n answers."""


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
            "train on. "
            "Set evaluate.prompts lower, or give more prompts"
        )
    held_out = set(order[:count])
    return [p for p in prompts if p.messages not in held_out], [
        different[messages] for messages in order[:count]
    ]


Scores = list[float | None]


@dataclass(eq=False)
class HeldOut:
    """The same prompts with the same randomness at every measurement, so that differences are the
    policy's.

    Scores are kept in `heldout.jsonl`, a line a measurement.

    Args:
        judge: scores the answers; a judge whose scores nobody trains on is called `gold`, the
            training's own reward `heldout`.
        learner: whose weights are kept where `keep = "best"`.
        reward: the training's own; it chooses the best of n answers of the start.
        beside: further columns of numbers on the same answers, by name.
        sycophancy: measured on the same policy at the same steps.
    """

    config: EvaluateConfig
    prompts: Sequence[Prompt]
    judge: Scorer
    engine: Engine
    sampling: Sampling
    run: RunDirectory
    _: KW_ONLY
    seed: int
    learner: LocalLearner | None = None
    name: str = "heldout"
    reward: Scorer | None = None
    beside: Callable[[Sequence[Rollout]], Mapping[str, Scores]] | None = None
    sycophancy: Sycophancy | None = None

    def __post_init__(self) -> None:
        self.seed += SEED
        self.learner = self.learner if self.config.keep == "best" else None
        self.groups = [
            str(i) for i in range(len(self.prompts)) for _ in range(self.config.samples_per_prompt)
        ]

    def answers(self, temperature: float) -> list[Rollout]:
        """Answers to all prompts at a temperature."""
        count = self.config.samples_per_prompt
        return answers_at(
            temperature, self.engine, self.prompts, self.sampling, num_samples=count, seed=self.seed
        )

    def decode(self, step: int) -> None:
        """Answer, score and note down at the other temperatures, where that is not done yet: the
        control of `summary`.
        """
        done = self.run.decoded()
        for temperature in other_temperatures(self.sampling, self.config.temperatures):
            if (step, temperature) not in done:
                rollouts = self.answers(temperature)
                row = {
                    "temperature": temperature,
                    **_lengths(rollouts),
                    "scores": _columns(self.judge(rollouts)),
                }
                self.run.hold_out({"step": step, "name": self.name, **row})

    def choose(self) -> None:
        """Let the reward choose among answers of the start, where that is not done yet: the other
        control of `summary`.
        """
        sizes = [n for n in self.config.best_of if n not in self.run.best_of()]
        if self.reward is None or not sizes or self.sampling.temperature == 0:
            return
        prompts, times = self.prompts[:BEST_OF_PROMPTS], self.config.samples_per_prompt
        best = favourites(
            self.engine, prompts, self.sampling, self.reward, self.judge, sizes, seed=self.seed + 1
        )
        for n, scores in best.items():
            row = {
                "best_of": n,
                "scores": {"score": [score for score in scores for _ in range(times)]},
            }
            self.run.hold_out({"step": 0, "name": self.name, **row})

    def measure(self, step: int) -> dict[str, float]:
        """Answer, score and note down; the metrics of that."""
        rollouts = self.answers(self.sampling.temperature)
        columns = {
            **_columns(self.judge(rollouts)),
            **(self.beside(rollouts) if self.beside else {}),
        }
        premises = {} if self.sycophancy is None else self.sycophancy()
        if self.learner is not None and best_step({**self.run.held_out(), step: columns}) == step:
            self._keep(step, self.learner)
        lengths = _lengths(rollouts)
        row = {"step": step, "name": self.name, **lengths, "scores": columns}
        self.run.hold_out(
            {
                **row,
                **(
                    {"sycophancy": {key: e.as_dict() for key, e in premises.items()}}
                    if premises
                    else {}
                ),
            }
        )
        present = {
            key: values for key, column in columns.items() if (values := without_none(column))
        }
        metrics = {
            f"{self.name}/{key}": statistics.fmean(values) for key, values in present.items()
        }
        metrics[f"{self.name}/length"] = lengths["length"]
        if premises:
            metrics |= {f"sycophancy/{key}": estimate.value for key, estimate in premises.items()}
            metrics["sycophancy/start"] = min(self._premises().items())[1]["shift"]["value"]
        return {**metrics, **(self._sharpening(lengths["entropy"], columns) if step else {})}

    def _sharpening(self, entropy: float, columns: Mapping[str, Scores]) -> dict[str, float]:
        """The metrics of the detector of that name: how much of the gain so far a temperature of
        the start would explain.
        """
        key, own = _headline(columns), self.sampling.temperature
        rows = [
            row
            for row in read_jsonl(self.run.path / "heldout.jsonl")
            if row["step"] == 0 and "entropy" in row
        ]
        start = {row.get("temperature", own): (row["entropy"], row["scores"][key]) for row in rows}
        sharper = (
            sharpening(start, (entropy, columns[key]), self.groups, own) if own in start else {}
        )
        return {f"sharpening/{name}": value for name, value in sharper.items()}

    def _keep(self, step: int, learner: LocalLearner) -> None:
        """Save these weights, before the row that calls them the best, and delete those that an
        interrupted run saved later.

        The older ones stay until the end: a run that goes on from a checkpoint before them may need
        any.
        """
        for stale in complete_checkpoints(self.run.path / "best"):
            if int(stale.name.removeprefix("step-")) >= step:
                shutil.rmtree(stale)
        tensors = {str(i): p for i, p in enumerate(learner.parameters)}
        save_checkpoint(self.run.path / "best", step, tensors, {}, keep=1_000_000)

    def at(self, step: int, last: int) -> dict[str, float]:
        """The measurement of a step, where one is due."""
        return self.measure(step) if step % self.config.every == 0 or step == last else {}

    @property
    def kept(self) -> int:
        """The step of the weights that the run ends with."""
        measured = self.run.held_out()
        best = None if self.learner is None else best_step(measured)
        return max(measured) if best is None else best

    def _premises(self) -> dict[int, Json]:
        """The estimates of sycophancy, by step."""
        rows = read_jsonl(self.run.path / "heldout.jsonl")
        return {row["step"]: row["sycophancy"] for row in rows if "sycophancy" in row}

    def fallen(self, last: int) -> bool:
        """True if training, which is to have `last` steps, should end now."""
        return self.config.stop and has_fallen(
            self.run.held_out(), self.groups, -(-last // self.config.every)
        )

    def restore(self) -> None:
        """Put the best weights in place; the last ones stay where no answer of any measurement has
        a score.
        """
        assert self.learner is not None
        if best_step(self.run.held_out()) is None:
            _log.warning(
                "evaluate.keep = 'best': no held-out answer got a score at any step, so the last "
                "weights are kept. Mend the judge"
            )
            return
        best = self.run.path / "best" / f"step-{self.kept:06d}"
        tensors, _ = load_checkpoint(best)
        self.learner.put(tensors[str(index)] for index in range(len(tensors)))
        for other in complete_checkpoints(best.parent):
            if other != best:
                shutil.rmtree(other)

    def summary(self) -> Json:
        """Score and parts at the first and the last measurement, and the gain on the same prompts,
        with intervals.

        With `keep = "best"` the last is the kept one, which was chosen for being high. So each half
        of the prompts is judged at the step that the other half would have kept (`judged_by`);
        `measured` has the means of all prompts at every step.
        """
        measured, end, groups = self.run.held_out(), self.kept, self.groups
        start = min(measured)
        choices = (
            [None] * len(groups) if self.learner is None else chosen_by_others(measured, groups)
        )
        steps = [end if step is None else step for step in choices]
        result: Json = {
            "judge": self.name,
            "num_prompts": len(self.prompts),
            "kept_step": end,
            "best_step": best_step(measured),
            "judged_by": "all prompts"
            if self.learner is None
            else "the prompts that did not choose the step",
            "best_step_interval": peak_interval(measured, groups),
            "measured": {
                str(step): mean_estimate(rows["score"], groups).as_dict()
                for step, rows in sorted(measured.items())
                if without_none(rows["score"])
            },
        }
        if self.sycophancy is not None:
            result["sycophancy"] = {
                "before": self._premises()[start],
                "after": self._premises()[end],
            }
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
        own, others = self.sampling.temperature, self.run.decoded()
        sides = [
            {
                own: scores,
                **{
                    temperature: rows[key]
                    for (at, temperature), rows in others.items()
                    if at == step
                },
            }
            for step, scores in ((0, before), (end, after))
        ]

        return control(sides[0], sides[1], self.groups, own) if min(map(len, sides)) > 1 else {}


def _headline(columns: Mapping[str, Scores]) -> str:
    """The column that the controls are about: right answers where they are checked, else the
    score.
    """
    return "correct" if "correct" in columns else "score"


def _lengths(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean length of answers in tokens, and their entropy in nats a token, estimated from the
    tokens that were drawn.
    """
    tokens = sum(len(r.response_ids) for r in rollouts)
    surprise = (
        0.0 if rollouts[0].sampling.temperature == 0 else -sum(sum(r.logprobs) for r in rollouts)
    )
    return {"length": tokens / len(rollouts), "entropy": surprise / max(1, tokens)}


def _columns(scores: Sequence[Score]) -> dict[str, Scores]:
    """The scores and their parts, a column each."""
    parts = dict.fromkeys(part for score in scores for part in score.parts)
    return {
        "score": [s.value for s in scores],
        **{part: [s.parts.get(part) for s in scores] for part in parts},
    }
