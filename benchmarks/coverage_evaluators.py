"""Cells of `benchmarks.coverage` for evaluators: win rates at equal length, rankings, right choices,
calibration, means that a machine helps to judge.

Each prompt has 1 or 4 answers. Where one prompt has several, its own leaning moves them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from tether.evaluation.length_controlled import length_controlled_win_rate
from tether.evaluation.multiple_choice import calibration_estimate
from tether.evaluation.ranking import rank_policies
from tether.stats import Estimate, grouped_mean, grouped_share, mean_of_runs
from tether.stats.prediction_powered import prediction_powered_win_rate

SIZES = tuple((prompts, each) for prompts in (20, 40, 150) for each in (1, 4))
LEANING = 0.8
DRAWS = 2000
Generator = np.random.Generator


class Row(NamedTuple):
    """A cell as `benchmarks.coverage.Case` has it; `draws` 0 stands for the command's number."""

    kind: str
    name: str
    truth: float
    draw: Callable[[Generator], Estimate]
    draws: int = 0


def _chance(odds: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-odds))


def _expected(odds: float, spread: float) -> float:
    """The mean chance of odds that vary by a normal of this deviation."""
    normal, weights = np.polynomial.hermite_e.hermegauss(40)
    return float(weights @ _chance(odds + spread * normal) / weights.sum())


def _named(prompts: int, each: int) -> str:
    return f"{prompts} prompts × {each}"


def lengths() -> Iterator[Row]:
    """A judge who likes length, and a model of longer answers; a bootstrap of 200 refits a draw."""
    skill = 0.6
    for prompts, each in SIZES:
        spread = LEANING if each > 1 else 0.0

        def draw(
            g: Generator,
            prompts: int = prompts,
            each: int = each,
            spread: float = spread,
        ) -> Estimate:
            count, leaning = prompts * each, np.repeat(g.normal(size=prompts), each)
            base = g.integers(200, 1500, count)
            own = np.maximum(base + g.normal(150, 400, count).astype(int), 10)
            odds = skill + spread * leaning - np.tanh((base - own) / 400)
            wins = (g.random(count) < _chance(odds)).astype(float)
            owners = np.repeat(np.arange(prompts), each).tolist()
            return length_controlled_win_rate(
                wins.tolist(),
                own.tolist(),
                base.tolist(),
                prompts=owners,
            )

        draws = 400 if (prompts, each) == (150, 1) else 200
        truth = _expected(skill, spread)
        yield Row("win rate at equal length", _named(prompts, each), truth, draw, draws)


def _tournament(g: Generator, prompts: int, each: int) -> Estimate:
    """The difference of the first and the last of three policies, `each` comparisons of any two."""
    strengths, leanings = np.array([0.5, 0.0, -0.5]), g.normal(0, LEANING, (prompts, 3))
    owner = np.repeat(np.arange(prompts), 3 * each)
    left = np.tile([0, 1, 2], prompts * each)
    right = (left + 1) % 3
    odds = strengths[left] - strengths[right] + leanings[owner, left] - leanings[owner, right]
    wins = (g.random(len(odds)) < _chance(odds)).astype(float)
    names = np.array(["a", "b", "c"])
    ranking = rank_policies(
        names[left].tolist(),
        names[right].tolist(),
        wins.tolist(),
        owner.tolist(),
    )
    return ranking.difference("a", "c")


def _true_difference() -> float:
    """The strengths to which the fit of ever more prompts goes: leanings flatten odds."""
    sure = [_expected(odds, LEANING * 2**0.5) for odds in (0.5, 0.5, -1.0)]
    return rank_policies(["a", "b", "c"], ["b", "c", "a"], sure).difference("a", "c").value


def rankings() -> Iterator[Row]:
    """Three policies that are half a nat apart, all compared on each prompt."""
    for prompts, each in SIZES:
        draw = partial(_tournament, prompts=prompts, each=each)
        name, truth = _named(prompts, each), _true_difference()
        yield Row("difference of two policies", name, truth, draw, DRAWS)


def _answered(g: Generator, count: int, error: float) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of the likeliest choice, and answers that are right less often than they say."""
    probabilities = 0.25 + 0.75 * _chance(g.normal(size=count))
    chance = probabilities - error * (probabilities - 0.25)
    return probabilities, (g.random(count) < chance).astype(float)


def choices() -> Iterator[Row]:
    """Questions with four choices, of which one model answers each once."""
    for questions in (20, 40, 150, 500):
        for rate in (0.25, 0.7):

            def right(g: Generator, questions: int = questions, rate: float = rate) -> Estimate:
                return grouped_share((g.random(questions) < rate).astype(float), None)

            name = f"{questions} questions, rate {rate}"
            yield Row("right choices", name, rate, right, DRAWS)
        for error in (0.1, 0.4):
            # no bin is less sure than it is right, so gaps add up to their mean
            truth = error * 0.375

            def said(g: Generator, questions: int = questions, error: float = error) -> Estimate:
                return calibration_estimate(*_answered(g, questions, error))

            name = f"{questions} questions, error {truth:.3g}"
            yield Row("calibration error", name, truth, said, DRAWS)
        for sure, rate in ((0.6, 0.6), (0.9, 0.9), (0.99, 0.99), (0.99, 0.9), (0.9, 0.97)):

            def alike(
                g: Generator,
                questions: int = questions,
                sure: float = sure,
                rate: float = rate,
            ) -> Estimate:
                right = (g.random(questions) < rate).astype(float)
                return calibration_estimate(np.full(questions, sure), right)

            name = f"{questions} questions, {sure:.0%} sure, {rate:.0%} right"
            yield Row("calibration error", name, abs(sure - rate), alike, DRAWS)


def judged_by_machine() -> Iterator[Row]:
    """Wins of which people judge half of all prompts, or 32 of 40, and a machine, which errs in a fifth,
    all.
    """
    sizes = [(prompts, each, prompts // 2, 0.5) for prompts, each in SIZES]
    for prompts, each, few, skill in [*sizes, (40, 1, 32, 1.4), (40, 4, 32, 3.0)]:

        def draw(
            g: Generator,
            prompts: int = prompts,
            each: int = each,
            few: int = few,
            skill: float = skill,
        ) -> Estimate:
            leaning = LEANING if each > 1 else 0.0
            odds = skill + leaning * np.repeat(g.normal(size=prompts), each)
            people = g.random(prompts * each) < _chance(odds)
            machine = np.where(g.random(len(people)) < 0.2, ~people, people).astype(float)
            judged = np.repeat(g.permutation(prompts) < few, each)
            labels = [
                float(label) if own else None for label, own in zip(people, judged, strict=True)
            ]
            owners = np.repeat(np.arange(prompts), each).tolist()
            return prediction_powered_win_rate(labels, machine.tolist(), owners).estimate

        truth = _expected(skill, LEANING if each > 1 else 0.0)
        kind = "win rate judged by people and machine"
        name = _named(prompts, each) + f", {truth:.0%} won" * (skill != 0.5)
        yield Row(kind, name, truth, draw, DRAWS)


def seeds() -> Iterator[Row]:
    """Gains of runs that share 150 prompts, and their start's answers or not."""
    for count in (3, 5, 10):
        for start, spread in (("one start", 0.0), ("one start", 0.3), ("own starts", 0.1)):

            def draw(
                g: Generator,
                count: int = count,
                start: str = start,
                spread: float = spread,
            ) -> Estimate:
                before = g.normal(size=(1 if start == "one start" else count, 150))
                effect = 0.3 * g.normal(size=150) + spread * g.normal(size=(count, 1))
                gains = effect + g.normal(size=(count, 150)) - before
                runs = [Estimate(one.mean(), -9.0, 9.0, 150) for one in gains]
                return mean_of_runs(runs, grouped_mean(gains.mean(0), None))[0]

            name = f"{count} seeds of {start}, apart by {spread}"
            yield Row("mean over seeds", name, 0.0, draw, DRAWS)


KINDS = (rankings, choices, judged_by_machine, seeds)
SLOW = (lengths,)
"""Kinds of which one draw takes a second and more: measured on demand."""
