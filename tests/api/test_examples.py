"""The programs in examples/, as a user runs them."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

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
    assert sum(history[-3:]) > 3 * sum(history[:3])


def test_the_loop_by_hand_has_forty_lines():
    code = (EXAMPLES / "ppo_by_hand.py").read_text()
    body = code[code.index("import torch") : code.index("\n\nif __name__")].strip()
    loop = [line for line in body[body.index("    model = ") :].splitlines() if line.strip()]
    assert len(loop) <= 40


def test_the_notebook_reaches_a_verdict_on_twenty_held_out_prompts(tmp_path, monkeypatch):
    """Its cells on the tiny model, as a notebook runs them; and the picture that it keeps is that of
    a run.
    """
    notebook = json.loads((EXAMPLES / "front_door.ipynb").read_text(encoding="utf-8"))
    drawn = []
    display = SimpleNamespace(SVG=lambda filename: drawn.append(Path(filename).read_text()))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.chdir(tmp_path)
    names = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"]).replace("HuggingFaceTB/SmolLM2-135M-Instruct", "tiny")
            exec(compile(source.replace("steps=16", "steps=2"), "cell", "exec"), names)
    assert len(set(names["heldout"])) == 20 and not {*names["heldout"]} & {*names["train"]}
    summary = json.loads((tmp_path / "runs/brief/summary.json").read_text())
    assert summary["evaluation"]["num_prompts"] == 20
    rate = summary["grpo"]["gold_win_rate"]
    assert rate["low"] < rate["value"] < rate["high"] and rate["count"] == 20
    (picture,) = drawn
    assert picture.startswith("<svg") and f"{rate['value']:.1%}" in picture
