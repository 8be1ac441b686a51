"""What a recipe says: one section a stage, its own settings with where its rows come from and what it trains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, model_validator

from tether.algorithms.reward_ensembles import Combine
from tether.assemble.objectives import Name, check_names, check_trained, objective_names
from tether.assemble.rows import OFFLOAD, DataConfig, Lora, SteadyLora
from tether.assemble.sampling import BestOfNSection, GRPOSection, OnlineDirectSection, PPOSection, ReinforceSection, RoundsSection
from tether.core.config import Config
from tether.models.config import LoraConfig, ModelConfig
from tether.stages.direct import REFERENCE_FREE, DirectConfig
from tether.stages.kto import KTOConfig
from tether.stages.process_reward import ProcessRewardConfig
from tether.stages.reward import RewardConfig
from tether.stages.sft import SFTConfig


class SFTSection(SFTConfig):
    data: DataConfig | None = None
    lora: Lora = LoraConfig()


class RewardSection(RewardConfig):
    data: DataConfig | None = None
    objectives: dict[Name, DataConfig] | None = Field(
        default=None, min_length=2, description="instead of data: by name the comparisons of several reward models"
    )
    test: dict[str, DataConfig] = Field(default_factory=dict, description="further held-out comparisons, evaluated by name")
    test_share: float = Field(
        default=0.0, ge=0, lt=1, description="share of the prompts whose comparisons train a second model, which only judges"
    )
    lora: Lora = LoraConfig()
    members: int = Field(
        default=1, ge=1, description="more than one: an ensemble on one trunk, with seeds and orders of their own"
    )
    average: bool = Field(
        default=False, description="make one model of the members by averaging their weights, https://arxiv.org/abs/2401.12187"
    )

    distill: Combine | None = Field(
        default=None, description="train one more model on what the members say together, and keep that one"
    )

    @property
    def is_ensemble(self) -> bool:
        """Whether several models will score."""
        return self.members > 1 and not self.average and self.distill is None

    @model_validator(mode="after")
    def _check_members(self) -> RewardSection:
        check_trained(self)
        if self.members > 1 and self.lora is False:
            raise ValueError("the members of an ensemble are adapters on one trunk, and lora is false. Leave members or lora out")
        for name in ("average", "distill"):
            if getattr(self, name) and self.members == 1:
                raise ValueError(f"{name} has no effect on one model: set members to 2 or more")
        if self.average and self.distill:
            raise ValueError("average and distill both make one model of the members: choose one")
        if self.distill and self.disentangle_length:
            raise ValueError("a student has its teachers' scores and no second head: disentangle_length does not go with distill")
        if self.disentangle_length and self.lora is not False and self.lora.dropout:
            raise ValueError(
                "disentangle_length scores every response twice, and with lora.dropout they would differ: leave one out"
            )
        return self


class ProcessSection(ProcessRewardConfig):
    data: DataConfig | None = None
    lora: Lora = LoraConfig()


class _OwnReference(Config):
    """A stage that learns from rows against a reference, which is a model of its own where the policy is trained whole."""

    data: DataConfig | None = None
    lora: SteadyLora = LoraConfig()
    offload: bool = Field(default=False, description=OFFLOAD)

    @property
    def needs_reference(self) -> bool:
        return True

    @model_validator(mode="after")
    def _check_offload(self) -> _OwnReference:
        asked_before = getattr(self, "reference_logprobs", "") == "precomputed"
        if self.offload and (self.lora is not False or not self.needs_reference or asked_before):
            raise ValueError("offload moves a reference of its own; there is one with lora = false and a loss that asks it anew")
        return self


class DirectSection(_OwnReference, DirectConfig):
    @property
    def needs_reference(self) -> bool:
        return self.loss not in REFERENCE_FREE


class KTOSection(_OwnReference, KTOConfig):
    pass


ONLINE = ("ppo", "grpo", "reinforce", "best_of_n", "online_direct")
"""Stages that sample."""
STAGES = ("sft", "reward", "process", "direct", "kto", *ONLINE, "rounds")
"""All stages, in the order in which a recipe runs them."""


class Recipe(Config):
    """A journey of stages over one model. A stage whose section is missing is not run."""

    run: str = Field(description="the run directory")
    seed: int = 0
    deterministic: bool = Field(
        default=False, description="only kernels that give the same bits every time; an error names one that cannot"
    )
    model: ModelConfig
    sft: SFTSection | None = None
    reward: RewardSection | None = None
    process: ProcessSection | None = None
    direct: DirectSection | None = None
    kto: KTOSection | None = None
    ppo: PPOSection | None = None
    grpo: GRPOSection | None = None
    reinforce: ReinforceSection | None = None
    best_of_n: BestOfNSection | None = None
    online_direct: OnlineDirectSection | None = None
    rounds: RoundsSection | None = None

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        for name in (*ONLINE, "rounds"):
            section = getattr(self, name)
            if isinstance(section, RoundsSection):
                source = "learned" if section.method == "iterative" else None
            else:
                source = section.reward_source if section is not None else None
            if section is None or source not in ("learned", "process"):
                continue
            stage = "reward" if source == "learned" else "process"
            model = Path(self.run) / stage / "model"
            if getattr(self, stage) is None and not any(
                (model / f"{f}.json").is_file() for f in ("role", "ensemble", "objectives")
            ):
                raise ValueError(
                    f"{name}.reward_source = '{source}' needs a [{stage}] section, or a finished {stage} stage in "
                    "the run directory"
                )
            if source == "learned":
                trained = objective_names(model) if self.reward is None else self.reward.objectives or ()
                check_names(name, getattr(section, "objectives", None), trained)
            ensemble = self.reward.is_ensemble if self.reward is not None else (model / "ensemble.json").is_file()
            if not ensemble and "reward_combine" in section.model_fields_set:
                raise ValueError(f"{name}.reward_combine has no effect on one reward model: set reward.members, without average")
            if ensemble and getattr(section, "value_init", None) == "reward":
                raise ValueError(f"{name}.value_init = 'reward' copies one reward model, and an ensemble has several: use 'zero'")
        return self


def describe_sections(recipe: Recipe) -> Sequence[str]:
    """Names of the stages that the recipe has, in order."""
    return [name for name in STAGES if getattr(recipe, name) is not None]
