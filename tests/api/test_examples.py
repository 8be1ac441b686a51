"""The programs in examples/, as a user runs them."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.slow
def test_the_front_door_in_fifteen_lines(tmp_path):
    text = (EXAMPLES / "front_door.py").read_text()
    code = [
        line
        for line in text.splitlines()
        if line.strip() and not line.strip().startswith(('"""', "#"))
    ]
    assert len(code) <= 15
    command = [sys.executable, str(EXAMPLES / "front_door.py"), "tiny"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        input="hello\n\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "model>" in done.stdout and (tmp_path / "brief-model/config.json").is_file()
    again = subprocess.run(
        command,
        cwd=tmp_path,
        input="",
        capture_output=True,
        text=True,
        check=False,
    )
    # the training was not repeated, the folder is not overwritten
    assert "brief-model exists" in again.stderr


def test_ppo_by_hand_learns_and_starts_at_its_reference(capsys):
    sys.path.insert(0, str(EXAMPLES))
    from ppo_by_hand import train

    history = train(steps=16)
    lines = capsys.readouterr().out.splitlines()
    assert "KL 0.00 nats" in lines[0] and float(lines[-1].split("KL ")[1].split()[0]) > 1
    assert sum(history[-3:]) > 5 * sum(history[:3])


def test_the_loop_by_hand_has_forty_lines():
    code = (EXAMPLES / "ppo_by_hand.py").read_text()
    body = code[code.index("import torch") : code.index("\n\nif __name__")].strip()
    loop = [line for line in body[body.index("    model = ") :].splitlines() if line.strip()]
    assert len(loop) <= 40
