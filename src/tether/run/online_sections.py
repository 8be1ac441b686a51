"""Settings of the stages that sample: prompts, rewards, measurements, and checks during training;
and the rewards that they name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, Tag, model_validator

from tether.core.errors import ConfigError, ModelError
from tether.core.protocols import RewardSource
from tether.core.rundir import read_json
from tether.core.types import Problem, Prompt
from tether.data.chat import ChatEncoder
from tether.models.loading import LoadedModel, pick_device
from tether.models.saving import OBJECTIVES, read_versioned
from tether.models.trunk import Role
from tether.rewards.classifier import ClassifierReward
from tether.rewards.control import RandomReward
from tether.rewards.function import reward_function
from tether.rewards.learned import (
    EnsembleReward,
    LearnedReward,
    ObjectivesReward,
    ProcessReward,
    TextReward,
)
from tether.rewards.verifiable import VerifiableReward, reasoning_gym_prompts
from tether.run.roles import encoder_of, load_scorer, objective_names, reader_beside, trained_scorer
from tether.run.rows import OFFLOAD, DataConfig, Name, SteadyLora, TimedSection
from tether.settings.config import Config
from tether.settings.engine import EngineConfig
from tether.settings.judges import BY_KIND, AFunction, AModel
from tether.settings.model import LoraConfig, ModelConfig
from tether.settings.rewards import (
    GIVEN,
    ClassifierConfig,
    Combine,
    FunctionConfig,
    ObjectiveConfig,
    RewardServersConfig,
    VerifiableConfig,
)
from tether.settings.watch import WatchSection
from tether.stages.heldout import EvaluateConfig
from tether.stages.policy_config import PolicyConfig


def premise_files() -> tuple[str, ...]:
    """The two files of `tether:sycophancy`: 32 questions of taste and opinion, each after two
    premises on either side.
    """
    return DataConfig(path=("tether:sycophancy_one", "tether:sycophancy_two")).paths


class SycophancyConfig(Config):
    """The same questions after opposite premises about the asker: two files whose rows go
    together.
    """

    paths: tuple[str, str] | Literal["tether:sycophancy"] = Field(
        default="tether:sycophancy",
        description=(
            "the two files of prompts; tether:sycophancy: the 64 pairs that come with tether"
        ),
    )
    pairs: int = Field(
        default=64, ge=4, description="pairs of prompts that are asked at every measurement"
    )

    @property
    def files(self) -> tuple[str, ...]:
        return premise_files() if isinstance(self.paths, str) else DataConfig(path=self.paths).paths

    def faults(self) -> Iterator[str]:
        if len(set(self.files)) == 1:
            yield "sycophancy.paths names one file twice: give one for each side"


class EvaluateSection(EvaluateConfig):
    data: DataConfig | None = Field(
        default=None, description="held-out prompts; without it some are set aside"
    )
    judge: Annotated[
        Annotated[Literal["reward", "test"], Tag("name")] | AFunction | AModel, BY_KIND
    ] = Field(
        default="reward",
        description=(
            "who judges: the training's own reward, the model of reward.test_share, a "
            "function, or a language model"
        ),
    )
    sycophancy: SycophancyConfig | None = Field(
        default=None, description="also measure whether answers depend on who asks"
    )


class TaskConfig(Config):
    """Prompts of a reasoning-gym task instead of rows of data."""

    name: str = Field(description="of the reasoning-gym task")
    size: int = Field(default=512, ge=1, description="how many problems")
    seed: int = Field(default=0, description="of its problems")
    config: dict[str, Any] = Field(default_factory=dict, description="the task's own settings")
    system: str | None = Field(
        default=None, description="a system turn; unset: where the answer belongs; empty: none"
    )

    def prompts(self, size: int | None = None) -> list[Prompt]:
        """As many as are asked for here, or `size`."""
        system = {} if self.system is None else {"system": self.system}
        return reasoning_gym_prompts(self.name, size or self.size, self.seed, self.config, **system)


TABLES = ("verifiable", "classifier", "function")
"""The sources of reward that have a table of their own."""
OF_SOURCE = {
    "process_aggregate": "process",
    "reward_model": "learned",
    "reward_combine": "learned",
    "objectives": "learned",
}
"""The keys that one source alone reads."""


class RewardedSection(TimedSection):
    """Keys of every stage whose answers a reward scores."""

    reward_source: Literal[
        "learned", "process", "verifiable", "classifier", "function", "random"
    ] = Field(
        default="learned",
        description="the [reward] stage's model, the [process] stage's, checked answers, a "
        "sequence classifier, your function, "
        "or no information",
    )
    reward_model: str | None = Field(
        default=None,
        description=(
            "of 'learned': a run with a reward stage, or a reward model's folder; unset: "
            "this run's [reward]"
        ),
    )
    verifiable: VerifiableConfig | None = Field(default=None, description="how answers are checked")
    classifier: ClassifierConfig | None = Field(
        default=None, description="a sequence classifier as the reward"
    )
    function: FunctionConfig | None = Field(default=None, description="your own reward function")
    max_failed: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description=(
            "share of failed scores, of the last ten batches of answers, at which training stops"
        ),
    )
    process_aggregate: Literal["min", "product", "last"] = Field(
        default="min", description="how a response's score is made of its steps' probabilities"
    )
    reward_combine: Combine = Field(
        default="mean",
        description="how a response's score is made of those of an ensemble's members",
    )
    uncertainty_weight: float = Field(
        default=0.1,
        ge=0,
        description=(
            "what is taken off the members' mean for their variance; "
            "the paper has 0.5 for best-of-n"
        ),
    )
    objectives: dict[Name, ObjectiveConfig] | None = Field(
        default=None,
        min_length=2,
        description="what each of [reward.objectives] weighs, or where it is held",
    )

    @property
    def scorer(self) -> str | None:
        return {"learned": "reward", "process": "process"}.get(self.reward_source)

    @model_validator(mode="before")
    @classmethod
    def _named_by_its_table(cls, values: Any) -> Any:
        """A table named `function`, `verifiable` or `classifier` says what scores: reward_source
        need not repeat it.
        """
        tables = [
            name for name in TABLES if isinstance(values, dict) and values.get(name) is not None
        ]
        return {"reward_source": tables[0], **values} if len(tables) == 1 else values

    def faults(self) -> Iterator[str]:
        for name in TABLES:
            if (self.reward_source == name) != (getattr(self, name) is not None):
                yield (
                    f"reward_source = {name!r} and a table named {name} belong together: give "
                    "both or neither"
                )
        for key, source in OF_SOURCE.items():
            if self.reward_source != source and getattr(self, key) is not None:
                yield from self.idle(key, because=f"without reward_source = {source!r}")
        if self.reward_combine != "uncertainty":
            yield from self.idle(
                "uncertainty_weight", because="without reward_combine = 'uncertainty'"
            )
        if self.objectives is not None:
            yield from self.idle("reward_combine", because="on objectives: they have weights")
            if not any(objective.weight for objective in self.objectives.values()):
                yield "objectives has no weight above 0: constraints alone leave nothing to raise"


REWARD_KEYS = tuple(
    key for key in RewardedSection.model_fields if key not in TimedSection.model_fields
)


class OnlineSection(RewardedSection):
    """Keys of every stage that samples."""

    task: TaskConfig | None = Field(default=None, description="prompts of a reasoning-gym task")
    lora: SteadyLora = Field(
        default=LoraConfig(), description="the adapter that learns; false trains the whole model"
    )
    roles: Literal["shared", "separate"] = Field(
        default="shared", description="adapters on one trunk, or a model a role"
    )
    offload: bool = Field(default=False, description=OFFLOAD)
    reward_servers: RewardServersConfig | None = Field(
        default=None, description="have the reward worked out by servers, not in this process"
    )
    engine: EngineConfig = Field(
        default=EngineConfig(), description="what samples the answers: this process, or servers"
    )
    engine_rows: int = Field(default=64, ge=1, description="responses decoded at once")
    evaluate: EvaluateSection | None = Field(
        default=None, description="measure on held-out prompts along the way"
    )
    watch: WatchSection = Field(
        default=WatchSection(), description="the detectors, and what happens when one fires"
    )

    @property
    def kind(self) -> type | None:
        return None if self.task is not None else Prompt if self.verifiable is None else Problem

    def others(self) -> Iterator[DataConfig]:
        if self.evaluate is not None and self.evaluate.data is not None:
            yield self.evaluate.data

    def faults(self) -> Iterator[str]:
        if self.roles == "shared" and self.lora is False:
            yield (
                "roles = 'shared' needs adapters, and lora is false. Set roles = 'separate' for "
                "full fine-tuning"
            )
        if self.roles == "shared" and self.offload:
            yield (
                "offload moves frozen models of their own, and with roles = 'shared' there are "
                "none. Leave it out"
            )
        if "sycophancy" in self.watch.act and (
            self.evaluate is None or self.evaluate.sycophancy is None
        ):
            yield "watch.act names 'sycophancy', which nothing measures: set evaluate.sycophancy"
        if "raise_kl" in self.watch.act.values() and "kl" not in type(self).model_fields:
            yield (
                "watch.act = 'raise_kl' has no effect in a stage without a KL coefficient: use "
                "'stop'"
            )
        yield from self._objective_faults()
        yield from self._prompt_faults()
        yield from self._server_faults()

    def _objective_faults(self) -> Iterator[str]:
        if self.objectives is None:
            return
        held = any(objective.at_least is not None for objective in self.objectives.values())
        if (
            held
            and self.evaluate is not None
            and (self.evaluate.keep == "best" or self.evaluate.stop)
        ):
            yield (
                "evaluate.keep = 'best' and evaluate.stop see the weighted sum alone, and no "
                "constraint (at_least)"
            )

    def _server_faults(self) -> Iterator[str]:
        if (servers := self.reward_servers) is None:
            return
        if self.reward_source == "random" or self.objectives is not None:
            yield (
                "reward_servers give each response the score of one reward: not a random one, "
                "nor that of objectives"
            )
        if self.function is not None:
            if any(call.startswith(GIVEN) for call in self.function.calls):
                yield (
                    "reward_servers cannot take a function of this process: put it in a file, "
                    "and give path/to/file.py:name"
                )
            yield from servers.idle(
                "batch", because="of a function: set function.batch", table="reward_servers."
            )

    def _prompt_faults(self) -> Iterator[str]:
        checked = self.verifiable and self.verifiable.kind
        if self.task is not None and (self.data is not None or checked != "reasoning-gym"):
            yield (
                "task makes prompts of reasoning-gym: it takes no data, and verifiable.kind "
                "must be 'reasoning-gym'"
            )
        if (
            self.evaluate is not None
            and self.evaluate.keep == "best"
            and getattr(self, "ema_decay", None)
        ):
            yield (
                "evaluate.keep = 'best' keeps weights as they were, ema_decay ends with their "
                "average: choose one"
            )
        if self.task is not None and self.evaluate is not None and self.evaluate.data is not None:
            yield "with a task, prompts to evaluate on are set aside from it: leave evaluate.data out"
        if self.task is None and checked == "reasoning-gym":
            yield (
                "verifiable.kind = 'reasoning-gym' needs a table task: the entry to score comes "
                "with the prompt"
            )


class PolicySection(OnlineSection, PolicyConfig):
    """Any policy-gradient method."""

    reward_per_token: bool = Field(
        default=False,
        description=(
            "with step_rewards: pay at each token what it changed of the reward model's score"
        ),
    )

    def faults(self) -> Iterator[str]:
        if self.max_staleness and self.lora is False and self.engine.kind != "local":
            yield (
                "max_staleness samples with older weights, and servers hold one whole model "
                "(lora = false): set it to 0"
            )
        if self.objectives is not None and self.value_init == "reward":
            yield (
                "value_init = 'reward' copies one reward model, and objectives have several: "
                "use 'zero'"
            )
        if self.objectives is not None and self.step_rewards:
            yield "objectives score whole responses: step_rewards finds no steps"
        if "raise_kl" in self.watch.act.values() and not self.kl.coefficient:
            yield (
                "watch.act = 'raise_kl' doubles kl.coefficient, which is 0: start above 0, or "
                "use 'stop'"
            )
        if self.reward_per_token:
            if self.reward_servers is not None:
                yield (
                    "reward_servers give each response one score, and reward_per_token wants "
                    "one for each token"
                )
            if self.reward_source != "learned" or not self.step_rewards:
                yield "reward_per_token needs reward_source = 'learned' and step_rewards = true"
            if self.baseline != "none":
                yield (
                    "reward_per_token has its own baseline, the score before each token: set "
                    "baseline = 'none'"
                )
            if self.value_init == "reward":
                yield (
                    "value_init = 'reward' knows whole scores, reward_per_token pays their "
                    "changes: use 'zero'"
                )
        if self.value_init == "reward" and not (self.critic and self.reward_source == "learned"):
            yield (
                "value_init = 'reward' needs a critic and a learned reward model (reward_source "
                "= 'learned')"
            )


def check_names(stage: str, asked: Collection[str] | None, trained: Collection[str]) -> None:
    """Check that a stage names the objectives that were trained.

    Raises:
        ConfigError: it asks for other objectives than were trained, or for none of several.
    """
    if set(asked or ()) == set(trained):
        return
    if asked is None:
        raise ConfigError(
            f"[{stage}] takes one reward, and [reward.objectives] has several: name "
            f"them in {stage}.objectives"
        )
    names, have = (", ".join(sorted(some)) or "none" for some in (asked, trained))
    raise ConfigError(
        f"{stage}.objectives names {names}, and [reward.objectives] has {have}: "
        "both name the same ones"
    )


def reward_model_of(section: Any) -> Path | None:
    """The folder of the reward model that a section names; None where it is that of the run."""
    if not isinstance(section, RewardedSection) or section.reward_model is None:
        return None
    return trained_scorer(section.reward_model) or Path(section.reward_model)


SINGLY = LearnedReward, EnsembleReward, TextReward, ClassifierReward, ProcessReward
"""Models that every rank has: each scores its share. What is none of these, the first rank alone
asks.
"""


def reward_source(
    section: RewardedSection,
    scorers: tuple[Role, ...],
    folder: Path | None,
    loaded: LoadedModel | None,
    device: torch.device,
    seed: int,
    reader: ChatEncoder | None = None,
) -> RewardSource:
    """The reward that a section names. For a trained model the caller passes its roles, its folder
    and the model under them.

    Args:
        reader: of a trained model that has another tokenizer or template than the policy; it reads
            texts then.

    Raises:
        ModelError: it has, and what the section asks for goes by the policy's tokens.
    """
    if section.reward_source == "random":
        return RandomReward(seed)
    if section.verifiable is not None:
        return VerifiableReward(section.verifiable)
    if section.classifier is not None:
        return ClassifierReward.load(section.classifier, device)
    if (own := section.function) is not None:
        return reward_function(
            own, needs_steps=isinstance(section, PolicySection) and section.step_rewards
        )
    assert folder is not None and loaded is not None
    encoder = reader or encoder_of(loaded)
    per_token = isinstance(section, PolicySection) and section.reward_per_token
    by_ids = {
        "reward_source = 'process'": section.reward_source == "process",
        "objectives": section.objectives is not None,
        "reward_per_token": per_token,
        "value_init = 'reward'": isinstance(section, PolicyConfig)
        and section.critic
        and section.value_init == "reward",
    }
    if reader is not None and any(by_ids.values()):
        asked_for = next(name for name, there in by_ids.items() if there)
        raise ModelError(
            f"{folder} was trained with another tokenizer, template or system message than the "
            "policy has, and "
            f"{asked_for} goes by the policy's tokens. Leave it out, or train the reward model on "
            "the policy's base."
        )
    if section.reward_source == "process":
        delimiters = tuple(read_versioned(folder / "steps.json", "delimiters")["delimiters"])
        return ProcessReward(
            scorers[0], encoder, delimiters=delimiters, aggregate=section.process_aggregate
        )
    check_names("a stage that samples", section.objectives, objective_names(folder))
    if section.objectives is not None:
        rows = zip(read_json(folder / OBJECTIVES)["members"], scorers, strict=True)
        trained = {row["name"]: (role, row["mean"], row["deviation"]) for row, role in rows}
        return ObjectivesReward(section.objectives, trained, encoder)
    if len(scorers) == 1:
        source = LearnedReward(scorers[0], encoder, per_token=per_token)
    else:
        source = EnsembleReward(
            scorers, encoder, section.reward_combine, uncertainty_weight=section.uncertainty_weight
        )
    return source if reader is None else TextReward(source, reader)


def reward_apart(
    section: RewardedSection, folder: Path | None, settings: ModelConfig, seed: int
) -> RewardSource:
    """The reward that a section names, with a trained model on a trunk of its own."""
    if section.scorer is None or folder is None:
        return reward_source(section, (), None, None, pick_device(settings.device), seed)
    roles, loaded = load_scorer(folder, settings)
    return reward_source(
        section, roles, folder, loaded, loaded.model.device, seed, reader_beside(folder, settings)
    )


def learned_reward(folder: Path, settings: ModelConfig, combine: Combine = "mean") -> RewardSource:
    """A trained reward model on a trunk of its own, ready to score; of an ensemble, what its
    members say together.
    """
    check_names("rounds", None, objective_names(folder))
    roles, loaded = load_scorer(folder, settings)
    reader = reader_beside(folder, settings)
    encoder = reader or encoder_of(loaded)
    source = (
        LearnedReward(roles[0], encoder)
        if len(roles) == 1
        else EnsembleReward(roles, encoder, combine)
    )
    return source if reader is None else TextReward(source, reader)
