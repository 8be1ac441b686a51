"""What a run says is finished is on the disk, whenever the power fails."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.runner.power import RESUMED

pytestmark = pytest.mark.timeout(600)


def test_a_disk_has_all_that_it_calls_finished_after_every_change_of_a_run(tmp_path):
    command = [sys.executable, "-m", "tests.runner.power", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    facts = json.loads((tmp_path / "facts.json").read_text())
    kinds = {change.split()[0] for change in facts["changes"]}
    assert {"flush", "replace", "rename", "unlink", "rmdir"} <= kinds
    assert len(facts["changes"]) > 300
    assert facts["faults"] == []
    assert [other for _, _, other in facts["resumed"]] == [[]] * RESUMED


def may_mount():
    return os.geteuid() == 0 and Path("/dev/loop-control").exists() and shutil.which("mkfs.ext4")


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="needs root, loop devices and mkfs.ext4")
def test_images_of_a_file_system_cut_during_a_run_lack_nothing_that_is_finished(tmp_path):
    command = [sys.executable, "-m", "tests.runner.power", str(tmp_path), "ext4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "no image can be mounted here" in done.stderr:
        pytest.skip("no image can be mounted here")
    assert done.returncode == 0, done.stderr[-2000:]
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["images"] >= 60 and facts["faults"] == []
