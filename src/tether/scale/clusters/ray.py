"""Ray as a launcher: programs of a run on the machines of a cluster, each in a bundle of one
placement group.

Ray places, names and restarts; it moves no tensors. A program runs under an actor of its own,
`Host`, which Ray starts again elsewhere when its machine is lost
(https://docs.ray.io/en/latest/ray-core/fault_tolerance/actors.html).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# which Ray takes by itself only for a cluster of this machine
if (Path.home() / ".ray" / "auth_token").is_file():
    os.environ.setdefault("RAY_AUTH_MODE", "token")

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tether.core.errors import ConfigError, RunError
from tether.core.types import Texts
from tether.scale.servers.launch import end_group, free_port, start_bound

T = TypeVar("T")
Resources = Mapping[str, float]
"""Needs of a program on one machine, in Ray's words: CPU, GPU, memory, or names of the cluster's
own.
"""
NAMESPACE = "tether"
LOST = -1
"""The exit status of a program whose machine, or whose actor, is gone."""
LOOPBACK = "127.0.0.2"
"""Of a cluster that is started here: 127.0.0.1 would be taken for the machine's address in its
network.
"""
MOST_READ = 1 << 20
"""Bytes of a log at once."""
STARTS = (sys.executable, "-m", "tether")
"""Words before a command of tether's."""
RESTARTS = 3
STOPPED = 10.0
"""Seconds that an actor may take to end its program; one that is lost never answers."""
PLACED = 60.0
"""Seconds that Ray may take to start an actor in a bundle that is reserved."""


class Host:
    """The actor: runs one program on the machine where Ray has put it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def place(self) -> tuple[str, int]:
        """This machine's address in the cluster, and a port that is free there."""
        host = ray.util.get_node_ip_address()
        return host, free_port(host)

    def start(
        self,
        command: Sequence[str],
        environment: Texts,
        log: str,
        python: str,
    ) -> None:
        """Start the program; the caller's Python is this machine's own."""
        words = [sys.executable if word == python else word for word in command]
        self.process = start_bound(words, environment, Path(log))

    def wait(self) -> int:
        """The exit status, once the program has ended."""
        return LOST if self.process is None else self.process.wait()

    def stop(self) -> None:
        """End the program, and what it started."""
        if self.process is not None:
            end_group(self.process)

    def written(self, log: str, start: int) -> bytes:
        """Content of a file of this machine from a byte on."""
        with open(log, "rb") as file:
            file.seek(start)
            return file.read(MOST_READ)


class RayLauncher:
    """Implements servers.launch.Launcher.

    Args:
        address: of a cluster, as ray.init takes it; None: the one of this machine, which is started
            where there is none.
        run: a word in the names of the actors (`ray list actors`), beside a random one.
        needs: what each program needs, by its name.
        patience: seconds to wait for resources that others use.

    Raises:
        ConfigError: the cluster cannot be reached, or has not what the programs need.
        RunError: others use it for too long.
    """

    def __init__(
        self,
        address: str | None,
        run: str,
        needs: Mapping[str, Resources],
        patience: float,
    ) -> None:
        connect(address)
        self.run = f"{run}-{secrets.token_hex(3)}"
        self.bundles = {name: number for number, name in enumerate(needs)}
        self.needs = {name: dict(each) for name, each in needs.items()}
        check_fits(self.needs, [node["Resources"] for node in ray.nodes() if node["Alive"]])
        self.group = placement_group(list(self.needs.values()), strategy="PACK")
        if not self.group.wait(patience):
            free = _in_words(ray.available_resources())
            remove_placement_group(self.group)
            raise RunError(
                f"others use the cluster: waited {patience:g} s for "
                f"{_needed(self.needs)}; free now: {free}",
            )
        self.hosts: dict[str, Any] = {}
        self.ends: dict[str, ray.ObjectRef[int]] = {}
        """Pending exit statuses of started programs."""

    def place(self, name: str) -> tuple[str, int]:
        if name not in self.hosts:
            self.hosts[name] = self._actor(name)
        return self._get(self.hosts[name].place.remote(), name)

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Texts,
        log: Path,
    ) -> None:
        host = self.hosts[name]
        self._get(
            host.start.remote(list(command), dict(environment), str(log.resolve()), sys.executable),
            name,
        )
        self.ends[name] = host.wait.remote()

    def ended(self, name: str) -> int | None:
        end = self.ends.get(name)
        if end is None or not ray.wait([end], timeout=0)[0]:
            return None
        try:
            return ray.get(end)
        except RayError:
            return LOST

    def stop(self, name: str) -> None:
        if self.ends.pop(name, None) is not None:
            with contextlib.suppress(OSError):
                self._get(self.hosts[name].stop.remote(), name, STOPPED)

    def written(self, name: str, log: Path, start: int, write: Callable[[bytes], object]) -> int:
        """Pass on what a program has written since byte `start` of its log; where it ends now."""
        with contextlib.suppress(OSError):
            new = self._get(self.hosts[name].written.remote(str(log), start), name)
            write(new)
            return start + len(new)
        return start

    def close(self) -> None:
        """End all programs, and give their resources back."""
        if not ray.is_initialized():
            return
        for host in self.hosts.values():
            with contextlib.suppress(RayError):
                ray.kill(host)
        self.hosts = {}
        self.ends = {}
        with contextlib.suppress(RayError):
            remove_placement_group(self.group)

    def _actor(self, name: str) -> Any:
        strategy = PlacementGroupSchedulingStrategy(
            self.group,
            placement_group_bundle_index=self.bundles[name],
        )
        needs = dict(self.needs[name])
        host = ray.remote(Host).options(
            name=f"{self.run}-{name}",
            namespace=NAMESPACE,
            num_cpus=needs.pop("CPU", 0),
            num_gpus=needs.pop("GPU", 0),
            memory=needs.pop("memory", None),
            resources=needs,
            max_restarts=-1,
            max_concurrency=4,
            scheduling_strategy=strategy,
        )
        return host.remote()

    def _get(self, answer: ray.ObjectRef[T], name: str, limit: float = PLACED) -> T:
        """Raises: OSError: the actor is gone or does not answer; Ray starts it again, so this may
        be tried again.
        """
        try:
            return ray.get(answer, timeout=limit)
        except (RayActorError, GetTimeoutError) as error:
            raise OSError(
                f"Ray has no machine for {name} now: {str(error).splitlines()[0]}",
            ) from None


def connect(address: str | None) -> None:
    """Join a cluster, once; without an address the one of this machine, which is started where
    there is none.

    Raises:
        ConfigError: it cannot be reached.
    """
    if ray.is_initialized():
        return
    join = partial(
        ray.init,
        namespace=NAMESPACE,
        logging_level=logging.ERROR,
        log_to_driver=None if address else False,
    )
    try:
        try:
            join(address or "auto")
        except ConnectionError:
            if address is not None:
                raise
            own = (
                {"_node_ip_address": LOOPBACK, "include_dashboard": False}
                if sys.platform == "linux"
                else {}
            )
            join("local", **own)  # not the one that a file of a cluster long gone names
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        where = address or "this machine"
        raise ConfigError(
            f"no Ray cluster can be reached at {where}: {str(error).splitlines()[0]}",
        ) from None


def check_fits(needs: Mapping[str, Resources], nodes: Sequence[Resources]) -> None:
    """Check that a cluster has enough for each program on one machine, and for all of them in
    total.

    Current use of the cluster does not count.

    Raises:
        ConfigError: it has not, and waiting would not help.
    """
    for name, need in needs.items():
        if not any(all(node.get(what, 0) >= much for what, much in need.items()) for node in nodes):
            largest = max(
                nodes,
                key=lambda node: (node.get("GPU", 0), node.get("CPU", 0)),
                default={},
            )
            raise ConfigError(
                f"{name} needs {_in_words(need)}, and the largest machine of the "
                f"cluster has {_in_words(largest)}",
            )
    for what in {what for need in needs.values() for what in need}:
        much, there = (sum(each.get(what, 0) for each in some) for some in (needs.values(), nodes))
        if much > there:
            raise ConfigError(
                f"the run needs {_needed(needs)}, together {much:g} {what}, and the "
                f"cluster has {there:g}",
            )


def _needed(needs: Mapping[str, Resources]) -> str:
    return "; ".join(f"{name}: {_in_words(need)}" for name, need in needs.items())


def _in_words(resources: Resources) -> str:
    """CPUs, GPUs, memory in GB, and what has a name of the cluster's own."""
    named = {
        what: much
        for what, much in resources.items()
        if not what.startswith(("node:", "bundle_", "object_store")) and "_group_" not in what
    }
    if "memory" in named:
        named["GB memory"] = named.pop("memory") / 1e9
    return ", ".join(f"{much:g} {what}" for what, much in sorted(named.items())) or "nothing"


def run_elsewhere(
    address: str,
    command: Sequence[str],
    needs: Resources,
    run: str,
    write: Callable[[bytes], object],
) -> int:
    """Run a command of tether's on a machine of a cluster, and pass on what it writes; its exit
    status.

    It is started again where its machine is lost, up to RESTARTS times; what it has saved lies on a
    disk that all see.
    """
    with contextlib.closing(RayLauncher(address, run, {"learner": needs}, PLACED)) as launcher:
        for number in range(RESTARTS + 1):
            # of each start its own: another one's output would be passed on again
            log = Path("/tmp") / f"{launcher.run}-{number}.log"
            status = _run_once(launcher, command, log, write)
            if status != LOST or number == RESTARTS:
                break
            write(b"The machine of the learner is lost; starting again from the last checkpoint.\n")
        return status


def _run_once(
    launcher: RayLauncher,
    command: Sequence[str],
    log: Path,
    write: Callable[[bytes], object],
    name: str = "learner",
) -> int:
    try:
        launcher.place(name)
        launcher.start(name, [*STARTS, *command], {}, log)
    except OSError as error:
        write(f"{error}\n".encode())
        return LOST
    place = 0
    status = None
    while status is None:
        time.sleep(1.0)
        status = launcher.ended(name)
        place = launcher.written(name, log, place, write)
    while (end := launcher.written(name, log, place, write)) > place:
        place = end
    return status


def has_gpus(address: str) -> bool:
    """True if a machine of the cluster has a GPU.

    Raises:
        ConfigError: the cluster cannot be reached.
    """
    connect(address)
    return any(node["Resources"].get("GPU") for node in ray.nodes() if node["Alive"])
