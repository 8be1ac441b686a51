"""Agreement of a reward model with comparisons that people judged."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tether.core.errors import DataError, MissingFileError
from tether.core.protocols import Announce, RewardSource
from tether.core.types import Comparison, Json, Rollout
from tether.data.chat import ChatEncoder
from tether.data.inspection import longer_chosen
from tether.data.prepare import encode_rows
from tether.data.seen import digest_of, read_seen
from tether.data.sources import Quarantine
from tether.evaluation.reward_quality import judge_rewards
from tether.models.saving import member_folders
from tether.rewards.classifier import ClassifierReward
from tether.rewards.learned import EnsembleReward, LearnedReward
from tether.rollout.conversations import as_rollout
from tether.runner.assembly.data.rows import load_rows
from tether.runner.assembly.roles import encoder_of, load_scorer, trained_scorer
from tether.settings.rewards import ClassifierConfig
from tether.settings.section import DataConfig

SCORED = 64
"""Answers that are scored in one call."""


def bench_rewards(
    model: str,
    files: Sequence[str],
    *,
    format: str = "auto",
    limit: int | None = None,
    label: str | None = None,
    max_length: int = 2048,
    announce: Announce | None = None,
) -> dict[str, Json]:
    """Figures of `evaluation.reward_quality` for the model, file by file and of all together.

    Args:
        model: a run with a reward stage, the folder of a trained role, or a sequence classifier of
            the hub.
        label: of a classifier with several outputs.
        max_length: tokens; pairs with a longer side are left out and counted.

    Returns:
        Beside those figures `seen_in_training`, the pairs whose prompts the model has learned from (None: unknown), and the
        accuracy on the other pairs.

    Raises:
        MissingFileError: there is no such model.
        DataError: nothing in a file is a comparison, or all of it is too long.
    """
    source, encoder = scorer_of(model, label, max_length)
    seen = _seen_by(model)
    results: dict[str, Json] = {}
    every: list[Scored] = []
    for file in files:
        quarantine = Quarantine(keep=0)
        rows = load_rows(DataConfig(path=file, format=format, limit=limit), Comparison, quarantine)
        name = Path(file).name
        name = f"{file} ({len(results) + 1})" if name in results else name
        pairs, skipped = encode_rows(rows, partial(_sides, encoder=encoder, max_length=max_length))
        fitting = [row for row, _ in pairs]
        rollouts = [side for _, sides in pairs for side in sides]
        if not fitting:
            raise DataError(
                f"{file}: none of its {len(rows)} pairs can be scored: {skipped}. "
                "Raise --max-length for long ones",
            )
        bar = announce(name) if announce else None
        scores = []
        for start in range(0, len(rollouts), SCORED):
            scores += [score.value for score in source.score(rollouts[start : start + SCORED])]
            if bar:
                bar(len(scores) // 2, len(fitting), {})
        chosen = scores[::2]
        rejected = scores[1::2]
        try:
            results[name] = judge_rewards(fitting, chosen, rejected)
        except DataError as error:
            raise DataError(f"{file}: {error}") from error
        results[name] |= {"skipped": skipped, "quarantine": quarantine.summary()}
        results[name] |= _overlap(fitting, chosen, rejected, seen)
        if longer := longer_chosen(fitting):
            results[name]["longer_chosen"] = longer.as_dict()
        every += zip(fitting, chosen, rejected, strict=True)
    if len(files) > 1:
        columns = _columns(every)
        results["all"] = {**judge_rewards(*columns), **_overlap(*columns, seen)}
    return results


Scored = tuple[Comparison, float | None, float | None]
"""A pair with the scores of its chosen and its rejected side."""


def _columns(
    rows: Sequence[Scored],
) -> tuple[list[Comparison], list[float | None], list[float | None]]:
    return (
        [row for row, _, _ in rows],
        [score for _, score, _ in rows],
        [score for _, _, score in rows],
    )


def _sides(
    row: Comparison,
    encoder: ChatEncoder | None,
    max_length: int,
) -> tuple[Comparison, list[Rollout]]:
    """Both sides of a pair, to be scored.

    Raises:
        DataError: the template refuses one, or it is longer than `max_length` tokens.
    """
    sides = [as_rollout((*row.prompt, *side), encoder) for side in (row.chosen, row.rejected)]
    if max(len(side.prompt_ids + side.response_ids) for side in sides) > max_length:
        raise DataError(f"longer than {max_length} tokens")
    return row, sides


def _seen_by(model: str) -> set[str] | None:
    """The digests of the prompts that a trained reward model has learned from; None: unknown."""
    folder = trained_scorer(model)
    if folder is None or (own := read_seen(folder)) is not None:
        return None if folder is None else own
    parts = [read_seen(member) for member in member_folders(folder)]
    return None if None in parts else set().union(*(part for part in parts if part is not None))


def _overlap(
    rows: Sequence[Comparison],
    chosen: Sequence[float | None],
    rejected: Sequence[float | None],
    seen: set[str] | None,
) -> Json:
    """`seen_in_training`: how many pairs have prompts that the model has learned from, and the
    accuracy on the others.
    """
    if seen is None:
        return {"seen_in_training": None}
    new = [
        (row, a, b)
        for row, a, b in zip(rows, chosen, rejected, strict=True)
        if digest_of(row) not in seen
    ]
    usable = [
        (r, a, b)
        for r, a, b in new
        if a is not None and b is not None and not r.tie and r.probability != 0.5
    ]
    accuracy = judge_rewards(*_columns(usable))["accuracy"] if usable else None
    return {"seen_in_training": len(rows) - len(new), "accuracy_on_new_prompts": accuracy}


def scorer_of(
    model: str,
    label: str | None = None,
    max_length: int = 2048,
) -> tuple[RewardSource, ChatEncoder | None]:
    """The source of scores: a trained reward model, with its encoder, or a sequence classifier."""
    folder = Path(model).expanduser()
    if (trained := trained_scorer(model)) is not None:
        roles, loaded = load_scorer(trained)
        encoder = encoder_of(loaded)
        return (
            LearnedReward(roles[0], encoder) if len(roles) == 1 else EnsembleReward(roles, encoder)
        ), encoder
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise MissingFileError(
            f"{folder} holds no trained reward model: give a run with a reward "
            "stage, or its model folder",
        )
    return ClassifierReward.load(
        ClassifierConfig(source=model, label=label, max_length=max_length),
    ), None
