"""The combinations of a sweep as its folder has them: settings, each with a run for every seed, and
their numbers.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np

from tether.core.errors import RunError
from tether.core.rundir import SWEEP
from tether.core.types import Facts, JsonValue
from tether.stats import Estimate, grouped_mean, holm, mean_of_runs, p_above_zero
from tether.watch.report.about import GOLD_JUDGE, Judge
from tether.watch.report.evaluators import (
    ABILITIES,
    MOST_CURVES,
    SHOWN_ELSEWHERE,
    by_importance,
    figure_words,
    last_figures,
)
from tether.watch.report.measures import MEASURES
from tether.watch.report.numbers import SENTENCES, Show, percent, signed
from tether.watch.report.reading import (
    KINDS,
    Journey,
    SubRun,
    answers_in,
    finite,
    json_of,
    judged_stages,
    listed,
    mapping,
    printable,
    read_sub_run,
)


@dataclass(frozen=True)
class SweepRun:
    """The run of one seed at one setting; `name` is unique there."""

    name: str
    label: str
    journey: Journey

    @property
    def policy(self) -> SubRun:
        """The stage that the page measures."""
        return self.journey.main


@dataclass(frozen=True)
class Setting:
    """One place of the sliders: a value for each key, as people read it, and its runs."""

    values: tuple[str, ...]
    members: list[SweepRun] = field(default_factory=list)


@dataclass(frozen=True)
class Sweep:
    """All of a sweep that has run; `keys` are those with sliders and their values, in order."""

    path: Path
    keys: Mapping[str, Sequence[str]]
    settings: Sequence[Setting]
    waiting: Sequence[str]
    """Combinations of which no stage has taken a step."""
    notes: Sequence[str]

    @property
    def members(self) -> list[SweepRun]:
        return [member for setting in self.settings for member in setting.members]

    def values(
        self,
        read: Callable[[SweepRun], Estimate | None],
    ) -> list[list[tuple[SweepRun, Estimate]]]:
        """A number of each run that has it, by setting."""
        return [
            [(one, value) for one in setting.members if (value := read(one)) is not None]
            for setting in self.settings
        ]

    def title(self, setting: Setting) -> str:
        """The setting in words."""
        pairs = zip(self.keys, setting.values, strict=True)
        return ", ".join(f"{key} = {value}" for key, value in pairs) or "the recipe"


GROUPS_A_FREEDOM = 10
"""Observations for a degree of freedom of the tail beyond a single run's interval. Skewed scores make
it longer than the normal one: it is that of lognormal losses of 16 to 150 prompts.
"""
GAINS = ("gold", "heldout", "proxy", "right")
FIGURE_KEY = "evaluated-"
"""Begins the key of a figure of an evaluator."""
SHARES_OF_TASKS = ("acc", "acc_norm", "exact_match")
"""Metrics of lm-eval that are shares of right answers."""


def read_sweep(run: Path) -> Sweep | None:
    """The sweep in a run directory; None where it has none, or where no combination has begun.

    Raises:
        RunError: the table of its combinations is damaged.
    """
    notes: list[str] = []
    rows = [mapping(row) for row in listed(json_of(run / SWEEP, notes), "combinations")]
    if notes:
        raise RunError(
            f"{run / SWEEP} is damaged. The command that began the sweep writes it again",
        )
    values = [mapping(row, "values") for row in rows]
    names = list(dict.fromkeys(key for row in values for key in row))
    sliders = [name for name in names if name.rpartition(".")[2] != "seed"]
    keys = {printable(name): _in_order([row.get(name) for row in values]) for name in sliders}
    settings = {place: Setting(place) for place in product(*keys.values())}
    shared: dict[Path, SubRun] = {}
    waiting = []
    for row, own in zip(rows, values, strict=True):
        place = tuple(_shown(own.get(name)) for name in sliders)
        seeds = ", ".join(f"{name} {_shown(own[name])}" for name in own if name not in sliders)
        label = ", ".join(f"{name}={_shown(value)}" for name, value in own.items())
        journey = _journey(run, mapping(row, "stages"), shared, notes)
        if journey is None:
            waiting.append(label)
        else:
            settings[place].members.append(SweepRun(seeds, label, journey))
    if not any(setting.members for setting in settings.values()):
        return None
    return Sweep(run, keys, [*settings.values()], waiting, list(dict.fromkeys(notes)))


def _journey(
    run: Path,
    stages: Facts,
    shared: dict[Path, SubRun],
    notes: list[str],
) -> Journey | None:
    """The stages of a combination; None before the last one that trains has taken a step."""
    paths = (Path(str(path)) for path in stages.values())
    folders = [run / path for path in paths if not path.is_absolute() and ".." not in path.parts]
    marks = "metrics.jsonl", "summary.json"
    begun = [folder for folder in folders if any((folder / mark).is_file() for mark in marks)]
    for folder in begun:
        if folder not in shared:
            shared[folder] = read_sub_run(folder, notes)
    trained = [folder for folder in folders if KINDS.get(_base(folder)) not in ("verdict", None)]
    if not begun or (trained and trained[-1] not in begun):
        return None
    recipe = mapping(json_of(run / "command.json", notes), "config")
    own = SubRun(run.resolve().name)
    answers = [
        row for folder in begun if _base(folder) == "evaluate" for row in answers_in(folder, notes)
    ]
    return Journey(own, judged_stages([shared[folder] for folder in begun]), answers, (), recipe)


def _base(folder: Path) -> str:
    return folder.name.partition("-")[0]


def _in_order(values: Sequence[JsonValue]) -> list[str]:
    """Each value once in readable form: numbers from small to large, others in the given order."""
    if all(finite(value) is not None for value in values):
        values = sorted(values, key=float)
    return list(dict.fromkeys(map(_shown, values)))


def _shown(value: object) -> str:
    if (number := finite(value)) is not None:
        return f"{number:.6g}"
    return printable(value if isinstance(value, str) else json.dumps(value))


@dataclass(frozen=True)
class Measured:
    """A number of all runs: by setting those that have it, each with its run."""

    key: str
    name: str
    short: str
    show: Show
    values: Sequence[Sequence[tuple[SweepRun, Estimate]]]
    pair: Callable[[float, float], float] | None = None

    def mean(self, setting: int) -> Estimate | None:
        """The mean over the seeds of a setting, with its interval over seeds and prompts. A single run
        has its own. None where no run has the number. Shares end at 0 and 1, and so do their
        intervals.
        """
        return self._mean(setting)[0] if self.values[setting] else None

    def _mean(self, setting: int) -> tuple[Estimate, float]:
        """The mean, and the degrees of freedom of its interval."""
        runs, values = zip(*self.values[setting], strict=True)
        if len(values) == 1:
            return values[0], max(values[0].count / GROUPS_A_FREEDOM, 1.0)
        mean, freedom = mean_of_runs(values, self._over_prompts(runs))
        mean = mean._replace(count=0)
        if self.show is not percent or mean.reason:
            return mean, freedom
        return mean._replace(low=max(mean.low, 0.0), high=min(mean.high, 1.0)), freedom

    def _over_prompts(self, runs: Sequence[SweepRun]) -> Estimate | None:
        """The mean of all runs over the prompts that each of them answered; None where too few are
        judged. The prompts of a KL are each run's own.
        """
        if self.key == "kl":
            return Estimate(0.0, 0.0, 0.0, 0)
        if self.pair is None:
            return None
        by_run = [_by_prompt(run, self.pair) for run in runs]
        prompts = set(by_run[0]).intersection(*by_run)
        means = np.array([fmean(one[prompt] for one in by_run) for prompt in sorted(prompts)])
        mean = grouped_mean(means, None) if prompts else None
        return mean if mean and not mean.reason else None

    def gaining(self) -> list[int]:
        """The settings whose mean lies above no difference, with an error of at most 5% in all
        (`holm`).
        """
        places = [place for place, runs in enumerate(self.values) if runs]
        even = 0.5 if self.show is percent else 0.0
        p_values = holm(
            [
                p_above_zero(mean._replace(value=mean.value - even, low=mean.low - even), freedom)
                for mean, freedom in map(self._mean, places)
            ],
        )
        return [place for place, p in zip(places, p_values, strict=True) if p < 0.05]

    @property
    def greatest(self) -> int:
        """The setting with the greatest mean."""
        means = {n: mean.value for n in range(len(self.values)) if (mean := self.mean(n))}
        return max(means, key=lambda number: means[number])


def _by_prompt(run: SweepRun, pair: Callable[[float, float], float]) -> dict[str, float]:
    """The mean of a number over the judged answers to each prompt."""
    by_prompt = defaultdict[str, list[float]](list)
    for row in run.journey.answers:
        start = finite(row, "gold_before")
        end = finite(row, "gold_after")
        if start is not None and end is not None:
            by_prompt[str(row.get("prompt"))].append(pair(start, end))
    return {prompt: fmean(numbers) for prompt, numbers in by_prompt.items()}


def measures_of(sweep: Sweep, judge: Judge = GOLD_JUDGE) -> list[Measured]:
    """The numbers that runs of the sweep have; a reward beside another judge is a proxy."""
    own = all(member.journey.own_reward for member in sweep.members)
    words = {"judge": judge.label, "reward": "reward" if own else "proxy"}
    made = []
    for one in MEASURES:
        values = sweep.values(lambda run, read=one.read: read(run.policy))
        if any(values):
            made.append(
                Measured(
                    one.key,
                    one.name.format(**words),
                    one.short.format(**words),
                    one.show,
                    values,
                    one.pair,
                ),
            )
    return [*made, *_evaluated(sweep)]


def control_arms(members: Sequence[SweepRun]) -> Iterator[tuple[SweepRun, SubRun]]:
    """Each run with each of its arms that are controls: policies with another reward."""
    for member in members:
        for arm in member.journey.policies:
            is_control = str(arm.settings.get("reward_source")) in SENTENCES["controls"]
            if is_control and arm.path != member.policy.path:
                yield member, arm


def is_ability(evaluator: str, figure: str) -> bool:
    """True for shares of right answers, and for their calibration error."""
    if evaluator == "lm_eval":
        return figure.rpartition("/")[2] in SHARES_OF_TASKS
    return figure in ABILITIES.get(evaluator, ())


def percentage_points(change: Estimate, per: float = 1.0) -> Estimate:
    """A change of a share in percentage points, divided by a positive number."""
    value, low, high = (100 * bound / per for bound in change[:3])
    return change._replace(value=value, low=low, high=high)


def _evaluated(sweep: Sweep) -> list[Measured]:
    """Changes of the first figures of each evaluator with rows of its own; those of abilities are
    in percentage points.
    """
    read = {
        run.label: {
            name: percentage_points(last.change) if is_ability(*name) else last.change
            for name, last in last_figures(run.policy, run.journey.stages).items()
        }
        for run in sweep.members
    }
    names = dict.fromkeys(name for one in read.values() for name in one)
    chosen: list[tuple[str, str]] = []
    for evaluator in dict.fromkeys(evaluator for evaluator, _ in names):
        if evaluator not in SHOWN_ELSEWHERE:
            own = by_importance(name for name in names if name[0] == evaluator)
            chosen += own[:MOST_CURVES]
    return [
        Measured(
            f"{FIGURE_KEY}{number}",
            printable(
                f"change{' in points' * is_ability(*name)}, {', '.join(figure_words(*name))}",
                80,
            ),
            printable(": ".join(figure_words(*name)), 80),
            signed,
            sweep.values(lambda run, name=name: read[run.label].get(name)),
        )
        for number, name in enumerate(chosen)
    ]
