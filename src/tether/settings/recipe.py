"""Recipes: the sections of the table of stages over one model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from pydantic import Field, ValidationError, create_model, model_validator

from tether.core.errors import ConfigError
from tether.core.types import Comparison, Feedback, Json, JsonValue, Prompt
from tether.settings.budget import Budget
from tether.settings.config import Config
from tether.settings.evaluation import EvaluateSection
from tether.settings.learner import LearnerConfig
from tether.settings.messages import explain
from tether.settings.model import ModelConfig
from tether.settings.pairs import SCORED
from tether.settings.reading import load_recipe, packaged_recipe
from tether.settings.sampling import OnlineSection, PolicySection, RewardedSection
from tether.settings.section import Folder, Lora, Name, overlaid
from tether.settings.stages import STAGES, StageKind
from tether.settings.sweep import idle_override, sweep_faults
from tether.settings.synonyms import shown_name
from tether.settings.tracking import TrackerNames
from tether.settings.workers import On


class BaseRecipe(Config):
    """A journey of stages over one model. A stage whose section is missing is not run."""

    run: Folder = Field(description="the run directory")
    seed: int = Field(
        default=0,
        description="of everything random; the same seed gives the same run",
    )
    deterministic: bool = Field(
        default=False,
        description="only kernels that give the same bits every time; an error names one that cannot",
    )
    track: TrackerNames = Field(
        default=(),
        description="trackers that show the run too; may change from start to start",
    )
    model: ModelConfig = Field(description="what is trained, or where training starts")
    learner: LearnerConfig = Field(
        default=LearnerConfig(),
        description="processes that train together; may change from start to start",
    )
    on: On = Field(
        default="local",
        description="where servers and further ranks start: local, or ray, this machine's "
        "cluster; ray://HOST:PORT and "
        "slurm:OPTION=VALUE,... send all of the run there; may change from start to start",
    )
    lora: Lora | None = Field(
        default=None,
        description="of every stage without one of its own, which replaces this one whole",
    )
    budget: Budget = Field(
        default=None,
        description="minutes of the whole run, of which a policy's training has two parts and each "
        "other stage one; may change from start to start",
    )
    repeat: int | None = Field(
        default=None,
        ge=1,
        description="run what comes after [sft] so often, each time from answers of the policy before",
    )
    arms: dict[Name, dict[str, Json]] = Field(
        default_factory=dict,
        description="further policies to compare: [arms.NAME.STAGE] differs from [STAGE] in what it says",
    )

    sweep: Json | None = Field(
        default=None,
        description='keys and the values that each takes, such as "ppo.kl.coefficient" = [0.01, 0.05] or '
        "seed = [0, 1, 2]; every combination is run",
    )

    def section(self, name: str) -> Any:
        """The section of a stage, or of an arm by the name of its folder; None where the recipe has
        none.
        """
        if name in STAGES:
            return getattr(self, name, None)
        stage, arm = self.arm_of(name)
        base = self.section(stage)
        section = STAGES[stage].section
        common = (
            {} if self.lora is None or "lora" not in section.model_fields else {"lora": self.lora}
        )
        given = common if base is None else base.model_dump(exclude_unset=True)
        return section.model_validate(overlaid(given, self.arms[arm][stage]))

    def arm_of(self, name: str) -> tuple[str, str]:
        """Stage and arm of a folder's name.

        Raises:
            ConfigError: the recipe has no such arm.
        """
        arms = {
            f"{stage}-{arm}": (stage, arm)
            for arm, sections in self.arms.items()
            for stage in sections
        }
        if name not in arms:
            raise ConfigError(f"the recipe has no [{name}] section")
        return arms[name]

    def from_pairs(self, name: str) -> bool:
        """True if a stage without data of its own learns from the pairs of [pairs], or their
        prompts.
        """
        section = self.section(name)
        learns = name not in ("sft", "pairs", "evaluate")
        own = section.data is not None or self.section("pairs") is None
        return learns and not own and section.kind in (Prompt, Comparison, Feedback)

    @property
    def titles(self) -> dict[str, str]:
        """The names of the stages for people; of an arm its own."""
        return {name: shown_name(name, dict(self.section(name))) for name in self.stages}

    @property
    def stages(self) -> list[str]:
        """Names of the stages that the recipe has, in order, each arm behind the stage that it
        varies.
        """
        names = []
        for name in STAGES:
            names += [name] if getattr(self, name, None) is not None else []
            names += [f"{name}-{arm}" for arm, sections in self.arms.items() if name in sections]
        return names

    @property
    def policies(self) -> list[str]:
        """Those of the stages that leave a policy."""
        return [name for name in self.stages if self.kind(name).trains_policy]

    def kind(self, name: str) -> StageKind:
        """The row of a stage, or of an arm, in the table."""
        return STAGES[name] if name in STAGES else STAGES[self.arm_of(name)[0]]

    @model_validator(mode="before")
    @classmethod
    def _common_lora(cls, values: object) -> JsonValue:
        if not isinstance(values, dict) or values.get("lora") is None:
            return values
        learn = {name for name, kind in STAGES.items() if "lora" in kind.section.model_fields}
        common = {
            n: {"lora": values["lora"], **values[n]}
            for n in learn & values.keys()
            if isinstance(values[n], dict)
        }
        return {**values, **common}

    def faults(self) -> Iterator[str]:
        policies = self.policies
        for arm, sections in self.arms.items():
            if len(sections) != 1 or not all(
                name in STAGES and STAGES[name].trains_policy for name in sections
            ):
                yield (
                    f"arm {arm!r} needs exactly one section that makes a policy, such as "
                    f"[arms.{arm}.ppo]"
                )
            ((stage, values),) = sections.items()
            try:
                self.section(f"{stage}-{arm}")
            except ValidationError as error:
                reason = "; ".join(explain(STAGES[stage].section, values, error.errors()))
                yield f"the arm {arm!r} cannot be run: {reason}"
        if self.sweep is not None:
            missing = STAGES.keys() - set(self.stages)
            yield from sweep_faults(self.sweep, missing, timed=self.budget is not None)
        if self.repeat is not None and len(policies) > 1:
            yield (
                "repeat trains one policy a round, whose answers are judged next: leave one of "
                f"{policies}"
            )
        if self.section("evaluate") is not None and not policies:
            yield "evaluate has no effect without a stage that makes a policy"
        if self.repeat is not None and self.section("pairs") is None:
            yield (
                "repeat has no effect without [pairs]: rounds go from answers to labels to a policy"
            )
        for name in self.stages:
            section = self.section(name)
            if section.scorer is not None:
                yield from self._scorer_faults(name, section)
            if name == "pairs":
                yield from self._choice_faults(section.choose)
            if name in policies:
                yield from self._keeping_faults(name, getattr(section, "evaluate", None))
            yield from faults_on(self.model, name, section, self.learner.shard)

    def _keeping_faults(self, name: str, heldout: EvaluateSection | None) -> Iterator[str]:
        """Check that the prompts of the last evaluation have chosen none of the policies' weights."""
        last = self.section("evaluate")
        if (
            last is None
            or heldout is None
            or heldout.keep != "best"
            or last.data is None
            or heldout.data is None
        ):
            return
        if shared := {*last.data.paths} & {*heldout.data.paths}:
            yield (
                f"{name}.evaluate.keep = 'best' chooses weights by {min(shared)}, and [evaluate] "
                "judges them by the same "
                "prompts: the chosen ones would look better than they are. Give them other prompts"
            )

    def _choice_faults(self, choose: str) -> Iterator[str]:
        """Check that a choice of pairs will have the reward models that it needs."""
        reward = self.section("reward")
        several = choose in ("disagreement", "information")
        needs = "repeat and [reward]"
        needs += ", with reward.members" if several else " of one score, without objectives"
        able = (
            reward is not None and reward.objectives is None and (reward.is_ensemble or not several)
        )
        if choose in SCORED and (self.repeat is None or not able):
            yield (
                f"pairs.choose = '{choose}' asks the reward model of the round before: it needs "
                f"{needs}"
            )

    def _scorer_faults(self, name: str, section: RewardedSection) -> Iterator[str]:
        """Check a stage against the scorer that this recipe trains. A scorer that was trained
        before is checked when the recipe starts (`build.checks.check_inputs`).
        """
        trained = self.section("reward")
        if trained is not None and section.scorer == "reward" and section.reward_model is None:
            yield from scorer_faults(
                name,
                section,
                objectives=tuple(trained.objectives or ()),
                members=trained.members if trained.is_ensemble else 1,
            )


def objective_faults(
    name: str,
    asked: Collection[str] | None,
    trained: Collection[str],
) -> Iterator[str]:
    """A fault where the stage `name` asks for other objectives than were trained, or for none of
    several.
    """
    if set(asked or ()) == set(trained):
        return
    if asked is None:
        yield (
            f"[{name}] takes one reward, and [reward.objectives] has several: name "
            f"them in {name}.objectives"
        )
        return
    names, have = (", ".join(sorted(some)) or "none" for some in (asked, trained))
    yield (
        f"{name}.objectives names {names}, and [reward.objectives] has {have}: "
        "both name the same ones"
    )


def scorer_faults(
    name: str,
    section: RewardedSection,
    *,
    objectives: Collection[str],
    members: int,
) -> Iterator[str]:
    """Settings of the stage `name` that its reward model cannot serve.

    Args:
        objectives: names that the reward model was trained for; empty: one score.
        members: of an ensemble; else 1.
    """
    yield from objective_faults(name, section.objectives, objectives)
    ensemble = members > 1
    if isinstance(section, OnlineSection) and section.evaluate:
        scores = (*(f"member_{number}" for number in range(members)), "spread")
        yield from section.evaluate.kept_faults(scores if ensemble else objectives, None)
    if not ensemble:
        because = "on one reward model: set reward.members, without average"
        yield from section.idle("reward_combine", because=because, table=f"{name}.")
    if not ensemble or not isinstance(section, PolicySection):
        return
    if section.reward_per_token:
        yield (
            f"{name}.reward_per_token asks one reward model, and an ensemble has several: "
            "average or distil it"
        )
    if section.value_init == "reward":
        yield (
            f"{name}.value_init = 'reward' copies one reward model, and an ensemble has "
            "several: use 'zero'"
        )


def recipe_type() -> type[BaseRecipe]:
    """A recipe with a field for every stage that the table has now."""
    sections: Json = {
        name: (kind.section | None, Field(default=None, description=kind.help))
        for name, kind in STAGES.items()
    }
    return create_model("Recipe", __base__=BaseRecipe, __module__=__name__, **sections)


Recipe = recipe_type()


def read_recipe(name: str, overrides: Sequence[str] = ()) -> BaseRecipe:
    """A recipe by its file or by the name of one that comes with tether.

    Raises:
        MissingFileError, ConfigError: there is none, or a key or value does not fit; an override
            names a key that the sweep varies.
    """
    recipe = load_recipe(packaged_recipe(name), recipe_type(), overrides)
    if idle := idle_override(recipe.sweep or {}, overrides):
        raise ConfigError(idle)
    return recipe


def faults_on(model: ModelConfig, name: str, section: Any, shard: bool) -> Iterator[str]:
    """Settings of the stage `name` that are impossible with weights held in 4 bits, or cut over
    ranks (`shard`).
    """
    values = dict(section)
    lora = values.get("lora")
    trains = section.learning
    engine = values.get("engine")
    if model.quantize and lora is False:
        yield (
            f"{name}.lora = false trains the whole model, and model.quantize holds its weights "
            "frozen in 4 bits. Train an adapter, or leave model.quantize out"
        )
    if model.quantize and values.get("offload"):
        yield (
            f"{name}.offload moves layers of 16 bits, and model.quantize holds them in 4. Drop "
            "one of the two"
        )
    precomputed = dict(trains).get("reference_logprobs") == "precomputed"
    hindrances = {
        "model.quantize": (model.quantize, "4 bits are not cut"),
        f"{name}.optimizer.kind = 'adamw8bit'": (
            lora is False and trains.optimizer.kind != "adamw",
            "its blocks are not cut",
        ),
        f"{name}.lora.dora": (lora and lora.dora, "its norms need whole weights"),
        f"{name}.offload": (values.get("offload"), "layers are on the host or on the ranks"),
        f"{name}.reference_logprobs = 'precomputed'": (precomputed, "not each_update"),
        f"{name}.disentangle_length": (
            values.get("disentangle_length"),
            "it has a part without a pass",
        ),
        f"{name}.keep_states_gb": (
            values.get("keep_states_gb"),
            "no pass over ranks ends half-way",
        ),
        f"{name}.objectives": (
            values.get("objectives"),
            "rank 0 alone scores by them, and a pass needs all ranks",
        ),
        f"{name}.engine.kind = 'local'": (
            engine and engine.kind == "local",
            "every token would gather all layers: use servers",
        ),
        f"{name}.engine with lora = false": (
            engine and lora is False,
            "servers get weights from rank 0, which has a part",
        ),
    }
    for what, (there, why) in hindrances.items():
        if there and shard:
            yield f"learner.shard does not go with {what} ({why}). Change one of the two"
