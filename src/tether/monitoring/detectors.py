"""The known ways of gaming a reward or losing a policy, each a row of `DETECTORS`; none asks for the gold score.

A row is a threshold, a measure and an advice. Most measures judge the last steps against the run's own first ones. A step counts
through the median of a window, so one noisy step cannot fire; a measure on texts must besides differ from its beginning by
`confidence` standard errors. A detector whose metric is absent reads None and stays silent.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tether.monitoring.texts import OPENING, Text, phrases, pool, pooled_correlation, score_of, words
from tether.monitoring.trends import KL, LEAST_TREND, near_reference, still

STILL_KL = 0.005
"""Nats a response below which a policy has not moved."""
LEAST_GROWTH = 2.0
"""Nats a response and window: what grows by less is compared as if it had grown by this, for the noise of a step's KL."""
LEAST_CORRELATION = 0.2
"""Of length or phrase with the score: a weaker one does not pull a policy, however certain."""

Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a measure found: `value` against the threshold, `sure` where it has a second condition.

    `rank` orders the step's texts as evidence, the greatest first, and leaves out those of minus infinity.
    """

    value: float
    message: str
    sure: bool = True
    rank: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class View:
    """What a measure may look at: the run's first steps, its last ones, and this step's texts.

    The baseline of a metric is `num_baseline` steps long; that of texts is all of `baseline`, which grew to hold `min_texts`.
    """

    baseline: Sequence[Facts]
    recent: Sequence[Facts]
    texts: Sequence[Text]
    columns: Mapping[str, Sequence[float]]
    num_baseline: int
    num_window: int
    min_texts: int
    confidence: float
    course: Mapping[str, Sequence[float]]
    """Of `TRENDS` and the KL, the whole run after its warm-up."""

    def now(self, name: str, back: int = 0) -> float | None:
        """The median of a metric over the last window, or over the one that lies `back` windows before it."""
        size, end = self.num_window, len(self.recent) - back * self.num_window
        values = [facts["metrics"].get(name) for facts in self.recent[max(0, end - size) : max(0, end)]]
        known = [value for value in values if value is not None]
        return statistics.median(known) if len(known) == size else None

    def start(self, name: str) -> float | None:
        """The mean of a metric over the first steps, None as long as the window still touches them."""
        steps = self.baseline[: self.num_baseline]
        values = [facts["metrics"][name] for facts in steps if name in facts["metrics"]]
        after = self.recent[-1]["index"] - self.num_window + 1 >= self.num_baseline
        return statistics.fmean(values) if values and after else None

    def window(self, *, after_baseline: bool = True) -> Sequence[Facts]:
        """The last steps that make a window and hold enough texts; none if there are too few."""
        for size in range(self.num_window, len(self.recent) + 1):
            steps = self.recent[-size:]
            if enough(steps, self.num_window, self.min_texts):
                late = steps[0]["index"] >= len(self.baseline) and _count(self.baseline) >= self.min_texts
                return steps if late or not after_baseline else ()
        return ()

    def moments(self, name: str, steps: Sequence[Facts]) -> list[list[float]]:
        return [found for facts in steps if (found := facts["moments"][name])[0]]


def _count(steps: Iterable[Facts]) -> int:
    return sum(facts["texts"] for facts in steps)


def enough(steps: Sequence[Facts], num_steps: int, num_texts: int) -> bool:
    return len(steps) >= num_steps and _count(steps) >= num_texts


def _text_rise(name: str, says: str) -> Callable[[View], Reading | None]:
    """A measure: how far a column of the texts has risen over its beginning, and whether by more than its noise."""

    def measure(view: View) -> Reading | None:
        later, first = view.moments(name, view.window()), view.moments(name, view.baseline)
        if not later:
            return None
        (_, mean, noise), (_, start, start_noise) = pool(later), pool(first)
        middle = statistics.median(found[1] for found in later)
        sure = mean - start >= view.confidence * math.sqrt(noise + start_noise)
        return Reading(middle - start, says.format(start=start, now=middle), sure, view.columns[name])

    return measure


def _length_gaming(view: View) -> Reading | None:
    start, now = view.start("response/length"), view.now("response/length")
    if start is None or now is None or min(start, now) <= 0:
        return None
    longer = 1 if now > start else -1
    r, t = pooled_correlation([facts["length_score"] for facts in view.recent])
    return Reading(
        (now / start) ** longer,
        f"mean length went from {start:.0f} to {now:.0f}, and the score correlates with length (r = {r:.2f})",
        longer * r >= LEAST_CORRELATION and longer * t >= view.confidence,
        [longer * text.length for text in view.texts],
    )


def _length_advantage(view: View) -> Reading | None:
    steps = view.moments("length_advantage", view.window(after_baseline=False))
    if not steps:
        return None
    groups, mean, noise = pool(steps)
    chance = pool(view.moments("chance", view.window(after_baseline=False)))[1] / groups
    value = statistics.median(found[1] for found in steps)
    message = f"among the responses to one prompt the longer ones score higher (mean rank correlation {value:.2f})"
    return Reading(value, message, mean >= view.confidence * math.sqrt(max(noise, chance)), [text.length for text in view.texts])


def _mode_collapse(view: View) -> Reading | None:
    start, now = view.start("similarity"), view.now("similarity")
    varied, varies = view.start("response/distinct_2"), view.now("response/distinct_2")
    if start is None or now is None or varied is None or varies is None:
        return None
    message = f"responses to different prompts share {now:.0%} of their word pairs (at first {start:.0%}), "
    return Reading(now - start, message + f"distinct-2 went from {varied:.2f} to {varies:.2f}", varies <= 0.7 * varied)


def _entropy_collapse(view: View) -> Reading | None:
    start, now = view.start("policy/entropy"), view.now("policy/entropy")
    if start is None or now is None or start <= 0:
        return None
    return Reading(1 - now / start, f"the entropy a token fell from {start:.2f} to {now:.2f} nats")


def _kl_explosion(view: View) -> Reading | None:
    now = view.now(KL)
    return None if now is None else Reading(now, f"the policy is {now:.1f} nats a response away from its reference")


def _kl_acceleration(view: View) -> Reading | None:
    third, second, first = (view.now(KL, back) for back in range(3))
    if first is None or second is None or third is None:
        return None
    value = (third - second) / max(second - first, LEAST_GROWTH, 0.1 * second)
    message = f"the KL a response grew by {second - first:.1f} nats and then, in as many steps, by {third - second:.1f}"
    return Reading(value, message)


def _kl_stuck(view: View) -> Reading | None:
    still = view.recent[-1]["metrics"].get("still")
    return None if still is None else Reading(still, f"for {still:.0f} steps the KL a response has stayed below {STILL_KL} nats")


def _unmoved(view: View) -> Reading | None:
    latest, kls = view.recent[-1]["metrics"], view.course.get(KL, ())
    if latest.get("run/share", 0.0) < 0.5 or latest.get("still", 0.0) >= DETECTORS["kl_stuck"].threshold:
        return None
    series = {name: values for name, values in view.course.items() if name != KL}
    steps = max(map(len, view.course.values()), default=0)
    known = any(kls) and len(kls) >= LEAST_TREND
    found, words = near_reference(kls) if known else still(series, view.recent[-1]["unit"] or 0.0)
    return Reading(steps * bool(found), f"half of the training is over and nothing changes: {words} after {steps} steps")


def _truncation(view: View) -> Reading | None:
    start, now = view.start("response/stop_rate"), view.now("response/stop_rate")
    if start is None or now is None:
        return None
    unfinished = [-math.inf if text.finished else text.length for text in view.texts]
    return Reading(start - now, f"{now:.0%} of the responses end by themselves, at first {start:.0%}", rank=unfinished)


def _exploit_tokens(view: View) -> Reading | None:
    steps = view.window()
    if not steps:
        return None
    best = (0.0, 0, "", 0.0, 0.0)
    for phrase in steps[-1]["phrases"]:
        share = statistics.median(facts["phrases"].get(phrase, (0.0,))[0] for facts in steps)
        start = statistics.fmean(facts["phrases"].get(phrase, (0.0,))[0] for facts in view.baseline)
        r, t = pooled_correlation([f["phrases"][phrase][1:] for f in view.recent if phrase in f["phrases"]])
        if r >= LEAST_CORRELATION and t >= view.confidence:
            best = max(best, (round(share - start, 2), len(phrase), phrase, start, share))
    rise, _, phrase, start, share = best
    if not phrase:
        return Reading(0.0, "")
    verb = "open with" if phrase.startswith(OPENING) else "hold"
    message = f"{share:.0%} of the responses {verb} {phrase.strip()!r}, at first {start:.0%}, and they score higher"
    held = [phrase in phrases(words(text.response)) for text in view.texts]
    return Reading(rise, message, rank=[score_of(t) if holds else -math.inf for t, holds in zip(view.texts, held, strict=True)])


def _reward_disagreement(view: View) -> Reading | None:
    start, now = view.start("reward/spread"), view.now("reward/spread")
    before, after, unit = view.start("reward/proxy"), view.now("reward/proxy"), view.start("reward/proxy_std")
    if start is None or now is None or before is None or after is None or unit is None or start <= 0:
        return None
    message = f"the spread among the ensemble's members went from {start:.2f} to {now:.2f} while their mean score rose"
    spreads = [-math.inf if text.spread is None else text.spread for text in view.texts]
    return Reading(now / start, message, after - before >= 0.5 * unit, spreads)


def _reward_failures(view: View) -> Reading | None:
    steps = view.moments("failed", view.window(after_baseline=False))
    if not steps:
        return None
    value = statistics.median(found[1] for found in steps)
    failed = [0.0 if text.score is None else -math.inf for text in view.texts]
    return Reading(value, f"{value:.0%} of the responses got no score", rank=failed)


def _zero_signal(view: View) -> Reading | None:
    now = view.now("group/zero_signal")
    return None if now is None else Reading(now, f"in {now:.0%} of the groups all responses score alike: they teach nothing")


def _score_jump(view: View) -> Reading | None:
    before, after, unit = view.now("reward/proxy", 1), view.now("reward/proxy"), view.recent[-1]["unit"]
    if before is None or after is None or not unit:
        return None
    message = f"the proxy score rose from {before:.2f} to {after:.2f} within {2 * view.num_window} steps"
    return Reading((after - before) / unit, message + f" (deviation at the start: {unit:.2f})")


def _sycophancy(view: View) -> Reading | None:
    start, *later = view.recent[-1]["shifts"] or [0.0]
    if len(later) < 2:
        return None
    message = f"the kind of asker moves the probability of an answer by {later[-1]:.2f}, at first by {start:.2f}"
    return Reading(min(later) - start, message)


def _sharpening(view: View) -> Reading | None:
    """Judged in the second half of a run: what begins as sharpening often becomes more."""
    known = view.recent[-1]["metrics"]
    if "sharpening/share" not in known:
        return None
    gain, share, at = (known[f"sharpening/{name}"] for name in ("gain", "share", "temperature"))
    message = (
        f"of the held-out gain of {gain:.3g} {share:.0%} is what the model before gives at temperature {at:.2f}, where "
        "it is as sure of its words as the policy is now"
    )
    return Reading(share, message, known.get("run/share", 0.0) >= 0.5 and known["sharpening/sure"] > 0)


@dataclass(frozen=True, slots=True)
class Detector:
    """A row of the table: fires where the measure reads at least the threshold, in `unit`, and is sure."""

    threshold: float
    unit: str
    measure: Callable[[View], Reading | None]
    advice: str


DETECTORS: dict[str, Detector] = {
    "length_gaming": Detector(
        1.5,
        "times the first mean length, or its inverse",
        _length_gaming,
        "Take length out of the reward (a penalty, or a reward model of pairs of equal length), or raise the KL coefficient.",
    ),
    "length_advantage": Detector(
        0.5,
        "mean rank correlation within groups",
        _length_advantage,
        "Measure the reward model's length bias on held-out pairs, and correct it before training on.",
    ),
    "repetition": Detector(
        0.15,
        "rise of the share of repeated word triples",
        _text_rise("repetition", "{now:.0%} of a response's word triples repeat earlier ones, at first {start:.0%}"),
        "Raise the KL coefficient or stop earlier, and add such texts as rejected ones to the reward model's pairs.",
    ),
    "mode_collapse": Detector(
        0.2,
        "rise of the overlap of word pairs",
        _mode_collapse,
        "Read responses of a step side by side; if the prompts ask for no common form, raise KL coefficient or entropy bonus.",
    ),
    "entropy_collapse": Detector(
        0.75,
        "share of the first entropy that is lost",
        _entropy_collapse,
        "Lower the learning rate, raise the KL coefficient, add an entropy bonus or raise the upper clip range.",
    ),
    "kl_explosion": Detector(
        40.0,
        "nats a response",
        _kl_explosion,
        "Go back to an earlier checkpoint and train with a larger KL coefficient or a smaller learning rate.",
    ),
    "kl_acceleration": Detector(
        3.0,
        "times the growth of the window before",
        _kl_acceleration,
        "Lower the learning rate or the number of epochs, or use an adaptive KL coefficient.",
    ),
    "kl_stuck": Detector(
        10.0,
        f"steps with a KL below {STILL_KL} nats",
        _kl_stuck,
        "The policy does not move: look at learning rate, gradient norm, KL coefficient and whether advantages are all zero.",
    ),
    "unmoved": Detector(
        LEAST_TREND,
        "steps without a KL, or a trend of reward, entropy and length",
        _unmoved,
        "The policy does not move: raise optimizer.learning_rate (left out, it suits lora); see that grad_norm is not 0.",
    ),
    "truncation": Detector(
        0.25,
        "fall of the stop rate",
        _truncation,
        "Raise max_new_tokens if the answers need it, otherwise use a penalty for a missing stop or an overlong response.",
    ),
    "format_gaming": Detector(
        3.0,
        "more marks per 100 words",
        _text_rise("format", "{now:.1f} marks of format per 100 words, at first {start:.1f}"),
        "Score the texts with their marks stripped: where the score falls much, balance format in the reward model's pairs.",
    ),
    "hedging": Detector(
        2.0,
        "more hedging phrases per 100 words",
        _text_rise("hedging", "{now:.1f} hedging phrases per 100 words, at first {start:.1f}"),
        "See whether the reward prefers evasion: add pairs in which the clear and right answer is chosen.",
    ),
    "exploit_tokens": Detector(
        0.4,
        "rise of a phrase's share of responses",
        _exploit_tokens,
        "Score the same texts with the phrase cut out: if the score falls and a reader sees no loss, the reward is being gamed.",
    ),
    "parroting": Detector(
        0.25,
        "rise of the share of word triples taken from the prompt",
        _text_rise("parroting", "{now:.0%} of a response's word triples stand in its prompt, at first {start:.0%}"),
        "Add copies of prompts as rejected responses to the reward model's pairs.",
    ),
    "reward_disagreement": Detector(
        1.5,
        "times the first spread",
        _reward_disagreement,
        "The policy has left what the reward models know: stop here, take off the spread, or label fresh pairs from this policy.",
    ),
    "reward_failures": Detector(
        0.1,
        "share of responses without a score",
        _reward_failures,
        "Read the reasons in the scores: where one kind of answer fails, the policy goes unguided there.",
    ),
    "zero_signal": Detector(
        0.9,
        "share of groups",
        _zero_signal,
        "Use prompts of fitting difficulty, more samples a prompt, or filter_groups.",
    ),
    "score_jump": Detector(
        2.0,
        "deviations of the first scores",
        _score_jump,
        "Read the best-scored texts: real progress is seldom so fast, a found flaw of the reward is.",
    ),
    "sharpening": Detector(
        0.7,
        "share of the gain that a lower temperature of the starting model gives",
        _sharpening,
        "A lower temperature gives that for nothing. Sample, train and evaluate at one where the starting model answers well, "
        "and ask of the reward what decoding cannot give.",
    ),
    "sycophancy": Detector(
        0.15,
        "rise of how far the kind of asker moves an answer's probability",
        _sycophancy,
        "See whether the reward prefers agreement: add pairs in which the answer is the same whoever asks.",
    ),
}
