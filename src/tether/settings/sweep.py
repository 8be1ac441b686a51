"""Sweeps: the combinations of values that some keys of a recipe take."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from itertools import product
from typing import Any

PER_RUN = ("run", "sweep", "track", "on", "learner", "budget")
"""Keys of the whole run, which a sweep cannot vary."""
_PLAIN = re.compile(r"[\w.=,+-]{1,100}")


def swept(table: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Values by dotted key: `{"ppo": {"gamma": [1, 0.9]}}` is `{"ppo.gamma": [1, 0.9]}`."""
    keys: dict[str, list[Any]] = {}
    for key, values in table.items():
        if isinstance(values, Mapping):
            keys |= {f"{key}.{inner}": choices for inner, choices in swept(values).items()}
        else:
            keys[key] = values
    return keys


def sweep_faults(
    table: Mapping[str, Any], missing: Collection[str], *, timed: bool = False
) -> Iterator[str]:
    """Sentences about keys that cannot be swept, and about values that are no list of them.

    Args:
        missing: names of the stages that the recipe lacks.
        timed: the recipe has a budget of the whole run.
    """
    keys = swept(table)
    if timed:
        yield (
            "budget is the time of one run, and sweep makes several: give a stage its budget, "
            "such as ppo.budget"
        )
    if not keys:
        yield "sweep names no key: write one with its values, such as seed = [0, 1, 2]"
    for key, values in keys.items():
        if key.split(".")[0] in PER_RUN:
            yield f"sweep varies {key!r}, which belongs to the whole run. Leave it out"
        if key.split(".")[0] in missing:
            yield f"sweep varies {key!r}, and the recipe has no [{key.split('.')[0]}] section"
        if not isinstance(values, list) or not values:
            yield f"sweep.{key} is a list of values, such as [0.01, 0.05]"
            continue
        texts = [json.dumps(value) for value in values]
        for text in texts:
            if texts.count(text) > 1:
                yield f"sweep.{key} has the value {text} twice: each value makes a run of its own"
                break


def combinations(table: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Every combination: its folder's name, and its overrides in the order of the table."""
    keys = swept(table)
    for values in product(*keys.values()):
        overrides = [f"{key}={json.dumps(value)}" for key, value in zip(keys, values, strict=True)]
        yield _folder(",".join(overrides).replace('"', "")), overrides


def _folder(label: str) -> str:
    """A name that a file system takes; other labels give other names."""
    if _PLAIN.fullmatch(label):
        return label
    plain = re.sub(r"[^\w.=,+-]+", "-", label)[:60].strip("-")
    return f"{plain}-{hashlib.sha256(label.encode()).hexdigest()[:12]}"
