"""Settings of rounds: sample, make pairs, train on them, repeat."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from tether.core.amounts import plural
from tether.core.types import Demonstration, Problem, Prompt, Sampling
from tether.settings.config import FromOne
from tether.settings.model import LoraConfig
from tether.settings.needs import Needs
from tether.settings.sampling import REWARD_KEYS, RewardedSection
from tether.settings.section import Counts, EngineRows, StagePart, StageWork, SteadyLora
from tether.settings.supervised import DirectConfig

NOT_SPIN = Needs(
    "method = 'iterative'",
    "has no effect with rounds.method = 'spin': each demonstration meets one sample",
)


class RoundsSection(RewardedSection):
    """Settings of the rounds; `direct` are those of the training in each. Lengths are in tokens."""

    table: ClassVar[str] = "rounds."

    method: Literal["iterative", "spin"] = Field(
        default="iterative",
        description="pairs of samples ordered by a reward, or demonstrations over samples",
    )
    rounds: FromOne = Field(default=3, description="how often to sample and train")
    reference: Annotated[
        Literal["round", "fixed"],
        Needs(
            "direct.loss = 'dpo' or 'robust' or 'ipo'",
            "has no effect with rounds.direct.loss = '{config.direct.loss}', which asks none",
        ),
    ] = Field(default="round", description="the policy at the round's start, or before the first")
    prompts_per_round: int | None = Field(
        default=None,
        ge=1,
        description="unset: all of them in every round",
    )
    samples_per_prompt: Annotated[int, NOT_SPIN] = Field(
        default=8,
        ge=2,
        description="iterative: the best and the worst of them are a pair",
    )
    max_new_tokens: FromOne = Field(default=128, description="longest answer")
    temperature: PositiveFloat = Field(default=1.0, description="of sampling")
    missing_stop_penalty: Annotated[NonNegativeFloat, NOT_SPIN] = Field(
        default=0.0,
        description="iterative: taken off the score of a response that did not end in time",
    )
    engine_rows: EngineRows = 64
    lora: SteadyLora = LoraConfig()
    direct: DirectConfig = Field(
        default=DirectConfig(),
        description="settings of the training in each round",
    )

    @property
    def scorer(self) -> str | None:
        return super().scorer if self.method == "iterative" else None

    @property
    def kind(self) -> type | None:
        return (
            Demonstration
            if self.method == "spin"
            else Prompt
            if self.verifiable is None
            else Problem
        )

    @property
    def learning(self) -> DirectConfig:
        return self.direct

    @property
    def sampling(self) -> Sampling:
        return Sampling(max_new_tokens=self.max_new_tokens, temperature=self.temperature)

    def parts(self) -> Iterator[StagePart]:
        needs: tuple[str, ...] = ()
        for number in range(1, self.rounds + 1):
            name = f"round-{number:02d}"
            yield StagePart(name=name, kind="round", settings=self, number=number, needs=needs)
            needs = (name,)

    def work(self, counts: Counts) -> StageWork:
        prompts = self.prompts_per_round or counts.rows
        answers = plural(self.samples_per_prompt, "answer")
        words = f"{plural(self.rounds, 'round')} × {prompts or 'all'} prompts × {answers}"
        if prompts is None:
            return StageWork(words, None)
        turns = ceil(prompts * self.samples_per_prompt / self.engine_rows)
        learned = prompts * (1 - self.direct.heldout_fraction)
        updates = self.direct.epochs * max(1, ceil(learned / self.direct.prompts_per_update))
        return StageWork(words, self.rounds, {"rollout": turns, "update": updates})

    @model_validator(mode="after")
    def _resolve_rate(self) -> RoundsSection:
        vars(self)["direct"] = self.direct.resolved(self.lora or None)
        return self

    def faults(self) -> Iterator[str]:
        if self.method == "spin":
            yield from (
                f"rounds.{key} {NOT_SPIN.because}"
                for key in REWARD_KEYS
                if key in self.model_fields_set
            )
            if self.reference == "fixed" or self.direct.loss != "dpo":
                yield (
                    "rounds.method = 'spin' is played against the round's own start with "
                    "rounds.direct.loss = 'dpo'"
                )
        if self.verifiable is not None and self.verifiable.kind == "reasoning-gym":
            yield (
                "verifiable.kind = 'reasoning-gym' makes its own prompts, and [rounds] takes "
                "them from data: use another kind"
            )
