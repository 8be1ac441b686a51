"""One watch over one run: takes in a step at a time, asks every detector, and gives an alarm once an episode."""

from __future__ import annotations

import difflib
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import Field, field_validator

from tether.core.config import Config
from tether.core.types import Alarm, Rollout, Score
from tether.monitoring.detectors import DETECTORS, STILL_KL, Facts, View, enough
from tether.monitoring.texts import Text, across_prompts, measure_texts, score_of, summarize, words
from tether.monitoring.trends import KL, TRENDS

METRICS = (
    "reward/proxy",
    "reward/proxy_std",
    "reward/spread",
    "policy/entropy",
    "response/length",
    "response/stop_rate",
    "response/distinct_2",
    "kl/policy_reference_k1",
    "group/zero_signal",
    "sycophancy/shift",
    "sycophancy/start",
    "sharpening/gain",
    "sharpening/share",
    "sharpening/temperature",
    "sharpening/sure",
    "learning_rate",
    "run/share",
)
LONGEST_COURSE = 400
"""Values of a course; beyond it neighbours are averaged."""


class WatchConfig(Config):
    """What a watch compares, and how sure it must be."""

    baseline: int = Field(default=3, ge=1, description="first steps that everything later is compared with")
    window: int = Field(default=3, ge=3, description="last steps that are judged together, by their median")
    min_texts: int = Field(default=24, ge=4, description="texts in a window, which grows to hold them; also in the baseline")
    confidence: float = Field(default=3.0, gt=0, description="standard errors by which a measure on texts must differ")
    release: float = Field(default=0.8, gt=0, le=1, description="an episode ends below this share of the threshold")
    thresholds: dict[str, float] = Field(default={}, description="thresholds other than a detector's own, by its name")
    silent: tuple[str, ...] = Field(default=(), description="detectors that are left out")
    num_evidence: int = Field(default=3, ge=0, description="texts shown with an alarm")

    @field_validator("thresholds", "silent")
    @classmethod
    def _known(cls, values: Any) -> Any:
        for name in values:
            if name not in DETECTORS:
                near = difflib.get_close_matches(name, DETECTORS, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(DETECTORS)}"
                raise ValueError(f"no detector is named {name!r} ({hint})")
            if isinstance(values, dict) and not 0 < values[name] < math.inf:
                raise ValueError(f"the threshold of {name} must be above 0 and finite; to leave it out name it in `silent`")
        return values


class Watch:
    """The detectors over one run; a `Monitor`."""

    def __init__(self, config: WatchConfig | None = None) -> None:
        self.config = config or WatchConfig()
        self.load_state({"baseline": [], "recent": [], "open": []})

    def _follow(self, metrics: Mapping[str, float]) -> None:
        """Add a step to the course of what would change, which begins anew while the learning rate still rises."""
        rate = metrics.get("learning_rate", 0.0)
        if rate > self.highest_rate:
            self.highest_rate, self.course = rate, {}
        for name in (*TRENDS, KL):
            if name in metrics:
                values = self.course.setdefault(name, [])
                values.append(metrics[name])
                if len(values) > LONGEST_COURSE:
                    values[:] = [statistics.fmean(pair) for pair in zip(values[::2], values[1::2], strict=False)]

    def observe(
        self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Rollout], scores: Sequence[Score]
    ) -> list[Alarm]:
        """Take in one step; returns what fires at it."""
        return self.observe_texts(step, metrics, [_text(r, s) for r, s in zip(rollouts, scores, strict=True)])

    def observe_texts(self, step: int, metrics: Mapping[str, Any], texts: Sequence[Text]) -> list[Alarm]:
        tokens = [words(text.response) for text in texts]
        columns = measure_texts(texts, tokens)
        facts = {**self._numbers(metrics, texts), **summarize(texts, tokens, columns)}
        alike = across_prompts(texts, tokens)
        if alike is not None:
            facts["metrics"]["similarity"] = alike
        config = self.config
        if not enough(self.baseline, config.baseline, config.min_texts) and len(self.baseline) < 8 * config.baseline:
            self.baseline.append(facts)
        self.recent.append(facts)
        while len(self.recent) > 3 * config.window and (
            enough(self.recent[1:], config.window, config.min_texts) or len(self.recent) > 8 * config.window
        ):
            self.recent.pop(0)
        self._follow(facts["metrics"])
        sizes = (config.baseline, config.window, config.min_texts, config.confidence)
        view = View(self.baseline, self.recent, texts, columns, *sizes, self.course)
        judged = ((name, self._judge(name, step, view)) for name in DETECTORS if name not in config.silent)
        return [alarm for _, alarm in judged if alarm]

    def _numbers(self, metrics: Mapping[str, Any], texts: Sequence[Text]) -> Facts:
        """What is wanted of a step's metrics, with what its texts tell where those are silent."""
        last = self.recent[-1] if self.recent else {"index": -1, "metrics": {}, "unit": None, "shifts": []}
        known = {k: float(metrics[k]) for k in METRICS if isinstance(metrics.get(k), int | float) and math.isfinite(metrics[k])}
        scores = [text.score for text in texts if text.score is not None]
        spreads = [text.spread for text in texts if text.spread is not None]
        if texts:
            known.setdefault("response/length", statistics.fmean(text.length for text in texts))
            known.setdefault("response/stop_rate", statistics.fmean(text.finished for text in texts))
        if scores:
            known.setdefault("reward/proxy", statistics.fmean(scores))
            known.setdefault("reward/proxy_std", statistics.pstdev(scores))
        if spreads:
            known.setdefault("reward/spread", statistics.fmean(spreads))
        kl = known.get("kl/policy_reference_k1")
        if kl is not None:
            known["still"] = last["metrics"].get("still", 0.0) + 1 if abs(kl) < STILL_KL else 0.0
        unit = last["unit"] or known.get("reward/proxy_std")
        return {"index": last["index"] + 1, "metrics": known, "unit": unit, "shifts": _shifts(last["shifts"], known)}

    def _judge(self, name: str, step: int, view: View) -> Alarm | None:
        detector = DETECTORS[name]
        threshold = self.config.thresholds.get(name, detector.threshold)
        reading = detector.measure(view)
        if reading is None:
            return None
        if reading.value < self.config.release * threshold:
            self.open.discard(name)
        if reading.value < threshold or not reading.sure or name in self.open:
            return None
        self.open.add(name)
        evidence = _evidence(view.texts, reading.rank, self.config.num_evidence)
        return Alarm(name, step, reading.value, threshold, reading.message, detector.advice, evidence)

    def state(self) -> dict[str, Any]:
        course = {name: list(values) for name, values in self.course.items()}
        judged = {"baseline": list(self.baseline), "recent": list(self.recent), "open": sorted(self.open)}
        return {**judged, "course": course, "highest_rate": self.highest_rate}

    def load_state(self, values: Mapping[str, Any]) -> None:
        self.baseline, self.recent, self.open = list(values["baseline"]), list(values["recent"]), set(values["open"])
        self.course: dict[str, list[float]] = {name: list(course) for name, course in values.get("course", {}).items()}
        self.highest_rate: float = values.get("highest_rate", 0.0)


def _shifts(before: list[float], metrics: Mapping[str, float]) -> list[float]:
    """The measurement of sycophancy at the run's start and the last two: most steps have none, and hand on what they know."""
    now = metrics.get("sycophancy/shift")
    if now is None:
        return before
    start, *later = before or [metrics.get("sycophancy/start", now)]
    return [start, *later[-1:], now]


def _evidence(texts: Sequence[Text], rank: Sequence[float] | None, count: int) -> tuple[str, ...]:
    """The texts that show it most, else those of the highest scores, shortened in their middle."""
    ranks = [score_of(text) for text in texts] if rank is None else rank
    order = sorted((i for i in range(len(texts)) if ranks[i] > -math.inf), key=lambda i: -ranks[i])
    found = dict.fromkeys(" ".join(texts[i].response.split()) for i in order)
    return tuple(t if len(t) <= 300 else f"{t[:180]} … {t[-115:]}" for t in list(found)[:count])


def _text(rollout: Rollout, score: Score) -> Text:
    members = [value for name, value in score.parts.items() if name.startswith("member")]
    return Text(
        prompt="\n".join(message.content for message in rollout.prompt.messages),
        response=rollout.text,
        length=len(rollout.response_ids),
        score=score.value,
        finished=rollout.finished,
        spread=statistics.pstdev(members) if len(members) > 1 else None,
    )


def replay(
    metrics_rows: Iterable[Mapping[str, Any]], sample_rows: Iterable[Mapping[str, Any]] = (), config: WatchConfig | None = None
) -> list[Alarm]:
    """The alarms of a finished run, from the rows of its metrics.jsonl and samples.jsonl.

    A run keeps but a few texts a step, so the window and the baseline of measures on texts grow over as many steps as hold
    `min_texts`, and what compares different prompts within a step (mode_collapse) is silent unless samples hold four.
    Lengths of texts are counted in words here, the ids being gone.
    """
    watch, samples, alarms = Watch(config), {}, []
    for row in sample_rows:
        samples.setdefault(row.get("step"), []).append(row)
    metrics_rows = list(metrics_rows)
    for place, row in enumerate(metrics_rows, 1):
        texts = [_replayed(sample) for sample in samples.get(row["step"], []) if isinstance(sample.get("response"), str)]
        alarms += watch.observe_texts(row["step"], {**row, "run/share": place / len(metrics_rows)}, texts)
    return alarms


def _replayed(row: Mapping[str, Any]) -> Text:
    proxy = row.get("proxy")
    finished = row.get("stop") != "length"
    return Text(str(row.get("prompt", row.get("query", ""))), row["response"], len(words(row["response"])), proxy, finished)
