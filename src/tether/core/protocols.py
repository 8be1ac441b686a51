"""The sockets of a stage: engine, reward, model that is asked, monitor, and the tracker of its
run.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import NamedTuple, Protocol, TypedDict, TypeVar, Unpack, runtime_checkable

from tether.core.types import (
    Alarm,
    Conversation,
    Entries,
    Json,
    Message,
    Metrics,
    Prompt,
    Readings,
    Rollout,
    RolloutGroup,
    Sampling,
    Score,
)

Progress = Callable[[int, int, Readings], None]
"""A progress bar: finished steps, all steps, and numbers of the last one."""
Scoring = Callable[[Sequence[Rollout]], list[Score]]
Announce = Callable[[str], Progress]
"""Gives a phase of a run its progress bar."""
Finished = Callable[[int], None] | None
"""A listener to the number of things that are finished, if anybody listens."""


class DrawArguments(TypedDict, total=False):
    """Arguments of `Engine.generate`: samples of a prompt (1), seed (0), an ordinal for each prompt
    (None: its place), and a listener to the number of rollouts finished so far.
    """

    num_samples: int
    seed: int
    ordinals: Sequence[int] | None
    progress: Finished


@runtime_checkable
class Engine(Protocol):
    """Samples responses from the current policy."""

    policy_version: int

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        **how: Unpack[DrawArguments],
    ) -> list[RolloutGroup]:
        """One group of `num_samples` rollouts a prompt, in the order of `prompts`.

        A sample depends on (`seed`, the prompt's ordinal, the sample's index, the position) and on
        the policy alone.
        """
        ...

    def update_weights(self, version: int) -> None:
        """Take over the learner's weights; every later rollout carries `version`."""
        ...


class Turn(NamedTuple):
    """An environment's answer to a reply: the turns that follow, the reward of the reply (None: it
    has none), and whether the episode is over.
    """

    messages: Conversation = ()
    reward: float | None = None
    done: bool = False


class Environments(Protocol):
    """Environments that work beside each other, one an episode, by the episodes' numbers.

    Whatever a user's environment does, a call returns in bounded time. A text in the place of a
    result is the reason why there is none.

    Attributes:
        tools: the JSON text of the schemas of the functions that the policy may call; empty: none.
    """

    tools: str

    def begin(self, tasks: Mapping[int, Prompt]) -> dict[int, Conversation | str]:
        """A fresh environment for each episode; the turns that its first reply answers."""
        ...

    def step(self, replies: Mapping[int, Message]) -> dict[int, Turn | str]:
        """Take replies of the policy, with their calls."""
        ...

    def several(self) -> contextlib.AbstractContextManager[None]:
        """A block within which several threads may call `step`."""
        ...

    def end(self, cut: Sequence[int] = ()) -> dict[int, float | str | None]:
        """Let go of all episodes; the rewards of those that a limit ended."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """State beyond weights that an object carries from one step to the next. Checkpoints hold it."""

    def state(self) -> Json: ...
    def load_state(self, values: Entries) -> None: ...


@runtime_checkable
class OrderingEngine(Engine, Stateful, Protocol):
    """An engine that is asked for the next steps' samples while a step learns. Its state holds what
    is under way.
    """

    max_staleness: int

    def order(
        self,
        number: int,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        **how: Unpack[DrawArguments],
    ) -> None:
        """Ask for the samples of step `number` with the weights of now, unless that was done."""
        ...

    def forget(self, number: int) -> None:
        """Let go of the samples of the steps before `number`."""
        ...


@runtime_checkable
class RewardSource(Protocol):
    """Scores finished rollouts. The proxy that a policy is trained on."""

    name: str

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]: ...


@runtime_checkable
class JudgingReward(RewardSource, Protocol):
    """A reward whose `judge` scores for measurements, other than `score` does for the training."""

    def judge(self, rollouts: Sequence[Rollout]) -> list[Score]: ...


@runtime_checkable
class AdaptiveReward(JudgingReward, Stateful, Protocol):
    """A reward that follows the training: `score` changes with what `learn` was given, `judge`
    means the same at every step.
    """

    def learn(self, scores: Sequence[Score]) -> Metrics:
        """Take in what a step of training scored; returns metrics."""
        ...


class Verdict(NamedTuple):
    """A model's answer to a question with given options.

    `logprobs`: nats, one an option, normalised among them. None after a failure, for `reason`
    ("kind: detail"); a failure is never one half. `mass`: the probability that the reply begins
    with any of the options. `parsed`: read from one written reply, so the named option has all the
    probability. If parsed without `logprobs`, the reply names none.
    """

    logprobs: tuple[float, ...] | None
    mass: float = 1.0
    parsed: bool = False
    reason: str = ""


class Reply(NamedTuple):
    """A model's text, and whether it came to an end; `text` None where asking failed, for
    `reason`.
    """

    text: str | None
    finished: bool = True
    reason: str = ""


AnswerT = TypeVar("AnswerT", Verdict, Reply)
Told = Callable[[int, AnswerT], None] | None
"""Called with each answer and the place of its question, as soon as the answer arrives."""


class PlacedAnswers(dict[int, AnswerT]):
    """Answers by the place of their question; `told` is called with each answer as it arrives."""

    def __init__(self, told: Told[AnswerT]) -> None:
        super().__init__()
        self.told = told

    def __setitem__(self, place: int, answer: AnswerT) -> None:
        super().__setitem__(place, answer)
        if self.told:
            self.told(place, answer)

    def in_order(self) -> list[AnswerT]:
        return [self[place] for place in sorted(self)]


@runtime_checkable
class ChatModel(Protocol):
    """A model that chooses, scores, criticises and rewrites. Models of equal `name` give equal
    answers.

    `told` is called with each answer and its place as soon as the answer arrives. A caller that
    stores them loses none to a crash.
    """

    name: str

    def verdicts(
        self,
        talks: Sequence[Conversation],
        options: Sequence[str],
        *,
        told: Told[Verdict] = None,
    ) -> list[Verdict]:
        """The probability that the reply to each conversation begins with each option; none may
        begin with another.
        """
        ...

    def replies(
        self,
        talks: Sequence[Conversation],
        sampling: Sampling,
        *,
        seed: int,
        ordinals: Sequence[int],
        told: Told[Reply] = None,
    ) -> list[Reply]:
        """A reply to each conversation; like an engine's, it depends on `seed` and ordinal, not on
        its neighbours.
        """
        ...

    def usage(self) -> Mapping[str, int]:
        """The cost of asking so far, by name: requests, retries, tokens ..."""
        ...


def counting(told: Finished) -> Callable[..., None] | None:
    """A listener to answers that reports the number of answers so far; None without a progress
    display.
    """
    numbers = itertools.count(1)
    return None if told is None else lambda *_: told(next(numbers))


class Monitor(Stateful, Protocol):
    """Watches a run and warns; resumed from its state it warns alike."""

    def observe(
        self,
        step: int,
        metrics: Readings,
        rollouts: Sequence[Rollout],
        scores: Sequence[Score],
    ) -> list[Alarm]: ...


class Tracker(Protocol):
    """Shows a running training elsewhere. The run continues after any error of a method, and for
    any duration of a call.

    `id`: what the tracker itself calls the run, to go on in it.
    """

    id: str

    def log(self, metrics: Readings, step: int, at: float) -> None:
        """Numbers of a step that ended `at`, in seconds since 1970. Steps come in order, none of
        them twice.
        """
        ...

    def samples(self, rows: Sequence[Json], step: int) -> None:
        """Texts of a step, in the columns of samples.jsonl."""
        ...

    def alarm(self, alarm: Json) -> None:
        """Record an alarm of a detector, as a line of alarms.jsonl."""
        ...

    def close(self, complete: bool) -> None:
        """The end: of a finished stage, or of one that goes on some time."""
        ...


_SHOWN: ContextVar[object] = ContextVar("shown", default=None)


@contextlib.contextmanager
def showing(progress: object) -> Iterator[None]:
    """Within this block `now_doing` reports to this progress bar; None leaves the one that is
    there.
    """
    token = _SHOWN.set(_SHOWN.get() if progress is None else progress)
    try:
        yield
    finally:
        _SHOWN.reset(token)


def now_doing(what: str, done: int = 0, total: int = 0) -> None:
    """Report to the progress bar of the stage in hand, as `doing` does."""
    doing(_SHOWN.get(), what, done, total)


def count_of(what: str, total: int) -> Callable[[int], None]:
    """A listener that reports how many of `total` are done."""
    now_doing(what, 0, total)
    return lambda done: now_doing(what, done, total)


def doing(progress: object, what: str, done: int = 0, total: int = 0) -> None:
    """Report the present work and its finished part to a progress bar that can show them; total 0:
    not counted.
    """
    if (show := getattr(progress, "doing", None)) is not None:
        show(what, done, total)


@runtime_checkable
class Announcer(Protocol):
    """Shows the progress of the stages of a run, each from the moment that it is announced."""

    shows: bool
    """True if the progress is shown to a user."""

    def __call__(self, phase: str) -> Progress: ...

    def price(self, lines: Iterable[str], expected: Readings) -> None:
        """Announce what the run will take: in sentences, and in seconds of each stage."""
        ...

    def note(self, line: str) -> None:
        """Show a sentence that stays."""
        ...


MeasuredT_contra = TypeVar("MeasuredT_contra", contravariant=True)
FigureT_co = TypeVar("FigureT_co", covariant=True)


@runtime_checkable
class Evaluator(Protocol[MeasuredT_contra, FigureT_co]):
    """Measures a policy: figures by name, each an estimate with its interval.

    `name` is a row's name in the table of evaluators. The same weights give the same figures at
    every `step`, which only names the moment.
    """

    name: str

    def __call__(self, policy: MeasuredT_contra, step: int) -> Mapping[str, FigureT_co]: ...
