"""The expected time of a run, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tether.core.amounts import duration
from tether.core.errors import one_line
from tether.core.protocols import Announcer, doing
from tether.runner.planning.devices import machine_for
from tether.runner.planning.plan import Plan, plan
from tether.runner.planning.sizes import row_sizes
from tether.settings.recipe import BaseRecipe


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
        sizes, machine = row_sizes(recipe, left), machine_for(recipe.model.device)
        made = plan(recipe, machine, sizes=sizes, stages=left, advise=False, measured=False)
    except Exception as error:  # noqa: BLE001  (of whatever kind: the run itself may be able to do it)
        screen.note(f"The time is not known before the start: {one_line(error)}")
        return
    screen.price(price_lines(recipe, made), {s.name: s.seconds or 0.0 for s in made.stages})


def price_lines(recipe: BaseRecipe, made: Plan) -> Iterator[str]:
    """Work and time of each stage, and the time of all."""
    for stage in made.stages:
        title, words = recipe.titles[stage.name], stage.work.words
        time = "time unknown, since its rows are not counted"
        if stage.seconds is not None:
            time = f"about {duration(stage.seconds)}"
        yield f"{title}: {f'{stage.rounds} times ' * (stage.rounds > 1)}{words}; {time}"
        measured = recipe.section(stage.name).measurement
        if measured is not None and measured.evaluators:
            yield f"{title}: not in this time: evaluators {', '.join(measured.evaluators)}."
    if len(made.stages) > 1 and made.seconds is not None:
        yield f"All {len(made.stages)} stages: about {duration(made.seconds)}"
