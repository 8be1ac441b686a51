"""Settings of a recipe on time."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, PositiveFloat

from tether.settings.config import Config


class BudgetConfig(Config):
    """Wall-clock time after which a training ends."""

    minutes: PositiveFloat = Field(
        description="of all starts together; evaluation, saving and the report count",
    )


def _minutes(value: float | BudgetConfig | None) -> object:
    """A bare number means minutes."""
    return (
        {"minutes": value}
        if isinstance(value, int | float) and not isinstance(value, bool)
        else value
    )


Budget = Annotated[BudgetConfig | None, BeforeValidator(_minutes)]
