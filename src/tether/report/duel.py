"""A page about two models that answered the same prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tether.core.types import Facts
from tether.report.frame import HERE, fill_template, write_page
from tether.report.numbers import bracketed, decimal, percent

COLUMNS = ("prompts", "pairs", "wins", "ties", "losses", "wins, ties half")
SHOWN = 8
"""Pairs of answers of each verdict on the page."""
TITLES = {"first": "Pairs that {first} wins", "second": "Pairs that {second} wins", "tie": "Ties"}


def result_rows(figures: Facts) -> list[tuple[str, ...]]:
    """The counts of all pairs and of each part of them, with the win rate's interval over
    prompts.
    """
    counts = ("pairs", "wins", "ties", "losses")
    results = figures["results"].items()
    return [
        (name, *(f"{one[count]:,}" for count in counts), bracketed(one["win_rate"], percent))
        for name, one in results
    ]


def fact_rows(figures: Facts) -> Iterator[tuple[str, str]]:
    """Lengths, the judge's liking for a place, and what was not answered or not judged, by
    reason.
    """
    models = figures["models"]
    for side, name in models.items():
        yield f"words an answer, {name}", decimal(figures["words"][side])
    if figures["position"]:
        yield "verdicts for the first place", bracketed(figures["position"]["names_first"], percent)
    for side, name in models.items():
        yield from (
            (f"not answered by {name}: {reason}", f"{count:,}")
            for reason, count in figures["unanswered"][side].items()
        )
    yield from (
        (f"not judged: {reason}", f"{count:,}") for reason, count in figures["failures"].items()
    )


def write_duel(output: Path, figures: Facts, rows: Sequence[Facts]) -> None:
    """Write one HTML page, which needs no network: figures, and some pairs of answers of each
    verdict.
    """
    models = figures["models"]
    groups = []
    for verdict, title in TITLES.items():
        chosen = [row for row in rows if row["verdict"] == verdict][:SHOWN]
        pairs = [
            [
                ("prompt", row["prompt"]),
                (models["first"], row["first"]),
                (models["second"], row["second"]),
            ]
            for row in chosen
        ]
        if pairs:
            groups.append((title.format(**models), pairs))
    title = f"{models['first']} against {models['second']}"
    page = fill_template(
        HERE / "duel.html",
        figures["judge"],
        {},
        [],
        title=title,
        about=[("judge", [figures["judge"]]), ("prompts", [f"{figures['num_prompts']:,}"])],
        results=(COLUMNS, result_rows(figures)),
        facts=(("what", "number"), list(fact_rows(figures))),
        groups=groups,
    )
    write_page(output, page)
