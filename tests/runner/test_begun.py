"""A stage that has begun keeps the settings of its start where the recipe names none. The oracle is
a run in one go whose recipe names all of them.
"""

import json
import shutil

import pytest
from tests.every_stage import differences, results
from tests.runner.journeys import Killed, dying_after
from typer.testing import CliRunner

from tether.cli import app
from tether.core.errors import RunError
from tether.core.rundir import read_json
from tether.core.types import Json
from tether.runner.assembly.reward_servers import reward_settings
from tether.runner.jobs import expand
from tether.runner.prepare import continued, kept, prepare
from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.settings.stages import STAGES

NAMED = {
    "steps": 6,
    "prompts_per_step": 3,
    "max_new_tokens": 8,
    "checkpoint_every": 1,
    "reward_source": "random",
    "optimizer": {"learning_rate": 0.01},
    "kl": {"mode": "adaptive", "target": 0.1, "horizon": 30},
}
ONCE = {
    "ppo.samples_per_prompt": 1,
    "ppo.optimizer.schedule": "cosine",
    "ppo.optimizer.final_fraction": 0.1,
    "model.rendered_texts": "keep",
}
"""Settings of the start, none of them a default, that the recipe no longer names."""


def values_of(run, prompts):
    return {
        "run": str(run),
        "model": {"source": "tiny", "dtype": "float32"},
        "ppo": {"data": {"path": str(prompts)}, **NAMED},
    }


def named(values, settings):
    return build(Recipe, values, [f"{key}={json.dumps(value)}" for key, value in settings.items()])


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run that names all settings, in one go and killed after two steps."""
    folder = tmp_path_factory.mktemp("begun")
    prompts = folder / "prompts.jsonl"
    words = ("one", "two", "three", "four", "five", "six", "seven")
    prompts.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in words))
    run_recipe(named(values_of(folder / "whole", prompts), ONCE))
    with pytest.raises(Killed):
        run_recipe(named(values_of(folder / "cut", prompts), ONCE), None, dying_after(2))
    return folder


@pytest.fixture
def begun(killed, tmp_path):
    """The killed run, the values of a recipe that names few of its settings, and the whole run."""
    run = tmp_path / "run"
    shutil.copytree(killed / "cut", run)
    values = values_of(run, killed / "prompts.jsonl")
    note = {"command": "stages", "stages": ["ppo"], "config": values}
    (run / "command.json").write_text(json.dumps(note))
    return run, values, killed / "whole"


def test_a_killed_run_goes_on_to_the_bit_with_the_settings_of_its_start(begun, caplog):
    run, _, whole = begun
    stored = read_json(run / "ppo" / "config.json")
    del stored["ppo"]["kl"]["max_factor"]  # a key that came later has its default
    (run / "ppo" / "config.json").write_text(json.dumps(stored))
    result = CliRunner().invoke(app, ["resume", str(run)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert differences(results(whole / "ppo"), results(run / "ppo")) == []
    (line,) = [r.getMessage() for r in caplog.records if "settings of its start" in r.getMessage()]
    assert "ppo.samples_per_prompt = 1 (now 4)" in line
    assert 'model.rendered_texts = "keep" (now "auto")' in line


def test_a_finished_stage_is_left_as_it_is(begun, caplog):
    run, values, whole = begun
    shutil.copytree(whole / "ppo", run / "ppo", dirs_exist_ok=True)
    before = (run / "ppo" / "summary.json").read_bytes()
    assert run_recipe(build(Recipe, values))["ppo"]["steps"] == 6
    assert (run / "ppo" / "summary.json").read_bytes() == before
    assert not [r for r in caplog.records if "settings of its start" in r.getMessage()]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ppo.samples_per_prompt", 2),
        ("ppo.optimizer.schedule", "constant"),
        ("ppo.optimizer.final_fraction", 0.5),
        ("ppo.kl.max_factor", 50.0),
        ("model.rendered_texts", "split"),
    ],
)
def test_a_key_that_the_recipe_names_has_its_value_and_another_one_is_refused(begun, key, value):
    _, values, _ = begun
    with pytest.raises(RunError, match=rf"{key} was .* and is now {value!r}\. Choose another"):
        run_recipe(named(values, {key: value}))


def test_an_arm_keeps_its_own_settings(begun):
    run, values, _ = begun
    arms = {"low": {"ppo": {"kl": {"target": 0.05}}}}
    stored = read_json(run / "ppo" / "config.json")
    stored["ppo"]["kl"]["target"] = 0.05
    stored["ppo"]["optimizer"]["final_fraction"] = 0.2
    shutil.copytree(run / "ppo", run / "ppo-low")
    (run / "ppo-low" / "config.json").write_text(json.dumps(stored))
    plain, arm = prepare(build(Recipe, {**values, "arms": arms}), starting=False)
    assert plain.settings.optimizer.final_fraction == 0.1
    assert (arm.settings.kl.target, arm.settings.optimizer.final_fraction) == (0.05, 0.2)
    assert arm.model.rendered_texts == "keep"


def test_the_engine_and_the_budget_are_those_of_this_start(begun):
    run, values, _ = begun
    stored = read_json(run / "ppo" / "config.json")
    stored["ppo"] |= {"budget": 3.0, "engine": {"kind": "served", "addresses": ["http://a:1"]}}
    (run / "ppo" / "config.json").write_text(json.dumps(stored))
    (job,) = prepare(build(Recipe, values), starting=False)
    section = job.settings
    assert (section.budget, section.engine.kind) == (None, "local")


@pytest.mark.parametrize("name", STAGES)
def test_the_settings_of_the_same_recipe_are_the_same(name, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}")
    section: Json = {"data": {"path": str(rows)}}
    if name in ("pairs", "evaluate"):
        section["judge"] = {"call": "tether.quickstart.judges:letters"}
    values = {"run": str(tmp_path / "run"), "model": {"source": "tiny"}, name: section}
    if "reward_source" in STAGES[name].section.model_fields:
        section["reward_source"] = "random"
    if name == "distill":
        section["teacher"] = {"model": "start", "system": "shout"}
    if name == "evaluate":
        values["direct"] = {"data": {"path": str(rows)}}
    settings = build(Recipe, values).section(name)
    again = kept(settings, json.loads(settings.model_dump_json()))
    assert again == settings
    assert again.model_dump(exclude_unset=True) == settings.model_dump(exclude_unset=True)


def test_a_server_of_rewards_scores_with_the_settings_of_the_start(begun, tmp_path):
    run, values, _ = begun
    table = {"source": str(tmp_path)}
    values["ppo"] |= {"reward_source": "classifier", "classifier": table}
    stored = read_json(run / "ppo" / "config.json")
    stored["ppo"] |= {"reward_source": "classifier", "classifier": {**table, "dtype": "float32"}}
    (run / "ppo" / "config.json").write_text(json.dumps(stored))
    (job,) = continued(expand(build(Recipe, values)))
    settings = reward_settings(job)
    assert settings["reward"]["classifier"] == {**table, "dtype": "float32"}
    assert settings["model"]["rendered_texts"] == "keep"
