"""The classic interface's configuration objects: its names and its defaults, for what tether does
under names of its own.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, ValidationError

from tether.core.errors import ConfigError
from tether.core.types import Json
from tether.settings.budget import Budget
from tether.settings.config import BelowOne, Config, FromOne, Probability, UpToOne
from tether.settings.learner import OptimizerConfig
from tether.settings.messages import explain
from tether.settings.policy import PolicyConfig
from tether.settings.tracking import TrackerNames

if TYPE_CHECKING:
    from transformers import TrainingArguments

Row = Mapping[str, Any]
Trackers = Annotated[
    TrackerNames,
    BeforeValidator(lambda names: () if names in (None, "none") else names),
]


class ClassicConfig(Config):
    """Keyword arguments under their classic names. An argument without a counterpart here is
    refused like any unknown key.
    """

    def __init__(self, **values: object) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            faults = "; ".join(explain(type(self), values, error.errors()))
            raise ConfigError(
                f"{type(self).__name__}: {faults}; see docs/guides/classic.md",
            ) from None


class PPOConfig(ClassicConfig):
    """docs/guides/classic.md says what each setting is called elsewhere in tether."""

    learning_rate: PositiveFloat = 1.41e-5
    batch_size: FromOne = Field(default=128, description="responses a step")
    mini_batch_size: FromOne = Field(
        default=128,
        description="responses of one pass; never more than the batch",
    )
    gradient_accumulation_steps: FromOne = 1
    ppo_epochs: FromOne = 4
    seed: int = 0
    init_kl_coef: NonNegativeFloat = 0.2
    adap_kl_ctrl: bool = True
    kl_penalty: Literal["kl"] = "kl"
    target: PositiveFloat = Field(
        default=6.0,
        description="nats a response that the coefficient is steered to",
    )
    horizon: PositiveFloat = 10_000.0
    gamma: UpToOne = 1.0
    lam: Probability = 0.95
    cliprange: PositiveFloat = 0.2
    cliprange_value: PositiveFloat = 0.2
    vf_coef: NonNegativeFloat = 0.1
    max_grad_norm: float | None = Field(default=None, gt=0)
    early_stopping: bool = False
    target_kl: PositiveFloat = Field(
        default=1.0,
        description="1.5 times this KL(old || new) a token ends the epochs",
    )
    score_clip: float | None = Field(default=None, gt=0)
    output_dir: str = Field(
        default="ppo_output",
        description="what log_stats writes goes to a run directory there",
    )
    log_with: Trackers = ()
    model_name: str | None = Field(default=None, description="for the reader's own use")
    budget: Budget = Field(default=None, description="minutes, after which `dataloader` ends")

    def faults(self) -> Iterator[str]:
        if not self.adap_kl_ctrl:
            yield from self.idle("horizon", "target", because="with adap_kl_ctrl=False")
        if self.batch_size % (self.mini_batch * self.gradient_accumulation_steps):
            yield "batch_size must be a multiple of mini_batch_size * gradient_accumulation_steps"

    def model_post_init(self, context: object) -> None:
        if "target_kl" in self.model_fields_set and not self.early_stopping:
            warnings.warn(
                "target_kl is the threshold of early stopping, which is off; the KL is steered "
                f"to target = {self.target:g}",
                stacklevel=4,
            )

    @property
    def mini_batch(self) -> int:
        return min(self.mini_batch_size, self.batch_size)

    def policy_config(self) -> PolicyConfig:
        """The same in tether's own names."""
        minibatches = self.batch_size // (self.mini_batch * self.gradient_accumulation_steps)
        norm = self.max_grad_norm or math.inf
        adam = OptimizerConfig(
            learning_rate=self.learning_rate,
            max_grad_norm=norm,
            schedule="constant",
            warmup_fraction=0.0,
        )
        kl: Json = {"coefficient": self.init_kl_coef}
        if self.adap_kl_ctrl and self.init_kl_coef:
            kl |= {"mode": "adaptive", "target": self.target, "horizon": self.horizon}
        settings = self.model_dump(include={"gamma", "lam", "score_clip", "seed"}) | {
            "algorithm": "ppo",
            "optimizer": adam,
            "prompts_per_step": self.batch_size,
            "samples_per_prompt": 1,
            "minibatches": minibatches,
            "epochs": self.ppo_epochs,
            "normalize_scores": False,
            "kl": kl,
            "value_coefficient": self.vf_coef,
            "value_trains_trunk": True,
        }
        clips: Json = {"clip_range": self.cliprange, "value_clip_range": self.cliprange_value}
        if self.early_stopping:
            clips["target_kl"] = 1.5 * self.target_kl
        if self.ppo_epochs * minibatches == 1:  # nothing has moved that could be clipped
            clips = {}
        return PolicyConfig.model_validate(settings | clips)


class TrainingConfig(ClassicConfig):
    """The part of transformers' TrainingArguments that the supervised trainers take."""

    output_dir: str = "trainer_output"
    per_device_train_batch_size: FromOne = 8
    gradient_accumulation_steps: FromOne = 1
    num_train_epochs: FromOne = 3
    learning_rate: PositiveFloat = 5e-5
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"
    warmup_ratio: BelowOne = 0.0
    warmup_steps: NonNegativeFloat = Field(
        default=0,
        description="updates, or below 1 a share; goes before warmup_ratio",
    )
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    bf16: bool = Field(
        default=False,
        description="weights in bfloat16, with float32 masters in the optimizer",
    )
    use_cpu: bool = False
    seed: int = 42
    save_steps: FromOne = 500
    logging_steps: FromOne = 500
    report_to: Trackers = ()
    budget: Budget = Field(
        default=None,
        description="minutes, after which `train` ends, at a whole update",
    )
    remove_unused_columns: bool = Field(
        default=True,
        description="no column is removed, and none but the named ones is read",
    )

    @classmethod
    def of(cls, args: TrainingConfig | TrainingArguments | None, **overrides: object) -> Self:
        """The settings of a TrainingConfig or of transformers' TrainingArguments, or the defaults.

        Raises:
            ConfigError: TrainingArguments set something that has no counterpart here.
        """
        if args is None or isinstance(args, TrainingConfig):
            return cls(**{**(args.model_dump(exclude_unset=True) if args else {}), **overrides})
        plain = type(args)(use_cpu=args.use_cpu).to_dict()
        changed = {name: value for name, value in args.to_dict().items() if value != plain[name]}
        return cls(**{**changed, "use_cpu": args.use_cpu, **overrides})

    def optimizer(self, updates: int) -> OptimizerConfig:
        """The optimizer of a training of so many updates; the learning rate falls to 0 unless it is
        constant.
        """
        warmup = self.warmup_steps or self.warmup_ratio
        warmup = warmup if warmup < 1 else warmup / updates
        settings = self.model_dump(include={"learning_rate", "weight_decay", "max_grad_norm"}) | {
            "schedule": self.lr_scheduler_type,
            "warmup_fraction": min(0.999, warmup),
        }
        if self.lr_scheduler_type != "constant":
            settings["final_fraction"] = 0.0
        return OptimizerConfig.model_validate(settings)


class SFTConfig(TrainingConfig):
    """Lengths are in tokens. Packed texts do not see each other, so that `packing` changes the
    speed alone.
    """

    max_seq_length: int = Field(default=1024, ge=8, description="longer texts are cut there")
    dataset_text_field: str = "text"
    packing: bool = False


class RewardConfig(TrainingConfig):
    """Lengths are in tokens."""

    max_length: int = Field(default=1024, ge=8, description="pairs with a longer side are left out")
    center_rewards_coefficient: NonNegativeFloat = 0.0
