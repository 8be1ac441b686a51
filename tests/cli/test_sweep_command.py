"""`tether sweep` writes the recipe's [sweep] table from the command line, and nothing else."""

import pytest
from tests.runner.test_sweep import RECIPE
from typer.testing import CliRunner

from tether.cli import app
from tether.core.errors import ConfigError
from tether.runner.jobs import expand, sweep_table
from tether.settings.recipe import read_recipe
from tether.settings.sweep import sweep_overrides

PLAIN = RECIPE.partition("[sweep]")[0]


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.toml").write_text(PLAIN)
    (tmp_path / "swept.toml").write_text(RECIPE)
    return tmp_path


def tether(*words):
    done = CliRunner().invoke(app, [*words], terminal_width=200)
    return done, " ".join(done.output.split())


def jobs(recipe):
    return [
        (str(job.folder), job.settings.model_dump_json(), job.seed, *map(str, job.needs))
        for job in expand(recipe)
    ]


@pytest.mark.parametrize(
    ("words", "overrides"),
    [
        (["ppo.gamma=1,0.9"], ["sweep.ppo.gamma=[1, 0.9]"]),
        (["--ppo.gamma= 1 , 0.9"], ["sweep.ppo.gamma=[1, 0.9]"]),
        (["ppo", "ppo.steps=5"], ["ppo", "ppo.steps=5"]),
        (["grpo.advantage=grpo,rloo"], ['sweep.grpo.advantage=["grpo", "rloo"]']),
        (['sft.data.path=a.jsonl,"b,c.jsonl"'], ['sweep.sft.data.path=["a.jsonl", "b,c.jsonl"]']),
        (["ppo.target_kl=0.1,none"], ['sweep.ppo.target_kl=[0.1, "none"]']),
        (["ppo.tags=[1,2],[3]"], ["sweep.ppo.tags=[[1,2], [3]]"]),
        (["ppo.tags=[1,2]"], ["ppo.tags=[1,2]"]),
        (["ppo.kl={mode='fixed',coefficient=0},{mode='adaptive'}"],
         ["sweep.ppo.kl=[{mode='fixed',coefficient=0}, {mode='adaptive'}]"]),
    ],
)  # fmt: skip
def test_words_become_the_table(words, overrides):
    assert sweep_overrides(words) == overrides


def test_a_dry_run_fits_into_80_columns(recipes):
    """Each combination has a table whose title is its folder; its jobs name folders below it."""
    long = "grpo.kl.coefficient=0.0123456789,0.0523456789"
    words = ["sweep", "plain.toml", long, "--seeds", "2", "--dry-run"]
    lines = CliRunner().invoke(app, words, env={"COLUMNS": "80"}).output.splitlines()
    titles = [line.strip() for line in lines if line.startswith("sweep/")]
    assert "sweep/grpo.kl.coefficient=0.0523456789,seed=1" in titles
    rows = [line.split("│") for line in lines if "│" in line]
    assert {row[4].strip() for row in rows} == {"sft", "grpo", ""}


@pytest.mark.parametrize("word", ["ppo.gamma=", "ppo.gamma=1,,2", "ppo.gamma=1,", "ppo.gamma=,"])
def test_an_empty_value_is_refused(word):
    with pytest.raises(ConfigError, match="has an empty value"):
        sweep_overrides([word])


def test_the_command_line_makes_the_jobs_of_the_table(recipes):
    words = sweep_overrides(["grpo.kl.coefficient=0.01,0.05", "seed=0,1"])
    given, table = read_recipe("plain.toml", words), read_recipe("swept.toml")
    assert jobs(given) == jobs(table) and len(jobs(given)) == 6
    assert sweep_table(given) == sweep_table(table)
    own = tether(
        "sweep",
        "plain.toml",
        "grpo.kl.coefficient=0.01,0.05",
        "--seeds",
        "2",
        "--dry-run",
    )
    other = tether("run", "swept.toml", "--dry-run")
    assert own[0].exit_code == other[0].exit_code == 0 and own[1] == other[1] and "6 jobs" in own[1]
    assert not (recipes / "run").exists()


def test_a_key_of_the_command_line_replaces_that_of_the_recipe(recipes):
    table = sweep_table(read_recipe("swept.toml", sweep_overrides(["grpo.kl.coefficient=0.2,0.3"])))
    assert [row["values"] for row in table] == [
        {"grpo.kl.coefficient": beta, "seed": seed} for beta in (0.2, 0.3) for seed in (0, 1)
    ]


def test_seeds_go_on_from_the_recipes_own(recipes):
    (recipes / "plain.toml").write_text("seed = 7\n" + PLAIN)
    _, text = tether("sweep", "plain.toml", "--seeds", "3", "--dry-run")
    assert "seed=8" in text and "seed=9" in text and "seed=0" not in text and "6 jobs" in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--seeds", "2"], False),
        (["grpo.seed=0,1"], False),
        (["--seeds", "3"], True),
        (["seed=0,1", "grpo.seed=0,1"], True),
        (["grpo.kl.coefficient=0,0.05"], True),
    ],
)
def test_two_seeds_are_named_before_the_sweep_starts(recipes, words, told):
    _, text = tether("sweep", "plain.toml", *words, "--dry-run")
    assert ("cannot be told: 3 seeds are needed." in text) == (not told), text


def test_a_table_among_the_values_is_used_whole(recipes):
    words = ["grpo.kl={mode='fixed',coefficient=0.3},{mode='adaptive',coefficient=0.2}"]
    own = expand(read_recipe("plain.toml", sweep_overrides(words)))
    kls = [job.settings.kl for job in own if job.name == "grpo"]
    assert [(kl.mode, kl.coefficient) for kl in kls] == [("fixed", 0.3), ("adaptive", 0.2)]


def test_a_budget_is_that_of_each_policys_training(recipes):
    done, text = tether("sweep", "plain.toml", "--seeds", "2", "--budget", "3", "--dry-run")
    assert done.exit_code == 0, text
    assert "3 jobs" not in text and "4 jobs" in text
    (recipes / "only.toml").write_text(PLAIN.partition("[grpo]")[0])
    done, _ = tether("sweep", "only.toml", "--seeds", "2", "--budget", "3", "--dry-run")
    assert "trains none" in str(done.exception)
    done, _ = tether("sweep", "plain.toml", "grpo.budget=1,2", "--budget", "3", "--dry-run")
    assert "grpo.budget is given twice" in str(done.exception)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["grpo.kl.coeficient=0,0.1"], "unknown key .*coefficient"),
        (["grpo.kl.coefficient=0.1,0.1"], "the value 0.1 twice"),
        (["grpo.kl.coefficient=0,0.0"], "those of 'grpo.kl.coefficient=0' in another form"),
        (["grpo.kl.coefficient=0,0.1", "grpo.kl.coefficient=0.2,0.3"], "is given twice"),
        (["grpo.kl.coefficient=0,0.1", "grpo.kl.coefficient=0.2"], "is given twice"),
        (["seed=0,1", "--seeds", "2"], "seed is given twice"),
        (["grpo.kl.coefficient="], "has an empty value"),
        (["grpo.kl={mode='fixed'},{mode='adaptive'}", "grpo.kl.coefficient=0,1"],
         "'kl' is a value, not a table"),
        (["grpo.kl.coefficient=0.1"], r"no key has several values, and plain.toml has no \[sweep\]"),
        ([], "no key has several values"),
        (["ppo.gamma=0.9,1"], r"no \[ppo\] section"),
        (["run=a,b"], "belongs to the whole run"),
        (["budget=3", "seed=0,1"], "give a stage its budget"),
        (["seed=0,1", "learner.ranks=2", "--at-once", "2"], "each job in one process on this machine"),
        (["seed=0,1", "on=slurm", "--at-once", "2"], "each job in one process on this machine"),
        ([f"grpo.{'a.' * 900}a=1,2"], "nested too deeply"),
    ],
)  # fmt: skip
def test_a_sweep_over_wrong_keys_or_values_is_refused(recipes, words, message):
    done, _ = tether("sweep", "plain.toml", *words, "--dry-run")
    assert done.exit_code and isinstance(done.exception, ConfigError)
    with pytest.raises(ConfigError, match=message):
        raise done.exception
    assert "\n" not in str(done.exception) and not (recipes / "run").exists()


@pytest.mark.parametrize("command", [["run"], ["sweep"]])
def test_an_override_that_the_sweep_replaces_is_refused(recipes, command):
    done, _ = tether(*command, "swept.toml", "seed=5", "--dry-run")
    assert "'seed=5'" in str(done.exception) and "the sweep varies" in str(done.exception)
    done, _ = tether(*command, "swept.toml", "grpo.kl.mode=fixed", "--dry-run")
    assert done.exit_code == 0


def test_a_key_in_two_forms_of_one_recipe_is_refused(recipes):
    (recipes / "plain.toml").write_text(
        PLAIN + '[sweep]\n"grpo.steps" = [1, 2]\n[sweep.grpo]\nsteps = [3, 4]\n',
    )
    with pytest.raises(ConfigError, match=r"sweep has 'grpo\.steps' twice"):
        read_recipe("plain.toml")


def test_a_key_and_a_part_of_it_are_refused(recipes):
    (recipes / "plain.toml").write_text(
        PLAIN + '[sweep]\n"grpo.kl" = [{mode = "fixed"}]\n"grpo.kl.coefficient" = [0, 1]\n',
    )
    with pytest.raises(ConfigError, match=r"'grpo\.kl' and 'grpo\.kl\.coefficient'"):
        read_recipe("plain.toml")
