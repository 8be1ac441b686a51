"""A short name for a content."""

from __future__ import annotations

import hashlib
import json


def digest(value: object) -> str:
    """A short content hash of any JSON value: equal configs have equal digests."""
    text = json.dumps(value, sort_keys=True, default=str, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
