"""Code moves, numbers do not: every stage leaves the bits that it left when `golden.json` was made.

On a processor that rounds otherwise than the one where `golden.json` was made, the old revision
runs here first.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.golden.record import GOLDEN, REPOSITORY, processor


def recorded(repository, out):
    """What the revision in `repository` leaves, in a process of its own: one thread, float32."""
    settings = {
        "PYTHONPATH": f"{repository / 'src'}:{repository}",
        "OMP_NUM_THREADS": "1",
        "TETHER_CPU_DTYPE": "float32",
    }
    asked = [sys.executable, "-m", "tests.golden.record", str(out)]
    done = subprocess.run(
        asked,
        cwd=repository,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """The committed one, or that of its revision made here."""
    found = json.loads(GOLDEN.read_text())
    if found["processor"] == processor():
        return found
    folder = tmp_path_factory.mktemp("old")
    asked = [
        "git",
        "-C",
        str(REPOSITORY),
        "worktree",
        "add",
        "--detach",
        str(folder / "tree"),
        found["revision"],
    ]
    if subprocess.run(asked, capture_output=True, check=False).returncode:
        pytest.skip(
            f"this processor rounds otherwise, and revision {found['revision'][:8]} is "
            "not in this clone to be run here",
        )
    try:
        return recorded(folder / "tree", folder / "golden.json")
    finally:
        subprocess.run(
            ["git", "-C", str(REPOSITORY), "worktree", "remove", "--force", str(folder / "tree")],
            check=False,
        )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_stage_leaves_what_it_left(golden, tmp_path):
    now = recorded(REPOSITORY, tmp_path / "now.json")["files"]
    for journey, files in golden["files"].items():
        gone = sorted(files.keys() - now[journey].keys())
        changed = [name for name, told in files.items() if now[journey].get(name, told) != told]
        assert not gone and not changed, f"{journey}: gone: {gone}; other bits: {changed}"
