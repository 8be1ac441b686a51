"""The names of other libraries, as synonyms.toml has them, and names that are written alike."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from tether.core.tables import table_beside
from tether.core.types import Facts

_ROWS = table_beside(__file__, "synonyms.toml")


Advice = dict[str, dict[str, str]]
"""Texts by word, then by the sections or keys that a text is for; an empty name: everywhere."""


def _by_word(table: Mapping[str, str]) -> Advice:
    """The texts of a table whose rows begin with `words` or with `places: words`."""
    texts: Advice = {}
    for row, text in table.items():
        places, _, words = row.rpartition(":")
        for word in words.split():
            texts.setdefault(word, {}).update(dict.fromkeys(places.split() or [""], text))
    return texts


def advice(table: Advice, word: str, places: Sequence[str] = ()) -> str:
    """The text for a word in these places, the innermost first; without places, all texts that it
    has.
    """
    texts = table.get(word, {})
    own = [texts[place] for place in [*reversed(places), ""] if place in texts]
    if places:
        return next(iter(own), "")
    homes = {
        text: [f"[{place}]" for place in texts if texts[place] == text] for text in texts.values()
    }
    general = [text for text in homes if text == texts.get("")]
    return "; ".join(
        general + [f"in {', '.join(homes[text])}: {text}" for text in homes if text not in general],
    )


def did_you_mean(names: Sequence[str]) -> str:
    """A question that offers these names; empty without any."""
    return f"did you mean {' or '.join(map(repr, names))}?" if names else ""


def alike(word: str, names: Iterable[str], *, most: int = 1, cutoff: float = 0.5) -> str:
    """The same for the names that are written almost as `word`; of two that are equally near, the
    one with its first letter.
    """
    nearest = [
        (difflib.SequenceMatcher(None, name, word).ratio(), name[:1] == word[:1], name)
        for name in names
    ]
    matches = sorted((one for one in nearest if one[0] >= cutoff), reverse=True)
    return did_you_mean([name for *_, name in matches[:most]])


METHODS: dict[str, tuple[str, str, str]] = {
    name: (row[0], row[1], row[2]) for name, row in _ROWS["methods"].items()
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


SECTIONS: dict[str, str] = _ROWS["sections"]
"""Other names of a section, and of its command."""
COMMANDS: dict[str, str] = _ROWS["commands"]
"""Other names of a command."""
KEYS = {
    word: tuple(targets.split())
    for words, targets in _ROWS["keys"].items()
    for word in words.split()
}
"""Other names of a key: what it may be here, from its section or from the recipe's root, the first
that is there.
"""
NOTES = _by_word(_ROWS["notes"])
"""Words without a key, or whose values differ here, and the advice for each in its sections."""
VALUES = _by_word(_ROWS["values"])
"""Values of other libraries, and the advice for each by the key that has it."""
TRAINERS: dict[str, str] = _ROWS["trainers"]
"""TRL's trainers in small letters, and the section of each."""


def trainers_function(name: str) -> str:
    """The function of `tether` for such a name, `dpo` for DPOTrainer; empty: there is none."""
    match = re.match(r'\[(\w+)\](?: with \w+ = "(\w+)")?', trainers_section(name))
    return (
        next((one for one in reversed(match.groups()) if one in {*METHODS, match[1]}), "")
        if match
        else ""
    )


def trainers_section(name: str) -> str:
    """The section for the name of a TRL trainer or of its configuration; empty: there is none."""
    return TRAINERS.get(name.lower().removesuffix("config").removesuffix("trainer") + "trainer", "")


FOREIGN = _by_word(_ROWS["foreign"])
"""Arguments of TRL's trainers, and what they are here, in which section."""
