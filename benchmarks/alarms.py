"""`python -m benchmarks.alarms`: how often each detector sounds in runs in which nothing changes, and how
many steps a planted fault takes until its alarm, by the number of answers a step.

The numbers of a run are drawn without a model. A level wanders (an autoregression of 0.8), so that
neighbouring steps are alike. So are the four answers to a prompt: their lengths have a correlation of a
quarter, and what they hold of a third. Lengths, format marks and hedges are skewed, and scores are mostly
noise.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import rankdata

from tether.watch.monitoring.texts import MOMENTS
from tether.watch.monitoring.trends import KL
from tether.watch.monitoring.view import LOG, NOISE
from tether.watch.monitoring.watch import StepFacts, Watch

STEPS, ONSET, EACH = (20, 60, 200), 20, 4
PHRASES = 0.05 * (np.arange(40) % 10 + 1)
"""The shares of answers that hold each of the phrases that nothing pays for."""
QUIET = {
    "unfinished": 0.5,
    "longer": 1.0,
    "failed": 0.005,
    "marked": 0.2,
    "hedged": 0.2,
    "silent": 0.5,
    "climb": 0.0,
}
FAULTS = {
    "truncation": {"unfinished": 0.9},
    "length_gaming": {"longer": 2.0},
    "kl_explosion": {"climb": 5.0},
    "zero_signal": {"silent": 0.96},
    "reward_failures": {"failed": 0.3},
    "format_gaming": {"marked": 0.8},
    "exploit_tokens": {"hedged": 0.9},
}
"""By the detector that should sound what is not as in `QUIET` (the KL climbs by so much a step)."""
Array = np.ndarray[Any, np.dtype[np.float64]]


def level(rng: np.random.Generator, steps: int) -> Array:
    """An autoregression of 0.8 with a deviation of 1."""
    values, draws = np.empty(steps), rng.normal(size=steps)
    values[0] = draws[0]
    for step in range(1, steps):
        values[step] = 0.8 * values[step - 1] + 0.6 * draws[step]
    return values


def held(rng: np.random.Generator, shares: Array, prompts: int) -> Array:
    """(steps, prompts, answers) what answers hold with a share a step; a prompt has a share of its own,
    so that its answers correlate by a third.
    """
    own = rng.beta(2 * shares[:, None], 2 - 2 * shares[:, None], (len(shares), prompts))
    return (rng.random((len(shares), prompts, EACH)) < own[:, :, None]).astype(np.float64)


def columns(
    rng: np.random.Generator,
    answers: int,
    steps: int,
    late: dict[str, float],
) -> dict[str, Any]:
    """(steps, prompts, answers) the measures of texts; from `ONSET` on with a fault."""
    prompts, wave = answers // EACH, level(rng, steps)
    now = {
        name: np.where(np.arange(steps) < ONSET, value, late.get(name, value))
        for name, value in QUIET.items()
    }
    shape = (steps, prompts, EACH)
    z = 0.5 * rng.normal(size=(steps, prompts, 1)) + 0.87 * rng.normal(size=shape)
    lengths = np.clip(
        np.round(64 * now["longer"][:, None, None] * np.exp(0.8 * z + 0.05 * wave[:, None, None])),
        1,
        256,
    )
    hedged = held(rng, now["hedged"], prompts)
    scores = 0.3 * z + 0.1 * wave[:, None, None] + 0.7 * hedged + 0.95 * rng.normal(size=shape)
    return {
        "response/length": lengths,
        "unfinished": held(rng, np.clip(now["unfinished"] - 0.02 * wave, 0.01, 0.99), prompts),
        "reward/proxy": scores,
        "failed": (rng.random(shape) < now["failed"][:, None, None]).astype(np.float64),
        "reward/spread": np.exp(rng.normal(-1, 0.5, shape)),
        "format": held(rng, now["marked"], prompts) * rng.gamma(2, 4, shape),
        "hedging": hedged * rng.gamma(4, 2, shape),
        "repetition": rng.beta(0.5, 6, shape),
        "parroting": held(rng, np.full(steps, 0.2), prompts) * rng.beta(2, 3, shape),
        "hedged": hedged,
    }  # fmt: skip


def error(values: Array) -> Array:
    """(steps) the squared standard errors of means, with prompts as the units."""
    means = values.mean(-1)
    return means.var(-1) / (means.shape[1] - 1)


def facts_of(
    rng: np.random.Generator,
    answers: int,
    steps: int,
    late: dict[str, float] | None = None,
) -> Iterator[StepFacts]:
    """The steps of one run."""
    late, prompts = late or {}, answers // EACH
    texts = columns(rng, answers, steps, late)
    hedged, scores = texts.pop("hedged"), texts["reward/proxy"]
    skewed = ("response/length", "failed", "format", "hedging", "repetition", "parroting")
    texts |= {LOG + name: np.log1p(texts[name]) for name in skewed}
    numbers = {name: values.mean((1, 2)) for name, values in texts.items()}
    numbers |= {name + NOISE: error(values) for name, values in texts.items()}
    entropy, kl, clipped = (level(rng, steps) for _ in range(3))
    climb = late.get("climb", 0.0) * np.maximum(0, np.arange(steps) - ONSET + 1)
    shares = np.where(
        np.arange(steps) < ONSET,
        QUIET["silent"],
        late.get("silent", QUIET["silent"]),
    )
    ranks = [rankdata(side, axis=2) - 2.5 for side in (texts["response/length"], scores)]
    moments = [
        texts["response/length"] - numbers["response/length"][:, None, None],
        scores - numbers["reward/proxy"][:, None, None],
    ]
    numbers |= {
        "reward/proxy_std": scores.std((1, 2)),
        "policy/entropy": 2 + 0.15 * entropy + rng.normal(0, 0.3 / math.sqrt(answers), steps),
        KL: 5 + kl + climb + rng.normal(0, 6 / math.sqrt(answers), steps),
        "policy/clip_fraction": np.maximum(0.0, 0.15 + 0.03 * clipped),
        "group/zero_signal": rng.binomial(prompts, shares) / prompts,
        "response/distinct_2": 0.8 + rng.normal(0, 0.1 / math.sqrt(answers), steps),
        "similarity": 0.1 + rng.normal(0, 0.1 / math.sqrt(answers), steps),
        "length_advantage": (ranks[0] * ranks[1]).sum(2).mean(1) / 5,
        "length_advantage" + NOISE: np.full(steps, 1 / (EACH - 1) / prompts),
        MOMENTS[0]: np.full(steps, answers - 1.0),
        MOMENTS[1]: (moments[0] ** 2).sum((1, 2)),
        MOMENTS[2]: (moments[1] ** 2).sum((1, 2)),
        MOMENTS[3]: (moments[0] * moments[1]).sum((1, 2)),
    }  # fmt: skip
    measured = rng.normal(0, 0.044, (steps // 10 + 1, 2))
    phrases = [hedged, *(held(rng, np.full(steps, share), prompts) for share in PHRASES)]
    tables = [phrase_columns(holds, moments[1]) for holds in phrases]
    counts = {"failed": answers, "unfinished": answers, "group/zero_signal": prompts}
    for step in range(steps):
        one = {name: float(values[step]) for name, values in numbers.items()}
        if step % 10 == 0:
            one |= {"sycophancy/shift": float(measured[step // 10, 0]), "sycophancy/error": 0.044}
        table = {
            f"phrase {place}": [float(x) for x in table[step]]
            for place, table in enumerate(tables)
            if table[step, 0] >= max(2.0, 0.1 * answers) / answers
        }
        yield StepFacts(one, table, counts, prompts)


def phrase_columns(holds: Array, scores: Array) -> Array:
    """(steps, 6) a phrase's part of the tables of steps."""
    share = holds.mean((1, 2))
    away = holds - share[:, None, None]
    parts = (
        np.full(len(share), away[0].size - 1.0),
        (away**2).sum((1, 2)),
        (scores**2).sum((1, 2)),
    )
    return np.stack([share, *parts, (away * scores).sum((1, 2)), error(holds)], axis=1)


def first_alarms(
    answers: int,
    steps: int,
    seed: int,
    late: dict[str, float] | None = None,
) -> dict[str, int]:
    """By detector the step of its first alarm."""
    watch, seen = Watch(), {}
    rng = np.random.default_rng([answers, seed])
    for step, facts in enumerate(facts_of(rng, answers, steps, late), 1):
        for alarm in watch.judge(step, facts):
            seen.setdefault(alarm.detector, step)
    return seen


def null_rates(answers: int, runs: int, last: int) -> list[dict[str, object]]:
    """By number of steps the runs in which each detector sounds."""
    firsts = [first_alarms(answers, last, seed) for seed in range(runs)]
    rows = []
    for steps in (steps for steps in STEPS if steps <= last):
        sounded = Counter(name for first in firsts for name, step in first.items() if step <= steps)
        rows.append({"answers": answers, "steps": steps, "runs": runs, "alarms": sounded})
    return rows


def delays(answers: int, runs: int, wait: int = 30) -> dict[str, object]:
    """By detector: the median number of steps until the planted fault is found (none where less than half
    of the runs find it), and the share of runs that find it.
    """
    found = {}
    for name, late in FAULTS.items():
        firsts = [
            first_alarms(answers, ONSET + wait, seed, late).get(name, 0) for seed in range(runs)
        ]
        steps = [first - ONSET if first > ONSET else math.inf for first in firsts]
        middle = statistics.median_high(steps)
        found[name] = {
            "steps": None if math.isinf(middle) else middle,
            "found": sum(map(math.isfinite, steps)) / runs,
        }
    return {"answers": answers, "runs": runs, "faults": found}


def table(record: dict[str, Any]) -> str:
    """The table of docs/reference/monitoring.md, by the answers of a step: the most runs in which one
    detector sounds, and the steps until faults are found.
    """
    sizes = [row["answers"] for row in record["faults"]]
    rows = [["answers a step", *map(str, sizes)], ["---"] * (1 + len(sizes))]
    for steps in STEPS:
        chosen = [row for row in record["unchanged"] if row["steps"] == steps]
        most = [f"{max(row['alarms'].values(), default=0)}/{row['runs']}" for row in chosen]
        rows.append([f"nothing, {steps} steps", *most])
    for name in FAULTS:
        found = [row["faults"][name] for row in record["faults"]]
        cells = [f"{one['steps'] or 'none'}, {one['found']:.0%}" for one in found]
        rows.append([f"`{name}`", *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.alarms", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="two runs of 20 steps")
    parser.add_argument("--answers", type=int, nargs="*", default=[8, 16, 32, 64, 128])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--last", type=int, default=200, help="steps of a run")
    parser.add_argument("--delays", action="store_true", help="plant faults")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="print the table of this record instead")
    asked = parser.parse_args(arguments)
    if asked.table:
        print(table(json.loads(asked.table.read_text(encoding="utf-8"))))
        return
    if asked.smoke:
        asked.answers, asked.runs, asked.last = [8], 2, 20
    rows = []
    for answers in asked.answers:
        start = time.process_time()
        one = (
            [delays(answers, asked.runs)]
            if asked.delays
            else null_rates(answers, asked.runs, asked.last)
        )
        rows += one
        print(json.dumps(one), f"{time.process_time() - start:.0f} s", flush=True)
    if asked.out:
        asked.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
