"""The expected time of a run, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tether.core.amounts import duration
from tether.core.errors import one_line
from tether.core.protocols import Announcer, doing
from tether.runner.assembly.data.fitting import LEAST
from tether.runner.budgets import last_share
from tether.runner.jobs import expand
from tether.runner.planning.devices import machine_for
from tether.runner.planning.plan import Plan, plan
from tether.runner.planning.sizes import row_sizes
from tether.settings.recipe import BaseRecipe
from tether.stats.shares import wilson_interval

LONG = 900.0
"""Seconds of a run from which on its price names a budget."""
SHORT = 12
"""Minutes of that budget."""
ENCODED = 2_000
"""Rows of a stage up to which they are encoded for the price, in seconds, so that it is of those
that train; the stage encodes them again.
"""


def announce_price(recipe: BaseRecipe, names: Sequence[str], screen: Announcer) -> None:
    """Show the time that the stages will take which are not finished. A model that the planner
    cannot work out is trained all the same.
    """
    root = Path(recipe.run)
    left = [n for n in names if recipe.repeat or not (root / n / "summary.json").is_file()]
    if not screen.shows or not left:
        return
    doing(screen("price"), "working out the time")
    try:
        sizes, machine = row_sizes(recipe, left, encode=ENCODED), machine_for(recipe.model.device)
        made = plan(recipe, machine, sizes=sizes, stages=left, advise=False, measured=False)
        lines = [*price_lines(recipe, made)]
        seconds = {stage.name: stage.seconds or 0.0 for stage in made.stages}
        jobs = expand(recipe, [*seconds])
        is_plain = [job.name for job in jobs] == [*seconds] and not recipe.budget
        if is_plain and made.stages[-1].name == "evaluate" and sum(seconds.values()) > LONG:
            lines.append(f"--budget {SHORT} ends within {SHORT} minutes, after fewer steps.")
            prompts = sizes["evaluate"].count or 0
            fits = max(min(LEAST, prompts), int(prompts * last_share(jobs, seconds, SHORT)))
            if fits < prompts:
                ends = [wilson_interval(count / 2, count)[1] - 0.5 for count in (fits, prompts)]
                lines[-1] += (
                    f" The win rate is then of about {fits} of {prompts} prompts: "
                    "±{:.0%} instead of ±{:.0%}.".format(*ends)
                )
    except Exception as error:  # noqa: BLE001  (of whatever kind: the run itself may be able to do it)
        screen.note(f"The time is not known before the start: {one_line(error)}")
        return
    screen.price(lines, seconds)


def price_lines(recipe: BaseRecipe, made: Plan) -> Iterator[str]:
    """Work and time of each stage, and the time of all."""
    for stage in made.stages:
        title = recipe.titles[stage.name]
        time = "time unknown, since its rows are not counted"
        if stage.seconds is not None:
            time = f"about {duration(stage.seconds)}"
        yield f"{title}: {f'{stage.rounds} times ' * (stage.rounds > 1)}{stage.work.words}; {time}"
        measured = recipe.section(stage.name).measurement
        if measured is not None and measured.evaluators:
            yield f"{title}: not in this time: evaluators {', '.join(measured.evaluators)}."
    if len(made.stages) > 1 and made.seconds is not None:
        yield f"All {len(made.stages)} stages: about {duration(made.seconds)}"
