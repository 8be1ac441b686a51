"""The numbers of a policy, in one table for its arms, for several runs and for a sweep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tether.stats import Estimate
from tether.watch.report.about import Judge
from tether.watch.report.gains import gold_gain, heldout_gain, proxy_gain, spent_kl
from tether.watch.report.narrative import control_of, rate_at_best
from tether.watch.report.numbers import HeadAndRows, Show, bracketed, decimal, percent, signed
from tether.watch.report.reading import SubRun, estimate, mapping, present, trend_of


class Measure(NamedTuple):
    """A number of a run: its names for people with places for those of judge and reward, and how
    it is read and shown.

    `pair` gives it for one prompt, from the scores of the start's answer and of the run's.
    """

    key: str
    name: str
    short: str
    read: Callable[[SubRun], Estimate | None]
    show: Show
    pair: Callable[[float, float], float] | None = None


def _length(policy: SubRun) -> Estimate | None:
    measured = estimate(policy.summary, "answers", "length")
    course = trend_of(policy.metrics, "response/length")
    return measured or (estimate(course.last) if course else None)


def _heldout(policy: SubRun) -> Estimate | None:
    measured = heldout_gain(policy)
    return measured.gain if measured else None


def _last_loss(policy: SubRun) -> Estimate | None:
    losses = present(policy.metrics, "eval_loss")
    return estimate(losses[-1][1]) if losses else None


def best_decoding(policy: SubRun) -> Estimate | None:
    """The gain of a policy over its start, each at its own best temperature."""
    return estimate(mapping(control_of(policy.summary), "over_best_decoding"))


MEASURES = (
    Measure(
        "rate-at-best",
        "win rate, best against best",
        "win rate at best",
        rate_at_best,
        percent,
    ),
    Measure("gold", "{judge:gain}", "{judge}", gold_gain, signed, lambda start, end: end - start),
    Measure("heldout", "held-out gain", "held-out", _heldout, signed),
    Measure("proxy", "{reward} gain", "{reward}", proxy_gain, signed),
    Measure("kl", "KL, nats", "KL", spent_kl, decimal),
    Measure(
        "rate",
        "{judge:win rate}",
        "win rate",
        lambda policy: policy.estimate("gold_win_rate"),
        percent,
        lambda start, end: (end > start) + 0.5 * (end == start),
    ),
    Measure(
        "equal",
        "win rate at equal length",
        "at equal length",
        lambda policy: policy.estimate("gold_win_rate_at_equal_length"),
        percent,
    ),
    Measure("length", "length of an answer, tokens", "length", _length, decimal),
    Measure("best", "gain, best against best", "gain at best", best_decoding, signed),
    Measure(
        "right",
        "held-out pairs, ranked right",
        "ranked right",
        lambda policy: policy.estimate("heldout_accuracy"),
        percent,
    ),
    Measure("loss", "held-out loss", "held-out loss", _last_loss, decimal),
)
"""The number that decides first."""
BY_KEY = {one.key: one for one in MEASURES}
OF_ARMS = 7
"""The first so many are those of a comparison of arms."""


def numbers_of(
    policy: SubRun,
    judge: Judge,
    *,
    own_reward: bool = False,
    most: int | None = None,
) -> dict[str, str]:
    """Numbers of a policy by their names, with their intervals; of those that it lacks no text."""
    words = {"judge": judge.label, "reward": "reward" if own_reward else "proxy"}
    return {
        one.name.format(**words): bracketed(one.read(policy), one.show) for one in MEASURES[:most]
    }


def side_by_side(rows: Sequence[Mapping[str, str]]) -> HeadAndRows:
    """A table without the columns in which no row has a text."""
    columns = dict.fromkeys(name for row in rows for name, text in row.items() if text)
    return [*columns], [[row.get(name, "") for name in columns] for row in rows]


def arm_table(arms: Sequence[SubRun], judge: Judge) -> HeadAndRows:
    """A row an arm; empty for a single arm."""
    rows = [{"policy": arm.title, **numbers_of(arm, judge, most=OF_ARMS)} for arm in arms]
    return side_by_side(rows if len(rows) > 1 else ())
