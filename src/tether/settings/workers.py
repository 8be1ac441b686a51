"""Settings that all kinds of servers have."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, NonNegativeInt, PositiveFloat, StringConstraints

from tether.settings.config import Config, FromOne
from tether.settings.needs import Needs


class ServersConfig(Config):
    """Number of servers that work for a run, their addresses, and the time limits for them."""

    prefix: ClassVar[str] = "server"
    """Beginning of the servers' names."""
    servers: Annotated[
        FromOne,
        Needs(
            "not addresses",
            "says how many to start, and addresses are of servers that run already: give one of "
            "them",
        ),
    ] = Field(default=1, description="how many are started; they end with the run")
    addresses: tuple[str, ...] = Field(
        default=(),
        description="servers that run already, such as http://10.0.0.5:8000; they must see the run's folder",
    )
    resources: Annotated[
        dict[str, float] | None,
        Needs(
            "not addresses",
            "are of servers that are started, and addresses of others: give one of them",
        ),
    ] = Field(
        default=None,
        description="what a server needs of a machine of the cluster, { GPU = 2 }; unset: one "
        "GPU, or one CPU",
    )
    request_seconds: PositiveFloat = Field(
        default=600.0,
        description="seconds without an answer after which another server is asked",
    )
    start_seconds: PositiveFloat = Field(
        default=600.0,
        description="seconds that a server may take to start",
    )
    restarts: NonNegativeInt = Field(
        default=5,
        description="how often a server is started again within ten minutes; "
        "then the run goes on without it",
    )

    @property
    def names(self) -> list[str]:
        """Those of the servers that are to be started."""
        return (
            [] if self.addresses else [f"{self.prefix}-{number}" for number in range(self.servers)]
        )

    @property
    def running(self) -> dict[str, str]:
        """Addresses by name, of those that run already."""
        return {
            f"{self.prefix}-{number}": address.rstrip("/")
            for number, address in enumerate(self.addresses)
        }


On = Annotated[
    str,
    StringConstraints(
        pattern=r"^(local|ray(://\S+)?|slurm(:[\w-]+=[\w.:/@%*+-]+(,[\w-]+=[\w.:/@%*+-]+)*)?)$",
    ),
]
"""local; ray: the cluster of this machine; ray://HOST:PORT: all of the run on another; slurm: as a
job, with sbatch's options.
"""
