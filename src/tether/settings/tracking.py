"""Names of the trackers that show a run too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


def _several(names: TrackerName | Sequence[TrackerName]) -> Sequence[str]:
    """One name means a list of one."""
    return [names] if isinstance(names, str) else names


TrackerNames = Annotated[tuple[TrackerName, ...], BeforeValidator(_several)]
