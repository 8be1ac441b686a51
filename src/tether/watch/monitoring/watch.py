"""One watch over one run: takes in a step at a time, asks every check, and gives an alarm once an
episode.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from tether.core.types import Alarm, Entries, Json, JsonValue, Metrics, Readings, Rollout, Score
from tether.settings.watch import WatchConfig
from tether.watch.monitoring.detectors import DETECTORS, STILL_KL, Check
from tether.watch.monitoring.texts import (
    MOMENTS,
    Columns,
    Text,
    Tokens,
    across_prompts,
    co_moments,
    length_advantage,
    measure_texts,
    phrase_table,
    score_of,
    variance_of_mean,
    word_tokens,
)
from tether.watch.monitoring.trends import KL, TRENDS
from tether.watch.monitoring.view import (
    BASELINE_PROMPTS,
    LOG,
    LONGEST_BASELINE,
    NOISE,
    Series,
    View,
)

LONGEST_COURSE = 400
"""Values of a course at most. In a longer run each is the mean of 2, 4, 8 or more steps."""
LONGEST_SERIES = 100
"""Last values of each metric, which show its noise."""


class StepFacts(NamedTuple):
    """The numbers of one step, with noises (`NOISE`), and its table of phrases.

    `counts` has the observations of each share, `prompts` the number of prompts, 0 if unknown.
    """

    numbers: Readings
    phrases: Columns
    counts: Mapping[str, int]
    prompts: int


EMPTY: Json = {
    "looks": 0,
    "first": 0,
    "metrics": {},
    "series": {},
    "phrases": [],
    "course": {},
    "counted": {},
    "highest_rate": 0.0,
    "open": {},
}
"""The state of a watch before its first step."""


class Watch:
    """The checks over one run, its detectors unless others are given; a `Monitor`."""

    looks: int
    first: int
    metrics: Metrics
    series: Columns
    phrases: list[Columns]
    course: Columns
    counted: dict[str, int]
    highest_rate: float
    open: dict[str, bool]

    def __init__(
        self,
        config: WatchConfig | None = None,
        checks: Mapping[str, Check] = DETECTORS,
    ) -> None:
        self.config = config or WatchConfig()
        self.checks = {name: one for name, one in checks.items() if name not in self.config.silent}
        self.view: View | None = None
        self.load_state({})

    def _follow(self, metrics: Readings) -> None:
        """Add a step to the course of what would change, which begins anew while the learning rate
        still rises.
        """
        rate = metrics.get("learning_rate", 0.0)
        if rate > self.highest_rate:
            self.highest_rate = rate
            self.course = {}
            self.counted = {}
        for name in (*TRENDS, KL):
            if name in metrics:
                before = self.counted.get(name, 0)
                self.counted[name] = before + 1
                stride = 2 ** (before // LONGEST_COURSE).bit_length()
                values = self.course.setdefault(name, [])
                if partial := before % stride:
                    values[-1] += (metrics[name] - values[-1]) / (partial + 1)
                    continue
                if len(values) == LONGEST_COURSE:
                    values[:] = map(statistics.fmean, zip(values[::2], values[1::2], strict=True))
                values.append(metrics[name])

    def observe(
        self,
        step: int,
        metrics: Readings,
        rollouts: Sequence[Rollout],
        scores: Sequence[Score],
    ) -> list[Alarm]:
        """Take in one step; returns what fires at it."""
        return self.observe_texts(
            step,
            metrics,
            [_text(r, s) for r, s in zip(rollouts, scores, strict=True)],
        )

    def observe_texts(
        self,
        step: int,
        metrics: Entries,
        texts: Sequence[Text],
    ) -> list[Alarm]:
        """Take in one step of which only metrics and texts are at hand."""
        tokens = [word_tokens(text.response) for text in texts]
        columns = measure_texts(texts, tokens)
        numbers = _facts(metrics, texts, tokens, columns)
        prompts = len({t.prompt for t in texts})
        whole = "response/length" + NOISE in numbers
        counts = {}  # without several prompts the texts do not show the noise of shares
        if prompts > 1:
            of_all = {"unfinished": len(texts), "group/zero_signal": prompts}
            counts = {"failed": len(texts), **(of_all if whole else {})}
        facts = StepFacts(numbers, phrase_table(texts, tokens), counts, prompts if whole else 0)
        return self.judge(step, facts, texts, columns)

    def judge(
        self,
        step: int,
        facts: StepFacts,
        texts: Sequence[Text] = (),
        columns: Series = MappingProxyType({}),
    ) -> list[Alarm]:
        """Take in the facts of one step; `texts` and their columns are the evidence of alarms."""
        numbers = dict(facts.numbers)
        config = self.config
        if KL in numbers:
            still = abs(numbers[KL]) < STILL_KL
            numbers["still"] = self.metrics.get("still", 0.0) + 1 if still else 0.0
        if not self.first:
            needed = -(-BASELINE_PROMPTS // facts.prompts) if facts.prompts else 0
            self.first = max(config.baseline, min(needed, LONGEST_BASELINE))
        self.metrics, self.looks = numbers, self.looks + 1
        self._follow(numbers)
        for name, value in numbers.items():
            values = self.series.setdefault(name, [])
            if name == "sycophancy/shift" and not values and "sycophancy/start" in numbers:
                values.append(numbers["sycophancy/start"])
            values.append(value)
            del values[self.first : -LONGEST_SERIES]
        self.phrases.append(facts.phrases)
        del self.phrases[self.first : -3 * config.window]
        self.view = View(
            config=config,
            metrics=numbers,
            series={name: self.series[name] for name in numbers},
            phrases=self.phrases,
            texts=texts,
            columns=columns,
            course=self.course,
            counts=facts.counts,
            steps=max(self.counted.values(), default=0),
            looks=self.looks,
            first=self.first,
            size=config.window,
        )
        alarms = [self._judge(name, step) for name in self.checks]
        return [alarm for alarm in alarms if alarm]

    def _judge(self, name: str, step: int) -> Alarm | None:
        check = self.checks[name]
        threshold = self.threshold(name)
        for place, view in enumerate(self._views(threshold)):
            reading = check.measure(view)
            if not place and reading.value < self.config.release * threshold:
                self.open.pop(name, None)
            if name in self.open or not reading.value >= threshold:
                return None
            if reading.sure:
                break
        else:
            return None
        self.open[name] = True
        return Alarm(
            detector=name,
            step=step,
            value=reading.value,
            threshold=threshold,
            message=check.message.format(limit=threshold, **reading.words),
            advice=check.advice,
            evidence=_evidence(view.texts, reading.rank, self.config.num_evidence),
        )

    def threshold(self, name: str) -> float:
        """The limit of a check: its own, or that of the settings."""
        return self.config.thresholds.get(name, self.checks[name].threshold)

    def _views(self, limit: float) -> Iterator[View]:
        """The view with a window, and with twice, four times and more of it: noise may hide in few
        steps what more of them show.
        """
        assert self.view is not None
        size = self.config.window
        while size == self.config.window or size <= min(self.looks, LONGEST_SERIES) // 2:
            yield replace(self.view, limit=limit, size=size)
            size *= 2

    def hidden(self) -> dict[str, float | None]:
        """By check the smallest value that shows above the noise of the steps so far, where it is
        beyond the limit; None: no value does.
        """
        hidden = {}
        for name in [] if self.view is None else self.checks:
            limit = self.threshold(name)
            readings = [self.checks[name].measure(view) for view in self._views(limit)]
            shown = [
                r.reach(r.judge().least) for r in readings if r.judge and not math.isnan(r.value)
            ]
            if shown and min(shown) > limit:
                hidden[name] = min(shown) if min(shown) < math.inf else None
        return hidden

    def state(self) -> Json:
        """Everything that a resumed watch goes on from, in plain JSON."""
        return copy.deepcopy({name: vars(self)[name] for name in EMPTY})

    def load_state(self, values: Mapping[str, JsonValue]) -> None:
        """Go on where `state` was taken; a state of another form begins anew."""
        vars(self).update(copy.deepcopy(values if values.keys() == EMPTY.keys() else EMPTY))


def _facts(
    metrics: Entries,
    texts: Sequence[Text],
    tokens: Tokens,
    columns: Series,
) -> Metrics:
    """A step's metrics as far as they are finite, and what its texts say where those are silent."""
    numbers = {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
    if "response/stop_rate" in numbers:
        numbers["unfinished"] = 1 - numbers["response/stop_rate"]
    sources = {
        "response/length": [float(text.length) for text in texts],
        "unfinished": [float(not text.finished) for text in texts],
        "reward/proxy": [text.score for text in texts],
        "reward/spread": [text.spread for text in texts],
        **columns,
    }
    for name, values in sources.items():
        _note(numbers, name, values, texts)
    if LOG + "response/length" not in numbers and numbers.get("response/length", 0.0) > 0:
        numbers[LOG + "response/length"] = math.log1p(numbers["response/length"])
    scored = [(text.length, text.score) for text in texts if text.score is not None]
    if scored:
        numbers.setdefault("reward/proxy_std", statistics.pstdev(score for _, score in scored))
    alike = across_prompts(texts, tokens)
    if alike is not None:
        numbers["similarity"] = alike
    advantage = length_advantage(texts)
    if advantage is not None:
        numbers["length_advantage"], numbers["length_advantage" + NOISE] = advantage
    if "sycophancy/error" in numbers:
        numbers["sycophancy/shift" + NOISE] = numbers["sycophancy/error"] ** 2
    if texts:
        moments = co_moments([length for length, _ in scored], [score for _, score in scored])
        numbers |= dict(zip(MOMENTS, moments, strict=True))
    return numbers


def _note(
    numbers: Metrics,
    name: str,
    values: Sequence[float | None],
    texts: Sequence[Text],
) -> None:
    """Note the mean of some texts, and its noise and that of its logarithm if the step's own number
    is that mean: a log may hold only some of the texts, which do not show the noise of all.
    """
    given = [(value, text.prompt) for value, text in zip(values, texts, strict=True)]
    present = [value for value, _ in given if value is not None]
    if not present:
        return
    mean = statistics.fmean(present)
    prompts = [prompt for value, prompt in given if value is not None]
    same = math.isclose(numbers.setdefault(name, mean), mean, rel_tol=1e-6, abs_tol=1e-9)
    if not same or len(set(prompts)) < 2:
        return
    numbers[name + NOISE] = variance_of_mean(present, prompts)
    if min(present) >= 0:
        logs = np.log1p(present).tolist()
        numbers[LOG + name] = statistics.fmean(logs)
        numbers[LOG + name + NOISE] = variance_of_mean(logs, prompts)


def _evidence(texts: Sequence[Text], rank: Sequence[float] | None, count: int) -> tuple[str, ...]:
    """The texts that show it most, else those of the highest scores, shortened in their middle."""
    ranks = [score_of(text) for text in texts] if rank is None else rank
    order = sorted((i for i in range(len(texts)) if ranks[i] > -math.inf), key=lambda i: -ranks[i])
    distinct = dict.fromkeys(" ".join(texts[i].response.split()) for i in order)
    return tuple(t if len(t) <= 300 else f"{t[:180]} … {t[-115:]}" for t in list(distinct)[:count])


def _text(rollout: Rollout, score: Score) -> Text:
    members = [value for name, value in score.parts.items() if name.startswith("member")]
    return Text(
        prompt="\n".join(message.content for message in rollout.prompt.messages),
        response=rollout.text,
        length=rollout.num_written,
        score=score.value,
        finished=rollout.finished,
        spread=statistics.pstdev(members) if len(members) > 1 else None,
    )
