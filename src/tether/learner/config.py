"""What a recipe says about optimisation."""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from tether.core.config import Config


class Rates(NamedTuple):
    """The learning rates that a stage takes where nobody names one: adapters bear, and need, far more than whole models."""

    adapters: float
    whole: float


RATES: dict[str, Rates] = {
    "sft": Rates(5e-4, 2e-5),
    "reward": Rates(5e-4, 1e-5),
    "process": Rates(5e-4, 1e-5),
    "direct": Rates(2e-4, 1e-6),
    "kto": Rates(2e-4, 1e-6),
    "policy": Rates(5e-4, 3e-6),
    "best_of_n": Rates(5e-4, 1e-5),
    "online_direct": Rates(5e-4, 1e-6),
}
"""By stage; `policy` is every method with a policy gradient. Measured by benchmarks.defaults; docs/algorithms/README.md."""


class OptimizerConfig(Config):
    """AdamW with a warm-up and a decay, on float32 masters."""

    learning_rate: float | None = Field(
        default=None, gt=0, description="unset: what suits the stage, a higher one for adapters than for whole models"
    )
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    warmup_fraction: float = Field(
        default=0.05, ge=0, lt=1, description="share of the updates in which the rate rises linearly from 0"
    )
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    final_fraction: float = Field(
        default=0.1, ge=0, le=1, description="share of the learning rate that is left at the end of the decay"
    )
    max_skipped: int = Field(
        default=3,
        ge=0,
        description="updates that may be left out because their loss or gradient is not finite; one more is an error",
    )

    @model_validator(mode="after")
    def _check(self) -> OptimizerConfig:
        if not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"optimizer.betas must lie in [0, 1), got {self.betas}")
        if self.schedule == "constant" and "final_fraction" in self.model_fields_set:
            raise ValueError(
                "optimizer.final_fraction has no effect with schedule='constant'; remove it or choose cosine or linear"
            )
        return self


class TrainedConfig(Config):
    """What every stage has that trains weights: an optimizer, whose learning rate follows what is trained, and checkpoints."""

    rates: ClassVar[Rates]

    optimizer: OptimizerConfig = OptimizerConfig()

    checkpoint_every: int = Field(default=20, ge=1, description="steps between checkpoints")
    keep_checkpoints: int = Field(
        default=1, ge=1, description="newest ones that are kept; where more than one is, they outlive the end of the stage"
    )

    def optimizer_for(self, adapter: object) -> OptimizerConfig:
        """The optimizer with the rate that is used: what was set, or the stage's own for an adapter, or (None) a whole model."""
        if self.optimizer.learning_rate is not None and "learning_rate" in self.optimizer.model_fields_set:
            return self.optimizer
        rate = self.rates.whole if adapter is None else self.rates.adapters
        chosen = self.optimizer.model_copy(update={"learning_rate": rate})
        chosen.model_fields_set.discard("learning_rate")  # nobody set it
        return chosen

    def resolved(self, adapter: object) -> Self:
        """The same settings with that optimizer."""
        copy = self.model_copy()
        vars(copy)["optimizer"] = self.optimizer_for(adapter)
        return copy

    @model_validator(mode="after")
    def _resolve(self) -> Self:
        """A section of a recipe says what is trained, and so shows the rate from the start."""
        if "lora" in type(self).model_fields:
            vars(self)["optimizer"] = self.optimizer_for(getattr(self, "lora", None) or None)
        return self


class SupervisedConfig(TrainedConfig):
    """What stages that go through rows have in common."""

    rewind_spike: float | None = Field(
        default=None,
        gt=1,
        description="go back to the last checkpoint and leave an update out if its loss exceeds so many times the median of the "
        "last 20 (Chowdhery et al. 2022)",
    )
    seed: int = 0
