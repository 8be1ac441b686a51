"""Inputs of a stage: its folder, its model, and the results of the stages before it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tether.build.data.rows import load_rows, named
from tether.build.launching import Placement
from tether.build.models import open_model
from tether.core.names import file_part
from tether.core.once import once
from tether.core.rundir import RunDirectory, environment, read_json
from tether.core.types import Comparison, Facts, Sampling
from tether.data.sources import UNUSED_COLUMNS, Quarantine
from tether.learner.loop import Progress
from tether.learner.ranks import ALONE, Ranks
from tether.models.loading import LoadedModel
from tether.settings.model import ModelConfig
from tether.settings.section import PACKAGED, DataConfig


@dataclass(frozen=True, kw_only=True)
class Context:
    """Inputs of a stage: its folder, its model, and the results of the stages before it.

    Args:
        name: of the section in a recipe.
        model: what the stage starts from.
        scorer: the folder of the trained model that scores.
        rows: instead of those that the section's data names.
        truth: pairs whose true order is known, to rank by a reward model; unset: those among the
            held-out rows.
        round, earlier: of a recipe that repeats: the number of this round, and the folders of those
            before it.
        policy: the folder of the policy that answers to collect pairs; unset: the model.
        policies, sampling: the folders of trained policies by name, and their sampling, to compare
            them with the model.
        trained: the digests of the prompts in the rows of each stage that trains, to count those
            that an evaluation shares with them.
        placement: where servers start.
        ranks: those that train together.
        quarantine: rows and prompts that the stage cannot use, for its summary.
    """

    name: str
    folder: Path
    model: ModelConfig
    seed: int
    scorer: Path | None = None
    rows: Sequence[Any] | None = None
    truth: Sequence[Comparison] | None = None
    round: int | None = None
    earlier: Sequence[Path] = ()
    policy: Path | None = None
    policies: Mapping[str, Path] = field(default_factory=dict)
    sampling: Sampling | None = None
    trained: Mapping[str, frozenset[str]] = field(default_factory=dict)
    progress: Progress | None = None
    placement: Placement = field(default_factory=Placement)
    ranks: Ranks = ALONE
    quarantine: Quarantine = field(default_factory=Quarantine)

    @property
    def root(self) -> Path:
        """The folder of the whole run."""
        return self.folder.parent if self.round is None else self.folder.parent.parent

    @property
    def sampler(self) -> str:
        """The name of the model that answers; a folder of the run as seen from there, since it
        moves along.
        """
        place = Path(self.policy or self.model.source)
        return str(place.relative_to(self.root) if place.is_relative_to(self.root) else place)

    def load(self, run: RunDirectory) -> LoadedModel:
        """The model, whose digest is noted in the run."""
        loaded = open_model(self.model, seed=self.seed, mesh=self.ranks.mesh)
        note_machine(run, loaded)
        return loaded

    def read(
        self,
        data: DataConfig | None,
        kind: type,
        name: str = "",
        *,
        whole: bool = False,
        used: Iterable[str] = (),
    ) -> tuple[list[Any], Quarantine]:
        """Rows of a data section, and what had to be set aside; `whole` as in `load_rows`. `used`
        names more columns in use.
        """
        name = name or self.name
        quarantine = self.fresh_quarantine(name)
        rows = load_rows(named(data, name), kind, quarantine, whole=whole)
        for column in used:
            del quarantine.unused[column]
        packaged = data is not None and all(Path(path).parent == PACKAGED for path in data.paths)
        # of the rows that come with tether ids and kinds are for people
        if quarantine.unused and not packaged:
            once(
                logging.getLogger("tether.data").warning,
                UNUSED_COLUMNS,
                f"[{name}]",
                quarantine.unused_columns(),
            )
        return rows, quarantine

    def fresh_quarantine(self, name: str) -> Quarantine:
        """An empty one, with a file in the stage's folder: a stage that goes on reads all rows
        again.
        """
        path = self.folder / f"quarantine-{file_part(name)}.jsonl"
        path.unlink(missing_ok=True)
        return Quarantine(path)


def note_machine(run: RunDirectory, loaded: LoadedModel, **more: object) -> None:
    """Write into the manifest what a stage computes with; of a stage that goes on with something
    else, the model notes what.
    """
    before = read_json(run.path / "manifest.json")
    now = loaded.manifest()
    code = environment()["code_digest"]
    if (began := before.get("code_digest", code)) != code:
        loaded.note(
            f"{run.path.name} began with other code of tether (code_digest {began}, now {code}): "
            "the end may differ from that of a run in one go. For the same bits, go on with that "
            "code, or begin anew with run=PATH",
        )
    pairs = zip(_decisive(before), _decisive({**environment(), **now}), strict=True)
    if changes := [f"{new} after {old}" for old, new in pairs if old and old != new]:
        loaded.note(
            f"{run.path.name} goes on with {'; '.join(changes)}: numbers are rounded otherwise "
            "from here on, and the end is not that of a run in one go (docs/trust/determinism.md)",
        )
    run.update_manifest(**now, **more)


def _decisive(noted: Facts) -> list[str]:
    """The part of a manifest that decides how numbers are rounded, in words; empty ones where it
    says nothing.
    """
    model, threads, kernels = noted.get("model"), noted.get("threads"), noted.get("cpu_kernels")
    own = [name for name in kernels or () if name != "allocator"]  # which rounds nothing
    return [
        f"torch {noted.get('packages', {}).get('torch')}",
        f"{noted.get('processor')}",
        f"{threads} thread{'s' * (threads != 1)}" if threads else "",
        f"{model['dtype']} on {model['device']}" if model else "",
        ""
        if kernels is None
        else f"CPU kernels for {' and '.join(own)}"
        if own
        else "no CPU kernels",
    ]
