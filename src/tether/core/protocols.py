"""The sockets: what a stage needs from an engine, a reward, a judge, a monitor or a tracker, and nothing more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from tether.core.types import Alarm, Prompt, Rollout, RolloutGroup, Sampling, Score


@runtime_checkable
class Engine(Protocol):
    """Samples responses from the current policy."""

    policy_version: int

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        num_samples: int = 1,
        seed: int = 0,
        ordinals: Sequence[int] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[RolloutGroup]:
        """One group of `num_samples` rollouts a prompt, in the order of `prompts`.

        A sample depends on (`seed`, the prompt's ordinal, the sample's index, the position) and on the policy alone.
        `progress` is told the number of rollouts finished so far.
        """
        ...

    def update_weights(self, version: int) -> None:
        """Take over the learner's weights; every later rollout carries `version`."""
        ...


@runtime_checkable
class RewardSource(Protocol):
    """Scores finished rollouts. The proxy that a policy is trained on."""

    name: str

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]: ...


@runtime_checkable
class Judge(Protocol):
    """Scores texts for evaluation and labelling; never trained on. Higher is better."""

    name: str

    def score_texts(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Score]: ...


class Learner(Protocol):
    """Turns losses into steps: float32 masters, accumulation, clipping, schedule."""

    updates: int

    def backward(self, loss: Any) -> None: ...

    def step(self) -> Mapping[str, float]:
        """Clip, update, advance the schedule; returns `grad_norm` and `learning_rate`."""
        ...


class Monitor(Protocol):
    """Watches a run and warns. `state` is what its next judgement depends on, so that a resumed run warns alike."""

    def observe(
        self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Rollout], scores: Sequence[Score]
    ) -> list[Alarm]: ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, values: Mapping[str, Any]) -> None: ...


class Tracker(Protocol):
    """Receives what a run measures."""

    def log(self, metrics: Mapping[str, Any], step: int) -> None: ...
