import itertools
import json
import random
from collections import defaultdict
from dataclasses import replace
from functools import partial

import krippendorff
import numpy as np
import pytest
from statsmodels.stats.inter_rater import cohens_kappa
from statsmodels.stats.inter_rater import fleiss_kappa as fleiss_of_statsmodels

from tether.core.errors import DataError
from tether.people.labels.agreement import (
    agreement_report,
    cohen_kappas,
    fleiss_kappa,
    krippendorff_alpha,
    raw_agreement,
    self_agreement,
)
from tether.people.labels.votes import Vote

CHOICES = ["first", "second", "tie", "both_bad"]
# The worked example of Krippendorff 2011 in its common form: three coders, fifteen units, 0 where
# nothing was said.
CODERS = ["000003412113303", "102133430000000", "002134402113304"]


def votes_of(rows, annotators=None):
    """Rows of values by annotator, None where somebody said nothing."""
    return [
        Vote(f"item-{number}", f"person-{k}", value)
        for k, row in enumerate(rows)
        for number, value in enumerate(row)
        if value is not None
    ]


def scattered(seed, values, people=5, items=40, missing=0.3):
    """People who follow a hidden value two times of three; some say nothing."""
    draw = random.Random(seed)
    hidden = [draw.choice(values) for _ in range(items)]
    said = lambda value: value if draw.random() < 2 / 3 else draw.choice(values)  # noqa: E731
    return [
        [said(value) if draw.random() > missing else None for value in hidden]
        for _ in range(people)
    ]


def coincidence_alpha(rows, level):
    """Alpha by its definition, with loops over ordered pairs of votes of each unit."""
    units = [[row[k] for row in rows if row[k] is not None] for k in range(len(rows[0]))]
    o: dict = defaultdict(float)
    for unit in (unit for unit in units if len(unit) > 1):
        for i, j in itertools.permutations(range(len(unit)), 2):
            o[unit[i], unit[j]] += 1 / (len(unit) - 1)
    values = sorted({value for pair in o for value in pair})
    n = {value: sum(o[value, other] for other in values) for value in values}

    def delta(c, k):
        if level == "nominal":
            return float(c != k)
        if level == "interval":
            return (c - k) ** 2
        low, high = sorted((c, k))
        return (sum(n[g] for g in values if low <= g <= high) - (n[c] + n[k]) / 2) ** 2

    observed = sum(o[c, k] * delta(c, k) for c in values for k in values)
    expected = sum(n[c] * n[k] * delta(c, k) for c in values for k in values) / (
        sum(n.values()) - 1
    )
    return 1 - observed / expected


def unequal_fleiss(rows):
    units = [[row[k] for row in rows if row[k] is not None] for k in range(len(rows[0]))]
    units = [unit for unit in units if len(unit) > 1]
    agreed = [np.mean([x == y for x, y in itertools.combinations(unit, 2)]) for unit in units]
    chance = sum(
        np.mean([unit.count(value) / len(unit) for unit in units]) ** 2
        for value in {v for u in units for v in u}
    )
    return (np.mean(agreed) - chance) / (1 - chance)


@pytest.mark.parametrize("seed", range(4))
def test_fleiss_and_cohen_are_those_of_statsmodels(seed):
    rows = scattered(seed, CHOICES, missing=0.0)
    table = np.array(
        [[sum(row[k] == choice for row in rows) for choice in CHOICES] for k in range(40)],
    )
    assert fleiss_kappa(votes_of(rows)).value == pytest.approx(
        fleiss_of_statsmodels(table),
        abs=1e-12,
    )
    rows = scattered(seed, CHOICES)
    pairs = cohen_kappas(votes_of(rows))
    assert [(pair.first, pair.second) for pair in pairs] == [
        (f"person-{a}", f"person-{b}") for a, b in itertools.combinations(range(5), 2)
    ]
    for pair in pairs:
        a, b = (rows[int(name[-1])] for name in (pair.first, pair.second))
        both = [(x, y) for x, y in zip(a, b, strict=True) if x and y]
        cells = np.array([[both.count((x, y)) for y in CHOICES] for x in CHOICES])
        assert pair.kappa.value == pytest.approx(
            cohens_kappa(cells, return_results=False),
            abs=1e-12,
        )
        assert pair.raw.value == np.mean([x == y for x, y in both]) and pair.kappa.num_items == len(
            both,
        )


def test_fleiss_of_his_own_paper_of_unequal_numbers_and_raw_by_hand():
    # The table of the encyclopaedias: ten subjects, fourteen raters, kappa 0.210.
    text = "00 00 00 00 14,00 02 06 04 02,00 00 03 05 06,00 03 09 02 00,02 02 08 01 01,07 07 00 00 00,03 02 06 03 00,02 05 03 02 02,06 05 02 01 00,00 02 02 03 07"  # noqa: E501
    cells = [[int(cell) for cell in row.split()] for row in text.split(",")]
    rows = [[value for value, count in enumerate(row) for _ in range(count)] for row in cells]
    votes = votes_of(zip(*rows, strict=True))
    assert fleiss_kappa(votes, coding="strength").value == pytest.approx(0.210, abs=5e-4)
    uneven = scattered(7, CHOICES)
    assert fleiss_kappa(votes_of(uneven)).value == pytest.approx(unequal_fleiss(uneven), abs=1e-12)
    three_and_two = votes_of([["first", "tie"], ["first", "tie"], ["second", None]])
    assert raw_agreement(three_and_two).value == 2 / 4


@pytest.mark.parametrize("level", ["nominal", "ordinal", "interval"])
@pytest.mark.parametrize("seed", range(3))
def test_alpha_is_that_of_the_package_and_of_the_coincidence_matrix(level, seed):
    rows = scattered(seed, [-2, -1, 0, 1, 2.5])
    found = krippendorff_alpha(votes_of(rows), level, coding="strength")
    data = [[np.nan if value is None else value for value in row] for row in rows]
    package = krippendorff.alpha(reliability_data=data, level_of_measurement=level)
    assert (
        found.value
        == pytest.approx(package, abs=1e-12)
        == pytest.approx(coincidence_alpha(rows, level), abs=1e-12)
    )


@pytest.mark.parametrize(
    ("level", "alpha"),
    [("nominal", 0.691), ("ordinal", 0.807), ("interval", 0.811)],
)
def test_alpha_of_the_published_example(level, alpha):
    votes = votes_of([[int(value) or None for value in row] for row in CODERS])
    found = krippendorff_alpha(votes, level, coding="strength")
    assert found.value == pytest.approx(alpha, abs=5e-4) and found.num_items == 12


def test_intervals_are_those_of_resampled_items():
    """The quick way (one draw over distinct counts) against items drawn one by one, the figure
    computed anew each time.
    """
    rows, draw = scattered(3, [-1, 0, 1], people=4, items=60), random.Random(0)
    filled = lambda column: [value for value in column if value is not None]  # noqa: E731

    def raw(r):
        return np.mean(
            [x == y for c in zip(*r, strict=True) for x, y in itertools.combinations(filled(c), 2)],
        )

    def alpha(level):
        return (
            partial(krippendorff_alpha, level=level),
            partial(coincidence_alpha, level=level),
        )

    figures = [
        (raw_agreement, raw),
        (fleiss_kappa, unequal_fleiss),
        alpha("nominal"),
        alpha("ordinal"),
        alpha("interval"),
    ]
    for figure, slow in figures:
        quick = figure(votes_of(rows), coding="strength")
        shared = [k for k in range(60) if len(filled(row[k] for row in rows)) > 1]
        draws = []
        for _ in range(400):
            chosen = draw.choices(shared, k=len(shared))
            draws.append(slow([[row[k] for k in chosen] for row in rows]))
        spread = float(np.std(draws))
        assert (quick.low, quick.high) == pytest.approx(
            np.quantile(draws, [0.025, 0.975]),
            abs=0.35 * spread,
        )


def test_the_interval_covers_the_truth():
    """Two people who follow a fair hidden coin with accuracies 0.9 and 0.8 agree in 0.74: kappa
    0.48.
    """
    draw, covered = random.Random(1), 0
    for _ in range(150):
        hidden = [draw.random() < 0.5 for _ in range(100)]
        rows = [
            [CHOICES[truth ^ (draw.random() > accuracy)] for truth in hidden]
            for accuracy in (0.9, 0.8)
        ]
        kappa = cohen_kappas(votes_of(rows))[0].kappa
        assert kappa.low is not None and kappa.high is not None
        covered += kappa.low <= 0.48 <= kappa.high
    assert 0.89 <= covered / 150 <= 0.985


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "there are no votes"),
        ([["first", "second", "tie"]], "votes from two annotators"),
        ([["first", None], [None, "tie"]], "votes from two annotators"),
        ([["first"] * 9, ["first"] * 9], "only one value"),
    ],
)
def test_without_disagreement_to_expect_there_is_no_figure_but_a_reason(rows, reason):
    for figure in (fleiss_kappa, krippendorff_alpha):
        found = figure(votes_of(rows))
        assert found.value is found.low is found.high is None and reason in found.reason
    assert all(pair.kappa.value is None for pair in cohen_kappas(votes_of(rows)))


def test_what_has_votes_from_two_but_strengths_from_one_says_so():
    votes = votes_of([[2.0, -1.0, 3.0], ["first", "second", "second"]])
    graded = krippendorff_alpha(votes, "ordinal")
    assert graded.value is None and "votes with a strength from two" in graded.reason
    assert raw_agreement(votes).value == pytest.approx(2 / 3)


def test_full_agreement_on_few_items_is_not_certain():
    votes = votes_of([["first", "second", "first"]] * 2)
    for found in (
        raw_agreement(votes),
        fleiss_kappa(votes),
        krippendorff_alpha(votes),
        cohen_kappas(votes)[0].kappa,
    ):
        assert (
            found.value == found.high == 1.0 and (found.low or 0) < 0.5 and "number" in found.reason
        )
    # Wilson at three of three, and the rate at which three of three are seen in 7 of 100
    assert fleiss_kappa(votes).low == pytest.approx(1 - 9 / 4 * (1 - 3 / (3 + 1.959964**2)))
    assert raw_agreement(votes).low == pytest.approx(0.07 ** (1 / 3))
    longer = votes_of([["first", "second"] * 200] * 2)
    assert (
        raw_agreement(longer).low == pytest.approx(0.99, abs=0.003)
        and (fleiss_kappa(longer).low or 0) > 0.97
    )
    rare = fleiss_kappa(votes_of([["first", "first", "first"], ["first", "first", "second"]]))
    assert rare.value is not None and rare.low is None and "only one value" in rare.reason
    never = votes_of([["first", "second"], ["second", "first"]])
    assert (
        raw_agreement(never).value == 0
        and raw_agreement(never).low is None
        and "no spread" in raw_agreement(never).reason
    )


def test_nothing_depends_on_the_order_of_votes_nor_on_which_answer_is_first():
    votes = votes_of(scattered(5, [-2, -1, 0, 1, 2]))
    mixed = random.Random(0).sample(votes, len(votes))
    turned = [replace(vote, value=-float(vote.value)) for vote in votes]
    report = agreement_report(votes)
    assert agreement_report(mixed) == report
    for name, figure in agreement_report(turned)["overall"].items():
        assert figure["value"] == pytest.approx(report["overall"][name]["value"], abs=1e-12)


def test_the_latest_vote_counts_and_repeats_are_their_own_figure():
    votes = [
        Vote("x", "ann", "first", at=1.0),
        Vote("x", "ann", "second", at=2.0),
        Vote("x", "ben", "second", at=1.5),
        Vote("y", "ann", "tie"),
        Vote("y", "ben", "tie"),
        Vote("y", "ben", "tie", at=3.0),
    ]
    assert raw_agreement(votes).value == 1.0 and raw_agreement(votes[:1] + votes[2:]).value == 0.5
    again = self_agreement(votes)
    assert (again.value, again.num_items, again.num_votes) == (0.5, 2, 2)
    assert self_agreement(votes[1:5]).reason == "nobody voted twice on an item"
    with pytest.raises(DataError, match="Give `at`"):
        raw_agreement([replace(vote, at=0.0) for vote in votes])


def test_strengths_beside_bare_choices():
    plain = votes_of([["first", "second", "tie", "both_bad"], ["first", "first", "tie", "tie"]])
    places = votes_of([[1, -1, 0, 0], [1, 1, 0, 0]])
    assert (
        krippendorff_alpha(plain, "interval").value == krippendorff_alpha(places, "interval").value
    )
    beside = votes_of([[3, "first", "tie", -2], [3, -1, "both_bad", -2]])
    # a bare "first" has no place on the scale
    assert raw_agreement(beside, coding="strength").num_items == 3
    assert raw_agreement(beside, coding="verdict").value == 3 / 4
    assert raw_agreement(beside).value == 2 / 4
    slider = votes_of([[k / 7 for k in range(200)]] * 2)
    assert "round them" in krippendorff_alpha(slider, "interval").reason


def test_the_report_is_plain_json_with_slices_and_windows():
    votes = [
        replace(
            vote,
            at=float(vote.item.split("-")[1]),
            slices={"topic": "sums" if int(vote.item.split("-")[1]) < 10 else "prose"},
        )
        for vote in votes_of(scattered(2, CHOICES, missing=0.2))
    ]
    report = json.loads(json.dumps(agreement_report(votes, windows=4), allow_nan=False))
    sums = [vote for vote in votes if vote.slices["topic"] == "sums"]
    assert report["slices"]["topic"]["sums"]["fleiss_kappa"]["value"] == fleiss_kappa(sums).value
    shared = report["overall"]["raw"]["num_items"]
    windows = [window["raw"]["num_items"] for window in report["windows"]]
    assert sum(windows) == shared and max(windows) - min(windows) <= 1
    assert all(a["to"] < b["from"] for a, b in itertools.pairwise(report["windows"]))
    late = [
        replace(vote, at=100.0) if vote.item == "item-0" and vote.annotator == "person-4" else vote
        for vote in votes
    ]
    assert (
        sum(vote.at == 100 for vote in late) == 1
        and agreement_report(late, windows=4)["windows"][-1]["to"] == 100
    )
    assert agreement_report([replace(vote, at=0.0) for vote in votes], windows=4)["windows"] == []
    assert (
        report["num_votes"]
        == len(votes)
        == sum(int(n) * count for n, count in report["items_by_votes"].items())
    )
    assert report["pairs"]
    json.dumps(agreement_report([], windows=2), allow_nan=False)
