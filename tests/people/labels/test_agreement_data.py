"""The figures of published votes, read here by itself, against statsmodels and krippendorff."""

import gzip
import itertools
import json
from collections import defaultdict

import krippendorff
import numpy as np
import pytest
from statsmodels.stats.inter_rater import cohens_kappa, fleiss_kappa

from tether.people.labels.aggregation import majority
from tether.people.labels.agreement import agreement_report
from tether.people.labels.votes import Vote

STRENGTHS = {
    "a-is-better": 2,
    "a-is-slightly-better": 1,
    "tie": 0,
    "b-is-slightly-better": -1,
    "b-is-better": -2,
}


def rows_of(path):
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def matrix(votes):
    """Items by people, NaN where nobody voted."""
    items, people = (
        {name: n for n, name in enumerate(sorted({vote[k] for vote in votes}))} for k in (0, 1)
    )
    table = np.full((len(items), len(people)), np.nan)
    for item, person, value in votes:
        table[items[item], people[person]] = value
    return table


def check(report, table, level, name):
    alpha = krippendorff.alpha(reliability_data=table.T, level_of_measurement=level)
    assert report["overall"][name]["value"] == pytest.approx(alpha, abs=1e-12)


def test_three_people_on_every_pair(tether_data):
    rows = rows_of(tether_data / "pandalm" / "testset-v1.jsonl.gz")
    said = [
        (str(row["idx"]), f"annotator{k}", row[f"annotator{k}"]) for row in rows for k in (1, 2, 3)
    ]
    votes = [Vote(item, person, ("tie", "first", "second")[label]) for item, person, label in said]
    report, table = agreement_report(votes), matrix(said)
    counts = np.stack([(table == label).sum(1) for label in (0, 1, 2)], 1)
    assert report["overall"]["fleiss_kappa"]["value"] == pytest.approx(
        fleiss_kappa(counts),
        abs=1e-12,
    )
    check(report, table, "nominal", "alpha_nominal")
    check(report, np.choose(table.astype(int), [0, 1, -1]), "ordinal", "alpha_ordinal")
    check(report, np.choose(table.astype(int), [0, 1, -1]), "interval", "alpha_interval")
    for pair, (a, b) in zip(report["pairs"], itertools.combinations(range(3), 2), strict=True):
        cells = np.array(
            [[((table[:, a] == x) & (table[:, b] == y)).sum() for y in range(3)] for x in range(3)],
        )
        assert pair["kappa"]["value"] == pytest.approx(
            cohens_kappa(cells, return_results=False),
            abs=1e-12,
        )
        assert pair["kappa"]["num_items"] == len(rows) == 999
    # What the authors of the data report of their three people.
    assert [round(pair["kappa"]["value"], 2) for pair in report["pairs"]] == [0.85, 0.88, 0.86]
    agreed = {str(row["idx"]) for row in rows if len({row[f"annotator{k}"] for k in (1, 2, 3)}) < 3}
    assert {label.item for label in majority(votes)} == agreed


def test_pairs_judged_again_in_either_order(tether_data):
    rows = rows_of(tether_data / "open-instruct" / "human-eval.jsonl.gz")
    votes, latest, twice = [], {}, defaultdict(list)
    for row in sorted(rows, key=lambda row: row["timestamp"]):
        first, second = sorted((row["model_a"], row["model_b"]))
        left, strength = (
            ("first" if row["model_a"] == first else "second"),
            STRENGTHS[row["preference"]],
        )
        item, signed = (
            f"{row['instance_id']}/{first}/{second}",
            strength if left == "first" else -strength,
        )
        votes.append(Vote.seen(item, row["evaluator"], strength, left, at=row["timestamp"]))
        latest[item, row["evaluator"]] = signed
        twice[item].append(signed)
    # All repeated judgments, those of one person among them, as the data set's own description
    # counts.
    pairs = [
        np.sign(x) == np.sign(y)
        for group in twice.values()
        for x, y in itertools.combinations(group, 2)
    ]
    assert (len(pairs), round(np.mean(pairs), 2)) == (182, 0.57)

    report = agreement_report(votes, windows=2)
    assert (report["num_repeats"], report["num_annotators"]) == (9, 16) and report["overall"][
        "raw"
    ]["num_items"] == 121
    assert round(report["overall"]["raw"]["value"], 2) == 0.57
    table = matrix([(item, person, value) for (item, person), value in latest.items()])
    check(report, np.sign(table), "nominal", "alpha_nominal")
    check(report, table, "ordinal", "alpha_ordinal")
    check(report, table, "interval", "alpha_interval")
    three = {
        name for name, row in zip(sorted(twice), table, strict=True) if np.isfinite(row).sum() == 3
    }
    some = agreement_report([vote for vote in votes if vote.item in three])
    signs = np.sign(table[np.isfinite(table).sum(1) == 3])
    counts = np.stack([(signs == label).sum(1) for label in (-1, 0, 1)], 1)
    assert some["overall"]["fleiss_kappa"]["value"] == pytest.approx(
        fleiss_kappa(counts),
        abs=1e-12,
    )
    people = sorted({person for _, person in latest})
    for pair in report["pairs"]:
        a, b = (np.sign(table[:, people.index(pair[name])]) for name in ("first", "second"))
        cells = np.array([[((a == x) & (b == y)).sum() for y in (-1, 0, 1)] for x in (-1, 0, 1)])
        kappa = (
            cohens_kappa(cells, return_results=False)
            if cells.diagonal().max() < cells.sum()
            else None
        )
        assert pair["kappa"]["value"] == (
            None if kappa is None else pytest.approx(kappa, abs=1e-12)
        )
        assert pair["kappa"]["num_items"] == cells.sum()
