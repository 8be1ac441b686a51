"""Reward models in a recipe: one, an ensemble or its average, one an objective, and one apart that only judges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field, model_validator

from tether.algorithms.reward_ensembles import Combine
from tether.core.errors import TrainingError
from tether.core.rundir import RunDirectory
from tether.core.types import Comparison
from tether.cpu.memory import free_memory
from tether.data.sources import split_by_group
from tether.models.config import LoraConfig
from tether.models.saving import save_ensemble
from tether.preferences.annotators import true_orders
from tether.run.objectives import Name
from tether.run.progress import Progress
from tether.run.reward_members import RewardMembers
from tether.run.roles import encoder_of, reward_role, save_trained
from tether.run.rows import DataConfig, Lora, Section
from tether.run.stage import Context, run_stage, settled
from tether.stages.reward import RewardConfig, RewardModeling

TAKEN = {"model", "score", "length", "proxy", "kl"}
"""Names that folders and columns have already, so that no objective can have them."""
TEST_SEED = 15485863
"""Added to the seed by which the prompts of a test model are chosen: what is held out of them has the seed itself."""


class RewardSection(Section, RewardConfig):
    record: ClassVar[type] = Comparison
    objectives: dict[Name, DataConfig] | None = Field(
        default=None, min_length=2, description="instead of data: by name the comparisons of several reward models"
    )
    test: dict[str, DataConfig] = Field(default_factory=dict, description="further held-out comparisons, evaluated by name")
    test_share: float = Field(
        default=0.0, ge=0, lt=1, description="share of the prompts whose comparisons train a second model, which only judges"
    )
    lora: Lora = Field(default=LoraConfig(), description="the adapter that learns; false trains the whole model")
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
    def kind(self) -> type | None:
        return self.record if self.objectives is None else None

    def others(self) -> Iterator[DataConfig]:
        yield from (*(self.objectives or {}).values(), *self.test.values())

    @property
    def is_ensemble(self) -> bool:
        """Whether several models will score."""
        return self.members > 1 and not self.average and self.distill is None

    @model_validator(mode="after")
    def _check_objectives(self) -> RewardSection:
        if self.objectives is None:
            return self
        if self.data or self.test or self.test_share:
            name = "data" if self.data else "test" if self.test else "test_share"
            raise ValueError(f"{name} has no effect with objectives: each has comparisons of its own")
        if self.members > 1:
            raise ValueError("members and objectives do not go together: each objective has one model")
        if self.lora is False:
            raise ValueError("objectives are adapters on one trunk, and lora is false. Leave lora out")
        if not self.heldout_fraction:
            raise ValueError("objectives are brought to one scale on held-out responses: heldout_fraction must be above 0")
        if taken := TAKEN & set(self.objectives):
            raise ValueError(f"an objective cannot be called {min(taken)!r}: something else in the run is")
        return self

    @model_validator(mode="after")
    def _check_members(self) -> RewardSection:
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


def train(section: RewardSection, context: Context, rows: Sequence[Comparison], run: RunDirectory) -> dict[str, Any]:
    """Train on top of the model; the result is the role in `model`, or those that are named there.

    With `test_share` a second model, of labels that the first one never sees, goes to `test`. Held-out pairs whose true order is
    known, those of simulated annotators, are also ranked against that.
    """
    if section.objectives is not None:
        return _objectives(section, section.objectives, context)
    tests = {name: context.read(data, Comparison, name)[0] for name, data in section.test.items()}
    apart: dict[str, Any] = {}
    if section.test_share:
        rows, others = split_by_group(rows, section.test_share, context.seed + TEST_SEED)
        plain = {"data": None, "test": {}, "test_share": 0.0, "members": 1, "average": False, "distill": None}
        own = replace(context, folder=context.folder / "test", rows=others, progress=None)
        apart = {"test_model": run_stage(section.model_copy(update=plain), own)}
        free_memory()
    loaded = context.load(run)
    if section.members > 1:
        stage = RewardMembers(section, context.model, loaded, context.seed)
    else:
        role = reward_role(loaded, section, context.seed)
        stage = RewardModeling(settled(section, RewardConfig), role, encoder_of(loaded))
    summary = {**stage.train(rows, run, context.progress), **apart}
    truth = context.truth
    if truth is None:
        truth = split_by_group(rows, section.heldout_fraction, section.seed)[1] if section.heldout_fraction else ()
    for name, pairs in true_orders(truth).items():
        summary[name] = stage.evaluate(stage.rankings(pairs)[0])["accuracy"]
    summary["tests"] = {name: stage.evaluate(stage.rankings(test)[0], sum(c.tie for c in test)) for name, test in tests.items()}
    if isinstance(stage, RewardMembers):
        stage.save(run)
    else:
        save_trained(stage.role, loaded, run.path / "model", kind="reward")
    return summary


def _objectives(section: RewardSection, objectives: dict[str, DataConfig], context: Context) -> dict[str, Any]:
    """Train several reward models on one base, each an ordinary stage in `NAME`, and name them in `model`.

    The models are left as they are. What brings their scores to mean 0 and deviation 1 is measured on held-out responses and
    stands beside their names.

    Raises:
        TrainingError: a model gives every held-out response the same score, or none was held out.
    """
    summaries: dict[str, dict[str, Any]] = {}
    for number, (name, data) in enumerate(objectives.items()):
        own = replace(context, folder=context.folder / name, progress=_part(context.progress, number, len(objectives)))
        summaries[name] = run_stage(section.model_copy(update={"data": data, "objectives": None}), own)
        free_memory()
        if not summaries[name].get("score_std"):
            raise TrainingError(
                f"the reward model of {name!r} tells no two held-out responses apart. Train longer, or hold more prompts out"
            )
    scales = [{"name": name, "mean": one["score_mean"], "deviation": one["score_std"]} for name, one in summaries.items()]
    save_ensemble(context.folder / "model", [context.folder / name / "model" for name in summaries], scales)
    return {
        **{f"{name}/heldout_accuracy": one["heldout_accuracy"] for name, one in summaries.items()},
        "objectives": summaries,
        "seconds": sum(one["seconds"] for one in summaries.values()),
    }


def _part(progress: Progress | None, number: int, count: int) -> Progress | None:
    """Counts the updates of all, as if each had as many."""
    return None if progress is None else lambda done, total, metrics: progress(number * total + done, count * total, metrics)
