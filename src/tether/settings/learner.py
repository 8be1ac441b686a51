"""The settings of optimisation, and those that the stages on rows share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from tether.settings.config import BelowOne, Config, FromOne, Probability
from tether.settings.needs import Needs

MORE_RANKS = Needs(
    "ranks > 1",
    "has no effect on one rank: set learner.ranks to 2 or more, or leave it out",
)

MicroBatchTokens = Annotated[
    int,
    Field(ge=8, description="padded size of a micro-batch; unset on a GPU: up to 8192"),
]


class LearnerConfig(Config):
    """The processes that train together; learner.ranks says how."""

    ranks: FromOne = Field(
        default=1,
        description="processes that train together, each on its share of every step's rows",
    )
    timeout: Annotated[float, MORE_RANKS] = Field(
        default=60.0,
        ge=5,
        description="seconds without a sign of life after which a rank is lost",
    )
    restarts: Annotated[NonNegativeInt, MORE_RANKS] = Field(
        default=3,
        description="of all ranks from the last checkpoint, in a row and without getting further; 0: none",
    )

    shard: Annotated[bool, MORE_RANKS] = Field(
        default=False,
        description="each rank holds its part of the trunk's layers alone (FSDP2); "
        "what samples must be servers",
    )


class Rates(NamedTuple):
    """The default learning rates of a stage: adapters bear, and need, far higher ones than whole
    models; docs/methods/README.md has those of all stages.
    """

    adapters: float
    whole: float


class OptimizerConfig(Config):
    """AdamW with a warm-up and a decay, on float32 masters.

    A section uses the fields that were set, and its stage's own defaults for the others.
    """

    kind: Literal["adamw", "adamw8bit"] = Field(
        default="adamw",
        description="adamw8bit: its two moments in 8 bits instead of 32 "
        "(bitsandbytes); masters stay in float32",
    )
    learning_rate: float | None = Field(
        default=None,
        gt=0,
        description="unset: the stage's, for adapters or for whole models",
    )
    betas: tuple[float, float] = Field(
        default=(0.9, 0.999),
        description="of AdamW: decay of the means of gradients and of their squares",
    )
    epsilon: PositiveFloat = Field(
        default=1e-8,
        description="of AdamW: added to the root of the mean square",
    )
    weight_decay: NonNegativeFloat = Field(default=0.0, description="of AdamW, decoupled")
    max_grad_norm: PositiveFloat = Field(
        default=1.0,
        description="longer gradients are shortened to this",
    )
    warmup_fraction: BelowOne = Field(
        default=0.05,
        description="share of the updates in which the rate rises from 0",
    )
    schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine",
        description="of the learning rate after the warm-up",
    )
    final_fraction: Annotated[
        Probability,
        Needs(
            "schedule != 'constant'",
            "has no effect with schedule='constant'; choose another, or remove it",
        ),
    ] = Field(
        default=0.1,
        description="share of the rate that is left at the end of the decay",
    )
    max_skipped: NonNegativeInt = Field(
        default=3,
        description="updates that may be left out as not finite; one more is an error",
    )

    def faults(self) -> Iterator[str]:
        if not all(0 <= b < 1 for b in self.betas):
            yield f"optimizer.betas must lie in [0, 1), got {self.betas}"


class TrainedConfig(Config):
    """The settings of every stage that trains: an optimizer, with a rate for adapters or for whole
    models, and checkpoints.
    """

    rates: ClassVar[Rates]

    optimizer: OptimizerConfig = Field(
        default=OptimizerConfig(),
        description="AdamW and its learning rate",
    )

    checkpoint_every: FromOne = Field(default=20, description="steps between checkpoints")
    keep_checkpoints: FromOne = Field(
        default=1,
        description="newest ones to keep; more than one outlive the end of the stage",
    )

    def optimizer_for(self, adapter: object) -> OptimizerConfig:
        """The optimizer with the rate that is used: what was set, or the stage's own for an
        adapter, or (None) a whole model.
        """
        optimizer = self.optimizer
        if optimizer.learning_rate is not None and "learning_rate" in optimizer.model_fields_set:
            return optimizer
        rate = self.rates.whole if adapter is None else self.rates.adapters
        chosen = optimizer.model_copy(update={"learning_rate": rate})
        chosen.model_fields_set.discard("learning_rate")  # it is a default
        return chosen

    def resolved(self, adapter: object) -> Self:
        """The same settings with that optimizer."""
        copy = self.model_copy()
        vars(copy)["optimizer"] = self.optimizer_for(adapter)
        return copy

    @model_validator(mode="after")
    def _resolve(self) -> Self:
        """A section of a recipe has `lora`, and so shows the rate from the start."""
        fields = dict(self)
        if "lora" in fields:
            vars(self)["optimizer"] = self.optimizer_for(fields["lora"] or None)
        return self


class SupervisedConfig(TrainedConfig):
    """The settings that all stages on rows share; lengths are in tokens."""

    epochs: FromOne = Field(default=1, description="passes over the rows")
    max_length: int = Field(default=1024, ge=8, description="longer rows are left out and counted")
    heldout_fraction: BelowOne = Field(
        default=0.1,
        description="share of the prompts that only evaluate",
    )
    evaluate_every: NonNegativeInt = Field(
        default=0,
        description="updates between evaluations; 0: only at the end",
    )
    seed: int = Field(default=0, description="of the order of rows and of what is held out")


TooLong = Annotated[
    Literal["leave_out", "truncate"],
    Field(
        description="of rows beyond max_length: left out, or cut there without a stop token; both "
        "are counted",
    ),
]


class PreferenceConfig(SupervisedConfig):
    """The settings that the stages on several responses to a prompt share."""

    prompts_per_update: FromOne = Field(
        default=16,
        description="all responses to a prompt stand in one update",
    )
    micro_batch_tokens: int = Field(
        default=2048,
        ge=8,
        description="padded size of a micro-batch, which holds whole prompts; "
        "unset on a GPU: up to 8192",
    )


class ReferencedConfig(PreferenceConfig):
    """The settings that the stages share which compare a policy with its frozen reference."""

    too_long: TooLong = "leave_out"
    reference_logprobs: Literal["each_update", "precomputed"] = Field(
        default="each_update",
        description="ask the reference in every update, or once before training, after which it can go",
    )

    @property
    def precomputed(self) -> bool:
        """True where the reference runs once, before training."""
        return self.reference_logprobs == "precomputed"

    @property
    def needs_reference(self) -> bool:
        """True if the loss needs a reference."""
        return True
