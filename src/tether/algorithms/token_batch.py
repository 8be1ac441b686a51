"""Rows of tokens, and flat indices that say where to look in them: what models read and losses
gather from.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from tether.algorithms.transfer import to_device


@dataclass(frozen=True)
class TokenBatch:
    """Rows of tokens and the places to read in them. N counted tokens, S sequences, R the most
    counted tokens of one.

    - ids, positions: (rows, time). Positions restart at 0 where a document begins; attention must
      not cross.
    - belongs: (3, rows, time), if a row holds more than one sequence. For every token its document,
      its prompt (0: common to all of the document) and its answer (0: none). None: one sequence a
      row.
    - predict: (N,) flat index into rows × time of the hidden state that predicts each counted
      token.
    - targets: (N,) the counted tokens themselves.
    - sequence, step: (N,) the sequence and the index within its counted tokens, for `scatter`.
    - last: (S,) flat index of each sequence's last real token.
    - places: flat index of every real token of every sequence, one sequence after another. A token
      that sequences share occurs once for each.
    """

    ids: Tensor
    positions: Tensor
    belongs: Tensor | None
    predict: Tensor
    targets: Tensor
    sequence: Tensor
    step: Tensor
    last: Tensor
    places: Tensor
    num_steps: int

    def to(self, device: torch.device | str) -> TokenBatch:
        """The same there; to a GPU all numbers go in one copy."""
        place = torch.device(device)
        names = [one.name for one in fields(self)]
        tensors = {
            name: value for name in names if isinstance(value := self.__dict__[name], Tensor)
        }
        if place.type != "cuda":
            return replace(self, **{name: tensor.to(place) for name, tensor in tensors.items()})
        flat = to_device(torch.cat([tensor.flatten() for tensor in tensors.values()]), place)
        parts = flat.split([tensor.numel() for tensor in tensors.values()])
        return replace(
            self,
            **{
                name: part.view(tensors[name].shape)
                for name, part in zip(tensors, parts, strict=True)
            },
        )

    @cached_property
    def visible(self) -> Tensor | None:
        """(rows, 1, time, time) True where a query may see a key: an earlier one of its document
        that is common or its own.

        None: every earlier one. Padding sees its own document, -1.
        """
        if self.belongs is None:
            return None
        document, prompt, answer = self.belongs
        time = document.shape[1]
        seen = document[:, :, None] == document[:, None, :]
        for part in (prompt, answer):
            seen &= (part[:, None, :] == 0) | (part[:, :, None] == part[:, None, :])
        return (torch.ones(time, time, dtype=torch.bool, device=document.device).tril() & seen)[
            :,
            None,
        ]

    def scatter(self, values: Tensor) -> Tensor:
        """(N,) values of counted tokens -> (S, R), zeros elsewhere; differentiable."""
        matrix = values.new_zeros(len(self.last), self.num_steps)
        return matrix.index_put((self.sequence, self.step), values)

    @property
    def mask(self) -> Tensor:
        """(S, R) True where a sequence has a counted token."""
        return self.scatter(torch.ones_like(self.targets)).bool()
