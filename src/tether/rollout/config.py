"""Settings of what samples: the engine in this process, or servers of it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from tether.core.config import Config


class EngineConfig(Config):
    """What samples a policy's answers, and where."""

    kind: Literal["local", "served", "vllm"] = Field(
        default="local", description="in this process, or by servers of tether's own engine, or of vLLM's"
    )
    servers: int = Field(default=1, ge=1, description="how many are started; they end with the run")
    addresses: tuple[str, ...] = Field(
        default=(), description="servers that run already, such as http://10.0.0.5:8000; they must see the run's folder"
    )
    python: str = Field(default=".bench/vllm/bin/python", description="the Python that has vLLM, where servers are started")
    arguments: tuple[str, ...] = Field(default=(), description="more arguments for a server's command line")
    resources: dict[str, float] | None = Field(
        default=None,
        description="what a server needs of a machine of the cluster, { GPU = 2 }; unset: one GPU, or one CPU",
    )
    request_seconds: float = Field(default=600.0, gt=0, description="without an answer, after which a request is sent elsewhere")
    start_seconds: float = Field(default=600.0, gt=0, description="that a server may take to start")
    restarts: int = Field(default=5, ge=0, description="of a server in ten minutes; then the run goes on without it")
    tolerance: float | None = Field(
        default=None,
        gt=0,
        description="nats a token by which a server's log-probabilities may differ from the learner's; unset: by the dtype",
    )

    @model_validator(mode="after")
    def _have_effect(self) -> Self:
        if self.kind == "local" and (idle := self.model_fields_set - {"kind"}):
            raise ValueError(f"{min(idle)} has no effect with kind = 'local'; choose 'served' or 'vllm', or leave it out")
        if self.addresses and "servers" in self.model_fields_set:
            raise ValueError("addresses are of servers that run already, and servers is how many to start: give one of them")
        if self.addresses and self.resources:
            raise ValueError("resources are of servers that are started, and addresses of others: give one of them")
        return self
