"""Engine servers as processes of this machine, or as addresses where they run already."""

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
from typing import Any

Command = Callable[[int], Sequence[str]]
"""From a port to the command line of a server that listens there."""
QUIET = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The place of a rank among those that train, which would mislead a server."""
BOUND = """import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
os.execvp(sys.argv[1], sys.argv[1:])"""
"""Becomes another program that is killed when the thread that started it has gone (PR_SET_PDEATHSIG), however that ended."""


class Servers:
    """Servers by name: started ones are restarted on a free port, and end with this process however it ends.

    Args:
        command: of a started one.
        names: of those to start; each has its log in `folder`.
        addresses: of others, which are only talked to.
        threads: of each started one; 0 leaves that to it.
    """

    def __init__(
        self, command: Command, names: Sequence[str], folder: Path, addresses: Mapping[str, str] | None = None, threads: int = 0
    ) -> None:
        self.command, self.folder, self.addresses = command, folder, dict(addresses or {})
        self.environment = QUIET | ({"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"} if threads else {})
        self.started = set(names)
        self.processes: dict[str, subprocess.Popen[Any]] = {}
        self.names = [*names, *self.addresses]
        folder.mkdir(parents=True, exist_ok=True)
        atexit.register(self.close)

    def start(self, name: str) -> None:
        """Start, or start again; a server that was not started here is left alone.

        Raises:
            OSError: its program cannot be started.
        """
        if name not in self.started:
            return
        self.stop(name)
        port = free_port()
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-c", BOUND, *self.command(port)],
                env={k: v for k, v in os.environ.items() if k not in PLACE} | self.environment, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.addresses[name] = f"http://127.0.0.1:{port}"

    def ended(self, name: str) -> int | None:
        """The exit status of a started server that is no longer running."""
        process = self.processes.get(name)
        return None if process is None else process.poll()

    def stop(self, name: str) -> None:
        """End a started server, and what it started."""
        if (process := self.processes.pop(name, None)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def last_words(self, name: str, lines: int = 3) -> str:
        """The end of its log, in one line."""
        path = self.folder / f"{name}.log"
        text = path.read_text(errors="replace").strip().splitlines() if path.is_file() else []
        return " / ".join(line.strip() for line in text[-lines:])

    def close(self) -> None:
        """End all that were started."""
        for name in list(self.processes):
            self.stop(name)


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
