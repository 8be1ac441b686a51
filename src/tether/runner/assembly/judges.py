"""Judges: their names in a recipe, and the language model or function of each name."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from tether.core.digest import digest
from tether.core.errors import RewardError
from tether.core.keeping import own_file
from tether.core.protocols import ChatModel, Scoring, now_doing
from tether.core.types import Facts, Prompt, Score
from tether.judges.cache import CachedModel
from tether.judges.constitution import read_rubric
from tether.judges.local import LocalChat
from tether.judges.openai import ServedChat
from tether.judges.pairwise import Reasoning, judged_scores
from tether.models.loading import weights_digest
from tether.rewards.function import FunctionReward
from tether.rewards.loading import load_function
from tether.runner.assembly.roles import encoder_of, load_policy, local_engine
from tether.settings.judges import FunctionJudge, JudgeConfig, JudgeServerConfig
from tether.settings.model import ModelConfig
from tether.settings.reading import build

_LOG = logging.getLogger("tether.judges")


ENGINE_ROWS = 32
"""Replies that a model in this process writes at once."""


def chat_model(
    model: str | JudgeServerConfig,
    cache: str | Path | None = None,
    *,
    reasoning_tokens: int = 0,
    template: Facts = MappingProxyType({}),
) -> ChatModel:
    """A model to ask.

    Args:
        model: a folder, a hub id, `package:NAME==VERSION`, a run directory or a trained role's
            folder; or where a server is.
        cache: a file that keeps its answers.
        reasoning_tokens: how long the reasons are that it writes before a verdict; 0: none.
        template: arguments of its chat template.

    Raises:
        ModelError: it cannot be loaded.
        ConfigError: the name is that of no model; or the server's key is not where it should be.
    """
    chat: ChatModel
    if isinstance(model, JudgeServerConfig):
        chat = ServedChat(model, template)
    else:
        if not Path(model).expanduser().exists():
            build(ModelConfig, {"source": model}, where="model")
        role, loaded = load_policy(model)
        own = loaded.config.model_copy(update={"template": {**template}})
        loaded = replace(loaded, config=own)
        weights = loaded.digest if role.adapter is None else weights_digest(role.model.state_dict())
        name = (
            f"{loaded.source}@{digest([weights, role.adapter, encoder_of(loaded).describe()])[:12]}"
        )
        chat = LocalChat(name, local_engine(role, loaded, max_rows=ENGINE_ROWS))
    chat = chat if cache is None else CachedModel(chat, cache)
    return Reasoning(chat, reasoning_tokens) if reasoning_tokens else chat


def judge_model(config: JudgeConfig, folder: Path) -> ChatModel:
    """The model that a recipe's judge asks; unless the recipe says otherwise its answers are kept
    in this folder.
    """
    if (cache := config.cache) is None:
        cache = folder / "judge.sqlite"
        own_file(cache).close()
    return chat_model(
        config.server or str(config.model),
        cache,
        reasoning_tokens=config.reasoning_tokens,
        template=config.template,
    )


TextJudge = Callable[[Sequence[Prompt], Sequence[str]], list[Score]]
"""(prompts, responses) -> scores, higher being better."""


def judge_note(config: Literal["environment"] | FunctionJudge | JudgeConfig) -> dict[str, str]:
    """The judge, for the manifest: a function's name and the first line of its docstring, or the
    name of the model.
    """
    if not isinstance(config, FunctionJudge):
        return {"name": config if isinstance(config, str) else config.name, "says": ""}
    says = inspect.getdoc(load_function(config.call, key="judge.call")) or ""
    return {"name": config.call, "says": says.partition("\n")[0]}


def text_judge(config: FunctionJudge | JudgeConfig, folder: Path) -> TextJudge:
    """The judge that a recipe names, called on all answers at once. Replies of a language model are
    stored in `folder`.

    Raises:
        RewardError: when it is asked, of a judge that scores nothing at all; the message has its
            reason.
    """
    if isinstance(config, FunctionJudge):
        function = FunctionReward(
            load_function(config.call, key="judge.call"),
            role="the judge",
            **config.limits,
        )
        function.watchdog.path = folder / "stacks.txt"
        name = function.source
        score = function.score_texts
    else:
        rubric = read_rubric(config.rubric)
        assert isinstance(rubric, str)
        model = judge_model(config, folder)
        name = f"the judge {model.name}"
        score = partial(judged_scores, model, rubric)

    def scored(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Score]:
        now_doing(f"scoring {len(responses)} answers by {name}")
        scores = score(prompts, responses)
        reasons = Counter(
            score.reason or "no reason given" for score in scores if score.value is None
        )
        common = "; ".join(f"{reason} ({count} times)" for reason, count in reasons.most_common(3))
        if scores and reasons.total() == len(scores):
            raise RewardError(
                f"{name} scored none of {len(scores)} answers: {common}. "
                "Mend the judge and start the same command again: it goes on from what is saved",
            )
        if reasons:
            _LOG.warning(
                "%s scored %d of %d answers not; they are left out: %s",
                name,
                reasons.total(),
                len(scores),
                common,
            )
        return scores

    return scored


def score_judge(
    config: FunctionJudge | JudgeConfig,
    folder: Path,
) -> Scoring:
    """The same judge of finished rollouts."""
    judge = text_judge(config, folder)
    return lambda rollouts: judge(
        [rollout.prompt for rollout in rollouts],
        [rollout.text for rollout in rollouts],
    )
