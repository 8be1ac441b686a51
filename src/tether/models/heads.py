"""Heads: one number from a hidden state, or one for each class."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class ScalarHead(nn.Module):
    """dropout -> linear -> one number, in float32 whatever the trunk's dtype.

    A value head starts at zero: it predicts nothing before it has learned something. A reward head
    starts from N(0, 1/sqrt(dim + 1)) as in https://github.com/openai/lm-human-preferences. `offset`
    and `scale` are not trained. They centre and scale finished scores, because a reward is defined
    up to an affine map.

    Args:
        outputs: number of outputs; more than one gives the result a last dimension of them.
    """

    offset: Tensor
    scale: Tensor

    def __init__(
        self,
        dim: int,
        *,
        zero: bool = True,
        dropout: float = 0.0,
        seed: int = 0,
        outputs: int = 1,
    ) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(dim, outputs, dtype=torch.float32)
        nn.init.zeros_(self.linear.bias)
        if zero:
            nn.init.zeros_(self.linear.weight)
        else:
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                self.linear.weight.normal_(0.0, 1.0 / math.sqrt(dim + 1), generator=generator)
        self.register_buffer("offset", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))

    @property
    def outputs(self) -> int:
        return self.linear.out_features

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., dim) -> (...), or (..., outputs) of several."""
        raw = self.linear(self.dropout(hidden.to(self.linear.weight.dtype)))
        return ((raw.squeeze(-1) if self.outputs == 1 else raw) - self.offset) * self.scale

    def only(self, output: int) -> ScalarHead:
        """A head of one of the outputs alone."""
        head = ScalarHead(self.linear.in_features, dropout=self.dropout.p).to(
            self.linear.weight.device,
        )
        row = {
            name: values[output : output + 1]
            for name, values in self.linear.state_dict(prefix="linear.").items()
        }
        head.load_state_dict({**self.state_dict(), **row})
        return head.train(self.training)
