"""Encoded sequences become tensors, validated once.

A `TokenBatch` has one sequence a row, padded on the right, or several (packed documents, or several answers to one prompt that
stands there once): models see ids, positions and perhaps a mask, everything else looks through flat indices, so nothing
downstream knows or cares which it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tether.data.chat import Encoded
from tether.data.packing import cut_by_tokens, pack

WIDTH_MULTIPLE = 8
"""Rows are padded to a multiple of this: every new shape costs the matrix kernels a set-up, and memory, of their own."""


@dataclass(frozen=True)
class TokenBatch:
    """Rows of tokens and where to look in them. N counted tokens, S sequences, R the most counted tokens of one.

    ids, positions: (rows, time). Positions restart at 0 where a document begins; attention must not cross.
    visible: (rows, 1, time, time), True where a query may see a key, if answers share a prompt; None: positions say it all.
    predict: (N,) flat index into rows × time of the hidden state that predicts each counted token.
    targets: (N,) the counted tokens themselves.
    sequence, step: (N,) the sequence and the index within its counted tokens, for `scatter`.
    last: (S,) flat index of each sequence's last real token.
    """

    ids: Tensor
    positions: Tensor
    visible: Tensor | None
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


def make_batch(
    sequences: Sequence[Encoded], pad_id: int, *, capacity: int | None = None, share_prompts: bool = False
) -> TokenBatch:
    """Tensors for `sequences`: one row each, or packed into rows of at most `capacity` tokens.

    Args:
        share_prompts: sequences that begin with the same uncounted tokens become one document: the prompt once, then every
            answer, which sees the prompt and itself (the prefix tree of https://arxiv.org/abs/2506.05433).

    Raises:
        ValueError: no sequences, or one that counts its very first token (nothing could predict it).
    """
    if not sequences:
        raise ValueError("a batch needs at least one sequence")
    if any(not s.ids or s.trained[0] for s in sequences):
        raise ValueError("a sequence must be non-empty and must not count its first token")
    documents = prompt_groups(sequences) if share_prompts else [[i] for i in range(len(sequences))]
    lengths = [document_length([sequences[i] for i in document]) for document in documents]
    rows = pack(lengths, capacity) if capacity else [[d] for d in range(len(documents))]
    width = -(-max(sum(lengths[d] for d in row) for row in rows) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    packed, shared = any(len(row) > 1 for row in rows), len(documents) < len(sequences)
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    # In a packed row padding positions are all 0: each pad is then a document of its own. In an unpacked row they
    # run on, which keeps the causal mask implicit; under it no real token can see the padding to its right.
    positions = torch.zeros_like(ids) if packed else torch.arange(width).repeat(len(rows), 1)
    # Document and answer that a token belongs to; answer 0 is the prompt, which all answers of its document see.
    document_of, answer_of = torch.full_like(ids, -1), torch.zeros_like(ids)
    predict, targets, owner, step = [], [], [], []
    last = torch.zeros(len(sequences), dtype=torch.long)
    for number, row in enumerate(rows):
        start = 0
        for document in row:
            head = sequences[documents[document][0]].prompt_length if len(documents[document]) > 1 else 0
            base = start
            ids[number, base : base + head] = torch.tensor(sequences[documents[document][0]].ids[:head], dtype=torch.long)
            positions[number, base : base + head] = torch.arange(head)
            start += head
            for answer, index in enumerate(documents[document], 1):
                sequence = sequences[index]
                stop = start + len(sequence) - head
                ids[number, start:stop] = torch.tensor(sequence.ids[head:])
                positions[number, start:stop] = torch.arange(head, len(sequence))
                answer_of[number, start:stop] = answer
                # Where token t of the sequence stands: in the shared prompt, or in this answer.
                place = [number * width + (base + t if t < head else start + t - head) for t in range(len(sequence))]
                counted = [t for t, counts in enumerate(sequence.trained) if counts]
                predict += [place[t - 1] for t in counted]
                targets += [sequence.ids[t] for t in counted]
                owner += [index] * len(counted)
                step += range(len(counted))
                last[index] = place[-1]
                start = stop
            document_of[number, base:start] = document
    return TokenBatch(
        ids,
        positions,
        _visibility(document_of, answer_of) if shared else None,
        packed,
        _long(predict),
        _long(targets),
        _long(owner),
        _long(step),
        last,
        num_steps=max((s.num_trained for s in sequences), default=0),
    )


def prompt_groups(sequences: Sequence[Encoded]) -> list[list[int]]:
    """Indices of sequences that begin with the same uncounted tokens, in order of first appearance."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, sequence in enumerate(sequences):
        groups.setdefault(sequence.ids[: sequence.prompt_length], []).append(index)
    return list(groups.values())


def document_length(sequences: Sequence[Encoded]) -> int:
    """Tokens of some answers to one prompt that stands there once."""
    return sequences[0].prompt_length + sum(len(s) - s.prompt_length for s in sequences)


def cut_batches(sequences: Sequence[Encoded], budget: int, *, share_prompts: bool) -> list[list[int]]:
    """Indices of `sequences` as micro-batches of at most `budget` padded tokens; answers that share a prompt stay together."""
    groups = prompt_groups(sequences) if share_prompts else [[i] for i in range(len(sequences))]
    cuts = cut_by_tokens([document_length([sequences[i] for i in group]) for group in groups], budget)
    return [[i for group in cut for i in groups[group]] for cut in cuts]


def _visibility(document: Tensor, answer: Tensor) -> Tensor:
    """Causal, within the document, and only what is the prompt's or one's own. Padding sees its own document, -1."""
    causal = torch.ones(document.shape[1], document.shape[1], dtype=torch.bool).tril()
    same = document[:, :, None] == document[:, None, :]
    own = (answer[:, None, :] == 0) | (answer[:, :, None] == answer[:, None, :])
    return (causal & same & own)[:, None]


def _long(values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.long)
