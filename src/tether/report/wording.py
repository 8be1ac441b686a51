"""The judge's name in the page's own sentences. They are written for a judge that is called gold;
of another judge they name the function or the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from tether.report.about import CALLED_GOLD, function_name, judge_of
from tether.report.numbers import SENTENCES
from tether.report.plotting import Axis, Plot
from tether.report.reading import Journey, listed, mapping, printable

LONGER = (
    (r"\b([Tt])he gold score\b", r"\1he score by {name}"),
    (r"\bby the gold score\b", r"by {name}"),
    (r"\b[Gg]old win rate\b", r"win rate by {name}"),
    (r"\b[Gg]old gain\b", r"gain by {name}"),
    (r"\b[Gg]old score\b", r"score by {name}"),
)
"""Phrases in which the name of a judge has another place than the word gold."""
WARNS = SENTENCES["warns"]
JUDGE = "the judge"
"""The word where the name is not known, or too long: in labels of numbers and figures."""


class Wording(NamedTuple):
    """A run's judge: its name, empty if unknown, and whether training maximises it."""

    name: str = "gold"
    is_reward: bool = False

    @property
    def is_gold(self) -> bool:
        """True for a judge that is called so."""
        return bool(CALLED_GOLD.search(self.name))

    def sentence(self, text: str) -> str:
        """One of the page's own sentences, with the judge's name."""
        return self._said(text, self.name or JUDGE)

    def label(self, text: str) -> str:
        """The name of a number, a column or an axis."""
        return self._said(text, JUDGE)

    def plots(self, plots: Sequence[Plot]) -> list[Plot]:
        """Figures whose titles, captions, axes and lines are labels."""

        def axis(one: Axis) -> Axis:
            names = [self.label(name) for name in one.names]
            ticks = [(value, self.label(text)) for value, text in one.ticks]
            return replace(one, title=self.label(one.title), ticks=ticks, names=names)

        return [
            replace(
                plot,
                title=self.label(plot.title),
                caption=self.label(plot.caption),
                traces=[one._replace(name=self.label(one.name)) for one in plot.traces],
                x=axis(plot.x),
                y=axis(plot.y),
                right=None if plot.right is None else axis(plot.right),
            )
            for plot in plots
        ]

    def _said(self, text: str, name: str) -> str:
        if self.is_gold:
            return text
        for pattern, words in LONGER:
            text = re.sub(pattern, lambda m, w=words: m.expand(w).replace("{name}", name), text)
        return CALLED_GOLD.sub(
            lambda found: JUDGE.capitalize() if (name, found[0]) == (JUDGE, "Gold") else name,
            text,
        )


def wording_of(journey: Journey) -> Wording:
    """The judge of a run's answers: by its manifests, or else by its recipe."""
    judge, _ = judge_of(journey)
    name = printable(judge, 60)
    if not name:
        judges = [mapping(journey.recipe.get("evaluate")).get("judge")]
        judges += [mapping(arm.settings.get("evaluate")).get("judge") for arm in journey.arms]
        name = next(filter(None, map(_call, judges)), "")
    rewards = {_call(arm.settings.get("function")) for arm in journey.arms}
    unknown = not name and any(policy.judged_by_gold for policy in journey.policies)
    return Wording("gold" if unknown else name, bool(name) and name in rewards)


def wording_of_all(journeys: Iterable[Journey]) -> Wording:
    """The judge of several runs' answers: the first that is not called gold."""
    judges = map(wording_of, journeys)
    return next((one for one in judges if not one.is_gold), Wording())


def wording_of_labels(journey: Journey) -> Wording:
    """The judge whose scores simulated annotators vote by."""
    name = _call(journey.stage("pairs").settings.get("judge"))
    return Wording(name or "gold")


def _call(judge: object) -> str:
    """The function that a table of settings names; empty where it names none."""
    return printable(function_name(mapping(judge).get("call")), 60)


def judge_doubts(journey: Journey) -> Iterator[str]:
    """Prompts that were trained on, and a judge that is the reward."""
    if shared := journey.trained_on:
        stages = " and ".join(f"[{printable(name, 60)}]" for name in listed(shared.get("stages")))
        yield WARNS["trained-on"].format(**{**shared, "stages": stages})
    wording = wording_of(journey)
    if wording.is_reward:
        yield WARNS["judge-is-reward"].format(name=wording.name)
