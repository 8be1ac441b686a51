from dataclasses import replace

import pytest
from scipy.stats import binomtest
from tests.people.labels.crowds import CARELESS, crowd

from tether.people.labels.quality import annotator_quality, suspicious
from tether.people.labels.votes import Choice, Vote

GOOD = [0.9, 0.85, 0.8, 0.75, 0.7]


@pytest.mark.parametrize("seed", range(4))
def test_those_who_do_not_read_are_last(seed):
    votes, _ = crowd([*GOOD, *CARELESS], items=300, overlap=4, seed=seed)
    ordered = annotator_quality(votes)
    assert {quality.annotator.split("-")[1] for quality in ordered[-3:]} == set(CARELESS)
    assert "adversarial" in ordered[-1].annotator


@pytest.mark.parametrize("seed", range(4))
def test_those_who_do_not_read_are_named_and_why(seed):
    votes, _ = crowd([*GOOD, *CARELESS], items=1500, overlap=4, seed=seed)
    found = suspicious(votes)
    assert {(s.annotator, s.kind) for s in found} >= {
        ("5-random", "low_agreement"),
        ("6-always_left", "one_side"),
        ("7-adversarial", "contrary"),
    }
    assert all(s.annotator.split("-")[1] in CARELESS and s.p_value <= 0.05 for s in found)
    left = next(s for s in found if s.kind == "one_side")
    assert f"left side in {left.evidence.left.count} of {left.evidence.left.total}" in left.reason
    assert found == suspicious(votes[::-1]) and found == sorted(found, key=lambda s: s.p_value)


def test_honest_crowds_are_left_in_peace():
    """At a level of 5% twelve accused crowds of a hundred have a probability below one in three
    hundred.
    """
    accused = 0
    for seed in range(100):
        skills = [0.65 + 0.3 * ((7 * k + seed) % 10) / 9 for k in range(4 + seed % 9)]
        votes, _ = crowd(
            skills,
            items=60 + 40 * (seed % 4),
            overlap=2 + seed % 3,
            ties=0.15 * (seed % 2),
            hard=0.4,
            seed=seed,
        )
        accused += bool(suspicious(votes))
    assert accused <= 11


def test_nobody_is_blamed_for_few_votes():
    votes, _ = crowd([*GOOD, *CARELESS], items=300, overlap=4, seed=0)
    few = [vote for vote in votes if vote.annotator[0] in "01234"]
    for place in "567":
        few += [vote for vote in votes if vote.annotator[0] == place][:19]
    assert suspicious(few) == []
    assert {s.annotator for s in suspicious(few, min_votes=10)} >= {"6-always_left"}
    assert suspicious([]) == [] and suspicious(votes[:1]) == []


def test_two_who_disagree_are_not_told_apart_but_by_gold():
    votes, truth = crowd([0.95, "adversarial"], items=200, overlap=2, seed=0)
    assert suspicious(votes) == []
    three, truth = crowd([0.9, 0.9, 0.9, 0.85, "random"], items=300, overlap=1, seed=1)
    assert suspicious(three) == []  # nothing is judged twice
    found = suspicious(three, gold=truth)
    assert [(s.annotator, s.kind) for s in found] == [("4-random", "gold")]
    mine = [vote for vote in three if vote.annotator == "4-random"]
    right = sum(vote.verdict == truth[vote.item] for vote in mine)
    assert (found[0].evidence.gold.count, found[0].evidence.gold.total) == (right, len(mine))


def test_sides_are_counted_among_decided_votes():
    counts: dict[Choice, int] = {"first": 30, "second": 4, "tie": 10, "both_bad": 6}
    said: list[Choice] = [choice for choice, number in counts.items() for _ in range(number)]
    votes = [
        Vote(f"item-{k}", "ann", value, shown_left="first" if k % 7 else None)
        for k, value in enumerate(said)
    ]
    (quality,) = annotator_quality(votes)
    known = [value for k, value in enumerate(said) if k % 7 and value in ("first", "second")]
    assert (quality.left.count, quality.left.total) == (known.count("first"), len(known))
    assert quality.left_p_value == pytest.approx(binomtest(known.count("first"), len(known)).pvalue)
    assert quality.num_votes == 50
    assert (
        quality.others.total == quality.gold.total == 0
        and quality.seconds is quality.gold.value is None
    )
    (only,) = suspicious(votes)
    assert only.kind == "one_side" and only.p_value == quality.left_p_value
    slight = [
        replace(vote, shown_left="first" if k % 3 else "second")
        for k, vote in enumerate(votes * 40)
    ]
    slight = [replace(vote, item=f"item-{k}") for k, vote in enumerate(slight)]
    assert suspicious(slight, side_share=0.8) == []  # surely a habit, but no great one
