"""Servers of a run, as programs that a launcher starts or as addresses where they run already."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Protocol

from tether.core.errors import ConfigError
from tether.core.keeping import own_file
from tether.core.types import Texts
from tether.scale.servers.http import TOKEN, new_token

Command = Callable[[str, int], Sequence[str]]
"""From a host and a port to the command line of a server that listens there."""
QUIET = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The place of a rank among those that train, which would mislead a server."""
BOUND = """import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
os.execvp(sys.argv[1], sys.argv[1:])"""
"""Becomes another program that is killed when the thread that started it has gone
(PR_SET_PDEATHSIG), however that ended.
"""


class Launcher(Protocol):
    """Starts programs by name, on machines of its choice; none of them outlives the run."""

    def place(self, name: str) -> tuple[str, int]:
        """The host where this program will run, by an address that others reach, and a port that is
        free there.
        """
        ...

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Texts,
        log: Path,
    ) -> None:
        """Start a program whose output is added to a file; OSError where that cannot be done
        now.
        """
        ...

    def ended(self, name: str) -> int | None:
        """The exit status of a started program that no longer runs; returns at once."""
        ...

    def stop(self, name: str) -> None:
        """End a program, and what it started, if it was started."""
        ...

    def close(self) -> None:
        """End all of them."""
        ...


class Processes:
    """The launcher of one machine: programs on the loopback, which end with this process in every
    case.

    Args:
        needs: number of GPUs of each program. A program without one sees the GPUs of this process.
        gpus: of this machine, that programs may have. Without any, all see the GPUs of this
            process.

    Raises:
        ConfigError: programs that run already leave too few.
    """

    taken: ClassVar[set[str]] = set()
    """GPUs of programs that this process has started."""

    def __init__(self, needs: Mapping[str, int] | None = None, gpus: Sequence[str] = ()) -> None:
        needs = needs if needs and gpus else {}
        free = [gpu for gpu in gpus if gpu not in self.taken]
        if len(free) < (wanted := sum(needs.values())):
            raise ConfigError(
                f"{len(needs)} servers need {wanted} GPUs, and {len(free)} of this machine are "
                "left beside the learner's",
            )
        self.gpus = {name: [free.pop(0) for _ in range(count)] for name, count in needs.items()}
        self.taken.update(*self.gpus.values())
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        atexit.register(self.close)

    def place(self, name: str) -> tuple[str, int]:
        return "127.0.0.1", free_port("127.0.0.1")

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Texts,
        log: Path,
    ) -> None:
        own = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if (gpus := self.gpus.get(name)) else {}
        self.processes[name] = start_bound(command, {**environment, **own}, log)

    def ended(self, name: str) -> int | None:
        process = self.processes.get(name)
        return None if process is None else process.poll()

    def stop(self, name: str) -> None:
        if (process := self.processes.pop(name, None)) is not None:
            end_group(process)

    def close(self) -> None:
        for name in list(self.processes):
            self.stop(name)
        self.taken.difference_update(*self.gpus.values())


class Servers:
    """Servers by name. Started ones get a new address each time. Others are only clients' targets.

    Attributes:
        token: the secret of requests. Started servers get it by their environment, vLLM's as its
            API key.

    Args:
        command: of a started one.
        names: of those to start; each has its log in `folder`.
        addresses: of the others.
        threads: of each started one; 0 leaves that to it.
        launcher: unset: processes of this machine.
    """

    def __init__(
        self,
        command: Command,
        names: Sequence[str],
        folder: Path,
        addresses: Texts | None = None,
        threads: int = 0,
        launcher: Launcher | None = None,
    ) -> None:
        self.command = command
        self.folder = folder
        self.addresses = dict(addresses or {})
        self.token = new_token()
        self.environment = {**QUIET, TOKEN: self.token, "VLLM_API_KEY": self.token}
        if threads:
            self.environment |= {
                "OMP_NUM_THREADS": str(threads),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            }
        self.started = set(names)
        self.launcher = launcher or Processes()
        self.names = [*names, *self.addresses]

    def start(self, name: str) -> None:
        """Start, or start again; a server that was not started here is left alone.

        Raises:
            OSError: its program cannot be started.
        """
        if name not in self.started:
            return
        self.launcher.stop(name)
        # so that one that cannot be started now is not taken for one that runs
        self.addresses.pop(name, None)
        host, port = self.launcher.place(name)
        self.launcher.start(
            name,
            self.command(host, port),
            self.environment,
            self.folder / f"{name}.log",
        )
        self.addresses[name] = f"http://{host}:{port}"

    def last_words(self, name: str, lines: int = 3) -> str:
        """The end of its log, in one line."""
        path = self.folder / f"{name}.log"
        text = path.read_text(errors="replace").strip().splitlines() if path.is_file() else []
        return " / ".join(line.strip() for line in text[-lines:])


def start_bound(
    command: Sequence[str],
    environment: Texts,
    log: Path,
) -> subprocess.Popen[bytes]:
    """A process of this machine, leader of a group of its own, that ends with the thread that
    calls.
    """
    with own_file(log) as output:
        return subprocess.Popen(
            [sys.executable, "-c", BOUND, *command],
            env={key: value for key, value in os.environ.items() if key not in PLACE}
            | dict(environment),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads its group, and the group with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port(host: str) -> int:
    """A free port of this machine, at one of its addresses."""
    with socket.socket() as listener:
        listener.bind((host, 0))
        return listener.getsockname()[1]
