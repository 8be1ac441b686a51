"""The key numbers as tiles and tables; what a run does not have is left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tether.core.tables import table_beside
from tether.core.types import Facts
from tether.watch.report.about import Judge
from tether.watch.report.narrative import decoding_of
from tether.watch.report.numbers import (
    Show,
    bracketed,
    centre,
    decimal,
    interval,
    percent,
    signed,
    thousands,
    versus,
)
from tether.watch.report.reading import (
    Estimate,
    LoopRun,
    SubRun,
    estimate,
    mapping,
)

FACTS: list[dict[str, str]] = table_beside(__file__, "tiles.toml")["reward"]
"""The reward model's numbers, in the page's order."""
SHOWS: dict[str, Show] = {show.__name__: show for show in (percent, decimal, thousands)}


class Tile(NamedTuple):
    """One key number."""

    name: str
    value: str
    detail: str = ""


def estimate_tile(name: str, value: Estimate, show: Show, detail: str = "") -> Tile:
    """The tile of a number with its interval."""
    details = interval(value, show), f"n = {value.count:,}" if value.count else "", detail
    return Tile(name, centre(value, show), " · ".join(filter(None, details)))


def reward_facts(reward: Facts, pairs: Facts, judge: Judge) -> list[Tile]:
    """The reward model's numbers that need no figure; the judge is that of the labels."""
    values = {**mapping(reward, "length_correlation"), **pairs, **reward}
    return [
        estimate_tile(
            row["name"].format(judge=judge.label),
            parts,
            SHOWS[row["show"]],
            row.get("detail", "").format(judge=judge.label),
        )
        for row in FACTS
        if (parts := estimate(values, row["key"]))
    ]


ROUND_OF_PAIRS = (
    "round",
    "pairs",
    "tied",
    "failed",
    "mean score of samples",
    "tokens of a sample",
    "ended in time",
    "held-out pairs, ranked right",
)


def pair_rounds(stage: SubRun) -> list[list[str]]:
    """A row a round of a stage that samples pairs and trains on them, of ROUND_OF_PAIRS."""
    sampled = {
        "tied": thousands,
        "failed": thousands,
        "proxy": decimal,
        "length": decimal,
        "finished": percent,
    }
    return [
        [
            str(place),
            bracketed(one.get("num_pairs"), thousands),
            *(bracketed(mapping(one, "sampling").get(key), sampled[key]) for key in sampled),
            bracketed(one.get("heldout_accuracy"), percent),
        ]
        for place, one in enumerate(stage.rounds, 1)
    ]


CONTROL_COLUMNS = ("temperature", "before", "after", "gain", "win rate")


def control_rows(control: Facts) -> list[Sequence[str]]:
    """A row a temperature, of CONTROL_COLUMNS, one for the best of each side, and the reward's
    choice among n answers before.
    """
    temperatures = mapping(control, "by_temperature")
    best_of_n = mapping(control, "best_of_n")
    rows = [(decoding_of(float(value)), row) for value, row in temperatures.items()]
    table: list[Sequence[str]] = [(name, *texts) for name, row in rows if (texts := versus(row))]
    if table:
        over = mapping(control, "over_best_decoding")
        table.append(
            (
                "best against best",
                "",
                "",
                bracketed(over, signed),
                bracketed(over.get("win_rate"), percent),
            ),
        )
    chosen = ((f"before: best of {n}, by the reward", versus(row)) for n, row in best_of_n.items())
    return table + [(name, *texts) for name, texts in chosen if texts]


ROUND_COLUMNS = (
    "round",
    "labels",
    "so far",
    "reward model: held-out labels",
    "{judge} order",
    "{judge}",
    "gain of the round",
    "{judge} per 100 labels",
    "KL, nats",
    "alarms",
)


def round_table(loop: LoopRun) -> tuple[list[str], list[tuple[str, ...]]]:
    """Columns, and a line a round; what was not measured is left empty."""
    judge = Judge(loop.judge).label
    return [name.format(judge=judge) for name in ROUND_COLUMNS], [
        (
            str(place),
            f"{one['labels']} of {one['asked']} pairs",
            str(one["labels_so_far"]),
            *(
                bracketed(mapping(one, "reward").get(key), percent)
                for key in ("heldout_accuracy", "gold_accuracy")
            ),
            decimal(one["gold_after"]),
            *(
                bracketed(one.get(key), signed)
                for key in ("gold_gain_of_round", "gold_per_100_labels")
            ),
            decimal(one["kl"]["value"]),
            str(one["alarms"]),
        )
        for place, one in enumerate(loop.rounds, 1)
    ]
