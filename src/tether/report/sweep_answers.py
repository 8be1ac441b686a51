"""The answers of a sweep's runs to the same prompts: all of them, and the worst of the setting with
the least tether.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tether.core.types import Json
from tether.report.numbers import SENTENCES
from tether.report.reading import Row, finite, printable
from tether.report.rollouts import packed
from tether.report.sweeps import Sweep, SweepRun

SAYS = SENTENCES["sweep"]
MOST = 1_800_000
"""Characters of the page that judged answers may take."""
SHOWN = 6
"""Answers of the setting with the least tether."""


class JudgedAnswer(NamedTuple):
    """A judged answer of a run, with the start's to the same prompt."""

    text: str
    score: float | None
    start: str
    start_score: float | None


Key = tuple[str, int]
"""A prompt, and the place among the answers to it."""


def answers_of(member: SweepRun) -> dict[Key, JudgedAnswer]:
    """The judged answers of a run."""
    answers: dict[Key, JudgedAnswer] = {}
    for row in member.journey.answers:
        prompt, place = printable(row.get("prompt")), 0
        while (prompt, place) in answers:
            place += 1
        answers[prompt, place] = JudgedAnswer(
            printable(row.get("after")),
            finite(row.get("gold_after")),
            printable(row.get("before")),
            finite(row.get("gold_before")),
        )
    return answers


def packed_answers(sweep: Sweep, judge: str, most: int = MOST) -> tuple[str, str] | None:
    """The answers of all runs by prompt, packed, and a sentence on how many they are; None where no
    answer was judged.
    """
    by_run = {member.label: answers_of(member) for member in sweep.members}
    keys = list(dict.fromkeys(key for answers in by_run.values() for key in answers))
    if not keys:
        return None
    count = len(keys)
    while len(text := packed(_by_prompt(by_run, keys[:count], judge))) > most and count > 1:
        count = max(1, int(count * min(0.9, most / len(text))))
    words = "answers" if count == len(keys) else "answers-some"
    return text, SAYS[words].format(count=count, of=len(keys), judge=judge)


def _by_prompt(
    by_run: Mapping[str, Mapping[Key, JudgedAnswer]],
    keys: Sequence[Key],
    judge: str,
) -> Json:
    """Content for sweep.js: each text once, and its number where it is used."""
    texts: dict[str, int] = {}

    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    def row(answer: JudgedAnswer | None) -> list[object] | None:
        if answer is None:
            return None
        return [number(answer.text), answer.score, number(answer.start), answer.start_score]

    prompts = [number(prompt) for prompt, _ in keys]
    runs = {label: [row(answers.get(key)) for key in keys] for label, answers in by_run.items()}
    return {"judge": judge, "prompts": prompts, "runs": runs, "texts": list(texts)}


def worst_beside(loose: Sequence[SweepRun], best: Sequence[SweepRun]) -> list[Row]:
    """The worst answers of one setting to different prompts, each next to that of another setting.
    Without another setting, next to the start's answer.
    """
    pairs = []
    for place, member in enumerate(loose):
        others = answers_of(best[place % len(best)]) if best else None
        for (prompt, number), answer in answers_of(member).items():
            theirs = None if others is None else others.get((prompt, number))
            if answer.score is not None and (others is None or theirs is not None):
                pairs.append((answer.score, prompt, _beside(prompt, answer, theirs)))
    worst: dict[str, Row] = {}
    for _, prompt, row in sorted(pairs, key=lambda pair: pair[0]):
        worst.setdefault(prompt, row)
    return list(worst.values())[:SHOWN]


def _beside(prompt: str, answer: JudgedAnswer, theirs: JudgedAnswer | None) -> Row:
    start = {"response": answer.start, "gold": answer.start_score}
    left = (answer.start, answer.start_score) if theirs is None else (theirs.text, theirs.score)
    row = {"prompt": prompt, "before": left[0], "gold_before": left[1]}
    row |= {"after": answer.text, "gold_after": answer.score}
    return row if theirs is None else {**row, "arms": {"the start": start}}
