"""Where the rows of a stage come from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from tether.core.config import Config
from tether.core.errors import MissingFileError
from tether.data.sources import Quarantine, read
from tether.models.config import LoraConfig


class DataConfig(Config):
    """Files, folders or `hub:owner/name:split`, and how to read them."""

    path: str | tuple[str, ...]
    format: str = "auto"
    limit: int | None = Field(default=None, ge=1)
    strict: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        """The sources, environment variables filled in."""
        return tuple(os.path.expandvars(p) for p in ((self.path,) if isinstance(self.path, str) else self.path))

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        for path in self.paths:
            if path.startswith("$"):
                raise MissingFileError(
                    f"data path {path}: that environment variable is not set. Set it to the folder of your data."
                )
            if not path.startswith("hub:") and not Path(path).exists():
                raise MissingFileError(f"data not found: {path}. Give a file, a folder, or hub:owner/name:split.")
        return self


Lora = LoraConfig | Literal[False]


def _without_dropout(lora: Lora) -> Lora:
    if lora is not False and lora.dropout:
        raise ValueError(
            "lora.dropout has no effect here: what is sampled, compared and trained is one policy, without dropout. Leave it out"
        )
    return lora


SteadyLora = Annotated[Lora, AfterValidator(_without_dropout)]
"""Of the stages whose losses compare several passes over the same tokens: dropout would make those differ by itself."""

OFFLOAD = "keep the layers of frozen models of their own in host memory; one at a time visits the device"


def load_rows(data: DataConfig, kind: type, quarantine: Quarantine) -> list[Any]:
    """The rows of a data section as `kind`."""
    return list(read(data.paths, kind, format=data.format, quarantine=quarantine, strict=data.strict, limit=data.limit))
