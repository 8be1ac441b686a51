"""What a recipe says of a language model that judges."""

from __future__ import annotations

from pydantic import Field, model_validator

from tether.core.config import Config
from tether.preferences.constitution import read_rubric
from tether.rollout.served import ServerConfig


class JudgeConfig(Config):
    """A model in this process or behind an address, and what it goes by."""

    model: str | None = Field(default=None, description="a model folder, a hub id, package:NAME==VERSION, or a run directory")
    server: ServerConfig | None = Field(default=None, description="instead of model: an OpenAI-compatible server")
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
