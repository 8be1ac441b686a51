"""A forward pass that is known to hold one sequence a row.

Given positions and no mask, transformers looks through them for packed rows, and the host waits for a GPU's answer in every pass.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from transformers import masking_utils

_pass = threading.local()
_search = masking_utils.find_packed_sequence_indices


def _packed_rows(position_ids: Tensor) -> Tensor | None:
    return None if _pass.__dict__.get("unpacked", False) else _search(position_ids)


masking_utils.find_packed_sequence_indices = _packed_rows


@contextmanager
def unpacked(known: bool) -> Iterator[None]:
    """Within this block of this thread no packed rows are looked for, if there are none."""
    before = _pass.__dict__.get("unpacked", False)
    _pass.unpacked = known
    try:
        yield
    finally:
        _pass.unpacked = before
