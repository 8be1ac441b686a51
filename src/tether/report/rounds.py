"""The page of a loop of preferences: what every round's labels taught the reward model, and what they bought in gold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tether.report import decoding
from tether.report.narrative import Verdict, bracketed, decimal, percent, signed
from tether.report.plotting import BLUE, GREEN, VERMILLION, Figure, Trace, axis, layout, line, plot
from tether.report.reading import SubRun, json_of, mapping, read_sub_run

COLUMNS = ("round", "labels", "so far", "reward model: held-out labels", "gold order", "gold", "gain of the round",
           "gold per 100 labels", "KL, nats", "alarms")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rounds:
    """All that the page knows; `golden`: whether a gold judge measured the rounds."""

    name: str
    rounds: Sequence[dict[str, Any]]
    golden: bool
    last: SubRun | None
    notes: Sequence[str]


def read_rounds(run: Path) -> Rounds | None:
    """The loop in a run directory; None if something else, or nothing finished, is there."""
    notes: list[str] = []
    summary = mapping(json_of(run / "summary.json", notes))
    rounds = summary.get("rounds")
    if not isinstance(rounds, list) or not rounds or not all("labels_so_far" in mapping(one) for one in rounds):
        return None
    policy = run / str(summary.get("policy", ""))
    last = read_sub_run(policy.parent, notes) if policy.is_dir() else None
    return Rounds(run.resolve().name, rounds, all("gold_after" in one for one in rounds), last, notes)


def round_rows(found: Rounds) -> list[tuple[str, ...]]:
    """A line a round; what was not measured is left empty."""
    rows = []
    for number, one in enumerate(found.rounds, 1):
        reward = mapping(one.get("reward"))
        shown = [bracketed(reward.get(key), percent) for key in ("heldout_accuracy", "gold_accuracy")]
        gold = [""] * 4
        if "gold_after" in one:
            gain = bracketed(one["gold_gain_of_round"], signed)
            bought = bracketed(mapping(one["gold_per_100_labels"]) or None, signed)
            gold = [decimal(one["gold_after"]), gain, bought, decimal(one["kl"]["value"])]
        labels = f"{one['labels']} of {one['asked']} pairs" if "asked" in one else str(one["labels"])
        rows.append((str(number), labels, str(one["labels_so_far"]), *shown, *gold, str(one.get("alarms", ""))))
    return rows


def rounds_figures(found: Rounds) -> list[Figure]:
    """Gold, and the reward model's accuracy, over the labels that had been paid for."""
    gold: list[Trace] = []
    if found.golden:
        xs = [0, *(one["labels_so_far"] for one in found.rounds)]
        ys = [found.rounds[0]["gold_before"], *(one["gold_after"] for one in found.rounds)]
        gold.append(line(xs, ys, "policy", BLUE, mode="lines+markers", hover="%{x} labels: %{y:.4g}"))
    accuracy: list[Trace] = []
    for key, name, colour in (("heldout_accuracy", "held-out labels", VERMILLION), ("gold_accuracy", "gold order", GREEN)):
        known = [(one["labels_so_far"], mapping(one.get("reward")).get(key)) for one in found.rounds]
        if points := [(x, estimate["value"]) for x, estimate in known if estimate]:
            hover = "%{x} labels: %{y:.1%}"
            xs, ys = [x for x, _ in points], [y for _, y in points]
            accuracy.append(line(xs, ys, name, colour, mode="lines+markers", hover=hover))
    after = "Answers to the same held-out messages after each round; at no labels, those of the SFT model."
    harder = "Each round holds out some of its own pairs too, so that what is asked becomes harder as the answers become better."
    share = layout(axis("labels"), axis("pairs in the right order", tickformat=".0%"))
    return [
        *plot("rounds-gold", "Gold over labels", after, gold, layout(axis("labels"), axis("gold")), 360),
        *plot("rounds-accuracy", "The reward model over labels", harder, accuracy, share, 360),
    ]


def rounds_verdict(found: Rounds) -> Verdict:
    """What the rounds came to."""
    many = f"{len(found.rounds)} round{'s' if len(found.rounds) > 1 else ''}, {found.rounds[-1]['labels_so_far']} labels"
    if not found.golden:
        return Verdict("open", many, ["No gold judge measured these rounds: compare the answers yourself, or ask people."], [])
    last = found.rounds[-1]
    gain, control = last["gold_gain"], decoding.control_of(last)
    if control:
        tone, words = decoding.WORDS[control["verdict"]]
    elif gain["high"] < 0:
        tone, words = "bad", "Worse by gold"
    else:
        tone, words = "open", "Better, at one temperature" if gain["low"] > 0 else "No clear change in gold"
    told = [f"Gold gain over the SFT model {bracketed(gain, signed)}.", *decoding.sentences(control)]
    lost = [number for number, one in enumerate(found.rounds, 1) if one["gold_gain_of_round"]["high"] < 0]
    warnings = [f"Round {number} ended below the one before, clear of the interval." for number in lost]
    return Verdict(tone, f"{many}: {words[0].lower()}{words[1:]}", told, warnings)
