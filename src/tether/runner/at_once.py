"""The jobs of a sweep as processes of this machine, several at once.

A job has the threads that it has alone, so its bits depend on no other job. Its process ends with
this one, however that ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tether.build.launching import visible_gpus
from tether.core.errors import ConfigError, RunError
from tether.core.protocols import doing
from tether.core.rundir import read_json
from tether.core.stopping import AGAIN, Interrupted, Stopping
from tether.core.threads import WAITING
from tether.core.types import Json
from tether.learner.loop import Progress
from tether.models.loading import pick_device
from tether.planning.devices import machine_for
from tether.planning.shares import Price
from tether.runner.jobs import Job, expand
from tether.servers.launch import end_group, start_bound
from tether.settings.recipe import BaseRecipe

MEMBER = "tether.runner.member"
"""The program of one job."""
LOOK_EVERY = 0.1
"""Seconds between two looks at the processes."""


class RunningJob(NamedTuple):
    """A job whose process runs; `log` has what it writes."""

    job: Job
    process: subprocess.Popen[Any]
    log: Path


def run_at_once(
    recipe: BaseRecipe,
    stages: Sequence[str],
    slots: Mapping[str, Mapping[str, str]],
    progress: Callable[[str], Progress] | None,
) -> Json:
    """Run each job of a sweep as soon as those on which it depends have ended; returns the
    summaries by folder.

    Args:
        slots: see `job_slots`; as many jobs run at once.

    Raises:
        RunError: a job has failed. The others have saved a checkpoint.
        Interrupted: a signal came. Every job has saved a checkpoint.
    """
    root, task = Path(recipe.run), recipe.model_dump_json(exclude_unset=True)
    jobs, bar = expand(recipe, stages), progress("sweep") if progress else None
    left, running, failed = [*jobs], dict[str, RunningJob](), list[RunningJob]()
    ending = False
    try:
        with Stopping() as stopping:
            while left or running:
                for slot in [name for name in slots if name not in running]:
                    if (job := _next(left, running.values())) is not None:
                        left.remove(job)
                        running[slot] = _started(job, task, stages, slots[slot])
                for slot, member in [*running.items()]:
                    if (code := member.process.poll()) is not None:
                        failed += [running.pop(slot)] if code else []
                        running.pop(slot, None)
                        _show(bar, len(jobs) - len(left) - len(running), len(jobs))
                if (failed or stopping.asked) and not ending:
                    ending, left = True, []
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


def job_slots(recipe: BaseRecipe, number: int, price: Price) -> dict[str, dict[str, str]]:
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
    peak = max((stage.memory for stage in price.stages), default=0)
    memory = machine_for(recipe.model.device).memory if peak else 0
    if number * peak > memory:
        raise ConfigError(
            f"--at-once {number} needs {number * peak / 1e9:.1f} GB at the peak, and this machine "
            f"has {memory / 1e9:.1f} GB. Give a smaller number",
        )
    return {str(slot): waiting for slot in range(number)}


def _next(left: Sequence[Job], running: Iterable[RunningJob]) -> Job | None:
    """The first job that depends on none that has still to end."""
    open_folders = {job.folder for job in left} | {member.job.folder for member in running}
    for job in left:
        others = open_folders - {job.folder}
        earlier = (path.is_relative_to(place) for path in others for place in job.earlier)
        if not (others.intersection(job.needs) or any(earlier)):
            return job
    return None


def _started(
    job: Job,
    task: str,
    stages: Sequence[str],
    environment: Mapping[str, str],
) -> RunningJob:
    log = job.folder.with_name(f"{job.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", MEMBER, str(job.folder), task, *stages]
    return RunningJob(job, start_bound(command, environment, log), log)


def _show(bar: Progress | None, done: int, total: int) -> None:
    if bar is not None:
        bar(done, total, {})


def _reason(member: RunningJob) -> str:
    lines = member.log.read_text(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "it wrote nothing")
    return f"{member.job.folder} has failed: {last.strip()} ({member.log} has all of it)"
