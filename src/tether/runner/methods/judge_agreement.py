"""Agreement of a judge with people, and with itself."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from tether.core.digest import digest
from tether.core.errors import DataError
from tether.core.protocols import Announce, Progress
from tether.core.rundir import file_digest, read_json, write_json
from tether.core.types import Comparison, Json
from tether.data.sources import Quarantine, group_of
from tether.evaluation.reward_quality import judge_rewards
from tether.evaluation.winrate import mean_estimate, pairwise_accuracy, win_rate
from tether.judges.pairwise import NO_REASONS, Judgment, PairJudge
from tether.judges.verdicts import CUT_OFF, NO_OPTION, NOT_A_NUMBER, UNASKABLE
from tether.people.labels.agreement import cohen_kappas
from tether.people.labels.votes import Vote
from tether.runner.assembly.data.rows import load_rows
from tether.settings.section import DataConfig

UNDECIDED = 0.05
"""A label nearer than this to one half is a tie."""
SUREST = 30.0
"""Nats at which log-odds are cut off in the figures: written verdicts are infinitely sure."""
LASTING = (UNASKABLE, NO_OPTION, NOT_A_NUMBER, NO_REASONS)
"""Failures that the same question to the same judge meets again."""


def judge_files(
    judge: PairJudge,
    files: Sequence[str],
    *,
    format: str = "auto",
    limit: int | None = None,
    announce: Announce | None = None,
) -> tuple[list[Comparison], dict[str, Json]]:
    """Ask the judge of every comparison in both orders.

    Args:
        limit: only the first so many comparisons of each file.

    Returns:
        The judge's labels, and what the report says of them, file by file and of all together.

    Raises:
        MissingFileError: there is no such file.
        DataError: nothing in a file is a comparison, or the judge answered nothing.
    """
    rows_by_file: dict[str, list[Comparison]] = {}
    quarantines: Json = {}
    for file in files:  # all are read before anything is asked
        quarantine = Quarantine(keep=0)
        name = Path(file).name
        name = f"{file} ({len(rows_by_file) + 1})" if name in rows_by_file else name
        rows = load_rows(DataConfig(path=file, format=format, limit=limit), Comparison, quarantine)
        rows_by_file[name] = [row if row.probability >= 0.5 else row.swap() for row in rows]
        quarantines[name] = {"quarantine": quarantine.summary()}
    judged = {
        name: judged_pairs(judge, rows, announce(name) if announce else None)
        for name, rows in rows_by_file.items()
    }
    every = [row for rows in rows_by_file.values() for row in rows]
    judgments = [judgment for own in judged.values() for judgment in own]
    report = {
        name: judge_report(rows_by_file[name], judged[name], judge.temperature) | quarantines[name]
        for name in judged
    }
    if len(files) > 1:
        report["all"] = judge_report(every, judgments, judge.temperature)
    labels = judge.label(every, judgments)
    if not labels:
        raise DataError(
            f"{judge.name} judged none of {len(every)} comparisons: {judgments[0].reason}",
        )
    return labels, report


def measure_once(judge: PairJudge, settings: Json, file: str, note: Path) -> None:
    """Write the report of `judge_files` into `note`, unless it has one of this judge and file."""
    made_of = digest([settings, *file_digest([file]).values()])
    before = read_json(note) if note.is_file() else {"made_of": None}
    if before.get("made_of", made_of) == made_of:
        return
    _, report = judge_files(judge, [file])
    (measured,) = report.values()
    write_json(note, {"judge": judge.name, "made_of": made_of, **measured})


def judged_pairs(
    judge: PairJudge,
    rows: Sequence[Comparison],
    bar: Progress | None,
) -> list[Judgment]:
    """The judge's verdict on each comparison."""
    return judge.judge(
        rows,
        told=None if bar is None else lambda done: bar(done // 2, len(rows), {}),
    )


def judge_report(
    rows: Sequence[Comparison],
    judgments: Sequence[Judgment],
    temperature: float = 1.0,
) -> Json:
    """Quality of a judge's verdicts: failures, position bias, and the agreement with the labels
    that the rows had.

    Position bias is reported twice. `bias` is what the first place adds to an answer's log-odds.
    `first_share` is the share of wins of the first answer, in an order drawn by content. It is
    computed from the labels of `people`, from the judge asked `once` in that order, and from the
    `averaged` verdict. Without bias the three agree.

    Args:
        temperature: divides the log-odds. The reported temperature replaces the judge's own.

    Returns:
        Plain JSON values. `position` is None without verdicts. `agreement` is None without two
        labels to agree with. If most verdicts were written, its `temperature` and all later values
        are None, because written verdicts have no log-odds. `num_lasting` counts the failures that
        repeating the question does not mend. `num_cut_off` counts those that longer replies mend.
    """
    failures = reasons(judgments)
    judged = [(row, j) for row, j in zip(rows, judgments, strict=True) if j.log_odds is not None]
    masses = [j.mass for _, j in judged if j.bias is not None]
    report: Json = {
        "num_pairs": len(rows),
        "num_judged": len(judged),
        "failures": dict(failures.most_common()),
        "num_lasting": sum(failures[reason] for reason in LASTING),
        "num_cut_off": sum(
            count for reason, count in failures.items() if reason.startswith(CUT_OFF)
        ),
        "num_parsed": len(judged) - len(masses),
        "mass": statistics.fmean(masses) if masses else None,
        "position": None,
        "agreement": None,
    }
    if judged:
        probabilities = [p for _, j in judged if (p := j.probability(temperature)) is not None]
        report["undecided"] = statistics.fmean(
            [float(abs(p - 0.5) < UNDECIDED) for p in probabilities],
        )
        report["position"] = _position(*zip(*judged, strict=True))
        directed = [(row, j) for row, j in judged if not row.tie and row.probability != 0.5]
        if len(directed) > 1:
            agreement = _agreement(*zip(*directed, strict=True), temperature=temperature)
            report["agreement"] = {**agreement, "num_ties": len(judged) - len(directed)}
    return report


def _position(rows: Sequence[Comparison], judgments: Sequence[Judgment]) -> Json:
    groups = [group_of(row) for row in rows]
    biases = [j.bias for j in judgments]
    measured = any(bias is not None for bias in biases)
    wins_first, wins_second = (1 + np.sign(_shown(judgments))) / 2  # one half for neither
    names_first = (wins_first / 2 + (1 - wins_second) / 2).tolist()
    follows = [float(bool(j.follows_place)) for j in judgments]
    return {
        "bias": mean_estimate(biases, groups).as_dict() if measured else None,
        "names_first": mean_estimate(names_first, groups).as_dict(),
        "follows_place": win_rate(follows, [0.5] * len(rows), groups=groups).as_dict(),
    }


def _shown(judgments: Sequence[Judgment]) -> np.ndarray:
    """(2, pairs) log-odds of `chosen` in the first place, and in the second, cut off."""
    return np.clip(
        np.array([(j.shown_first, j.shown_second) for j in judgments], float).T,
        -SUREST,
        SUREST,
    )


def _agreement(
    rows: Sequence[Comparison],
    judgments: Sequence[Judgment],
    temperature: float,
) -> Json:
    """With labels that have a direction; `chosen` is what they prefer."""
    groups = [group_of(row) for row in rows]
    nothing = [0.0] * len(rows)
    drawn = [chosen_is_first(row) for row in rows]
    shown = _shown(judgments)
    odds = (
        np.clip(np.array([j.log_odds for j in judgments], float), -SUREST, SUREST) / temperature
    ).tolist()
    once = np.where(drawn, *shown).tolist()
    verdicts = {"people": [1.0] * len(rows), "once": once, "averaged": odds}
    shares = {
        name: win_rate(
            [v if first else -v for first, v in zip(drawn, values, strict=True)],
            nothing,
            groups=groups,
        ).as_dict()
        for name, values in verdicts.items()
    }
    quality = judge_rewards(rows, odds, nothing)
    del quality["num_failed"]  # failures have their reasons, and are left out before
    quality["temperature"] *= temperature  # it was fitted to what `temperature` had divided
    if 2 * sum(j.bias is None for j in judgments) > len(judgments):
        quality |= dict.fromkeys(("temperature", "calibration_error_after", "loss_after"))
    accurate = {"once": once, "shown_first": shown[0].tolist(), "shown_second": shown[1].tolist()}
    return {
        **quality,
        **{
            f"accuracy_{name}": pairwise_accuracy(values, nothing, groups).as_dict()
            for name, values in accurate.items()
        },
        "first_share": shares,
        "kappa": _kappa(drawn, odds),
        "kappa_once": _kappa(drawn, once),
    }


def chosen_is_first(row: Comparison) -> bool:
    """An order of the two sides that depends on their texts alone, never on which is `chosen`."""
    prompt, chosen, rejected = (
        [(turn.role, turn.content) for turn in turns]
        for turns in (row.prompt, row.chosen, row.rejected)
    )
    drawn = int(digest([prompt, sorted((chosen, rejected))]), 16)
    return (chosen <= rejected) == bool(drawn % 2)


def _kappa(drawn: Sequence[bool], odds: Sequence[float]) -> Json:
    """Cohen's kappa of the labels and the judge, over the places in the drawn order."""
    votes = []
    for number, (first, value) in enumerate(zip(drawn, odds, strict=True)):
        places = ("first", "second") if first else ("second", "first")
        votes.append(Vote(str(number), "labels", places[0]))
        votes.append(Vote(str(number), "judge", "tie" if value == 0 else places[value < 0]))
    (pair,) = cohen_kappas(votes)
    return asdict(pair.kappa)


def reasons(judgments: Sequence[Judgment]) -> Counter[str]:
    """Number of judgments without a verdict, by reason."""
    return Counter(
        j.reason.partition(": ")[0] or "unknown" for j in judgments if j.log_odds is None
    )
