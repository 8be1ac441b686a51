"""The classic interface's configuration objects: its names, its defaults, and one sentence where a setting cannot be had."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationError

from tether.core.config import Config, explain
from tether.core.errors import ConfigError
from tether.core.types import Json
from tether.learner.config import OptimizerConfig
from tether.run.trackers import TrackerName
from tether.stages.policy_config import PolicyConfig

Row = Mapping[str, Any]
NEUTRAL = (None, False, "no", -1, {})
"""Values of a refused setting that ask for nothing."""


class ClassicConfig(Config):
    """Keyword arguments under their classic names; `refused`: why some cannot be had, and their names."""

    refused: ClassVar[Mapping[str, str]] = {}

    def __init__(self, **values: Any) -> None:
        name = type(self).__name__
        reasons = {key: reason for reason, keys in self.refused.items() for key in keys.split()}
        given = {key: value for key, value in values.items() if key not in reasons or value not in NEUTRAL}
        for key in filter(reasons.__contains__, given):
            raise ConfigError(f"{name}.{key} has no effect here: {reasons[key]}")
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise ConfigError(f"{name}: {'; '.join(explain(type(self), given, error.errors()))}") from None

    def to_dict(self) -> Json:
        return self.model_dump()


class PPOConfig(ClassicConfig):
    """docs/classic.md says what each setting is called elsewhere in tether."""

    learning_rate: float = Field(default=1.41e-5, gt=0)
    batch_size: int = Field(default=128, ge=1, description="responses a step")
    mini_batch_size: int | None = Field(None, ge=1, description="responses of one pass; unset: the batch, at most 128")
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    ppo_epochs: int = Field(default=4, ge=1)
    steps: int = Field(default=20_000, ge=1, description="responses of the whole training; total_ppo_epochs follows from it")
    seed: int = 0
    init_kl_coef: float = Field(default=0.2, ge=0)
    adap_kl_ctrl: bool = True
    kl_penalty: Literal["kl", "abs", "mse", "full"] = "kl"
    target: float = Field(default=6.0, gt=0, description="nats a response that the coefficient is steered to")
    horizon: float = Field(default=10_000.0, gt=0)
    gamma: float = Field(default=1.0, gt=0, le=1)
    lam: float = Field(default=0.95, ge=0, le=1)
    cliprange: float = Field(default=0.2, gt=0)
    cliprange_value: float = Field(default=0.2, gt=0)
    vf_coef: float = Field(default=0.1, ge=0)
    max_grad_norm: float | None = Field(default=None, gt=0)
    early_stopping: bool = False
    target_kl: float = Field(default=1.0, gt=0, description="1.5 times this KL(old || new) a token ends the epochs")
    ratio_threshold: float = Field(default=10.0, gt=0, description="a mini-batch of a higher mean ratio is not learned from")
    use_score_scaling: bool = False
    use_score_norm: bool = False
    score_clip: float | None = Field(default=None, gt=0)
    whiten_rewards: bool = False
    gradient_checkpointing: bool = False
    output_dir: str | None = Field(default=None, description="a run directory is written there, if anywhere")
    log_with: TrackerName | None = None
    tracker_project_name: str = "tether"
    tracker_kwargs: Json = Field(default_factory=dict)
    project_kwargs: Json = Field(default_factory=dict)
    exp_name: str | None = None
    task_name: str | None = None
    model_name: str | None = None
    query_dataset: str | None = None
    reward_model: str | None = None

    refused: ClassVar[Mapping[str, str]] = {
        "it is called mini_batch_size": "forward_batch_size",
        "no column is ever removed; leave it out or set it to False": "remove_unused_columns",
        "there is no accelerator; models go to the first GPU, or stay on the CPU": "accelerator_kwargs",
        "the dataset is not processed; tokenize it before": "dataset_num_proc",
        "no cache is emptied between passes; leave it out": "optimize_cuda_cache optimize_device_cache",
        "nothing is uploaded; call save_pretrained when a result is worth keeping": "push_to_hub_if_best_kwargs compare_steps",
        "it follows from the model and the batch sizes in one process; leave it out": "world_size is_peft_model "
        "is_encoder_decoder backward_batch_size global_batch_size global_backward_batch_size",
    }

    def faults(self) -> Iterator[str]:
        if not self.adap_kl_ctrl:
            yield from self.idle("horizon", "target", because="with adap_kl_ctrl=False")
        if self.use_score_norm and not self.use_score_scaling:
            yield "use_score_norm has no effect without use_score_scaling=True"
        if self.batch_size % (self.mini_batch * self.gradient_accumulation_steps):
            yield "batch_size must be a multiple of mini_batch_size * gradient_accumulation_steps"

    def model_post_init(self, context: object) -> None:
        if "target_kl" in self.model_fields_set and not self.early_stopping:
            warnings.warn(
                "target_kl is the threshold of early stopping and changes nothing while early_stopping=False; the KL that the "
                f"coefficient is steered to is called target, and is {self.target:g}",
                stacklevel=4,
            )

    @property
    def mini_batch(self) -> int:
        return self.mini_batch_size or min(128, self.batch_size)

    @property
    def total_ppo_epochs(self) -> int:
        return math.ceil(self.steps / self.batch_size)

    def policy_config(self) -> PolicyConfig:
        """The same in tether's own names."""
        minibatches = self.batch_size // (self.mini_batch * self.gradient_accumulation_steps)
        updates: Json = {"epochs": self.ppo_epochs, "minibatches": minibatches, "seed": self.seed}
        updates["optimizer"] = _optimizer(self, schedule="constant", warmup_fraction=0.0)
        kl: Json = {"coefficient": self.init_kl_coef}
        if self.adap_kl_ctrl and self.init_kl_coef:
            kl |= {"mode": "adaptive", "target": self.target, "horizon": self.horizon}
        rewards: Json = {"normalize_scores": False, "score_clip": self.score_clip, "kl": kl}
        critic: Json = {"gamma": self.gamma, "lam": self.lam, "value_coefficient": self.vf_coef}
        clips: Json = {"clip_range": self.cliprange, "value_clip_range": self.cliprange_value}
        if self.early_stopping:
            clips["target_kl"] = 1.5 * self.target_kl
        if self.ppo_epochs * minibatches == 1:  # nothing has moved that could be clipped
            clips = {}
        settings = updates | rewards | critic | clips
        return PolicyConfig(algorithm="ppo", prompts_per_step=self.batch_size, value_trains_trunk=True, **settings)


def _optimizer(config: PPOConfig | TrainingConfig, **settings: Any) -> OptimizerConfig:
    """Without a norm nothing is clipped."""
    norm = config.max_grad_norm or math.inf
    return OptimizerConfig(learning_rate=config.learning_rate, max_grad_norm=norm, **settings)


Reporting = TrackerName | Literal["none"]


class TrainingConfig(ClassicConfig):
    """The part of transformers' TrainingArguments that the supervised trainers take."""

    output_dir: str = "trainer_output"
    per_device_train_batch_size: int = Field(default=8, ge=1)
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    num_train_epochs: int = Field(default=3, ge=1)
    learning_rate: float = Field(default=5e-5, gt=0)
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "linear"
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    warmup_steps: float = Field(default=0, ge=0, description="updates, or below 1 a share of them")
    weight_decay: float = Field(default=0.0, ge=0)
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = Field(default=1.0, ge=0)
    bf16: bool = Field(default=False, description="weights in bfloat16, with float32 masters in the optimizer")
    use_cpu: bool = False
    seed: int = 42
    save_steps: int = Field(default=500, ge=1)
    logging_steps: int = Field(default=500, ge=1)
    report_to: Reporting | list[Reporting] | None = "none"
    run_name: str | None = None
    remove_unused_columns: bool = Field(default=True, description="no column is removed, and none but the named ones is read")

    refused: ClassVar[Mapping[str, str]] = {
        "there is no loss scaling; use bf16=True, whose range needs none": "fp16",
        "the length of the training is num_train_epochs; give fewer rows for fewer steps": "max_steps",
        "call evaluate() before and after train()": "evaluation_strategy eval_strategy",
    }

    @classmethod
    def of(cls, args: Any, **overrides: Any) -> Any:
        """The settings in an object of this class, in transformers' TrainingArguments, or the defaults.

        Raises:
            ConfigError: TrainingArguments set something that has no counterpart here.
        """
        if args is None or isinstance(args, cls):
            return cls(**{**(args.model_dump(exclude_unset=True) if args else {}), **overrides})
        base = {"output_dir": args.output_dir, "use_cpu": args.use_cpu}
        plain, names = type(args)(**base), [field.name for field in dataclasses.fields(args) if field.init]
        changed = {name: getattr(args, name) for name in names if getattr(args, name) != getattr(plain, name)}
        values = {name: value.value if isinstance(value, Enum) else value for name, value in changed.items()}
        return cls(**{**base, **values, **overrides})

    def faults(self) -> Iterator[str]:
        if self.warmup_ratio and self.warmup_steps:
            yield "warmup_ratio has no effect beside warmup_steps; remove one of them"

    @property
    def tracker(self) -> TrackerName | None:
        """The one that is to have the numbers too."""
        names: list[Reporting] = self.report_to if isinstance(self.report_to, list) else [self.report_to or "none"]
        return next((name for name in names if name != "none"), None)

    def optimizer(self, updates: int) -> OptimizerConfig:
        """The optimizer of a training of so many updates; the learning rate falls to 0 unless it is constant."""
        schedule = self.lr_scheduler_type.removesuffix("_with_warmup")
        warmup = self.warmup_ratio or (self.warmup_steps if self.warmup_steps < 1 else self.warmup_steps / updates)
        rates: Json = {"schedule": schedule, "warmup_fraction": min(0.999, warmup)}
        rates |= {} if schedule == "constant" else {"final_fraction": 0.0}
        adam: Json = {"betas": (self.adam_beta1, self.adam_beta2), "epsilon": self.adam_epsilon}
        return _optimizer(self, weight_decay=self.weight_decay, **rates, **adam)


class SFTConfig(TrainingConfig):
    """Lengths are in tokens. Packed texts do not see each other, so that `packing` changes the speed alone."""

    max_seq_length: int = Field(default=1024, ge=8, description="longer texts are cut there")
    dataset_text_field: str = "text"
    packing: bool = False


class RewardConfig(TrainingConfig):
    """Lengths are in tokens."""

    max_length: int = Field(default=1024, ge=8, description="pairs with a longer side are left out")
    center_rewards_coefficient: float = Field(default=0.0, ge=0)
