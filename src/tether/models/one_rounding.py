"""W x + B A x in half precision, where the sum is rounded once, and so is its gradient.

A bfloat16 W loses a part of B A if both are merged. W x loses the same part of B A x if it is
rounded before the sum.
So both products are added in float32. A CPU does this within `addmm`. On a GPU the larger product
is written in float32, because `addmm` may round there before it adds. A gradient is a product of
the same kind, with the matrices in reverse.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tether.algorithms.autograd import AutogradContext


def product_with_change(states: Tensor, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """x W + (x A) B, rounded once: (..., inputs) -> (..., outputs).

    Args:
        weight: (inputs, outputs), in the type of the states.
        down: (inputs, rank), frozen.
        up: (rank, outputs), frozen.
    """
    return _ProductWithChange.apply(states, weight, down, up)


def rounded_once(rows: Tensor, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """x W + (x A) B of rows (N, inputs), in their type.

    (x A) B is rounded before, which costs one part in 256 of the change.
    """
    change = rows @ down @ up
    if rows.device.type != "cuda":
        return torch.addmm(change, rows, weight)
    whole = torch.mm(rows, weight, out_dtype=torch.float32)
    # one kernel: read, add in float32, round, write
    return torch.add(whole, change, out=change)


class _ProductWithChange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        states: Tensor,
        weight: Tensor,
        down: Tensor,
        up: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(states if weight.requires_grad else None, weight, down, up)
        whole = rounded_once(states.flatten(0, -2), weight, down, up)
        return whole.view(*states.shape[:-1], -1)

    @staticmethod
    def backward(ctx: AutogradContext, slope: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, down, up = ctx.saved_tensors
        rows = slope.flatten(0, -2)
        before = own = None
        if ctx.needs_input_grad[0]:
            before = rounded_once(rows, weight.T, up.T, down.T).view(*slope.shape[:-1], -1)
        if states is not None:
            own = states.flatten(0, -2).T @ rows
        return before, own, None, None
