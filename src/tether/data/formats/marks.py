"""Columns that decide whether a row can be used at all: pictures and sound beside its text, a false
verdict on its reply.
"""

from __future__ import annotations

from tether.core.errors import DataError
from tether.data.formats import fields
from tether.data.formats.fields import LeftOutError
from tether.data.formats.json_rows import Row

MARKS = (
    "label",
    "kto_tag",
    "is_correct",
    "correct",
    "is_right",
    "accepted",
    "is_accepted",
    "is_good",
    "desirable",
    "is_desirable",
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
)
"""Columns with a verdict on the reply of their row. A graded score is no verdict and stays
unread.
"""
_VERDICTS = {
    "true": True,
    "1": True,
    "1.0": True,
    "yes": True,
    "false": False,
    "0": False,
    "0.0": False,
    "no": False,
}


def refuse_bad_reply(row: Row) -> None:
    """Leave a row out whose mark is false; a mark of another content than a verdict is not read.

    Raises:
        LeftOutError: a mark is false.
    """
    for name in MARKS:
        verdict = _VERDICTS.get(str(dict.get(row, name)).strip().lower())
        if verdict is not None and not fields.boolean(row[name], name):
            raise LeftOutError(
                f"marked as bad: column {name} is false, and demonstrations are imitated",
            )


_MEDIA = ("image", "images", "audio", "audios", "video", "videos")


def refuse_media(row: Row) -> None:
    """Refuse a row with pictures, sound or film beside its text.

    Raises:
        DataError: a column of such a name holds something; a text alone may be a mere label of the
            row.
    """
    for name in _MEDIA:
        value = dict.get(row, name)
        is_label = isinstance(value, bool | int | float) or (
            isinstance(value, str) and name[-1] != "s"
        )
        # the mark of its place in a text
        is_shown = any(f"<{name}>" in str(other) for other in dict.values(row))
        if fields.filled(row, name) and (is_shown or not is_label):
            raise DataError(
                f"not a text: column {name} holds more than text, and only text is "
                "read. Leave such rows out",
            )
