"""A job: a stage to run, with everything that it needs beside its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from tether.core.protocols import Progress
from tether.core.types import Comparison, Sampling
from tether.data.sources import Quarantine
from tether.settings.model import ModelConfig
from tether.settings.section import DataConfig, Section, StagePart
from tether.settings.stages import StageKind

SectionT_co = TypeVar("SectionT_co", bound=Section, covariant=True)


@dataclass(frozen=True, kw_only=True)
class Job(Generic[SectionT_co]):
    """A stage to run, with everything that it needs beside its rows. `runner.prepare` makes it from
    the recipe before anything is loaded; methods read the job alone.

    Args:
        name: of the stage in its recipe, or of an arm: `ppo`, `ppo-beta0`.
        kind: the row of the table of stages.
        settings: the section.
        folder: of its files; a finished one holds `summary.json`.
        model: what the stage starts from.
        seed: of everything random.
        round: its number, of a recipe that repeats.
        earlier: folders of the rounds before this one.
        start: folder of the stage whose model it starts from; None: the recipe's model.
        pairs: folders of the [pairs] stages whose comparisons, or prompts, the stage uses; empty:
            the stage reads its own data.
        prompts: the data of [pairs] whose prompts the stage uses.
        scorer: folder of the trained model that scores its answers.
        policies: folders, by name, of the policies that it compares with their start.
        sampling: how the first stage of the recipe that samples does so.
        others: settings of the other stages, by name; an evaluation counts the prompts that it
            shares with them.
        on: where the programs beside the learner start.
        part: the part of the stage that this job runs; None: the job is a whole stage.
        rows: instead of those that the section's data names.
        truth: pairs whose true order is known, to rank by a reward model; unset: those among the
            held-out rows.
        policy: the folder of the policy that answers to collect pairs; unset: the model.
        progress: the bar of the stage.
        quarantine: rows and prompts that the stage cannot use, for its summary.
    """

    name: str
    kind: StageKind
    settings: SectionT_co
    folder: Path
    model: ModelConfig
    seed: int = 0
    round: int | None = None
    earlier: tuple[Path, ...] = ()
    start: Path | None = None
    pairs: tuple[Path, ...] = ()
    prompts: DataConfig | None = None
    scorer: Path | None = None
    policies: Mapping[str, Path] = field(default_factory=dict)
    sampling: Sampling | None = None
    others: Mapping[str, Section] = field(default_factory=dict)
    on: str = "local"
    part: StagePart | None = None
    rows: Sequence[Any] | None = None
    truth: Sequence[Comparison] | None = None
    policy: Path | None = None
    progress: Progress | None = None
    quarantine: Quarantine = field(default_factory=Quarantine)

    @property
    def stage(self) -> str:
        """The name of the stage in the table: of an arm, that of the stage that it varies."""
        return self.kind.name

    @property
    def place(self) -> Path:
        """The folder that holds this job's folder and those of its round."""
        return self.folder.parent

    @property
    def root(self) -> Path:
        """The folder of the run that the job belongs to; of a sweep, that of one combination."""
        return self.place if self.round is None else self.place.parent

    @property
    def sampler(self) -> str:
        """The name of the model that answers; a folder of the run as seen from there, since it
        moves along.
        """
        source = Path(self.policy or self.model.source)
        inside = source.is_relative_to(self.root)
        return str(source.relative_to(self.root) if inside else source)

    @property
    def parts(self) -> tuple[AnyJob, ...]:
        """The trainings within this stage, in their order: members, objectives, a test model, a
        student, or rounds. The stage runs them itself, on one base and in one lock.
        """
        return tuple(
            replace(
                self,
                name=f"{self.name}/{part.name}",
                settings=part.settings,
                folder=self.folder / part.name,
                part=part,
            )
            for part in (self.settings.parts() if self.part is None else ())
        )

    @property
    def config(self) -> dict[str, object]:
        """The settings that decide the result: what `config.json` holds."""
        own = {self.stage: self.settings, "model": self.model, "seed": self.seed}
        return {**own, **(self.part.noted if self.part else {})}

    @property
    def needs(self) -> tuple[Path, ...]:
        """Folders of the jobs on which this one depends."""
        scorers = () if self.scorer is None else (self.scorer.parent,)
        starts = () if self.start is None else (self.start,)
        return (*starts, *self.pairs, *self.policies.values(), *scorers)

    @property
    def title(self) -> str:
        """Name for people, with the round."""
        stage, slash, part = self.name.partition("/")
        return self.name if self.round is None else f"{stage} {self.round}{slash}{part}"

    @property
    def finished(self) -> bool:
        """True if the stage has left its summary."""
        return (self.folder / "summary.json").is_file()


AnyJob = Job[Section]
