"""Answers to held-out prompts, and the evaluator of their scores."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tether.core.protocols import Engine, count_of
from tether.core.types import Json, Prompt, Rollout, Sampling, Score
from tether.evaluation.suite import Figures, MeasuredPolicy, by_row, row_names
from tether.evaluation.winrate import MaybeScores, mean_estimate
from tether.stats import Estimate, jackknife, without_interval
from tether.stats.groups import by_group
from tether.stats.means import FEWEST_GROUPS, mean_interval

Scorer = Callable[[Sequence[Rollout]], Sequence[Score]]


def answers_at(
    temperature: float,
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    num_samples: int,
    seed: int,
    first: int = 0,
) -> list[Rollout]:
    """Answers to the prompts at another temperature, `num_samples` each; a greedy one, always the
    same, is drawn once. `first` is the place of the first prompt among all, by which answers are
    drawn.
    """
    drawn = 1 if temperature == 0 else num_samples
    what = "held-out" if temperature == sampling.temperature else "measuring controls:"
    tell = count_of(f"{what} answers at temperature {temperature:g}", len(prompts) * drawn)
    groups = engine.generate(
        prompts,
        replace(sampling, temperature=temperature),
        num_samples=drawn,
        seed=seed,
        ordinals=list(range(first, first + len(prompts))),
        progress=tell,
    )
    return [
        rollout
        for group in groups
        for rollout in group.rollouts
        for _ in range(num_samples // drawn)
    ]


def as_block(rollouts: Sequence[Rollout], whole: bool) -> Json:
    """Answers as a comparison keeps them: texts, how many came to their end, and how long they are on
    average, in tokens; of `outcomes` those that no judge decides: failures of an environment, and
    with `whole` what it gave. The texts are then whole episodes.
    """
    outcomes = [r.outcome if whole or r.failure else None for r in rollouts]
    rows = [
        one and [one.value, {} if r.failure else one.parts, one.reason]
        for r, one in zip(rollouts, outcomes, strict=True)
    ]
    turns = ([f"{turn.role}: {turn.spoken}" for turn in r.turns] for r in rollouts)
    return {
        "texts": ["\n\n".join(each) for each in turns] if whole else [r.text for r in rollouts],
        **({"outcomes": rows} if any(rows) else {}),
        "finished": statistics.fmean(r.finished for r in rollouts),
        "length": statistics.fmean(r.num_written for r in rollouts),
    }


@dataclass(eq=False, kw_only=True)
class HeldOutAnswers:
    """Answers to the same prompts with the same randomness at every measurement, so that
    differences are the policy's.

    Evaluators share them: the answers of one `MeasuredPolicy` are drawn once.

    Args:
        judge: scores the answers.
        samples: answers to each prompt.
    """

    prompts: Sequence[Prompt]
    sampling: Sampling
    judge: Scorer
    seed: int
    samples: int = 1
    _last: tuple[MeasuredPolicy, list[Rollout]] | None = field(default=None, init=False)

    def of(self, policy: MeasuredPolicy) -> list[Rollout]:
        """Answers at the temperature of training."""
        if self._last is None or self._last[0] is not policy:
            self._last = policy, self.at(policy, self.sampling.temperature)
        return self._last[1]

    def at(self, policy: MeasuredPolicy, temperature: float) -> list[Rollout]:
        """Answers at another temperature."""
        return answers_at(
            temperature,
            policy.engine,
            self.prompts,
            self.sampling,
            num_samples=self.samples,
            seed=self.seed,
        )

    @property
    def groups(self) -> list[str]:
        """The prompt of each answer."""
        return [str(place) for place in range(len(self.prompts)) for _ in range(self.samples)]

    def scored(
        self,
        rollouts: Sequence[Rollout],
        *,
        name: str = "",
        proxy: Scorer | None = None,
    ) -> Figures:
        """Scores of answers and their parts, their length and their entropy; `name` begins each
        name.
        """
        columns = scores_by_part(self.judge(rollouts))
        if proxy is not None:
            columns["proxy"] = [score.value for score in proxy(rollouts)]
        named = {f"{name}{key}": column for key, column in columns.items()}
        figures = column_figures(named, self.groups)
        figures[f"{name}{ANSWER_LENGTH}"] = mean_estimate(
            [float(rollout.num_written) for rollout in rollouts],
            self.groups,
        )
        figures[f"{name}{ANSWER_ENTROPY}"] = entropy_of(rollouts, self.groups)
        return figures


ANSWER_LENGTH = "answer_tokens"
ANSWER_ENTROPY = "answer_entropy"


@dataclass
class HeldOutScores:
    """Implements core.protocols.Evaluator: the judge's `score` of held-out answers and its parts,
    `answer_tokens`, `answer_entropy`.

    Args:
        proxy: the training's own reward, where another judge scores; a further figure.
    """

    name = "held_out"

    answers: HeldOutAnswers
    proxy: Scorer | None = None

    def __call__(self, policy: MeasuredPolicy, step: int) -> Figures:
        return self.answers.scored(self.answers.of(policy), proxy=self.proxy)


def column_figures(columns: Mapping[str, MaybeScores], groups: Sequence[str]) -> Figures:
    """The mean of each column of numbers, an entry an answer; `groups` has the prompt of each."""
    means = {
        name: mean_estimate(column, groups)
        for name, column in columns.items()
        if any(value is not None for value in column)
    }
    ids = row_names(groups)
    prompts = {} if ids == list(groups) else dict(zip(ids, groups, strict=True))
    return Figures(means, by_row(groups, columns), prompts)


def scores_by_part(scores: Sequence[Score]) -> dict[str, list[float | None]]:
    """The scores and their parts, a column each."""
    parts = dict.fromkeys(part for score in scores for part in score.parts)
    return {
        "score": [score.value for score in scores],
        **{part: [score.parts.get(part) for score in scores] for part in parts},
    }


def entropy_of(rollouts: Sequence[Rollout], groups: Sequence[str]) -> Estimate:
    """Entropy of answers in nats a token, estimated from the tokens that were drawn.

    Equation: ``−Σ log π / Σ tokens``; the interval is a jackknife over prompts.
    Trap: greedy answers are not drawn, and have 0.
    """
    tokens = sum(rollout.num_written for rollout in rollouts)
    if rollouts[0].sampling.temperature == 0:
        return without_interval(0.0, len(rollouts), "draws: the answers are greedy")
    value = -sum(sum(rollout.logprobs) for rollout in rollouts) / max(1, tokens)
    pairs = [(-sum(rollout.logprobs), rollout.num_written) for rollout in rollouts]
    nats, lengths = (
        by_group(np.array(column, dtype=np.float64), groups)[0]
        for column in zip(*pairs, strict=True)
    )
    if len(nats) < FEWEST_GROUPS:
        why = f"prompts: {len(nats)}, and {FEWEST_GROUPS} are needed"
        return without_interval(value, len(rollouts), why)
    without = (nats.sum() - nats) / np.maximum(1, lengths.sum() - lengths)
    low, high = mean_interval(value, jackknife(without, lengths))
    return Estimate(value, max(low, 0.0), high, len(rollouts))
