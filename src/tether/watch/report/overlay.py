"""One page that lays runs over each other: a row a run, what they differ in, and their curves on
the same axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

from tether.core.errors import ConfigError
from tether.core.types import Facts, Json
from tether.watch.report import about
from tether.watch.report.figures import charts
from tether.watch.report.frame import page_path, write_page
from tether.watch.report.measures import numbers_of, side_by_side
from tether.watch.report.narrative import Conclusion, conclusion, loop_conclusion
from tether.watch.report.numbers import HeadAndRows, bracketed, percent
from tether.watch.report.picture import best_of, multiples, rods_of_runs
from tether.watch.report.plotting import Plot
from tether.watch.report.reading import (
    Journey,
    SubRun,
    finite,
    mapping,
    printable,
    read_journey,
    read_loop,
)

MOST_DIFFERENCES = 60
"""Rows of the table of settings, at most."""
SECTIONS = {
    "policy": "overlay",
    "rounds": "losses",
    "direct": "losses",
    "reward": "losses",
    "sft": "losses",
}
"""By what a stage makes: the charts of its curves; in the page's order."""


class Laid(NamedTuple):
    """A run under the name that it has on the page."""

    name: str
    journey: Journey
    verdict: Conclusion


def write_overlay(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Write one HTML page about several runs, and give its path; `output` defaults to
    `comparison.html` in the first run.

    Raises:
        ConfigError: a run is given twice.
        MissingFileError: a run directory does not exist.
        RunError: one holds nothing of tether, or the output is a folder.
    """
    output = page_path(folders[0] / "comparison.html" if output is None else output)
    laid = [_laid(name, folder) for name, folder in zip(told_apart(folders), folders, strict=True)]
    runs = {run.name: run.journey for run in laid}
    numbers = rods_of_runs(runs)
    judge = about.judge_of_all(runs.values())
    return write_page(
        output,
        "overlay.html",
        " · ".join(run.name for run in laid),
        {"picture": [*numbers.plots(), *multiples(runs)], **_figures(laid)},
        [*_notes(laid)],
        title=f"{len(laid)} runs",
        verdict=best_of(numbers),
        verdicts=side_by_side([_row(run, judge) for run in laid]),
        differences=_differences(laid),
    )


def told_apart(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell the folders apart.

    Raises:
        ConfigError: two are the same folder.
    """
    parts = [folder.resolve().parts for folder in folders]
    if len({*parts}) < len(parts):
        twice = next(folder for folder in folders if parts.count(folder.resolve().parts) > 1)
        raise ConfigError(f"{twice} is given twice: name each run once")
    for size in count(1):
        ends = [printable("/".join(part[-size:])) for part in parts]
        if len({*ends}) == len(ends):
            return ends
    raise AssertionError("paths that differ have ends that differ")


def _laid(name: str, folder: Path) -> Laid:
    journey = read_journey(folder)
    loop = read_loop(folder)
    return Laid(name, journey, conclusion(journey) if loop is None else loop_conclusion(loop))


def _notes(laid: Sequence[Laid]) -> Iterator[str]:
    for run in laid:
        yield from (f"{run.name}: {note}" for note in run.journey.notes)


def _trained(laid: Sequence[Laid], kind: str) -> list[SubRun]:
    """The stages of a kind under the names of their runs; those of which a run has several under
    their own, too.
    """
    stages = []
    for run in laid:
        own = [stage for stage in run.journey.stages if stage.kind == kind and stage.metrics]
        stages += [
            replace(stage, name=run.name if len(own) == 1 else f"{run.name}: {stage.title}")
            for stage in own
        ]
    return stages


def _figures(laid: Sequence[Laid]) -> dict[str, list[Plot]]:
    """By the name of a method the curves of its stages; of one run's alone too, since the others
    have none.
    """
    drawn: dict[str, list[Plot]] = {}
    for kind, section in SECTIONS.items():
        if stages := _trained(laid, kind):
            title = ", ".join(dict.fromkeys(about.method_name(stage) for stage in stages))
            drawn[title] = [
                replace(plot, id=f"{plot.id}-{kind}") for plot in charts(section, stages)
            ]
    return drawn


def _row(run: Laid, judge: about.Judge) -> dict[str, str]:
    journey = run.journey
    main = run.journey.main
    steps = max((finite(row, "step") or 0.0 for row in main.metrics), default=0.0)
    right = journey.stage("reward").summary.get("heldout_accuracy")
    return {
        "run": run.name,
        "verdict": run.verdict.headline,
        "method": about.title(journey),
        "steps": f"{steps:,.0f}" if steps else "",
        **numbers_of(main, judge, own_reward=journey.own_reward),
        "reward model, held-out": bracketed(right, percent),
        "price": about.price(journey.own, journey.stages),
    }


def _differences(laid: Sequence[Laid]) -> HeadAndRows:
    """The settings that are not the same in all runs, with a column a run; "–" where a run does not
    have one.
    """
    settings = [_settings(run.journey) for run in laid]
    keys = dict.fromkeys(key for one in settings for key in one)
    differing = [key for key in keys if len({repr(one.get(key)) for one in settings}) > 1]
    rows = [
        [key, *(_shown(one.get(key)) for one in settings)] for key in differing[:MOST_DIFFERENCES]
    ]
    if left := len(differing) - len(rows):
        rows.append([f"… and {left} more"] + [""] * len(laid))
    return ["setting", *(run.name for run in laid)], rows


def _settings(journey: Journey) -> Facts:
    """The settings of all stages as they ran, by dotted names, and those of the model and the
    seed.
    """
    values = {}
    for stage in journey.stages:
        config = mapping(stage.config)
        values |= {"seed": config.get("seed"), **_flat(config.get("model"), "model")}
        values |= _flat(stage.settings, stage.section or stage.name)
    return {key: value for key, value in values.items() if value is not None}


def _flat(value: object, name: str) -> Json:
    """The values within tables by dotted names."""
    if not isinstance(value, dict):
        return {name: value}
    return {
        key: leaf
        for inner, part in value.items()
        for key, leaf in _flat(part, f"{name}.{inner}").items()
    }


def _shown(value: object) -> str:
    return (
        ""
        if value is None
        else f"{value:.6g}"
        if isinstance(value, float)
        else printable(value, 60)
    )
