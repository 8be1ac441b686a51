"""Models answer the same prompts, and a judge who sees each pair of answers in both orders says
which is better.

MT-Bench's questions of two turns are asked turn by turn: the later one follows a model's own answer
to the first (Zheng et al. 2023, https://arxiv.org/abs/2306.05685). Their reference answers are not
shown to the judge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from tether.core.errors import DataError
from tether.core.protocols import Announce
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
from tether.data.sources import Quarantine
from tether.evaluation.length_controlled import length_controlled_win_rate
from tether.evaluation.ranking import PolicyStanding, rank_policies
from tether.evaluation.winrate import win_rate
from tether.judges.pairwise import Judgment, PairJudge
from tether.models.cpu.memory import free_memory
from tether.runner.assembly.data.prompts import prompt_faults, usable_prompts
from tether.runner.assembly.data.rows import load_rows
from tether.runner.assembly.roles import encoder_of, load_policy, local_engine
from tether.runner.methods.judge_agreement import judge_report, judged_pairs
from tether.settings.section import DataConfig

ROWS = 32
"""Answers that a model writes at once."""
KINDS = ("category", "dataset")
"""Metadata by whose values the prompts are parted in the figures."""


@dataclass
class Side:
    """One of the models: its name, its answers to each prompt turn by turn, and what it cannot
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
    models: Sequence[str],
    prompts: Sequence[Prompt],
    judge: PairJudge,
    sampling: Sampling,
    *,
    seed: int = 0,
    announce: Announce | None = None,
) -> tuple[Json, list[Comparison]]:
    """Ask all models, then the judge about every pair of answers to a prompt in both orders.

    A model wins a pair if the judge names it in both orders; everything else is a tie, and counts
    half.

    Args:
        models: a run, a model folder, a hub id, or the folder of a trained role, each.
        prompts: with the turns that follow in `metadata["later_turns"]`.

    Returns:
        The figures, and every pair of answers. `probability` is 1 where `chosen` won, 0 where it
        lost; without a verdict `metadata["failed"]` has the reason.

    Raises:
        ModelError: a model cannot be opened.
        DataError: no prompt can be answered by two of them, or the judge answered nothing.
    """
    left_out = Quarantine()
    sides = [_answered(model, prompts, sampling, seed, left_out, announce) for model in models]
    rows = [row for pair in combinations(sides, 2) for row in _pairs(prompts, *pair)]
    if not rows:
        raise DataError(f"no prompt of {len(prompts)} was answered by both {' and '.join(models)}")
    differing = [row for row in rows if row.chosen != row.rejected]
    bar = announce("judge") if announce and differing else None
    judgments = judged_pairs(judge, differing, bar) if differing else []
    report = judge_report(differing, judgments, judge.temperature) if differing else {}
    if differing and not report["num_judged"]:
        reason = judgments[0].reason
        raise DataError(f"{judge.name} judged none of {len(differing)} pairs: {reason}")
    verdicts = iter(judgments)
    rows = [_decided(row, next(verdicts)) if row.chosen != row.rejected else row for row in rows]
    contests: dict[tuple[str, str], list[Comparison]] = {}
    for row in rows:
        contests.setdefault(_models(row), []).append(row)
    return {
        "models": [*models],
        "judge": judge.name,
        "num_prompts": len({row.group for row in rows}),
        "unanswered": {side.name: dict(side.unanswered) for side in sides},
        "left_out": left_out.summary(),
        "position": report.get("position"),
        "failures": report.get("failures", {}),
        "words": {side.name: _words(side) for side in sides},
        "contests": [
            {
                "first": first,
                "second": second,
                "results": {name: _figures(part) for name, part in _parts(own).items()},
            }
            for (first, second), own in contests.items()
        ],
        "ranking": _ranking(rows if len(models) > 2 else ()),
    }, rows


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
    announce: Announce | None,
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
            place: replace(
                prompt,
                messages=(
                    *prompt.messages,
                    *_side(side.answers[place], _later(prompt)[:turn]),
                ),
            )
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
                "chosen_model": first.name,
                "rejected_model": second.name,
            }
            name = f"{prompt.id or place}-turn-{turn + 1}"
            yield Comparison(
                prompt.messages,
                *sides,
                id=name,
                group=str(place),
                tie=True,
                probability=0.5,
                metadata=facts,
            )


def _decided(row: Comparison, judgment: Judgment) -> Comparison:
    """The pair with its verdict, or with the reason why there is none."""
    won = outcome(judgment)
    if won is None:
        return replace(row, tie=False, metadata={**row.metadata, "failed": judgment.reason})
    return replace(row, tie=won == 0.5, probability=won)


def _models(row: Comparison) -> tuple[str, str]:
    return row.metadata["chosen_model"], row.metadata["rejected_model"]


def _parts(rows: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    """All pairs, those of each turn and of each kind of prompt; a part that is all of them occurs
    once.
    """
    parts: dict[str, list[Comparison]] = {"all": [*rows]}
    for row in rows:
        for key in ("turn", *KINDS):
            if key in row.metadata:
                parts.setdefault(f"{key} {row.metadata[key]}", []).append(row)
    return {name: part for name, part in parts.items() if name == "all" or len(part) < len(rows)}


def _figures(rows: Sequence[Comparison]) -> Json:
    """Wins, ties, losses, and the first model's win rate, as judged and at equal length, with
    intervals over prompts.
    """
    judged = [row for row in rows if "failed" not in row.metadata]
    wins = [row.probability for row in judged]
    counts = Counter(wins)
    figures: Json = {
        "pairs": len(rows),
        "wins": counts[1.0],
        "ties": counts[0.5],
        "losses": counts[0.0],
        "win_rate": None,
        "at_equal_length": None,
    }
    if judged:
        groups = [row.group for row in judged]
        lengths, others = (
            [len(getattr(row, side)[-1].content) for row in judged]
            for side in ("chosen", "rejected")
        )
        figures["win_rate"] = win_rate(wins, [0.5] * len(wins), groups=groups).as_dict()
        controlled = length_controlled_win_rate(wins, lengths, others, groups)
        figures["at_equal_length"] = controlled.as_dict()
    return figures


def _ranking(rows: Sequence[Comparison]) -> Json:
    """The order of more than two models, or the reason why there is none."""
    judged = [row for row in rows if "failed" not in row.metadata]
    standings: list[PolicyStanding] = []
    reason = ""
    if judged:
        first, second = zip(*map(_models, judged), strict=True)
        wins = [row.probability for row in judged]
        try:
            ranking = rank_policies(first, second, wins, [row.group for row in judged])
            standings = ranking.standings()
        except DataError as error:
            reason = str(error)
    return {
        "standings": [{**one._asdict(), "strength": one.strength.as_dict()} for one in standings],
        "reason": reason,
    }


def _words(side: Side) -> float:
    """The mean number of words of an answer."""
    counts = [len(answer.split()) for answers in side.answers for answer in answers]
    return sum(counts) / max(1, len(counts))
