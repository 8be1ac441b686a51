"""The control of decoding as people read it: the word of the verdict, a sentence, and a table by temperature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tether.report.numbers import bracketed, decimal, percent, signed
from tether.report.reading import estimate, finite, mapping
from tether.report.sentences import SENTENCES

WORDS = {
    "better": ("good", "Better than any decoding of the model before"),
    "sharper": ("open", "Sharper, not better"),
    "undecided": ("open", "Not shown to be better"),
    "worse": ("bad", "Worse"),
}
"""Tone and headline by verdict (`evaluation.decoding.verdict`)."""
SAYS = SENTENCES["decoding"]
COLUMNS = ("temperature", "before", "after", "gain", "win rate")
Control = Mapping[str, Any]


def control_of(summary: Mapping[str, Any]) -> Control:
    """What a policy's summary says of decoding, judged by gold, a test model or a checked reward; empty without a control."""
    if "over_best_decoding" in summary:
        best_of_n = mapping(summary.get("gold")).get("best_of_n")
        return {**summary, "by_temperature": mapping(summary.get("gold_by_temperature")), "best_of_n": best_of_n}
    blocks = [mapping(summary.get(name)) for name in ("gold", "test", "heldout")]
    return next((block for block in blocks if block.get("verdict") in WORDS), {})


def at_temperature(temperature: Any) -> str:
    """A temperature in words: 0 is greedy decoding."""
    value = finite(temperature)
    return "greedy" if value == 0 else "" if value is None else f"at temperature {value:g}"


def sentences(control: Control) -> list[str]:
    """How the policy at its best decoding stands to the model before at its own, and to its best of n answers."""
    over = mapping(control.get("over_best_decoding"))
    gain = estimate(over)
    if gain is None or not (rate := _rate(over)):
        return []
    if gain.value == gain.low == gain.high == 0:
        return [SAYS["alike"]]
    ours, theirs = at_temperature(over.get("policy_temperature")), at_temperature(over.get("temperature"))
    says = [SAYS["best"].format(ours=ours, theirs=theirs, rate=rate, gain=_gain(gain), meaning=SAYS[control["verdict"]])]
    for n, row in list(mapping(control.get("best_of_n")).items())[-1:]:  # the widest choice
        chosen = {"gain": _gain(mapping(row).get("gain")), "rate": _rate(mapping(row))}
        says += [SAYS["best-of-n"].format(n=n, **chosen)] if all(chosen.values()) else []
    return says


def control_rows(control: Control) -> list[Sequence[str]]:
    """A row a temperature, of COLUMNS, one for the best of each side, and the reward's choice among n answers of the start."""
    by_temperature = mapping(control.get("by_temperature"))
    names = [at_temperature(float(temperature)).removeprefix("at temperature ") for temperature in by_temperature]
    rows = [_row(name, mapping(row)) for name, row in zip(names, by_temperature.values(), strict=True)]
    over = mapping(control.get("over_best_decoding"))
    rows.append(("best against best", "", "", _gain(over), _rate(over)) if any(rows) else ())
    chosen = mapping(control.get("best_of_n")).items()
    rows += [_row(f"before: best of {n}, by the reward", mapping(row)) for n, row in chosen]
    return [row for row in rows if row and all(row[3:])]


def _row(name: str, row: Mapping[str, Any]) -> Sequence[str]:
    ends = [decimal(end.value) for key in ("before", "after") if (end := estimate(row.get(key)))]
    return (name, *ends, _gain(row.get("gain")), _rate(row)) if len(ends) == 2 else ()


def _gain(value: Any) -> str:
    return bracketed(value, signed)


def _rate(row: Mapping[str, Any]) -> str:
    return bracketed(row.get("win_rate"), percent)
