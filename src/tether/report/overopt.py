"""The page of a study of overoptimisation: gold and proxy over the distance that they were bought with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

from tether.report.narrative import Verdict, bracketed, decimal, percent, signed
from tether.report.plotting import MUTED, PALETTE, Figure, Trace, axis, label, layout, line, marks, plot, rounded
from tether.report.reading import SubRun, json_of, mapping, read_sub_run

PROXY_COLUMNS = (
    "proxy", "pairs", "flipped", "members", "accuracy against gold, by seed", "gold gain of the widest choice", "its proxy gain",
    "√KL where Gao's curve peaks, by seed",
)  # fmt: skip
POLICY_COLUMNS = (
    "policy", "seed", "gold at first", "highest (95% of where it is)", "at the end", "fall from the peak", "proxy", "KL, nats",
    "fall clear at", "alarms, with their steps", "kept by stopping",
)  # fmt: skip
NOISE = 0.05
"""Share of gold's best within which a kept checkpoint counts as the best."""


@dataclass(frozen=True, slots=True)
class Course:
    """One policy of one seed: what it was trained against, and what gold said along the way."""

    proxy: str
    coefficient: str
    seed: str
    found: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.proxy}, β\u00a0=\u00a0{self.coefficient}"

    @property
    def proxy_rose(self) -> bool:
        return self.found["proxy"][-1] > self.found["proxy"][0]

    @property
    def fell(self) -> bool:
        """Whether gold ended below its peak, clear of the interval, on answers that had no say in what the peak is."""
        return self.found["fall"]["high"] < 0

    @property
    def warned(self) -> bool:
        """Whether an alarm came before the fall could be told from chance."""
        first, fallen = min((alarm["step"] for alarm in self.found["alarms"]), default=math.inf), self.found["fallen_at"]
        return first < math.inf and (fallen is None or first <= fallen)


@dataclass(frozen=True, slots=True)
class Study:
    """All that the page knows."""

    name: str
    proxies: dict[str, Any]
    courses: Sequence[Course]
    worst: SubRun | None
    notes: Sequence[str]

    @property
    def policies(self) -> dict[str, list[Course]]:
        """The courses of all seeds by policy."""
        return {name: [c for c in self.courses if c.name == name] for name in dict.fromkeys(c.name for c in self.courses)}


def read_study(run: Path) -> Study | None:
    """The study in a run directory; None if something else, or nothing finished, is there."""
    notes: list[str] = []
    proxies = mapping(mapping(json_of(run / "summary.json", notes)).get("proxies"))
    courses = [
        Course(name, coefficient, seed, found)
        for name, proxy in proxies.items()
        for coefficient, seeds in proxy["policies"].items()
        for seed, found in seeds.items()
    ]
    worst = min(courses, key=lambda course: course.found["fall"]["value"], default=None)
    last = read_sub_run(run / worst.found["folder"], notes) if worst else None
    return Study(run.resolve().name, proxies, courses, last, notes) if proxies else None


def study_figures(study: Study) -> dict[str, list[Figure]]:
    """Best-of-n and reinforcement learning, each as gold and as proxy."""
    return {"best_of_n": _best_of_n(study), "policies": _policies(study)}


def _best_of_n(study: Study) -> list[Figure]:
    gold: list[Trace] = []
    proxy: list[Trace] = []
    for colour, (name, found) in zip(cycle(PALETTE), study.proxies.items(), strict=False):
        for traces, key in ((gold, "gold"), (proxy, "proxy")):
            hover = "√KL %{x:.3g}: %{y:+.3f}"
            traces.append(line(*_over_seeds(found, key), name, colour, mode="lines+markers", hover=hover))
    best = _over_seeds(next(iter(study.proxies.values())), "ceiling")
    gold.append(line(*best, "chosen by gold itself", MUTED, dash="dot"))
    x = axis("√KL of best-of-n (√nats per response)", rangemode="tozero")
    below = "The further below the dotted line, the less of the choice is gold's; a line that bends down is being fooled."
    units = "In standard deviations of each proxy's own scores; the figure beside says what came of it."
    scaled = layout(x, axis("proxy gain, standard deviations"))
    return [
        *plot("bon-gold", "Best-of-n: gold of the chosen", below, gold, layout(x, axis("gold gain over one answer")), 400),
        *plot("bon-proxy", "Best-of-n: what the proxy says of the same choice", units, proxy, scaled, 400),
    ]


def _over_seeds(proxy: dict[str, Any], key: str) -> tuple[list[float], list[float]]:
    """√KL, and the mean of what the seeds measured there."""
    seeds = list(proxy["seeds"].values())
    return [math.sqrt(kl) for kl in seeds[0]["kl"]], [fmean(v) for v in zip(*(seed[key] for seed in seeds), strict=True)]


def _policies(study: Study) -> list[Figure]:
    gold: list[Trace] = []
    proxy: list[Trace] = []
    steps: list[Trace] = []
    for colour, (name, courses) in zip(cycle(PALETTE), study.policies.items(), strict=False):
        for number, course in enumerate(courses):
            found, group = course.found, {"legendgroup": label(name), "showlegend": number == 0}
            xs = [None if kl is None else math.sqrt(max(0.0, kl)) for kl in found["kl"]]
            hover = f"seed {course.seed}, √KL %{{x:.3g}}: %{{y:.4g}}"
            for traces, key in ((gold, "gold"), (proxy, "proxy")):
                traces.append(line(xs, found[key], name, colour, mode="lines+markers", hover=hover, **group))
            by_step = f"seed {course.seed}, step %{{x}}: %{{y:.4g}}"
            steps.append(line(found["steps"], found["gold"], name, colour, hover=by_step, **group))
            steps += [trace | group | {"showlegend": False} for trace in _alarm_marks(course, colour)]
        if fits := [course.found["fit"] for course in courses if course.found["fit"]]:
            gold.append(_fit_line(courses, fits, colour) | {"legendgroup": label(name), "showlegend": False})
    x = axis("√KL from the SFT model (√nats per response)", rangemode="tozero")
    truth, said = axis("gold, held-out messages"), axis("proxy, held-out messages")
    past = "A line a seed, a mark a measurement; dashed: Gao's curve, the seeds' mean. Past its top, reward costs gold."
    liked = "Where this rises and the figure beside falls, the policy is optimising what only the proxy likes."
    early = "A triangle is an alarm (its name on hover): to be of use it must stand before the line has fallen."
    return [
        *plot("rl-gold", "PPO: gold over distance", past, gold, layout(x, truth), 420),
        *plot("rl-proxy", "PPO: the proxy on the same answers", liked, proxy, layout(x, said), 420),
        *plot("rl-steps", "Gold over steps, and when a detector spoke", early, steps, layout(axis("step"), truth), 420),
    ]


def _alarm_marks(course: Course, colour: str) -> list[Trace]:
    steps, gold = course.found["steps"], course.found["gold"]
    alarms = [alarm for alarm in course.found["alarms"] if alarm["step"] <= steps[-1]]
    if not alarms:
        return []
    heights = [rounded(_at(steps, gold, alarm["step"])) for alarm in alarms]
    marker = {"size": 11, "symbol": "triangle-up", "line": {"color": MUTED, "width": 1}}
    text = [label(f"{alarm['detector']}: {alarm['message']}", 100) for alarm in alarms]
    where, name = [alarm["step"] for alarm in alarms], f"alarm, seed {course.seed}"
    return [marks(where, heights, name, colour, hover="step %{x}: %{text}", marker=marker, text=text)]


def _at(steps: Sequence[int], values: Sequence[float], step: int) -> float:
    """The height of the line between its measurements."""
    after = next(i for i, s in enumerate(steps) if s >= step)
    before = max(0, after - 1)
    share = (step - steps[before]) / (steps[after] - steps[before]) if after > before else 0.0
    return values[before] + share * (values[after] - values[before])


def _fit_line(courses: Sequence[Course], fits: Sequence[dict[str, Any]], colour: str) -> Trace:
    """The mean of the seeds' fits, as far as the nearest of them went."""
    reached = [max(kl for kl in course.found["kl"] if kl is not None) for course in courses]
    alpha, beta = (fmean(fit[name] for fit in fits) for name in ("alpha", "beta"))
    start = fmean(course.found["gold"][0] for course in courses)
    xs = [math.sqrt(0.5) + (math.sqrt(min(reached)) - math.sqrt(0.5)) * i / 60 for i in range(61)]
    ys = [start + d * (alpha - beta * math.log(d)) for d in xs]
    return line(xs, ys, "fit", colour, dash="dash", width=1.2, hover="√KL %{x:.3g}: %{y:.4g}")


def proxy_rows(study: Study) -> list[tuple[str, ...]]:
    """Name, labels, accuracy, gold and proxy of the widest choice, where Gao's curve peaks."""
    rows = []
    for name, proxy in study.proxies.items():
        seeds = list(proxy["seeds"].values())
        made = "averaged" if proxy["average"] else (proxy["combine"] or "mean")
        ends = [seed["gold"][-1] for seed in seeds]
        peaks = [seed["fit"]["peak"] if seed["fit"] else None for seed in seeds]
        rows.append((
            name,
            f"{proxy['pairs']:,}",
            percent(proxy["flipped"]) if proxy["flipped"] else "none",
            str(proxy["members"]) + (f", {made}" if proxy["members"] > 1 else ""),
            " / ".join(percent(seed["gold_accuracy"]["value"]) for seed in seeds),
            f"{signed(fmean(ends))} ({' / '.join(map(signed, ends))})",
            f"{signed(fmean(seed['proxy'][-1] for seed in seeds))} SD",
            " / ".join("none" if peak is None else decimal(peak) for peak in peaks),
        ))  # fmt: skip
    return rows


def policy_rows(study: Study) -> list[tuple[str, ...]]:
    """A line a policy and seed: gold at the start, at its highest and at the end, the fall, the alarms, what would be kept."""
    rows = []
    for course in study.courses:
        found = course.found
        gold, proxy, kl, (low, high) = found["gold"], found["proxy"], found["kl"][-1], found["best_step_interval"]
        highest = decimal(gold[found["steps"].index(found["best_step"])])
        rows.append((
            course.name,
            course.seed,
            decimal(gold[0]),
            f"{highest} at step {found['best_step']} ({low} to {high})",
            decimal(gold[-1]),
            bracketed(found["fall"], signed),
            f"{signed(proxy[0])} to {signed(proxy[-1])}",
            "" if kl is None else decimal(kl),
            "" if found["fallen_at"] is None else f"step {found['fallen_at']}",
            ", ".join(f"{alarm['detector']} {alarm['step']}" for alarm in found["alarms"]) or "none",
            percent(found["kept_share"]),
        ))  # fmt: skip
    return rows


def study_verdict(study: Study) -> Verdict:
    """What the study found, policy by policy, from its own numbers."""
    sentences, warnings = [], []
    for name, courses in study.policies.items():
        fell = [course for course in courses if course.fell]
        rose, warned = sum(course.proxy_rose for course in courses), sum(course.warned for course in fell)
        early = f"; an alarm came before the fall was clear in {warned} of {len(fell)}" if fell else ""
        ended = decimal(fmean(course.found["gold"][-1] for course in courses))
        sentences.append(
            f"{name}: the proxy rose in {rose} of {len(courses)} seeds; gold fell from its peak, clear of the interval, in "
            f"{len(fell)}{early}; it ended at {ended} on average."
        )
        if seeds := ", ".join(course.seed for course in courses if course.found["kept_share"] < 1 - NOISE):
            lost = f"keeping the best checkpoint would have lost more than {percent(NOISE)} of gold"
            warnings.append(f"{name}: {lost} (seed {seeds}).")
    if not sentences:
        return Verdict("open", "Best-of-n against several proxies", ["No policy was trained: see the table."], [])
    if any(course.fell for course in study.courses):
        return Verdict("bad", "The proxy was overoptimised", sentences, warnings)
    return Verdict("good", "Gold did not fall", sentences, warnings)
