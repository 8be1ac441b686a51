"""Settings of what scores, and the table of rewards: a new one is a file in rewards/, and here its
settings and a row of `REWARDS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypedDict

from pydantic import Field, NonNegativeFloat, PositiveFloat, create_model

from tether.core.types import Json
from tether.settings.config import Config, FromOne
from tether.settings.needs import Needs
from tether.settings.section import TimedSection
from tether.settings.workers import ServersConfig

Shape = Literal["texts", "messages"]


GIVEN = "python:"
"""Beginning of the name of a function that a program handed over."""


class LimitArguments(TypedDict):
    """Limits as arguments of `FunctionReward`."""

    batch: int
    time_limit: float
    dump_after: float


class CallLimits(Config):
    """The limits of a call of a user's function."""

    batch: FromOne = Field(
        default=8,
        description="responses a call, or all answers to a prompt if these are more; those of a "
        "call that fails are left out",
    )
    time_limit: PositiveFloat = Field(default=60.0, description="seconds a call")
    dump_after: PositiveFloat = Field(
        default=30.0,
        description="seconds after which a call's stacks go to stacks.txt of "
        "the run; at time_limit if later",
    )

    @property
    def limits(self) -> LimitArguments:
        """The limits as arguments of `FunctionReward`."""
        return {"batch": self.batch, "time_limit": self.time_limit, "dump_after": self.dump_after}


class FunctionConfig(CallLimits):
    """A reward of functions: their places, and the limits of a call."""

    call: str | tuple[str, ...] = Field(
        description="module:name, or path/to/file.py:name; (prompts, responses) -> a number for "
        "each; several are added up",
    )
    weights: tuple[float, ...] | None = Field(
        default=None,
        description="of several functions; unset: 1 each",
    )
    completions: Shape = Field(
        default="texts",
        description="what a function in TRL's form gets: texts, or lists of "
        "messages as of its conversations",
    )

    @property
    def calls(self) -> tuple[str, ...]:
        """The names of all functions."""
        return (self.call,) if isinstance(self.call, str) else self.call

    def faults(self) -> Iterator[str]:
        calls = self.calls
        if not calls:
            yield "call names no function"
        if len(set(calls)) < len(calls):
            yield "call names a function twice: name it once, and give its weight in weights"
        if self.weights is not None and len(self.weights) != len(calls):
            yield f"weights has {len(self.weights)} numbers for {len(calls)} functions"


Kind = Literal["math", "gsm8k", "numeric", "exact", "reasoning-gym", "code"]


Mark = Literal["boxed", "hashes", "phrase", "tag", "last-number", "fence", "whole"]


MARKS: dict[str, tuple[Mark, ...]] = {
    "math": ("boxed",),
    "gsm8k": ("hashes", "phrase"),
    "numeric": ("hashes", "phrase"),
    "exact": ("whole",),
    "reasoning-gym": ("tag",),
    "code": ("fence", "whole"),
}


FORMATS = {
    "think-answer": r"<think>(?:(?!</?(?:think|answer)>).)*</think>\s*<answer>(?:(?!</?(?:think|answer)>).)*</answer>",
    "boxed": r"(?:.*</think>)?(?:(?!\\boxed|<think>).)*\\boxed\{(?:(?!\\boxed).)*",
    "hashes": r"(?:.*</think>)?(?:(?!####|<think>).)*\n#### [^\n]+",
}
"""Whole responses, outer white space aside: each mark occurs exactly once, behind any thought."""


class VerifiableConfig(Config):
    """The kind of check, the place of the answer in a response, and the limits of a check."""

    kind: Kind = Field(description="of the check")
    answer_in: tuple[Mark, ...] = Field(
        default=(),
        description="marks of the answer, the first that is found counts; empty: those of the "
        "kind (and the tag first, "
        "with format = 'think-answer')",
    )
    tolerance: Annotated[
        NonNegativeFloat,
        Needs(
            "kind = 'numeric'",
            "has no effect with kind = {config.kind!r}; remove it or choose 'numeric'",
        ),
    ] = Field(
        default=1e-6,
        description="numeric: |answer - known| <= tolerance * max(1, |known|)",
    )
    credit: Annotated[
        Literal["all", "share"],
        Needs(
            "kind = 'code'",
            "has no effect with kind = {config.kind!r}; remove it or choose 'code'",
        ),
    ] = Field(default="all", description="code: 1 for all tests met or 0, or the share of them")
    format: Annotated[
        Literal["think-answer", "boxed", "hashes"] | None,
        Needs("not format_pattern", "and format_pattern are two ways to say the same; remove one"),
    ] = Field(default=None, description="what the whole response has to look like")
    format_pattern: str | None = Field(
        default=None,
        description="a regular expression for the whole response; . matches new lines",
    )
    format_weight: Annotated[
        PositiveFloat,
        Needs(
            "format or format_pattern",
            "has no effect without a format; remove it, or set format or format_pattern",
        ),
    ] = Field(default=0.1, description="share of the reward that the format earns")
    time_limit: PositiveFloat = Field(default=5.0, description="seconds a check")
    workers: FromOne = Field(default=2, description="processes that check")
    memory_mb: int = Field(default=1024, ge=256, description="of each worker")

    def faults(self) -> Iterator[str]:
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            yield f"format_pattern is not a regular expression: {error}"

    @property
    def pattern(self) -> str | None:
        return FORMATS[self.format] if self.format else self.format_pattern

    @property
    def marks(self) -> tuple[Mark, ...]:
        tagged: tuple[Mark, ...] = (
            ("tag",) if self.format == "think-answer" and self.kind != "reasoning-gym" else ()
        )
        return self.answer_in or (*tagged, *MARKS[self.kind])


class ClassifierConfig(Config):
    """A model that reads a conversation and gives one number, or one a label."""

    source: str = Field(description="a hub id or a folder")
    label: str | int | None = Field(
        default=None,
        description="which output is the reward, by name or number; unset: the only one",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="type of its weights on a GPU: bfloat16 where the card "
        "multiplies it; a CPU takes float32",
    )
    batch: FromOne = Field(default=16, description="conversations a forward")
    max_length: int = Field(
        default=2048,
        ge=8,
        description="tokens, and never more than the model reads; longer ones lose their beginning",
    )


class ObjectiveConfig(Config):
    """An objective's weight or threshold; its scores have mean 0 and deviation 1 on held-out
    responses of its comparisons.
    """

    weight: float | None = Field(
        default=None,
        ge=0,
        description="in the sum that is raised; 0: only looked at",
    )
    at_least: float | None = Field(
        default=None,
        description="instead of a weight: where its mean is held, in deviations",
    )
    rate: PositiveFloat = Field(
        default=0.1,
        description="how fast the constraint's multiplier follows its violation, a step",
    )

    def faults(self) -> Iterator[str]:
        if (self.weight is None) == (self.at_least is None):
            yield "an objective has a weight or is held with at_least: give one of both"
        if self.at_least is None:
            yield from self.idle(
                "rate",
                because="without at_least: it moves a constraint's multiplier",
            )


class RewardServersConfig(ServersConfig):
    """Number of servers that score, and the size of their requests."""

    prefix: ClassVar[str] = "reward"
    batch: FromOne = Field(default=8, description="responses a request")
    waiting: FromOne = Field(
        default=2,
        description="requests at a server at once: it works on one, the others are there",
    )


Combine = Literal["mean", "worst", "uncertainty"]
"""Ways to combine several opinions into one."""


@dataclass(frozen=True, kw_only=True)
class RewardKind:
    """A row of the table. Functions are named, `module:function`, since settings load no torch.

    Args:
        make: makes the reward of its `RewardParts`.
        settings: of the table in a section that has the reward's name.
        scorer: the stage whose trained model scores.
        served: keys of a section, beside that table, by which a server scores; None: none can.
        on_every_rank: it is a model: each rank holds it and scores its own responses. The first
            rank alone computes other rewards.
        steps: it can score the steps of a response.
        parts: names of the parts of its scores, beside those of checks and of a trained model;
            None: a function gives what it likes.
        check: raises a fault of a stage, given its name and section.
    """

    help: str
    make: str
    settings: type[Config] | None = None
    scorer: str | None = None
    served: tuple[str, ...] | None = ()
    on_every_rank: bool = False
    steps: bool = False
    parts: tuple[str, ...] | None = ()
    check: str = ""


REWARDS: dict[str, RewardKind] = {
    "learned": RewardKind(
        help="the [reward] stage's model",
        make="tether.runner.assembly.rewards:learned",
        scorer="reward",
        served=("reward_combine", "uncertainty_weight"),
        on_every_rank=True,
    ),
    "process": RewardKind(
        help="the [process] stage's model",
        make="tether.runner.assembly.rewards:process",
        scorer="process",
        served=("process_aggregate",),
        on_every_rank=True,
        steps=True,
        parts=("num_steps", "weakest_step"),
    ),
    "verifiable": RewardKind(
        help="checked answers",
        make="tether.rewards.verifiable:checked_reward",
        settings=VerifiableConfig,
        check="tether.runner.assembly.checks:check_answers",
    ),
    "classifier": RewardKind(
        help="a sequence classifier",
        make="tether.rewards.classifier:classifier_reward",
        settings=ClassifierConfig,
        on_every_rank=True,
        check="tether.rewards.classifier:check_classifier",
    ),
    "function": RewardKind(
        help="your own function",
        make="tether.rewards.function:function_reward",
        settings=FunctionConfig,
        steps=True,
        parts=None,
        check="tether.runner.assembly.checks:check_functions",
    ),
    "environment": RewardKind(
        help="what the environment gives",
        make="tether.rewards.environments:EpisodeReward",
        served=None,
        steps=True,
        parts=("turns", "calls", "unread_calls"),
    ),
    "teacher": RewardKind(
        help="the teachers alone",
        make="tether.runner.assembly.rewards:taught",
        served=None,
        on_every_rank=True,
        parts=("forward_kl", "other_tokens", "entropy"),
    ),
    "random": RewardKind(
        help="as a control no information",
        make="tether.rewards.control:random_reward",
        check="tether.runner.assembly.checks:check_answers",
        served=None,
    ),
    "majority": RewardKind(
        help="as a control agreement with most answers to the prompt",
        make="tether.rewards.majority:majority_reward",
        check="tether.runner.assembly.checks:check_answers",
        served=None,
    ),
}


def reward_tables() -> type[TimedSection]:
    """The base of sections that a reward scores: the name of the reward, and a table for each row
    that has settings.
    """
    helps = ", ".join(kind.help for kind in REWARDS.values())
    source = Field(default="learned", description=f"what scores: {helps}")
    fields: Json = {"reward_source": (Literal[*REWARDS], source)}
    for name, kind in REWARDS.items():
        if kind.settings is not None:
            about = Field(default=None, description=f"settings of {kind.help}")
            fields[name] = (kind.settings | None, about)
    return create_model("RewardTables", __base__=TimedSection, __module__=__name__, **fields)
