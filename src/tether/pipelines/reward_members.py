"""Several reward models on one trunk: an ensemble, or the average of their weights."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tether.assemble import RewardSection, encoder_of, reward_role, save_trained, settled
from tether.assemble.roles import MEMBER_STRIDE, member_role
from tether.core.config import dump
from tether.core.rundir import RunDirectory
from tether.core.types import Comparison
from tether.data.comparisons import Ranking
from tether.models.config import LoraConfig, ModelConfig
from tether.models.loading import LoadedModel
from tether.models.members import average_roles
from tether.models.saving import save_ensemble
from tether.models.trunk import Role
from tether.pipelines.measured import Progress
from tether.stages.reward import RewardConfig, RewardModeling, Split
from tether.stages.reward_members import evaluate_members

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
    averaged: RewardModeling | None = None

    def train(self, comparisons: Sequence[Comparison], run: RunDirectory, progress: Progress | None = None) -> dict[str, Any]:
        """Train the members that are not complete; returns the summary of what they are together."""
        split, found = None, []
        for number in range(self.section.members):
            one = RunDirectory.open(
                self._folder(run, number),
                {"reward": dump(self.section), "model": dump(self.settings), "seed": self.seed, "member": number},
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
        return {**self._summary(split, found), "seconds": sum(one["seconds"] for one in found)}

    def evaluate(self, rankings: Sequence[Ranking], num_ties: int = 0) -> dict[str, Any]:
        """Of the averaged model, or of the mean of the members' scores."""
        if self.averaged is not None:
            return self.averaged.evaluate(rankings, num_ties)
        return evaluate_members(self.stages, rankings, num_ties)

    def rankings(self, comparisons: Sequence[Comparison]) -> tuple[list[Ranking], dict[str, int]]:
        return self.stages[0].rankings(comparisons)

    def save(self, run: RunDirectory) -> None:
        """What scores, in `model/`: the averaged role, or the names of the members' folders."""
        if self.averaged is not None:
            self._save(self.averaged.role, run)
        else:
            save_ensemble(run.path / "model", [self._folder(run, n) / "model" for n in range(self.section.members)])

    def _folder(self, run: RunDirectory, number: int) -> Path:
        return run.path / f"member-{number}"

    def _stage(self, run: RunDirectory, number: int) -> RewardModeling:
        """A member as its run left it, or one that has yet to learn."""
        if run.complete:
            role = member_role(self.loaded, run.path / "model", number)
        else:
            role = reward_role(self.loaded, self.section, self.seed, number)
        self.loaded = replace(self.loaded, model=role.model)  # where the next member's adapter goes
        config = settled(self.section, RewardConfig)
        stage = RewardModeling(config, role, encoder_of(self.loaded), order_seed=config.seed + MEMBER_STRIDE * number)
        self.stages.append(stage)
        return stage

    def _train(self, stage: RewardModeling, split: Split, run: RunDirectory, progress: Progress | None) -> None:
        summary = stage.fit(split, run, progress)
        if not self.section.average:  # weights are averaged as they were trained
            stage.standardize(split.train)
        for parameter in stage.role.parameters():
            parameter.requires_grad_(False)
        self._save(stage.role, run)
        run.finish(summary)
        shutil.rmtree(run.path / "checkpoints", ignore_errors=True)

    def _average(self, split: Split) -> None:
        lora = self.section.lora
        assert isinstance(lora, LoraConfig)
        first = self.stages[0]
        self.averaged = RewardModeling(
            first.config, average_roles([stage.role for stage in self.stages], "reward", lora), first.encoder
        )
        self.averaged.center(split.train)
        for stage in self.stages:  # only to compare: they have been saved
            stage.standardize(split.train)

    def _save(self, role: Role, run: RunDirectory) -> None:
        save_trained(role, self.loaded, run.path / "model", kind="reward", base=self.settings.source)

    def _summary(self, split: Split, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
        summary: dict[str, Any] = {"train_loss": statistics.fmean(one["train_loss"] for one in found)}
        if split.test:
            evaluation = self.evaluate(split.test)
            summary |= {f"heldout_{k}" if k in ("loss", "accuracy", "ties") else k: v for k, v in evaluation.items()}
            if self.averaged is not None:
                summary["ensemble"] = evaluate_members(self.stages, split.test)
        return {**summary, **{name: found[0][name] for name in COUNTS}, "members": len(found)}

    def _progress(self, number: int, progress: Progress | None) -> Progress | None:
        """Counts the updates of all members."""
        if progress is None:
            return None
        return lambda done, total, metrics: progress(number * total + done, self.section.members * total, metrics)
