"""Marks of rows that are no demonstrations: a false verdict beside the reply."""

from __future__ import annotations

from tether.data.formats import fields
from tether.data.formats.fields import LeftOutError
from tether.data.formats.json_rows import Row

MARKS = (
    *("label", "kto_tag", "is_correct", "correct", "is_right", "accepted", "is_accepted", "is_good", "desirable", "is_desirable"),
    *(
        "passed",
        "is_passed",
        "valid",
        "is_valid",
        "verified",
        "is_verified",
        "approved",
        "is_safe",
        "is_response_safe",
        "thumbs_up",
    ),
)
"""Columns with a verdict on the reply of their row. A graded score is no verdict and stays unread."""
_VERDICTS = {"true": True, "1": True, "1.0": True, "yes": True, "false": False, "0": False, "0.0": False, "no": False}


def refuse_bad_reply(row: Row) -> None:
    """Leave a row out whose mark is false; a mark of another content than a verdict is not read.

    Raises:
        LeftOutError: a mark is false.
    """
    for name in MARKS:
        verdict = _VERDICTS.get(str(dict.get(row, name)).strip().lower())
        if verdict is not None and not fields.boolean(row[name], name):
            raise LeftOutError(f"marked as bad: column {name} is false, and demonstrations are imitated")
