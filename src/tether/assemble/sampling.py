"""What a recipe says of the stages that sample: prompts, rewards, measurements, and the watch over them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from tether.algorithms.reward_ensembles import Combine
from tether.assemble.judge_config import JudgeConfig
from tether.assemble.objectives import Name, check_asked
from tether.assemble.rows import OFFLOAD, DataConfig, SteadyLora
from tether.core.config import Config
from tether.models.config import LoraConfig
from tether.monitoring.detectors import DETECTORS
from tether.monitoring.watch import WatchConfig
from tether.preferences.constitution import read_rubric
from tether.rewards.classifier import ClassifierConfig
from tether.rewards.function import FunctionConfig
from tether.rewards.objectives import ObjectiveConfig
from tether.rewards.verifiable import VerifiableConfig
from tether.stages.best_of_n import BestOfNConfig
from tether.stages.direct import REFERENCE_FREE, DirectConfig
from tether.stages.heldout import EvaluateConfig
from tether.stages.online_direct import OnlineDirectConfig
from tether.stages.policy_config import PolicyConfig


class SycophancyConfig(Config):
    """The same questions after opposite premises about the asker: two files whose rows go together."""

    paths: tuple[str, str]
    pairs: int = Field(default=64, ge=4, description="pairs of prompts that are asked at every measurement")

    @property
    def files(self) -> tuple[str, str]:
        first, second = DataConfig(path=self.paths).paths
        return first, second

    @model_validator(mode="after")
    def _check(self) -> SycophancyConfig:
        if len(set(self.files)) == 1:
            raise ValueError("sycophancy.paths names one file twice: give one for each side")
        return self


class EvaluateSection(EvaluateConfig):
    data: DataConfig | None = Field(default=None, description="held-out prompts; without it some are set aside")
    judge: Literal["reward", "test"] | JudgeConfig = Field(
        default="reward",
        description="who judges: the training's own reward, the model of reward.test_share, or a language model with a rubric",
    )
    sycophancy: SycophancyConfig | None = Field(default=None, description="also measure whether answers depend on who asks")

    @model_validator(mode="after")
    def _check_rubric(self) -> EvaluateSection:
        if isinstance(self.judge, JudgeConfig) and not isinstance(read_rubric(self.judge.rubric), str):
            raise ValueError(f"{self.judge.rubric} holds principles for comparisons; scores need one rubric, in a text file")
        return self


class TaskConfig(Config):
    """Prompts of a reasoning-gym task instead of rows of data."""

    name: str
    size: int = Field(default=512, ge=1)
    seed: int = 0
    config: dict[str, Any] = Field(default_factory=dict, description="the task's own settings")
    system: str | None = Field(default=None, description="a system turn; unset: where the answer belongs; empty: none")


class WatchSection(WatchConfig):
    """The detectors, which are always on, and what is done when one fires, beside writing it down."""

    act: dict[str, Literal["stop", "raise_kl"]] = Field(
        default={}, description="by detector: end the training, or double the KL coefficient"
    )

    @model_validator(mode="after")
    def _check_act(self) -> WatchSection:
        for name in self.act:
            if name not in DETECTORS or name in self.silent:
                raise ValueError(f"act names {name!r}, which is no detector that is asked; there are: {', '.join(DETECTORS)}")
        return self


class OnlineSection(Config):
    """What every stage that samples has."""

    data: DataConfig | None = None
    task: TaskConfig | None = None
    lora: SteadyLora = LoraConfig()
    roles: Literal["shared", "separate"] = Field(default="shared", description="adapters on one trunk, or a model a role")
    offload: bool = Field(default=False, description=OFFLOAD)
    reward_source: Literal["learned", "process", "verifiable", "classifier", "function", "random"] = Field(
        default="learned",
        description="the [reward] stage's model, the [process] stage's, checked answers, a sequence classifier, your function, "
        "or no information",
    )
    verifiable: VerifiableConfig | None = None
    classifier: ClassifierConfig | None = None
    function: FunctionConfig | None = None
    max_failed: float = Field(
        default=0.5, ge=0, le=1, description="share of failed scores, over the last ten steps, at which training stops"
    )
    process_aggregate: Literal["min", "product", "last"] = Field(
        default="min", description="how a response's score is made of its steps' probabilities"
    )
    reward_combine: Combine = Field(
        default="mean", description="how a response's score is made of those of an ensemble's members"
    )
    uncertainty_weight: float = Field(
        default=0.1, ge=0, description="what is taken off the members' mean for their variance; the paper has 0.5 for best-of-n"
    )
    objectives: dict[Name, ObjectiveConfig] | None = Field(
        default=None, min_length=2, description="what each of [reward.objectives] weighs, or where it is held"
    )
    engine_rows: int = Field(default=64, ge=1, description="responses decoded at once")
    evaluate: EvaluateSection | None = Field(default=None, description="measure on held-out prompts along the way")
    watch: WatchSection = WatchSection()

    @model_validator(mode="after")
    def _check_source(self) -> OnlineSection:
        if self.roles == "shared" and self.lora is False:
            raise ValueError("roles = 'shared' needs adapters, and lora is false. Set roles = 'separate' for full fine-tuning")
        if self.roles == "shared" and self.offload:
            raise ValueError("offload moves frozen models of their own, and with roles = 'shared' there are none. Leave it out")
        for name in ("verifiable", "classifier", "function"):
            if (self.reward_source == name) != (getattr(self, name) is not None):
                raise ValueError(f"reward_source = {name!r} and a table named {name} belong together: give both or neither")
        if self.reward_source != "process" and "process_aggregate" in self.model_fields_set:
            raise ValueError("process_aggregate has no effect without reward_source = 'process'")
        if self.reward_source != "learned" and "reward_combine" in self.model_fields_set:
            raise ValueError("reward_combine has no effect without reward_source = 'learned'")
        check_asked(self)
        if "sycophancy" in self.watch.act and (self.evaluate is None or self.evaluate.sycophancy is None):
            raise ValueError("watch.act names 'sycophancy', which nothing measures: set evaluate.sycophancy")
        if self.reward_combine != "uncertainty" and "uncertainty_weight" in self.model_fields_set:
            raise ValueError("uncertainty_weight has no effect without reward_combine = 'uncertainty'")
        return self

    @model_validator(mode="after")
    def _check_prompts(self) -> OnlineSection:
        if self.task is not None and (
            self.data is not None or self.verifiable is None or self.verifiable.kind != "reasoning-gym"
        ):
            raise ValueError("task makes prompts of reasoning-gym: it takes no data, and verifiable.kind must be 'reasoning-gym'")
        if self.evaluate is not None and self.evaluate.keep == "best" and getattr(self, "ema_decay", None):
            raise ValueError("evaluate.keep = 'best' keeps weights as they were, ema_decay ends with their average: choose one")
        if self.task is not None and self.evaluate is not None and self.evaluate.data is not None:
            raise ValueError("with a task, prompts to evaluate on are set aside from it: leave evaluate.data out")
        if self.task is None and self.verifiable is not None and self.verifiable.kind == "reasoning-gym":
            raise ValueError("verifiable.kind = 'reasoning-gym' needs a table task: the entry to score comes with the prompt")
        return self


class PolicySection(OnlineSection, PolicyConfig):
    """Any policy-gradient method; the three below name families of them."""

    reward_per_token: bool = Field(
        default=False, description="with step_rewards: pay at each token what it changed of the reward model's score"
    )

    @model_validator(mode="after")
    def _check_value(self) -> PolicySection:
        if "raise_kl" in self.watch.act.values() and not self.kl.coefficient:
            raise ValueError("watch.act = 'raise_kl' doubles kl.coefficient, which is 0: start above 0, or use 'stop'")
        if self.reward_per_token:
            if self.reward_source != "learned" or not self.step_rewards:
                raise ValueError("reward_per_token needs reward_source = 'learned' and step_rewards = true")
            if self.baseline != "none":
                raise ValueError("reward_per_token has its own baseline, the score before each token: set baseline = 'none'")
            if self.value_init == "reward":
                raise ValueError(
                    "value_init = 'reward' starts from a whole response's score, and with reward_per_token only what will "
                    "still change of it is to come: use 'zero'"
                )
        if self.value_init == "reward" and not (self.critic and self.reward_source == "learned"):
            raise ValueError("value_init = 'reward' needs a critic and a learned reward model (reward_source = 'learned')")
        return self


class PPOSection(PolicySection):
    algorithm: Literal["ppo"] = "ppo"


class GRPOSection(PolicySection):
    algorithm: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"] = "grpo"


class ReinforceSection(PolicySection):
    algorithm: Literal["reinforce", "rloo", "reinforce++", "reinforce++_baseline"] = "reinforce"


class _WithoutTether(OnlineSection):
    """A stage without a KL coefficient that could be raised."""

    @model_validator(mode="after")
    def _check_raise(self) -> _WithoutTether:
        if "raise_kl" in self.watch.act.values():
            raise ValueError("watch.act = 'raise_kl' has no effect in a stage without a KL coefficient: use 'stop'")
        return self


class BestOfNSection(_WithoutTether, BestOfNConfig):
    @property
    def needs_reference(self) -> bool:
        return self.report_kl


class OnlineDirectSection(_WithoutTether, OnlineDirectConfig):
    @property
    def needs_reference(self) -> bool:
        return self.loss not in REFERENCE_FREE


class RoundsSection(Config):
    """Settings of the rounds; `direct` are those of the training in each. Lengths are in tokens."""

    method: Literal["iterative", "spin"] = Field(
        default="iterative", description="pairs of samples ordered by a reward, or demonstrations over samples"
    )
    rounds: int = Field(default=3, ge=1)
    reference: Literal["round", "fixed"] = Field(
        default="round", description="the policy at the round's start, or before the first"
    )
    prompts_per_round: int | None = Field(default=None, ge=1, description="unset: all of them in every round")
    samples_per_prompt: int = Field(default=8, ge=2, description="iterative: the best and the worst of them are a pair")
    max_new_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=1.0, gt=0)
    missing_stop_penalty: float = Field(
        default=0.0, ge=0, description="iterative: taken off the score of a response that did not end in time"
    )
    engine_rows: int = Field(default=64, ge=1, description="responses decoded at once")
    data: DataConfig | None = None
    lora: SteadyLora = LoraConfig()
    direct: DirectConfig = DirectConfig()

    @model_validator(mode="after")
    def _check(self) -> RoundsSection:
        vars(self)["direct"] = self.direct.resolved(self.lora or None)
        if self.method == "spin":
            useless = {"samples_per_prompt", "missing_stop_penalty"} & self.model_fields_set
            if useless:
                raise ValueError(
                    f"rounds.{min(useless)} has no effect with rounds.method = 'spin': each demonstration meets one sample"
                )
            if self.reference == "fixed" or self.direct.loss != "dpo":
                raise ValueError("rounds.method = 'spin' is played against the round's own start with rounds.direct.loss = 'dpo'")
        if "reference" in self.model_fields_set and self.direct.loss in REFERENCE_FREE:
            raise ValueError(f"rounds.reference has no effect with rounds.direct.loss = '{self.direct.loss}', which asks none")
        return self
