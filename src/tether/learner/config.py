"""What a recipe says about optimisation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tether.core.config import Config


class SavedConfig(Config):
    """When a training is saved."""

    checkpoint_every: int = Field(default=20, ge=1, description="steps between checkpoints")
    keep_checkpoints: int = Field(
        default=1, ge=1, description="newest ones that are kept; where more than one is, they outlive the end of the stage"
    )


class SupervisedConfig(SavedConfig):
    """What stages that go through rows have in common."""

    rewind_spike: float | None = Field(
        default=None,
        gt=1,
        description="go back to the last checkpoint and leave an update out if its loss exceeds so many times the median of the "
        "last 20 (Chowdhery et al. 2022)",
    )
    seed: int = 0


class OptimizerConfig(Config):
    """AdamW with a warm-up and a decay, on float32 masters."""

    learning_rate: float = Field(default=1e-5, gt=0)
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
