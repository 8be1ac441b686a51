"""The classic interface's configuration objects: its names, its defaults, and one sentence where a setting cannot be had."""

from __future__ import annotations

import dataclasses
import difflib
import math
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator

from tether.core.config import Config
from tether.core.errors import ConfigError
from tether.learner.config import OptimizerConfig
from tether.stages.policy_config import KLConfig, PolicyConfig

NEUTRAL = (None, False, "no", -1, {})
"""Values of a refused setting that ask for nothing."""
DERIVED = "it follows from the model and the batch sizes in one process; leave it out"
UPLOAD = "nothing is uploaded; call save_pretrained when a result is worth keeping"


class ClassicConfig(Config):
    """Keyword arguments under their classic names; `refused` says of a known one why it cannot be had."""

    refused: ClassVar[Mapping[str, str]] = {}

    def __init__(self, **values: Any) -> None:
        name, refused, known = type(self).__name__, self.refused, type(self).model_fields
        values = {key: value for key, value in values.items() if key not in refused or value not in NEUTRAL}
        for key in values:
            if key in refused:
                raise ConfigError(f"{name}.{key} has no effect here: {refused[key]}")
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
                hint = f"did you mean {near[0]!r}?" if near else f"it knows {', '.join(sorted(known))}"
                raise ConfigError(f"{name} has no setting {key!r} ({hint})")
        try:
            super().__init__(**values)
        except ValidationError as error:
            found = [f"{'.'.join(map(str, e['loc']))} {e['msg'].removeprefix('Value error, ')}" for e in error.errors()]
            raise ConfigError(f"{name}: {'; '.join(found)}") from None

    def to_dict(self) -> dict[str, Any]:
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
    log_with: Literal["wandb", "tensorboard"] | None = None
    tracker_project_name: str = "tether"
    tracker_kwargs: dict[str, Any] = Field(default_factory=dict)
    project_kwargs: dict[str, Any] = Field(default_factory=dict)
    exp_name: str | None = None
    task_name: str | None = None
    model_name: str | None = None
    query_dataset: str | None = None
    reward_model: str | None = None

    refused: ClassVar[Mapping[str, str]] = {
        "forward_batch_size": "it is called mini_batch_size",
        "remove_unused_columns": "no column is ever removed; leave it out or set it to False",
        "accelerator_kwargs": "there is no accelerator; models go to the first GPU, or stay on the CPU",
        "dataset_num_proc": "the dataset is not processed; tokenize it before",
        **dict.fromkeys(("optimize_cuda_cache", "optimize_device_cache"), "no cache is emptied between passes; leave it out"),
        **dict.fromkeys(("push_to_hub_if_best_kwargs", "compare_steps"), UPLOAD),
        **dict.fromkeys(("world_size", "is_encoder_decoder", "is_peft_model", "backward_batch_size"), DERIVED),
        **dict.fromkeys(("global_batch_size", "global_backward_batch_size"), DERIVED),
    }

    @model_validator(mode="after")
    def _check(self) -> PPOConfig:
        useless = sorted({"target", "horizon"} & self.model_fields_set)
        if useless and not self.adap_kl_ctrl:
            raise ValueError(f"{useless[0]} has no effect with adap_kl_ctrl=False")
        if self.use_score_norm and not self.use_score_scaling:
            raise ValueError("use_score_norm has no effect without use_score_scaling=True")
        if self.batch_size % (self.mini_batch * self.gradient_accumulation_steps):
            raise ValueError("batch_size must be a multiple of mini_batch_size * gradient_accumulation_steps")
        if "target_kl" in self.model_fields_set and not self.early_stopping:
            warnings.warn(
                "target_kl is the threshold of early stopping and changes nothing while early_stopping=False; the KL that the "
                f"coefficient is steered to is called target, and is {self.target:g}",
                stacklevel=4,
            )
        return self

    @property
    def mini_batch(self) -> int:
        return self.mini_batch_size or min(128, self.batch_size)

    @property
    def total_ppo_epochs(self) -> int:
        return math.ceil(self.steps / self.batch_size)

    def policy_config(self) -> PolicyConfig:
        """The same in tether's own names."""
        updates = self.ppo_epochs * (minibatches := self.batch_size // (self.mini_batch * self.gradient_accumulation_steps))
        clips: dict[str, Any] = {"clip_range": self.cliprange, "value_clip_range": self.cliprange_value}
        if self.early_stopping:
            clips["target_kl"] = 1.5 * self.target_kl
        adaptive: dict[str, Any] = {"mode": "adaptive", "target": self.target, "horizon": self.horizon}
        return PolicyConfig(
            algorithm="ppo",
            prompts_per_step=self.batch_size,
            epochs=self.ppo_epochs,
            minibatches=minibatches,
            gamma=self.gamma,
            lam=self.lam,
            value_coefficient=self.vf_coef,
            value_trains_trunk=True,
            normalize_scores=False,
            score_clip=self.score_clip,
            kl=KLConfig(coefficient=self.init_kl_coef, **(adaptive if self.adap_kl_ctrl and self.init_kl_coef else {})),
            optimizer=OptimizerConfig(
                learning_rate=self.learning_rate,
                schedule="constant",
                warmup_fraction=0.0,
                max_grad_norm=self.max_grad_norm or math.inf,
            ),
            seed=self.seed,
            **(clips if updates > 1 else {}),  # before the first update nothing has moved that could be clipped
        )


Reporting = Literal["none", "wandb", "tensorboard"]


class TrainingConfig(ClassicConfig):
    """What the supervised trainers take of transformers' TrainingArguments."""

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
        "fp16": "there is no loss scaling; use bf16=True, whose range needs none",
        "max_steps": "the length of the training is num_train_epochs; give fewer rows for fewer steps",
        **dict.fromkeys(("evaluation_strategy", "eval_strategy"), "call evaluate() before and after train()"),
    }

    @classmethod
    def of(cls, args: Any, **overrides: Any) -> Any:
        """The settings in an object of this class, in transformers' TrainingArguments, or the defaults.

        Raises:
            ConfigError: TrainingArguments set something that has no counterpart here.
        """
        if args is None:
            return cls(**overrides)
        if isinstance(args, cls):
            return cls(**{**{name: getattr(args, name) for name in args.model_fields_set}, **overrides})
        plain = type(args)(output_dir=args.output_dir, use_cpu=args.use_cpu)
        names = [field.name for field in dataclasses.fields(args) if field.init and field.name != "use_cpu"]
        changed = {name: getattr(args, name) for name in names if getattr(args, name) != getattr(plain, name)}
        values = {name: getattr(value, "value", value) for name, value in changed.items()}
        return cls(**{"output_dir": args.output_dir, "use_cpu": args.use_cpu, **values, **overrides})

    @model_validator(mode="after")
    def _check(self) -> TrainingConfig:
        if self.warmup_ratio and self.warmup_steps:
            raise ValueError("warmup_ratio has no effect beside warmup_steps; remove one of them")
        return self

    @property
    def rows_per_update(self) -> int:
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    def optimizer(self, updates: int) -> OptimizerConfig:
        schedule: dict[str, Any] = {"schedule": self.lr_scheduler_type.removesuffix("_with_warmup")}
        if schedule["schedule"] != "constant":
            schedule["final_fraction"] = 0.0
        steps = self.warmup_steps if self.warmup_steps < 1 else self.warmup_steps / updates
        return OptimizerConfig(
            learning_rate=self.learning_rate,
            betas=(self.adam_beta1, self.adam_beta2),
            epsilon=self.adam_epsilon,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm or math.inf,
            warmup_fraction=min(0.999, self.warmup_ratio or steps),
            **schedule,
        )


class SFTConfig(TrainingConfig):
    """Lengths are in tokens. Packed texts do not see each other, so that `packing` changes the speed alone."""

    max_seq_length: int = Field(default=1024, ge=8, description="longer texts are cut there")
    dataset_text_field: str = "text"
    packing: bool = False


class RewardConfig(TrainingConfig):
    """Lengths are in tokens."""

    max_length: int = Field(default=1024, ge=8, description="pairs with a longer side are left out")
    center_rewards_coefficient: float = Field(default=0.0, ge=0)
