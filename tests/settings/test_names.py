"""Names that a person chooses become parts of paths: used, with nothing written elsewhere, or
refused in a sentence.
"""

import json
from pathlib import Path

import pytest
from tests.every_stage import recipe

from tether.api.given import data_values
from tether.core.errors import ConfigError
from tether.core.names import file_part
from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import Recipe

STRANGE = [
    "../x",
    "/tmp/x",
    "a\nb",
    "x" * 300,
    "é" * 200,
    "CON",
    "",
    " ",
    ".",
    "..",
    "-",
    "名",
    "a/b",
    "a\\b",
    ".hidden",
    "\udcff",
]
PLAIN = ["helpful", "test.helpful", "HH_2023", "a-b", "人"]


def test_every_name_is_part_of_a_file_name_of_its_own(tmp_path):
    parts = [file_part(name) for name in (*STRANGE, *PLAIN, "a-b", "a b", "a/b")]
    assert len(set(parts)) == len({*STRANGE, *PLAIN, "a b"})
    for part in parts:
        (tmp_path / f"quarantine-{part}.jsonl").write_text("")
    assert (
        len(list(tmp_path.iterdir())) == len(set(parts))
        and [file_part(name) for name in PLAIN] == PLAIN
    )


@pytest.fixture(scope="module")
def tested(tmp_path_factory):
    """A reward stage with a test of each strange name, in which one row cannot be used."""
    folder = tmp_path_factory.mktemp("tested")
    values = recipe(folder, folder / "run")
    bad = {"prompt": "same", "chosen": "equal", "rejected": "equal"}
    mixed = folder / "mixed.jsonl"
    mixed.write_text((folder / "pairs.jsonl").read_text() + json.dumps(bad) + "\n")
    names = [name for name in STRANGE if name.isprintable() or name == "a\nb"]
    reward = {**values["reward"], "test": {name: {"path": str(mixed)} for name in names}}
    before = set(folder.rglob("*"))
    summary = run_recipe(build(Recipe, {**values, "sft": None, "reward": reward}), ["reward"])[
        "reward"
    ]
    return folder, names, summary, before


def test_tests_of_any_name_are_evaluated_and_their_bad_rows_counted(tested):
    folder, names, summary, before = tested
    assert [*summary["tests"]] == names and summary["quarantine"]["count"] == len(names)
    files = [path for path in (folder / "run").rglob("quarantine-test.*") if path.is_file()]
    files += [
        path for path in (folder / "run" / "reward").glob("quarantine-*") if path not in files
    ]
    assert len(files) == len(names) and {path.parent for path in files} == {
        folder / "run" / "reward",
    }
    outside = {path for path in folder.rglob("*") if folder / "run" not in (path, *path.parents)}
    assert outside == {path for path in before if folder / "run" not in (path, *path.parents)}


@pytest.mark.parametrize("name", [name for name in STRANGE if name not in ("CON", "名")])
@pytest.mark.parametrize("place", ["arms", "objectives"])
def test_names_of_folders_are_plain_words(tmp_path, name, place):
    values = recipe(tmp_path, tmp_path / "run")
    if place == "arms":
        values["arms"] = {name: {"ppo": {"seed": 1}}}
    else:
        values["reward"]["objectives"] = {
            name: {"path": values["reward"].pop("data")["path"]},
            "other": {"path": "tether:prompts"},
        }
    with pytest.raises(ConfigError) as refused:
        build(Recipe, values)
    assert len(str(refused.value)) < 900


@pytest.mark.parametrize("name", ["checkpoints", "engine", "round-01", "test", "model"])
def test_an_objective_takes_no_folder_that_the_run_has(tmp_path, name):
    values = recipe(tmp_path, tmp_path / "run")
    data = values["reward"].pop("data")
    values["reward"]["objectives"] = {name: data, "other": data}
    with pytest.raises(ConfigError, match=f"an objective cannot be called {name!r}"):
        build(Recipe, values)


@pytest.mark.parametrize("run", ["", " ", "\n"])
def test_a_run_without_a_path_is_refused(run):
    with pytest.raises(ConfigError, match=r"key 'run'.* a folder"):
        build(Recipe, {"run": run, "model": {"source": "tiny"}})


def test_the_home_folder_is_meant_by_its_sign(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p"}\n')
    section = {"data": {"path": "~/rows.jsonl"}, "reward_source": "random"}
    built = build(Recipe, {"run": "~/mine", "model": {"source": "tiny"}, "grpo": section})
    assert built.run == str(tmp_path / "mine") and built.section("grpo").data.paths == (
        str(tmp_path / "rows.jsonl"),
    )


@pytest.mark.parametrize("name", STRANGE)
def test_rows_in_memory_lie_in_the_run_whatever_they_are_called(tmp_path, name):
    path = data_values([{"prompt": "p"}], tmp_path, f"test.{name}")["path"]
    assert (tmp_path / "data").resolve() == Path(path).resolve().parent
