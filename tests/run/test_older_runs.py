"""A run that an older tether began goes on, or is refused with what to do. Its summary says where
its end may differ from that of a run in one go.
"""

import json
import shutil

import pytest
from benchmarks.every_stage import differences, recipe, results
from tests.run.journeys import Killed, dying_after
from typer.testing import CliRunner

from tether.cli import app
from tether.core.errors import RunError
from tether.core.locks import release
from tether.core.rundir import read_json
from tether.runner.folder import remember
from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.tools.export_source import standing

LATER = {"threads", "steps", "cwd", "rows"}
"""Entries of a manifest that came later."""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """SFT and REINFORCE with a random reward in one go, and killed after two steps."""
    folder = tmp_path_factory.mktemp("older")
    values = recipe(folder, folder / "whole")
    sections = {
        "sft": values["sft"],
        "reinforce": values["reinforce"] | {"reward_source": "random"},
    }
    run_recipe(build(Recipe, {"run": values["run"], "model": values["model"], **sections}))
    cut = {"run": str(folder / "cut"), "model": values["model"], **sections}
    run_recipe(build(Recipe, cut), ["sft"])
    with pytest.raises(Killed):
        run_recipe(build(Recipe, cut), ["reinforce"], dying_after(2))
    return folder, cut


@pytest.fixture
def begun(killed, tmp_path):
    """The killed run, in a place of its own, and the values of its recipe."""
    folder, cut = killed
    shutil.copytree(folder / "cut", tmp_path / "run")
    return tmp_path / "run", {**cut, "run": str(tmp_path / "run")}, folder / "whole"


def of_another_code(stage):
    """The manifest of an older tether: without later entries, and with the digest of its code."""
    path = stage / "manifest.json"
    values = {key: value for key, value in read_json(path).items() if key not in LATER}
    path.write_text(json.dumps({**values, "code_digest": "0123456789abcdef"}))


def with_setting(stage, name, key, value):
    path = stage / "config.json"
    settings = read_json(path)
    settings[name][key] = value
    path.write_text(json.dumps(settings))


@pytest.mark.parametrize("older", [True, False])
def test_only_a_run_of_other_code_notes_that_its_end_may_differ(begun, older):
    root, values, whole = begun
    if older:
        of_another_code(root / "reinforce")
    summary = run_recipe(build(Recipe, values), ["reinforce"])["reinforce"]
    notes = [note for note in summary.get("notes", ()) if "other code" in note]
    assert len(notes) == older
    assert not older or "code_digest 0123456789abcdef" in notes[0]
    left = differences(results(whole / "reinforce"), results(root / "reinforce"))
    # the note is in the summary, and the code of this test is the same
    assert left == (["summary.json"] if older else [])


def test_a_key_that_the_recipe_lost_is_named_with_the_words_to_go_on(begun):
    """A recipe that once named a key and no longer does is refused; with the words of the message,
    `tether resume` goes on.
    """
    root, values, whole = begun
    today = build(Recipe, values).reinforce.gamma
    assert "gamma" not in values["reinforce"] and today != 0.5
    with_setting(root / "reinforce", "reinforce", "gamma", 0.5)
    once = build(Recipe, values, ["reinforce.gamma=0.5"])
    remember(root, once, ["sft", "reinforce"])
    release(root)
    expected = (
        rf"reinforce\.gamma was 0\.5 and is now {today} by default\. To go on with former "
        r"defaults, add to the command: reinforce\.gamma=0\.5\. Otherwise choose another run "
    )
    with pytest.raises(RunError, match=expected):
        run_recipe(build(Recipe, values), ["reinforce"])
    result = CliRunner().invoke(
        app,
        ["resume", str(root), "reinforce.gamma=0.5"],
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.output
    assert read_json(root / "reinforce" / "config.json")["reinforce"]["gamma"] == 0.5
    left = differences(results(whole / "reinforce"), results(root / "reinforce"))
    assert "metrics.jsonl" in left
    assert read_json(root / "reinforce" / "summary.json")["steps"] == 6


@pytest.mark.parametrize(
    ("home", "sections"),
    [
        ("", {}),
        ("round-01", {"repeat": 2}),
        ("sweep/seed=1", {"sweep": {"seed": [0, 1]}}),
        ("sweep/seed=1/round-01", {"repeat": 2, "sweep": {"seed": [0, 1]}}),
    ],
)
def test_a_start_that_contradicts_a_run_leaves_its_note(tmp_path, home, sections):
    values = {
        "run": str(tmp_path),
        "model": {"source": "tiny"},
        "pairs": {"data": {"path": "tether:prompts"}, "judge": {"call": "a:b"}},
        "grpo": {"data": {"path": "tether:prompts"}, "reward_source": "random", "steps": 5},
        **sections,
    }
    remember(tmp_path, build(Recipe, values), ["pairs", "grpo"])
    begun = tmp_path / home / "grpo"
    begun.mkdir(parents=True)
    (begun / "config.json").write_text("{}")
    remember(tmp_path, build(Recipe, values, ["grpo.steps=7"]), ["grpo"])
    assert read_json(tmp_path / "command.json")["config"]["grpo"]["steps"] == 5
    remember(tmp_path, build(Recipe, values), ["grpo"])
    assert read_json(tmp_path / "command.json")["stages"] == ["grpo"]
    release(tmp_path)


def test_a_setting_that_the_recipe_changed_is_no_default(begun):
    _, values, _ = begun
    changed = {**values, "reinforce": {**values["reinforce"], "gamma": 0.5}}
    with pytest.raises(RunError, match=r"gamma was 1\.0 and is now 0\.5\. Choose another") as error:
        run_recipe(build(Recipe, changed), ["reinforce"])
    assert "KEY=VALUE" not in str(error.value)


def test_weights_that_no_measurement_chose_are_those_of_the_last_update(begun):
    root, values, _ = begun
    remember(root, build(Recipe, values), ["sft", "reinforce"])
    assert read_json(root / "sft" / "summary.json")["best_update"] == -1
    assert standing(str(root / "sft")).endswith("stage sft, after step 6")
