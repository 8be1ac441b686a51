"""`tether reward-bench`: a reward model against comparisons that it never saw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tether.core.errors import DataError, MissingFileError
from tether.core.protocols import RewardSource
from tether.core.types import Comparison, Conversation, Json, Prompt, Rollout, Sampling, StopReason
from tether.data.chat import ChatEncoder
from tether.data.sources import Quarantine
from tether.evaluation.reward_quality import judge_rewards
from tether.rewards.classifier import ClassifierConfig, ClassifierReward
from tether.rewards.learned import EnsembleReward, LearnedReward
from tether.run.progress import Progress
from tether.run.roles import encoder_of, load_trained, trained_scorer
from tether.run.rows import DataConfig, load_rows

CHUNK = 64
Reports = dict[str, Json]
"""What is measured, by the name of a file; `all` where there are several."""


def bench_rewards(
    model: str,
    files: Sequence[str],
    *,
    format: str = "auto",
    limit: int | None = None,
    label: str | None = None,
    max_length: int = 2048,
    announce: Callable[[str], Progress] | None = None,
) -> Reports:
    """What `evaluation.reward_quality` says of the model, file by file and of all together.

    Args:
        model: a run with a reward stage, the folder of a trained role, or a sequence classifier of the hub.
        label: of a classifier with several outputs.
        max_length: tokens; pairs with a longer side are left out and counted.

    Raises:
        MissingFileError: there is no such model.
        DataError: nothing in a file is a comparison, or all of it is too long.
    """
    source, encoder = scorer_of(model, label, max_length)
    results: Reports = {}
    every: list[tuple[Comparison, float | None, float | None]] = []
    for file in files:
        quarantine = Quarantine(keep=0)
        rows = load_rows(DataConfig(path=file, format=format, limit=limit), Comparison, quarantine)
        name = Path(file).name
        fitting = [row for row in rows if _fits(row, encoder, max_length)]
        if not fitting:
            raise DataError(f"{file}: none of its {len(rows)} pairs fits into {max_length} tokens. Raise --max-length")
        bar = announce(name) if announce else None
        chosen, rejected = _scores(source, encoder, fitting, bar)
        results[name] = judge_rewards(fitting, chosen, rejected)
        results[name] |= {"num_too_long": len(rows) - len(fitting), "quarantine": quarantine.summary()}
        every += zip(fitting, chosen, rejected, strict=True)
    if len(files) > 1:
        results["all"] = judge_rewards(*(list(column) for column in zip(*every, strict=True)))
    return results


def scorer_of(model: str, label: str | None = None, max_length: int = 2048) -> tuple[RewardSource, ChatEncoder | None]:
    """What scores: a trained reward model, with its encoder, or a sequence classifier."""
    folder = Path(model).expanduser()
    if (trained := trained_scorer(model)) is not None:
        return _trained(trained)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise MissingFileError(f"{folder} holds no trained reward model: give a run with a reward stage, or its model folder")
    return ClassifierReward.load(ClassifierConfig(source=model, label=label, max_length=max_length)), None


def _trained(folder: Path) -> tuple[RewardSource, ChatEncoder]:
    roles, loaded = load_trained(folder)
    encoder = encoder_of(loaded)
    return (LearnedReward(roles[0], encoder) if len(roles) == 1 else EnsembleReward(roles, encoder)), encoder


def _fits(row: Comparison, encoder: ChatEncoder | None, max_length: int) -> bool:
    sides = (row.chosen, row.rejected)
    return encoder is None or all(len(encoder.conversation((*row.prompt, *side), "last")) <= max_length for side in sides)


def _scores(
    source: RewardSource, encoder: ChatEncoder | None, rows: Sequence[Comparison], bar: Progress | None
) -> tuple[list[float | None], list[float | None]]:
    rollouts = [as_rollout((*row.prompt, *side), encoder) for row in rows for side in (row.chosen, row.rejected)]
    scores: list[float | None] = []
    for start in range(0, len(rollouts), CHUNK):
        scores += [score.value for score in source.score(rollouts[start : start + CHUNK])]
        if bar:
            bar(len(scores) // 2, len(rows), {})
    return scores[::2], scores[1::2]


def as_rollout(conversation: Conversation, encoder: ChatEncoder | None) -> Rollout:
    """A conversation as if its last turn had been sampled; without an encoder by its text alone."""
    ids, length = (), 0
    if encoder is not None:
        encoded = encoder.conversation(conversation, "last")
        ids, length = encoded.ids, encoded.prompt_length
    prompt, text = Prompt(conversation[:-1]), conversation[-1].content
    return Rollout(ids[:length], ids[length:], (), StopReason.STOP_TOKEN, text, 0, 0, Sampling(), prompt)
