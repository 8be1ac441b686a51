"""One watch over one run: takes in a step at a time, asks every detector, and gives an alarm once
an episode.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from tether.core.types import Alarm, Json, JsonValue, Rollout, Score
from tether.monitoring.detectors import DETECTORS, STILL_KL, StepFacts, View, enough
from tether.monitoring.texts import (
    Text,
    Tokens,
    across_prompts,
    measure_texts,
    score_of,
    summarize,
    word_tokens,
)
from tether.monitoring.trends import KL, TRENDS
from tether.settings.watch import WatchConfig

LONGEST_COURSE = 400
"""Values of a course at most. In a longer run each is the mean of 2, 4, 8 or more steps."""


class Watch:
    """The detectors over one run; a `Monitor`."""

    def __init__(self, config: WatchConfig | None = None) -> None:
        self.config = config or WatchConfig()
        self.load_state({"baseline": [], "recent": [], "open": []})

    def _follow(self, metrics: Mapping[str, float]) -> None:
        """Add a step to the course of what would change, which begins anew while the learning rate
        still rises.
        """
        rate = metrics.get("learning_rate", 0.0)
        if rate > self.highest_rate:
            self.highest_rate, self.course, self.counted = rate, {}, {}
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
        metrics: Mapping[str, float],
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
        metrics: Mapping[str, object],
        texts: Sequence[Text],
    ) -> list[Alarm]:
        """Take in one step of which only metrics and texts are at hand."""
        tokens, config = [word_tokens(text.response) for text in texts], self.config
        columns = measure_texts(texts, tokens)
        facts = self._facts(metrics, texts, tokens, columns)
        if (
            not enough(self.baseline, config.baseline, config.min_texts)
            and len(self.baseline) < 8 * config.baseline
        ):
            self.baseline.append(facts)
        self.recent.append(facts)
        while len(self.recent) > 3 * config.window and (
            enough(self.recent[1:], config.window, config.min_texts)
            or len(self.recent) > 8 * config.window
        ):
            self.recent.pop(0)
        self._follow(facts["metrics"])
        view = View(
            config=config,
            baseline=self.baseline,
            recent=self.recent,
            texts=texts,
            columns=columns,
            course=self.course,
            steps=max(self.counted.values(), default=0),
        )
        alarms = [self._judge(name, step, view) for name in DETECTORS if name not in config.silent]
        return [alarm for alarm in alarms if alarm]

    def _facts(
        self,
        metrics: Mapping[str, object],
        texts: Sequence[Text],
        tokens: Tokens,
        columns: Mapping[str, Sequence[float]],
    ) -> StepFacts:
        """A step's metrics as far as they are finite, and what its texts say where those are
        silent.
        """
        scores = [text.score for text in texts if text.score is not None]
        sources = {
            "response/length": [text.length for text in texts],
            "response/stop_rate": [text.finished for text in texts],
            "reward/proxy": scores,
            "reward/spread": [text.spread for text in texts if text.spread is not None],
        }
        numbers = {name: statistics.fmean(values) for name, values in sources.items() if values}
        if scores:
            numbers["reward/proxy_std"] = statistics.pstdev(scores)
        numbers |= {
            k: float(v)
            for k, v in metrics.items()
            if isinstance(v, int | float) and math.isfinite(v)
        }
        last = self.recent[-1] if self.recent else None
        if KL in numbers:
            steps = last["metrics"].get("still", 0.0) if last else 0.0
            numbers["still"] = steps + 1 if abs(numbers[KL]) < STILL_KL else 0.0
        alike = across_prompts(texts, tokens)
        if alike is not None:
            numbers["similarity"] = alike
        return {
            **summarize(texts, tokens, columns),
            "index": last["index"] + 1 if last else 0,
            "metrics": numbers,
            "unit": (last and last["unit"]) or numbers.get("reward/proxy_std"),
            "shifts": _shifts(last["shifts"] if last else [], numbers),
        }

    def _judge(self, name: str, step: int, view: View) -> Alarm | None:
        detector = DETECTORS[name]
        threshold = self.config.thresholds.get(name, detector.threshold)
        reading = detector.measure(view)
        if reading.value < self.config.release * threshold:
            self.open.discard(name)
        if name in self.open or not (reading.value >= threshold and reading.sure):
            return None
        self.open.add(name)
        evidence = _evidence(view.texts, reading.rank, self.config.num_evidence)
        message = detector.message.format(limit=threshold, **reading.words)
        return Alarm(
            detector=name,
            step=step,
            value=reading.value,
            threshold=threshold,
            message=message,
            advice=detector.advice,
            evidence=evidence,
        )

    def state(self) -> Json:
        """Everything that a resumed watch goes on from, in plain JSON."""
        steps = {
            "baseline": list(self.baseline),
            "recent": list(self.recent),
            "open": sorted(self.open),
        }
        return {
            **steps,
            "course": {k: list(v) for k, v in self.course.items()},
            "counted": dict(self.counted),
            "highest_rate": self.highest_rate,
        }

    def load_state(self, values: Mapping[str, JsonValue]) -> None:
        """Go on where `state` was taken."""
        self.baseline: list[StepFacts] = list(values["baseline"])
        self.recent: list[StepFacts] = list(values["recent"])
        self.open: set[str] = set(values["open"])
        self.course: dict[str, list[float]] = {
            name: list(course) for name, course in values.get("course", {}).items()
        }
        lengths = {name: len(course) for name, course in self.course.items()}
        self.counted: dict[str, int] = dict(values.get("counted", lengths))
        self.highest_rate: float = values.get("highest_rate", 0.0)


def _shifts(before: list[float], metrics: Mapping[str, float]) -> list[float]:
    """The measurement of sycophancy at the run's start and the last two: most steps have none, and
    hand on what they know.
    """
    now = metrics.get("sycophancy/shift")
    if now is None:
        return before
    start, *later = before or [metrics.get("sycophancy/start", now)]
    return [start, *later[-1:], now]


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
