"""Settings of the detectors that watch a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from pydantic import Field, NonNegativeInt, field_validator

from tether.core.tables import table_beside
from tether.core.types import JsonValue
from tether.settings.config import Config, FromOne, UpToOne
from tether.settings.synonyms import alike

CHECK_ROWS = table_beside(__file__, "detectors.toml")
"""By the name of a check on the steps of a run: its threshold, message and advice."""
DETECTOR_ROWS = {name: row for name, row in CHECK_ROWS.items() if "severity" not in row}
"""Those that are asked while a run trains. The others wait for its log, and tell of its set-up."""


class WatchConfig(Config):
    """Settings of a watch: the steps that it compares, and where alarms begin and end."""

    baseline: FromOne = Field(
        default=3,
        description="first steps that everything later is compared with",
    )
    window: int = Field(
        default=3,
        ge=3,
        description="last steps that are judged together, by their median",
    )
    release: UpToOne = Field(
        default=0.8,
        description="an episode ends below this share of the threshold",
    )
    thresholds: dict[str, float] = Field(
        default={},
        description="thresholds other than a detector's own, by its name",
    )
    silent: tuple[str, ...] = Field(default=(), description="detectors that are left out")
    num_evidence: NonNegativeInt = Field(default=3, description="texts shown with an alarm")

    @field_validator("thresholds", "silent")
    @classmethod
    def _known(cls, values: JsonValue) -> JsonValue:
        for name in values:
            if name not in DETECTOR_ROWS:
                hint = alike(name, DETECTOR_ROWS) or f"known: {', '.join(DETECTOR_ROWS)}"
                raise ValueError(f"no detector is named {name!r} ({hint})")
            if isinstance(values, dict) and not 0 < values[name] < math.inf:
                raise ValueError(
                    f"the threshold of {name} must be above 0 and finite; to leave "
                    "it out name it in `silent`",
                )
        return values


class WatchSection(WatchConfig):
    """The detectors, which are always on, and what is done when one fires, beside writing it
    down.
    """

    act: dict[str, Literal["stop", "raise_kl"]] = Field(
        default={},
        description="by detector: end the training, or double the KL coefficient",
    )

    def faults(self) -> Iterator[str]:
        for name in self.act:
            if name not in DETECTOR_ROWS or name in self.silent:
                yield (
                    f"act names {name!r}, which is no detector that is asked; there are: "
                    f"{', '.join(DETECTOR_ROWS)}"
                )
