"""A reward that the user wrote: whatever it does, raise, hang, return nonsense, the run goes on with what it did score."""

from __future__ import annotations

import importlib
import importlib.util
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import Field

from tether.core.config import Config
from tether.core.errors import ConfigError, MissingFileError, RewardError
from tether.core.protocols import RewardSource
from tether.core.secrets import redact
from tether.core.types import Prompt, Rollout, Score
from tether.core.watchdog import dump_stacks, logger, place

WINDOW = 10
"""Calls over which the share of failures is taken."""

Function = Callable[[Sequence[Prompt], Sequence[str]], Sequence[Any]]
"""(prompts, responses), one prompt a response -> a number, a `Score` or None for each."""


class FunctionConfig(Config):
    """Where the function is, and what a call of it may cost."""

    call: str = Field(description="module:name, or path/to/file.py:name; (prompts, responses) -> a number for each")
    batch: int = Field(default=8, ge=1, description="responses a call; those of a call that fails are left out together")
    time_limit: float = Field(default=60.0, gt=0, description="seconds a call")
    dump_after: float = Field(
        default=30.0, gt=0, description="seconds after which a call's stacks go to stacks.txt of the run; at time_limit if later"
    )


def load_function(call: str) -> Function:
    """The function that a recipe names.

    Raises:
        ConfigError: the name does not lead to something that can be called, or its module cannot be imported.
        MissingFileError: its file does not exist.
    """
    place, _, name = call.rpartition(":")
    if not place or not name:
        raise ConfigError(f"function.call = {call!r} names no function. Write module:name, or path/to/file.py:name")
    try:
        module = _from_file(Path(place).expanduser()) if place.endswith(".py") else importlib.import_module(place)
    except MissingFileError:
        raise
    except Exception as error:  # whatever the user's module does when it is imported
        raise ConfigError(f"function.call = {call!r}: {place} cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"function.call = {call!r}: {place} has no function {name!r}")
    return cast(Function, found)


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise MissingFileError(f"the file of the reward function is not there: {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FunctionReward:
    """Speaks core.protocols.RewardSource. What cannot be used becomes a failed score that names its reason.

    Args:
        dump_after: seconds after which a call's stacks are written down, once a call; the first time it is also said where it is.

    `stacks` is the file for them; it is None, and then nothing is written, until the run sets it.
    """

    name = "function"
    stacks: Path | None = None

    def __init__(self, function: Function, *, batch: int = 8, time_limit: float = 60.0, dump_after: float = 30.0) -> None:
        self.function, self.batch, self.time_limit, self.dump_after = function, batch, time_limit, min(dump_after, time_limit)
        self._said = False

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [
            score for start in range(0, len(rollouts), self.batch) for score in self._call(rollouts[start : start + self.batch])
        ]

    def _call(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """In a thread that is left behind when it hangs: no other thread can end it."""
        answer: list[Any] = []

        def work() -> None:
            try:
                answer.append(self.function([r.prompt for r in rollouts], [r.text for r in rollouts]))
            except BaseException as error:  # noqa: BLE001 - the user's code may raise anything, SystemExit too
                answer.append(error)

        thread = threading.Thread(target=work, daemon=True, name="reward function")
        thread.start()
        thread.join(self.dump_after)
        where = self._hangs(thread) if thread.is_alive() else ""
        thread.join(self.time_limit - self.dump_after)
        if not answer:
            return _failed(rollouts, f"gave no answer within {self.time_limit:g} s" + where)
        if isinstance(answer[0], BaseException):
            return _failed(rollouts, f"raised {type(answer[0]).__name__}: {answer[0]}")
        try:
            values = list(answer[0])
        except TypeError:
            return _failed(rollouts, f"returned a {type(answer[0]).__name__}, not a list of numbers")
        if len(values) != len(rollouts):
            return _failed(rollouts, f"returned {len(values)} scores for {len(rollouts)} responses")
        return [_score(value) for value in values]

    def _hangs(self, thread: threading.Thread) -> str:
        """Where the call is, to the terminal once and with all stacks to the file."""
        code = getattr(self.function, "__code__", None)
        where = f"in {place(thread.ident or 0, code.co_filename if code else None)}"
        message = f"the reward function has taken {self.dump_after:g} s so far, {where}"
        if self.stacks is not None:
            dump_stacks(self.stacks, message)
        if not self._said:
            self._said = True
            logger.warning("%s%s", message, "" if self.stacks is None else f"; all stacks: {self.stacks}")
        return f", it was {where}"


def _failed(rollouts: Sequence[Rollout], reason: str) -> list[Score]:
    return [Score(None, reason=redact(f"the reward function {reason}"))] * len(rollouts)  # an error may quote a server's key


def _score(value: Any) -> Score:
    if value is None:
        return Score(None, reason="the reward function gave no score")
    parts = value if isinstance(value, Score) else Score(value)
    if parts.value is None:
        return parts
    try:
        number = float(parts.value)
    except (TypeError, ValueError):
        return Score(None, reason=f"the reward function returned a {type(parts.value).__name__}, not a number")
    if not math.isfinite(number):
        return Score(None, reason=f"the reward function returned {number}")
    return Score(number, parts.parts, parts.reason, parts.steps)


class FailureLimit:
    """A source that may fail now and then, but not most of the time.

    Args:
        share: of the scores of the last ten calls; beyond it there is nothing left to learn from.
    """

    def __init__(self, source: RewardSource, share: float) -> None:
        self.source, self.share, self.name = source, share, source.name
        self.reasons: Counter[str] = Counter()
        self.recent: deque[tuple[int, int]] = deque(maxlen=WINDOW)

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """The source's scores.

        Raises:
            RewardError: too many of the last ones failed, or the source gave another number of them than it was asked for.
        """
        scores = self.source.score(rollouts)
        if len(scores) != len(rollouts):
            raise RewardError(f"the reward source {self.name!r} gave {len(scores)} scores for {len(rollouts)} responses")
        reasons = [score.reason or "no reason given" for score in scores if score.value is None]
        self.reasons.update(reasons)
        self.recent.append((len(reasons), len(scores)))
        failed, asked = (sum(column) for column in zip(*self.recent, strict=True))
        if reasons and failed > self.share * asked:
            common = "; ".join(f"{reason} ({count} times)" for reason, count in self.reasons.most_common(3))
            raise RewardError(
                f"{failed} of the last {asked} scores failed, more than max_failed = {self.share:g}: {common}. "
                "Mend the reward and start the same command again: it goes on from the last step"
            )
        return scores

    def keep_stacks(self, path: Path) -> None:
        """Where the stacks of calls that hang go, if the source writes them down."""
        if isinstance(self.source, FunctionReward):
            self.source.stacks = path

    def judge(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """Scores that mean the same at every step, for measurements."""
        judge: Callable[[Sequence[Rollout]], list[Score]] = getattr(self.source, "judge", self.score)
        return judge(rollouts)

    def learn(self, scores: Sequence[Score]) -> dict[str, float]:
        """Tell the source what a step of training scored, if it follows that; its metrics."""
        learn: Callable[[Sequence[Score]], dict[str, float]] | None = getattr(self.source, "learn", None)
        return {} if learn is None else learn(scores)

    def state(self) -> dict[str, Any]:
        """What the source's next scores depend on."""
        state: Callable[[], dict[str, Any]] | None = getattr(self.source, "state", None)
        return {} if state is None else state()

    def load_state(self, values: Mapping[str, Any]) -> None:
        if values and callable(load := getattr(self.source, "load_state", None)):
            load(values)

    def close(self) -> None:
        """End what the source keeps open."""
        if callable(close := getattr(self.source, "close", None)):
            close()
