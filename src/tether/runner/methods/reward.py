"""Reward models in a recipe: one, an ensemble or its average, one an objective, and one apart that
only judges.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from tether.core.budget import shared_time, time_limit
from tether.core.errors import ConfigError, DataError, TrainingError
from tether.core.protocols import Progress, now_doing
from tether.core.rundir import RunDirectory, read_json
from tether.core.types import Comparison, Conversation, Json, Rollout
from tether.data.chat import ChatEncoder
from tether.data.prepare import Ranking, Split, encode_comparisons, limit_of
from tether.data.seen import write_seen
from tether.data.sources import split_by_group
from tether.models.average import average_roles
from tether.models.cpu.memory import free_memory
from tether.models.loading import LoadedModel
from tether.models.saving import save_ensemble
from tether.models.trunk import Role
from tether.people.labels.annotators import true_orders
from tether.rollout.conversations import as_rollout
from tether.runner.assembly.checks import file_rows
from tether.runner.assembly.data.rows import rows_of
from tether.runner.assembly.job import AnyJob, Job
from tether.runner.assembly.manifest import stage_model
from tether.runner.assembly.rewards import learned_reward
from tether.runner.assembly.roles import (
    MEMBER_STRIDE,
    attach,
    encoder_of,
    reward_role,
    save_trained,
    scoring_role,
    trained_scorer,
)
from tether.runner.methods.stage import drop_checkpoint, open_part, run_stage
from tether.settings.model import LoraConfig, ModelConfig
from tether.settings.reward import RewardSection
from tether.settings.rewards import Combine
from tether.settings.section import PartKind
from tether.stages.learner.ranks import Ranks
from tether.stages.reward import Distillation, RewardModeling, evaluate_members, heldout_summary

COUNTS = ("heldout_ties", "updates", "num_prompts", "num_pairs", "num_heldout_pairs", "skipped")
"""Figures that all members share."""
TEST_SEED = 15485863
"""Added to the seed by which the prompts of a test model are chosen: what is held out of them has
the seed itself.
"""


def train(
    job: Job[RewardSection],
    rows: Sequence[Comparison],
    run: RunDirectory,
    ranks: Ranks,
) -> Json:
    """Train on top of the model; the result is the role in `model`, or those that are named there.

    With `test_share` a second model, of labels that the first one never sees, goes to `test`.
    Held-out pairs whose true order is known, those of simulated annotators, are also ranked against
    that.
    """
    section = job.settings
    if section.objectives is not None:
        return _objectives(job, ranks)
    tests: dict[str, list[Comparison]] = {}
    for name, data in section.test.items():
        tests[name], unread = rows_of(job, data, Comparison, f"test.{name}")
        job.quarantine.absorb(unread)
    test_model: Json = {}
    for part in _parts(job, "test model"):
        rows, others = split_by_group(rows, section.test_share, job.seed + TEST_SEED)
        tell = lambda done, total, _: now_doing("training the test model", done, total)  # noqa: E731
        with shared_time(0, 2):
            own = replace(part, rows=others, progress=tell)
            test_model = {"test_model": run_stage(own, ranks)}
    loaded = stage_model(job, run, ranks)
    encoder = encoder_of(loaded)
    _check_tests(tests, section, encoder)
    if members := _parts(job, "member"):
        student = next(iter(_parts(job, "student")), None)
        stage = RewardMembers(
            job=job,
            ranks=ranks,
            loaded=loaded,
            members=members,
            student=student,
        )
        summary = stage.train(rows)
    elif section.teacher:
        stage, learned = _student_of(section.teacher, job, loaded, rows, ranks)
        summary = stage.train(learned, run, job.progress)
        summary["unscored"] = len(rows) - len(learned)
    else:
        role = reward_role(loaded, section, job.seed)
        stage = RewardModeling(section, role, encoder, ranks=ranks)
        summary = stage.train(rows, run, job.progress)
    summary |= test_model
    seen, held_out = split_by_group(rows, section.heldout_fraction, section.seed)
    truth = held_out if job.truth is None else job.truth
    for name, pairs in true_orders(truth).items():
        if ready := stage.rankings(pairs)[0]:
            summary[name] = stage.evaluate(ready)["accuracy"]
    summary["tests"] = {
        name: stage.evaluate(stage.rankings(test)[0], sum(c.tie for c in test))
        for name, test in tests.items()
    }
    if isinstance(stage, RewardMembers):
        stage.save()
        if stage.student is not None:
            drop_checkpoint(RunDirectory(stage.student.folder))
    else:
        save_trained(stage.role, loaded, run.path / "model", kind="reward")
    if ranks.first:
        write_seen(run.path / "model", seen)
    return loaded.noted(summary)


def _check_tests(
    tests: Mapping[str, Sequence[Comparison]],
    section: RewardSection,
    encoder: ChatEncoder,
) -> None:
    """Refuse a test that nothing can be measured on, before the training."""
    limit = limit_of(encoder, section, "reward")
    for name, test in tests.items():
        if not encode_comparisons(test, encoder, limit)[0]:
            raise DataError(
                f"no pair of reward.test.{name} can be scored: too long, ties, or equal",
            )


def check_reward(job: Job[RewardSection], _: ModelConfig) -> None:
    """Check teacher and objectives before the first stage begins."""
    name = job.name
    section = job.settings
    if section.teacher and trained_scorer(section.teacher) is None:
        raise ConfigError(f"{name}.teacher = {section.teacher!r}: there is no trained reward model")
    fraction = section.heldout_fraction
    for objective, data in (section.objectives or {}).items():
        rows = file_rows(data, Comparison)  # read up to the first that is held out
        held_out = any(split_by_group([row], fraction, section.seed)[1] for row in rows)
        if not (held_out or data.on_hub):
            raise DataError(
                f"{name}.objectives.{objective}: no row is held out at heldout_fraction = "
                f"{fraction:g}, and scores of objectives get one scale on held-out responses. Raise "
                "it, or give more prompts",
            )


def _student_of(
    teacher: str,
    job: Job[RewardSection],
    loaded: LoadedModel,
    rows: Sequence[Comparison],
    ranks: Ranks,
) -> tuple[Distillation, list[Comparison]]:
    """A model that learns the scores of a teacher, and the rows with scores of both sides. The
    teacher is loaded for these scores alone.

    Raises:
        DataError: the teacher gave no row's sides a score.
    """
    section = job.settings
    folder = trained_scorer(teacher)
    assert folder is not None  # checked before the first stage
    role = reward_role(loaded, section, job.seed)
    student = Distillation(section, role, encoder_of(loaded), ranks=ranks)
    now_doing("scoring by the teacher")
    sides: dict[Conversation, Rollout] = {}
    for whole in (w for row in rows for w in _sides(row)):
        with suppress(DataError):  # counted where the rows are encoded
            sides[whole] = as_rollout(whole, student.encoder)
    reward = learned_reward(folder, job.model, section.distill or "mean", ranks.mesh)
    scores = reward.score([*sides.values()])
    del reward
    free_memory()
    failed = {w for w, score in zip(sides, scores, strict=True) if score.value is None}
    student.targets = {
        (*side.prompt_ids, *side.response_ids): score.value
        for side, score in zip(sides.values(), scores, strict=True)
        if score.value is not None
    }
    learned = [row for row in rows if failed.isdisjoint(_sides(row))]
    if not learned:
        raise DataError(f"reward.teacher = {teacher!r} gave no pair two scores")
    return student, learned


def _sides(row: Comparison) -> tuple[Conversation, Conversation]:
    return (*row.prompt, *row.chosen), (*row.prompt, *row.rejected)


def _parts(job: Job[RewardSection], kind: PartKind) -> list[AnyJob]:
    return [part for part in job.parts if part.part and part.part.kind == kind]


def _objectives(job: Job[RewardSection], ranks: Ranks) -> Json:
    """Train several reward models on one base, each an ordinary stage in `NAME`, and name them in
    `model`.

    The models are left as they are. Mean and deviation, which normalize their scores, are measured
    on held-out responses and stored with their names.

    Raises:
        TrainingError: a model gives every held-out response the same score, or none was held out.
    """
    summaries: dict[str, Json] = {}
    for number, part in enumerate(job.parts):
        name = part.folder.name
        progress = _part(job.progress, number, len(job.parts))
        if part.finished:
            time_limit().before += read_json(part.folder / "summary.json")["seconds"]
        with shared_time(number, len(job.parts)):
            summaries[name] = run_stage(replace(part, progress=progress), ranks)
        if not summaries[name].get("score_std"):
            raise TrainingError(
                f"the reward model of {name!r} tells no two held-out responses apart. Train "
                "longer, or hold more prompts out",
            )
    scales = [
        {"name": name, "mean": one["score_mean"], "deviation": one["score_std"]}
        for name, one in summaries.items()
    ]
    models = [job.folder / name / "model" for name in summaries]
    save_ensemble(job.folder / "model", models, scales)
    return {
        **{f"{name}/heldout_accuracy": one["heldout_accuracy"] for name, one in summaries.items()},
        "objectives": summaries,
        "seconds": sum(one["seconds"] for one in summaries.values()),
    }


@dataclass(kw_only=True)
class RewardMembers:
    """Has the interface of `RewardModeling`, for several of them: one after another, each in a
    folder of its own.

    Member 0 starts as the model that `members = 1` would train. The others have other weights and
    see the rows in another order; what is held out is the same. In an ensemble the scores of each
    have mean 0 and deviation 1 on training responses.
    """

    job: Job[RewardSection]
    ranks: Ranks
    loaded: LoadedModel
    members: Sequence[AnyJob]
    student: AnyJob | None
    stages: list[RewardModeling] = field(default_factory=list)
    one: RewardModeling | None = None
    """The model that the members became, averaged or distilled."""

    @property
    def section(self) -> RewardSection:
        return self.job.settings

    def _new(self, role: Role, order: int | None = None) -> RewardModeling:
        encoder = encoder_of(self.loaded)
        ranks = self.ranks
        return RewardModeling(self.section, role, encoder, order_seed=order, ranks=ranks)

    def train(self, comparisons: Sequence[Comparison]) -> Json:
        """Train the members that are not complete; returns the summary of what they are
        together.
        """
        split = None
        summaries = []
        count = len(self.members) + (self.student is not None)
        bars = [_part(self.job.progress, number, count) for number in range(count)]
        manifest = {"source": self.loaded.source, "digest": self.loaded.digest}
        for number, member in enumerate(self.members):
            one = open_part(member, model=manifest)
            stage = self._stage(one, number)
            split = split or stage.split(comparisons)
            if one.complete:
                drop_checkpoint(one)
                time_limit().before += one.summary()["seconds"]
            else:
                with shared_time(number, count):
                    self._train(stage, split, one, bars[number])
            summaries.append(one.summary())
        assert split is not None
        if self.section.average:
            self._average(split)
        elif self.student is not None and self.section.distill is not None:
            run = open_part(self.student)
            summaries.append(self._distill(split, self.section.distill, run, bars[-1]))
        for stage in filter(None, (*self.stages, self.one)):
            stage.frozen = None
        trained = summaries[: len(self.members)]
        summary: Json = {"train_loss": statistics.fmean(one["train_loss"] for one in trained)}
        if split.test:
            summary |= heldout_summary(self.evaluate(split.test))
            if self.one is not None:
                summary["ensemble"] = evaluate_members(self.stages, split.test)
        return {
            **summary,
            **{name: trained[0][name] for name in COUNTS},
            "members": len(trained),
            "seconds": sum(one["seconds"] for one in summaries),
        }

    def evaluate(self, rankings: Sequence[Ranking], num_ties: int = 0) -> Json:
        """Of the model that the members became, or of the mean of their scores."""
        if self.one is not None:
            return self.one.evaluate(rankings, num_ties)
        return evaluate_members(self.stages, rankings, num_ties)

    def rankings(self, comparisons: Sequence[Comparison]) -> tuple[list[Ranking], dict[str, int]]:
        return self.stages[0].rankings(comparisons)

    def save(self) -> None:
        """Save the scorer in `model/`: one role, or the names of the members' folders."""
        folder = self.job.folder / "model"
        if self.one is not None:
            save_trained(self.one.role, self.loaded, folder, kind="reward")
        else:
            save_ensemble(folder, [member.folder / "model" for member in self.members])

    def _stage(self, run: RunDirectory, number: int) -> RewardModeling:
        """A member as its run left it, or one that has yet to learn."""
        section = self.section
        loaded = self.loaded
        if run.complete:
            attach(loaded, run.path / "model", f"reward-{number}")
            role = scoring_role(loaded, run.path / "model", f"reward-{number}")
        else:
            seed = self.job.seed
            role = reward_role(loaded, section, seed, number, one_head=section.average)
        stage = self._new(role, section.seed + MEMBER_STRIDE * number)
        stage.frozen = next((other.frozen for other in self.stages if other.frozen), None)
        self.stages.append(stage)
        return stage

    def _train(
        self,
        stage: RewardModeling,
        split: Split[Ranking],
        run: RunDirectory,
        progress: Progress | None,
    ) -> None:
        summary = stage.fit(split, run, progress)
        if not self.section.average:  # weights are averaged as they were trained
            stage.standardize(split.train)
        for parameter in stage.role.parameters():
            parameter.requires_grad_(False)
        save_trained(stage.role, self.loaded, run.path / "model", kind="reward")
        run.finish(summary)
        drop_checkpoint(run)

    def _average(self, split: Split[Ranking]) -> None:
        lora = self.section.lora
        assert isinstance(lora, LoraConfig)
        role = average_roles([stage.role for stage in self.stages], "reward", lora)
        self.one = self._new(role)
        self.one.center(split.train)
        for stage in self.stages:  # only to compare: they have been saved
            stage.standardize(split.train)

    def _distill(
        self,
        split: Split[Ranking],
        combine: Combine,
        run: RunDirectory,
        progress: Progress | None,
    ) -> Json:
        """One more model, which learns what the members say together; its summary."""
        loaded = self.loaded
        role = reward_role(loaded, self.section, self.job.seed, len(self.members))
        student = Distillation(self.section, role, encoder_of(loaded), ranks=self.ranks)
        self.one = student
        student.frozen = self.stages[-1].frozen
        student.taught(self.stages, split.train, combine)
        run.finish(student.fit(split, run, progress))
        return run.summary()


def _part(progress: Progress | None, number: int, count: int) -> Progress | None:
    """Counts the updates of all, as if each had as many."""
    return (
        None
        if progress is None
        else lambda done, total, metrics: progress(number * total + done, count * total, metrics)
    )
