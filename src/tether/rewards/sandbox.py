"""A few worker processes for checks that may hang, crash or eat the memory: each is killed by its own id and replaced.

Parent and worker exchange lines of JSON over pipes, nothing pickled. A worker is a fresh interpreter (never a fork of a process
that holds torch and its threads), knows none of the parent's secrets by its environment, and ends when the parent's end of
its pipe closes, however that happens. Time limits inside a library do not do this: they need the main thread and a
cooperative callee, and arithmetic on huge numbers is neither. A worker is under rewards.guard before it sees a request.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import pkgutil
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tether.core.errors import RunError
from tether.rewards.guard import limit, restrict

START_SECONDS = 120.0
"""What a worker may take to import its libraries: minutes on a shared file system that is asked by many at once."""
_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TMPDIR")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Reply:
    """What a check said, or (`failure`) why it could say nothing: `detail` is for people."""

    result: Any = None
    failure: Literal["", "timed out", "died", "failed"] = ""
    detail: str = ""


class Sandbox:
    """Runs `check(**request)` in worker processes, which start when first needed.

    Args:
        target: "module:factory"; every worker calls `factory(**settings)` once, and its result once a request.
        settings: JSON values.
        seconds: the limit of one check, by the clock; then its worker is killed.
        memory_mb: address space of a worker (not limited on macOS, whose kernel has no such limit).
        guarded: False for a check that itself puts what it runs under a guard, in a process of its own (rewards.code).
    """

    def __init__(
        self,
        target: str,
        settings: Mapping[str, Any] | None = None,
        *,
        workers: int,
        seconds: float,
        memory_mb: int,
        guarded: bool = True,
    ) -> None:
        self.num_workers, self.seconds = workers, seconds
        arguments = [target, json.dumps(dict(settings or {})), str(seconds), str(memory_mb), "guarded" if guarded else "open"]
        self._command = [sys.executable, "-B", "-P", "-W", "ignore", "-m", "tether.rewards.sandbox", *arguments]
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers; a later `run` starts new ones."""
        for worker in list(self._workers):
            self._end(worker)

    def run(self, requests: Sequence[Mapping[str, Any]]) -> list[Reply]:
        """One reply a request, in their order.

        Raises:
            RunError: a worker cannot start.
        """
        replies = [Reply()] * len(requests)
        waiting = deque((number, json.dumps(request).encode() + b"\n") for number, request in enumerate(requests))
        try:
            while waiting or self._busy():
                self._staff(len(waiting))
                self._hand_out(waiting)
                self._collect(replies)
        finally:
            for worker in self._busy():
                self._end(worker)  # only after an exception: its reply must not be taken for a later request's
        return replies

    def _busy(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.job is not None]

    def _staff(self, num_waiting: int) -> None:
        """As many workers as there is work for, at most `num_workers`."""
        for _ in range(len(self._workers), min(self.num_workers, num_waiting + len(self._busy()))):
            worker = _Worker(self._command)
            self._workers.append(worker)
            self._selector.register(worker.replies, selectors.EVENT_READ, worker)

    def _hand_out(self, waiting: deque[tuple[int, bytes]]) -> None:
        for worker in [w for w in self._workers if w.ready and w.job is None]:
            if not waiting:
                return
            number, line = waiting.popleft()
            try:
                worker.give(number, line, self.seconds)
            except BrokenPipeError:  # it died while idle: no check's fault
                waiting.appendleft((number, line))
                self._end(worker)

    def _collect(self, replies: list[Reply]) -> None:
        """Wait for the next reply, death or deadline, and take in all that have come."""
        if not self._workers:
            return
        pause = min(worker.deadline for worker in self._workers) - time.monotonic()
        for key, _ in self._selector.select(max(0.0, pause)):
            worker: _Worker = key.data
            line = worker.read()
            if line is None:
                self._lost(worker, replies)
            elif line and worker.job is not None:
                replies[worker.job] = Reply(**json.loads(line))
                worker.rest()
            elif line:
                worker.rest()
        for worker in list(self._workers):
            if worker.deadline > time.monotonic():
                continue
            if worker.job is None:
                raise RunError(f"a checking process did not start within {START_SECONDS:g} s: {' '.join(self._command)}")
            replies[worker.job] = Reply(failure="timed out", detail=f"no verdict within {self.seconds:g} s")
            self._end(worker)

    def _lost(self, worker: _Worker, replies: list[Reply]) -> None:
        job, ready = worker.job, worker.ready
        self._end(worker)
        code = worker.process.returncode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if not ready:
            raise RunError(f"a checking process ended before it was ready ({how}); what it said stands above.")
        if job is not None:
            replies[job] = Reply(failure="died", detail=f"the checking process ended ({how})")

    def _end(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker.replies)
        worker.end()


class _Worker:
    """One process, and the number of the request that it is busy with."""

    def __init__(self, command: Sequence[str]) -> None:
        # Sets and their order depend on the hash seed: with a fixed one a generated task is the same in every process.
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ} | _ONE_THREAD
        environment |= {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0, "start_new_session": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.requests, self.replies = self.process.stdin, self.process.stdout
        self.ready, self.job, self._unread = False, None, b""
        self.deadline = time.monotonic() + START_SECONDS

    def give(self, number: int, line: bytes, seconds: float) -> None:
        view = memoryview(line)
        while view:
            view = view[self.requests.write(view) :]
        self.job, self.deadline = number, time.monotonic() + seconds

    def rest(self) -> None:
        self.ready, self.job, self.deadline = True, None, math.inf

    def read(self) -> bytes | None:
        """A whole line; b"" while it is not whole; None at the end of the worker."""
        chunk = os.read(self.replies.fileno(), 1 << 20)
        if not chunk:
            return None
        self._unread += chunk
        if not self._unread.endswith(b"\n"):
            return b""
        line, self._unread = self._unread, b""
        return line

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it is over, and so is all that it started
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.requests.close()
        self.replies.close()


def main() -> None:
    """The worker: make the check, say so, and answer requests until there are no more."""
    target, settings, seconds, memory_mb = sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    logging.disable()
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints is no reply
    if sys.platform != "darwin":
        limit(resource.RLIMIT_AS, memory_mb << 20, for_good=True)
    check = pkgutil.resolve_name(target)(**settings)
    if sys.argv[5] == "guarded":
        restrict()
    replies.write(b"{}\n")
    for line in sys.stdin.buffer:
        # Nobody is left to kill a hanging check when the parent was killed itself; then the kernel does.
        limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + seconds) + 1)
        reply, alive = _reply(check, json.loads(line))
        replies.write(json.dumps(reply).encode() + b"\n")
        if not alive:
            return


def _reply(check: Callable[..., Any], request: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The reply, and whether this process is fit for another check."""
    try:
        return {"result": check(**request)}, True
    except MemoryError:
        return {"failure": "failed", "detail": "out of memory"}, False
    except Exception as error:  # noqa: BLE001  (any failure of a check is one lost score, whatever it is)
        return {"failure": "failed", "detail": f"{type(error).__name__}: {error}"[:300]}, True


if __name__ == "__main__":
    main()
