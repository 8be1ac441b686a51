"""Settings of the stages that sample: prompts, rewards, measurements and methods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, model_validator

from tether.core.amounts import plural
from tether.core.types import Demonstration, JsonValue, Problem, Prompt
from tether.settings.config import FromOne, Probability
from tether.settings.engine import EngineConfig
from tether.settings.environment import EnvironmentConfig, TaskConfig, episode_faults
from tether.settings.evaluation import EvaluateSection
from tether.settings.learner import OptimizerConfig, Rates
from tether.settings.model import LoraConfig
from tether.settings.needs import Needs
from tether.settings.policy import TO_ZERO, PolicyConfig, SampledConfig
from tether.settings.rewards import (
    GIVEN,
    REWARDS,
    Combine,
    FunctionConfig,
    ObjectiveConfig,
    RewardKind,
    RewardServersConfig,
    VerifiableConfig,
    reward_tables,
)
from tether.settings.section import (
    OFFLOAD,
    Counts,
    DataConfig,
    EngineRows,
    Name,
    StageWork,
    SteadyLora,
    TimedSection,
)
from tether.settings.supervised import PairLossConfig
from tether.settings.watch import WatchSection


class BestOfNConfig(SampledConfig):
    """Settings of the stage; lengths are in tokens."""

    rates: ClassVar[Rates] = Rates(5e-4, 1e-5)

    steps: FromOne = Field(default=20, description="rounds: sample, keep, imitate")
    samples_per_prompt: FromOne = Field(default=8, description="the n of best-of-n")
    keep: FromOne = Field(
        default=1,
        description="responses of each prompt that are imitated, best first",
    )
    threshold: float | None = Field(
        default=None,
        description="a response that scores below it is not kept, best or not",
    )
    epochs: FromOne = Field(default=1, description="passes over a round's kept responses")
    minibatches: FromOne = Field(default=1, description="optimizer steps an epoch")
    normalize: Literal["token", "sequence"] = Field(
        "token",
        description="weight of a token: the same for all, or its response's share",
    )
    report_kl: bool = Field(
        default=True,
        description="run the reference, to know how far the policy has moved",
    )
    optimizer: OptimizerConfig = Field(default=TO_ZERO, description="AdamW and its learning rate")

    @property
    def needs_reference(self) -> bool:
        return self.report_kl

    def faults(self) -> Iterator[str]:
        if self.keep > self.samples_per_prompt:
            yield (
                f"keep = {self.keep} of samples_per_prompt = {self.samples_per_prompt}: sample "
                "more, or keep fewer"
            )
        if self.keep == self.samples_per_prompt and self.threshold is None:
            yield (
                "keep = samples_per_prompt keeps everything, so the reward has no effect. "
                "Sample more, keep fewer, or set a threshold"
            )


class OnlineDirectConfig(PairLossConfig, SampledConfig):
    """Settings of the stage; lengths are in tokens."""

    table: ClassVar[str] = "online_direct."
    rates: ClassVar[Rates] = Rates(5e-4, 1e-6)

    prompts_per_step: FromOne = Field(default=8, description="each gives one pair, or none")
    samples_per_prompt: int = Field(
        default=2,
        ge=2,
        description="the best and the worst of them are the pair",
    )


class RewardedSection(reward_tables()):
    """Keys of every stage whose answers a reward scores."""

    if TYPE_CHECKING:
        reward_source: str = "learned"
        verifiable: VerifiableConfig | None = None
        function: FunctionConfig | None = None

    reward_model: Annotated[str | None, Needs("reward_source = 'learned'")] = Field(
        default=None,
        description="of 'learned': a run with a reward stage, or a reward model's folder; unset: "
        "this run's [reward]",
    )
    max_failed: Probability = Field(
        default=0.5,
        description="share of failed scores, of the last ten batches of answers, at which training stops",
    )
    process_aggregate: Annotated[
        Literal["min", "product", "last"],
        Needs("reward_source = 'process'"),
    ] = Field(
        default="min",
        description="how a response's score is made of its steps' probabilities",
    )
    reward_combine: Annotated[
        Combine,
        Needs("reward_source = 'learned'"),
        Needs("not objectives", "has no effect on objectives: they have weights"),
    ] = Field(
        default="mean",
        description="how a response's score is made of those of an ensemble's members",
    )
    uncertainty_weight: Annotated[NonNegativeFloat, Needs("reward_combine = 'uncertainty'")] = (
        Field(
            default=0.1,
            description="what is taken off the members' mean for their variance; "
            "the paper has 0.5 for best-of-n",
        )
    )
    objectives: Annotated[
        dict[Name, ObjectiveConfig] | None,
        Needs("reward_source = 'learned'"),
    ] = Field(
        default=None,
        min_length=2,
        description="what each of [reward.objectives] weighs, or where it is held",
    )

    @property
    def reward_kind(self) -> RewardKind:
        """The row of what scores."""
        return REWARDS[self.reward_source]

    @property
    def scorer(self) -> str | None:
        return self.reward_kind.scorer

    @model_validator(mode="before")
    @classmethod
    def _named_by_its_table(cls, values: JsonValue) -> JsonValue:
        """A table named after a reward says what scores: reward_source need not repeat it."""
        if not isinstance(values, dict):
            return values
        tables = [n for n, kind in REWARDS.items() if kind.settings and values.get(n) is not None]
        tables = tables or [n for n in ("environment", "teacher") if values.get(n)][:1]
        return {"reward_source": tables[0], **values} if len(tables) == 1 else values

    def faults(self) -> Iterator[str]:
        needed = "verifiable" if self.reward_source == "majority" else self.reward_source
        for name in (name for name, kind in REWARDS.items() if kind.settings):
            there = vars(self)[name] is not None
            if name == "verifiable" and there and self.reward_source == "random":
                continue  # a control in the place of checked answers
            if (name == needed) != there:
                yield (
                    f"reward_source = {name!r} and a table named {name} belong together: give "
                    "both or neither"
                    if self.reward_source != "majority"
                    else "reward_source = 'majority' compares checked answers: give a table named "
                    "verifiable, and no other"
                )
        source = self.reward_source
        if source in ("teacher", "environment") and not dict(self).get(source):
            yield f"reward_source = {source!r} needs a table named {source}, where a stage takes one"
        compared = self.reward_source == "majority" and self.verifiable
        if compared and compared.kind == "code":
            yield "reward_source = 'majority' cannot compare two programs: choose another control"
        if self.objectives is not None and not any(
            objective.weight for objective in self.objectives.values()
        ):
            yield "objectives has no weight above 0: constraints alone leave nothing to raise"


REWARD_KEYS = tuple(
    key for key in RewardedSection.model_fields if key not in TimedSection.model_fields
)


ONE_REWARD = (
    "give each response the score of one reward: not an environment's, a teacher's, a random one, "
    "the majority's, nor that of objectives"
)
REASONING_GYM = (
    "makes prompts of reasoning-gym: it takes no data, and verifiable.kind must be 'reasoning-gym'"
)


class OnlineSection(RewardedSection):
    """Keys of every stage that samples at each step."""

    online: ClassVar[bool] = True
    task: Annotated[
        TaskConfig | None,
        Needs("not data", REASONING_GYM),
        Needs("verifiable.kind = 'reasoning-gym'", REASONING_GYM),
    ] = Field(default=None, description="prompts of a reasoning-gym task")
    environment: EnvironmentConfig | None = Field(
        default=None,
        description="what answers the policy's replies: answers become episodes of several turns",
    )
    lora: SteadyLora = LoraConfig()
    roles: Annotated[
        Literal["shared", "separate"],
        Needs(
            "lora",
            "needs adapters, and lora is false. Set roles = 'separate' for full fine-tuning",
            "shared",
        ),
    ] = Field(default="shared", description="adapters on one trunk, or a model a role")
    offload: Annotated[
        bool,
        Needs(
            "roles = 'separate'",
            "moves frozen models of their own, and with roles = 'shared' there are none. "
            "Leave it out",
        ),
    ] = Field(default=False, description=OFFLOAD)
    reward_servers: Annotated[
        RewardServersConfig | None,
        Needs("not objectives", ONE_REWARD),
    ] = Field(
        default=None,
        description="have the reward worked out by servers, not in this process",
    )
    engine: EngineConfig = Field(
        default=EngineConfig(),
        description="what samples the answers: this process, or servers",
    )
    engine_rows: EngineRows = 64
    evaluate: EvaluateSection | None = Field(
        default=None,
        description="measure on held-out prompts along the way",
    )
    watch: WatchSection = Field(
        default=WatchSection(),
        description="the detectors, and what happens when one fires",
    )

    @property
    def kind(self) -> type | None:
        return None if self.task is not None else Prompt if self.verifiable is None else Problem

    @property
    def measurement(self) -> EvaluateSection | None:
        return self.evaluate

    @property
    def own_models(self) -> bool:
        return self.roles == "separate"

    def judges(self) -> Iterator[tuple[object, DataConfig | None]]:
        if self.evaluate is not None:
            yield self.evaluate.judge, self.evaluate.data or self.data

    def work(self, counts: Counts) -> StageWork:
        assert isinstance(self, SampledConfig)
        steps = plural(self.steps, "step")
        prompts = plural(self.prompts_per_step, "prompt")
        answers = plural(self.samples_per_prompt, "answer")
        if self.environment is not None:
            answers += f" × up to {plural(self.environment.turns, 'turn')}"
        answers += f" × up to {self.max_new_tokens} tokens"
        return StageWork(f"{steps} × {prompts} × {answers}", self.steps)

    def others(self) -> Iterator[DataConfig]:
        if self.evaluate is not None and self.evaluate.data is not None:
            yield self.evaluate.data

    def faults(self) -> Iterator[str]:
        if "sycophancy" in self.watch.act and (
            self.evaluate is None or self.evaluate.sycophancy is None
        ):
            yield "watch.act names 'sycophancy', which nothing measures: set evaluate.sycophancy"
        if "raise_kl" in self.watch.act.values() and "kl" not in type(self).model_fields:
            yield (
                "watch.act = 'raise_kl' has no effect in a stage without a KL coefficient: use "
                "'stop'"
            )
        if (
            self.reward_source == "majority"
            and isinstance(self, SampledConfig)
            and self.samples_per_prompt < 3
        ):
            yield (
                "reward_source = 'majority' needs answers that can disagree: set "
                "samples_per_prompt = 3 or more"
            )
        if self.evaluate and self.scorer != "reward":
            yield from self.evaluate.kept_faults(self.reward_kind.parts, self.verifiable)
        yield from episode_faults(
            self.environment,
            self.reward_source,
            vars(self).get("max_staleness", 0),
        )
        yield from self._objective_faults()
        yield from self._prompt_faults()
        yield from self._server_faults()

    def _objective_faults(self) -> Iterator[str]:
        objectives = (self.objectives or {}).values()
        held = any(objective.at_least is not None for objective in objectives)
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
        if self.reward_kind.served is None:
            yield f"reward_servers {ONE_REWARD}"
        if self.function is not None:
            if any(call.startswith(GIVEN) for call in self.function.calls):
                yield (
                    "reward_servers cannot take a function of this process: put it in a file, "
                    "and give path/to/file.py:name"
                )
            yield from servers.idle(
                "batch",
                because="of a function: set function.batch",
                table="reward_servers.",
            )

    def _prompt_faults(self) -> Iterator[str]:
        checked = self.verifiable and self.verifiable.kind
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

    reward_per_token: Annotated[
        bool,
        Needs(
            "not reward_servers",
            "pays at each token, and reward_servers give each response one score",
        ),
        Needs(
            "reward_source = 'learned'",
            "needs reward_source = 'learned' and step_rewards = true",
        ),
        Needs("step_rewards", "needs reward_source = 'learned' and step_rewards = true"),
        Needs(
            "baseline = 'none'",
            "has its own baseline, the score before each token: set baseline = 'none'",
        ),
        Needs(
            "value_init = 'zero'",
            "pays changes of a score, and value_init = 'reward' knows whole scores: use 'zero'",
        ),
    ] = Field(
        default=False,
        description="with step_rewards: pay at each token what it changed of the reward model's score",
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
        per_token = self.reward_per_token and not self.objectives
        if self.step_rewards and not self.reward_kind.steps and not per_token:
            given = (
                "a sum of objectives"
                if self.objectives
                else f"reward_source = {self.reward_source!r}"
            )
            yield (
                f"{given} scores whole responses, so that step_rewards finds no steps: use "
                "'process', 'environment', a function that returns steps, or reward_per_token"
            )
        if "raise_kl" in self.watch.act.values() and not self.kl.coefficient:
            yield (
                "watch.act = 'raise_kl' doubles kl.coefficient, which is 0: start above 0, or "
                "use 'stop'"
            )
        if self.value_init == "reward" and not (self.critic and self.reward_source == "learned"):
            yield (
                "value_init = 'reward' needs a critic and a learned reward model (reward_source "
                "= 'learned')"
            )

    @property
    def kind(self) -> type | None:
        return super().kind if self.own_answers == 1 else Demonstration

    @property
    def ahead(self) -> int:
        return self.max_staleness


class PPOSection(PolicySection):
    algorithm: Literal["ppo"] = Field(default="ppo", description="the preset")


class GRPOSection(PolicySection):
    algorithm: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"] = Field(
        default="grpo",
        description="the preset",
    )


class ReinforceSection(PolicySection):
    algorithm: Literal["reinforce", "rloo", "reinforce++", "reinforce++_baseline"] = Field(
        default="reinforce",
        description="the preset",
    )


class BestOfNSection(OnlineSection, BestOfNConfig):
    """Best-of-n, as a stage of a recipe."""


class OnlineDirectSection(OnlineSection, OnlineDirectConfig):
    """A direct method on fresh samples, as a stage of a recipe."""


SamplingSection = PolicySection | BestOfNSection | OnlineDirectSection
"""Any of the sections that are stages; every one of them says whether it `needs_reference`."""
