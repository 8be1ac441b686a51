"""Settings of distillation: who teaches or writes, what a teacher reads, and what is descended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat

from tether.core.types import Facts, JsonValue
from tether.settings.config import BelowOne, Config, FromOne, Probability
from tether.settings.needs import Needs
from tether.settings.section import DataConfig

OTHER_TOKENS = (
    "the teacher {teacher} has another tokenizer than the policy, so that its opinion of the "
    "policy's tokens means nothing. Fine-tune on texts that it writes, by [sft] data = {{ path = "
    "PROMPTS, teacher = '{teacher}' }}, or take a teacher of the policy's family"
)
NO_TEXTS = (
    "a teacher that writes is a model or a run, which this program loads: no server is asked for "
    "texts. Let the server's own program write the answers into a file of rows with prompt and "
    "response, and give that file as data without a teacher"
)
START = "start"
"""The name of the model with which a stage begins."""
NOTHING_READ = "the start teaches itself nothing as it is: give it something that only the teacher reads (system, call)"


def _named(value: JsonValue) -> JsonValue:
    """A teacher by its path, as its table."""
    return {"model": str(value)} if isinstance(value, str | Path) else value


class ReadingConfig(Config):
    """A model that teaches, and what it reads."""

    model: str | None = Field(
        default=None,
        description="a run (its policy), a folder, a hub id or package:NAME==VERSION; start: the "
        "model with which the stage begins",
    )
    system: str | None = Field(
        default=None,
        description="a system message that this teacher alone reads; {name} is a column of the "
        "prompt's row",
    )
    call: Annotated[
        str | None,
        Needs("not system", "and system are two ways to say what the teacher reads; remove one"),
    ] = Field(
        default=None,
        description="module:name, or path/to/file.py:name; a Prompt -> the messages that this "
        "teacher alone reads in its place",
    )


class WritingConfig(ReadingConfig):
    """A model whose answers are the demonstrations: sequence-level distillation, Kim and Rush 2016,
    <https://arxiv.org/abs/1606.07947>.
    """

    samples_per_prompt: FromOne = Field(default=1, description="answers to each prompt")
    max_new_tokens: FromOne = Field(
        default=256,
        description="longest answer; one that does not end is left out",
    )
    temperature: NonNegativeFloat = Field(default=1.0, description="of sampling; 0: greedy")

    def faults(self) -> Iterator[str]:
        if self.model is None:
            yield "a teacher that writes is a model: set model"
        elif "://" in self.model:
            yield NO_TEXTS
        if self.model == START and not (self.system or self.call):
            yield NOTHING_READ


class DemonstrationData(DataConfig):
    """Demonstrations, or prompts to which a teacher writes them."""

    teacher: Annotated[WritingConfig | None, BeforeValidator(_named)] = Field(
        default=None,
        description="the rows are prompts, and this model's answers are the demonstrations: a "
        "model or a run, or a table",
    )


class TeacherConfig(ReadingConfig):
    """A model that says how likely each token of the policy's answers is."""

    addresses: tuple[str, ...] = Field(
        default=(),
        description="servers of the teacher, tether's own (`tether engine`) or vLLM's, such as "
        "http://10.0.0.5:8000",
    )
    top_k: Annotated[
        int,
        Needs("addresses", "is of servers, and a model here has its whole distribution"),
    ] = Field(
        default=0,
        ge=0,
        le=1000,
        description="of servers, for a divergence over words: how many likeliest tokens they give; "
        "the rest counts as one more",
    )
    least_mass: Annotated[
        Probability,
        Needs("top_k", "is of the top_k likeliest tokens: set top_k"),
    ] = Field(
        default=0.9,
        description="probability that the top_k must have together for a place to count",
    )
    weight: PositiveFloat = Field(
        default=1.0,
        description="of several teachers: its share, over the sum of all",
    )
    follow: Annotated[
        float | None,
        Needs("model = 'start'", "moves a copy of the policy: set model = 'start'"),
    ] = Field(
        default=None,
        gt=0,
        lt=1,
        description="the teacher is a moving average of the policy, with this decay",
    )

    def faults(self) -> Iterator[str]:
        if (self.model is None) == (not self.addresses):
            yield "a teacher is a model or servers (addresses): give one of both"
        if self.model == START and not (self.system or self.call or self.follow):
            yield f"{NOTHING_READ}; beside a reward it may follow the policy (follow)"
        if self.addresses and (self.system or self.call):
            yield "a server reads what the policy reads: leave system and call out, or give a model"


def _several(value: JsonValue) -> JsonValue:
    """One teacher, by its path, its address or its table, as a list of one."""
    if isinstance(value, str | Path | Mapping | TeacherConfig):
        value = (value,)
    if not isinstance(value, Sequence):
        return value
    return tuple(
        {"addresses": [one]} if isinstance(one, str) and "://" in one else _named(one)
        for one in value
    )


A_TEACHER = Needs("teacher", "needs a teacher: name a model, a run or a server in teacher")
WHOLE = Needs(
    "divergence != 'token'",
    "needs the whole distribution, for these tokens are not the policy's: set divergence = "
    "'reverse', 'forward' or 'jsd'",
)


class TaughtConfig(Config):
    """Keys of a stage whose policy may have teachers."""

    teacher: Annotated[tuple[TeacherConfig, ...], BeforeValidator(_several)] = Field(
        default=(),
        description="a model, a run or a server's address, a table, or a list of them",
    )
    divergence: Annotated[Literal["token", "reverse", "forward", "jsd"], A_TEACHER] = Field(
        default="token",
        description="token: each token's log-ratio of teacher to policy joins its advantage; else "
        "the loss has a divergence over all words: KL(policy || teacher), KL(teacher || policy), "
        "or the Jensen-Shannon divergence of jsd_beta",
    )
    jsd_beta: Annotated[
        BelowOne,
        Needs("divergence = 'jsd'", "has no effect without divergence = 'jsd'"),
    ] = Field(
        default=0.5,
        description="share of the teacher in the middle that both are compared with",
    )
    teacher_coefficient: Annotated[NonNegativeFloat, A_TEACHER] = Field(
        default=1.0,
        description="weight of the teachers beside the reward",
    )
    own_answers: Annotated[Probability, A_TEACHER, WHOLE] = Field(
        default=1.0,
        description="share of prompts that the policy answers; of the others the row's reply is "
        "read, and 0 is supervised distillation",
    )

    def faults(self) -> Iterator[str]:
        if self.divergence == "jsd" and not self.jsd_beta:
            yield "jsd_beta = 0 is no divergence: set divergence = 'forward'"
        others = dict(self)
        whole = any(one.addresses or one.system or one.call for one in self.teacher)
        environment = others.get("environment")
        if whole and environment and environment.history == "template":
            yield (
                "a teacher that is a server, or reads otherwise than the policy (system, call), reads "
                "answers whole: set environment.history = 'sampled'"
            )
        tops = {bool(one.top_k) for one in self.teacher if one.addresses}
        if self.divergence != "token" and False in tops:
            yield (
                f"divergence = {self.divergence!r} needs a teacher's distribution, and a server gives "
                "that of the written tokens: set teacher.top_k, or divergence = 'token'"
            )
        if self.divergence == "token" and True in tops:
            yield "teacher.top_k has no effect with divergence = 'token': leave it out"
        if self.own_answers < 1 and others.get("max_staleness"):
            yield "own_answers below 1 reads replies of the rows: set max_staleness = 0"
        following = [one for one in self.teacher if one.follow]
        if len(following) > 1 or (following and others.get("ema_decay")):
            yield "one moving average of the policy is kept: one teacher may follow it, or ema_decay"
        if following and others.get("roles") == "separate":
            yield "a teacher that follows is an adapter on the policy's trunk: set roles = 'shared'"
        if "reward_source" in others:
            yield from self._reward_faults(others)

    def _reward_faults(self, others: Facts) -> Iterator[str]:
        """Faults with the reward beside the teachers."""
        alone = others["reward_source"] == "teacher"
        if self.own_answers < 1 and not alone:
            yield (
                "own_answers below 1 learns replies of the rows, which the policy did not sample: "
                "no score of them may change their probability, so leave the reward out"
            )
        if not (self.follow and alone):
            return
        first, *more = self.teacher
        if not (first.system or first.call or more):
            yield (
                "a teacher that follows starts as the policy, and remains it while nothing else "
                "teaches: give it something that only the teacher reads (system, call), or set "
                "reward_source"
            )
        held = others["evaluate"]
        if held and held.judge == "reward" and (held.stop or held.keep == "best"):
            yield (
                "evaluate.keep = 'best' and evaluate.stop compare distances from a teacher that "
                "moves itself (follow): set evaluate.judge, or leave them out"
            )

    @property
    def follow(self) -> float | None:
        """Decay of the moving average that a teacher is."""
        return next((one.follow for one in self.teacher if one.follow), None)

    @property
    def by_token(self) -> bool:
        """True if teachers speak in the advantages of tokens."""
        return bool(self.teacher) and self.divergence == "token"

    @property
    def by_word(self) -> bool:
        """True if teachers speak in the loss, over the whole vocabulary."""
        return bool(self.teacher) and self.divergence != "token"
