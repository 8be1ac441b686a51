"""The names of other libraries, as synonyms.toml has them, and names that are written alike."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tether.core.types import Facts

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _by_word(table: Mapping[str, str]) -> dict[str, str]:
    return {word: meaning for words, meaning in table.items() for word in words.split()}


def did_you_mean(names: Sequence[str]) -> str:
    """A question that offers these names; empty without any."""
    return f"did you mean {' or '.join(map(repr, names))}?" if names else ""


def alike(word: str, names: Iterable[str], *, most: int = 1, cutoff: float = 0.5) -> str:
    """The same for the names that are written almost as `word`."""
    return did_you_mean(difflib.get_close_matches(word, list(names), n=most, cutoff=cutoff))


METHODS: dict[str, tuple[str, str, str]] = {
    name: (row[0], row[1], row[2]) for name, row in _TABLES["methods"].items()
}
"""A method that is a value in a section of another name: the section, the key, the value."""


def shown_name(section: str, settings: Facts) -> str:
    """The name of a stage for people: that of the method that its settings make it (`dpo`)."""
    own = (
        name
        for name, (of, key, value) in METHODS.items()
        if of == section and settings.get(key) == value
    )
    return next(own, section)


SECTIONS: dict[str, str] = _TABLES["sections"]
"""Other names of a section, and of its command."""
COMMANDS: dict[str, str] = _TABLES["commands"]
"""Other names of a command."""
KEYS = {word: tuple(targets.split()) for word, targets in _by_word(_TABLES["keys"]).items()}
"""Other names of a key: what it may be here, from its section or from the recipe's root, the first
that is there.
"""
NOTES = _by_word(_TABLES["notes"])
"""Words without a key, or whose values differ here, and the advice for each."""
TRAINERS: dict[str, str] = _TABLES["trainers"]
"""TRL's trainers in small letters, and the section of each."""
FOREIGN = _TABLES["foreign"]
"""Arguments of TRL's trainers, and what they are here."""
