"""Tensors that go from the host to the device of a model, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on that device.

    To a GPU it goes through pinned memory, if available. The copy waits in the GPU's queue, and the
    host continues.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    with suppress(RuntimeError):
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def read_back(rows: Sequence[Mapping[str, Tensor]]) -> list[dict[str, list[float]]]:
    """The numbers of tensors by name, each flat; one copy, and so one wait for a GPU, brings all of
    them.
    """
    tensors = [tensor.detach().double().flatten() for row in rows for tensor in row.values()]
    numbers = iter(torch.cat(tensors).tolist() if tensors else [])
    return [
        {name: list(islice(numbers, tensor.numel())) for name, tensor in row.items()}
        for row in rows
    ]
