"""Jobs of a recipe: their order, their folders, and what each depends on."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tether.cli import app
from tether.core.errors import ConfigError, MissingFileError
from tether.core.rundir import read_json
from tether.runner.jobs import before, expand, with_parts
from tether.runner.run import run_recipe
from tether.runner.start import start_run
from tether.settings.reading import build, packaged_recipes
from tether.settings.recipe import Recipe, read_recipe
from tether.settings.stages import STAGES

MODEL = {"source": "tiny"}
PROMPTS = {"path": "tether:prompts", "limit": 16}
JUDGE = {"call": "tether.quickstart.judges:letters"}
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


def parts_in(tmp_path, **sections):
    jobs = with_parts(expand(made(tmp_path, **sections)))
    return {str(job.folder.relative_to(tmp_path)): job for job in jobs}


def test_members_a_student_and_a_test_model_are_jobs_before_their_whole(tmp_path):
    reward = {"members": 2, "distill": "mean", "test_share": 0.3}
    jobs = parts_in(tmp_path, reward=reward)
    names = ["test", "member-0", "member-1", "student"]
    assert [*jobs][2:7] == [*(f"reward/{name}" for name in names), "reward"]
    test = jobs["reward/test"].settings
    assert (test.members, test.distill, test.test_share) == (1, None, 0.0)
    numbers = [jobs[f"reward/{name}"].part.number for name in names]
    assert numbers == [None, 0, 1, None]
    assert jobs["reward/student"].part.needs == ("member-0", "member-1")
    assert all(jobs[f"reward/{name}"].pairs == (tmp_path / "pairs",) for name in names)
    assert [job.title for job in jobs["reward"].parts] == [f"reward/{name}" for name in names]
    assert jobs["reward/member-0"].parts == ()


def test_each_objective_is_a_job_with_rows_of_its_own(tmp_path):
    sources = {"short": "tether:prompts", "kind": "tether:heldout"}
    objectives = {name: {"path": path} for name, path in sources.items()}
    jobs = parts_in(tmp_path, reward={"objectives": objectives}, ppo=None, evaluate=None)
    for name, path in sources.items():
        settings = jobs[f"reward/{name}"].settings
        assert settings.data.path == path and settings.objectives is None
    assert jobs["reward"].settings.data is None


def test_each_of_the_rounds_is_a_job_that_starts_from_the_one_before(tmp_path):
    jobs = parts_in(tmp_path, rounds={"data": PROMPTS, "rounds": 3}, repeat=2, ppo=None)
    rounds = [name for name in jobs if "rounds/round" in name]
    assert rounds == [
        f"round-0{again}/rounds/round-0{number}" for again in (1, 2) for number in (1, 2, 3)
    ]
    assert [jobs[name].part.needs for name in rounds[:3]] == [(), ("round-01",), ("round-02",)]
    assert jobs[rounds[4]].title == "rounds 2/round-02"


def test_the_folders_of_a_run_are_those_of_the_list(tmp_path):
    """Every training writes into the folder that the list names, with the settings from there."""
    prompts = {"path": "tether:prompts", "limit": 8}
    sampled = {"data": prompts, "max_new_tokens": 4}
    recipe = build(
        Recipe,
        {
            "run": str(tmp_path),
            "model": {"source": "tiny"},
            "pairs": {**sampled, "judge": {"call": "tether.quickstart.judges:letters"}},
            "reward": {"members": 2, "test_share": 0.3},
            "rounds": {**sampled, "rounds": 2, "samples_per_prompt": 2},
        },
    )
    run_recipe(recipe)
    jobs = with_parts(expand(recipe))
    folders = {path.parent for path in tmp_path.rglob("summary.json")} - {tmp_path}
    assert folders == {job.folder for job in jobs}
    for job in jobs:
        config = read_json(job.folder / "config.json")
        assert config[job.kind.name] == json.loads(job.settings.model_dump_json())
        number = config.keys() - {job.kind.name, "model", "seed"}
        assert number == ({*job.part.noted} if job.part else set())


def test_dependencies_of_a_job_reach_its_first_stage(tmp_path):
    jobs = expand(made(tmp_path))
    named = by_name(jobs)
    assert [job.name for job in before(named["ppo"], jobs)] == ["sft", "pairs", "reward"]
    assert [job.name for job in before(named["pairs"], jobs)] == ["sft"]
    assert before(named["sft"], jobs) == []


def test_stages_that_are_named_run_alone_and_in_that_order(tmp_path):
    assert [job.name for job in expand(made(tmp_path), ["ppo", "sft"])] == ["ppo", "sft"]
    with pytest.raises(ConfigError, match=r"no \[kto\] section"):
        expand(made(tmp_path), ["kto"])


@pytest.mark.parametrize("name", sorted(packaged_recipes()))
def test_every_packaged_recipe_has_jobs_in_the_order_of_the_table(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TETHER_DATA", str(tmp_path))
    recipe = read_recipe(name, [f"run={tmp_path}"])
    jobs = expand(recipe)
    assert {job.name for job in jobs} == set(recipe.stages)
    first_round = [job.kind.name for job in jobs if job.round in (None, 1)]
    assert first_round == sorted(first_round, key=list(STAGES).index)
    assert len({job.folder for job in jobs}) == len(jobs)


def test_recipe_and_list_are_made_without_torch_and_without_a_file():
    program = f"""
import builtins, os, sys
from pathlib import Path
from tether.core.rundir import read_json
from tether.runner.jobs import before, expand, with_parts
from tether.settings.reading import build
from tether.settings.recipe import Recipe

def refuse(*_, **__):
    raise AssertionError("a file is read")

for name in ("open", "is_file", "is_dir", "exists", "iterdir", "glob", "stat"):
    setattr(Path, name, refuse)
builtins.open = os.stat = os.path.exists = os.path.isfile = os.listdir = os.scandir = refuse
values = {{"run": "/nowhere/run", **{WHOLE!r}}}
values["model"] = {{"source": "/nowhere/model", "chat_template": "/nowhere/template.jinja"}}
values["sft"] = {{"data": {{"path": "/nowhere/rows.jsonl"}}}}
recipe = build(Recipe, values)
print(len(expand(recipe)), "torch" in sys.modules)
"""
    finished = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.stdout.split() == ["5", "False"], finished.stderr


MISSING = {
    "data": ({"sft": {"data": {"path": "nowhere.jsonl"}}}, "data not found: nowhere.jsonl. Give"),
    "prompts": (
        {"ppo": {"data": PROMPTS, "evaluate": {"data": {"path": "later.jsonl"}, "judge": JUDGE}}},
        "data not found: later.jsonl",
    ),
    "an arm": (
        {"arms": {"other": {"ppo": {"data": {"path": "arm.jsonl"}}}}},
        "data not found: arm.jsonl",
    ),
    "an objective": (
        {
            "reward": {"objectives": {"a": PROMPTS, "b": {"path": "b.jsonl"}}},
            "ppo": None,
            "evaluate": None,
        },
        "data not found: b.jsonl",
    ),
    "a model": ({"model": {"source": "./none"}}, "model folder './none' has no config.json"),
    "a name": ({"model": {"source": "neither-nor"}}, "'neither-nor' is neither an existing folder"),
    "a template": (
        {"model": {"source": "tiny", "chat_template": "no.jinja"}},
        "chat template not found: no.jinja",
    ),
}


@pytest.mark.parametrize("case", MISSING)
def test_a_missing_source_is_one_sentence_before_anything_is_written(case, tmp_path):
    sections, sentence = MISSING[case]
    recipe = made(tmp_path / "run", **sections)
    for start in (run_recipe, lambda recipe: start_run(recipe, recipe.stages, None, began=0.0)):
        with pytest.raises((MissingFileError, ConfigError)) as refusal:
            start(recipe)
        assert sentence in str(refusal.value)
    assert not (tmp_path / "run").exists()


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
judge = {{ call = "tether.quickstart.judges:letters" }}
[direct]
[reward]
members = 2
""",
    )
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["run", str(recipe), "--dry-run"])
    assert result.exit_code == 0, result.output
    rows = [line for line in result.output.splitlines() if "round-0" in line]
    assert [line.split("│")[1].strip() for line in rows] == [
        "pairs 1", "reward 1/member-0", "reward 1/member-1", "reward 1 (2 members)", "direct 1",
        "pairs 2", "reward 2/member-0", "reward 2/member-1", "reward 2 (2 members)", "direct 2",
    ]  # fmt: skip
    assert "round-01/pairs, round-02/pairs" in rows[-1]
    assert not (tmp_path / "run").exists()
