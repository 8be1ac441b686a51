"""A run that is killed again and again, each time before another change of its files, ends as one
that nobody killed: no file more, none less, and each with the same bytes but for times.
"""

import json
import subprocess
import sys

import pytest
from tests.every_stage import differences, everything
from tests.runner.killed import KILLS, RECIPES, chosen_of


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", RECIPES)
def test_a_run_that_is_killed_before_its_changes_ends_as_one_in_one_go(name, tmp_path):
    command = [sys.executable, "-m", "tests.runner.killed", name, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    changes, deaths = (
        (tmp_path / name).read_text().splitlines() for name in ("changes.txt", "deaths.txt")
    )
    # a change that an earlier start has made is not made again
    assert len({*chosen_of(changes, KILLS)} & {*deaths}) > KILLS // 2
    assert len(changes) > 100
    whole = json.loads((tmp_path / "whole.json").read_text())
    assert differences(whole, everything(tmp_path / "run")) == []
    # torch keeps a cache of compiled code there
    left = {path.name.partition("_")[0] for path in (tmp_path / "temporary").iterdir()}
    assert left <= {"torchinductor"}


def test_kills_are_chosen_in_equal_distances():
    changes = [f"change {number}" for number in range(100)]
    assert chosen_of(changes, 4) == [changes[place] for place in (0, 25, 50, 75)]
    assert chosen_of(changes, 0) == chosen_of(changes, 500) == changes
