"""Recipes: the sections of the table of stages over one model, and a run of them, one after
another.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, create_model, model_validator

from tether.core.budget import Budget, limited_by, time_limit
from tether.core.config import Config, explain, load_recipe, packaged_recipe
from tether.core.errors import ConfigError, MissingFileError
from tether.core.rundir import RunDirectory, read_json
from tether.core.stages import STAGES, StageKind
from tether.core.types import Comparison, Feedback, Prompt, Sampling
from tether.cpu.memory import free_memory
from tether.data.sources import Quarantine
from tether.learner.config import LearnerConfig
from tether.learner.determinism import deterministic
from tether.learner.loop import Progress
from tether.learner.ranks import here
from tether.models.config import ModelConfig
from tether.models.saving import ENSEMBLE
from tether.run.checks import check_section, check_test_judge
from tether.run.evaluate import EvaluationSection, sampling_of
from tether.run.launching import On, placed
from tether.run.models import check_libraries, faults_on, on_folder
from tether.run.online_sections import PolicySection, check_names, reward_model_of
from tether.run.pairs import SCORED, comparisons_of, feedback_of
from tether.run.ranks import together
from tether.run.restarts import watched, watches
from tether.run.roles import is_scorer, newest_policy, objective_names
from tether.run.rows import (
    Folder,
    Lora,
    Name,
    Section,
    calls_functions,
    check_data,
    load_rows,
    overlaid,
)
from tether.run.stage import Context, check_base, round_folder, run_stage
from tether.run.totals import compared_in, write_totals
from tether.run.trackers import TrackerNames
from tether.run.tracking import tracking


class BaseRecipe(Config):
    """A journey of stages over one model. A stage whose section is missing is not run."""

    run: Folder = Field(description="the run directory")
    seed: int = Field(
        default=0, description="of everything random; the same seed gives the same run"
    )
    deterministic: bool = Field(
        default=False,
        description=(
            "only kernels that give the same bits every time; an error names one that cannot"
        ),
    )
    track: TrackerNames = Field(
        default=(), description="trackers that show the run too; may change from start to start"
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
        description=(
            "minutes of the whole run, which its trainings share by their expected times; "
            "may change from start to start"
        ),
    )
    repeat: int | None = Field(
        default=None,
        ge=1,
        description=(
            "run what comes after [sft] so often, each time from answers of the policy before"
        ),
    )
    arms: dict[Name, dict[str, dict[str, Any]]] = Field(
        default_factory=dict,
        description=(
            "further policies to compare: [arms.NAME.STAGE] differs from [STAGE] in what it says"
        ),
    )

    def section(self, name: str) -> Any:
        """The section of a stage, or of an arm by the name of its folder; None where the recipe has
        none.
        """
        if name in STAGES:
            return getattr(self, name, None)
        stage, arm = self.arm_of(name)
        base, section = self.section(stage), STAGES[stage].section
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
    def _common_lora(cls, values: Any) -> Any:
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
        if self.repeat is not None and len(self.policies) > 1:
            yield (
                "repeat trains one policy a round, whose answers are judged next: leave one of "
                f"{self.policies}"
            )
        if self.section("evaluate") is not None and not self.policies:
            yield "evaluate has no effect without a stage that makes a policy"
        if self.repeat is not None and self.section("pairs") is None:
            yield (
                "repeat has no effect without [pairs]: rounds go from answers to labels to a policy"
            )
        for name in self.stages:
            section = self.section(name)
            if section.scorer is not None:
                yield from self._scorer_faults(name, section, section.scorer)
            if name == "pairs":
                yield from self._choice_faults(section.choose)
            if name in self.policies:
                yield from self._keeping_faults(name, getattr(section, "evaluate", None))
            yield from faults_on(self.model, name, section, self.learner.shard)

    def _keeping_faults(self, name: str, heldout: Any) -> Iterator[str]:
        """Whether the prompts that judge the policies at the end have chosen none of their
        weights.
        """
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
        """Whether there will be reward models that a choice of pairs can ask."""
        reward, needs = self.section("reward"), "repeat and [reward]"
        needs += (
            ", with reward.members"
            if choose in ("disagreement", "information")
            else " of one score, without objectives"
        )
        able = (
            reward is not None
            and reward.objectives is None
            and (reward.is_ensemble or "members" not in needs)
        )
        if choose in SCORED and (self.repeat is None or not able):
            yield (
                f"pairs.choose = '{choose}' asks the reward model of the round before: it needs "
                f"{needs}"
            )

    def _scorer_faults(self, name: str, section: Any, scorer: str) -> Iterator[str]:
        """Whether there is, or will be, what scores for a stage, and whether the stage asks for
        what that can do.
        """
        model, trains = Path(self.run) / scorer / "model", self.section(scorer)
        if (elsewhere := reward_model_of(section)) is not None:
            model, trains = elsewhere, None
        if trains is None and not is_scorer(model):
            yield (
                f"{name}.reward_source = '{'learned' if scorer == 'reward' else scorer}' needs a "
                f"[{scorer}] section, or a "
                f"finished {scorer} stage in the run directory; or another reward_source: "
                "function, classifier, verifiable"
                if elsewhere is None
                else f"{name}.reward_model = {section.reward_model!r}: there is no trained reward model"
            )
        if scorer != "reward":
            return
        check_names(
            name,
            getattr(section, "objectives", None),
            objective_names(model) if trains is None else trains.objectives or (),
        )
        ensemble = trains.is_ensemble if trains is not None else (model / ENSEMBLE).is_file()
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
    sections: dict[str, Any] = {
        name: (kind.section | None, Field(default=None, description=kind.help))
        for name, kind in STAGES.items()
    }
    return create_model("Recipe", __base__=BaseRecipe, __module__=__name__, **sections)


Recipe = recipe_type()


def read_recipe(name: str, overrides: Sequence[str] = ()) -> BaseRecipe:
    """A recipe by its file or by the name of one that comes with tether.

    Raises:
        MissingFileError, ConfigError: there is none, or a key or value does not fit.
    """
    return load_recipe(packaged_recipe(name), recipe_type(), overrides)


def run_recipe(
    recipe: BaseRecipe,
    stages: Sequence[str] | None = None,
    progress: Callable[[str], Progress] | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    began: float | None = None,
) -> dict[str, Any]:
    """Run the named stages of a recipe in order (None: all); each finds its predecessors' results
    in the run directory.

    Args:
        clock, began: the seconds of budgets, and when they began to count; unset: now.

    Raises:
        ConfigError: a stage that the recipe has no section for, or whose section names no data; a
            tracker is not installed.
        DataError: a stage's data is something else, by its first rows; of all stages before the
            first is trained.
    """
    root, results, began = Path(recipe.run), {}, clock() if began is None else began
    names = list(recipe.stages if stages is None else stages)
    for name in names:
        section = recipe.section(name)
        if section is None:
            raise ConfigError(f"the recipe has no [{name}] section")
        check_libraries(recipe.model, name, section)
        if (root / name / "summary.json").is_file():
            continue
        if not _from_pairs(recipe, name, section):
            check_data(name, section)
        check_section(name, section, recipe.model)
        if isinstance(section, EvaluationSection):
            sampling_of(section, _sampling(recipe))
        if section.scorer and reward_model_of(section) is None:
            check_test_judge(name, section, recipe.section(section.scorer))
    root.mkdir(parents=True, exist_ok=True)
    from tether.run.budgets import Budgets
    from tether.run.price import show_price

    price = show_price(recipe, names, progress)
    if watches(recipe.learner):
        with placed(recipe.on, recipe.model.device):
            return watched(recipe, names, progress)
    again = [name for name in names if name != "sft"] if recipe.repeat else []
    with (
        placed(recipe.on, recipe.model.device),
        together(recipe, names),
        deterministic() if recipe.deterministic else contextlib.nullcontext(),
        tracking(recipe.track if here().first else (), root),
    ):
        rounds = [(name, number) for number in range(1, (recipe.repeat or 0) + 1) for name in again]
        order = [*((name, None) for name in names if name not in again), *rounds]
        budgets = Budgets(recipe, order, price, clock, began)
        for name, number in order:
            with limited_by(budgets.limit(name, number)):
                results[name] = _run(recipe, name, number, progress)
        if recipe.section("evaluate") is not None and "evaluate" in names and here().first:
            write_totals(recipe)
    return results


def _sampling(recipe: BaseRecipe) -> Sampling | None:
    """The sampling of the first stage that samples."""
    samplers = (recipe.section(n) for n in (*recipe.policies, "pairs"))
    return next((section.sampling for section in samplers if hasattr(section, "sampling")), None)


def _run(
    recipe: BaseRecipe, name: str, number: int | None, progress: Callable[[str], Progress] | None
) -> dict[str, Any]:
    """One stage, in one round."""
    if here().size > 1 and recipe.kind(name).alone:
        return here().once(lambda: _run(recipe, name, number, progress))
    place = round_folder(Path(recipe.run), number)
    if name != "sft":
        check_base(Path(recipe.run), place / name)
    title = name if number is None else f"{name} {number}"
    context = stands_on(recipe, name, progress(title) if progress else None, number)
    verdict = context.folder / "summary.json"
    if (
        context.policies
        and verdict.is_file()
        and context.policies.keys() - read_json(verdict)["policies"].keys()
    ):
        verdict.unlink()  # an arm has come: all are compared again, by the answers that are there
    if verdict.is_file() and here().first:
        from tether.run.budgets import reopen

        reopen(RunDirectory(context.folder), recipe.section(name), time_limit())
    if not here().first:
        context = replace(context, folder=here().desk / place.name / name)
    summary = run_stage(recipe.section(name), context)
    free_memory()
    return summary


def _from_pairs(recipe: BaseRecipe, name: str, section: Section) -> bool:
    """Whether a stage that names no data learns from what [pairs] collects, or from its prompts."""
    if (
        section.data is not None
        or recipe.section("pairs") is None
        or name in ("sft", "pairs", "evaluate")
    ):
        return False
    return section.kind in (Prompt, Comparison, Feedback)


def stands_on(
    recipe: BaseRecipe, name: str, progress: Progress | None = None, number: int | None = None
) -> Context:
    """What a stage of a recipe stands on: which folder, which model, which rows, and what scores
    for it.
    """
    root, section = Path(recipe.run), recipe.section(name)
    place, earlier = (
        round_folder(root, number),
        [round_folder(root, n) for n in range(1, number or 1)],
    )
    model = recipe.model if name == "sft" else stage_model(recipe, root)
    scorer = reward_model_of(section) or place / (section.scorer or "reward") / "model"
    more: dict[str, Any] = {"progress": progress, "round": number, "earlier": earlier}
    if earlier:
        more["policy"] = newest_policy(earlier[-1])
    if _from_pairs(recipe, name, section):
        more["rows"] = _collected(recipe, section, [*earlier, place])
    if name == "evaluate":
        more["policies"] = {
            n: place / n
            for n in compared_in(recipe, place)
            if (place / n / "summary.json").is_file()
        }
        more["sampling"] = _sampling(recipe)
    return Context(recipe.kind(name).name, place / name, model, recipe.seed, scorer, **more)


def _collected(recipe: BaseRecipe, section: Section, places: Sequence[Path]) -> Sequence[Any]:
    """The rows that a stage takes from [pairs]: comparisons of all rounds so far, verdicts on their
    sides, or its prompts.
    """
    if section.kind is Prompt:
        return load_rows(
            recipe.section("pairs").data, Prompt, Quarantine(), whole=calls_functions(section)
        )
    comparisons = [row for place in places for row in comparisons_of(place / "pairs")]
    return comparisons if section.kind is Comparison else feedback_of(comparisons)


def stage_model(recipe: BaseRecipe, root: Path) -> ModelConfig:
    """What the stages after SFT stand on: the SFT model if the recipe makes one, the base model
    otherwise.
    """
    if recipe.section("sft") is None:
        return recipe.model
    if not (root / "sft" / "summary.json").is_file():
        raise MissingFileError(
            f"{root / 'sft'} has no finished SFT stage; run it first (tether sft RECIPE)."
        )
    return after_sft(recipe.model, root)


def after_sft(model: ModelConfig, root: Path) -> ModelConfig:
    """The same settings on the fine-tuned folder, which carries its own template.

    Raises:
        MissingFileError: the stage is finished, and its model is gone.
    """
    if (root / "sft" / "summary.json").is_file() and not (
        root / "sft" / "model" / "config.json"
    ).is_file():
        raise MissingFileError(
            f"{root / 'sft' / 'model'}, from which everything in {root} starts, is gone or "
            "incomplete. Put it back, or begin in "
            "another run folder"
        )
    return on_folder(model, root / "sft" / "model")
