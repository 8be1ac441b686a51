import itertools
import math
import random
import statistics
from collections import defaultdict

import numpy as np
import pytest
from scipy.optimize import minimize
from tests.people.labels.crowds import crowd

from tether.core.errors import DataError
from tether.people.labels.aggregation import bradley_terry, dawid_skene, majority
from tether.people.labels.votes import Vote

NOISY = [0.95, 0.9, 0.7, 0.6, 0.55, "random", "random"]


def said(*values, item="x"):
    return [Vote(item, f"person-{k}", value) for k, value in enumerate(values)]


def right(labels, truth):
    """The share of labels that are right; one that is undecided between two is half right."""
    return statistics.fmean(
        (label.verdict == truth[label.item])
        if label.verdict
        else 0.5 * (label.probabilities.get(truth[label.item], 0) > 0)
        for label in labels
    )


def log_loss(labels, truth):
    return -statistics.fmean(
        math.log(max(label.probabilities.get(truth[label.item], 0.0), 1e-12)) for label in labels
    )


@pytest.mark.parametrize(
    ("values", "verdict", "probability"),
    [
        (["first", "first", "second"], "first", 2 / 3),
        (["first", "second"], None, 0.5),
        (["first", "first", "second", "tie"], None, 0.625),
        (["tie", "both_bad", "second"], "tie", 1 / 3),
        ([2, 1, -1], "first", 2 / 3),
        (["second"], "second", 0.0),
    ],
)
def test_majority_is_more_than_half(values, verdict, probability):
    (label,) = majority(said(*values), undecided="soft")
    assert (
        label.verdict == verdict
        and label.probability == pytest.approx(probability)
        and label.num_votes == len(values)
    )
    assert math.isclose(sum(label.probabilities.values()), 1)
    assert majority(said(*values)) == ([label] if verdict else [])


def slow_dawid_skene(votes, classes):
    """Expectation maximisation with loops, to convergence; the imaginary votes are plain counts."""
    by_item = defaultdict(list)
    for vote in votes:
        by_item[vote.item].append((vote.annotator, vote.verdict))
    people = {vote.annotator for vote in votes}
    posterior = {
        item: {c: sum(v == c for _, v in some) / len(some) for c in classes}
        for item, some in by_item.items()
    }
    imagined = len(classes) + 1  # votes of each annotator on imaginary items of each truth
    for _ in range(300):
        counts = {
            (a, t, s): 2.0 if t == s else 1.0 for a in people for t in classes for s in classes
        }
        for item, some in by_item.items():
            for (a, s), t in itertools.product(some, classes):
                counts[a, t, s] += posterior[item][t]
        totals = {(a, t): sum(counts[a, t, s] for s in classes) for a in people for t in classes}
        prior = {t: imagined + sum(row[t] for row in posterior.values()) for t in classes}
        for item, some in by_item.items():
            joint = {
                t: prior[t] * math.prod(counts[a, t, s] / totals[a, t] for a, s in some)
                for t in classes
            }
            posterior[item] = {t: value / sum(joint.values()) for t, value in joint.items()}
    return posterior


def test_dawid_skene_is_expectation_maximisation():
    votes, _ = crowd([0.9, 0.8, 0.7, "adversarial"], items=60, ties=0.2, seed=3)
    slow = slow_dawid_skene(votes, ["first", "second", "tie"])
    for label in dawid_skene(votes).labels:
        for verdict, value in label.probabilities.items():
            assert value == pytest.approx(slow[label.item][verdict], abs=0.02)


@pytest.mark.audit
def test_dawid_skene_goes_on_until_it_has_converged():
    """Forty crowds of five people of any skill: the posteriors are those of another program's two
    thousand iterations.
    """
    furthest, flipped = 0.0, 0
    for seed in range(40):
        draw = random.Random(seed)
        votes, _ = crowd(
            [round(draw.uniform(0.5, 0.95), 3) for _ in range(5)],
            items=120,
            overlap=3,
            ties=0.1,
            seed=seed,
        )
        other = converged(
            [(vote.item, vote.annotator, vote.verdict) for vote in votes],
            ["first", "second", "tie"],
        )
        for label in dawid_skene(votes).labels:
            theirs = other[label.item]
            furthest = max(
                furthest,
                *(abs(value - theirs[verdict]) for verdict, value in label.probabilities.items()),
            )
            flipped += max(theirs, key=theirs.__getitem__) != max(
                label.probabilities,
                key=label.probabilities.__getitem__,
            )
    assert furthest < 1e-3 and flipped <= 2  # 2: of 4,800 labels some are even up to rounding


def converged(votes, classes, iterations=2000):
    """Expectation maximisation as one-hot matrix products, with the smoothing's imaginary items
    among the items.
    """
    truths = {(t, s, n): t for t in classes for s in classes for n in range(2 if t == s else 1)}
    people = sorted({person for _, person, _ in votes})
    rows = votes + [(key, person, key[1]) for key in truths for person in people]
    names = list(dict.fromkeys(item for item, _, _ in rows))
    cast = np.zeros((len(names), len(people), len(classes)))
    for item, person, verdict in rows:
        cast[names.index(item), people.index(person), classes.index(verdict)] = 1
    flat = cast.reshape(len(names), -1)
    fixed = np.array(
        [
            [float(truths[name] == c) for c in classes]
            if name in truths
            else [np.nan] * len(classes)
            for name in names
        ],
    )
    posterior = np.where(np.isnan(fixed), cast.sum(1) / cast.sum((1, 2))[:, None], fixed)
    for _ in range(iterations):
        counts = np.einsum("ips,it->pst", cast, posterior)
        errors = np.log(counts / counts.sum(1, keepdims=True))
        joint = np.exp(np.log(posterior.mean(0)) + flat @ errors.reshape(-1, len(classes)))
        before, posterior = (
            posterior,
            np.where(np.isnan(fixed), joint / joint.sum(1, keepdims=True), fixed),
        )
        if np.abs(posterior - before).max() < 1e-13:
            break
    return {
        name: dict(zip(classes, row, strict=True))
        for name, row in zip(names, posterior.tolist(), strict=True)
    }


def test_dawid_skene_beats_the_majority_on_noisy_crowds():
    gains = []
    for seed in range(5):
        votes, truth = crowd(NOISY, items=150, seed=seed)
        gains.append(
            right(dawid_skene(votes).labels, truth)
            - right(majority(votes, undecided="soft"), truth),
        )
    # Student's interval over seeds lies above 0.
    assert statistics.fmean(gains) > 2.776 * statistics.stdev(gains) / math.sqrt(5)


@pytest.mark.parametrize("seed", range(2))
def test_smoothing_keeps_posteriors_of_few_votes_from_being_too_sure(seed):
    votes, truth = crowd([0.5 + 0.45 * (k % 5) / 4 for k in range(30)], items=200, seed=seed)
    plain, smoothed = (
        log_loss(dawid_skene(votes, smoothing=smoothing).labels, truth) for smoothing in (0, 1)
    )
    assert smoothed < math.log(2) < plain  # less than tossing a coin tells, and more


def test_dawid_skene_knows_what_each_annotator_says():
    votes, _ = crowd([0.9, 0.9, 0.8, 0.7, "adversarial"], items=200, seed=1)
    fit = dawid_skene(votes)
    for name, accuracy in fit.accuracy.items():
        kind = name.split("-")[1]
        assert accuracy == pytest.approx(0.05 if kind == "adversarial" else float(kind), abs=0.12)
    assert dawid_skene(votes[::-1]) == fit


def test_known_answers_are_kept_and_few_votes_are_not_certain():
    votes, truth = crowd([0.7, 0.7, "adversarial", "adversarial"], items=60, seed=2)
    gold = dict(itertools.islice(truth.items(), 30)) | {"never-asked": "both_bad"}
    told = dawid_skene(votes, gold=gold)
    by_item = {label.item: label for label in told.labels}
    assert all(
        by_item[item].verdict == verdict for item, verdict in gold.items() if item in by_item
    )
    assert set(by_item) == {vote.item for vote in votes}
    # Nobody can tell which half of this crowd lies, but for the questions whose answers are known.
    assert all(accuracy > 0.55 for name, accuracy in told.accuracy.items() if "0.7" in name)
    assert all(accuracy < 0.35 for name, accuracy in told.accuracy.items() if "adversarial" in name)
    (alone,) = dawid_skene(said("first")).labels
    assert 0.5 < alone.confidence < 0.75
    (opposed,) = dawid_skene(said("first", "second")).labels
    assert opposed.verdict is None and opposed.probability == pytest.approx(0.5)
    with pytest.raises(DataError, match="no votes"):
        dawid_skene([])
    with pytest.raises(DataError, match="gold answer"):
        dawid_skene(votes, gold={"item-1": "left"})


def ranked(strengths, seed, people=6):
    """Votes of a crowd on all pairs, by Bradley and Terry, a tenth ties."""
    draw, votes, sides = random.Random(seed), [], {}
    for x, y in itertools.combinations(strengths, 2):
        sides[f"{x}:{y}"] = (x, y)
        chance = 1 / (1 + math.exp(strengths[y] - strengths[x]))
        for k in range(people):
            value = (
                "tie" if draw.random() < 0.1 else "first" if draw.random() < chance else "second"
            )
            votes.append(Vote(f"{x}:{y}", f"person-{k}", value))
    return votes, sides


@pytest.mark.parametrize("seed", range(3))
def test_bradley_terry_is_the_penalised_likelihood(seed):
    strengths = {"p": 1.2, "q": 0.4, "r": -0.3, "s": -1.3}
    votes, sides = ranked(strengths, seed)

    def loss(scores):
        at, total = dict(zip(strengths, scores, strict=True)), 0.0
        for vote in votes:
            x, y = sides[vote.item]
            won = {"first": 1.0, "second": 0.0, "tie": 0.5}[vote.verdict]
            total += won * np.logaddexp(0, at[y] - at[x]) + (1 - won) * np.logaddexp(
                0,
                at[x] - at[y],
            )
        return total + sum(0.5 * np.logaddexp(0, s) + 0.5 * np.logaddexp(0, -s) for s in scores)

    best = minimize(loss, np.zeros(4), tol=1e-10).x
    found = bradley_terry(votes, sides)
    assert [found[name] for name in strengths] == pytest.approx(list(best - best.mean()), abs=1e-4)
    assert list(found) == sorted(found, key=lambda name: -found[name])
    assert bradley_terry(votes[::-1], sides) == found


def test_bradley_terry_of_a_response_that_never_lost_and_of_none():
    votes, sides = said("first", "first", item="p:q"), {"p:q": ("p", "q")}
    scores = bradley_terry(votes, sides)
    assert 0 < scores["p"] < 3 and scores["q"] == pytest.approx(-scores["p"])
    assert bradley_terry([], sides) == {}
    for wrong in ({}, {"p:q": ("p", "p")}, {"p:q": ("", "q")}):
        with pytest.raises(DataError, match="two responses"):
            bradley_terry(votes, wrong)
