"""Defaults of former versions: a stage continues with the defaults with which it began.

A run's `config.json` holds every setting of a stage. A key that its version did not have is absent
there; `BEFORE` has what that version did.
"""

from __future__ import annotations

import json

from pydantic import ValidationError

from tether.core.rundir import MAY_CHANGE
from tether.core.types import Json, JsonValue
from tether.settings.config import Config, ConfigT, layered
from tether.settings.needs import needs_of
from tether.settings.reading import set_key

BEFORE: Json = {
    # an adaptive coefficient had no bounds
    "kl.max_factor": 1e18,
    # a judging function got all answers in one call without a limit
    "judge.batch": 2**31,
    "judge.time_limit": 1e6,
    "judge.dump_after": 1e6,
    # weights were float32 on every device
    "classifier.dtype": "float32",
    # a text that a template had rendered was one turn
    "model.rendered_texts": "keep",
}
"""The value without a key, by the key with the name of its table, where it differs from the present
default.
"""


FormerDefaults = dict[str, tuple[JsonValue, JsonValue]]
"""The former and the present default of each key of a section, by its dotted name."""


def former_defaults(config: Config, began: Json, named: Json, table: str) -> FormerDefaults:
    """The defaults with which a stage began and that are others now.

    Args:
        config: the present settings.
        began: the settings in the stage's config.json.
        named: the tables of keys that the recipe named at the stage's start, or names now.
        table: the name of the section, or of the table in it.
    """
    now = json.loads(config.model_dump_json())
    changed: FormerDefaults = {}
    for key, value in now.items():
        inner, before, own = getattr(config, key), began.get(key, value), named.get(key)
        if key in MAY_CHANGE:
            continue
        if isinstance(inner, Config) and isinstance(before, dict):
            within = former_defaults(inner, before, own if isinstance(own, dict) else {}, key)
            changed |= {f"{key}.{name}": values for name, values in within.items()}
        elif key not in named:
            if key not in began and _has_effect(config, key):
                before = BEFORE.get(f"{table}.{key}", value)
            changed |= {key: (before, value)} if before != value else {}
    return changed


def _has_effect(config: Config, key: str) -> bool:
    """True if the conditions of a key hold."""
    return all(needs.holds(config) for needs in needs_of(type(config).model_fields[key].metadata))


def put_former_defaults(config: ConfigT, former: FormerDefaults) -> ConfigT:
    """The settings with former defaults in place of present ones. Keys that the settings name
    stay.
    """
    below: Json = {}
    for key, (before, _) in former.items():
        set_key(below, key, before, key)
    try:
        given = config.model_dump(exclude_unset=True)
        return type(config).model_validate(layered(below, given))
    except ValidationError:
        # RunDirectory.open names a value that no version allows now, with the other differences
        return config
