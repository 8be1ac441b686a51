"""The names of other libraries, as synonyms.toml has them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _by_word(table: Mapping[str, str]) -> dict[str, str]:
    return {word: meaning for words, meaning in table.items() for word in words.split()}


METHODS: dict[str, tuple[str, str, str]] = {name: (row[0], row[1], row[2]) for name, row in _TABLES["methods"].items()}
"""A method that is a value in a section of another name: the section, the key, the value."""
SECTIONS: dict[str, str] = _TABLES["sections"]
"""Other names of a section, and of its command."""
COMMANDS: dict[str, str] = _TABLES["commands"]
"""Other names of a command."""
KEYS = {word: tuple(targets.split()) for word, targets in _by_word(_TABLES["keys"]).items()}
"""Other names of a key: what it may be here, from its section or from the recipe's root, the first that is there."""
NOTES = _by_word(_TABLES["notes"])
"""What has no key of its own, and what to do instead."""
