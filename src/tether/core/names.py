"""Names that a person chose, as parts of a file's name."""

import hashlib
import re

_PLAIN = re.compile(r"\w[\w.-]*")
_LONGEST = 80
"""Bytes; a file system takes 255 for a whole name."""


def file_part(name: str) -> str:
    """The name itself where a file's name can hold it, else its plain characters and a digest;
    other names give other parts.
    """
    if _PLAIN.fullmatch(name) and len(name.encode()) <= _LONGEST:
        return name
    plain = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[: _LONGEST // 2]
    return "-".join(
        filter(
            None,
            (plain, hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:12]),
        ),
    )
