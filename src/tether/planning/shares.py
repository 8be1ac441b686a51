"""Prices of single stages, and their shares of a budget."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from tether.build.data.fitting import FITTING, LEAST
from tether.core.budget import BUDGET
from tether.core.pace import Expected
from tether.core.rundir import ROUNDS, read_json
from tether.learner.checkpoint import complete_checkpoints
from tether.report.doubts import ENOUGH_UPDATES, few_updates
from tether.report.numbers import duration, gigabytes
from tether.settings.recipe import BaseRecipe
from tether.settings.rounds import RoundsSection
from tether.settings.sampling import OnlineSection
from tether.settings.section import PromptedSection, Section, TimedSection

SLACK = 1.5
"""Times the seconds of a few steps that a budget keeps for each stage. Later stages get the time
that one does not use.
"""


@dataclass(kw_only=True)
class StagePrice:
    """A stage: its work in words, remaining steps, seconds of one and of other work, and bytes at
    the peak.

    steps None: the rows are not counted. prompts: only of a stage that answers prompts.

    updates: of each model that learns from rows. title: the name for people; unset: the stage's.

    whole: all of the memory is counted.

    unpriced: evaluators whose time is not in it.
    """

    name: str
    work: str
    steps: int | None
    step: float
    before: float
    after: float
    memory: int
    rounds: int = 1
    prompts: int | None = None
    updates: int = ENOUGH_UPDATES
    title: str = ""
    whole: bool = True
    unpriced: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.title = self.title or self.name

    @property
    def seconds(self) -> float | None:
        """All that is left of it; None where that is not known."""
        return (
            None
            if self.steps is None
            else self.rounds * (self.before + self.steps * self.step + self.after)
        )

    @property
    def expected(self) -> Expected:
        """The same for the display of the progress."""
        return Expected(
            self.before,
            0.0 if self.steps is None else self.steps * self.step,
            self.after,
        )


@dataclass
class Price:
    """Stages that are not done yet, in order.

    closing: seconds of the report.
    shorter: the changes that shorten a long run most: key=value, and seconds then.
    """

    stages: list[StagePrice]
    closing: float = 0.0
    shorter: list[tuple[str, float]] = field(default_factory=list)

    @property
    def usual(self) -> float:
        """Of a stage in one round, on average; 1 where no time is known."""
        times = [s.seconds / s.rounds for s in self.stages if s.seconds is not None]
        return fmean(times) if times else 1.0

    @property
    def seconds(self) -> float | None:
        """Of all stages whose time is known; None where none is."""
        times = [stage.seconds for stage in self.stages if stage.seconds is not None]
        return sum(times) if times else None

    def lines(self) -> Iterator[str]:
        """Sentences for people."""
        for stage in self.stages:
            time = (
                "time not known before its rows are counted"
                if stage.seconds is None
                else f"about {duration(stage.seconds)}"
            )
            work = f"{stage.rounds} times {stage.work}" if stage.rounds > 1 else stage.work
            yield f"{stage.title}: {work}; {time}, {_peak([stage])}"
            if stage.unpriced:
                yield f"{stage.title}: not in this time: evaluators {', '.join(stage.unpriced)}."
            if stage.updates < ENOUGH_UPDATES:
                yield few_updates(stage.title, stage.updates)
        if len(self.stages) > 1 and self.seconds is not None:
            yield (
                f"All {len(self.stages)} stages: about {duration(self.seconds)}, "
                f"{_peak(self.stages)}"
            )
        if self.shorter and self.seconds is not None:
            changes = " and ".join(
                f"{change} (about {duration(seconds)})" for change, seconds in self.shorter
            )
            yield (
                f"To shorten these {duration(self.seconds)} most, change one of these keys: "
                f"{changes}."
            )


def _peak(stages: Sequence[StagePrice]) -> str:
    """The most memory of these stages, in words."""
    memory = gigabytes(max(stage.memory for stage in stages))
    if all(stage.whole for stage in stages):
        return f"{memory} at the peak"
    return f"at least {memory} at the peak (not all of it is measured: see tether plan)"


class Need(NamedTuple):
    """Seconds of a stage: those below which it teaches or shows next to nothing, and all of it."""

    least: float
    whole: float

    def times(self, factor: float) -> Need:
        """The need of so many rounds, or of a machine that is so much slower."""
        return Need(factor * self.least, factor * self.whole)


def need(section: Section, stage: StagePrice | None, usual: float) -> Need:
    """The need of a stage in one round.

    Args:
        usual: seconds of a stage whose time is not known.
    """
    if stage is None or stage.seconds is None:
        return Need(usual, usual)
    own = section.budget if isinstance(section, TimedSection) else None
    most = math.inf if own is None else 60 * own.minutes
    least = min(most, SLACK * _least(section, stage, ENOUGH_UPDATES))
    return Need(least, max(least, min(most, stage.seconds / stage.rounds)))


def share_out(needs: Sequence[Need], seconds: float) -> list[float]:
    """Seconds of each of several stages. Each has its least, the cheapest first. The rest goes
    by what is then missing.
    """
    shares = [0.0] * len(needs)
    seconds = max(1.0, seconds)
    for turn, place in enumerate(sorted(range(len(needs)), key=needs.__getitem__)):
        shares[place] = min(needs[place].least, seconds / (len(needs) - turn))
        seconds -= shares[place]
    missing = [one.whole - one.least for one in needs]
    weights = missing if any(missing) else [one.whole for one in needs]
    return [
        share + seconds * weight / sum(weights)
        for share, weight in zip(shares, weights, strict=True)
    ]


def seconds_of(folder: Path) -> float:
    """The time that a stage has taken in earlier starts, as far as its summary or its newest
    checkpoint has it.
    """
    if (folder / "summary.json").is_file():
        return float(read_json(folder / "summary.json").get("seconds", 0.0))
    if (folder / FITTING).is_file():
        return float(read_json(folder / FITTING)["spent"])
    whole = complete_checkpoints(folder / "checkpoints")
    values = read_json(whole[-1] / "state.json") if whole else {}
    return float(values.get(BUDGET, {}).get("spent", 0.0))


def ends_of(recipe: BaseRecipe, price: Price) -> dict[str, float]:
    """Seconds after which budgets end each stage, all of its rounds together."""
    spent = _spent(recipe)
    ends = {
        stage.name: stage.rounds * 60 * (own_budget(recipe, stage.name) or math.inf)
        - spent[stage.name]
        for stage in price.stages
    }
    if recipe.budget is None:
        return ends
    each = [
        need(recipe.section(stage.name), stage, price.usual).times(stage.rounds)
        for stage in price.stages
    ]
    shares = share_out(each, 60 * recipe.budget.minutes - sum(spent.values()) - price.closing)
    return {name: min(ends[name], share) for name, share in zip(ends, shares, strict=True)}


def _spent(recipe: BaseRecipe) -> dict[str, float]:
    """Seconds that earlier starts took for each stage, all of its rounds together."""
    root = Path(recipe.run)
    return {
        name: sum(seconds_of(place / name) for place in (root, *root.glob(ROUNDS)))
        for name in recipe.stages
    }


def own_budget(recipe: BaseRecipe, name: str) -> float | None:
    """Minutes of a stage's own budget, which is that of one round."""
    section = recipe.section(name)
    return (
        section.budget.minutes
        if isinstance(section, TimedSection) and section.budget is not None
        else None
    )


def budget_lines(recipe: BaseRecipe, price: Price) -> Iterator[str]:
    """Sentences on the effect of time budgets: the part of the work that fits, and the way to have
    all of it.
    """
    ends, spent = ends_of(recipe, price), _spent(recipe)
    fitting = {s.name: _fitting(recipe.section(s.name), s, ends[s.name]) for s in price.stages}
    for stage in price.stages:
        if minutes := own_budget(recipe, stage.name):
            part, is_all = fitting[stage.name]
            yield f"{stage.title}: its budget of {minutes:g} min is enough for {part}." + (
                ""
                if is_all or stage.seconds is None
                else _enough(
                    f"{stage.name}.budget",
                    (stage.seconds + spent[stage.name]) / stage.rounds,
                )
            )
            yield from _longer(recipe, [stage], price.closing, minutes * stage.rounds)
    if recipe.budget is None:
        return
    parts = ", ".join(f"{stage.title} {fitting[stage.name][0]}" for stage in price.stages)
    all_fit = all(is_all for _, is_all in fitting.values())
    yield (
        f"The budget of {recipe.budget.minutes:g} min for the whole run is enough for: {parts}."
    ) + (
        ""
        if all_fit or price.seconds is None
        else _enough("budget", price.seconds + sum(spent.values()) + price.closing)
    )
    yield from _longer(recipe, price.stages, price.closing, recipe.budget.minutes)


def _longer(
    recipe: BaseRecipe,
    stages: Sequence[StagePrice],
    closing: float,
    minutes: float,
) -> Iterator[str]:
    """A sentence where no cut brings these stages into so many minutes."""
    least = closing + sum(
        stage.rounds * _least(recipe.section(stage.name), stage)
        for stage in stages
        if stage.seconds is not None
    )
    if least > 60 * minutes:
        yield (
            f"It will take longer than that, about {duration(least)}: each training makes one step "
            f"and its measurements, and a stage that answers prompts answers {LEAST}."
        )


def _enough(key: str, seconds: float) -> str:
    """The sentence on the budget that is enough for all of the work."""
    return f" For all of it, start with {key} = {ceil(seconds / 60)} or without a budget."


def _fitting(section: Section, stage: StagePrice, seconds: float) -> tuple[str, bool]:
    """The part of a stage's work that fits, in words, and whether that is all."""
    if stage.steps is None:
        return "as much as fits", True
    total, unit, beside, least = stage.steps, "updates", stage.before + stage.after, 1
    if isinstance(section, PromptedSection):
        total, unit, beside, least = stage.prompts or total, "prompts", stage.before, LEAST
    elif isinstance(section, RoundsSection):
        total, unit = section.rounds, "rounds"
    elif isinstance(section, OnlineSection):
        unit = "steps"
    working = stage.rounds * (stage.before + stage.after + stage.steps * stage.step - beside)
    share = (seconds - stage.rounds * beside) / working if working else 1.0
    if share >= 1:
        return f"all {total:,} {unit}", True
    fits = min(total, max(least, math.floor(total * share)))
    return f"about {fits:,} of {total:,} {unit}", fits == total


def _least(section: Section, stage: StagePrice, most: int = 1) -> float:
    """Seconds of a stage in one round with so many steps at most, or with as few prompts as a
    budget allows.
    """
    steps = stage.steps or 0
    if isinstance(section, PromptedSection):
        share = min(1.0, LEAST / stage.prompts) if stage.prompts else 1.0
        return stage.before + share * (steps * stage.step + stage.after)
    steps = min(most, steps) if isinstance(section, TimedSection) else steps
    return stage.before + steps * stage.step + stage.after
