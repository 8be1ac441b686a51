"""Start of a run and the programs beside it: on this machine, on a Ray cluster, or as a job of
Slurm.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import torch

from tether.core.errors import ConfigError, require
from tether.models.loading import pick_device
from tether.scale.servers.launch import Command, Launcher, Processes, Servers
from tether.settings.workers import ServersConfig

HERE = ("local", "ray")
"""Places from which this process takes part itself."""


@dataclass(frozen=True)
class Placement:
    """The place where a run starts the programs beside its learner.

    Args:
        on: `local`, this machine; or `ray`, a cluster.
        device: of the learner.
        ranks: processes of the learner on this machine.
    """

    on: str = "local"
    device: str = "auto"
    ranks: int = 1

    def check(self) -> None:
        """Check that this process takes part there itself.

        Raises:
            ConfigError: all of a run would go there, and this process with it (see `submit`).
        """
        if self.on not in HERE:
            raise ConfigError(
                f"on = {self.on!r} sends the whole run away: start it with "
                f"tether run RECIPE --on {self.on}",
            )

    def host_address(self) -> str:
        """The address at which started programs reach this machine. With Ray, this call joins the
        cluster.
        """
        if self.on == "local":
            return "127.0.0.1"
        module = _ray()
        module.connect(None)
        return module.ray.util.get_node_ip_address()

    def launcher(
        self,
        run: Path,
        needs: Mapping[str, Mapping[str, float]],
        patience: float,
    ) -> Launcher:
        """A launcher of a run's programs, each of which needs so much of one machine.

        Raises:
            ConfigError: the cluster cannot be reached, or it or this machine is too small.
            RunError: others use it for longer than `patience` seconds.
        """
        if self.on == "local":
            gpus = {name: ceil(need.get("GPU", 0)) for name, need in needs.items()}
            return Processes(gpus, self.spare_gpus())
        return _ray().RayLauncher(None, run.resolve().name, needs, patience)

    def spare_gpus(self) -> list[str]:
        """This machine's GPUs but the learner's, as CUDA_VISIBLE_DEVICES names them; several ranks
        have the first ones.
        """
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks))
        gpus = visible_gpus()
        if ranks > 1:
            return gpus[ranks:]
        device = pick_device(self.device)
        if device.type != "cuda":
            return gpus
        own = device.index or 0
        return gpus[:own] + gpus[own + 1 :]

    def beside_learner(self, device: str) -> bool:
        """True if a server that is started has to share memory with the learner."""
        return device == "cpu" or (self.on == "local" and not self.spare_gpus())

    def servers_for(
        self,
        config: ServersConfig,
        command: Command,
        folder: Path,
        threads: int,
        device: str,
    ) -> Servers:
        """The servers in a run's settings: those to start, if the run starts programs, or those
        that run already.

        Args:
            folder: of their logs, two below that of the run.
            threads, device: of each started one; 0 threads: its own choice.

        Raises:
            ConfigError, RunError: see `launcher`.
        """
        needs = config.resources or ({"CPU": 1.0} if device == "cpu" else {"GPU": 1.0})
        run = folder.parent.parent
        names = config.names
        every = dict.fromkeys(names, needs)
        starter = self.launcher(run, every, config.start_seconds) if names else None
        return Servers(command, names, folder, config.running, threads, starter)


def visible_gpus() -> list[str]:
    """This machine's GPUs, as CUDA_VISIBLE_DEVICES names them."""
    every = ",".join(map(str, range(torch.cuda.device_count())))
    named = os.environ.get("CUDA_VISIBLE_DEVICES") or every
    return [gpu for gpu in named.split(",") if gpu]


def submit(on: str, run: Path, ranks: int, device: str, command: Sequence[str]) -> int:
    """Send a whole run to a cluster, and return its exit status.

    Args:
        on: the cluster, as a recipe names it.
        run: the run directory.
        ranks: processes that train together.
        device: of the model.

    Raises:
        ConfigError: there is no such cluster, or it is too small.
    """
    kind, _, rest = on.partition(":")
    if kind == "slurm":
        from tether.scale.clusters.slurm import submit_job

        there = [*command, "on=local"]
        if ranks > 1:
            there.append("learner.restarts=0")  # which torchrun's ranks would refuse
        return submit_job(run, there, rest, ranks)
    ray = _ray()
    # this machine may have no GPU where the cluster has some
    on_gpu = device.startswith("cuda") or (device == "auto" and ray.has_gpus(on))
    needs = {"GPU" if on_gpu else "CPU": 1.0}

    def write(text: bytes) -> None:
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()

    return ray.run_elsewhere(on, [*command, "on=ray"], needs, run.resolve().name, write)


def _ray():
    """The module that connects to Ray.

    Raises:
        ConfigError: Ray is not installed.
    """
    require("ray", "on = 'ray'", "scale")
    from tether.scale.clusters import ray

    return ray
