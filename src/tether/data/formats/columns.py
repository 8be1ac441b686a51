"""Columns of the user's under the names of a format: plain names, keys inside of objects, places in
lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from tether.core.errors import DataError
from tether.core.types import JsonValue, Row, Texts
from tether.data.formats.json_rows import kind_name
from tether.data.formats.values import structure_in
from tether.settings.synonyms import alike

_INDEX = re.compile(r"-?\d{1,9}")
_NUMBERED = re.compile(
    r"annotator_?\d{1,9}|(quotes|tokens|answer|score|generator|model|output)_[012ab]",
)
OPTIONAL = (
    "system tools images input context history output response completion solution answer "
    "ground_truth final_answer margin tie probability annotations group label kto_tag reward "
    "score score_chosen score_rejected chosen_score rejected_score models generator tests test "
    "kind metadata id task_id question_id prompt_id message_tree_id"
)
"""Names that readers and rewards look for where no format needs them."""


class _AbsentError(Exception):
    """A name leads to nothing; the message says where it ends."""


def renamed(row: Row, columns: Texts) -> Row:
    """The row with its columns under a format's names: {"chosen": "good", "answer":
    "reward_model.ground_truth"}.

    A column of the whole name has precedence over a key inside a column. The other keys of that
    object are named by their path. If another column takes the name of a column of the file, the
    latter becomes "name (of the file)".

    Raises:
        DataError: a name leads to nothing.
    """
    taken = {}
    beside = {}
    passed = set[str]()
    for name, own in columns.items():
        try:
            taken[name], places = _value(row, own, "", beside)
        except _AbsentError as absent:
            raise DataError(f"no column {own!r}, which data.columns names; {absent}") from None
        passed.update(places)
    left = {name: value for name, value in {**row, **beside}.items() if name not in passed}
    return {
        f"{name} (of the file)" if name in taken else name: value for name, value in left.items()
    } | taken


def _value(
    value: object,
    path: str,
    before: str,
    beside: Row,
) -> tuple[JsonValue, list[str]]:
    """The value at a path, and all places on the way. `before` is the path of the start value.

    `beside` gets the values next to these places.
    """
    value = structure_in(value)
    if isinstance(value, list | tuple):
        index, _, rest = path.partition(".")
        if not _INDEX.fullmatch(index) or not -len(value) <= int(index) < len(value):
            raise _AbsentError(f"{before!r} is a list of {len(value)}, whose places count from 0")
        return _inner(
            dict(enumerate(value)),
            int(index) % len(value),
            rest,
            before,
            beside,
        )
    if not isinstance(value, Mapping):
        raise _AbsentError(f"{before!r} holds {kind_name(value)}")
    if path in value:
        return _inner(value, path, "", before, beside)
    deepest: _AbsentError | None = None
    for dot in (match.start() for match in re.finditer(r"\.", path)):
        if path[:dot] in value:
            try:
                return _inner(value, path[:dot], path[dot + 1 :], before, beside)
            except _AbsentError as absent:
                deepest = absent
    names = ", ".join(map(str, value))
    raise deepest or _AbsentError(f"{before!r} holds: {names}" if before else f"there are: {names}")


def _inner(
    values: Mapping[JsonValue, object],
    key: str | int,
    path: str,
    before: str,
    beside: Row,
) -> tuple[JsonValue, list[str]]:
    """The same behind one of these values."""
    place = f"{before}.{key}" if before else str(key)
    reached, places = _value(values[key], path, place, beside) if path else (values[key], [])
    if before:
        beside.update(
            {f"{before}.{other}": value for other, value in values.items() if other != key},
        )
    return reached, [place, *places]


def strange_names(names: Iterable[str], of_formats: Iterable[str]) -> dict[str, str]:
    """The names that no format is said to have, each with the nearest ones; a reader may read one
    of them all the same.

    Args:
        of_formats: the columns that formats need, as `Format.columns` writes them.
    """
    all_names = sorted(
        {*OPTIONAL.split(), *(one for columns in of_formats for one in columns.split("|"))},
    )
    others = (name for name in names if name not in all_names and not _NUMBERED.fullmatch(name))
    return {
        name: alike(name, all_names, most=3) or (f"the names are: {', '.join(all_names)}")
        for name in others
    }
