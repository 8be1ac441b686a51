"""Answers to the same held-out prompts before and after, chosen by a rule that shows the failures too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tether.report.narrative import decimal, signed
from tether.report.reading import Row, SubRun, mapping, number, printable

SHOWN = 24


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt with its two answers, ready to print."""

    title: str
    kind: str
    prompt: str
    before: str
    after: str
    gold_before: str
    gold_after: str
    change: str
    direction: int
    parts: Sequence[tuple[str, str, str]]
    arms: Sequence[tuple[str, str, str]]


@dataclass(frozen=True, slots=True)
class AnswerGroup:
    title: str
    answers: Sequence[Answer]


def answer_groups(rows: Sequence[Row], count: int = SHOWN) -> tuple[str, list[AnswerGroup]]:
    """How the answers were chosen, in one sentence, and a third each of best, median and worst changes of gold."""
    usable = [row for row in rows if "before" in row and "after" in row]
    ranked = sorted((row for row in usable if _change(row) is not None), key=lambda row: -(_change(row) or 0.0))
    if not ranked:
        stride = max(1, len(usable) // count)
        chosen = usable[::stride][:count]
        text = f"No gold scores were recorded: every {stride}. of {len(usable)} answers, in the file's order."
        return text, [AnswerGroup("Answers", [_answer(row) for row in chosen])] if chosen else []
    unscored = len(usable) - len(ranked)
    rest = f" {unscored} without a gold score are not ranked." if unscored else ""
    if len(ranked) <= count:
        text = f"All {len(ranked)} pairs of answers to held-out prompts, from the largest rise of gold to the largest fall.{rest}"
        return text, [AnswerGroup("All answers, best change first", [_answer(row) for row in ranked])]
    third = count // 3
    middle = (len(ranked) - third) // 2
    text = (
        f"Not a selection by taste: of {len(ranked):,} pairs of answers to held-out prompts, ranked by their change of gold, "
        f"the {third} at the top, the {third} in the middle and the {third} at the bottom.{rest}"
    )
    return text, [
        AnswerGroup(f"The {third} best changes", [_answer(row) for row in ranked[:third]]),
        AnswerGroup(
            f"The {third} around the median: the typical change", [_answer(row) for row in ranked[middle : middle + third]]
        ),
        AnswerGroup(f"The {third} worst changes", [_answer(row) for row in reversed(ranked[-third:])]),
    ]


def training_samples(policy: SubRun | None, count: int = 4) -> list[tuple[str, str, str, str]]:
    """Step, prompt, response and proxy of a few samples from the first, the middle and the last step recorded."""
    samples = policy.samples if policy else ()
    steps = sorted({step for row in samples if (step := number(row.get("step"))) is not None})
    wanted = sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []
    return [
        (f"{step:.0f}", printable(row.get("prompt")), printable(row["response"]), _shown(row.get("proxy")))
        for step in wanted
        for row in [row for row in samples if number(row.get("step")) == step and "response" in row][:count]
    ]


def _change(row: Row) -> float | None:
    before, after = number(row.get("gold_before")), number(row.get("gold_after"))
    return None if before is None or after is None else after - before


def _answer(row: Row) -> Answer:
    change = _change(row)
    before, after = mapping(row.get("parts_before")), mapping(row.get("parts_after"))
    names = dict.fromkeys([*before, *after])
    arms = [(name, mapping(arm)) for name, arm in mapping(row.get("arms")).items()]
    return Answer(
        title=printable(row.get("id"), 60),
        kind=printable(row.get("kind"), 60),
        prompt=printable(row.get("prompt")),
        before=printable(row["before"]),
        after=printable(row["after"]),
        gold_before=_shown(row.get("gold_before")),
        gold_after=_shown(row.get("gold_after")),
        change="" if change is None else signed(change),
        direction=0 if not change else (1 if change > 0 else -1),
        parts=[(printable(name, 40), _shown(before.get(name)), _shown(after.get(name))) for name in names],
        arms=[(printable(name, 60), printable(arm.get("response")), _shown(arm.get("gold"))) for name, arm in arms],
    )


def _shown(value: object) -> str:
    found = number(value)
    return "–" if found is None else decimal(found)
