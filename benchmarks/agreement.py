"""`python -m benchmarks.agreement [data] [crowds] [intervals] [speed]`: the figures of
docs/trust/agreement.md.

`data` reads pandalm/testset-v1.jsonl.gz and open-instruct/human-eval.jsonl.gz in the folder that
TETHER_DATA names. The others simulate people whose truth is known (tests/labels/crowds.py).
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.labels.crowds import CARELESS, crowd

from tether.labels.aggregation import Label, dawid_skene, majority
from tether.labels.agreement import (
    agreement_report,
    cohen_kappas,
    fleiss_kappa,
    krippendorff_alpha,
    raw_agreement,
)
from tether.labels.quality import suspicious
from tether.labels.votes import Vote

DATA = Path(os.environ.get("TETHER_DATA", "."))
STRENGTHS = {
    "a-is-better": 2,
    "a-is-slightly-better": 1,
    "tie": 0,
    "b-is-slightly-better": -1,
    "b-is-better": -2,
}
GOOD = [0.9, 0.85, 0.8, 0.75, 0.7]
CROWDS: dict[str, dict[str, Any]] = {
    "five of 0.55 to 0.95, two at random": {
        "annotators": [0.95, 0.9, 0.7, 0.6, 0.55, "random", "random"],
    },
    "four of 0.8 to 0.9, one adversarial, one at random": {
        "annotators": [0.9, 0.85, 0.8, 0.8, "adversarial", "random"],
    },
    "thirty of 0.5 to 0.95, 30 votes each": {
        "annotators": [0.5 + 0.45 * (k % 5) / 4 for k in range(30)],
    },
    "five of 0.8": {"annotators": [0.8] * 5},
    "five of 0.75 to 0.95, hard items": {"annotators": [0.95, 0.9, 0.85, 0.8, 0.75], "hard": 0.8},
}


def rows(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise SystemExit(
            f"this benchmark reads {path}; set TETHER_DATA to the folder of the published data sets",
        )
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def pandalm() -> Iterator[Vote]:
    for row in rows(DATA / "pandalm" / "testset-v1.jsonl.gz"):
        for k in (1, 2, 3):
            yield Vote(
                str(row["idx"]),
                f"annotator{k}",
                ("tie", "first", "second")[row[f"annotator{k}"]],
            )


def open_instruct() -> Iterator[Vote]:
    """The models in alphabetical order, so that the same two are one item whichever stood on the
    left.
    """
    for row in rows(DATA / "open-instruct" / "human-eval.jsonl.gz"):
        first, second = sorted((row["model_a"], row["model_b"]))
        item, left = (
            f"{row['instance_id']}/{first}/{second}",
            "first" if row["model_a"] == first else "second",
        )
        yield Vote.seen(
            item,
            row["evaluator"],
            STRENGTHS[row["preference"]],
            left,
            at=row["timestamp"],
        )


def shown(figure: dict[str, Any]) -> str:
    number = lambda value: "–" if value is None else f"{value:.3f}"  # noqa: E731
    return f"{number(figure['value'])} [{number(figure['low'])}, {number(figure['high'])}]"


def data() -> None:
    reports = {
        "PandaLM": agreement_report(list(pandalm())),
        "Open-Instruct": agreement_report(list(open_instruct())),
    }
    print("| | " + " | ".join(reports) + " |\n|---|" + "---|" * len(reports))
    for name in next(iter(reports.values()))["overall"]:
        print(
            f"| {name} | "
            + " | ".join(shown(report["overall"][name]) for report in reports.values())
            + " |",
        )
    for name, report in reports.items():
        kappas = [
            (p["kappa"]["value"], p["kappa"]["num_items"])
            for p in report["pairs"]
            if p["kappa"]["num_items"] >= 10
        ]
        kappas = [(kappa, items) for kappa, items in kappas if kappa is not None]
        told = ", ".join(f"{kappa:.2f} ({items})" for kappa, items in sorted(kappas))
        print(
            f"\n{name}: {report['items_by_votes']} items by votes; kappas of two with ten items "
            f"in common (items): {told}",
        )
        print(f"the same person again: {shown(report['self'])}, {report['num_repeats']} repeats")


def mean(values: Sequence[float], digits: int = 3) -> str:
    """A mean with Student's interval over seeds."""
    from scipy.stats import t

    half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):.{digits}f} ± {half:.{digits}f}"


def judged(labels: Sequence[Label], truth: dict[str, str]) -> tuple[float, float]:
    """Share right (an undecided label is half right) and log loss, a probability of 0 counting as
    0.001.
    """
    right = [
        0.5 if label.verdict is None else float(label.verdict == truth[label.item])
        for label in labels
    ]
    loss = [
        -math.log(max(label.probabilities.get(truth[label.item], 0.0), 1e-3)) for label in labels
    ]
    return statistics.fmean(right), statistics.fmean(loss)


def labels(seeds: int) -> None:
    print(
        f"\n300 items, three votes each, {seeds} seeds: share of labels right; log loss of the "
        "posteriors\n",
    )
    print(
        (
            "| crowd | majority | Dawid–Skene | difference | loss, shares | loss | loss without "
            "smoothing |\n"
        )
        + "|---" * 7
        + "|",
    )
    for name, options in CROWDS.items():
        results = []
        for seed in range(seeds):
            votes, truth = crowd(**options, seed=seed)
            found = [
                majority(votes, undecided="soft"),
                dawid_skene(votes).labels,
                dawid_skene(votes, smoothing=0).labels,
            ]
            results.append([judged(some, truth) for some in found])
        (plain, _), (fitted, _) = (
            list(zip(*(row[k] for row in results), strict=True)) for k in (0, 1)
        )
        losses = [mean([row[k][1] for row in results], 2) for k in range(3)]
        gain = mean([b - a for a, b in zip(plain, fitted, strict=True)])
        print(
            f"| {name} | {mean(plain)} | {mean(fitted)} | {gain} | " + " | ".join(losses) + " |",
            flush=True,
        )


def honest(seed: int) -> dict[str, Any]:
    draw = random.Random(f"honest/{seed}")
    skills: list[float | str] = [
        round(draw.uniform(0.65, 0.95), 3) for _ in range(draw.choice([4, 6, 8, 12, 20]))
    ]
    more = {"items": draw.choice([60, 150, 300, 1000]), "overlap": draw.choice([2, 3, 4])}
    return {
        "annotators": skills,
        **more,
        "ties": draw.choice([0, 0.15]),
        "hard": draw.choice([0, 0.5]),
        "seed": seed,
    }


def blame(crowds: int, tries: int) -> None:
    from scipy.stats import binomtest

    accused, kinds = 0, Counter()
    for seed in range(crowds):
        found = suspicious(crowd(**honest(seed))[0])
        accused += bool(found)
        kinds.update(s.kind for s in found)
    low, high = binomtest(accused, crowds).proportion_ci()
    share = f"{accused} of {crowds}, {accused / crowds:.1%} [{low:.1%}, {high:.1%}]"
    print(f"\nhonest crowds in which anybody is accused: {share}; {dict(kinds)}")
    print(f"\nShare of {tries} crowds in which each is named; good ones: 0.7 to 0.9\n")
    print(
        "| votes each | crowd | random | always left | adversarial | any good one |\n"
        + "|---" * 6
        + "|",
    )
    for told, kinds_of in (
        ("5 good, one of each", [*GOOD, *CARELESS]),
        ("7 good, one at random", [*GOOD, 0.8, 0.85, "random"]),
    ):
        for items in (100, 200, 400, 800):
            named = Counter()
            for seed in range(tries):
                found = {
                    s.annotator.split("-")[1]
                    for s in suspicious(crowd(kinds_of, items=items, overlap=4, seed=seed)[0])
                }
                named.update(found & set(CARELESS))
                named["good"] += bool(found - set(CARELESS))
            shares = [
                f"{named[kind] / tries:.2f}" if kind in kinds_of else "" for kind in CARELESS
            ] + [f"{named['good'] / tries:.2f}"]
            print(f"| {items // 2} | {told} | " + " | ".join(shares) + " |", flush=True)


def intervals(tries: int) -> None:
    """Two people who follow a hidden coin with accuracies 0.9 and 0.8 agree in 0.74, by chance in
    0.5: kappa 0.48.
    """
    print(
        f"\nHow many of {tries} 95% intervals of kappa hold the true 0.48\n\n| items | held | "
        "undefined |\n|---|---|---|",
    )
    for items in (10, 20, 50, 100, 300):
        draw, held, undefined = random.Random(items), 0, 0
        for _ in range(tries):
            votes = []
            for item in range(items):
                truth = draw.random() < 0.5
                for name, skill in (("ann", 0.9), ("ben", 0.8)):
                    votes.append(
                        Vote(
                            str(item),
                            name,
                            "first" if truth == (draw.random() < skill) else "second",
                        ),
                    )
            kappa = fleiss_kappa(votes)
            if kappa.low is None or kappa.high is None:
                undefined += 1
            else:
                held += kappa.low <= 0.48 <= kappa.high
        print(f"| {items} | {held / max(1, tries - undefined):.3f} | {undefined} |", flush=True)


def speed(sizes: Sequence[int]) -> None:
    draw = random.Random(0)
    for items in sizes:
        votes = [
            Vote(f"i{k}", f"p{j}", draw.choice([-2, -1, 0, 1, 2]))
            for k in range(items)
            for j in draw.sample(range(10), 3)
        ]
        print(f"\n{items:,} items, three votes each on a scale of five, seconds:")
        figures = {
            "raw": raw_agreement,
            "Fleiss": fleiss_kappa,
            "alpha, nominal": krippendorff_alpha,
            "alpha, ordinal": lambda votes: krippendorff_alpha(votes, "ordinal"),
            "45 Cohens": cohen_kappas,
            "whole report": agreement_report,
            "suspicious": suspicious,
            "majority": majority,
            "Dawid–Skene": dawid_skene,
        }
        for name, figure in figures.items():
            start = time.perf_counter()
            figure(votes)
            print(f"  {name}: {time.perf_counter() - start:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.agreement", description=__doc__)
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help=("data, crowds, intervals, speed; all without any"),
    )
    parser.add_argument("--smoke", action="store_true", help="a few tries of each: does it run?")
    options = parser.parse_args()
    small = options.smoke
    parts = {
        "data": data,
        "crowds": lambda: (labels(2 if small else 10), blame(*((2, 1) if small else (200, 40)))),
        "intervals": lambda: intervals(2 if small else 400),
        "speed": lambda: speed((50,) if small else (1_000, 20_000)),
    }
    if unknown := set(options.parts) - set(parts):
        parser.error(f"there is no part {min(unknown)!r}; there are: {', '.join(parts)}")
    for name in options.parts or parts:
        parts[name]()


if __name__ == "__main__":
    main()
