"""Environments of the user, side by side in threads: whatever one does, raise, hang, return
nonsense, the run goes on with the others.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Protocol, TypeVar

from tether.core.errors import STOPS, ConfigError, DataError, error_words
from tether.core.once import once
from tether.core.protocols import Turn
from tether.core.secrets import redact
from tether.core.stopping import in_thread
from tether.core.types import (
    ChatRole,
    Conversation,
    Json,
    JsonValue,
    Message,
    Prompt,
    Rollout,
    Score,
)
from tether.rewards.adapters import Foreign, Maker, fresh, maker_of, takes_task
from tether.rewards.calling import RUNNER, in_time, settled, title_of
from tether.rewards.parts import RewardParts
from tether.rewards.processes import EnvironmentProcesses
from tether.rewards.returned import as_score
from tether.rewards.surroundings import surroundings
from tether.rewards.tools import LONGEST, schemas
from tether.settings.environment import EnvironmentConfig

T = TypeVar("T")
FIRST = 60.0
"""Seconds in which the first environment of a stage must have been made."""
ROLES: tuple[ChatRole, ...] = ("user", "tool", "system")


KEYS = ("role", "content", "tool_calls", "reasoning_content", "name", "tool_call_id", "train")
"""Of an environment's message; none is trained."""
UNUSED = "the key %r of an environment's message is not used; a message has %s"
_LOG = logging.getLogger("tether.rewards")


class UserEnvironment(Protocol):
    """An environment as users write it. Both methods may be coroutines.

    `reset` gets the columns of the task's row, with its messages as `prompt`, and returns the messages
    that the first reply answers, a text for one more user turn, or None for the prompt as it is.
    `step` gets a reply, a message with its `tool_calls` if it has some, and returns messages or a
    text, a reward or None, and whether the episode is over. One that holds something (a connection,
    a process, a window) also has `close`. One that can say what an episode is worth that a limit
    ended has `finish`.
    """

    def reset(self, task: Json) -> JsonValue: ...
    def step(self, message: Json) -> tuple[JsonValue, float | None, bool]: ...


@dataclass(kw_only=True)
class _Player:
    """One episode's environment, with the replies that led to where it is."""

    make: Maker
    prompt: Prompt
    past: list[tuple[Message, Turn]] = field(default_factory=list)
    environment: UserEnvironment | None = None
    opening: Conversation = ()
    runner: asyncio.Runner = field(default_factory=asyncio.Runner)

    def begin(self) -> Conversation:
        """The opening of the episode.

        Raises:
            DataError: an environment that failed had begun otherwise.
        """
        RUNNER.set(self.runner)
        task = {
            **self.prompt.metadata,
            **self.prompt.row,
            "prompt": [message.as_row() for message in self.prompt.messages],
        }
        self.environment = environment = fresh(self.make, task)
        opening = settled(environment.reset(task))
        before = self.prompt.messages if isinstance(opening, str) else ()
        turns = (*before, *messages_of(opening, ("assistant", *ROLES))) or self.prompt.messages
        if self.opening not in ((), turns):
            raise DataError("a fresh environment begins the same task otherwise")
        self.opening = turns
        return turns

    def step(self, reply: Message) -> Turn:
        return turn_of(settled(self._ready().step(reply.as_row())))

    def finish(self) -> float | None:
        """The reward of an episode that a limit ended, if its environment has one."""
        environment = self._ready()
        if not hasattr(environment, "finish"):
            return None
        return finite_reward(settled(environment.finish()))

    def close(self) -> None:
        """Let go of the environment, and of what its coroutines left."""
        RUNNER.set(self.runner)
        environment: Foreign = self.environment
        with closing(self.runner):
            if hasattr(environment, "close"):
                settled(environment.close())

    def _ready(self) -> Foreign:
        """The environment; a fresh one is led to where the one that failed was.

        Raises:
            DataError: it says something else on the way.
        """
        RUNNER.set(self.runner)
        if self.environment is None:
            self.begin()
            assert self.environment is not None
            for reply, answer in self.past:
                if turn_of(settled(self.environment.step(reply.as_row()))) != answer:
                    raise DataError("a fresh environment answers the same replies otherwise")
        return self.environment


@dataclass
class EnvironmentThreads:
    """Has the interface of core.protocols.Environments; each episode's environment works in a
    thread of its own.

    Args:
        make: a fresh environment.
        time_limit: seconds for all of them to answer once.
        retries: how often one that failed is made anew and led to the same place by the same replies.
    """

    make: Maker
    tools: str = ""
    _: KW_ONLY
    time_limit: float = 30.0
    retries: int = 1

    def __post_init__(self) -> None:
        self.source = f"the environment {title_of(self.make)}"
        self.players: dict[int, _Player] = {}
        self.apart = False
        """True within `several`."""

    def begin(self, tasks: Mapping[int, Prompt]) -> dict[int, Conversation | str]:
        self.players = {
            number: _Player(make=self.make, prompt=prompt) for number, prompt in tasks.items()
        }
        return self._tried({number: lambda n=number: self.players[n].begin() for number in tasks})

    def step(self, replies: Mapping[int, Message]) -> dict[int, Turn | str]:
        turns = self._tried(
            {
                number: lambda number=number, reply=reply: self.players[number].step(reply)
                for number, reply in replies.items()
            },
        )
        for number, turn in turns.items():
            if isinstance(turn, Turn):
                self.players[number].past.append((replies[number], turn))
        return turns

    def end(self, cut: Sequence[int] = ()) -> dict[int, float | str | None]:
        rewards = self._tried({number: lambda n=number: self.players[n].finish() for number in cut})
        for player in self.players.values():
            in_thread(player.close)
        self.players = {}
        return rewards

    @contextmanager
    def several(self) -> Iterator[None]:
        with surroundings(self.source):
            self.apart = True
            try:
                yield
            finally:
                self.apart = False

    def _tried(self, calls: Mapping[int, Callable[[], T]]) -> dict[int, T | str]:
        """The results of some calls, or the last reason why one has none."""
        results: dict[int, T | str] = {}
        for _ in range(1 + self.retries):
            left = {n: call for n, call in calls.items() if isinstance(results.get(n, ""), str)}
            for number in left if results else ():
                in_thread(self.players[number].close)
                self._renew(number)
            results |= self._made(left)
        return results

    def _made(self, calls: Mapping[int, Callable[[], T]]) -> dict[int, T | str]:
        """The results of calls, each in a thread that is left behind if it takes too long."""
        with nullcontext() if self.apart else surroundings(self.source):
            futures = {number: in_thread(call, self.source) for number, call in calls.items()}
            wait(futures.values(), self.time_limit)
        for number, future in futures.items():
            player = self.players[number]
            if not future.done() and player.environment is None:  # it is still made
                future.add_done_callback(lambda _, late=player: in_thread(late.close))
                self._renew(number)
        return {number: self._result(future) for number, future in futures.items()}

    def _renew(self, number: int) -> None:
        """Have a fresh environment made at the next call."""
        old = self.players[number]
        self.players[number] = replace(old, environment=None, runner=asyncio.Runner())

    def _result(self, future: Future[T]) -> T | str:
        if not future.done():
            return f"{self.source} gave no answer within {self.time_limit:g} s"
        error = future.exception()
        if error is None:
            return future.result()
        if isinstance(error, STOPS):
            raise error
        return redact(
            str(error)
            if isinstance(error, DataError)
            else f"{self.source} raised {error_words(error)}",
        )


def turn_of(returned: JsonValue) -> Turn:
    """Check the answer that `step` returned.

    Raises:
        DataError: it is not (messages, reward, done), or goes on without a message.
    """
    if not isinstance(returned, tuple | list) or len(returned) != 3:
        raise DataError("step returned no (messages, reward, done)")
    words, reward, done = returned
    turns = messages_of(words)
    if not (done or turns):
        raise DataError("step returned neither a message nor the end of the episode")
    return Turn(turns, finite_reward(reward), bool(done))


def finite_reward(returned: JsonValue) -> float | None:
    """A reward.

    Raises:
        DataError: it is no finite number.
    """
    score = as_score(returned, "the environment")
    if score.value is None and returned is not None:
        raise DataError(score.reason)
    return score.value


def messages_of(rows: JsonValue, roles: Sequence[ChatRole] = ROLES) -> Conversation:
    """Messages as dicts with role and content; a text is a user's turn, None is none.

    Raises:
        DataError: they are something else, or longer than LONGEST characters.
    """
    if isinstance(rows, str):
        rows = {"role": "user", "content": rows}
    rows = [rows] if isinstance(rows, Mapping) else rows or []
    if not isinstance(rows, Sequence) or not all(isinstance(row, Mapping) for row in rows):
        raise DataError(f"an environment's messages are {type(rows).__name__}, not a list of dicts")
    for row in rows:
        for key in sorted(row.keys() - KEYS):
            once(_LOG.warning, UNUSED, key, ", ".join(KEYS))
        if row.get("role") not in roles:
            raise DataError(
                f"an environment's message has the role {row.get('role')!r:.40}, and may have "
                f"{', '.join(roles)}",
            )
    return tuple(
        Message(
            row["role"],
            _clean(row.get("content")),
            tuple(json.dumps(call, ensure_ascii=False) for call in row.get("tool_calls") or ()),
            reasoning=str(row.get("reasoning_content") or ""),
            name=str(row.get("name") or ""),
            tool_call_id=str(row.get("tool_call_id") or ""),
        )
        for row in rows
    )


def _clean(text: JsonValue) -> str:
    """A text that a tokenizer takes.

    Raises:
        DataError: it is none, or longer than LONGEST characters.
    """
    if not isinstance(text, str):
        raise DataError(f"an environment's message has the content {text!r:.40}, which is no text")
    if len(text) > LONGEST:
        raise DataError(
            f"an environment's message has {len(text):,} characters, and may have {LONGEST:,}",
        )
    return text.encode("utf-8", "replace").decode("utf-8")


@dataclass
class EpisodeReward:
    """Implements core.protocols.RewardSource: what the environments gave."""

    parts: RewardParts
    name = "environment"

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        missing = Score(None, reason="the response is no episode of an environment")
        return [rollout.outcome or missing for rollout in rollouts]


def environments_of(config: EnvironmentConfig) -> EnvironmentThreads:
    """The environments that settings name.

    Raises:
        ConfigError: a name leads to nothing that can be called, one cannot be made, or a tool has no
            schema.
    """
    make = maker_of(config)
    try:
        example = make if takes_task(make) else in_time(lambda: fresh(make, {}), FIRST)
    except Exception as error:
        raise ConfigError(
            f"environment: {title_of(make)} cannot be made: {error_words(error)}",
        ) from error
    tools = tuple(example.tools) if hasattr(example, "tools") else ()
    if hasattr(example, "close"):
        in_thread(lambda: settled(example.close()))
    return EnvironmentThreads(
        EnvironmentProcesses(make, config) if config.processes else make,
        schemas(tools) if tools else "",
        time_limit=config.time_limit,
        retries=config.retries,
    )
