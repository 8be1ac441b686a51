"""A run as a job of Slurm: a script in the run's folder, handed to sbatch."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tether.core.errors import ConfigError
from tether.core.keeping import check_own, own_file, write_whole
from tether.core.rundir import made_folder

SCRIPT = """#!/bin/bash
# Made by tether; `sbatch {script}` starts the same run again, which goes on from its last checkpoint.
{options}
# Two minutes before its time is over the job is told: the run saves the step in hand, and the same job comes again.
trap 'over=1; scancel --signal=TERM "$SLURM_JOB_ID"' TERM
{program} &
while kill -0 $! 2>/dev/null; do wait $!; done
wait $!; status=$?
[ -z "$over" ] || scontrol requeue "$SLURM_JOB_ID"
exit $status
"""
DEFAULTS = {"ntasks-per-node": "1", "open-mode": "append", "requeue": "", "signal": "B:TERM@120"}
"""Default options of sbatch."""
ALONE = "srun {python} -m tether {command}"
TOGETHER = """export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
srun --kill-on-bad-exit=1 bash -c 'exec "$0" -m torch.distributed.run --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" \\
  --nproc-per-node {beside} --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" -m tether "$@"' {python} {command}"""


def submit_job(run: Path, command: Sequence[str], options: str, ranks: int) -> int:
    """Write the script of a run and hand it to sbatch; its exit status.

    Args:
        command: of tether's, without the place.
        options: of sbatch, as name=value with commas between.
        ranks: of the learner, which are shared out over the nodes.

    Raises:
        ConfigError: sbatch is not there, or the ranks cannot be shared out.
        RunError: a script of that name is the user's.
    """
    script = run / "slurm.sh"
    made_folder(run)
    with own_file(script) as file:
        check_own(file, script, rb"#!/bin/bash\n# Made by tether.*")
    write_whole(script, job_script(script, command, options, ranks).encode())
    try:
        return subprocess.run(["sbatch", str(script)], check=False).returncode
    except FileNotFoundError:
        raise ConfigError(
            f"sbatch is not on this machine's PATH. The job's script is {script}: submit it where "
            "Slurm is",
        ) from None


def job_script(script: Path, command: Sequence[str], options: str, ranks: int) -> str:
    """The text of a job; one task a node, which starts the ranks of that node by torchrun where
    there are several.

    Raises:
        ConfigError: the ranks cannot be shared out over the nodes.
    """
    given = dict(option.split("=", 1) for option in options.split(",") if option)
    nodes = given.get("nodes", "1")
    if not nodes.isdecimal() or int(nodes) < 1 or ranks % int(nodes):
        raise ConfigError(
            f"{ranks} ranks cannot be shared out over {nodes} nodes: set "
            "learner.ranks to a multiple of the nodes",
        )
    run = script.parent.resolve()
    chosen = {"job-name": run.name, "output": str(run / "slurm-%j.log"), **DEFAULTS, **given}
    lines = [
        f"#SBATCH --{name}={value}" if value else f"#SBATCH --{name}"
        for name, value in chosen.items()
    ]
    parts = {
        "python": shlex.quote(sys.executable),
        "command": shlex.join(command),
        "beside": ranks // int(nodes),
    }
    program = (ALONE if ranks == 1 else TOGETHER).format(**parts)
    return SCRIPT.format(script=script, options="\n".join(lines), program=program)
