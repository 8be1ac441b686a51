"""A few worker processes for checks that may hang, crash or eat the memory: each is killed by its
own id and replaced.

Parent and worker exchange lines of JSON over pipes, nothing pickled. A worker is a fresh
interpreter, never a fork of a process that holds torch and its threads. Its environment has none of
the parent's secrets. It ends when the parent's end of its pipe closes, for any reason. Time limits
inside a library do not do this: they need the main thread and a cooperative callee, and arithmetic
on huge numbers is neither. A worker is under rewards.guard before it sees a request.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import pkgutil
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import LifoQueue
from typing import Literal

from pydantic import TypeAdapter

from tether.core.errors import RunError
from tether.core.received import received
from tether.core.types import Facts, Json, JsonValue
from tether.rewards.guard import OPEN_FILES, end_first, limit, restrict

START_SECONDS = 120.0
"""Time limit for a worker to import its libraries. The import takes minutes on a shared file system
under load.
"""
OUT_OF_MEMORY = "out of memory"
_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TMPDIR")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check, or (`failure`) why there is none: `detail` is for people."""

    result: JsonValue = None
    failure: Literal["", "timed out", "died", "failed"] = ""
    detail: str = ""


_RESULT = TypeAdapter(CheckResult)


class Sandbox(contextlib.AbstractContextManager["Sandbox"]):
    """Runs `check(**request)` in worker processes, which start when first needed.

    Args:
        target: "module:factory"; every worker calls `factory(**settings)` once, and its result once
            a request.
        settings: JSON values.
        seconds: the limit of one check, by the clock; then its worker is killed.
        memory_mb: address space of a worker (not limited on macOS, whose kernel has no such limit).
        guarded: False for a check that itself puts what it runs under a guard, in a process of its
            own (rewards.code).
    """

    def __init__(
        self,
        target: str,
        settings: Facts | None = None,
        *,
        workers: int,
        seconds: float,
        memory_mb: int,
        guarded: bool = True,
    ) -> None:
        self.seconds = seconds
        arguments = [
            target,
            json.dumps(dict(settings or {})),
            str(seconds),
            str(memory_mb),
            "guarded" if guarded else "open",
        ]
        command = [
            sys.executable,
            "-B",
            "-P",
            "-W",
            "ignore",
            "-m",
            "tether.rewards.sandbox",
            *arguments,
        ]
        self._workers = [_Worker(command) for _ in range(workers)]

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers; a later `run` starts new ones."""
        for worker in self._workers:
            worker.end()

    def run(self, requests: Sequence[Facts]) -> list[CheckResult]:
        """One reply a request, in their order.

        Raises:
            RunError: a worker cannot start.
        """
        idle: LifoQueue[_Worker] = LifoQueue()
        for worker in self._workers:
            idle.put(worker)

        def ask(line: bytes) -> CheckResult:
            worker = idle.get()
            try:
                return worker.ask(line, self.seconds)
            finally:
                idle.put(worker)

        with ThreadPoolExecutor(len(self._workers)) as threads:
            try:
                return list(
                    threads.map(
                        ask,
                        [json.dumps(request).encode() + b"\n" for request in requests],
                    ),
                )
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                for worker in self._workers:
                    worker.kill()  # else its thread would wait for the end of its check
                threads.shutdown()
                self.close()
                raise


class _Worker:
    """One process at a time, which answers one request at a time; the first request starts it."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = command
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, line: bytes, seconds: float) -> CheckResult:
        """The reply to a request.

        Raises:
            RunError: no process can start.
        """
        process = self.process or self._start()
        while not _sent(process, line):
            self.end()  # it died while idle: no check's fault
            process = self._start()
        reply = self._reply(process, seconds)
        if reply.detail == OUT_OF_MEMORY:
            self.end()
        return reply

    def _start(self) -> subprocess.Popen[bytes]:
        # Sets and their order depend on the hash seed: with a fixed one a generated task is the
        # same in every process.
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ} | _ONE_THREAD
        environment |= {
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }
        self.process = process = subprocess.Popen(
            self.command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        greeting = self._reply(process, START_SECONDS)
        if greeting.failure:
            how = f"{greeting.failure} before it was ready ({greeting.detail})"
            raise RunError(f"a checking process {how}; what it said stands above.")
        return process

    def _reply(self, process: subprocess.Popen[bytes], seconds: float) -> CheckResult:
        """The next line; without one in time, or at all, the process is ended."""
        assert process.stdout is not None
        readable = select.poll()
        text = b""
        deadline = time.monotonic() + seconds
        readable.register(process.stdout, select.POLLIN)
        while not text.endswith(b"\n"):
            if not readable.poll(1000 * max(0.0, deadline - time.monotonic())):
                self.end()
                return CheckResult(failure="timed out", detail=f"no verdict within {seconds:g} s")
            if not (chunk := os.read(process.stdout.fileno(), 1 << 20)):
                self.end()
                return CheckResult(
                    failure="died",
                    detail=f"the checking process ended ({ending(process.returncode)})",
                )
            text += chunk
        try:
            return received(text, _RESULT)
        except ValueError as error:
            return CheckResult(failure="failed", detail=f"its reply cannot be read: {error}")

    def kill(self) -> None:
        """End the process and all that it started; its thread closes the rest."""
        if self.process is not None:
            # it is over, and so is all that it started
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        if self.process is not None:
            with self.process:  # closes its pipes, and waits for it
                self.process = None


def _sent(process: subprocess.Popen[bytes], line: bytes) -> bool:
    """Hand over a request; False if the process is gone."""
    assert process.stdin is not None
    try:
        write_all(process.stdin.fileno(), line)
    except BrokenPipeError:
        return False
    return True


def write_all(pipe: int, text: bytes) -> None:
    """Write to a pipe until nothing is left."""
    view = memoryview(text)
    while view:
        view = view[os.write(pipe, view) :]


def ending(code: int) -> str:
    """The end of a process in words, by its exit code."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _main() -> None:
    """The worker: make the check, say so, and answer requests until there are no more."""
    target = sys.argv[1]
    settings = json.loads(sys.argv[2])
    seconds = float(sys.argv[3])
    memory_mb = int(sys.argv[4])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    logging.disable()
    end_first()
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints is no reply
    if sys.platform != "darwin":
        limit(resource.RLIMIT_AS, memory_mb << 20, for_good=True)
    check = pkgutil.resolve_name(target)(**settings)
    if sys.argv[5] == "guarded":
        limit(resource.RLIMIT_NOFILE, OPEN_FILES, for_good=True)
        restrict()
    replies.write(b"{}\n")
    for line in sys.stdin.buffer:
        # Nobody is left to kill a hanging check when the parent was killed itself; then the kernel
        # does.
        limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + seconds) + 1)
        reply, alive = _reply(check, json.loads(line))
        replies.write(json.dumps(reply).encode() + b"\n")
        if not alive:
            return


def _reply(check: Callable[..., object], request: Json) -> tuple[Json, bool]:
    """The reply, and whether this process is fit for another check."""
    try:
        return {"result": check(**request)}, True
    except MemoryError:
        return {"failure": "failed", "detail": OUT_OF_MEMORY}, False
    except Exception as error:  # noqa: BLE001  (any failure of a check is one lost score, whatever it is)
        return {"failure": "failed", "detail": f"{type(error).__name__}: {error}"[:300]}, True


if __name__ == "__main__":
    _main()
