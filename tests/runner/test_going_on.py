"""A run goes on, or is refused with what to do. If other code began it, its summary says where its
end may differ from that of a run in one go.
"""

import json
import shutil

import pytest
from tests.every_stage import differences, recipe, results
from tests.runner.journeys import Killed, dying_after

from tether.cli.tools.export_source import standing
from tether.core.errors import RunError
from tether.core.locks import release
from tether.core.rundir import read_json
from tether.runner.folder import remember
from tether.runner.run import run_recipe
from tether.runner.start import start_run
from tether.settings.reading import build
from tether.settings.recipe import Recipe

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


def test_a_start_that_contradicts_a_run_leaves_its_note(begun):
    root, values, _ = begun
    remember(root, build(Recipe, values), ["reinforce"])
    release(root)
    changed = {**values, "reinforce": {**values["reinforce"], "gamma": 0.5}}
    with pytest.raises(RunError, match=r"gamma was"):
        start_run(build(Recipe, changed), ["reinforce"], lambda _: None, began=0.0)
    note = read_json(root / "command.json")
    assert "gamma" not in note["config"]["reinforce"]
    assert note["stages"] == ["reinforce"]
    assert not (root / ".lock").exists()


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
