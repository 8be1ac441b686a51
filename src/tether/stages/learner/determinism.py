"""Kernels that give the same bits every time, or an error that names the one that cannot."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import deterministic as _switches

from tether.core.errors import TrainingError

_FILLING: Any = _switches
"""torch's module that says whether fresh tensors are filled under the switch, which costs time and
orders nothing.
"""
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_REFUSED = re.compile(r"^(.+?) does not have a deterministic implementation")


@contextmanager
def deterministic() -> Iterator[None]:
    """In this block torch takes deterministic kernels alone
    (https://docs.pytorch.org/docs/stable/notes/randomness.html).

    Raises:
        TrainingError: a kernel has no deterministic variant on this device; it is named.

    The trap: cuBLAS reads its setting when CUDA starts, so open the block before anything is on a
    GPU.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    workspace = os.environ.get(WORKSPACE)
    os.environ.setdefault(WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        with torch.backends.cudnn.flags(
            enabled=torch.backends.cudnn.enabled,
            benchmark=False,
            deterministic=True,
        ):
            yield
    except RuntimeError as error:
        if (refused := _REFUSED.match(str(error))) is None and "CuBLAS" not in str(error):
            raise
        kernel = refused[1] if refused else "cuBLAS, whose workspace was chosen before"
        raise TrainingError(
            f"{kernel} has no deterministic variant here, and deterministic = true asks for one. "
            "Leave it out, run this stage "
            "on a CPU, or choose settings that do without that kernel (docs/trust/determinism.md)",
        ) from error
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        if workspace is None:
            os.environ.pop(WORKSPACE, None)


@contextmanager
def ordered_sums(device: torch.device) -> Iterator[None]:
    """In this block a CPU adds up the gradients of rows that were indexed several times in one
    order.

    Answers to one prompt share its last state, and a token's experts share the token. With several
    threads, torch adds such shares in float32 in the order in which the threads finish. So the load
    of the machine decides the last bits. A switch of torch fixes the order, at no cost. For
    accelerators, see `deterministic`.
    """
    if device.type != "cpu" or torch.are_deterministic_algorithms_enabled():
        yield
        return
    fills = _FILLING.fill_uninitialized_memory
    _FILLING.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        _FILLING.fill_uninitialized_memory = fills
