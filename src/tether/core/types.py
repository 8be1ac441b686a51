"""The values that travel between rooms: text on one side, token ids on the other, never both confused.

No torch here. Everything is frozen; a stage changes the representation by making a new value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

ChatRole = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: ChatRole
    content: str


Conversation = tuple[Message, ...]


def user(content: str) -> Message:
    return Message("user", content)


def assistant(content: str) -> Message:
    return Message("assistant", content)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation that waits for an assistant's turn; `metadata` is for judges and reports, never for models."""

    messages: Conversation
    id: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The last turn's text, for people."""
        return self.messages[-1].content if self.messages else ""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A whole conversation to imitate; its assistant turns are what is learned."""

    messages: Conversation
    id: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Annotation:
    """One annotator's view of a comparison: +1 for `chosen`, -1 for `rejected`, 0 for a tie, between for strength."""

    annotator: str
    preference: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two continuations of one prompt, the preferred one first.

    `group` names the prompt: all comparisons of a group stay together in a split and in a batch.
    `margin` is how much better `chosen` is, in the source's own units (None: unknown). `tie` pairs carry no
    direction. `probability` is the (soft) label P(chosen preferred). `annotations` keeps every single vote.
    """

    prompt: Conversation
    chosen: Conversation
    rejected: Conversation
    id: str = ""
    group: str = ""
    margin: float | None = None
    tie: bool = False
    probability: float = 1.0
    annotations: tuple[Annotation, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def swap(self) -> Comparison:
        """The same comparison with its sides exchanged."""
        return Comparison(
            prompt=self.prompt,
            chosen=self.rejected,
            rejected=self.chosen,
            id=self.id,
            group=self.group,
            margin=None if self.margin is None else -self.margin,
            tie=self.tie,
            probability=1.0 - self.probability,
            annotations=tuple(Annotation(a.annotator, -a.preference) for a in self.annotations),
            metadata=self.metadata,
        )


@dataclass(frozen=True, slots=True)
class Feedback:
    """One response judged by itself: desirable or not (unpaired data, as KTO takes it)."""

    prompt: Conversation
    response: Conversation
    desirable: bool
    id: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepLabels:
    """A solution cut into steps, each right (True), wrong (False) or unjudged (None).

    `group` names the problem where the prompt does not: variants of one problem stay together in a split.
    """

    prompt: Conversation
    steps: tuple[str, ...]
    labels: tuple[bool | None, ...]
    id: str = ""
    group: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Problem:
    """A question whose answer can be checked."""

    prompt: Conversation
    answer: str
    solution: str = ""
    id: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


class StopReason(Enum):
    """Why a rollout ended."""

    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_strings: tuple[str, ...] = ()

    @property
    def truncates(self) -> bool:
        """Whether the sampled distribution has less than the full support."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled response: ids, what the engine thought of each, and where it comes from.

    `response_ids` includes the stop token when one was sampled (it is an action like any other).
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: StopReason
    text: str
    sample_index: int
    policy_version: int
    sampling: Sampling
    prompt: Prompt

    @property
    def finished(self) -> bool:
        return self.stop_reason is not StopReason.LENGTH


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All rollouts of one prompt in one step."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """A scalar with its parts. `value` None means that scoring failed: masked and counted, never read as 0.

    `steps` are rewards of single steps, each with the index of the response token that ends it.
    """

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    steps: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Alarm:
    """What a detector noticed at a step: a value beyond its threshold, what it means, what to do, and samples to look at."""

    detector: str
    step: int
    value: float
    threshold: float
    message: str
    advice: str
    evidence: tuple[str, ...] = ()
