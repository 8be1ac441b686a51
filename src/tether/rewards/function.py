"""A reward that the user wrote: whatever it does, raise, hang, return nonsense, the run goes on with what it did score.

Functions come in the forms in which people write them: tether's, TRL's, as coroutines. TRL's form
(https://huggingface.co/docs/trl/grpo_trainer#using-a-custom-reward-function) is called by keyword:
`f(prompts=..., completions=..., **columns)`, with the other columns of the data as lists.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import hashlib
import importlib
import importlib.util
import inspect
import logging
import textwrap
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, Literal

from pydantic import Field

from tether.core.config import Config
from tether.core.errors import ConfigError, MissingFileError, RewardError
from tether.core.once import once
from tether.core.protocols import AdaptiveReward, RewardSource, Stateful
from tether.core.secrets import redact
from tether.core.types import Json, Prompt, Rollout, Score
from tether.core.watchdog import Watchdog
from tether.rewards.returned import scores_of, whole_groups

Function = Callable[[Sequence[Prompt], Sequence[str]], Sequence[Any]]
"""(prompts, responses), one prompt a response -> a number, a `Score` or None for each."""
Shape = Literal["texts", "messages"]
TAKEN = (
    "Your rows have a column %s, which is not passed: that argument of a reward function in TRL's form has another content. "
    "Rename the column, or read prompt.row[%r] in a function (prompts, responses)."
)
GIVEN = "python:"
"""What the name of a function begins with that a program handed over."""
_GIVEN: dict[str, Callable[..., Any]] = {}
_LOG = logging.getLogger("tether.rewards")


def register(function: Callable[..., Any]) -> str:
    """The name by which a recipe of this process knows a function; its digest keeps a run from going on with another."""
    name = f"{GIVEN}{_title(function)}@{_digest(function)}"
    _GIVEN[name] = function
    return name


def _title(function: Callable[..., Any]) -> str:
    inner = function.func if isinstance(function, functools.partial) else function
    return (inner if inspect.isroutine(inner) else type(inner)).__qualname__.replace("<locals>.", "")


def _digest(function: Any) -> str:
    """A short hash of what a function does: its code without comments and layout, and the plain values that it closes over."""
    if isinstance(function, functools.partial):
        return _hash(_digest(function.func), repr(function.args), repr(sorted(function.keywords.items())))
    code = function if inspect.isroutine(function) else type(function)
    state = vars(function) if not inspect.isroutine(function) else {}
    if inspect.isfunction(function):
        state = inspect.getclosurevars(function).nonlocals
    plain = {k: v for k, v in state.items() if isinstance(v, str | int | float | tuple | None)}
    try:
        words = ast.dump(ast.parse(textwrap.dedent(inspect.getsource(code))))
    except (OSError, TypeError, SyntaxError, IndentationError):  # typed into a prompt, built in, or a lambda amid a call
        compiled = code.__code__ if inspect.isfunction(code) else None
        words = repr(code) if compiled is None else repr((compiled.co_code, compiled.co_names, compiled.co_consts))
    return _hash(words, repr(sorted(plain.items())))


def _hash(*words: str) -> str:
    """Runs are held to it: it must stay as it is."""
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:12]


def plain(function: Callable[..., Any], completions: Shape = "texts") -> Function:
    """A function in any of the forms as (prompts, responses) -> values.

    Args:
        completions: what a function in TRL's form gets: texts, or lists of messages, as TRL has it for conversations.
    """
    parameters = _parameters(function)
    by_keyword = "completions" in parameters

    def score(prompts: Sequence[Prompt], responses: Sequence[str]) -> Sequence[Any]:
        values = function(**_columns(prompts, responses, completions, parameters)) if by_keyword else function(prompts, responses)
        return asyncio.run(_awaited(values)) if inspect.isawaitable(values) else values

    return functools.wraps(function)(score) if by_keyword or inspect.iscoroutinefunction(function) else function


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # built in
        return {}


def _columns(
    prompts: Sequence[Prompt], responses: Sequence[str], shape: Shape, parameters: Mapping[str, inspect.Parameter]
) -> dict[str, Sequence[Any]]:
    """The arguments that TRL would give, and of these what the function takes."""
    texts: Sequence[Any] = responses
    questions: list[Any] = [prompt.text for prompt in prompts]
    if shape == "messages":
        texts = [[{"role": "assistant", "content": response}] for response in responses]
        questions = [[turn.as_row() for turn in prompt.messages] for prompt in prompts]
    rows = [{**prompt.metadata, **prompt.row} for prompt in prompts]
    names = dict.fromkeys(name for row in rows for name in row)
    given = {name: [row.get(name) for row in rows] for name in names}
    for name in given.keys() & {"prompts", "completions"}:
        once(_LOG.warning, TAKEN, name, name)
    given |= {"prompts": questions, "completions": texts}
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        taken = given
    else:
        taken = {name: values for name, values in given.items() if name in parameters}
    _check_needed(parameters, given)
    return taken


def _check_needed(parameters: Mapping[str, inspect.Parameter], given: Mapping[str, Any]) -> None:
    """Refuse a call without an argument that the function needs.

    Raises:
        RewardError: no column has its name.
    """
    ignored = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = (name for name, p in parameters.items() if p.default is inspect.Parameter.empty and p.kind not in ignored)
    if missing := [name for name in needed if name not in given]:
        raise RewardError(
            f"it needs {missing[0]!r}, and the rows have no such column; they have: {', '.join(sorted(given))}. "
            "Rename the argument, or give it a default value"
        )


async def _awaited(values: Awaitable[Any]) -> Any:
    return await values


WINDOW = 10
"""Batches of answers, of a step or of a measurement, over which the share of failures is taken."""


class FunctionConfig(Config):
    """The function's place, and the limits of a call."""

    call: str | tuple[str, ...] = Field(
        description="module:name, or path/to/file.py:name; (prompts, responses) -> a number for each; several are added up"
    )
    weights: tuple[float, ...] | None = Field(default=None, description="of several functions; unset: 1 each")
    completions: Shape = Field(
        default="texts", description="what a function in TRL's form gets: texts, or lists of messages as of its conversations"
    )
    batch: int = Field(
        default=8,
        ge=1,
        description="responses a call, or all answers to a prompt if these are more; those of a call that fails are left out",
    )
    time_limit: float = Field(default=60.0, gt=0, description="seconds a call")
    dump_after: float = Field(
        default=30.0, gt=0, description="seconds after which a call's stacks go to stacks.txt of the run; at time_limit if later"
    )

    @property
    def calls(self) -> tuple[str, ...]:
        """The names of all functions."""
        return (self.call,) if isinstance(self.call, str) else self.call

    def faults(self) -> Iterator[str]:
        if not self.calls:
            yield "call names no function"
        if self.weights is not None and len(self.weights) != len(self.calls):
            yield f"weights has {len(self.weights)} numbers for {len(self.calls)} functions"


def load_function(call: str, completions: Shape = "texts") -> Function:
    """The function that a recipe names, whatever form it is written in, as (prompts, responses) -> values.

    Raises:
        ConfigError: the name does not lead to something that can be called, or its module cannot be imported.
        MissingFileError: its file does not exist.
    """
    if call.startswith(GIVEN):
        if call not in _GIVEN:
            raise ConfigError(f"function.call = {call!r} was handed over by a Python program: run that program again to go on")
        return plain(_GIVEN[call], completions)
    place, _, name = call.rpartition(":")
    if not place or not name:
        raise ConfigError(f"function.call = {call!r} names no function. Write module:name, or path/to/file.py:name")
    path = Path(place).expanduser() if place.endswith(".py") else None
    if path is not None and not path.is_file():
        raise MissingFileError(f"the file of the reward function is not there: {path}")
    try:
        module = importlib.import_module(place) if path is None else _module(path.resolve(), path.stat().st_mtime_ns)
    except Exception as error:  # whatever the user's module does when it is imported
        raise ConfigError(f"function.call = {call!r}: {place} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"function.call = {call!r}: {place} has no function {name!r}")
    return plain(function, completions)


def reward_function(config: FunctionConfig) -> Function:
    """The function of a recipe; of several their weighted sum, with each as a part.

    A response to which one of several gives None is scored by the others, as TRL has it; it fails where none gives a number.
    """
    functions = {call: load_function(call, config.completions) for call in config.calls}
    if isinstance(config.call, str):
        return functions[config.call]
    weights = dict(zip(config.calls, config.weights or (1.0,) * len(config.calls), strict=True))

    def together(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Score]:
        columns = {call: scores_by(f, f"the reward function {call}", prompts, responses) for call, f in functions.items()}
        return [_sum({call: scores[i] for call, scores in columns.items()}, weights) for i in range(len(responses))]

    return together


def scores_by(function: Function, source: str, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Score]:
    """What a function says of all responses, one score each.

    Raises:
        RewardError: it gives no list, or another number of scores.
    """
    return scores_of(function(prompts, responses), len(responses), source)


def _sum(scores: Mapping[str, Score], weights: Mapping[str, float]) -> Score:
    numbers = {call: score.value for call, score in scores.items() if score.value is not None}
    if not numbers:
        return Score(None, reason="; ".join(dict.fromkeys(score.reason for score in scores.values())))
    parts = {call.partition("@")[0].rpartition(":")[2]: value for call, value in numbers.items()}
    return Score(sum(weights[call] * value for call, value in numbers.items()), parts)


@functools.cache
def _module(path: Path, modified: int) -> Any:
    """The module in a file, executed again where the file has changed since."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FunctionReward:
    """Speaks core.protocols.RewardSource. What cannot be used becomes a failed score that names its reason.

    Args:
        dump_after: seconds after which a call's stacks are written down, once a call; the first time it is also said where it is.

    The stacks go to the file of its `watchdog`; nothing is written until the run names one.
    """

    name = "function"

    def __init__(self, function: Function, *, batch: int = 8, time_limit: float = 60.0, dump_after: float = 30.0) -> None:
        self.function, self.batch, self.time_limit, self.dump_after = function, batch, time_limit, min(dump_after, time_limit)
        self.watchdog = Watchdog(None)

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """A score for each; the answers to one prompt are in one call, whatever `batch` is."""
        return [score for part in whole_groups(rollouts, self.batch) for score in self._call(part)]

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
            return scores_of(answer[0], len(rollouts))
        except RewardError as error:
            return _failed(rollouts, str(error).removeprefix("the reward function "))

    def _hangs(self, thread: threading.Thread) -> str:
        """Report where the call is."""
        file = self.function.__code__.co_filename if isinstance(self.function, FunctionType | MethodType) else None
        return f", it was in {self.watchdog.late('the reward function', self.dump_after, thread.ident or 0, file)}"


def _failed(rollouts: Sequence[Rollout], reason: str) -> list[Score]:
    return [Score(None, reason=redact(f"the reward function {reason}"))] * len(rollouts)  # an error may quote a server's key


Ask = Callable[[Callable[[Sequence[Rollout]], list[Score]], Sequence[Rollout]], list[Score]]


class FailureLimit:
    """A source that may fail now and then, but not most of the time.

    Its state holds what failed so far, so that a training that goes on stops where an uninterrupted one would.

    Args:
        share: of the scores of the last ten calls of `score` and `judge`; beyond it there is nothing left to learn from.
        ask: how the source is asked; by several ranks, not by each of them.
    """

    def __init__(self, source: RewardSource, share: float, ask: Ask = lambda score, rollouts: score(rollouts)) -> None:
        self.source, self.share, self.name, self.ask = source, share, source.name, ask
        self.reasons: Counter[str] = Counter()
        self.recent: deque[tuple[int, int]] = deque(maxlen=WINDOW)

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """The source's scores.

        Raises:
            RewardError: too many of the last ones failed, or the source gave another number of them than it was asked for.
        """
        scores = self.ask(self.source.score, rollouts)
        if len(scores) != len(rollouts):
            raise RewardError(f"the reward source {self.name!r} gave {len(scores)} scores for {len(rollouts)} responses")
        reasons = [score.reason or "no reason given" for score in scores if score.value is None]
        self.reasons.update(reasons)
        self.recent.append((len(reasons), len(scores)))
        failed, total = (sum(column) for column in zip(*self.recent, strict=True))
        if reasons and failed > self.share * total:
            self.recent.clear()  # a reward that was mended is not judged by what it did before
            common = "; ".join(f"{reason} ({count} times)" for reason, count in self.reasons.most_common(3))
            raise RewardError(
                f"{failed} of the last {total} scores failed, more than max_failed = {self.share:g}: {common}. "
                "Mend the reward and start the same command again: it goes on from the last step"
            )
        return scores

    def keep_stacks(self, path: Path) -> None:
        """Set the file for the stacks of calls that hang, if the source writes them down."""
        if isinstance(self.source, FunctionReward):
            self.source.watchdog.path = path

    def judge(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """Scores that mean the same at every step, for measurements."""
        return self.ask(self.source.judge, rollouts) if isinstance(self.source, AdaptiveReward) else self.score(rollouts)

    def learn(self, scores: Sequence[Score]) -> dict[str, float]:
        """Tell the source what a step of training scored, if it follows that; its metrics."""
        return self.source.learn(scores) if isinstance(self.source, AdaptiveReward) else {}

    def state(self) -> Json:
        """What the source's next scores depend on, and the failures so far."""
        own = self.source.state() if isinstance(self.source, Stateful) else {}
        counts = {"recent": [list(pair) for pair in self.recent], "reasons": dict(self.reasons)}
        return {**own, "failures": counts} if self.recent or self.reasons else own

    def load_state(self, values: Mapping[str, Any]) -> None:
        own = {name: value for name, value in values.items() if name != "failures"}
        if own and isinstance(self.source, Stateful):
            self.source.load_state(own)
        if (counts := values.get("failures")) is not None:
            self.reasons = Counter(counts["reasons"])
            self.recent = deque(((failed, total) for failed, total in counts["recent"]), maxlen=WINDOW)

    def close(self) -> None:
        """End what the source keeps open."""
        if isinstance(self.source, AbstractContextManager):
            self.source.__exit__(None, None, None)
