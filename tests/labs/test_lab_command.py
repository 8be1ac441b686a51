"""`tether lab` lists the labs and runs one."""

import re
from pathlib import Path

from typer.testing import CliRunner

from tether.cli import app, labs


def test_the_list_names_every_lab():
    shown = CliRunner().invoke(app, ["lab"], env={"COLUMNS": "200"}).output
    names = [path.stem for path in sorted(labs.LABS.glob("[0-9][0-9]_*.py"))]
    assert names and [name for name in names if name not in shown] == []


def test_a_lab_runs_by_number_and_gives_the_path_of_its_page(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["lab", "1", "--seed", "3"]).exit_code == 0
    printed = capfd.readouterr().out
    page = re.search(r"^page: (.*)$", printed, flags=re.MULTILINE)[1]
    assert page == str(tmp_path / "runs" / "labs" / "01_bandit_and_clip_seed3.html")
    assert "with seed 3" in Path(page).read_text()
    code = re.search(r"^code: (.*)$", printed, flags=re.MULTILINE)[1]
    assert "lab.finish()" in Path(code).read_text()


def test_an_unknown_lab_is_refused_with_the_names(tmp_path):
    result = CliRunner().invoke(app, ["lab", "bandwagon"])
    assert result.exit_code != 0
    assert "0 labs are called 'bandwagon'" in str(result.exception)
    assert "01_bandit_and_clip" in str(result.exception)
