"""Settings of tasks and environments: what is asked, what answers the policy's replies, and the size
of an episode.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from tether.core.types import Json
from tether.settings.config import Config
from tether.settings.rewards import GIVEN


class TaskConfig(Config):
    """Prompts of a reasoning-gym task instead of rows of data."""

    name: str = Field(description="of the reasoning-gym task")
    size: int = Field(default=512, ge=1, description="how many problems")
    seed: int = Field(default=0, description="of its problems")
    config: Json = Field(default_factory=dict, description="the task's own settings")
    system: str | None = Field(
        default=None,
        description="a system turn; unset: where the answer belongs; empty: none",
    )


class EpisodeLimits(Config):
    """The size of an episode."""

    turns: int = Field(default=8, ge=1, lt=4096, description="replies of an episode, at most")
    tokens: int = Field(
        default=2048,
        ge=1,
        description="of an episode's replies and of what is said between them, at most",
    )
    history: Literal["sampled", "template"] = Field(
        default="sampled",
        description="earlier replies as they were sampled, or as the chat template writes them; where "
        "it writes other ones, the episode goes on in a new segment",
    )


class EnvironmentConfig(EpisodeLimits):
    """The other side of an episode: an environment, or tools that the policy may call."""

    call: str | None = Field(
        default=None,
        description="path/to/file.py:Class, or module:Class, with reset(task) and step(message); "
        "or what makes an environment of another library; or the address ws://... of OpenEnv's",
    )
    tools: tuple[str, ...] = Field(
        default=(),
        description="functions, as path/to/file.py:name, or mcp: and a server's address or command: a "
        "reply that calls none ends the episode",
    )
    processes: bool = Field(
        default=False,
        description="each environment in a process of its own, not in a thread of this one",
    )
    time_limit: float = Field(
        default=30.0,
        gt=0,
        description="seconds for all environments to answer once",
    )
    retries: int = Field(
        default=1,
        ge=0,
        description="how often an environment that failed is made anew and led to the same place",
    )

    def faults(self) -> Iterator[str]:
        if (self.call is None) == (not self.tools):
            yield "an environment is a class (call) or functions (tools): give one of both"
        names = self.call or "", *self.tools
        if self.processes and any(name.startswith(("mcp:", GIVEN)) for name in names):
            yield (
                "processes needs an environment in a file: servers as tools (mcp:) are processes, and "
                "what Python hands over is in this one alone"
            )


def episode_faults(
    config: EnvironmentConfig | None,
    reward: str,
    ahead: int,
) -> Iterator[str]:
    """Faults of a stage with an environment, or with its reward and none."""
    if config and reward == "environment" and not config.call:
        yield (
            "reward_source = 'environment' needs an environment of one's own (environment.call). "
            "Tools give no reward: give a table function, or another reward"
        )
    if config and ahead:
        yield "max_staleness samples ahead, and episodes are not: set it to 0"
