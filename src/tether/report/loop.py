"""The page of a loop of preferences: what every round's labels taught the reward model, and what they bought in gold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tether.report.narrative import DECODED, Conclusion, control_of, control_sentences
from tether.report.numbers import SENTENCES, bracketed, decimal, percent, side, signed
from tether.report.plotting import BLUE, GREEN, VERMILLION, Plot, Trace, framed
from tether.report.reading import Row, SubRun, estimate, json_of, listed, mapping, read_sub_run

SAYS = SENTENCES["loop"]
COLUMNS = ("round", "labels", "so far", "reward model: held-out labels", "gold order", "gold", "gain of the round",
           "gold per 100 labels", "KL, nats", "alarms")  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoopRun:
    """A loop's rounds as its summary has them, and the run of the last policy."""

    name: str
    rounds: Sequence[Row]
    golden: bool
    """Whether a gold judge measured the rounds."""
    last: SubRun | None
    notes: Sequence[str]


def read_loop(run: Path) -> LoopRun | None:
    """The loop in a run directory; None if something else, or nothing finished, is there."""
    notes: list[str] = []
    summary = mapping(json_of(run / "summary.json", notes))
    rounds = listed(summary.get("rounds"))
    if not rounds or not all("labels_so_far" in mapping(one) for one in rounds):
        return None
    policy = run / str(summary.get("policy", ""))
    last = read_sub_run(policy.parent, notes) if policy.is_dir() else None
    return LoopRun(run.resolve().name, rounds, all("gold_after" in one for one in rounds), last, notes)


def round_rows(loop: LoopRun) -> list[tuple[str, ...]]:
    """A line a round; what was not measured is left empty."""
    return [
        (
            str(place),
            f"{one['labels']} of {one['asked']} pairs" if "asked" in one else str(one["labels"]),
            str(one["labels_so_far"]),
            *(bracketed(mapping(one.get("reward")).get(key), percent) for key in ("heldout_accuracy", "gold_accuracy")),
            decimal(one["gold_after"]) if "gold_after" in one else "",
            *(bracketed(one.get(key), signed) for key in ("gold_gain_of_round", "gold_per_100_labels")),
            decimal(one["kl"]["value"]) if "gold_after" in one else "",
            str(one.get("alarms", "")),
        )
        for place, one in enumerate(loop.rounds, 1)
    ]


def loop_figures(loop: LoopRun) -> list[Plot]:
    """Gold, and the reward model's accuracy, over the labels that had been paid for."""
    paid = [one["labels_so_far"] for one in loop.rounds]
    scores = [loop.rounds[0]["gold_before"], *(one["gold_after"] for one in loop.rounds)] if loop.golden else []
    gold = [Trace([0, *paid], scores, colour=BLUE, mode="both")] if scores else []
    accuracy = []
    for key, name, colour in (("heldout_accuracy", "held-out labels", VERMILLION), ("gold_accuracy", "gold order", GREEN)):
        shares = [estimate(mapping(one.get("reward")).get(key)) for one in loop.rounds]
        points = [(labels, share.value) for labels, share in zip(paid, shares, strict=True) if share]
        if points:
            xs, ys = zip(*points, strict=True)
            accuracy.append(Trace(xs, ys, name, colour, "both"))
    return [*framed("rounds-gold", gold), *framed("rounds-accuracy", accuracy)]


def loop_conclusion(loop: LoopRun) -> Conclusion:
    """What the last round's policy gained by gold, and the rounds that lost."""
    last, count = loop.rounds[-1], len(loop.rounds)
    title = f"{count} round{'s' if count > 1 else ''}, {last['labels_so_far']} labels"
    if not loop.golden:
        return Conclusion("open", title, [SAYS["no-gold"]], [])
    gain, control = estimate(last["gold_gain"]), control_of(last)
    outcomes = {1: ("open", "Better, at one temperature"), 0: ("open", "No clear change in gold"), -1: ("bad", "Worse by gold")}
    tone, words = DECODED[control["verdict"]] if control else outcomes[side(gain, 0) if gain else 0]
    sentences = [SAYS["gain"].format(gain=bracketed(gain, signed)), *control_sentences(control)]
    gains = [(place, estimate(one.get("gold_gain_of_round"))) for place, one in enumerate(loop.rounds, 1)]
    warnings = [SAYS["lost"].format(place=place) for place, gain in gains if gain and side(gain, 0) < 0]
    return Conclusion(tone, f"{title}: {words[0].lower()}{words[1:]}", sentences, warnings)
