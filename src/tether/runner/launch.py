"""One start of a recipe: its jobs, and what they run in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tether.core.protocols import Announce
from tether.core.rundir import SWEEP, made_folder, write_json
from tether.runner.assembly.job import AnyJob
from tether.runner.jobs import sweep_table
from tether.runner.ranks.start import is_other, placement_of, together
from tether.settings.recipe import BaseRecipe
from tether.stages.learner.determinism import deterministic
from tether.stages.learner.ranks import Ranks
from tether.watch.tracking.follow import tracking


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One start of a recipe.

    Args:
        recipe: what ranks and other processes are started with.
        names: of the stages to run.
        jobs: these stages, prepared.
        clock, began: the seconds of budgets, and when they began to count.
        at_once: jobs of a sweep that run at once, each in a process of its own.
        whole: False: this process runs one job of a sweep, which another one follows.
    """

    recipe: BaseRecipe
    names: Sequence[str]
    jobs: Sequence[AnyJob]
    progress: Announce | None
    clock: Callable[[], float]
    began: float
    at_once: int = 1
    whole: bool = True

    @property
    def root(self) -> Path:
        """The folder of the whole run."""
        return Path(self.recipe.run)

    @contextlib.contextmanager
    def ranks(self) -> Iterator[Ranks]:
        """Within this block the ranks of the recipe train together, and trackers follow."""
        with (
            together(self.recipe, self.names) as ranks,
            deterministic() if self.recipe.deterministic else contextlib.nullcontext(),
            tracking(self.recipe.track if ranks.first and self.whole else (), self.root),
        ):
            yield ranks

    def key(self, job: AnyJob) -> str:
        """The key of a job's summary: its name, with the folder of its combination in a sweep."""
        inside = job.root.is_relative_to(self.root / "sweep")
        return f"{job.root.relative_to(self.root)}/{job.name}" if inside else job.name


def make_run_folder(launch: Launch) -> None:
    """Make the folder of the run; that of a sweep lists the combinations.

    Raises:
        ConfigError: all of the run belongs on another machine.
    """
    placement_of(launch.recipe).check()
    made_folder(launch.root)
    if launch.recipe.sweep is not None and launch.whole and not is_other():
        write_json(launch.root / SWEEP, {"combinations": sweep_table(launch.recipe)})
