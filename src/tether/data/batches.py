"""Encoded sequences become tensors, validated once.

A `TokenBatch` has one sequence a row, padded on the right, or several. Several sequences are packed
documents, or answers to one prompt that is stored once. Models get ids, positions and perhaps a
mask. All other code uses flat indices, so it works in the same way for both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tether.algorithms.token_batch import TokenBatch
from tether.core.types import Ids
from tether.data.chat import Encoded

Cuts = list[list[int]]
"""The places of a list in several parts."""
COMMON = 8
"""The least number of equal first tokens that prompts may share."""
WIDTH_MULTIPLE = 8
"""Rows are padded to a multiple of this: every new shape costs the matrix kernels a set-up, and
memory, of their own.
"""


Token = tuple[int, int, int, int, int]
"""Id and position, and what it belongs to: document, prompt (0: common to all of the document) and
answer (0: none).
"""


def make_batch(
    sequences: Sequence[Encoded],
    pad_id: int,
    *,
    capacity: int | None = None,
    document_tokens: int = 0,
) -> TokenBatch:
    """Tensors for `sequences`: one row each, or packed into rows of at most `capacity` tokens. Each
    segment of a sequence has its row, or its place in one.

    Args:
        document_tokens: sequences that begin with the same uncounted tokens become one document of
            at most this many tokens. It holds the common beginning once, each prompt once, and
            every answer. An answer sees its prompt and itself (the prefix tree of
            https://arxiv.org/abs/2506.05433). 0: every sequence is a document.

    Raises:
        ValueError: no sequences, or one that counts its very first token (nothing could predict
            it).
    """
    if not sequences:
        raise ValueError("a batch needs at least one sequence")
    owners, firsts, parts = zip(*_segments(sequences), strict=True)
    if any(not s.ids or s.trained[0] for s in parts):
        raise ValueError("a sequence must be non-empty and must not count its first token")
    documents = documents_of(parts, document_tokens)
    lengths = [document_length([parts[i] for i in document]) for document in documents]
    rows = pack(lengths, capacity) if capacity else [[d] for d in range(len(documents))]
    width = _rounded(max(sum(lengths[d] for d in row) for row in rows))
    together = len(rows) < len(parts)
    places: dict[int, list[int]] = {}
    table = []
    for number, row in enumerate(rows):
        tokens: list[Token] = []
        for document in row:
            members = [parts[i] for i in documents[document]]
            for member, steps in _write(tokens, document, members):
                places[documents[document][member]] = [number * width + step for step in steps]
        # Where sequences stand together padding positions are all 0: each pad is then a document of
        # its own, and no position is beyond what a sequence has. Alone they run on, which keeps the
        # causal mask implicit; no real token sees its right.
        table.append(
            tokens + [(pad_id, 0 if together else t, -1, 0, 0) for t in range(len(tokens), width)],
        )
    columns = torch.from_numpy(np.array(table, dtype=np.int64)).permute(2, 0, 1).contiguous()
    ids, positions, document_of, prompt_of, answer_of = columns
    counted = [(i, [t for t, counts in enumerate(parts[i].trained) if counts]) for i in places]
    ends = {owner: places[i][-1] for i, owner in enumerate(owners)}
    return TokenBatch(
        ids,
        positions,
        torch.stack([document_of, prompt_of, answer_of]) if together else None,
        predict=_long([places[i][t - 1] for i, steps in counted for t in steps]),
        targets=_long([parts[i].ids[t] for i, steps in counted for t in steps]),
        sequence=_long([owners[i] for i, steps in counted for _ in steps]),
        step=_long([firsts[i] + step for i, steps in counted for step in range(len(steps))]),
        last=_long([*ends.values()]),
        places=_long([place for i in range(len(parts)) for place in places[i]]),
        num_steps=max(sequence.num_trained for sequence in sequences),
    )


def _segments(sequences: Sequence[Encoded]) -> Iterator[tuple[int, int, Encoded]]:
    """Every segment, with the number of its sequence and of the counted tokens before it there."""
    for number, sequence in enumerate(sequences):
        first = 0
        for part in sequence.segments:
            yield number, first, part
            first += part.num_trained


def _write(
    tokens: list[Token],
    document: int,
    members: Sequence[Encoded],
) -> Iterator[tuple[int, list[int]]]:
    """Append a document to a row. Members keep their order and get the places of their tokens in
    the row.
    """

    def put(sequence: Encoded, begin: int, end: int, prompt: int, answer: int) -> range:
        start = len(tokens)
        owners = map(repeat, (document, prompt, answer))
        tokens.extend(zip(sequence.ids[begin:end], range(begin, end), *owners, strict=False))
        return range(start, len(tokens))

    root, prompts = _tree(members)
    common = put(members[0], 0, root, 0, 0)
    answer = 0
    for prompt, group in enumerate(prompts, 1):
        head = members[group[0]].prompt_length
        rest = put(members[group[0]], root, head, prompt, 0)
        for member in group:
            answer += 1
            yield (
                member,
                [*common, *rest, *put(members[member], head, len(members[member]), prompt, answer)],
            )


def documents_of(sequences: Sequence[Encoded], limit: int) -> Cuts:
    """Indices of sequences that share one document of at most `limit` tokens.

    Sequences with the same prompt (all uncounted tokens at the beginning) share one. Such groups
    share one if their prompts begin with the same `COMMON` tokens, a template's system message.
    """
    documents = _grouped(sequences, [[i] for i in range(len(sequences))], limit, None)
    return _grouped(sequences, documents, limit, COMMON)


def _grouped(
    sequences: Sequence[Encoded],
    parts: Cuts,
    limit: int,
    common: int | None,
) -> Cuts:
    """Join parts whose prompts agree in their first `common` tokens (None: in all)."""
    latest: dict[Ids, list[int]] = {}
    documents: Cuts = []
    for part in parts:
        first = sequences[part[0]]
        key = first.prompt[:common]
        document = latest.get(key)
        short = common is not None and len(key) < common
        if (
            short
            or document is None
            or document_length([sequences[i] for i in (*document, *part)]) > limit
        ):
            document = latest[key] = []
            documents.append(document)
        document += part
    return documents


def document_length(sequences: Sequence[Encoded]) -> int:
    """Tokens of a document: every prompt once, and what all prompts begin with once."""
    root, prompts = _tree(sequences)
    heads = [sequences[group[0]].prompt_length for group in prompts]
    return (
        root + sum(head - root for head in heads) + sum(len(s) - s.prompt_length for s in sequences)
    )


def _tree(sequences: Sequence[Encoded]) -> tuple[int, Cuts]:
    """Number of tokens that all prompts begin with, and the indices of the sequences by prompt."""
    prompts: dict[Ids, list[int]] = {}
    for index, sequence in enumerate(sequences):
        prompts.setdefault(sequence.prompt, []).append(index)
    first = min(prompts)
    last = max(prompts)  # in the order of the alphabet these two differ first
    shortest = min(map(len, prompts))
    return next((i for i in range(shortest) if first[i] != last[i]), shortest), list(
        prompts.values(),
    )


class Reader(Protocol):
    """The part of a role that decides how batches are cut, and where they go."""

    @property
    def device(self) -> torch.device: ...
    def document_tokens(self, budget: int) -> int: ...


def batches_for(
    reader: Reader,
    sequences: Sequence[Encoded],
    pad_id: int,
    budget: int,
) -> Iterator[tuple[list[int], TokenBatch]]:
    """Micro-batches of at most `budget` padded tokens for a role, each with the places of its
    sequences.
    """
    limit = reader.document_tokens(budget)
    for cut in cut_batches(sequences, budget, document_tokens=limit):
        yield (
            cut,
            make_batch([sequences[i] for i in cut], pad_id, document_tokens=limit).to(
                reader.device,
            ),
        )


def cut_batches(
    sequences: Sequence[Encoded],
    budget: int,
    *,
    document_tokens: int = 0,
) -> Cuts:
    """Indices of `sequences` as micro-batches of at most `budget` padded tokens, documents in one
    piece.

    A document that is longer than the budget by itself goes alone.
    """
    documents = documents_of(sequences, document_tokens)
    cuts = cut_together(
        [[sequences[i] for i in document] for document in documents],
        budget,
        document_tokens,
    )
    return [[i for part in cut for i in documents[part]] for cut in cuts]


def cut_together(
    parts: Sequence[Sequence[Encoded]],
    budget: int,
    document_tokens: int,
) -> Cuts:
    """Indices of parts, none of which is separated, whose batch takes at most `budget` padded
    tokens, one part at least.

    Sorted by width first, so that padding is small. The batch itself is measured, because parts
    with the same beginning may share one document that is wider than each of them.
    """
    sizes = [padded_tokens(part, document_tokens) for part in parts]
    cuts: Cuts = []
    for index in sorted(range(len(parts)), key=lambda i: (sizes[i], i)):
        if (
            cuts
            and padded_tokens([s for i in (*cuts[-1], index) for s in parts[i]], document_tokens)
            <= budget
        ):
            cuts[-1].append(index)
        else:
            cuts.append([index])
    return cuts


def padded_tokens(sequences: Sequence[Encoded], document_tokens: int = 0) -> int:
    """Rows times width of the batch that `make_batch` makes of them."""
    parts = [part for sequence in sequences for part in sequence.segments]
    lengths = [document_length([parts[i] for i in d]) for d in documents_of(parts, document_tokens)]
    return len(lengths) * _rounded(max(lengths))


def pack(lengths: Sequence[int], capacity: int) -> Cuts:
    """Indices grouped into rows of at most `capacity` tokens: best fit on decreasing lengths.

    A sequence longer than `capacity` gets a row of its own. Every index appears exactly once; the
    result depends on the lengths alone.
    """
    rows: Cuts = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = [row for row, free in enumerate(room) if free >= lengths[index]]
        best = min(fits, key=room.__getitem__, default=len(rows))
        if not fits:
            rows.append([])
            room.append(capacity)
        rows[best].append(index)
        room[best] -= lengths[index]
    return rows


def _rounded(width: int) -> int:
    return -(-width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def _long(values: Sequence[object]) -> Tensor:
    return torch.tensor(values, dtype=torch.long)
