"""Sweeps: the combinations of values that some keys of a recipe take."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product

from tether.core.errors import ConfigError
from tether.core.types import Entries, Json, JsonValue
from tether.settings.reading import toml_value

PER_RUN = ("run", "sweep", "track", "on", "learner", "budget")
"""Keys of the whole run, which a sweep cannot vary."""
MOST = 10_000
"""Combinations of a sweep."""
_PLAIN = re.compile(r"[\w.=,+-]{1,100}")


def swept(table: Entries) -> dict[str, list[JsonValue]]:
    """Values by dotted key: `{"ppo": {"gamma": [1, 0.9]}}` is `{"ppo.gamma": [1, 0.9]}`."""
    return dict(_pairs(table))


def _pairs(table: Entries) -> Iterator[tuple[str, JsonValue]]:
    for key, values in table.items():
        if isinstance(values, Mapping):
            yield from ((f"{key}.{inner}", choices) for inner, choices in _pairs(values))
        else:
            yield key, values


def sweep_faults(
    table: Entries,
    missing: Collection[str],
    *,
    timed: bool = False,
) -> Iterator[str]:
    """Sentences about keys that cannot be swept, and about values that are no list of them.

    Args:
        missing: names of the stages that the recipe lacks.
        timed: the recipe has a budget of the whole run.
    """
    names = [key for key, _ in _pairs(table)]
    keys = swept(table)
    if timed:
        yield (
            "budget is the time of one run, and sweep makes several: give a stage its budget, "
            "such as ppo.budget"
        )
    if not keys:
        yield "sweep names no key: write one with its values, such as seed = [0, 1, 2]"
    if math.prod(len(values) for values in keys.values() if isinstance(values, list)) > MOST:
        yield f"sweep has more than {MOST:,} combinations: give fewer values"
        return
    for key, values in keys.items():
        if names.count(key) > 1:
            yield f"sweep has {key!r} twice: write all of its values in one list"
        if outer := next((name for name in names if key.startswith(f"{name}.")), None):
            yield f"sweep varies {outer!r} and {key!r}, which is part of it. Leave one of them out"
        first = key.partition(".")[0]
        if first in PER_RUN:
            yield f"sweep varies {key!r}, which belongs to the whole run. Leave it out"
        if first in missing:
            yield f"sweep varies {key!r}, and the recipe has no [{first}] section"
        if not isinstance(values, list) or not values:
            yield f"sweep.{key} is a list of values, such as [0.01, 0.05]"
            continue
        texts = [json.dumps(value) for value in values]
        for text in texts:
            if texts.count(text) > 1:
                yield f"sweep.{key} has the value {text} twice: each value makes a run of its own"
                break


def combinations(table: Entries) -> Iterator[tuple[str, Json]]:
    """Every combination: its folder's name, and the value of each key in the order of the table.

    No two have one name, although names lack the quotes of texts: 1 and "1" are two values.
    """
    keys = swept(table)
    names = set()
    for values in product(*keys.values()):
        chosen = dict(zip(keys, values, strict=True))
        label = ",".join(f"{key}={json.dumps(value)}" for key, value in chosen.items())
        name = _folder(label.replace('"', ""))
        if name in names:
            name = _folder(f"{label}, quoted")
        names.add(name)
        yield name, chosen


def _folder(label: str) -> str:
    """A name that a file system takes; other labels give other names."""
    if _PLAIN.fullmatch(label):
        return label
    plain = re.sub(r"[^\w.=,+-]+", "-", label)[:60].strip("-")
    return f"{plain}-{hashlib.sha256(label.encode()).hexdigest()[:12]}"


def sweep_overrides(words: Sequence[str]) -> list[str]:
    """The overrides for the [sweep] table of a command line. A word with one value is an override
    as it is; a word without = stays.

    Args:
        words: `KEY=VALUE,VALUE`, `KEY=VALUE` and names of stages.

    Raises:
        ConfigError: a key is given twice, or has an empty value.
    """
    overrides = []
    keys = []
    for word in words:
        key, separator, raw = word.partition("=")
        if not separator:
            overrides.append(word)
            continue
        values = _values_of(raw)
        if not all(values):
            raise ConfigError(
                f"{word!r} has an empty value: give values with commas between them, such as "
                f"{key or 'ppo.kl.coefficient'}=0,0.05",
            )
        keys.append(key.strip().lstrip("-"))
        if keys.count(keys[-1]) > 1:
            raise ConfigError(f"{keys[-1]} is given twice: write all of its values in one {key}=")
        overrides.append(f"sweep.{keys[-1]}=[{', '.join(values)}]" if len(values) > 1 else word)
    return overrides


def _values_of(raw: str) -> list[str]:
    """The values between the commas of a text, each in TOML; commas within brackets and quotes
    belong to a value.
    """
    values = []
    begun = ""
    for part in raw.split(","):
        begun = f"{begun},{part}" if begun else part
        if toml_value(begun) is not None or not re.match(r"""\s*[\[{"']""", begun):
            values.append(begun)
            begun = ""
    values += begun.split(",") if begun else []
    return [
        text if not text or toml_value(text) is not None else json.dumps(text, ensure_ascii=False)
        for text in map(str.strip, values)
    ]


def idle_override(table: Entries, overrides: Sequence[str]) -> str:
    """The sentence on an override of a key that the sweep varies; empty: there is none."""
    for word in overrides:
        key = word.partition("=")[0].strip().lstrip("-")
        if outer := next((k for k in swept(table) if f"{key}.".startswith(f"{k}.")), None):
            return (
                f"{word!r} has no effect: the sweep varies {outer}. Give its values as "
                f"sweep.{outer}=[...], or as {outer}=VALUE,VALUE of tether sweep"
            )
    return ""
