"""Several reward models on one trunk: an ensemble, or the average of their weights."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tether.core.rundir import RunDirectory
from tether.core.types import Comparison
from tether.data.prepare import Ranking, Split
from tether.models.config import LoraConfig, ModelConfig
from tether.models.loading import LoadedModel
from tether.models.members import average_roles
from tether.models.saving import save_ensemble
from tether.models.trunk import Role
from tether.run.folder import drop_checkpoint
from tether.run.progress import Progress
from tether.run.roles import MEMBER_STRIDE, encoder_of, member_role, reward_role, save_trained
from tether.run.stage import settled
from tether.stages.reward import RewardConfig, RewardModeling, heldout_summary
from tether.stages.reward_members import Distillation, evaluate_members

if TYPE_CHECKING:
    from tether.run.reward import RewardSection

COUNTS = ("heldout_ties", "updates", "num_prompts", "num_pairs", "num_heldout_pairs", "skipped")


@dataclass
class RewardMembers:
    """Speaks as `RewardModeling` does, for `section.members` of them: one after another, each in a run directory of its own.

    Member 0 starts as the model that `members = 1` would train. The others have other weights and see the rows in another order;
    what is held out is the same. In an ensemble the scores of each have mean 0 and deviation 1 on training responses.
    """

    section: RewardSection
    settings: ModelConfig
    loaded: LoadedModel
    seed: int
    stages: list[RewardModeling] = field(default_factory=list)
    one: RewardModeling | None = None
    """The model that the members became, averaged or distilled."""

    def train(self, comparisons: Sequence[Comparison], run: RunDirectory, progress: Progress | None = None) -> dict[str, Any]:
        """Train the members that are not complete; returns the summary of what they are together."""
        split, found = None, []
        for number in range(self.section.members):
            one = RunDirectory.open(
                self._folder(run, number),
                {"reward": self.section, "model": self.settings, "seed": self.seed, "member": number},
                model={"source": self.loaded.source, "digest": self.loaded.digest},
            )
            stage = self._stage(one, number)
            split = split or stage.split(comparisons)
            if not one.complete:
                self._train(stage, split, one, self._progress(number, progress))
            found.append(one.summary())
        assert split is not None
        if self.section.average:
            self._average(split)
        elif self.section.distill is not None:
            found.append(self._distill(split, run, progress))
        for stage in filter(None, (*self.stages, self.one)):
            stage.frozen = None
        summary = self._summary(split, found[: self.section.members])
        return {**summary, "seconds": sum(one["seconds"] for one in found)}

    def evaluate(self, rankings: Sequence[Ranking], num_ties: int = 0) -> dict[str, Any]:
        """Of the model that the members became, or of the mean of their scores."""
        if self.one is not None:
            return self.one.evaluate(rankings, num_ties)
        return evaluate_members(self.stages, rankings, num_ties)

    def rankings(self, comparisons: Sequence[Comparison]) -> tuple[list[Ranking], dict[str, int]]:
        return self.stages[0].rankings(comparisons)

    def save(self, run: RunDirectory) -> None:
        """What scores, in `model/`: one role, or the names of the members' folders."""
        if self.one is not None:
            self._save(self.one.role, run)
        else:
            save_ensemble(run.path / "model", [self._folder(run, n) / "model" for n in range(self.section.members)])

    def _folder(self, run: RunDirectory, number: int) -> Path:
        return run.path / f"member-{number}"

    def _stage(self, run: RunDirectory, number: int) -> RewardModeling:
        """A member as its run left it, or one that has yet to learn."""
        if run.complete:
            role = member_role(self.loaded, run.path / "model", number)
        else:
            role = reward_role(self.loaded, self.section, self.seed, number, one_head=self.section.average)
        self.loaded = replace(self.loaded, model=role.model)  # where the next member's adapter goes
        config = settled(self.section, RewardConfig)
        stage = RewardModeling(config, role, encoder_of(self.loaded), order_seed=config.seed + MEMBER_STRIDE * number)
        stage.frozen = next((other.frozen for other in self.stages if other.frozen), None)
        self.stages.append(stage)
        return stage

    def _train(self, stage: RewardModeling, split: Split[Ranking], run: RunDirectory, progress: Progress | None) -> None:
        summary = stage.fit(split, run, progress)
        if not self.section.average:  # weights are averaged as they were trained
            stage.standardize(split.train)
        for parameter in stage.role.parameters():
            parameter.requires_grad_(False)
        self._save(stage.role, run)
        run.finish(summary)
        drop_checkpoint(run)

    def _average(self, split: Split[Ranking]) -> None:
        lora = self.section.lora
        assert isinstance(lora, LoraConfig)
        first = self.stages[0]
        self.one = RewardModeling(
            first.config, average_roles([stage.role for stage in self.stages], "reward", lora), first.encoder
        )
        self.one.center(split.train)
        for stage in self.stages:  # only to compare: they have been saved
            stage.standardize(split.train)

    def _distill(self, split: Split[Ranking], run: RunDirectory, progress: Progress | None) -> dict[str, Any]:
        """One more model, which learns what the members say together; its summary."""
        assert self.section.distill is not None
        one = RunDirectory.open(run.path / "student", {"reward": self.section, "model": self.settings, "seed": self.seed})
        role = reward_role(self.loaded, self.section, self.seed, self.section.members)
        self.loaded = replace(self.loaded, model=role.model)
        self.one = student = Distillation(settled(self.section, RewardConfig), role, encoder_of(self.loaded))
        student.frozen = self.stages[-1].frozen
        student.taught(self.stages, split.train, self.section.distill)
        one.finish(student.fit(split, one, self._progress(self.section.members, progress)))
        return one.summary()

    def _save(self, role: Role, run: RunDirectory) -> None:
        save_trained(role, self.loaded, run.path / "model", kind="reward")

    def _summary(self, split: Split[Ranking], found: Sequence[dict[str, Any]]) -> dict[str, Any]:
        summary: dict[str, Any] = {"train_loss": statistics.fmean(one["train_loss"] for one in found)}
        if split.test:
            summary |= heldout_summary(self.evaluate(split.test))
            if self.one is not None:
                summary["ensemble"] = evaluate_members(self.stages, split.test)
        return {**summary, **{name: found[0][name] for name in COUNTS}, "members": len(found)}

    def _progress(self, number: int, progress: Progress | None) -> Progress | None:
        """Counts the updates of all members, and of their student."""
        if progress is None:
            return None
        runs = self.section.members + (self.section.distill is not None)
        return lambda done, total, metrics: progress(number * total + done, runs * total, metrics)
