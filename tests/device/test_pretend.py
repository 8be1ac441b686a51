"""Every test of `on_device.py`, in a process of its own: torch cannot forget a device that it has been told of."""

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

SCRIPT = Path(__file__).with_name("on_device.py")
NAMES = re.findall(r"^def (test_\w+)", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)
FAULTS = ("failure", "error", "skipped")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """By the name of a test, what went wrong in each of its cases: nothing, where the text is empty."""
    record = tmp_path_factory.mktemp("outcomes") / "junit.xml"
    options = ["-q", "-p", "no:cacheprovider", "--tb=short", f"--junitxml={record}", "-o", "junit_family=xunit2"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "COV_"))}
    command, root = [sys.executable, "-m", "pytest", *options, str(SCRIPT)], SCRIPT.parents[2]
    ended = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert record.is_file(), f"the device stopped its process:\n{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"
    found = defaultdict(list)
    for case in ElementTree.parse(record).iter("testcase"):
        faults = [fault.text or fault.tag for fault in case if fault.tag in FAULTS]
        found[case.attrib["name"].split("[")[0]].append("\n".join(faults))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_on_the_pretend_device(outcomes, name):
    assert outcomes[name], "it did not run"
    assert not any(outcomes[name]), "\n".join(outcomes[name])
