"""Encoded sequences become tensors, validated once.

A `TokenBatch` is one row a sequence, padded on the right, or several sequences a row (packed): models see ids and
positions, everything else looks through flat indices, so nothing downstream knows or cares which it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tether.data.chat import Encoded
from tether.data.packing import pack


@dataclass(frozen=True)
class TokenBatch:
    """Rows of tokens and where to look in them. N counted tokens, S sequences, R the most counted tokens of one.

    ids, positions: (rows, time). Positions restart at 0 where a sequence begins; attention must not cross.
    predict: (N,) flat index into rows × time of the hidden state that predicts each counted token.
    targets: (N,) the counted tokens themselves.
    sequence, step: (N,) the sequence and the index within its counted tokens, for `scatter`.
    last: (S,) flat index of each sequence's last real token.
    """

    ids: Tensor
    positions: Tensor
    packed: bool
    predict: Tensor
    targets: Tensor
    sequence: Tensor
    step: Tensor
    last: Tensor
    num_steps: int

    @property
    def num_sequences(self) -> int:
        return self.last.shape[0]

    @property
    def num_counted(self) -> int:
        return self.targets.shape[0]

    def to(self, device: torch.device | str) -> TokenBatch:
        moved = {k: v.to(device) for k, v in self.__dict__.items() if isinstance(v, Tensor)}
        return replace(self, **moved)

    def scatter(self, values: Tensor) -> Tensor:
        """(N,) values of counted tokens -> (S, R), zeros elsewhere; differentiable."""
        matrix = values.new_zeros(self.num_sequences, self.num_steps)
        return matrix.index_put((self.sequence, self.step), values)

    @property
    def mask(self) -> Tensor:
        """(S, R) True where a sequence has a counted token."""
        return self.scatter(torch.ones_like(self.targets)).bool()


def make_batch(sequences: Sequence[Encoded], pad_id: int, *, capacity: int | None = None) -> TokenBatch:
    """Tensors for `sequences`: one row each, or packed into rows of at most `capacity` tokens.

    Raises:
        ValueError: no sequences, or one that counts its very first token (nothing could predict it).
    """
    if not sequences:
        raise ValueError("a batch needs at least one sequence")
    rows = pack([len(s) for s in sequences], capacity) if capacity else [[i] for i in range(len(sequences))]
    width = max(sum(len(sequences[i]) for i in row) for row in rows)
    packed = any(len(row) > 1 for row in rows)
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    # In a packed row padding positions are all 0: each pad is then a document of its own. In an unpacked row they
    # run on, which keeps the causal mask implicit; under it no real token can see the padding to its right.
    positions = torch.zeros_like(ids) if packed else torch.arange(width).repeat(len(rows), 1)
    predict, targets, owner, step = [], [], [], []
    last = torch.zeros(len(sequences), dtype=torch.long)
    for number, row in enumerate(rows):
        start = 0
        for index in row:
            sequence = sequences[index]
            if not sequence.ids or sequence.trained[0]:
                raise ValueError("a sequence must be non-empty and must not count its first token")
            stop = start + len(sequence)
            ids[number, start:stop] = torch.tensor(sequence.ids)
            if packed:
                positions[number, start:stop] = torch.arange(len(sequence))
            counted = [t for t, counts in enumerate(sequence.trained) if counts]
            predict += [number * width + start + t - 1 for t in counted]
            targets += [sequence.ids[t] for t in counted]
            owner += [index] * len(counted)
            step += range(len(counted))
            last[index] = number * width + stop - 1
            start = stop
    return TokenBatch(
        ids,
        positions,
        packed,
        _long(predict),
        _long(targets),
        _long(owner),
        _long(step),
        last,
        num_steps=max((s.num_trained for s in sequences), default=0),
    )


def _long(values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.long)
