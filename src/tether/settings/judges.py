"""Settings of judges: people by name, a function, or a language model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import (
    Discriminator,
    Field,
    JsonValue,
    NonNegativeInt,
    PositiveFloat,
    Tag,
    field_validator,
)

from tether.core.errors import ConfigError
from tether.settings.config import Config, FromOne
from tether.settings.rewards import CallLimits


class JudgeServerConfig(Config):
    """Address of a server, and the limits on its cost. The key is stored in an environment
    variable, outside the recipe.
    """

    url: str = Field(description="base address, such as http://127.0.0.1:8000/v1")
    model: str = Field(description="the model's name at the server")
    key_variable: str | None = Field(
        default=None,
        description="environment variable that holds the key; unset: OPENAI_API_KEY "
        "for api.openai.com, else no key",
    )
    concurrency: FromOne = Field(default=8, description="requests at a time")
    time_limit: PositiveFloat = Field(default=120.0, description="seconds a request")
    attempts: FromOne = Field(
        default=5,
        description="requests a question, where a server is busy, fails or is silent",
    )
    max_requests: int | None = Field(
        default=None,
        ge=0,
        description="for all questions together, repeated ones counted",
    )
    max_tokens: int | None = Field(
        default=None,
        ge=0,
        description="of prompts and replies, for all questions together",
    )
    reply_tokens: FromOne = Field(
        default=8,
        description="longest reply where one of several options is asked for",
    )

    @field_validator("url")
    @classmethod
    def _plain_address(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError(
                "an address with a name, a password or a query would be written "
                "down. Use key_variable for the key",
            )
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no address of a server: write http://host:port/v1")
        return url.rstrip("/")

    def key(self) -> str | None:
        """The key, from the environment.

        Raises:
            ConfigError: the variable that should hold it is not set.
        """
        name = self.key_variable or (
            "OPENAI_API_KEY" if urlsplit(self.url).hostname == "api.openai.com" else None
        )
        if name is None:
            return None  # a key that belongs elsewhere is not shown to this server
        if not os.environ.get(name):
            raise ConfigError(
                f"the key for {self.url} belongs into the environment variable "
                f"{name}, which is not set",
            )
        return os.environ[name]


class JudgingFunction(Config):
    """The place of a function that judges."""

    call: str = Field(
        description="module:name, or path/to/file.py:name; (prompts, responses) -> a number for each",
    )


class FunctionJudge(CallLimits, JudgingFunction):
    """A function that scores answers; higher is better. Nothing is trained on its scores
    themselves.
    """


class JudgeConfig(Config):
    """A model in this process or behind an address, and what it goes by."""

    model: str | None = Field(
        default=None,
        description="a model folder, a hub id, package:NAME==VERSION, or a run directory",
    )
    server: JudgeServerConfig | None = Field(
        default=None,
        description="instead of model: an OpenAI-compatible server",
    )
    template: dict[str, JsonValue] = Field(
        default={},
        description="arguments of its chat template, such as {enable_thinking = false}; a server "
        "gets them as chat_template_kwargs",
    )
    rubric: str = Field(
        default="helpful",
        description="a text file; helpful, harmless; for comparisons also a .toml of principles",
    )
    temperature: PositiveFloat = Field(
        default=1.0,
        description="of comparisons: divides the log-odds of the labels",
    )
    reasoning_tokens: NonNegativeInt = Field(
        default=0,
        description="of the reasons that it writes before each verdict; 0: none",
    )
    cache: str | None = Field(
        default=None,
        description="file in which answers are kept, so that none is asked for twice",
    )

    def faults(self) -> Iterator[str]:
        if (self.model is None) == (self.server is None):
            yield "a judge is either a model or a server: give one of the two"

    @property
    def name(self) -> str:
        """Of the model that judges, wherever it is."""
        return self.server.model if self.server else str(self.model)


def _judge_kind(value: object) -> str:
    """The way in which a value names a judge: its own word, "function" or "model"."""
    if isinstance(value, str):
        return value
    return (
        "function"
        if isinstance(value, FunctionJudge) or (isinstance(value, dict) and "call" in value)
        else "model"
    )


AFunction = Annotated[FunctionJudge, Tag("function")]


AModel = Annotated[JudgeConfig, Tag("model")]


BY_KIND = Discriminator(
    _judge_kind,
    custom_error_type="judge",
    custom_error_message='a judge is { call = "FILE:FUNCTION" }, { model = "FOLDER" }, or a model '
    'behind an API: { server = { url = "https://api.openai.com/v1", model = "NAME" } }; in [pairs] also "people"',
)
"""So that the error of one way of naming a judge is not hidden behind those of the others."""
