"""Settings of what samples: the engine in this process, or servers of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from tether.settings.workers import ServersConfig


class EngineConfig(ServersConfig):
    """Engine that samples a policy's answers: its kind, and its machine."""

    kind: Literal["local", "served", "vllm"] = Field(
        default="local",
        description="in this process, or by servers of tether's own engine, or of vLLM's",
    )
    python: str = Field(
        default=".bench/vllm/bin/python",
        description="the Python that has vLLM, where servers are started",
    )
    arguments: tuple[str, ...] = Field(
        default=(),
        description="more arguments for a server's command line",
    )
    tolerance: float | None = Field(
        default=None,
        gt=0,
        description="nats a token by which a server's log-probabilities may differ from the "
        "learner's; unset: by the dtype",
    )

    def faults(self) -> Iterator[str]:
        if self.kind == "local" and (idle := self.model_fields_set - {"kind"}):
            yield (
                f"{min(idle)} has no effect with kind = 'local'; choose 'served' or 'vllm', or "
                "leave it out"
            )
