"""The more labels a reward model has seen, the longer the truth goes along with its choices."""

from statistics import fmean

import pytest

pytestmark = pytest.mark.slow
FEW, MORE, MANY = "100", "500", "4000"


@pytest.fixture(scope="module")
def results(experiment):
    return experiment("best_of_n", prompts=8, pool=2048, largest=512)


def test_more_labels_make_a_better_judge(results):
    for result in results:
        few, more, many = (result["models"][count]["accuracy"] for count in (FEW, MORE, MANY))
        assert few < more < many
        assert many > 0.85


def test_its_choices_are_worth_more(results):
    for result in results:
        few, more, many = (max(result["models"][count]["gold"]) for count in (FEW, MORE, MANY))
        assert few < more < many < max(result["ceiling"])


def test_the_proxy_always_rises(results):
    for result in results:
        for model in result["models"].values():
            assert all(
                later > earlier
                for earlier, later in zip(model["proxy"], model["proxy"][1:], strict=False)
            )


def test_gold_turns_earlier_with_fewer_labels(results, experiment):
    """On average over the seeds; in a single one, few labels may be lucky, and gold not turn at
    all.
    """
    from benchmarks.learning.best_of_n import peak

    peaks = [fmean(peak(result, count) for result in results) for count in (FEW, MORE, MANY)]
    assert peaks == sorted(peaks)
