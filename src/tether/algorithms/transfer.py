"""Tensors that go from the host to the device of a model."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on that device.

    To a GPU it goes through pinned memory: the copy takes its turn behind the GPU's other work, and the host goes on.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
