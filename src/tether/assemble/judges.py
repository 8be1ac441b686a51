"""Language models that are asked: in this process or behind an address, with or without a memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tether.assemble.judge_config import JudgeConfig
from tether.assemble.roles import encoder_of, load_policy, local_engine
from tether.core.config import build, digest
from tether.core.errors import RewardError
from tether.core.protocols import ChatModel
from tether.core.types import Rollout, Score
from tether.models.config import ModelConfig
from tether.models.loading import weights_digest
from tether.preferences.constitution import read_rubric
from tether.preferences.judge import ScoreJudge
from tether.preferences.reasoning import Reasoning
from tether.preferences.remembered import Remembered
from tether.rollout.asking import LocalChat
from tether.rollout.served import ServedChat, ServerConfig


def chat_model(
    model: str | ServerConfig, cache: str | Path | None = None, *, engine_rows: int = 32, reasoning_tokens: int = 0
) -> ChatModel:
    """A model to ask.

    Args:
        model: a folder, a hub id, `package:NAME==VERSION`, a run directory or a trained role's folder; or where a server is.
        cache: a file that keeps its answers.
        reasoning_tokens: how long the reasons are that it writes before a verdict; 0: none.

    Raises:
        ModelError: it cannot be loaded.
        ConfigError: the name is that of no model; or the server's key is not where it should be.
    """
    found: ChatModel = ServedChat(model) if isinstance(model, ServerConfig) else _local(model, engine_rows)
    found = found if cache is None else Remembered(found, cache)
    return Reasoning(found, reasoning_tokens) if reasoning_tokens else found


def configured(config: JudgeConfig, folder: Path) -> ChatModel:
    """The model that a recipe's judge asks; unless the recipe says otherwise its answers are kept in this folder."""
    cache = config.cache or folder / "judge.sqlite"
    return chat_model(config.server or str(config.model), cache, reasoning_tokens=config.reasoning_tokens)


def _local(source: str, engine_rows: int) -> LocalChat:
    if not Path(source).expanduser().exists():
        build(ModelConfig, {"source": source}, where="model")
    role, loaded = load_policy(source)
    weights = loaded.digest if role.adapter is None else weights_digest(role.model)
    name = f"{loaded.source}@{digest([weights, role.adapter, encoder_of(loaded).describe()])[:12]}"
    return LocalChat(name, local_engine(role, loaded, max_rows=engine_rows))


def score_judge(config: JudgeConfig, folder: Path) -> Callable[[Sequence[Rollout]], list[Score]]:
    """Scores finished rollouts by a rubric; what the model says is kept in `folder`.

    Raises:
        RewardError: when it is asked, of a judge that answers nothing at all; the message has its reason.
    """
    rubric = read_rubric(config.rubric)
    assert isinstance(rubric, str)
    judge = ScoreJudge(configured(config, folder), rubric)

    def scored(rollouts: Sequence[Rollout]) -> list[Score]:
        scores = judge.score_texts([rollout.prompt for rollout in rollouts], [rollout.text for rollout in rollouts])
        if scores and all(score.value is None for score in scores):
            raise RewardError(f"the judge {judge.name} scored none of {len(scores)} answers: {scores[0].reason}")
        return scores

    return scored
