"""The values that travel between rooms: text on one side, token ids on the other, never both
confused.

No torch here. Everything is frozen; a stage changes the representation by making a new value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Literal

Json = dict[str, Any]
"""An object of JSON whose keys are free: settings, metadata, summaries."""
Row = Json
"""A row of a file, or of a table that is shown."""
Facts = Mapping[str, Any]
"""An object of JSON that is only read."""
Entries = Mapping[str, object]
"""Values by name, only read, of which nothing is known yet."""
JsonValue = Any
"""A value of JSON of any kind: an object, a list, a text, a number, a truth value or None."""
Texts = Mapping[str, str]
"""Texts by name, only read."""
Metrics = dict[str, float]
"""Numbers by name."""
Readings = Mapping[str, float]
"""Metrics that are only read."""
Ids = tuple[int, ...]
"""Tokens by their numbers."""
ChatRole = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Attributes:
        tool_calls: the functions that an assistant's turn calls. Each is the JSON text of an object
            in OpenAI's format whose arguments are an object.
        tools: on the first turn alone, the JSON text of the list of schemas of the functions that
            may be called.
        template: on the first turn alone, the JSON text of the arguments of the chat template for
            this conversation.
        reasoning: the thought before an assistant's reply, where the data keeps it apart from
            `content`.
        name: the name of the speaker, or of the function whose result a tool's turn holds.
        tool_call_id: the id of the call that a tool's turn answers.
        train: False keeps an assistant's turn out of the loss; the turn remains in the context of
            later ones.
    """

    role: ChatRole
    content: str
    tool_calls: tuple[str, ...] = ()
    tools: str = ""
    reasoning: str = ""
    name: str = ""
    tool_call_id: str = ""
    train: bool = True
    template: str = ""

    def __repr__(self) -> str:
        """Without fields that have their default value: the split into training and held-out
        prompts depends on this text.
        """
        given = (
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        )
        return f"Message({', '.join(given)})"

    @property
    def is_empty(self) -> bool:
        """True if the turn neither says nor calls anything."""
        return not (self.content.strip() or self.tool_calls)

    @property
    def spoken(self) -> str:
        """The turn for people and judges to read: what it says, then each call as
        name(arguments).
        """
        calls = [json.loads(call)["function"] for call in self.tool_calls]
        lines = [
            f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})" for call in calls
        ]
        return "\n".join([*([self.content] if self.content.strip() or not lines else []), *lines])

    def as_row(self) -> Json:
        """The turn as files and chat templates have it: role and content, and each further field
        that is not empty.
        """
        row: Json = {"role": self.role, "content": self.content}
        if self.tool_calls:
            row["tool_calls"] = [json.loads(call) for call in self.tool_calls]
        further = {
            "reasoning_content": self.reasoning,
            "name": self.name,
            "tool_call_id": self.tool_call_id,
        }
        row |= {key: value for key, value in further.items() if value}
        return row if self.train else row | {"train": False}


Conversation = tuple[Message, ...]


def user(content: str) -> Message:
    return Message("user", content)


def assistant(content: str) -> Message:
    return Message("assistant", content)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation that waits for an assistant's turn.

    Attributes:
        metadata: further columns and values that tether derives from them, for judges and reports,
            never for models.
        row: all columns of the prompt's row, unchanged, if a function of the user gets them.
    """

    messages: Conversation
    id: str = ""
    metadata: Facts = field(default_factory=dict)
    row: Facts = field(default_factory=dict, repr=False, compare=False)

    @property
    def text(self) -> str:
        """The last turn's text, for people."""
        return self.messages[-1].content if self.messages else ""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A whole conversation to imitate; its assistant turns are what is learned. See `Prompt.row`."""

    messages: Conversation
    id: str = ""
    metadata: Facts = field(default_factory=dict)
    row: Facts = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Annotation:
    """One annotator's view of a comparison: +1 for `chosen`, -1 for `rejected`, 0 for a tie,
    between for strength.
    """

    annotator: str
    preference: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two continuations of one prompt, the preferred one first.

    `group` names the prompt: all comparisons of a group stay together in a split and in a batch.
    `margin` is how much better `chosen` is, in the source's own units (None: unknown). `tie` pairs
    carry no direction. `probability` is the (soft) label P(chosen preferred). `annotations` keeps
    every single vote.
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
    metadata: Facts = field(default_factory=dict)

    def swap(self) -> Comparison:
        """The same comparison with its sides exchanged."""
        return replace(
            self,
            chosen=self.rejected,
            rejected=self.chosen,
            margin=None if self.margin is None else -self.margin,
            probability=1.0 - self.probability,
            annotations=tuple(Annotation(a.annotator, -a.preference) for a in self.annotations),
            metadata=turned_facts(self.metadata),
        )


def turned_facts(metadata: Facts) -> Json:
    """The metadata with facts on the two sides exchanged, and differences of the two negated."""
    other = {"chosen": "rejected", "rejected": "chosen"}
    names = {key: key.partition("_") for key in metadata}
    return {
        other.get(first, first) + dash + rest: -metadata[key]
        if key in ("gold_difference", "fluent_difference")
        and isinstance(metadata[key], int | float)
        else metadata[key]
        for key, (first, dash, rest) in names.items()
    }


@dataclass(frozen=True, slots=True)
class Feedback:
    """One response judged by itself: desirable or not (unpaired data, as KTO takes it)."""

    prompt: Conversation
    response: Conversation
    desirable: bool
    id: str = ""
    metadata: Facts = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepLabels:
    """A solution cut into steps, each right (True), wrong (False) or unjudged (None).

    `group` names the problem where the prompt does not: variants of one problem stay together in a
    split.
    """

    prompt: Conversation
    steps: tuple[str, ...]
    labels: tuple[bool | None, ...]
    id: str = ""
    group: str = ""
    metadata: Facts = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Problem:
    """A question whose answer can be checked; `row` is that of its prompt (`Prompt.row`)."""

    prompt: Conversation
    answer: str
    solution: str = ""
    id: str = ""
    metadata: Facts = field(default_factory=dict)
    row: Facts = field(default_factory=dict, repr=False, compare=False)


class StopReason(Enum):
    """The reason why a rollout ended."""

    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    TURNS = "turns"
    """An episode had as many replies as it may have."""
    FULL = "full"
    """The words of an environment left no room for a reply."""


Record = Prompt | Demonstration | Comparison | Feedback | StepLabels | Problem
"""A row of data, of any kind."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The way tokens are drawn. `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0 and
    `thought_tokens` 0 are off.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_strings: tuple[str, ...] = ()
    thought_tokens: int = 0

    @property
    def truncates(self) -> bool:
        """True if the sampled distribution has less than the full support."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


Spans = tuple[tuple[int, int], ...]
"""Parts of a response in ascending order, each the places (start, stop) of its tokens."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled response: ids, what the engine thought of each, and where it comes from.

    `response_ids` includes the stop token when one was sampled (it is an action like any other).

    Attributes:
        logprobs: one for each token that the policy wrote, in nats; empty if unknown.
        spans: the tokens that the policy wrote. Tokens between spans come from an environment: they
            are read and scored, and carry no loss, KL or advantage. None given: one span, the
            whole response.
        forks: the places in the response where a new segment begins. What follows on a fork reads
            nothing of what is before it; its first tokens are its own prompt, of no span.
        opening: the mark of a thought that the prompt ends with; the response begins inside it.
        turns: of an episode, what the environment said before the first reply, the replies, and what
            it said between them; `text` is the last reply.
        opened: of an episode, the prompt with what the environment says first, and its tools.
        outcome: of an episode, the environment's reward.
        failure: the reason why an episode's environment failed; such a rollout is not scored.

    Raises:
        ValueError: spans that overlap, are empty or leave the response, or log-probabilities that
            do not match them.
    """

    prompt_ids: Ids
    response_ids: Ids
    logprobs: tuple[float, ...]
    stop_reason: StopReason
    text: str
    sample_index: int
    policy_version: int
    sampling: Sampling
    prompt: Prompt
    spans: Spans = ()
    forks: tuple[int, ...] = ()
    opening: str = ""
    turns: Conversation = ()
    opened: Prompt | None = None
    outcome: Score | None = None
    failure: str = ""

    def __post_init__(self) -> None:
        length = len(self.response_ids)
        spans = self.spans or (((0, length),) if length else ())
        edge = 0
        for start, stop in spans:
            if not edge <= start < stop <= length:
                raise ValueError(f"spans {spans} do not fit a response of {length} tokens")
            edge = stop
        object.__setattr__(self, "spans", spans)
        if self.logprobs and len(self.logprobs) != self.num_written:
            raise ValueError(
                f"{len(self.logprobs)} log-probabilities for {self.num_written} tokens of the policy",
            )

    @property
    def finished(self) -> bool:
        return self.stop_reason in (StopReason.STOP_TOKEN, StopReason.STOP_STRING)

    @property
    def transcript(self) -> str:
        """The text for people; of an episode all of its turns, each behind its role."""
        if len(self.turns) < 2:
            return self.text
        return "\n".join(f"[{turn.role}] {turn.spoken}" for turn in self.turns)

    @property
    def whole_text(self) -> str:
        """The text with the mark of the thought that its prompt opened."""
        again = self.text.lstrip().startswith(self.opening)
        return self.text if again else self.opening + self.text

    @property
    def written(self) -> Ids:
        """Ids of the tokens that the policy wrote, in order."""
        return tuple(i for start, stop in self.spans for i in self.response_ids[start:stop])

    @property
    def begin(self) -> int:
        """The place in the response behind the prompt of the last segment."""
        edges = (start for start, _ in self.spans if self.forks and start >= self.forks[-1])
        return next(edges, 0)

    @property
    def last_segment(self) -> tuple[Ids, Ids]:
        """Prompt and response of the last segment, which holds the conversation up to its end."""
        ids = self.response_ids
        prompt = ids[self.forks[-1] : self.begin] if self.forks else self.prompt_ids
        return prompt, ids[self.begin :]

    @property
    def num_written(self) -> int:
        """Number of tokens that the policy wrote."""
        return self.written_before(len(self.response_ids))

    def written_before(self, place: int) -> int:
        """Number of tokens that the policy wrote among the first `place` of the response."""
        return sum(max(0, min(stop, place) - start) for start, stop in self.spans)


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All rollouts of one prompt in one step."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """A scalar with its parts. `value` None means that scoring failed: masked and counted, never
    read as 0.

    `steps` are rewards of single steps, each with the index of the response token that ends it.
    """

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    steps: tuple[tuple[int, float], ...] = ()

    def finite(self, source: str, returned: float | Sequence[float] | Mapping[str, float]) -> Score:
        """The score itself; a failed one where any number that `source` returned for it is not
        finite.
        """
        numbers = (
            returned.values()
            if isinstance(returned, Mapping)
            else [returned]
            if isinstance(returned, float | int)
            else returned
        )
        return (
            self
            if all(map(math.isfinite, numbers))
            else Score(None, reason=f"{source} returned {returned}")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A detector's finding at a step: a value beyond its threshold, what it means, what to do, and
    samples to look at.
    """

    detector: str
    step: int
    value: float
    threshold: float
    message: str
    advice: str
    evidence: tuple[str, ...] = ()
