"""A run that is killed before each change of its files, one after another, ends as one that nobody
killed: no file more, none less, and each with the same bytes but for times.
"""

import json
import subprocess
import sys

import pytest
from benchmarks.every_stage import differences, everything
from tests.run.killed import RECIPES


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", RECIPES)
def test_a_run_that_is_killed_before_each_change_ends_as_one_in_one_go(name, tmp_path):
    command = [sys.executable, "-m", "tests.run.killed", name, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len((tmp_path / "deaths.txt").read_text().splitlines()) > 100
    whole = json.loads((tmp_path / "whole.json").read_text())
    assert differences(whole, everything(tmp_path / "run")) == []
