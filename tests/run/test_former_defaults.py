"""A run that a former version began continues with the defaults of that version.

`former/config.json` is the PPO stage's file as that version wrote it. Its keys have the defaults of
that version, and later keys are absent. The oracle is a run whose recipe names all of these values.
"""

import json
import shutil
from pathlib import Path

import pytest
from benchmarks.every_stage import differences, results
from tests.run.journeys import Killed, dying_after
from typer.testing import CliRunner

from tether.build.context import Context
from tether.build.reward_servers import reward_settings
from tether.cli import app
from tether.core.errors import RunError
from tether.core.locks import release
from tether.core.rundir import read_json
from tether.core.types import Json
from tether.runner.folder import remember
from tether.runner.former import with_former_defaults
from tether.runner.run import run_recipe
from tether.settings.former import former_defaults, put_former_defaults
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.settings.stages import STAGES

WRITTEN = Path(__file__).parent / "former" / "config.json"
NAMED = {
    "steps": 6,
    "prompts_per_step": 3,
    "max_new_tokens": 8,
    "checkpoint_every": 1,
    "reward_source": "random",
    "optimizer": {"learning_rate": 0.01},
    "kl": {"mode": "adaptive", "target": 0.1, "horizon": 30},
}
"""The keys that the recipe of the former run named."""
FORMER = {
    "ppo.samples_per_prompt": 1,
    "ppo.optimizer.schedule": "cosine",
    "ppo.optimizer.final_fraction": 0.1,
    "ppo.kl.max_factor": 1e18,
}
"""Those of that version's defaults that are others now and have an effect."""


def overrides(values):
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def recipe_of(run, prompts, **changes):
    section = {"data": {"path": str(prompts)}, **NAMED, **changes}
    return {
        "run": str(run),
        "model": {"source": "tiny", "dtype": "float32", "rendered_texts": "keep"},
        "ppo": section,
    }


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run with every former default named, in one go and killed after two steps."""
    folder = tmp_path_factory.mktemp("former")
    prompts = folder / "prompts.jsonl"
    words = ("one", "two", "three", "four", "five", "six", "seven")
    prompts.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in words))
    run_recipe(build(Recipe, recipe_of(folder / "whole", prompts), overrides(FORMER)))
    cut = build(Recipe, recipe_of(folder / "cut", prompts), overrides(FORMER))
    with pytest.raises(Killed):
        run_recipe(cut, None, dying_after(2))
    return folder


@pytest.fixture
def begun(killed, tmp_path):
    """The killed run as a former version would have left it, and the values of its recipe."""
    run, prompts = tmp_path / "run", killed / "prompts.jsonl"
    shutil.copytree(killed / "cut", run)
    values = recipe_of(run, prompts)
    del values["model"]["rendered_texts"]
    written = WRITTEN.read_text().replace("PROMPTS", str(prompts))
    (run / "ppo" / "config.json").write_text(written)
    noted(run, values)
    return run, values, killed / "whole"


def noted(run, values):
    note = {"command": "stages", "stages": ["ppo"], "config": values}
    (run / "command.json").write_text(json.dumps(note))


def test_a_former_run_goes_on_to_the_bit_with_its_defaults(begun, caplog):
    run, _, whole = begun
    result = CliRunner().invoke(app, ["resume", str(run)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    left = differences(results(whole / "ppo"), results(run / "ppo"))
    assert left == ["summary.json"]
    expected = {**FORMER, "model.rendered_texts": "keep"}
    assert read_json(run / "ppo" / "summary.json")["former_defaults"] == expected
    (line,) = [r.getMessage() for r in caplog.records if "with which it began" in r.getMessage()]
    for key, value in expected.items():
        assert f"{key} = {json.dumps(value)} (now " in line
    # the file stays as the former version wrote it
    assert "max_factor" not in read_json(run / "ppo" / "config.json")["ppo"]["kl"]


def test_a_finished_former_run_is_left_as_it_is(begun, caplog):
    run, values, whole = begun
    shutil.copytree(whole / "ppo", run / "ppo", dirs_exist_ok=True)
    written = WRITTEN.read_text().replace("PROMPTS", values["ppo"]["data"]["path"])
    (run / "ppo" / "config.json").write_text(written)
    before = (run / "ppo" / "summary.json").read_bytes()
    assert run_recipe(build(Recipe, values))["ppo"]["steps"] == 6
    assert (run / "ppo" / "summary.json").read_bytes() == before
    assert not [r for r in caplog.records if "with which it began" in r.getMessage()]


def test_a_key_that_the_recipe_names_has_its_value(begun):
    _, values, _ = begun
    for key in FORMER:
        other = {"ppo.samples_per_prompt": 2, "ppo.optimizer.schedule": "constant"}.get(key, 0.5)
        other = 50.0 if key.endswith("max_factor") else other
        changed = build(Recipe, values, overrides({key: other}))
        words = rf"{key} was .* and is now {other!r}\. Choose another"
        with pytest.raises(RunError, match=words):
            run_recipe(changed)
    named = build(Recipe, values, overrides(FORMER))
    assert [*with_former_defaults(named).former] == ["model"]


def test_arms_have_the_former_defaults_of_their_stage(begun):
    run, values, _ = begun
    with_arm = build(Recipe, {**values, "arms": {"low": {"ppo": {"kl": {"target": 0.05}}}}})
    remember(run, with_arm, ["ppo"])
    release(run)
    continued = with_former_defaults(with_arm)
    for name in ("ppo", "ppo-low"):
        section = continued.section(name)
        assert section.samples_per_prompt == 1 and section.optimizer.schedule == "cosine"
    assert continued.section("ppo-low").kl.target == 0.05


@pytest.mark.parametrize("name", STAGES)
def test_without_former_defaults_settings_stay(name, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}")
    section: Json = {"data": {"path": str(rows)}}
    if name in ("pairs", "evaluate"):
        section["judge"] = {"call": "tether.quickstart.judges:letters"}
    values = {"run": str(tmp_path / "run"), "model": {"source": "tiny"}, name: section}
    if "reward_source" in STAGES[name].section.model_fields:
        section["reward_source"] = "random"
    if name == "evaluate":
        values["direct"] = {"data": {"path": str(rows)}}
    settings = build(Recipe, values).section(name)
    now = json.loads(settings.model_dump_json())
    assert put_former_defaults(settings, {}) == settings
    assert former_defaults(settings, now, section, name) == {}


def test_servers_of_rewards_score_with_former_defaults(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "one"}) + "\n")
    source = {"reward_source": "classifier", "classifier": {"source": str(tmp_path)}}
    values = recipe_of(tmp_path / "run", prompts, **source)
    del values["model"]["rendered_texts"]
    recipe = build(Recipe, values)
    began = recipe.section("ppo").model_dump(mode="json")
    del began["classifier"]["dtype"]
    former = former_defaults(
        recipe.section("ppo"),
        began,
        recipe_of("", "", **source)["ppo"],
        "ppo",
    )
    assert former == {"classifier.dtype": ("float32", "auto")}
    section = recipe.continued({"ppo": former}).section("ppo")
    model = recipe.continued({"model": {"rendered_texts": ("keep", "auto")}}).model
    context = Context(name="ppo", folder=tmp_path, model=model, seed=0)
    settings = reward_settings(section, context)
    assert settings["reward"]["classifier"]["dtype"] == "float32"
    assert settings["model"]["rendered_texts"] == "keep"
