"""Jobs of a recipe: their order, their folders, and what each depends on."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tether.cli import app
from tether.core.errors import ConfigError, MissingFileError
from tether.runner.jobs import expand
from tether.settings.reading import build, packaged_recipes
from tether.settings.recipe import Recipe, read_recipe
from tether.settings.stages import STAGES

MODEL = {"source": "tiny"}
PROMPTS = {"path": "tether:prompts", "limit": 16}
JUDGE = {"call": "tether.quickstart.judges:friendly"}
WHOLE = {
    "model": MODEL,
    "sft": {"data": {"path": "tether:demonstrations", "limit": 16}},
    "pairs": {"data": PROMPTS, "judge": JUDGE},
    "reward": {"members": 2},
    "ppo": {"data": PROMPTS},
    "evaluate": {"data": {"path": "tether:heldout", "limit": 4}, "judge": JUDGE},
}


def made(root, **sections):
    return build(Recipe, {"run": str(root), **WHOLE, **sections})


def by_name(jobs):
    return {job.title: job for job in jobs}


def test_each_job_names_the_folders_that_it_depends_on(tmp_path):
    recipe = made(tmp_path, arms={"beta0": {"ppo": {"kl": {"coefficient": 0.0}}}})
    jobs = expand(recipe)
    order = ["sft", "pairs", "reward", "ppo", "ppo-beta0", "evaluate"]
    assert [job.name for job in jobs] == order
    assert [job.folder for job in jobs] == [tmp_path / name for name in order]
    named = by_name(jobs)
    assert named["sft"].start is None
    assert {named[name].start for name in order[1:]} == {tmp_path / "sft"}
    assert named["reward"].pairs == (tmp_path / "pairs",)
    assert named["ppo"].pairs == () and named["ppo"].scorer == tmp_path / "reward" / "model"
    assert named["ppo"].settings.kl.coefficient > 0
    assert named["ppo-beta0"].settings.kl.coefficient == 0
    assert named["ppo-beta0"].kind is STAGES["ppo"]
    policies = {name: tmp_path / name for name in ("ppo", "ppo-beta0")}
    assert named["evaluate"].policies == policies


def test_rounds_learn_from_the_pairs_of_all_rounds_so_far(tmp_path):
    jobs = expand(made(tmp_path, repeat=3))
    again = ["pairs", "reward", "ppo", "evaluate"]
    expected = ["sft", *(f"{name} {number}" for number in (1, 2, 3) for name in again)]
    assert [job.title for job in jobs] == expected
    places = [tmp_path / f"round-0{number}" for number in (1, 2, 3)]
    last = by_name(jobs)["reward 3"]
    assert last.pairs == tuple(place / "pairs" for place in places)
    assert last.earlier == tuple(places[:2]) and last.folder == places[2] / "reward"
    assert by_name(jobs)["ppo 2"].scorer == places[1] / "reward" / "model"


def test_stages_that_are_named_run_alone_and_in_that_order(tmp_path):
    assert [job.name for job in expand(made(tmp_path), ["ppo", "sft"])] == ["ppo", "sft"]
    with pytest.raises(ConfigError, match=r"no \[kto\] section"):
        expand(made(tmp_path), ["kto"])


@pytest.mark.parametrize("name", sorted(packaged_recipes()))
def test_every_packaged_recipe_has_jobs_in_the_order_of_the_table(name, tmp_path):
    try:
        recipe = read_recipe(name, [f"run={tmp_path}"])
    except MissingFileError as error:
        pytest.skip(str(error))
    jobs = expand(recipe)
    assert {job.name for job in jobs} == set(recipe.stages)
    first_round = [job.kind.name for job in jobs if job.round in (None, 1)]
    assert first_round == sorted(first_round, key=list(STAGES).index)
    assert len({job.folder for job in jobs}) == len(jobs)


def test_the_list_is_made_without_torch_and_without_a_file():
    program = f"""
import builtins, sys
from pathlib import Path
from tether.runner.jobs import expand
from tether.settings.reading import build
from tether.settings.recipe import Recipe

recipe = build(Recipe, {{"run": "/nowhere/run", **{WHOLE!r}}})

def refuse(*_, **__):
    raise AssertionError("a file is read")

builtins.open = Path.open = Path.is_file = Path.exists = Path.iterdir = Path.glob = refuse
print(len(expand(recipe)), "torch" in sys.modules)
"""
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert finished.stdout.split() == ["5", "False"], finished.stderr


def test_a_dry_run_prints_the_jobs_and_makes_nothing(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f"""
run = "{tmp_path / "run"}"
repeat = 2
[model]
source = "tiny"
[pairs]
data = {{ path = "tether:prompts", limit = 16 }}
judge = {{ call = "tether.quickstart.judges:friendly" }}
[direct]
"""
    )
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["run", str(recipe), "--dry-run"])
    assert result.exit_code == 0, result.output
    rows = [line for line in result.output.splitlines() if "round-0" in line]
    assert [line.split("│")[1].strip() for line in rows] == [
        "pairs 1", "direct 1", "pairs 2", "direct 2",
    ]  # fmt: skip
    assert "round-01/pairs, round-02/pairs" in rows[-1]
    assert not (tmp_path / "run").exists()
