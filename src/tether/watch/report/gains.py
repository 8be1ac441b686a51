"""A policy's gains and the KL that they cost: from its summary, else from the steps so far."""

from __future__ import annotations

from typing import NamedTuple

from tether.stats import Estimate, without_interval
from tether.watch.report.reading import (
    KL_KEYS,
    SubRun,
    estimate,
    finite,
    mapping,
    present,
    trend_of,
)


class HeldOutGain(NamedTuple):
    """The training's own reward on held-out prompts.

    `checked`: the reward is a checked answer instead of a model's guess. `halves`: the step was
    chosen for its score, and each half of the prompts is judged at the step that the other half
    chose.
    """

    before: Estimate
    after: Estimate
    gain: Estimate
    num_prompts: int
    checked: bool
    halves: bool


def heldout_gain(policy: SubRun) -> HeldOutGain | None:
    """The run's measurement on held-out prompts: the share of right answers, where answers are
    checked.
    """
    stored = mapping(policy.summary, "heldout")
    checked = "correct" in stored
    halves = stored.get("judged_by") == ("the prompts that did not choose the step")
    values = mapping(stored, "correct" if checked else "score")
    before, after, gain = (estimate(values, key) for key in ("before", "after", "gain"))
    if before is None or after is None or gain is None:
        return None
    return HeldOutGain(
        before,
        after,
        gain,
        int(finite(stored, "num_prompts") or 0),
        checked,
        halves,
    )


def gold_gain(policy: SubRun) -> Estimate | None:
    """The gain of the summary, else the last gold score less the first."""
    values = [value for _, value in present(policy.metrics, "gold/score")]
    return policy.estimate("gold_gain") or (
        estimate(values[-1] - values[0]) if len(values) > 1 else None
    )


def proxy_gain(policy: SubRun) -> Estimate | None:
    """The gain of the summary, else over the steps so far."""
    course = trend_of(policy.metrics, "reward/proxy")
    return policy.estimate("proxy_gain") or (estimate(course.gain) if course else None)


def spent_kl(policy: SubRun) -> Estimate | None:
    """The KL of the summary, else of the last steps so far, with its interval where there is
    one.
    """
    kl, noise = (finite(policy.summary, key) for key in ("kl", "kl_noise"))
    if kl is None and (measured := estimate(policy.summary, "answers", "kl")):
        return measured
    if kl is None and (course := trend_of(policy.metrics, *KL_KEYS)):
        kl = course.last
        noise = course.noise
    if kl is None:
        return None
    if noise is not None:
        return Estimate(kl, kl - noise, kl + noise, 0)
    return without_interval(kl, 0, "steps")
