"""Start of a run: the one sequence for the command line and for Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tether.core.locks import release
from tether.core.protocols import Announce, doing
from tether.core.types import Facts
from tether.runner.folder import remember
from tether.runner.jobs import variants
from tether.runner.run import run_recipe
from tether.settings.recipe import BaseRecipe
from tether.watch.report.page import write_report
from tether.watch.report.reading import started_stages

Results = Mapping[str, Facts]
"""Summaries by stage."""


def start_run(
    recipe: BaseRecipe,
    stages: Sequence[str],
    announce: Announce,
    *,
    began: float,
    at_once: int = 1,
    checked: Callable[[], None] = lambda: None,
) -> tuple[Results, Path]:
    """Run stages in a folder that this program alone writes to, and write its page.

    Args:
        announce: makes the progress of a stage by its name.
        began: clock reading (`time.monotonic`) at which the user started, for budgets.
        at_once: jobs of a sweep that run at once.
        checked: called once the jobs are checked, before the first begins.

    Returns:
        The summaries, and the path of the page.

    Raises:
        MissingFileError: data or a model that the recipe names is not there.
    """
    root = Path(recipe.run)

    def remembered() -> None:
        remember(root, recipe, stages)
        checked()

    try:
        results = run_recipe(
            recipe,
            stages,
            announce,
            began=began,
            at_once=at_once,
            checked=remembered,
        )
        doing(announce("report"), "writing the page")
        for variant in variants(recipe):
            # a combination that is the recipe itself has no folder of its own
            if recipe.sweep is not None and started_stages(Path(variant.run)):
                write_report(Path(variant.run))
        return results, write_report(root)
    finally:
        release(root)
