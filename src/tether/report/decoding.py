"""The control of decoding as people read it: the word of the verdict, a sentence, and a table by temperature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tether.report.reading import Estimate, estimate, mapping, number

WORDS = {
    "better": ("good", "Better than any decoding of the model before"),
    "sharper": ("open", "Sharper, not better"),
    "undecided": ("open", "Not shown to be better"),
    "worse": ("bad", "Worse"),
}
"""Tone and headline by verdict (`evaluation.decoding.verdict`)."""
MEANINGS = {
    "better": "No temperature gives that to the model before.",
    "sharper": "What was gained at the temperature of training is what a lower temperature of the model before gives without any "
    "training.",
    "undecided": "That does not show a difference.",
    "worse": "The model before answers better, if it is decoded well.",
}
COLUMNS = ("temperature", "before", "after", "gain", "win rate")


def control_of(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a policy's summary says of decoding, judged by gold, a test model or a checked reward; empty without a control."""
    if "over_best_decoding" in summary:
        return {**summary, "by_temperature": mapping(summary.get("gold_by_temperature"))}
    blocks = [mapping(summary.get(name)) for name in ("gold", "test", "heldout")]
    return next((block for block in blocks if block.get("verdict") in WORDS), {})


def named(temperature: Any) -> str:
    """A temperature in words: 0 is greedy decoding."""
    value = number(temperature)
    return "greedy" if value == 0 else "" if value is None else f"at temperature {value:g}"


def sentences(control: Mapping[str, Any]) -> list[str]:
    """How the policy at its best decoding stands to the model before at its own, and what follows."""
    over = mapping(control.get("over_best_decoding"))
    gain, rate = estimate(over), estimate(over.get("win_rate"))
    if gain is None or rate is None:
        return []
    if gain.value == gain.low == gain.high == 0:
        return ["The judge gave both sides the same scores throughout, so it can tell nothing."]
    ours, theirs = named(over.get("policy_temperature")), named(over.get("temperature"))
    return [
        f"Each at its best decoding, the policy {ours} against the model before {theirs}: it wins {_share(rate)}, and gains "
        f"{_signed(gain)}. {MEANINGS[control['verdict']]}"
    ]


def rows(control: Mapping[str, Any]) -> list[Sequence[str]]:
    """A row a temperature, of COLUMNS, and one for the best of each side."""
    found = []
    for temperature, row in mapping(control.get("by_temperature")).items():
        ends = [estimate(mapping(row).get(name)) for name in ("before", "after")]
        gain, rate = (estimate(mapping(row).get(name)) for name in ("gain", "win_rate"))
        if None not in ends and gain and rate:
            means = [f"{end.value:.2f}" for end in ends if end]
            found.append((named(number(float(temperature))).removeprefix("at temperature "), *means, _signed(gain), _share(rate)))
    over = mapping(control.get("over_best_decoding"))
    gain, rate = estimate(over), estimate(over.get("win_rate"))
    if found and gain and rate:
        found.append(("best against best", "", "", _signed(gain), _share(rate)))
    return found


def _signed(found: Estimate) -> str:
    bounds = "" if found.low is None or found.high is None else f" [{found.low:+.2f}, {found.high:+.2f}]"
    return f"{found.value:+.2f}{bounds}".replace("-", "−")


def _share(found: Estimate) -> str:
    bounds = "" if found.low is None or found.high is None else f" [{found.low:.1%}, {found.high:.1%}]"
    return f"{found.value:.1%}{bounds}"
