"""A run as a job of Slurm: what the script says, whether a shell takes it, and what sbatch is
handed.
"""

import os
import subprocess
import time

import pytest
from typer.testing import CliRunner

from tether.cli import app
from tether.core.errors import ConfigError
from tether.runner.assembly.launching import Placement
from tether.scale.clusters.slurm import job_script, submit_job
from tether.settings.reading import build
from tether.settings.recipe import Recipe, read_recipe


def test_a_job_of_one_rank_runs_the_command_on_one_node(tmp_path):
    script = tmp_path / "my run" / "slurm.sh"
    text = job_script(script, ["run", "a recipe.toml", "ppo"], "partition=gpu,time=02:00:00", 1)
    assert (
        "#SBATCH --partition=gpu\n" in text
        and ("#SBATCH --time=02:00:00\n") in text
        and "#SBATCH --job-name=my run\n" in text
    )
    assert "-m tether run 'a recipe.toml' ppo" in text and "MASTER_ADDR" not in text


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_shell_takes_the_script(tmp_path, ranks):
    script = tmp_path / "slurm.sh"
    script.write_text(job_script(script, ["run", "it's mine.toml"], "nodes=1", ranks))
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


def test_ranks_are_shared_out_over_nodes(tmp_path):
    text = job_script(tmp_path / "slurm.sh", ["run", "r.toml"], "nodes=2,gres=gpu:4", 8)
    assert (
        "--nproc-per-node 4" in text
        and "#SBATCH --nodes=2\n" in text
        and ("#SBATCH --gres=gpu:4\n") in text
    )
    with pytest.raises(ConfigError, match=r"8 ranks.*3 nodes"):
        job_script(tmp_path / "slurm.sh", ["run", "r.toml"], "nodes=3", 8)
    with pytest.raises(ConfigError, match=r"8 ranks.*many nodes"):
        job_script(tmp_path / "slurm.sh", ["run", "r.toml"], "nodes=many", 8)


def test_a_job_whose_time_is_over_saves_and_comes_again(tmp_path):
    """With stand-ins for srun, which ends once its step is signalled, for scancel, which signals
    it, and for scontrol.
    """
    tools, told = tmp_path / "bin", tmp_path / "told"
    tools.mkdir()
    stand_ins = {
        "srun": (
            f'echo "srun $*" >> {told}; while [ ! -e {tmp_path}/stop ]; do sleep 0.05; done; '
            "exit 130"
        ),
        # srun is gone when it returns
        "scancel": f'echo "scancel $*" >> {told}; touch {tmp_path}/stop; sleep 0.3',
        "scontrol": f'echo "scontrol $*" >> {told}',
    }
    for name, body in stand_ins.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    script = tmp_path / "slurm.sh"
    script.write_text(job_script(script, ["run", "it's mine.toml"], "", 1))
    settings = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    job = subprocess.Popen(["bash", str(script)], env=settings)
    while not told.exists():
        time.sleep(0.05)
    job.terminate()
    assert job.wait(60) == 130
    first, *rest = told.read_text().splitlines()
    assert first.endswith("-m tether run it's mine.toml") and rest == [
        "scancel --signal=TERM 7",
        "scontrol requeue 7",
    ]


def test_a_job_that_ends_by_itself_does_not_come_again(tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, body in {"srun": "exit 3", "scontrol": f"touch {tmp_path}/again"}.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    script = tmp_path / "slurm.sh"
    script.write_text(job_script(script, ["run", "r.toml"], "", 1))
    settings = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    assert subprocess.run(["bash", str(script)], env=settings, check=False).returncode == 3
    assert not (tmp_path / "again").exists()


def test_sbatch_gets_the_script_of_the_run(tmp_path, monkeypatch):
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "sbatch").write_text(f'#!/bin/bash\necho "$1" > {tmp_path}/asked\nexit 3\n')
    (tools / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    assert submit_job(tmp_path / "run", ["run", "r.toml"], "", 1) == 3
    assert (tmp_path / "asked").read_text().strip() == str(tmp_path / "run" / "slurm.sh")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"sbatch is not on this machine.*slurm\.sh"):
        submit_job(tmp_path / "run", ["run", "r.toml"], "", 1)


def test_every_node_starts_its_ranks_by_torchrun(tmp_path, monkeypatch):
    """With stand-ins for srun, scontrol and Python, which says how it was called."""
    tools = tmp_path / "bin"
    tools.mkdir()
    stand_ins = {
        "srun": 'shift; exec "$@"',
        "scontrol": ("echo first; echo second"),
        "python": 'printf "%s\\n" "$@"',
    }
    for name, body in stand_ins.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setattr("tether.scale.clusters.slurm.sys.executable", str(tools / "python"))
    script = tmp_path / "slurm.sh"
    script.write_text(job_script(script, ["run", "it's mine.toml"], "nodes=2", 4))
    place = {
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "2",
        "SLURM_NODEID": "1",
        "SLURM_JOB_NODELIST": "first,second",
    }
    settings = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", **place}
    done = subprocess.run(
        ["bash", str(script)],
        env=settings,
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.splitlines()
    assert words[:6] == ["-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", "1"]
    assert words[6:] == [
        "--nproc-per-node",
        "2",
        "--master-addr",
        "first",
        "--master-port",
        "10007",
        "-m",
        "tether",
        "run",
        "it's mine.toml",
    ]


def test_the_command_sends_a_run_away_with_its_own_words(tmp_path, monkeypatch):
    recipe, asked = tmp_path / "r.toml", []
    recipe.write_text(
        'run = "runs/r"\n[model]\nsource = "tiny"\n[sft]\ndata = { path = '
        '"tether:demonstrations" }\n',
    )
    monkeypatch.setattr(
        "tether.runner.assembly.launching.submit",
        lambda on, run, ranks, device, command: asked.append((on, ranks, command)) or 5,
    )
    done = CliRunner().invoke(
        app,
        ["run", str(recipe), "sft", "sft.epochs=1", "--on", "slurm:nodes=2"],
    )
    assert done.exit_code == 5
    assert asked == [("slurm:nodes=2", 1, ["run", str(recipe), "sft", "sft.epochs=1"])]


@pytest.mark.parametrize(
    ("nodes", "learner"),
    [(2, "learner = { ranks = 4, restarts = 3 }"), (1, "")],
)
def test_the_job_of_a_recipe_that_names_slurm_itself_runs_where_it_is(
    tmp_path,
    monkeypatch,
    nodes,
    learner,
):
    """Else each job would send the run away again; and ranks that torchrun starts refuse
    learner.restarts.
    """
    (tmp_path / "sbatch").write_text("#!/bin/bash\nexit 0\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        f'run = "{tmp_path}/run"\non = "slurm:nodes={nodes}"\n{learner}\n'
        '[model]\nsource = "tiny"\n[sft]\ndata = { path = "tether:demonstrations" }\n',
    )
    assert CliRunner().invoke(app, ["run", str(recipe)]).exit_code == 0
    command = (tmp_path / "run" / "slurm.sh").read_text().split(" run /")[-1].partition(" &\n")[0]
    place, *overrides = command.split()
    config = read_recipe(f"/{place}", overrides)
    assert config.on == "local" and config.learner.ranks == 2 * nodes - (nodes == 1)
    assert config.learner.ranks == 1 or config.learner.restarts == 0


def test_a_place_that_takes_the_whole_run_is_none_for_a_part_of_it():
    with pytest.raises(ConfigError, match="sends the whole run away"):
        Placement("slurm").check()


@pytest.mark.parametrize("on", ["rey", "ray:10001", "slurm:nodes", "slurm:nodes=2;rm", "ray://"])
def test_a_place_that_is_none_is_refused(on):
    with pytest.raises(ConfigError, match="on"):
        build(Recipe, {"run": "runs/r", "model": {"source": "tiny"}, "on": on})
