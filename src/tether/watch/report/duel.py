"""A page about models that answered the same prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tether.core.types import Comparison, Facts
from tether.stats import side
from tether.watch.report.frame import write_page
from tether.watch.report.narrative import Conclusion
from tether.watch.report.numbers import SENTENCES, bracketed, decimal, percent, signed
from tether.watch.report.picture import Rods, deciding
from tether.watch.report.reading import estimate

SAYS = SENTENCES["duel"]
COUNTS = ("pairs", "wins", "ties", "losses")
RATES = {"win_rate": "wins, ties half", "at_equal_length": "the same at equal length"}
PLACES = ("model", "place", "strength in nats")
SHOWN = 8
"""Pairs of answers of each verdict on the page, where it is about two models."""
TITLES = {
    1.0: "Pairs that {first} wins against {second}",
    0.0: "Pairs that {second} wins against {first}",
    0.5: "Ties of {first} and {second}",
}


def result_table(figures: Facts) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows of counts and of win rates with their intervals over prompts: for two models
    all pairs and each part of them, for more models all pairs of any two.
    """
    contests = figures["contests"]
    head = "prompts"
    parts = contests[0]["results"]
    if len(contests) > 1:
        head = "models"
        parts = {
            "{first} against {second}".format(**one): one["results"]["all"] for one in contests
        }
    rows = [
        (
            name,
            *(f"{part[count]:,}" for count in COUNTS),
            *(
                bracketed(part[key], percent) or (part[key] or {}).get("reason", "")
                for key in RATES
            ),
        )
        for name, part in parts.items()
    ]
    return (head, *COUNTS, *RATES.values()), rows


def duel_rods(figures: Facts) -> Rods:
    """Of two models the first one's win rates, of more models their strengths."""
    several = len(figures["models"]) > 2
    part = figures["contests"][0]["results"]["all"]
    standings = figures["ranking"]["standings"]
    numbers = (
        {one["name"]: one["strength"] for one in standings}
        if several
        else {name: part[key] for key, name in RATES.items()}
    )
    title = PLACES[2].capitalize() if several else f"Wins of {figures['models'][0]}"
    rods = deciding({name: estimate(one) for name, one in numbers.items()})
    title = f"{title}, judged by {figures['judge']}"
    return Rods(title, signed if several else percent, rods)


def duel_verdict(figures: Facts) -> Conclusion:
    """The winner: of two models by the interval of the win rate, of more by their places."""
    contest = figures["contests"][0]
    ranking = figures["ranking"]
    if len(figures["models"]) > 2:
        names = " and ".join(one["name"] for one in ranking["standings"] if one["best"] == 1)
        first = SAYS["first"].format(models=names, count=len(figures["models"]))
        return Conclusion("open", ranking["reason"] or first)
    rate = estimate(contest["results"]["all"]["win_rate"])
    shown = bracketed(rate, percent) or "–"
    return Conclusion(
        "open",
        SAYS[f"{side(rate, 0.5)}"].format(rate=shown, **contest),
    )


def place_rows(figures: Facts) -> list[tuple[str, ...]]:
    """The models, the strongest first, each with the places that it may have."""
    return [
        (
            one["name"],
            "–".join(map(str, sorted({one["best"], one["worst"]}))),
            bracketed(one["strength"], signed),
        )
        for one in figures["ranking"]["standings"]
    ]


def fact_rows(figures: Facts) -> Iterator[tuple[str, str]]:
    """Lengths, the judge's liking for a place, and what was not ranked, answered or judged, by
    reason.
    """
    for name, words in figures["words"].items():
        yield f"words an answer, {name}", decimal(words)
    if figures["position"]:
        yield "verdicts for the first place", bracketed(figures["position"]["names_first"], percent)
    if reason := figures["ranking"]["reason"]:
        yield "no ranking", reason
    for name, counts in figures["unanswered"].items():
        yield from (
            (f"not answered by {name}: {reason}", f"{count:,}") for reason, count in counts.items()
        )
    yield from (
        (f"not judged: {reason}", f"{count:,}") for reason, count in figures["failures"].items()
    )


def write_duel(output: Path, figures: Facts, rows: Sequence[Comparison]) -> None:
    """Write one HTML page, which needs no network: figures, and some pairs of answers of each
    verdict; its picture goes beside it.
    """
    contests = figures["contests"]
    shown = max(2, SHOWN // len(contests))
    groups = []
    for contest in contests:
        names = contest["first"], contest["second"]
        own = [
            row
            for row in rows
            if names == (row.metadata["chosen_model"], row.metadata["rejected_model"])
        ]
        for won, title in TITLES.items():
            pairs = [
                [("prompt", row.prompt), (names[0], row.chosen), (names[1], row.rejected)]
                for row in own
                if row.probability == won and "failed" not in row.metadata
            ]
            if pairs:
                groups.append((title.format(**contest), pairs[:shown]))
    write_page(
        output,
        "duel.html",
        " against ".join(figures["models"]),
        {"picture": duel_rods(figures).plots()},
        [],
        verdict=duel_verdict(figures),
        title=f"judged by {figures['judge']}",
        about=[("judge", [figures["judge"]]), ("prompts", [f"{figures['num_prompts']:,}"])],
        places=(PLACES, place_rows(figures)),
        results=result_table(figures),
        facts=(("what", "number"), list(fact_rows(figures))),
        groups=groups,
    )
