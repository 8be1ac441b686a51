"""Two models answer the same prompts, and a judge who sees each pair of answers in both orders says
which is better.

MT-Bench's questions of two turns are asked turn by turn: the later one follows a model's own answer
to the first (Zheng et al. 2023, https://arxiv.org/abs/2306.05685). Their reference answers are not
shown to the judge.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tether.build.data.prompts import prompt_faults, usable_prompts
from tether.build.data.rows import load_rows
from tether.build.roles import encoder_of, load_policy, local_engine
from tether.core.errors import DataError
from tether.core.types import (
    Comparison,
    Conversation,
    Json,
    Message,
    Prompt,
    Sampling,
    assistant,
    user,
)
from tether.cpu.memory import free_memory
from tether.data.sources import Quarantine
from tether.evaluation.winrate import win_rate
from tether.judges.pairwise import Judgment, PairJudge
from tether.learner.loop import Progress
from tether.methods.judge_agreement import judge_report, judged_pairs
from tether.settings.section import DataConfig

ROWS = 32
"""Answers that a model writes at once."""
KINDS = ("category", "dataset")
"""Metadata by whose values the prompts are parted in the figures."""
SAME = "both answers are the same"
Announce = Callable[[str], Progress] | None


@dataclass
class Side:
    """One of two models: its name, its answers to each prompt turn by turn, and what it cannot
    answer, by reason.
    """

    name: str
    answers: list[list[str]]
    unanswered: Counter[str]


def read_prompts(files: Sequence[str], limit: int | None = None) -> tuple[list[Prompt], Json]:
    """The different prompts of some files, and what was left out.

    Raises:
        MissingFileError, DataError: a file is not there, or holds no prompt.
    """
    rows = []
    bad = Quarantine(keep=5)
    for file in files:
        rows += load_rows(DataConfig(path=file, limit=limit), Prompt, bad)
    different = {(prompt.messages, _later(prompt)): prompt for prompt in reversed(rows)}
    prompts = [*different.values()][::-1]
    return prompts, {"quarantine": bad.summary(), "repeated_prompts": len(rows) - len(prompts)}


def duel(
    models: tuple[str, str],
    prompts: Sequence[Prompt],
    judge: PairJudge,
    sampling: Sampling,
    *,
    seed: int = 0,
    announce: Announce = None,
) -> tuple[Json, list[Json]]:
    """Ask both models, then the judge about every pair of answers in both orders.

    A model wins a pair if the judge names it in both orders; everything else is a tie, and counts
    half.

    Args:
        models: a run, a model folder, a hub id, or the folder of a trained role, each.
        prompts: with the turns that follow in `metadata["later_turns"]`.

    Returns:
        The figures, and a row for every pair of answers.

    Raises:
        ModelError: a model cannot be opened.
        DataError: no prompt can be answered by both, or the judge answered nothing.
    """
    left_out = Quarantine()
    first, second = (
        _answered(model, prompts, sampling, seed, left_out, announce) for model in models
    )
    rows = list(_pairs(prompts, first, second))
    if not rows:
        raise DataError(
            f"no prompt of {len(prompts)} was answered by both {models[0]} and {models[1]}",
        )
    differing = [row for row in rows if row.chosen != row.rejected]
    bar = announce("judge") if announce and differing else None
    judgments = iter(judged_pairs(judge, differing, bar) if differing else ())
    judged_rows = [
        (row, next(judgments) if row.chosen != row.rejected else Judgment(0.0, 0.0, reason=SAME))
        for row in rows
    ]
    failed = [judgment for _, judgment in judged_rows if judgment.log_odds is None]
    if failed and len(failed) == len(differing):
        raise DataError(f"{judge.name} judged none of {len(failed)} pairs: {failed[0].reason}")
    outcomes = [outcome(judgment) for _, judgment in judged_rows]
    report = (
        judge_report(differing, [j for _, j in judged_rows if j.reason != SAME], judge.temperature)
        if differing
        else {}
    )
    figures: Json = {
        "models": {"first": first.name, "second": second.name},
        "judge": judge.name,
        "num_prompts": len({row.group for row in rows}),
        "unanswered": {"first": dict(first.unanswered), "second": dict(second.unanswered)},
        "left_out": left_out.summary(),
        "position": report.get("position"),
        "failures": report.get("failures", {}),
        "words": {
            "first": _words(r.chosen for r in rows),
            "second": _words(r.rejected for r in rows),
        },
        "results": {
            name: _figures(rows, outcomes, places) for name, places in _parts(rows).items()
        },
    }
    return figures, [
        _row(row, judgment, result)
        for (row, judgment), result in zip(judged_rows, outcomes, strict=True)
    ]


def outcome(judgment: Judgment) -> float | None:
    """1 where the first model wins in both orders, 0 where the second does, one half for a tie,
    None without a verdict.
    """
    if judgment.log_odds is None or judgment.shown_first is None or judgment.shown_second is None:
        return None
    orders = (judgment.shown_first, judgment.shown_second)
    return 1.0 if min(orders) > 0 else 0.0 if max(orders) < 0 else 0.5


def _later(prompt: Prompt) -> tuple[str, ...]:
    turns = prompt.metadata.get("later_turns") or ()
    return tuple(str(turn) for turn in turns)


def _answered(
    model: str,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    seed: int,
    left_out: Quarantine,
    announce: Announce,
) -> Side:
    """A model's answers to all prompts, turn by turn; memory is free afterwards."""
    role, loaded = load_policy(model)
    encoder = encoder_of(loaded)
    engine = local_engine(role, loaded, max_rows=ROWS)
    side = Side(model, [[] for _ in prompts], Counter())
    turns = 1 + max((len(_later(prompt)) for prompt in prompts), default=0)
    bar = announce(f"answers of {Path(model).name}") if announce else None
    for turn in range(turns):
        waiting = {
            place: replace(prompt, messages=_so_far(prompt, side.answers[place], turn))
            for place, prompt in enumerate(prompts)
            if len(side.answers[place]) == turn and len(_later(prompt)) >= turn
        }
        places = [*waiting]
        questions = [*waiting.values()]
        faults = prompt_faults(questions, encoder, sampling.max_new_tokens, loaded.context_length)
        side.unanswered.update(reason.partition(": ")[0] for reason in faults.values())
        if len(faults) < len(questions):
            usable_prompts(questions, faults, left_out, f"{model}, turn {turn + 1}")
        places = [place for number, place in enumerate(places) if number not in faults]
        for start in range(0, len(places), ROWS):
            part = places[start : start + ROWS]
            groups = engine.generate(
                [waiting[place] for place in part],
                sampling,
                seed=seed + turn,
                ordinals=part,
            )
            for place, group in zip(part, groups, strict=True):
                side.answers[place].append(group.rollouts[0].text)
            if bar is not None:
                bar(turn * len(prompts) + start + len(part), turns * len(prompts), {})
    del role, loaded, engine
    free_memory()
    return side


def _so_far(prompt: Prompt, answers: Sequence[str], turn: int) -> Conversation:
    """The conversation that waits for the answer of a turn."""
    return (*prompt.messages, *_side(answers, _later(prompt)[:turn]))


def _side(answers: Sequence[str], later: Sequence[str]) -> Conversation:
    """Answers with the turns that came between and after them."""
    turns: list[Message] = []
    for number, answer in enumerate(answers):
        turns.append(assistant(answer))
        if number < len(later):
            turns.append(user(later[number]))
    return tuple(turns)


def _pairs(prompts: Sequence[Prompt], first: Side, second: Side) -> Iterator[Comparison]:
    """Every turn that both answered: `chosen` is the first model's side, `rejected` the second's,
    with all that came before.
    """
    for place, prompt in enumerate(prompts):
        for turn in range(min(len(first.answers[place]), len(second.answers[place]))):
            sides = (
                _side(side.answers[place][: turn + 1], _later(prompt)[:turn])
                for side in (first, second)
            )
            facts = {
                "turn": turn + 1,
                **{kind: prompt.metadata[kind] for kind in KINDS if kind in prompt.metadata},
            }
            name = f"{prompt.id or place}-turn-{turn + 1}"
            yield Comparison(
                prompt.messages,
                *sides,
                id=name,
                group=str(place),
                probability=0.5,
                metadata=facts,
            )


def _parts(rows: Sequence[Comparison]) -> dict[str, list[int]]:
    """The places of all pairs, of each turn and of each kind of prompt; a part that is all of them
    occurs once.
    """
    parts: dict[str, list[int]] = {"all": [*range(len(rows))]}
    for place, row in enumerate(rows):
        for key in ("turn", *KINDS):
            if key in row.metadata:
                parts.setdefault(f"{key} {row.metadata[key]}", []).append(place)
    return {
        name: places for name, places in parts.items() if name == "all" or len(places) < len(rows)
    }


def _figures(
    rows: Sequence[Comparison],
    outcomes: Sequence[float | None],
    places: Sequence[int],
) -> Json:
    """Wins, ties, losses, and the first model's win rate with its interval over prompts."""
    judged = [place for place in places if outcomes[place] is not None]
    counts = Counter(outcomes[place] for place in judged)
    figures = {
        "pairs": len(places),
        "wins": counts[1.0],
        "ties": counts[0.5],
        "losses": counts[0.0],
    }
    if not judged:
        return {**figures, "win_rate": None}
    values = [outcomes[place] for place in judged]
    groups = [rows[place].group for place in judged]
    return {**figures, "win_rate": win_rate(values, [0.5] * len(judged), groups=groups).as_dict()}


def _words(sides: Iterator[Conversation]) -> float:
    """The mean number of words of the last answers."""
    return statistics.fmean(len(side[-1].content.split()) for side in sides)


def _row(row: Comparison, judgment: Judgment, result: float | None) -> Json:
    """A line of the file of answers."""
    names: Mapping[float | None, str | None] = {1.0: "first", 0.5: "tie", 0.0: "second", None: None}
    return {
        "id": row.id,
        "prompt": [turn.as_row() for turn in row.prompt],
        "first": [turn.as_row() for turn in row.chosen],
        "second": [turn.as_row() for turn in row.rejected],
        **row.metadata,
        "verdict": names[result],
        "reason": judgment.reason,
    }
