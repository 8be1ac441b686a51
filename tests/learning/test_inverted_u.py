"""Too weak a tether and the policy repeats itself to please the reward model; too strong a one and
it hardly moves.
"""

from statistics import fmean, stdev

import pytest

pytestmark = pytest.mark.slow
WEAK, MIDDLE, STRONG = "ppo 0.01", "ppo 0.1", "ppo 1"


@pytest.fixture(scope="module")
def results(experiment):
    return experiment("inverted_u", steps=40, betas=(0.01, 0.1, 1.0), others=False)


def column(results, arm, key):
    return [result["arms"][arm][key] for result in results]


@pytest.mark.parametrize("end", [WEAK, STRONG])
def test_the_truth_is_served_best_in_the_middle(results, end):
    middle, other = column(results, MIDDLE, "true"), column(results, end, "true")
    differences = [m - o for m, o in zip(middle, other, strict=True)]
    assert min(differences) > 0
    assert fmean(differences) > 2 * stdev(differences) / len(differences) ** 0.5


def test_the_middle_is_better_than_no_optimisation(results):
    gains = [result["arms"][MIDDLE]["true"] - result["sft"]["true"] for result in results]
    assert min(gains) > 0.4


def test_kl_falls_with_the_tether(results):
    for weak, middle, strong in zip(
        *(column(results, arm, "kl") for arm in (WEAK, MIDDLE, STRONG)),
        strict=True,
    ):
        assert weak > 2 * middle > 4 * strong > 0


def test_a_weak_tether_lets_the_proxy_rise_and_the_truth_fall(results):
    for result in results:
        arm = result["arms"][WEAK]
        peak = max(range(len(arm["curve"])), key=lambda step: arm["curve"][step]["true"])
        assert arm["proxy"] > arm["curve"][peak]["proxy"] > result["sft"]["proxy"]
        assert arm["true"] < result["sft"]["true"] < arm["curve"][peak]["true"]
        assert arm["repeats"] > 0.3 > 3 * result["sft"]["repeats"]
