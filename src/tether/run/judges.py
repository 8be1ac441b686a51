"""Language models that are asked: in this process or behind an address, with or without a memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path

from tether.core.config import build, digest
from tether.core.errors import ConfigError, RewardError
from tether.core.protocols import ChatModel
from tether.core.types import Prompt, Rollout, Score
from tether.judges.local import LocalChat
from tether.judges.server_config import JudgeServerConfig
from tether.models.config import ModelConfig
from tether.models.loading import weights_digest
from tether.preferences.answer_cache import CachedModel
from tether.preferences.constitution import read_rubric
from tether.preferences.judge import ScoreJudge
from tether.preferences.reasoning import Reasoning
from tether.rewards.function import as_score, load_function
from tether.run.judge_config import FunctionJudge, JudgeConfig
from tether.run.roles import encoder_of, load_policy, local_engine


def chat_model(
    model: str | JudgeServerConfig, cache: str | Path | None = None, *, engine_rows: int = 32, reasoning_tokens: int = 0
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
    chat: ChatModel = _served(model) if isinstance(model, JudgeServerConfig) else _local(model, engine_rows)
    chat = chat if cache is None else CachedModel(chat, cache)
    return Reasoning(chat, reasoning_tokens) if reasoning_tokens else chat


def configured(config: JudgeConfig, folder: Path) -> ChatModel:
    """The model that a recipe's judge asks; unless the recipe says otherwise its answers are kept in this folder."""
    cache = config.cache or folder / "judge.sqlite"
    return chat_model(config.server or str(config.model), cache, reasoning_tokens=config.reasoning_tokens)


def _served(config: JudgeServerConfig) -> ChatModel:
    try:
        from tether.judges.openai import ServedChat
    except ImportError:
        raise ConfigError("asking a server needs the package openai: pip install 'tether-rlhf[judge]'") from None
    return ServedChat(config)


def _local(source: str, engine_rows: int) -> LocalChat:
    if not Path(source).expanduser().exists():
        build(ModelConfig, {"source": source}, where="model")
    role, loaded = load_policy(source)
    weights = loaded.digest if role.adapter is None else weights_digest(role.model)
    name = f"{loaded.source}@{digest([weights, role.adapter, encoder_of(loaded).describe()])[:12]}"
    return LocalChat(name, local_engine(role, loaded, max_rows=engine_rows))


TextJudge = Callable[[Sequence[Prompt], Sequence[str]], list[Score]]
"""(prompts, responses) -> scores, higher being better."""


def described(config: FunctionJudge | JudgeConfig) -> dict[str, str]:
    """Who judges, for the manifest: a function's name and the first line of its docstring, or the model that is asked."""
    if not isinstance(config, FunctionJudge):
        return {"name": config.server.model if config.server else str(config.model), "says": ""}
    return {"name": config.call, "says": (inspect.getdoc(load_function(config.call)) or "").partition("\n")[0]}


def text_judge(config: FunctionJudge | JudgeConfig, folder: Path) -> TextJudge:
    """Whoever a recipe names to score answers; what a language model says is kept in `folder`.

    Raises:
        RewardError: when it is asked, of a judge that scores nothing at all; the message has its reason.
    """
    if isinstance(config, FunctionJudge):
        return score_function(config)
    rubric = read_rubric(config.rubric)
    assert isinstance(rubric, str)
    judge = ScoreJudge(configured(config, folder), rubric)

    def scored(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Score]:
        return _some(judge.name, judge.score_texts(prompts, responses))

    return scored


def score_function(config: FunctionJudge) -> TextJudge:
    """A judge that is a function, asked about all answers at once."""
    function = load_function(config.call)

    def scored(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Score]:
        scores = [as_score(value, f"the judge {config.call}") for value in function(prompts, responses)]
        if len(scores) != len(responses):
            raise RewardError(f"the judge {config.call} gave {len(scores)} scores for {len(responses)} answers")
        return _some(config.call, scores)

    return scored


def _some(name: str, scores: list[Score]) -> list[Score]:
    if scores and all(score.value is None for score in scores):
        raise RewardError(f"the judge {name} scored none of {len(scores)} answers: {scores[0].reason}")
    return scores


def score_judge(config: FunctionJudge | JudgeConfig, folder: Path) -> Callable[[Sequence[Rollout]], list[Score]]:
    """The same judge of finished rollouts."""
    judge = text_judge(config, folder)
    return lambda rollouts: judge([rollout.prompt for rollout in rollouts], [rollout.text for rollout in rollouts])
