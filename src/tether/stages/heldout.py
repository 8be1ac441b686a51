"""How good a policy is on prompts that it never learns from: measured before, along the way and at the end, never trained on."""

from __future__ import annotations

import hashlib
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from scipy.special import stdtr
from torch import Tensor

from tether.core.config import Config
from tether.core.errors import DataError
from tether.core.protocols import Engine
from tether.core.rundir import RunDirectory, read_jsonl
from tether.core.types import Prompt, Rollout, Sampling, Score
from tether.evaluation.decoding import answers_at, control, other_temperatures, sharpening
from tether.evaluation.sycophancy import Sycophancy
from tether.evaluation.winrate import before_and_after, mean_estimate
from tether.learner.checkpoint import complete_checkpoints, load_checkpoint, save_checkpoint

SEED = 7919
"""Added to the stage's: the held-out samples share no randomness with those of training."""
FALSE_STOPS = 0.05
"""Of runs whose score never falls, at most this share is ended by `stop`, over all their measurements together."""


class EvaluateConfig(Config):
    """Which prompts are set aside, and how they are answered."""

    every: int = Field(
        default=10, ge=1, description="steps between measurements, beside one before the first step and one after the last"
    )
    prompts: int = Field(default=128, ge=2, description="different prompts that are set aside; no training prompt says the same")
    samples_per_prompt: int = Field(default=1, ge=1)
    temperature: float | None = Field(
        default=None, ge=0, description="unset: that of the training; 0: always the likeliest token"
    )
    temperatures: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        default=(0.7, 0.5, 0.0),
        description="others at which start and policy answer, before and after the training: what decoding alone gives",
    )
    keep: Literal["last", "best"] = Field(
        default="last", description="best: end with the weights of the highest measurement, those of the start among them"
    )
    stop: bool = Field(
        default=False,
        description="end the training when the score lies below an earlier one; of runs that never fall at most 5% are ended",
    )

    @model_validator(mode="after")
    def _check_greedy(self) -> Self:
        if self.temperature == 0 and self.samples_per_prompt > 1:
            raise ValueError(
                "evaluate.temperature = 0 gives a prompt the same answer each time: set samples_per_prompt = 1 or sample above 0"
            )
        return self


def set_aside(prompts: Sequence[Prompt], count: int) -> tuple[list[Prompt], list[Prompt]]:
    """(training, held-out) prompts: `count` different ones, chosen by their words alone, and everything that says none of them.

    Raises:
        DataError: nothing would be left to train on.
    """
    different = {prompt.messages: prompt for prompt in reversed(prompts)}
    order = sorted(different, key=lambda messages: hashlib.blake2b(repr(messages).encode(), digest_size=16).digest())
    if len(order) <= count:
        raise DataError(
            f"of {len(order)} different prompts {count} cannot be held out with some left to train on. "
            "Set evaluate.prompts lower, or give more prompts"
        )
    held_out = set(order[:count])
    return [p for p in prompts if p.messages not in held_out], [different[messages] for messages in order[:count]]


class Keeper(Protocol):
    """What trains: its parameters are what the best of are kept."""

    @property
    def parameters(self) -> Sequence[Tensor]: ...


class HeldOut:
    """The same prompts with the same randomness at every measurement, so that differences are the policy's.

    Scores are kept in `heldout.jsonl`, a line a measurement.

    Args:
        judge: scores the answers; a judge whose scores nobody trains on is called `gold`, the training's own reward `heldout`.
        beside: further columns of numbers on the same answers, by name.
        sycophancy: asked beside them, of the same policy.
    """

    def __init__(
        self,
        config: EvaluateConfig,
        prompts: Sequence[Prompt],
        judge: Callable[[Sequence[Rollout]], Sequence[Score]],
        engine: Engine,
        sampling: Sampling,
        run: RunDirectory,
        *,
        seed: int,
        learner: Keeper | None = None,
        name: str = "heldout",
        beside: Callable[[Sequence[Rollout]], Mapping[str, list[float | None]]] | None = None,
        sycophancy: Sycophancy | None = None,
    ) -> None:
        self.config, self.prompts, self.judge, self.engine = config, prompts, judge, engine
        self.sampling, self.run, self.seed, self.name = sampling, run, seed + SEED, name
        self.learner, self.beside, self.sycophancy = learner if config.keep == "best" else None, beside, sycophancy
        self.groups = [str(i) for i in range(len(prompts)) for _ in range(config.samples_per_prompt)]

    def decode(self, step: int) -> None:
        """Answer, score and note down at the other temperatures, where that is not done yet: the control of `summary`."""
        done = self.run.decoded()
        how: dict[str, Any] = {"num_samples": self.config.samples_per_prompt, "seed": self.seed}
        for temperature in other_temperatures(self.sampling, self.config.temperatures):
            if (step, temperature) not in done:
                rollouts = answers_at(temperature, self.engine, self.prompts, self.sampling, **how)
                told = {"temperature": temperature, **_told(rollouts), "scores": _columns(self.judge(rollouts))}
                self.run.hold_out({"step": step, "name": self.name, **told})

    def measure(self, step: int) -> dict[str, float]:
        """Answer, score and note down; the metrics of that."""
        groups = self.engine.generate(self.prompts, self.sampling, num_samples=self.config.samples_per_prompt, seed=self.seed)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        columns = {**_columns(self.judge(rollouts)), **(self.beside(rollouts) if self.beside else {})}
        asked = {} if self.sycophancy is None else {"sycophancy": {k: e.as_dict() for k, e in self.sycophancy().items()}}
        if self.learner is not None and best_step({**self.run.held_out(), step: columns}) == step:
            self._keep(step, self.learner)
        told = _told(rollouts)
        self.run.hold_out({"step": step, "name": self.name, **told, "scores": columns, **asked})
        means = {f"{self.name}/{key}": statistics.fmean(known) for key, values in columns.items() if (known := _known(values))}
        premises = {f"sycophancy/{key}": found["value"] for key, found in asked.get("sycophancy", {}).items()}
        if premises:
            premises["sycophancy/start"] = min(self._premises().items())[1]["shift"]["value"]
        means[f"{self.name}/length"] = told["length"]
        return {**means, **premises, **(self._sharpening(told["entropy"], columns) if step else {})}

    def _sharpening(self, entropy: float, columns: Mapping[str, list[float | None]]) -> dict[str, float]:
        """What the detector of that name reads: how much of the gain so far a temperature of the start would explain."""
        key, own = "correct" if "correct" in columns else "score", self.sampling.temperature
        rows = [row for row in read_jsonl(self.run.path / "heldout.jsonl") if row["step"] == 0 and "entropy" in row]
        start = {row.get("temperature", own): (row["entropy"], row["scores"][key]) for row in rows}
        found = sharpening(start, (entropy, columns[key]), self.groups, own) if own in start else None
        if found is None:
            return {}
        numbers = {"gain": found.gain.value, "share": found.share, "temperature": found.temperature, "sure": float(found.sure)}
        return {f"sharpening/{name}": value for name, value in numbers.items()}

    def _keep(self, step: int, learner: Keeper) -> None:
        """These weights, before the row that calls them the best; what an interrupted run kept from here on goes.

        The older ones stay until the end: a run that goes on from a checkpoint before them may need any.
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
    def best(self) -> int | None:
        """The step of the highest mean score; the first of equals."""
        return best_step(self.run.held_out())

    @property
    def kept(self) -> int:
        """The step of the weights that the run ends with."""
        best = None if self.learner is None else self.best
        return max(self.run.held_out()) if best is None else best

    def _premises(self) -> dict[int, dict[str, Any]]:
        """What was found of sycophancy, by step."""
        rows = read_jsonl(self.run.path / "heldout.jsonl")
        return {row["step"]: row["sycophancy"] for row in rows if "sycophancy" in row}

    def fallen(self, last: int) -> bool:
        """Whether training, which is to have `last` steps, should end now."""
        return self.config.stop and has_fallen(self.run.held_out(), self.groups, -(-last // self.config.every))

    def restore(self) -> None:
        """Put the best weights in place."""
        assert self.learner is not None
        tensors, _ = load_checkpoint(self.run.path / "best" / f"step-{self.best:06d}")
        with torch.no_grad():
            for index, parameter in enumerate(self.learner.parameters):
                parameter.copy_(tensors[str(index)])
        for other in complete_checkpoints(self.run.path / "best"):
            if other.name != f"step-{self.best:06d}":
                shutil.rmtree(other)

    def summary(self) -> dict[str, Any]:
        """Score and parts at the first and the last measurement, and what was gained on the same prompts, with intervals.

        With `keep = "best"` the last is the kept one, which was chosen for being high. So each half of the prompts is told at the
        step that the other half would have kept (`judged_by`); `measured` has the means of all prompts at every step.
        """
        measured = self.run.held_out()
        kept = self.kept
        first, chosen = measured[min(measured)], {} if self.learner is None else chosen_by_others(measured, self.groups)
        steps = [kept if (step := chosen.get(i)) is None else step for i in range(len(self.groups))]
        means = {step: mean_estimate(rows["score"], self.groups).as_dict() for step, rows in sorted(measured.items())}
        result: dict[str, Any] = {"judge": self.name, "num_prompts": len(self.prompts), "kept_step": kept, "best_step": self.best}
        result["judged_by"] = "all prompts" if self.learner is None else "the prompts that did not choose the step"
        result["best_step_interval"] = peak_interval(measured, self.groups)
        result["measured"] = {str(step): mean for step, mean in means.items()}
        if self.sycophancy is not None:
            premises = self._premises()
            result["sycophancy"] = {"before": premises[min(measured)], "after": premises[kept]}
        for key in first.keys() & measured[kept].keys():
            after = [measured[step][key][place] if key in measured[step] else None for place, step in enumerate(steps)]
            if (found := before_and_after(first[key], after, self.groups)) is not None:
                result[key] = found
            if key == ("correct" if "correct" in first else "score"):
                result |= self._control(key, first[key], after, kept)
        return result

    def _control(self, key: str, before: Sequence[float | None], after: Sequence[float | None], kept: int) -> dict[str, Any]:
        """What decoding alone gives: this column of start and policy beside those at the other temperatures."""
        others: dict[int, dict[float, Sequence[float | None]]] = {0: {}, kept: {}}
        for (step, temperature), rows in self.run.decoded().items():
            others.get(step, {})[temperature] = rows[key]
        own = self.sampling.temperature
        known = others[0] and others[kept]  # a run of an earlier revision has none of the start
        return control({own: before, **others[0]}, {own: after, **others[kept]}, self.groups, own) if known else {}


Measured = Mapping[int, Mapping[str, Sequence[float | None]]]
"""By step: columns of numbers, one an answer; `score` is the judge's."""


def best_step(measured: Measured) -> int | None:
    """The step of the highest mean score; the first of equals."""
    means = {step: statistics.fmean(known) for step, rows in measured.items() if (known := _known(rows["score"]))}
    return max(sorted(means), key=means.__getitem__, default=None)


def halves(groups: Sequence[str]) -> tuple[list[int], list[int]]:
    """The answers of every other prompt, and those of the rest."""
    place = {name: number for number, name in enumerate(dict.fromkeys(groups))}
    first, second = ([i for i, name in enumerate(groups) if place[name] % 2 == side] for side in (0, 1))
    return first, second


def scores_of(measured: Measured, answers: Sequence[int]) -> dict[int, dict[str, list[float | None]]]:
    """The scores of these answers alone."""
    return {step: {"score": [rows["score"][i] for i in answers]} for step, rows in measured.items()}


def chosen_by_others(measured: Measured, groups: Sequence[str]) -> dict[int, int | None]:
    """For each answer the best step of the other half of the prompts: what it says there had no part in the choice."""
    first, second = halves(groups)
    by_first, by_second = (best_step(scores_of(measured, half)) for half in (first, second))
    return dict.fromkeys(first, by_second) | dict.fromkeys(second, by_first)


def has_fallen(measured: Measured, groups: Sequence[str], looks: int, *, num_draws: int = 10_000, seed: int = 0) -> bool:
    """Whether the last measurement lies below an earlier one, clearly enough that few runs without a fall would show as much.

    Equation: T = max over earlier s of (x̄_s − x̄_now) / se_s, compared with its own distribution where nothing changed: every
    prompt's deviations are multiplied by one normal number, and each draw divided by the same root of χ²/(G − 1), as in Student's
    t. So the choice of the highest is in it, and what neighbouring measurements have in common. Each of the `looks` planned
    measurements gets an equal part of `FALSE_STOPS` (Bonferroni).
    Paper: White 2000, https://doi.org/10.1111/1468-0262.00152; multipliers: Chernozhukov et al. 2013,
    https://doi.org/10.1214/13-AOS1161.
    Trap: it asks for a fall below *any* earlier measurement, not below the highest alone, which noise has chosen.
    """
    steps, sums, counts = _by_prompt(measured, groups)
    if len(steps) < 2 or steps[-1] != max(measured) or len(sums) < 2:
        return False
    freedom, total, level = len(sums) - 1, counts.sum(0), FALSE_STOPS / max(looks, len(steps) - 1)
    means = sums.sum(0) / total
    parts = (sums - counts * means) / total  # what each prompt adds to the error of each mean
    moved = parts[:, :-1] - parts[:, -1:]
    errors = np.sqrt((freedom + 1) / freedom * (moved**2).sum(0)) + 1e-9 * (1 + np.abs(means[-1]))
    highest = float(((means[:-1] - means[-1]) / errors).max())
    alone = float(stdtr(freedom, -highest))
    if alone >= level or alone * len(errors) < level:  # too little were it the only comparison, or enough were they unrelated
        return alone < level
    generator = np.random.default_rng(seed)
    scale = np.sqrt((freedom + 1) / generator.chisquare(freedom, num_draws))
    draws = (generator.standard_normal((num_draws, len(sums))) @ (moved / errors)).max(1) * scale
    return (1 + int((draws >= highest).sum())) / (1 + num_draws) < level


def peak_interval(measured: Measured, groups: Sequence[str], *, num_resamples: int = 1000, seed: int = 0) -> tuple[int, int]:
    """Between which steps the highest mean lies in 95% of resamples of the prompts."""
    steps, sums, counts = _by_prompt(measured, groups)
    drawn = np.random.default_rng(seed).integers(len(sums), size=(num_resamples, len(sums)))
    weights = np.stack([np.bincount(row, minlength=len(sums)) for row in drawn])
    with np.errstate(invalid="ignore"):
        highest = np.nan_to_num((weights @ sums) / (weights @ counts), nan=-np.inf).argmax(1)
    low, high = np.quantile(highest, [0.025, 0.975], method="nearest")
    return steps[int(low)], steps[int(high)]


def _by_prompt(measured: Measured, groups: Sequence[str]) -> tuple[list[int], NDArray[np.float64], NDArray[np.float64]]:
    """The steps at which anything was scored, and each prompt's sum and number of scores there, (prompts, steps)."""
    steps = [step for step in sorted(measured) if _known(measured[step]["score"])]
    place = {name: number for number, name in enumerate(dict.fromkeys(groups))}
    sums, counts = np.zeros((2, len(place), len(steps)))
    for column, step in enumerate(steps):
        for group, value in zip(groups, measured[step]["score"], strict=True):
            if value is not None:
                sums[place[group], column] += value
                counts[place[group], column] += 1
    return steps, sums, counts


def _told(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """How long answers are, in tokens, and their entropy, in nats a token, as the tokens that were drawn tell it."""
    tokens = sum(len(r.response_ids) for r in rollouts)
    surprise = 0.0 if rollouts[0].sampling.temperature == 0 else -sum(sum(r.logprobs) for r in rollouts)
    return {"length": tokens / len(rollouts), "entropy": surprise / max(1, tokens)}


def _columns(scores: Sequence[Score]) -> dict[str, list[float | None]]:
    """The scores and their parts, a column each."""
    parts = dict.fromkeys(part for score in scores for part in score.parts)
    return {"score": [s.value for s in scores], **{part: [s.parts.get(part) for s in scores] for part in parts}}


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]
