"""The same command gives the same bits beside busy programs as alone, whatever memory they leave
and wherever tensors lie.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.every_stage import differences, results
from tests.runner.crowd import STEPS

from tether.settings.stages import STAGES

BUSY = (
    "import torch\ntorch.set_num_threads(1)\nx = torch.randn(700, 700)\nwhile True:\n    x = "
    "(x @ x).tanh()\n"
)
HOLDING = "import sys\nheld = bytearray(b'x') * (1 << 30)\nsys.stdin.read()\n"
SHIFTING = (
    "import random, time\nheld = []\nwhile True:\n    held.append(bytearray(b'x') * "
    "random.randrange(1 << 20, 1 << 27))\n    held[:] = random.sample(held, min(len(held), 8))\n"
    "    time.sleep(0.02)\n"
)


@contextlib.contextmanager
def crowd() -> Iterator[None]:
    """In this block the machine has one busy process more than processors, one that holds a
    gigabyte, and one that takes and gives back blocks of memory without end.
    """
    scripts = [BUSY] * ((os.cpu_count() or 1) + 1) + [HOLDING, SHIFTING]
    others = [
        subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
        for script in scripts
    ]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def trained(stage: str, folder: Path, run: Path, *seed: str) -> dict[str, object]:
    """The results of a run of one stage, in a process of its own."""
    run.parent.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "tests.runner.crowd", stage, str(folder), str(run), *seed]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return results(run)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    (psutil.cpu_count() or 1) < 2,
    reason=("needs two processors: one thread has one order"),
)
@pytest.mark.parametrize(
    "stage",
    [name for name, kind in STAGES.items() if kind.makes not in ("pairs", "verdict")],
)
def test_a_stage_ends_with_the_same_bits_in_a_crowd(stage, tmp_path):
    alone = trained(stage, tmp_path, tmp_path / "alone" / "run")
    with crowd():
        beside = trained(stage, tmp_path, tmp_path / "crowded" / "run", "1")
    assert differences(alone, beside) == []
    assert [name for name in alone if name.startswith(stage) and name.endswith(".safetensors")]
    rows = [
        value
        for name, value in alone.items()
        if name.startswith(stage) and name.endswith("metrics.jsonl")
    ]
    assert sum(map(len, rows)) >= STEPS
