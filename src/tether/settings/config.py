"""The base of all settings: frozen, nothing unknown, and each default where it belongs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Annotated, ClassVar, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tether.core.types import Entries, Facts, Json, JsonValue
from tether.settings.needs import unmet

RECIPE = "recipe"
"""The context in which a text that a person wrote is validated; code may say infinity."""


FromOne = Annotated[int, Field(ge=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
"""A share that leaves something over."""
UpToOne = Annotated[float, Field(gt=0, le=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
_NUMBERS = (int, float, int | None, float | None)


class Layered(Json):
    """A table on top of defaults; `below` names the keys that come from those alone."""

    below: frozenset[str] = frozenset()


def layered(below: Facts, above: Facts) -> Layered:
    """The table `above` on top of the defaults `below`, tables within tables too."""
    both = Layered({**below, **above})
    for key, table in below.items():
        over = above.get(key, {})
        if isinstance(table, Mapping) and isinstance(over, Mapping):
            both[key] = layered(table, over)
    given = above.keys() - getattr(above, "below", frozenset())
    both.below = frozenset(both.keys() - given)
    return both


class Config(BaseModel):
    """The base of every config: frozen, an unknown key is an error, true is no number, and what a
    recipe says is finite.

    A table in which some keys are given keeps, for the others, the defaults of the place where it
    belongs.
    """

    table: ClassVar[str] = ""
    """The table's name before a key in messages, such as "kl."."""
    checked_by_owner: ClassVar[bool] = False
    """The section that holds this table fills its defaults, so it checks the conditions too."""
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, defer_build=True)

    @field_validator("*", mode="before")
    @classmethod
    def _number(cls, value: object, info: ValidationInfo) -> JsonValue:
        if (
            isinstance(value, bool)
            and cls.model_fields[info.field_name or ""].annotation in _NUMBERS
        ):
            raise ValueError("a number belongs here")
        if info.context == RECIPE and isinstance(value, int | float) and not abs(value) < 2**63:
            raise ValueError("the number must be finite and smaller than 2**63")
        return value

    @classmethod
    def preset(cls, given: Entries) -> Facts:
        """Defaults that depend on what is given; they come before those of the fields."""
        return {}

    @model_validator(mode="wrap")
    @classmethod
    def _fill(cls, values: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Lay this place's defaults under each table of `values`. Only what was given counts as
        set, and must have an effect.
        """
        if not isinstance(values, Mapping):
            return handler(values)
        defaults = {
            name: field.default
            for name, field in cls.model_fields.items()
            if isinstance(field.default, Config)
        }
        own = {
            name: default.model_dump(exclude_unset=True)
            for name, default in defaults.items()
            if name in values
        }
        below = layered({name: table for name, table in own.items() if table}, cls.preset(values))
        given = Layered(values)
        for name in below.keys() & defaults.keys() & given.keys():
            if type(given[name]) is type(defaults[name]):
                given[name] = given[name].model_dump(exclude_unset=True)
        given.below = getattr(values, "below", frozenset())
        both = layered(below, given)
        config = handler(both)
        config.model_fields_set.difference_update(both.below)
        return config

    @model_validator(mode="after")
    def _check_faults(self) -> Self:
        own = (
            vars(kind)["faults"](self)
            for kind in reversed(type(self).__mro__)
            if "faults" in vars(kind)
        )
        for fault in chain(self._unmet(), chain.from_iterable(own)):
            raise ValueError(fault)
        return self

    def _unmet(self) -> Iterator[str]:
        """Conditions of fields that do not hold, here and in tables that this section checks."""
        if not self.checked_by_owner:
            yield from unmet(self, self.table)
        for name in type(self).model_fields:
            table = getattr(self, name)
            if isinstance(table, Config) and table.checked_by_owner:
                yield from unmet(table, table.table)

    def faults(self) -> Iterator[str]:
        """Settings that do not go together and that no condition of a field (`Needs`) can express,
        in a sentence each. The first is the error.

        Each class reports the faults of its own settings, after those of its base classes.
        """
        yield from ()

    def idle(self, *options: str, because: str, table: str = "") -> Iterator[str]:
        """A fault for each of these options that was set, where none of them has an effect;
        `table`: what holds them.
        """
        for option in options:
            if option in self.model_fields_set:
                yield f"{table}{option} has no effect {because}"


ConfigT = TypeVar("ConfigT", bound=Config)
