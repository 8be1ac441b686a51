"""A judgment that was confirmed is on the disk, whenever the power fails."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("cc"),
    reason="needs Linux and a C compiler",
)
def test_a_disk_has_every_confirmed_judgment_after_every_flush_of_a_store(tmp_path):
    library = tmp_path / "flushes.so"
    source = Path(__file__).with_name("flushes.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    command = [sys.executable, "-m", "tests.people.annotation.power", str(tmp_path)]
    loaded = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run(command, env=loaded, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr[-2000:]
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["confirmed"] == 8
    flushed = {name for change in facts["changes"] for name in change.split("/")[-1:]}
    assert {"prefs.db", "prefs.db-wal"} <= flushed
    assert facts["lost"] == []
