"""Win rates at equal length, against alpaca_eval's own code and against made-up judges whose liking
for length is set by hand.
"""

import math

import numpy as np
import pytest
from tests.evaluation.oracles.alpaca_eval_numbers import pairs

from tether.data.sources import read_rows
from tether.evaluation import length_controlled
from tether.evaluation.length_controlled import length_controlled_win_rate, regressions
from tether.evaluation.winrate import mean_estimate

ALPACA_EVAL = {
    (1, -150, 0.2): 53.5074,
    (2, 300, -0.5): 38.0934,
    (3, 0, 1.5): 76.8842,
    (4, -400, -1.0): 32.5500,
}
"""The win rate that is controlled by length alone, printed by oracles/alpaca_eval_numbers.py
(alpaca_eval 0.6.6, scikit-learn 1.9.1).
"""


@pytest.fixture
def no_interval(monkeypatch):
    monkeypatch.setattr(length_controlled, "_interval", lambda *_: (0.0, 1.0))


@pytest.mark.usefixtures("no_interval")
@pytest.mark.parametrize("case", ALPACA_EVAL, ids=str)
def test_the_numbers_are_those_of_alpaca_eval(case):
    """Its solver stops at a tolerance of 1e-4, so the last digits differ."""
    wins, own, base = pairs(*case)[:3]
    controlled = length_controlled_win_rate(wins.tolist(), own.tolist(), base.tolist())
    assert 100 * controlled.value == pytest.approx(ALPACA_EVAL[case], abs=0.02)


def test_regressions_reach_the_least_of_their_objective():
    """Where a coefficient is not 0 the penalty balances the slope of the loss; where it is 0 the
    slope is no steeper than the penalty.
    """
    generator = np.random.default_rng(5)
    features = generator.normal(size=(120, 3))
    wins = 1 / (1 + np.exp(-features[:, 0]))
    weights = generator.random((3, 120))
    strengths = np.array([0.2, 30.0, 1e4])
    fitted = regressions(features, wins, weights, strengths)
    for coefficients, own, strength in zip(fitted, weights, strengths, strict=True):
        predicted = 1 / (1 + np.exp(-features @ coefficients))
        slope = strength * ((own * (predicted - wins)) @ features)
        moved = coefficients != 0
        assert slope[moved] == pytest.approx(-np.sign(coefficients[moved]), abs=1e-5)
        assert (np.abs(slope[~moved]) <= 1 + 1e-9).all()
    assert (fitted[0] == 0).sum() == 2, "a strong penalty holds coefficients at 0"
    assert fitted[2] == pytest.approx([1, 0, 0], abs=1e-3)


@pytest.mark.usefixtures("no_interval")
def test_published_raw_rates_come_out_to_a_hundredth(tether_data):
    """9.62 is gpt-3.5-turbo-0301's rate by the weighted judge in the leaderboard of alpaca_eval
    0.6.6.
    """
    path = tether_data / "alpaca_eval" / "multi-judge-pairs.jsonl.gz"
    rows = [
        row
        for row in read_rows(path, lambda row: [row])
        if row["generator_2"] == "gpt-3.5-turbo-0301" and row["annotator"].startswith("weighted")
    ]
    wins = [row["preference"] - 1 for row in rows]
    assert 100 * mean_estimate(wins).value == pytest.approx(9.62, abs=0.005)
    lengths = [[len(row[f"output_{side}"]) for row in rows] for side in (2, 1)]
    refused = length_controlled_win_rate(wins, *lengths)
    assert math.isnan(refused.value) and "longer one in 96% of 805" in refused.reason


def judged(generator, count, liking, skill):
    """A judge that likes length by `liking`, and the share of wins at equal length."""
    base = generator.integers(200, 1500, count)
    own = np.maximum(base + generator.normal(150, 400, count).astype(int), 10)
    odds = skill - liking * np.tanh((base - own) / 400)
    return (generator.random(count) < 1 / (1 + np.exp(-odds))).astype(float), own, base


def test_length_alone_wins_nothing_at_equal_length():
    """A judge that sees length alone gives half of all wins at equal length."""
    wins, own, base = judged(np.random.default_rng(0), 1500, 2.0, 0.0)
    result = length_controlled_win_rate(wins.tolist(), own.tolist(), base.tolist())
    assert mean_estimate(wins.tolist()).low > 0.55
    assert result.low < 0.5 < result.high
    assert result.value == pytest.approx(0.5, abs=0.04)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_interval_holds_the_truth():
    truth, held = 1 / (1 + np.exp(-0.6)), 0
    for seed in range(150):
        wins, own, base = judged(np.random.default_rng(seed), 100, 1.0, 0.6)
        estimate = length_controlled_win_rate(wins.tolist(), own, base)
        held += estimate.low <= truth <= estimate.high
    assert 0.91 <= held / 150 <= 0.99  # 0.95 ± 2.2 standard errors of 150 draws


def test_too_little_gives_no_bounds():
    wins, own, base = judged(np.random.default_rng(0), 40, 0.5, 0.5)
    few = length_controlled_win_rate(wins.tolist(), own, base)
    assert few.reason == "too few prompts: 40, and 50 are needed"
    wins, own, base = judged(np.random.default_rng(0), 80, 0.5, 0.5)
    alike = length_controlled_win_rate([1.0] * 80, own, base)
    assert alike.reason.startswith("too few wins or losses: 0")
    doubled = np.tile(own, 2), np.tile(base, 2)
    again = length_controlled_win_rate(
        [*wins, *wins],
        *doubled,
        prompts=[*range(40), *range(40)] * 2,
    )
    assert again.reason == "too few prompts: 40, and 50 are needed"


@pytest.mark.usefixtures("no_interval")
def test_failed_verdicts_are_left_out():
    wins, own, base = judged(np.random.default_rng(1), 60, 0.5, 0.5)
    failed = length_controlled_win_rate([None, *wins[1:]], own, base)
    assert failed == length_controlled_win_rate(wins[1:].tolist(), own[1:], base[1:])
    assert failed.count == 59
