"""The jobs of a sweep as processes of this machine, several at once.

A job has the threads that it has alone, so its bits depend on no other job. Its process ends with
this one, however that ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tether.core.errors import ConfigError, RunError
from tether.core.protocols import doing
from tether.core.rundir import read_json
from tether.core.stopping import AGAIN, Interrupted, Stopping
from tether.core.threads import WAITING
from tether.core.types import Json, Texts
from tether.models.loading import pick_device
from tether.runner.assembly.job import AnyJob
from tether.runner.assembly.launching import visible_gpus
from tether.runner.launch import Launch
from tether.runner.planning.devices import machine_for
from tether.runner.planning.plan import plan
from tether.runner.planning.sizes import row_sizes
from tether.scale.servers.launch import end_group, start_bound
from tether.settings.recipe import BaseRecipe

MEMBER = "tether.runner.member"
"""The program of one job."""
LOOK_EVERY = 0.1
"""Seconds between two looks at the processes."""


class RunningJob(NamedTuple):
    """A job whose process runs; `log` has what it writes."""

    job: AnyJob
    process: subprocess.Popen[Any]
    log: Path


def run_at_once(launch: Launch) -> Json:
    """Run each job of a sweep as soon as those on which it depends have ended; returns the
    summaries by folder.

    Raises:
        ConfigError: see `job_slots`.
        RunError: a job has failed. The others have saved a checkpoint.
        Interrupted: a signal came. Every job has saved a checkpoint.
    """
    slots = job_slots(launch.recipe, launch.names, launch.at_once)
    with launch.ranks():
        return _run_in(slots, launch)


def _run_in(slots: Mapping[str, Texts], launch: Launch) -> Json:
    root = launch.root
    program = sys.executable
    task = launch.recipe.model_dump_json(exclude_unset=True)
    jobs = launch.jobs
    bar = launch.progress("sweep") if launch.progress else None
    left = [*jobs]
    running = dict[str, RunningJob]()
    failed = list[RunningJob]()
    ending = False
    try:
        with Stopping() as stopping:
            while left or running:
                for slot in [name for name in slots if name not in running]:
                    if (job := _next(left, running.values())) is not None:
                        left.remove(job)
                        folder = job.folder
                        log = folder.with_name(f"{job.name}.log")
                        command = program, "-m", MEMBER, str(folder), task, *launch.names
                        process = start_bound(command, slots[slot], log)
                        running[slot] = RunningJob(job, process, log)
                for slot, member in [*running.items()]:
                    if (code := member.process.poll()) is not None:
                        del running[slot]
                        failed += [member] if code else []
                        if bar is not None:
                            bar(len(jobs) - len(left) - len(running), len(jobs), {})
                if (failed or stopping.asked) and not ending:
                    ending = True
                    left = []
                    for member in running.values():
                        member.process.terminate()
                names = (str(member.job.folder.relative_to(root)) for member in running.values())
                doing(bar, ", ".join(names))
                time.sleep(LOOK_EVERY)
    finally:
        for member in running.values():
            end_group(member.process)
    if stopping.asked:
        raise Interrupted(f"stopped, and saved; {AGAIN}", stopping.asked)
    if failed:
        raise RunError(_reason(failed[0]))
    return {
        str(job.folder.relative_to(root)): read_json(job.folder / "summary.json") for job in jobs
    }


def job_slots(
    recipe: BaseRecipe,
    names: Sequence[str],
    number: int,
) -> dict[str, dict[str, str]]:
    """The environment of each of so many processes: on a GPU each has one of its own.

    Raises:
        ConfigError: this machine has too few GPUs or too little memory.
    """
    waiting = {WAITING: os.environ.get(WAITING, "PASSIVE")}
    if pick_device(recipe.model.device).type == "cuda":
        own = visible_gpus()[:number]
        if len(own) < number:
            raise ConfigError(
                f"--at-once {number} needs {number} GPUs, and this machine has {len(own)}: a job "
                "has one of its own. Give a smaller number",
            )
        return {gpu: {**waiting, "CUDA_VISIBLE_DEVICES": gpu} for gpu in own}
    machine = machine_for(recipe.model.device)
    sizes = row_sizes(recipe, names)
    peak = number * plan(recipe, machine, sizes=sizes, stages=names, advise=False).peak
    if peak > machine.memory:
        raise ConfigError(
            f"--at-once {number} needs {peak / 1e9:.1f} GB at the peak, and this machine has "
            f"{machine.memory / 1e9:.1f} GB. Give a smaller number",
        )
    return {str(slot): waiting for slot in range(number)}


def _next(left: Sequence[AnyJob], running: Iterable[RunningJob]) -> AnyJob | None:
    """The first job that depends on none that has still to end."""
    open_folders = {job.folder for job in left} | {member.job.folder for member in running}
    for job in left:
        others = open_folders - {job.folder}
        earlier = (path.is_relative_to(place) for path in others for place in job.earlier)
        if not (others.intersection(job.needs) or any(earlier)):
            return job
    return None


def _reason(member: RunningJob) -> str:
    lines = member.log.read_text(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "it wrote nothing")
    return f"{member.job.folder} has failed: {last.strip()} ({member.log} has all of it)"
