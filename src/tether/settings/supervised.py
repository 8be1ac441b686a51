"""Settings of the stages that do not sample as they learn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from tether.core.types import Comparison, Demonstration, Feedback, Prompt, StepLabels
from tether.settings.config import BelowOne, Config, FromOne
from tether.settings.learner import (
    MicroBatchTokens,
    Rates,
    ReferencedConfig,
    SupervisedConfig,
    TooLong,
)
from tether.settings.model import LoraConfig
from tether.settings.needs import Needs
from tether.settings.section import OFFLOAD, Counts, OwnLora, RowsSection, StageWork, SteadyLora
from tether.settings.teacher import DemonstrationData, WritingConfig

REFERENCE_FREE = ("orpo", "simpo")
"""Direct losses without a reference model."""


class SFTConfig(SupervisedConfig):
    """Settings of the stage; lengths are in tokens."""

    rates: ClassVar[Rates] = Rates(5e-4, 2e-5)

    train_on: Literal["all", "last"] = Field(
        default="all",
        description="all assistant turns of a conversation, or its last",
    )
    too_long: TooLong = "leave_out"
    epochs: FromOne = Field(default=2, description="passes over the demonstrations")
    batch_size: FromOne = Field(default=16, description="conversations per update")
    row_tokens: int = Field(
        default=512,
        ge=8,
        description="capacity of a packed row; a longer conversation has one of its own",
    )
    rows_per_micro_batch: FromOne = Field(
        default=2,
        description="packed rows that pass through the model at once; unset on a GPU: up to 16",
    )
    packing: bool = Field(default=True, description="put several conversations into one row")
    evaluate_every: NonNegativeInt = Field(
        default=0,
        description="updates between evaluations; 0: only at the end of every epoch",
    )


OUTCOME = "has no effect with target = 'outcome', right or wrong; remove it"


class ProcessRewardConfig(SupervisedConfig):
    """Settings of the stage; lengths are in tokens."""

    rates: ClassVar[Rates] = Rates(5e-4, 1e-5)

    target: Literal["process", "outcome"] = Field(
        "process",
        description="a label a step, or one: whether all steps are right",
    )
    delimiters: tuple[str, ...] = Field(
        ("\n\n",),
        min_length=1,
        description="end a step; the first joins labelled steps",
    )
    classes: Annotated[
        Literal[2, 3],
        Needs("target = 'process'", OUTCOME, 3),
        Needs(
            "label_column",
            "needs label_column, the column of the rows that holds the ratings -1, 0 and 1",
            3,
        ),
    ] = Field(2, description="right or wrong, or PRM800K's ratings -1, 0, 1 in label_column")
    label_column: Annotated[str, Needs("target = 'process'", OUTCOME)] = Field(
        "",
        description="metadata column with a probability or a rating a step; empty: right or wrong",
    )
    problem_column: str = Field(
        "",
        description="metadata column that names the problem, which is never split; empty: the prompt",
    )
    solutions_per_update: FromOne = Field(default=16, description="solutions an update")
    micro_batch_tokens: MicroBatchTokens = 2048
    head_dropout: BelowOne = Field(
        default=0.0,
        description="of the states that the probabilities are read from",
    )
    heldout_fraction: BelowOne = Field(
        default=0.2,
        description="share of the problems that the summary reports on",
    )
    calibration_fraction: BelowOne = Field(
        default=0.1,
        description="share of the others that chooses thresholds and best weights; 0: those trained on",
    )
    evaluate_every: Annotated[
        NonNegativeInt,
        Needs(
            "calibration_fraction",
            "needs problems to evaluate on: set calibration_fraction above 0, or leave it out",
        ),
    ] = Field(
        default=0,
        description="updates between losses on calibration problems; 0: none",
    )

    def faults(self) -> Iterator[str]:
        if not all(self.delimiters):
            yield "delimiters holds an empty text, which ends a step everywhere; remove it"

    @property
    def outputs(self) -> int:
        """Numbers that the head must give: a log-odds, or one a class."""
        return 1 if self.classes == 2 else self.classes


class PairLossConfig(Config):
    """The loss on pairs and its numbers, for pairs that were collected and for pairs that are
    sampled.
    """

    loss: Annotated[
        Literal["dpo", "robust", "ipo", "orpo", "simpo"],
        Needs(
            "label_smoothing",
            "needs the rate of wrong labels: set {config.table}label_smoothing above 0",
            "robust",
        ),
    ] = Field(default="dpo", description="the method")
    beta: float | None = Field(
        default=None,
        gt=0,
        description="strength of the KL constraint (orpo: of the odds ratio); unset: 0.1, for simpo 2.5",
    )
    label_smoothing: Annotated[
        float,
        Needs(
            "loss = 'dpo' or 'robust'",
            "has no effect with {config.table}loss = '{config.loss}'; it belongs to dpo and robust",
        ),
    ] = Field(
        default=0.0,
        ge=0,
        lt=0.5,
        description="rate of wrong labels that dpo and robust assume",
    )
    margin: Annotated[
        NonNegativeFloat,
        Needs(
            "loss = 'simpo'",
            "has no effect with {config.table}loss = '{config.loss}'; it belongs to simpo",
        ),
    ] = Field(default=0.0, description="simpo's target margin, not multiplied by beta")
    average: Annotated[
        bool,
        Needs(
            "loss = 'ipo'",
            "has no effect with {config.table}loss = '{config.loss}'; it belongs to ipo",
        ),
    ] = Field(
        default=False,
        description="ipo on the mean log ratio of a response's tokens instead of their sum",
    )
    likelihood_weight: float | None = Field(
        default=None,
        ge=0,
        description="of the chosen responses; unset: 1 for orpo, else 0",
    )
    micro_batch_tokens: MicroBatchTokens = 2048

    @property
    def needs_reference(self) -> bool:
        """True if the loss compares with a reference."""
        return self.loss not in REFERENCE_FREE

    @property
    def per_token(self) -> bool:
        """True if the loss compares means over a response's tokens instead of sums."""
        return self.loss in ("orpo", "simpo") or self.average

    @property
    def strength(self) -> float:
        """Beta, or what the loss's own paper takes."""
        return self.beta or (2.5 if self.loss == "simpo" else 0.1)

    @property
    def likelihood(self) -> float:
        """The likelihood's weight: without it ORPO has no tether at all."""
        return (
            float(self.loss == "orpo") if self.likelihood_weight is None else self.likelihood_weight
        )


class DirectConfig(PairLossConfig, ReferencedConfig):
    """Settings of the stage; lengths are in tokens."""

    table: ClassVar[str] = "direct."
    rates: ClassVar[Rates] = Rates(2e-4, 1e-6)

    def faults(self) -> Iterator[str]:
        if not self.needs_reference:
            because = f"with direct.loss = '{self.loss}', which asks no reference"
            yield from self.idle("reference_logprobs", because=because, table="direct.")


class KTOConfig(ReferencedConfig):
    """Settings of the stage; lengths are in tokens."""

    rates: ClassVar[Rates] = Rates(2e-4, 1e-6)

    beta: PositiveFloat = Field(default=0.1, description="strength of the KL constraint")
    desirable_weight: float | None = Field(
        default=None,
        gt=0,
        description="λ_D; unset: both classes weigh alike, at least 1",
    )
    undesirable_weight: float | None = Field(default=None, gt=0, description="λ_U; unset: likewise")
    prompts_per_update: int = Field(
        default=16,
        ge=2,
        description="z0 is estimated over all their responses",
    )

    def weights(self, num_desirable: int, num_undesirable: int) -> dict[str, float]:
        """λ_D and λ_U for these counts of responses: the ones that are set, and otherwise those
        that balance the classes.
        """
        ratio = num_undesirable / num_desirable
        desirable = self.desirable_weight
        undesirable = self.undesirable_weight
        if desirable is None:
            desirable = max(1.0, ratio) if undesirable is None else undesirable * ratio
        undesirable = desirable / ratio if undesirable is None else undesirable
        return {"desirable_weight": desirable, "undesirable_weight": undesirable}


class SFTSection(RowsSection, SFTConfig):
    record: ClassVar[type] = Demonstration
    batch_key: ClassVar[str] = "batch_size"
    data: DemonstrationData | None = Field(default=None, description="where the rows come from")
    lora: OwnLora = LoraConfig()

    @property
    def teacher(self) -> WritingConfig | None:
        """The model that writes the demonstrations; None: the rows are those."""
        return self.data and self.data.teacher

    @property
    def kind(self) -> type:
        return Prompt if self.teacher else self.record

    def work(self, counts: Counts) -> StageWork:
        own = super().work(counts)
        note = " (the teacher's writing of them is not priced)" if self.teacher else ""
        return replace(own, words=own.words + note)


class ProcessSection(RowsSection, ProcessRewardConfig):
    record: ClassVar[type] = StepLabels
    scores: ClassVar[bool] = True
    batch_key: ClassVar[str] = "solutions_per_update"
    lora: OwnLora = LoraConfig()

    @property
    def further_columns(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.label_column, self.problem_column)))


class _OwnReference(RowsSection):
    """A stage that learns from rows against a reference, which is a model of its own where the
    policy is trained whole.

    It has keys of its own alone: those of ReferencedConfig would hide what a stage says of them.
    """

    if TYPE_CHECKING:
        needs_reference: bool
        precomputed: bool

    lora: SteadyLora = Field(
        default=LoraConfig(),
        description="the adapter that learns; false trains the whole model, beside a frozen copy",
    )
    offload: bool = Field(default=False, description=OFFLOAD)

    @property
    def own_models(self) -> bool:
        return self.lora is False and self.needs_reference and not self.precomputed

    def faults(self) -> Iterator[str]:
        if self.offload and not self.own_models:
            yield (
                "offload moves a reference of its own; there is one with lora = false and a "
                "loss that asks it anew"
            )


class DirectSection(_OwnReference, DirectConfig):
    record: ClassVar[type] = Comparison


class KTOSection(_OwnReference, KTOConfig):
    record: ClassVar[type] = Feedback


SupervisedSection = SFTSection | ProcessSection | DirectSection | KTOSection
