"""Environments in processes of their own. What one does to random numbers, folders or memory reaches
no other, and one that hangs can be ended. Those of one task draw alike from `random` and NumPy.

A server loads the user's file once and forks a process for each episode.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
from contextlib import suppress

import numpy as np

from tether.core.errors import ConfigError, DataError, error_words
from tether.core.received import received
from tether.core.types import Json, JsonValue
from tether.rewards.adapters import ANSWER, Foreign, Maker, fresh, maker_of, seed_of
from tether.rewards.calling import RUNNER, settled
from tether.settings.environment import EnvironmentConfig

MOST_BYTES = 1_000_000
"""Of an answer."""
CLOSING = 5.0
"""Seconds in which an environment may close what it holds."""


class EnvironmentProcess:
    """The two methods of an environment, whose object lives in another process."""

    def __init__(self, server: socket.socket) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(server, [b"."], [theirs.fileno()])
        self.lines = self.socket.makefile("rb")
        if not (line := self.lines.readline()):
            raise DataError("the server of the environments' processes has ended")
        self.process = int(line)
        self.waits = True
        """For a request."""

    def reset(self, task: Json) -> JsonValue:
        return self._answer("reset", task)

    def step(self, message: Json) -> JsonValue:
        return self._answer("step", message)

    def finish(self) -> JsonValue:
        return self._answer("finish")

    def close(self) -> None:
        """Have the environment close what it holds, if it waits, and end the process, whatever it
        does, unless it has ended: its number may be another's then.
        """
        if self.waits:
            self.socket.settimeout(CLOSING)
            with suppress(DataError):
                self._answer("close")
        with suppress(OSError):
            self.socket.setblocking(False)
            try:
                ended = not self.socket.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                ended = False
            if not ended:
                os.kill(self.process, signal.SIGKILL)
        self.socket.close()

    def _answer(self, method: str, *values: Json) -> JsonValue:
        self.waits = False
        try:
            self.socket.sendall(json.dumps([method, *values], default=str).encode() + b"\n")
            line = self.lines.readline(MOST_BYTES)
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            raise DataError(
                f"the environment answered with more than {MOST_BYTES:,} bytes"
                if line
                else "the environment's process ended",
            )
        self.waits = True
        answer = received(line, ANSWER)
        if "error" in answer:
            raise DataError(f"the environment raised {answer['error']}")
        return answer["result"]


class EnvironmentProcesses:
    """Makes environments, each in a process of its own.

    Args:
        make: what makes one in this process, as the settings have it.
    """

    def __init__(self, make: Maker, settings: EnvironmentConfig) -> None:
        self.__wrapped__ = make
        self.server, theirs = socket.socketpair()
        with theirs:
            subprocess.Popen(
                [sys.executable, "-m", __name__, settings.model_dump_json(), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        if not self.server.recv(1):  # the user's file is imported: no episode waits for that
            raise ConfigError(
                "the environments' process ended at its start; see what it wrote above",
            )

    def __call__(self, *_: Json) -> EnvironmentProcess:
        return EnvironmentProcess(self.server)


def serve_environments(make: Maker, server: socket.socket) -> None:
    """Fork a process for each socket that arrives; end with the process that sends them."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    server.sendall(b".")
    while True:
        _, handles, _, _ = socket.recv_fds(server, 1, 1)
        if not handles:
            os.killpg(0, signal.SIGKILL)
        if os.fork() == 0:
            server.close()
            with suppress(OSError):  # whoever had it has let go of it
                play(make, socket.socket(fileno=handles[0]))
            os._exit(0)
        os.close(handles[0])


def play(make: Maker, connection: socket.socket) -> None:
    """Answer the requests of one episode."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    RUNNER.set(asyncio.Runner())
    connection.sendall(b"%d\n" % os.getpid())
    for line in connection.makefile("rb"):
        method, *values = json.loads(line)
        try:
            if method == "reset":
                random.seed(seed := seed_of(*values))
                np.random.seed(seed % 2**32)
                environment = fresh(make, *values)
            answer = {"result": None}
            if hasattr(environment, method):
                answer = {"result": settled(getattr(environment, method)(*values))}
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            answer = {"error": error_words(error)}
        content = json.dumps(answer, default=_plain, ensure_ascii=False)
        connection.sendall(content.encode(errors="replace") + b"\n")


def _plain(value: Foreign) -> JsonValue:
    """Turn a value that JSON cannot write into a number if it is one of an array, else into text."""
    return value.item() if hasattr(value, "item") else str(value)


if __name__ == "__main__":
    os.dup2(2, 1)
    config = EnvironmentConfig.model_validate_json(sys.argv[1])
    serve_environments(maker_of(config), socket.socket(fileno=int(sys.argv[2])))
