"""What a recipe says of those who judge answers: a language model, or a function."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, model_validator

from tether.core.config import Config
from tether.judges.server_config import JudgeServerConfig
from tether.preferences.constitution import read_rubric


class FunctionJudge(Config):
    """A function that scores answers; higher is better. Nothing is trained on its scores themselves."""

    call: str = Field(description="module:name, or path/to/file.py:name; (prompts, responses) -> a number for each")


class JudgeConfig(Config):
    """A model in this process or behind an address, and what it goes by."""

    model: str | None = Field(default=None, description="a model folder, a hub id, package:NAME==VERSION, or a run directory")
    server: JudgeServerConfig | None = Field(default=None, description="instead of model: an OpenAI-compatible server")
    rubric: str = Field(
        default="helpful", description="a text file; helpful, harmless; for comparisons also a .toml of principles"
    )
    temperature: float = Field(default=1.0, gt=0, description="of comparisons: divides the log-odds of the labels")
    reasoning_tokens: int = Field(default=0, ge=0, description="of the reasons that it writes before each verdict; 0: none")
    cache: str | None = Field(default=None, description="file in which answers are kept, so that none is asked for twice")

    @model_validator(mode="after")
    def _check(self) -> JudgeConfig:
        if (self.model is None) == (self.server is None):
            raise ValueError("a judge is either a model or a server: give one of the two")
        read_rubric(self.rubric)
        return self

    @property
    def name(self) -> str:
        """Of the model that judges, wherever it is."""
        return self.server.model if self.server else str(self.model)


def _judge_kind(value: Any) -> str:
    """Which of the ways to name a judge a value is."""
    if isinstance(value, str):
        return "name"
    return "function" if isinstance(value, FunctionJudge) or (isinstance(value, dict) and "call" in value) else "model"


AFunction = Annotated[FunctionJudge, Tag("function")]
AModel = Annotated[JudgeConfig, Tag("model")]
BY_KIND = Discriminator(_judge_kind)
"""So that the error of one way of naming a judge is not hidden behind those of the others."""
