"""A forward pass that is known to hold one sequence a row.

With positions and without a mask, transformers searches them for packed rows. The host then waits
for a GPU's answer in every pass.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache


class _Pass(threading.local):
    unpacked = False


_PASS = _Pass()


@contextmanager
def unpacked(rows: bool) -> Iterator[None]:
    """Within this block of this thread transformers looks for no packed rows, where all `rows` are
    single sequences.
    """
    _put_in_place()
    before = _PASS.unpacked
    _PASS.unpacked = rows
    try:
        yield
    finally:
        _PASS.unpacked = before


@cache
def _put_in_place() -> None:
    from transformers import masking_utils

    search = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: (
        None if _PASS.unpacked else search(position_ids)
    )
