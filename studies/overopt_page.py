"""The page of a study of overoptimisation: gold and proxy over the distance that they were bought
with.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from tether.core.errors import RunError
from tether.core.types import Row
from tether.watch.report.frame import fill_template
from tether.watch.report.narrative import Conclusion
from tether.watch.report.numbers import bracketed, decimal, percent, signed
from tether.watch.report.plotting import MUTED, PALETTE, Plot, Trace, framed, label
from tether.watch.report.reading import Estimate, SubRun, estimate, json_of, mapping, read_sub_run
from tether.watch.report.rollouts import training_samples

PROXY_COLUMNS = (
    "proxy", "pairs", "flipped", "members", "accuracy against gold, by seed", "gold gain of the "
                                                                              "widest "
                                                                              "choice", "its "
                                                                                        "proxy gain",
    "√KL where Gao's curve peaks, by seed",
)  # fmt: skip
POLICY_COLUMNS = (
    "policy", "seed", "gold at first", "highest (95% of where it is)", "at the end", "fall from "
                                                                                     "the peak", "proxy", "KL, nats",
    "fall clear at", "alarms, with their steps", "kept by stopping",
)  # fmt: skip
SAYS = {
    "proxy": "{name}: the proxy rose in {rose} of {seeds} seeds.",
    "gold": (
        "Gold fell from its peak, clear of the interval, in {fell}; it ended at {ended} on average."
    ),
    "alarms": "An alarm came before the fall was clear in {warned} of {fell}.",
    "stopping": (
        "{name}: keeping the best checkpoint would have lost more than {noise} of gold "
        "(seed {seeds})."
    ),
    "no-policy": "No policy was trained: see the table.",
}
NOISE = 0.05
"""Share of gold's best within which a kept checkpoint counts as the best."""


class Course(NamedTuple):
    """One policy of one seed: what gold, the proxy and the KL were at the steps of its
    measurements, and what follows.
    """

    name: str
    seed: str
    steps: Sequence[int]
    gold: Sequence[float]
    proxy: Sequence[float]
    kl: Sequence[float | None]
    fall: Estimate
    """From the peak to the end, on answers that had no say in where the peak is."""
    fallen_at: int | None
    """The first step at which the fall is clear of chance."""
    best_step: int
    best_step_interval: tuple[int, int] | None
    kept_share: float
    fit: Mapping[str, float] | None
    alarms: Sequence[Row]
    folder: str

    @property
    def highest(self) -> float:
        return self.gold[self.steps.index(self.best_step)]

    @property
    def fell(self) -> bool:
        return self.fall.high < 0

    @property
    def warned(self) -> bool:
        """Whether an alarm came before the fall could be told from chance."""
        limit = math.inf if self.fallen_at is None else self.fallen_at
        return any(alarm["step"] <= limit for alarm in self.alarms)

    @property
    def distances(self) -> list[float | None]:
        """√KL; an estimate of the KL below zero is noise around zero."""
        return [None if kl is None else math.sqrt(max(0.0, kl)) for kl in self.kl]


@dataclass(frozen=True, slots=True)
class Study:
    """All that the page knows."""

    name: str
    proxies: Mapping[str, Row]
    courses: Sequence[Course]
    worst: SubRun | None
    notes: Sequence[str]

    @property
    def policies(self) -> dict[str, list[Course]]:
        """The courses of all seeds by policy."""
        return {
            name: [c for c in self.courses if c.name == name]
            for name in dict.fromkeys(c.name for c in self.courses)
        }


def read_study(run: Path) -> Study | None:
    """The study in a run directory; None if something else, or nothing finished, is there."""
    notes: list[str] = []
    proxies = mapping(mapping(json_of(run / "summary.json", notes)).get("proxies"))
    courses = [
        _course(f"{name}, β\u00a0=\u00a0{coefficient}", seed, stored)
        for name, proxy in proxies.items()
        for coefficient, seeds in proxy["policies"].items()
        for seed, stored in seeds.items()
    ]
    worst = min(courses, key=lambda course: course.fall.value, default=None)
    last = read_sub_run(run / worst.folder, notes) if worst else None
    return Study(run.resolve().name, proxies, courses, last, notes) if proxies else None


def write_page(run: Path) -> Path:
    """Write the page of a finished study, `report.html` in its folder, and give its path.

    Raises:
        RunError: there is none.
    """
    study, path = read_study(run), run / "report.html"
    if study is None:
        raise RunError(f"{run} holds no finished study of overoptimisation")
    figures = {"best_of_n": best_of_n_figures(study), "policies": policy_figures(study)}
    text = fill_template(
        Path(__file__).resolve().with_name("overopt.html"), study.name, figures, study.notes,
        title="Overoptimisation of a reward model",
        verdict=study_conclusion(study),
        proxies=(PROXY_COLUMNS, proxy_rows(study)),
        policies=(POLICY_COLUMNS, policy_rows(study)),
        samples=training_samples(study.worst) if study.worst else [],
        worst=study.worst.name if study.worst else "",
    )  # fmt: skip
    path.write_text(text, encoding="utf-8", errors="replace")
    return path


def _course(name: str, seed: str, stored: Row) -> Course:
    values: Row = {key: stored[key] for key in Course._fields[2:]} | {
        "fall": estimate(stored["fall"]),
    }
    return Course(name, seed, **values)


def best_of_n_figures(study: Study) -> list[Plot]:
    """Gold and proxy of the choice among n answers, over its distance."""
    proxies = list(zip(cycle(PALETTE), study.proxies.items(), strict=False))
    gold = [
        Trace(*_over_seeds(proxy, "gold"), name, colour, "both")
        for colour, (name, proxy) in proxies
    ]
    liking = [
        Trace(*_over_seeds(proxy, "proxy"), name, colour, "both")
        for colour, (name, proxy) in proxies
    ]
    best = _over_seeds(next(iter(study.proxies.values())), "ceiling")
    gold.append(Trace(*best, "chosen by gold itself", MUTED, dash="dot"))
    return [*framed("bon-gold", gold), *framed("bon-proxy", liking)]


def _over_seeds(proxy: Row, key: str) -> tuple[list[float], list[float]]:
    """√KL, and the mean of what the seeds measured there."""
    seeds = list(proxy["seeds"].values())
    return np.sqrt(seeds[0]["kl"]).tolist(), np.mean([seed[key] for seed in seeds], axis=0).tolist()


def policy_figures(study: Study) -> list[Plot]:
    """Gold and proxy of the policies over their distance, and gold over steps with the alarms."""
    gold: list[Trace] = []
    proxy: list[Trace] = []
    steps: list[Trace] = []
    for colour, (name, courses) in zip(cycle(PALETTE), study.policies.items(), strict=False):
        for place, course in enumerate(courses):
            seed = label(name) if len(courses) == 1 else f"{label(name)}, seed {course.seed}"
            listed = Trace((), (), seed, colour, "both", listed=place == 0)
            gold.append(listed._replace(xs=course.distances, ys=course.gold))
            proxy.append(listed._replace(xs=course.distances, ys=course.proxy))
            steps.append(listed._replace(xs=course.steps, ys=course.gold, mode="line"))
            steps += _alarm_marks(course, colour)
        gold += _fit_line(courses, colour)
    return [*framed("rl-gold", gold), *framed("rl-proxy", proxy), *framed("rl-steps", steps)]


def _alarm_marks(course: Course, colour: str) -> list[Trace]:
    """Rings on the line of gold, which say on hover what was noticed."""
    alarms = [alarm for alarm in course.alarms if alarm["step"] <= course.steps[-1]]
    at = [alarm["step"] for alarm in alarms]
    heights = np.interp(at, course.steps, course.gold).tolist() if alarms else []
    notes = [label(f"{alarm['detector']}: {alarm['message']}", 100) for alarm in alarms]
    return (
        [
            Trace(
                at,
                heights,
                f"alarm, seed {course.seed}",
                colour,
                "open",
                size=12,
                listed=False,
                notes=notes,
            ),
        ]
        if alarms
        else []
    )


def _fit_line(courses: Sequence[Course], colour: str) -> list[Trace]:
    """The mean of the seeds' fits, as far as the nearest of them went."""
    fits = [course.fit for course in courses if course.fit]
    if not fits:
        return []
    nearest = min(max(kl for kl in course.kl if kl is not None) for course in courses)
    alpha, beta = (fmean(fit[name] for fit in fits) for name in ("alpha", "beta"))
    distances = np.linspace(math.sqrt(0.5), math.sqrt(nearest), 61)
    heights = fmean(course.gold[0] for course in courses) + distances * (
        alpha - beta * np.log(distances)
    )
    return [
        Trace(
            distances.tolist(),
            heights.tolist(),
            "fit",
            colour,
            dash="dash",
            size=1.2,
            listed=False,
            silent=True,
        ),
    ]


def proxy_rows(study: Study) -> list[tuple[str, ...]]:
    """A row a proxy, of PROXY_COLUMNS; the gold and proxy gains are those of the widest choice."""
    rows = []
    for name, proxy in study.proxies.items():
        seeds = list(proxy["seeds"].values())
        made = "averaged" if proxy["average"] else (proxy["combine"] or "mean")
        ends = [seed["gold"][-1] for seed in seeds]
        peaks = [seed["fit"]["peak"] if seed["fit"] else None for seed in seeds]
        flipped = percent(proxy["flipped"]) if proxy["flipped"] else "none"
        rows.append((
            name, f"{proxy['pairs']:,}", flipped, str(proxy["members"]) + ((", "
                                                                           f"{made}") if proxy["members"] > 1 else ""),
            " / ".join(percent(seed["gold_accuracy"]["value"]) for seed in seeds if seed["gold_accuracy"]),
            f"{signed(fmean(ends))} ({' / '.join(map(signed, ends))})",
            f"{signed(fmean(seed['proxy'][-1] for seed in seeds))} SD",
            " / ".join("none" if peak is None else decimal(peak) for peak in peaks),
        ))  # fmt: skip
    return rows


def held(interval: tuple[int, int] | None) -> str:
    """The steps between which the best lies, in words."""
    return "too few prompts" if interval is None else "{} to {}".format(*interval)


def policy_rows(study: Study) -> list[tuple[str, ...]]:
    """A row a policy and seed, of POLICY_COLUMNS."""
    return [
        (
            course.name, course.seed, decimal(course.gold[0]),
            f"{decimal(course.highest)} at step {course.best_step} ({held(course.best_step_interval)})",
            decimal(course.gold[-1]), bracketed(course.fall, signed), f"{signed(course.proxy[0])} "
                                                                      "to "
                                                                      f"{signed(course.proxy[-1])}",
            "" if course.kl[-1] is None else decimal(course.kl[-1]),
            "" if course.fallen_at is None else f"step {course.fallen_at}",
            ", ".join(f"{alarm['detector']} {alarm['step']}" for alarm in course.alarms) or "none", percent(course.kept_share),
        )
        for course in study.courses
    ]  # fmt: skip


def study_conclusion(study: Study) -> Conclusion:
    """What the study found, policy by policy, from its own numbers."""
    sentences, warnings = [], []
    for name, courses in study.policies.items():
        fell = [course for course in courses if course.fell]
        rose, warned = (
            sum(course.proxy[-1] > course.proxy[0] for course in courses),
            sum(course.warned for course in fell),
        )
        ended = decimal(fmean(course.gold[-1] for course in courses))
        says = [
            SAYS["proxy"].format(name=name, rose=rose, seeds=len(courses)),
            SAYS["gold"].format(fell=len(fell), ended=ended),
        ]
        says += [SAYS["alarms"].format(warned=warned, fell=len(fell))] if fell else []
        sentences.append(" ".join(says))
        if seeds := ", ".join(course.seed for course in courses if course.kept_share < 1 - NOISE):
            warnings.append(SAYS["stopping"].format(name=name, noise=percent(NOISE), seeds=seeds))
    if not sentences:
        return Conclusion("open", "Best-of-n against several proxies", [SAYS["no-policy"]], [])
    if any(course.fell for course in study.courses):
        return Conclusion("bad", "The proxy was overoptimised", sentences, warnings)
    return Conclusion("good", "Gold did not fall", sentences, warnings)


if __name__ == "__main__":
    print(write_page(Path(sys.argv[1])))
