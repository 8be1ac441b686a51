"""`tether lab` lists the labs and runs one."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tether.cli import app, recipes
from tether.core.errors import ConfigError


def test_the_list_names_every_lab_and_its_question():
    shown = CliRunner().invoke(app, ["lab"], env={"COLUMNS": "200"}).output
    paths = sorted(recipes.LABS.glob("[0-9][0-9]_*.py"))
    assert paths and [path.stem for path in paths if path.stem not in shown] == []
    assert shown.count("?") == len(paths)


@pytest.mark.parametrize("codes", [{}, {"03": 1, "11": 1}])
def test_all_labs_run_and_those_outside_their_bands_are_named(codes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipes, "_run", lambda path, seed: not codes.get(path.stem[:2]))
    result = CliRunner().invoke(app, ["lab", "all"])
    assert result.exit_code == int(bool(codes))
    assert re.findall(r"\b\d\d(?=_)", result.output) == [*codes]


def test_a_lab_runs_by_number_and_gives_the_path_of_its_page(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["lab", "1", "--seed", "3"]).exit_code == 0
    printed = capfd.readouterr().out
    page = re.search(r"^page: (.*)$", printed, flags=re.MULTILINE)[1]
    assert page == str(tmp_path / "runs" / "labs" / "01_bandit_and_clip_seed3.html")
    assert "with seed 3" in Path(page).read_text()
    code = re.search(r"^code: (.*)$", printed, flags=re.MULTILINE)[1]
    assert "lab.finish(" in Path(code).read_text()
    assert printed.splitlines()[-1].startswith("Lesson: ")


@pytest.mark.parametrize("name", ["bandwagon", "²", "9" * 5000, "0", "../01", "1_clip"])
def test_an_unknown_lab_is_refused_with_the_names(name):
    result = CliRunner().invoke(app, ["lab", name])
    assert isinstance(result.exception, ConfigError)
    assert f"0 labs are called {name!r}" in str(result.exception)
    assert "01_bandit_and_clip" in str(result.exception)


def test_a_folder_without_room_for_pages_is_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("a file")
    monkeypatch.setattr(recipes, "_run", None)
    result = CliRunner().invoke(app, ["lab", "1"])
    assert isinstance(result.exception, OSError) and result.exception.filename == "runs/labs"


@pytest.mark.parametrize(
    ("name", "stem"),
    [("1", "01_"), ("01", "01_"), ("0010", "10_"), ("7-hundred", "07_")],
)
def test_a_lab_is_named_by_its_number_or_its_beginning(name, stem):
    assert recipes._lab(name).stem.startswith(stem)
