"""Servers with a supervising thread each, and work that goes to any server that is able.

If work fails because of the machine (no connection, no answer in time, garbage), another server
gets it. A request that one server refuses would fail on every server. The number of open requests
is bounded: more wait here, and their senders with them.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TypeVar

from tether.core.errors import ModelError, RunError
from tether.core.rundir import append_jsonl
from tether.core.types import Json
from tether.scale.servers.client import CONNECT, EXCHANGES, HttpClient, HttpReply
from tether.scale.servers.fleet import Fleet, Limits, State
from tether.scale.servers.http import TOKEN
from tether.scale.servers.launch import Servers
from tether.settings.workers import ServersConfig

T = TypeVar("T")
CUT_OFF = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}
"""An unreachable host is noticed after 20 s, for every length of an answer. The first three options
probe an idle connection. The last one bounds unacknowledged data, which would otherwise be sent
again for a quarter of an hour.
"""
SHORT = 60.0
"""Seconds that what is quickly done may take."""
PAUSE = 0.05
"""Seconds between two looks at a server that needs nothing."""
REFUSALS = 400, 401, 403, 413, 422
"""The statuses by which a server says that it understands, and does not do it."""
LARGEST = 256 << 20
"""Bytes of an answer; a hundred thousand tokens with their log-probabilities take ten million."""


class RefusedError(Exception):
    """A server's answer that another server would give, too."""


class MissingError(OSError):
    """A server has nothing at a path, or does not hold what a request names (HTTP 404)."""


class ServerPool:
    """Servers and their states, in a log.

    Args:
        folder: for the log of all changes of state, `fleet.jsonl`.
        prepare: (a server's name, "load" or "probe") -> makes the server ready for the fleet, or
            checks that it lives.
        requests: under way at once, at most, for each server.
    """

    def __init__(
        self,
        servers: Servers,
        config: ServersConfig,
        folder: Path,
        prepare: Callable[[str, str], None],
        requests: int,
    ) -> None:
        self.servers = servers
        self.config = config
        self.folder = folder
        self.prepare = prepare
        # a thread writes there while a user's function may be in another working directory
        self.log = folder.absolute() / "fleet.jsonl"
        limits = Limits(start_seconds=config.start_seconds, restarts=config.restarts)
        self.fleet = Fleet(servers.names, time.monotonic, limits)
        self.changed = threading.Condition()
        self.told = 0
        self.fault = ""
        self.closed = False
        options = [
            (socket.IPPROTO_TCP, getattr(socket, option), much)
            for option, much in CUT_OFF.items()
            if hasattr(socket, option)
        ]
        options.append((socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1))
        self.client = HttpClient(
            {"Authorization": f"Bearer {servers.token}"},
            LARGEST,
            options,
        )
        self.senders = ThreadPoolExecutor(requests * len(servers.names))
        self.keepers = [
            threading.Thread(target=self._tend, args=(name,), daemon=True) for name in servers.names
        ]

    def start(self, first: Callable[[], None]) -> None:
        """Begin to look after the servers, and do what comes first with them; whatever ends that
        ends the servers, too.
        """
        for keeper in self.keepers:
            keeper.start()
        try:
            first()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the servers that were started for it."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self.senders.shutdown(wait=False, cancel_futures=True)
        self.servers.launcher.close()
        self.client.close()
        for keeper in self.keepers:
            keeper.join(1.0)

    def want(self, version: str) -> None:
        """Wait until every server that lives holds this version.

        Raises:
            ModelError: a server refuses it.
            RunError: no server is left.
        """
        with self.changed:
            self.fleet.want(version)
            self.changed.notify_all()
            self._wait(
                f"a server to hold {version}",
                lambda: self.fleet.at(State.HEALTHY) and not self.fleet.loading(),
            )

    def _wait(self, what: str, until: Callable[[], object]) -> None:
        """Wait for a change of the fleet, which is locked; bounded, for within its limits each
        server is healthy or given up.

        Raises:
            ModelError: a server refuses what others would refuse, too.
            RunError: no server is left, or nothing has happened for too long.
        """
        start = time.monotonic()
        limit = 2 * (self.config.start_seconds + self.config.request_seconds)
        while self.fault or not until():
            states = ", ".join(
                f"{name} {member.state.value}" for name, member in self.fleet.members.items()
            )
            if self.fault:
                raise ModelError(self.fault)
            if self.closed or not self.fleet.at(*set(State) - {State.RETIRED}):
                last = "; ".join(f"{c.server}: {c.why}" for c in self.fleet.changes[-2:])
                raise RunError(
                    f"no server is left ({last}). Their logs are in {self.folder}; the "
                    "same command goes on.",
                )
            if time.monotonic() - start > limit:
                raise RunError(
                    f"waited {limit:.0f} s for {what} ({states}). The logs are in {self.folder}.",
                )
            self.changed.wait(1.0)

    # Servers: one thread looks after each.

    def _tend(self, name: str) -> None:
        changed = self.changed
        servers = self.servers
        while not self.closed:
            with changed:
                member = self.fleet.members[name]
                wanted = self.fleet.wanted
                if (status := servers.launcher.ended(name)) is not None and member.state not in (
                    State.DEAD,
                    State.RETIRED,
                ):
                    why = f"its process ended with status {status}: {servers.last_words(name)}"
                    # of its own accord, and would again; a signal comes from outside
                    if not member.lived and status >= 0:
                        self.fault = f"{name} does not start, {why}. Its log is in {self.folder}"
                    self.fleet.exited(name, why)
                task = self.fleet.due(name)
                if not task and member.state is State.RESTARTING:
                    task = "ask" if name in servers.addresses else "restart"
                self._tell()
                if not task:
                    changed.wait(PAUSE)
                    continue
            try:
                self._do(name, task, wanted)
            except RefusedError as error:
                if wanted == self.fleet.wanted:  # or what it was about has been replaced meanwhile
                    self.fault = f"{name} ({servers.addresses[name]}): {error}"
            except EXCHANGES as error:
                if task != "ask":
                    with changed:
                        self.fleet.failed(name, f"{task}: {type(error).__name__}: {error}")
                time.sleep(PAUSE)
            except Exception as error:  # noqa: BLE001  (ours: the run ends with it, and does not wait for this thread)
                self.fault = f"{name}, {task}: {type(error).__name__}: {error}"
            with changed:
                self._tell()

    def _do(self, name: str, task: str, wanted: str) -> None:
        """One thing that a server needs, for this version."""
        if task == "restart":
            self.servers.start(name)
            return
        # one that is at work answers this at once, one that hangs does not
        self.get(name, "/health")
        if task in ("load", "probe"):
            self.prepare(name, task)
        with self.changed:
            self.fleet.started(name) if task == "ask" else self.fleet.answered(name)
            if task == "load":
                self.fleet.loaded(name, wanted)

    def _tell(self) -> None:
        """Write new changes of state down, and wake who waits; the fleet is locked."""
        if new := self.fleet.changes[self.told :]:
            append_jsonl(self.log, [{"time": time.time(), **asdict(change)} for change in new])
            self.told += len(new)
            self.changed.notify_all()

    # Exchanges.

    def give(
        self,
        work: Callable[[str], T],
        prompt: Sequence[int] = (),
        tries: int | None = None,
    ) -> T:
        """The result of `work(name)` with the name of a healthy server. If the machine makes it
        fail, another server's.

        Args:
            prompt: goes to a server that knows its beginning, if this one is not much fuller than
                others.
            tries: servers that may fail with it, one after another; unset: any number.

        Raises:
            RefusedError: a server refuses it.
            RunError: no server is left.
            OSError: it was tried so often.
        """
        fleet = self.fleet
        avoid: list[str] = []
        while True:
            with self.changed:
                self._wait("a server that is able", lambda: fleet.at(State.HEALTHY))
                name = fleet.pick(prompt, avoid)
                wanted = fleet.wanted
                assert name is not None
                fleet.use(name, 1)
            report = fleet.answered
            try:
                return work(name)
            except EXCHANGES as error:
                why = f"{type(error).__name__}: {error}"
                report = (
                    partial(fleet.emptied, why=f"it has no {wanted}")
                    if isinstance(error, MissingError)
                    else partial(fleet.failed, why=why)
                )
                avoid.append(name)
                if len(avoid) == tries:
                    raise OSError(f"{tries} servers failed with it, the last: {why}") from error
            finally:
                with self.changed:
                    fleet.use(name, -1)
                    report(name)
                    self._tell()

    def get(self, name: str, path: str) -> bytes:
        """The answer of a server at a path."""
        return _checked(self.client.ask("GET", self.servers.addresses[name] + path, CONNECT))

    def post(self, name: str, path: str, body: Json | bytes, *, quick: bool = False) -> bytes:
        """A server's answer; `quick`: it must come within SHORT seconds, unless the server is at
        work.

        Raises:
            RefusedError: it understands, and does not do it.
        """
        limit = self.config.request_seconds
        if quick and not self.fleet.members[name].inflight:
            limit = min(limit, SHORT)
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        url = self.servers.addresses[name] + path
        return _checked(self.client.ask("POST", url, limit, body))


def _checked(answer: HttpReply) -> bytes:
    """The content of an answer.

    Raises:
        RefusedError, MissingError, OSError: it is none, with the reason in the server's words.
    """
    status = answer.status
    if status == 401:
        raise RefusedError(
            f"it asks for a token that this run has not: set {TOKEN} to the one that the "
            "server was started with",
        )
    if status in REFUSALS:
        raise RefusedError(answer.words or f"HTTP {status}")
    if status == 404:
        raise MissingError(answer.words)
    if not 200 <= status < 300:
        raise OSError(f"HTTP {status}: {answer.words}")
    return answer.content
