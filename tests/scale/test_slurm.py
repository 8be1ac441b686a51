"""A run as a job of Slurm: what the script says, whether a shell takes it, and what sbatch is handed."""

import os
import subprocess

import pytest

from tether.core.errors import ConfigError
from tether.scale.slurm import job_script, submit_job


def test_a_job_of_one_rank_runs_the_command_on_one_node(tmp_path):
    script = tmp_path / "my run" / "slurm.sh"
    text = job_script(script, ["run", "a recipe.toml", "ppo"], "partition=gpu,time=02:00:00", 1)
    assert "#SBATCH --partition=gpu\n" in text and "#SBATCH --time=02:00:00\n" in text and "#SBATCH --job-name=my run\n" in text
    assert "-m tether run 'a recipe.toml' ppo" in text and "MASTER_ADDR" not in text


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_shell_takes_the_script(tmp_path, ranks):
    script = tmp_path / "slurm.sh"
    script.write_text(job_script(script, ["run", "it's mine.toml"], "nodes=1", ranks))
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


def test_ranks_are_shared_out_over_nodes(tmp_path):
    text = job_script(tmp_path / "slurm.sh", ["run", "r.toml"], "nodes=2,gres=gpu:4", 8)
    assert "--nproc-per-node 4" in text and "#SBATCH --nodes=2\n" in text and "#SBATCH --gres=gpu:4\n" in text
    with pytest.raises(ConfigError, match="8 ranks cannot be shared out over 3 nodes"):
        job_script(tmp_path / "slurm.sh", ["run", "r.toml"], "nodes=3", 8)


def test_the_script_starts_what_it_says(tmp_path, monkeypatch):
    """With stand-ins for srun and scontrol: the program's own words, its status, and another start after SIGTERM."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, body in {"srun": 'echo "srun $@"; exit 143', "scontrol": 'echo "scontrol $@"'}.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    script = tmp_path / "slurm.sh"
    script.write_text(job_script(script, ["run", "it's mine.toml"], "", 1))
    settings = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", str(script)], env=settings, capture_output=True, text=True, check=False)
    assert "-m tether run it's mine.toml" in done.stdout and "scontrol requeue 7" in done.stdout and done.returncode == 143


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
    stand_ins = {"srun": 'shift; exec "$@"', "scontrol": "echo first; echo second", "python": 'printf "%s\\n" "$@"'}
    for name, body in stand_ins.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setattr("tether.scale.slurm.sys.executable", str(tools / "python"))
    script = tmp_path / "slurm.sh"
    script.write_text(job_script(script, ["run", "it's mine.toml"], "nodes=2", 4))
    place = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "first,second"}
    settings = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", **place}
    done = subprocess.run(["bash", str(script)], env=settings, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    assert words[:6] == ["-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", "1"]
    assert words[6:] == ["--nproc-per-node", "2", "--master-addr", "first", "--master-port", "29500", "-m", "tether", "run", "it's mine.toml"]
