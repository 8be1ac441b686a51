"""The state of every server of a run, as a machine without threads, sockets or its own clock.

The caller reports events (`answered`, `failed`, `exited`, `started`, `loaded`) and requests the
next action (`pick`, `due`). A server that died holds no adapter. So it comes back as STALE and
samples only when it has the wanted version:

    HEALTHY --failed--> SUSPECT --failed often, or too long--> DEAD --due--> RESTARTING --started-->
    STALE --loaded--> HEALTHY SUSPECT --answered--> HEALTHY     HEALTHY --a new version is wanted-->
    STALE     DEAD --restarted too often--> RETIRED any but RETIRED --its process has ended--> DEAD
    RESTARTING --not started in time--> DEAD
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum

BLOCK = 16
"""Tokens of one block of a prefix, as vLLM's cache keeps them."""
REMEMBERED = 4096
"""Blocks of prefixes that the router knows of a server, and times of work."""


class State(Enum):
    """State of a server: HEALTHY samples; SUSPECT is probed; DEAD waits for its restart; RETIRED
    gets no further restart.
    """

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DEAD = "dead"
    RESTARTING = "restarting"
    STALE = "stale"
    RETIRED = "retired"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits after which a server counts as dead or is retired; seconds by the fleet's clock."""

    failures: int = 3
    suspect_seconds: float = 10.0
    quiet: float = 10.0
    """Without an answer, while requests are under way; then a server is asked whether it lives."""
    start_seconds: float = 300.0
    restarts: int = 5
    """Within `window`."""
    window: float = 600.0
    backoff: float = 0.5
    """Before a restart after one that came to nothing; twice as long for each of them."""
    spill: int = 8
    """Requests by which the server that knows a prompt's prefix may be fuller than the emptiest."""


Span = tuple[float, float]
"""From when to when."""


@dataclass
class ServerState:
    """A server: its state, since when, what it holds and does."""

    name: str
    since: float
    _: KW_ONLY
    state: State = State.RESTARTING
    lived: bool = False
    """True once the server has answered."""
    version: str = ""
    failures: int = 0
    inflight: int = 0
    most: int = 0
    """Requests at once, at most, since `usage` was asked."""
    began: float = 0.0
    """Time of the last request that found the server idle."""
    heard: float = 0.0
    """Time of the last answer."""
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """Spans of work since the last call of `usage`. Only the last spans are stored, for `usage` may
    never be called.
    """
    fault: str = ""
    """The last reason for which it could not be started."""
    tries: int = 0
    """Restarts since it last sampled."""
    restarts: list[float] = field(default_factory=list)
    prefixes: dict[int, None] = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """One line of the fleet's log."""

    at: float
    server: str
    before: str
    after: str
    _: KW_ONLY
    why: str


class Fleet:
    """Servers by name, the version that is wanted, and every change of state in `changes`."""

    def __init__(
        self,
        names: Iterable[str],
        clock: Callable[[], float],
        limits: Limits | None = None,
    ) -> None:
        self.clock = clock
        self.limits = limits or Limits()
        self.members = {name: ServerState(name, clock()) for name in names}
        self.wanted = ""
        self.counted = clock()
        self.changes: list[Change] = []

    def _move(self, name: str, state: State, why: str) -> None:
        member = self.members[name]
        if member.state not in (state, State.RETIRED):
            self.changes.append(
                Change(self.clock(), name, member.state.value, state.value, why=why),
            )
            member.state = state
            member.since = self.clock()

    def want(self, version: str) -> None:
        """From now on only servers that hold this version sample."""
        self.wanted = version
        for name in self.at(State.HEALTHY, State.SUSPECT):
            if self.members[name].version != version:
                self._move(name, State.STALE, f"{version} is wanted")

    def use(self, name: str, requests: int) -> None:
        """So many requests more, or with a minus fewer, are under way at a server."""
        member = self.members[name]
        before = self.members[name].inflight
        member.inflight += requests
        if not before:
            member.began = self.clock()
        elif not member.inflight:
            member.spans.append((member.began, self.clock()))
        member.most = max(member.most, member.inflight)

    def usage(self) -> tuple[dict[str, float], dict[str, list[Span]]]:
        """Since the last call: what servers did, as metrics, and when each of them had work, in
        seconds after now (below zero).

        `engine/busy` is the share of the time with work, the servers' mean; `engine/queue` the most
        requests at one of them.
        """
        now = self.clock()
        since = self.counted
        work = dict[str, list[Span]]()
        queue = max(member.most for member in self.members.values())
        for name, member in self.members.items():
            spans = member.spans
            if member.inflight:
                spans.append((member.began, now))
            work[name] = [(max(start, since) - now, end - now) for start, end in spans]
            member.most = member.inflight
            spans.clear()
        seconds = sum(end - start for spans in work.values() for start, end in spans)
        self.counted = now
        return {
            "engine/busy": seconds / len(work) / max(now - since, 1e-9),
            "engine/queue": float(queue),
        }, work

    def answered(self, name: str) -> None:
        """A request came back whole."""
        self.members[name].failures = 0
        self.members[name].heard = self.clock()
        if self.members[name].state is State.SUSPECT:
            self._move(name, State.HEALTHY, "answered")

    def failed(self, name: str, why: str) -> None:
        """A request was lost: no connection, no answer in time, garbage."""
        member = self.members[name]
        if member.state is State.RESTARTING:
            member.fault = why
            return
        member.failures += 1
        if member.state is State.HEALTHY:
            self._move(name, State.SUSPECT, why)
        if member.state in (State.SUSPECT, State.STALE) and member.failures >= self.limits.failures:
            self.exited(name, f"{member.failures} failures, the last: {why}")

    def exited(self, name: str, why: str) -> None:
        """Its process has ended, or nothing more is expected of it."""
        self.members[name].version = ""
        self.members[name].failures = 0
        self.members[name].prefixes.clear()
        self._move(name, State.DEAD, why)

    def started(self, name: str) -> None:
        """It answers, and holds no adapter yet."""
        if self.members[name].state is State.RESTARTING:
            self.members[name].lived = True
            self.members[name].fault = ""
            self._move(name, State.STALE, "started")

    def loaded(self, name: str, version: str) -> None:
        """It holds this version, and a probe has shown that it samples with it."""
        member = self.members[name]
        if member.state in (State.STALE, State.HEALTHY, State.SUSPECT):
            member.version = version
            member.failures = 0
            member.tries = 0
            self._move(
                name,
                State.HEALTHY if version == self.wanted else State.STALE,
                f"holds {version}",
            )

    def emptied(self, name: str, why: str) -> None:
        """The server does not have the wanted version: it was restarted, or it dropped the version."""
        self.members[name].version = ""
        if self.members[name].state in (State.HEALTHY, State.SUSPECT):
            self._move(name, State.STALE, why)

    def at(self, *states: State) -> list[str]:
        return [name for name, member in self.members.items() if member.state in states]

    def loading(self) -> list[str]:
        """Those that will soon hold the wanted version; one that has failed may be cut off: it
        loads without being waited for.
        """
        return [name for name in self.at(State.STALE) if not self.members[name].failures]

    def due(self, name: str) -> str:
        """The next action on a server: "probe", "look", "load", "restart" or nothing. Servers that
        exceed a time limit are declared dead here.
        """
        now = self.clock()
        limits = self.limits
        member = self.members[name]
        waited = now - member.since
        if member.state is State.SUSPECT and waited > limits.suspect_seconds:
            self.exited(name, f"no whole answer for {limits.suspect_seconds:g} s")
        elif member.state is State.RESTARTING and waited > limits.start_seconds:
            last = f", the last: {member.fault}" if member.fault else ""
            self.exited(name, f"not started after {limits.start_seconds:g} s{last}")
        if member.state is State.DEAD:
            member.restarts = [at for at in member.restarts if now - at < limits.window]
            if len(member.restarts) >= limits.restarts:
                self._move(
                    name,
                    State.RETIRED,
                    f"restarted {limits.restarts} times in {limits.window:g} s",
                )
            elif now - member.since >= (limits.backoff * 2**member.tries if member.tries else 0):
                member.tries += 1
                member.restarts.append(now)
                self._move(name, State.RESTARTING, "dead")
                return "restart"
        if (
            member.state is State.HEALTHY
            and member.inflight
            and now - max(member.heard, member.began) > limits.quiet
        ):
            return "look"
        return {State.SUSPECT: "probe", State.STALE: "load" if self.wanted else ""}.get(
            member.state,
            "",
        )

    def pick(self, prompt: Sequence[int], avoid: Iterable[str] = ()) -> str | None:
        """The server for a prompt: who knows most of its beginning, unless that one is much fuller
        than the emptiest.

        None while none is healthy. `avoid` are those that have failed this request; they are taken
        where there is no other.
        """
        able = self.at(State.HEALTHY)
        able = [name for name in able if name not in avoid] or able
        if not able:
            return None
        blocks = list(_blocks(self.wanted, prompt))
        least = min(self.members[name].inflight for name in able)

        def rank(name: str) -> tuple[int, int, str]:
            member = self.members[name]
            shared = sum(block in member.prefixes for block in blocks)
            return (
                -shared if member.inflight <= least + self.limits.spill else 1,
                member.inflight,
                name,
            )

        chosen = self.members[min(able, key=rank)]
        chosen.prefixes.update(dict.fromkeys(blocks))
        while len(chosen.prefixes) > REMEMBERED:
            del chosen.prefixes[next(iter(chosen.prefixes))]
        return chosen.name


def _blocks(version: str, prompt: Sequence[int]) -> Iterator[int]:
    """A hash of each whole block with all before it; another adapter computes other keys and
    values.
    """
    key = hash(version)
    for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
        key = hash((key, *prompt[start : start + BLOCK]))
        yield key
