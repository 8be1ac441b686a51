"""Evaluators before, along and after training: what is written, resumed and compared."""

import json

import numpy as np
import pytest

from tether.core.errors import ConfigError
from tether.core.protocols import Evaluator
from tether.core.rundir import read_jsonl
from tether.evaluation.suite import Figures, Suite, apart, as_record, changes
from tether.evaluation.winrate import gain, mean_estimate
from tether.stats import Estimate


class Coins:
    """An evaluator of one figure: heads of made-up coins, in a policy's favour by its skill."""

    name = "coins"

    def __init__(self, rows=200, shown=True):
        self.rows, self.shown, self.calls = rows, shown, 0

    def __call__(self, policy, step):
        self.calls += 1
        luck = np.random.default_rng(0).random(self.rows)
        heads = (luck < policy).astype(float).tolist()
        rows = {"heads": {f"r{i}": value for i, value in enumerate(heads)}}
        return Figures({"heads": mean_estimate(heads)}, rows if self.shown else None)


def test_each_moment_is_written_and_compared_row_by_row(tmp_path):
    """By hand: of the rows whose luck is between 0.4 and 0.5 heads are new, and none is lost."""
    suite = Suite([Coins()], tmp_path)
    assert "change" not in suite.measure(0.4, 0, "before")[0]
    (now,) = suite.measure(0.5, 7, "after")
    luck = np.random.default_rng(0).random(200)
    change = now["change"]["heads"]
    assert change["paired"]
    assert change["difference"]["value"] == pytest.approx(((luck > 0.4) & (luck < 0.5)).mean())
    before, after = ((luck < skill).astype(float).tolist() for skill in (0.4, 0.5))
    assert change["difference"] == gain(before, after, list(range(200))).as_dict()
    lines = list(read_jsonl(tmp_path / "evaluations.jsonl"))
    assert [(line["moment"], line["step"]) for line in lines] == [("before", 0), ("after", 7)]
    assert lines[1] == json.loads(json.dumps(now))


def test_a_resumed_suite_measures_nothing_twice(tmp_path):
    Suite([Coins()], tmp_path).measure(0.4, 0, "before")
    coins = Coins()
    suite = Suite([coins], tmp_path)
    suite.measure(0.9, 0, "before")
    assert coins.calls == 0, "the start stands in the file"
    (along,) = suite.measure(0.5, 3, "along")
    assert coins.calls == 1 and along["change"]["heads"]["paired"]
    again = Suite([coins], tmp_path)
    assert again.measure(0.6, 3, "along")[0] == along and coins.calls == 1


def test_other_rows_or_none_are_compared_as_independent():
    start = as_record("coins", "before", 0, Coins(rows=200)(0.4, 0))
    for other in (Coins(rows=150), Coins(shown=False)):
        now = as_record("coins", "after", 1, other(0.5, 1))
        change = changes(start, now)["heads"]
        assert not change["paired"]
        paired = changes(start, as_record("coins", "after", 1, Coins()(0.5, 1)))["heads"]
        widths = [c["difference"]["high"] - c["difference"]["low"] for c in (change, paired)]
        assert widths[0] > widths[1]


def test_two_independent_estimates_differ_by_the_root_of_squares():
    """By hand: 3 and 4 give 5 below, 6 and 8 give 10 above."""
    first, second = Estimate(1.0, -7.0, 5.0, 10), Estimate(3.0, 0.0, 9.0, 20)
    assert apart(first, second) == Estimate(2.0, 2.0 - 5.0, 2.0 + 10.0, 10)
    vague = Estimate(1.0, -np.inf, np.inf, 3, "too few groups: 3, and 16 are needed")
    assert apart(vague, second).reason == "too few groups: 3, and 16 are needed"


def test_names_are_given_once_and_a_plain_mapping_is_enough():
    with pytest.raises(ConfigError, match="two evaluators are called 'coins'"):
        Suite([Coins(), Coins()])

    class Constant:
        name = "constant"

        def __call__(self, policy, step):
            return {"one": Estimate(1.0, 0.5, 1.5, 4)}

    assert isinstance(Constant(), Evaluator)
    suite = Suite([Constant()])
    suite.measure(None, 0, "before")
    assert suite.measure(None, 1, "after")[0]["change"]["one"]["difference"]["value"] == 0.0
