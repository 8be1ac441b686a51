"""Conversations with an engine: rows of ids that go on, turn by turn.

The engine of this process keeps the keys and values of each conversation, so that a turn costs what
it adds, however long the conversation is. Other engines read a conversation anew; servers have its
beginning in their prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tether.rollout.cache import rows_that_fit
from tether.rollout.drawn import Drawn, Draws, Ids, TokenEngine
from tether.rollout.local import LocalEngine, SlotDecoding
from tether.rollout.sampling import counter_uniform


class Talk(Protocol):
    """Conversations by their numbers: those of the first prompt, of the second, and so on."""

    def begin(self) -> list[Drawn]:
        """The first reply of each."""
        ...

    def go_on(self, rows: Mapping[int, Ids], ordinals: Mapping[int, int]) -> dict[int, Drawn]:
        """The next reply of some, each behind the ids of its whole conversation; the others are
        over.

        Args:
            ordinals: for the counters of the draws, as in `TokenEngine.draw`.
        """
        ...


def talk_with(engine: TokenEngine, draws: Draws, room: int) -> Talk:
    """Conversations that begin with rows of prompt ids.

    Args:
        room: tokens that a conversation may have behind its prompt before its last reply, which may
            be longer; 0: what it had before may change.
    """
    if room and isinstance(engine, LocalEngine) and engine.in_step is None:
        count = len(draws.rows) * draws.num_samples
        capacity = max(map(len, draws.rows)) + room + draws.sampling.max_new_tokens
        if rows_that_fit(engine.role.causal_model, capacity, count, engine.allowed) == count:
            return _KeptTalk(engine, draws, capacity)
    return _ReadTalk(engine, draws)


@dataclass
class _ReadTalk:
    """Conversations that the engine reads anew for every turn."""

    engine: TokenEngine
    draws: Draws

    def begin(self) -> list[Drawn]:
        return [reply for group in self.engine.draw(self.draws) for reply in group]

    def go_on(self, rows: Mapping[int, Ids], ordinals: Mapping[int, int]) -> dict[int, Drawn]:
        places = [ordinals[number] for number in rows]
        turn = self.draws._replace(rows=[*rows.values()], ordinals=places, num_samples=1)
        drawn = self.engine.draw(turn)
        return {number: reply for number, (reply,) in zip(rows, drawn, strict=True)}


class _KeptTalk(SlotDecoding):
    """Conversations whose slots stay theirs between turns."""

    @torch.no_grad()
    def begin(self) -> list[Drawn]:
        for product in self.decoder.products:
            product.refresh()
        self.owner = [-1] * len(self.request)
        return [reply for _, reply in sorted(self._replies().items())]

    @torch.no_grad()
    def go_on(self, rows: Mapping[int, Ids], ordinals: Mapping[int, int]) -> dict[int, Drawn]:
        outside = [slot for slot in map(self.owner.index, rows) if slot >= len(rows)]
        inside = [slot for slot in range(len(rows)) if self.owner[slot] not in rows]
        self._move(outside, inside)
        self.rows = len(rows)
        numbers = self.owner[: self.rows]
        self._feed([rows[number][self.cached[row] :] for row, number in enumerate(numbers)])
        positions = torch.arange(self.sampling.max_new_tokens, device=self.device)
        places = self._sent([ordinals[number] for number in numbers])[:, None]
        grid = positions.expand(self.rows, -1)
        self.uniforms[: self.rows] = counter_uniform(
            self.seed,
            places.expand_as(grid),
            torch.zeros_like(grid),
            grid,
        )
        self.request[: self.rows] = numbers
        self.responses[: self.rows] = [[] for _ in numbers]
        self.finished.clear()
        return self._replies()

    def _replies(self) -> dict[int, Drawn]:
        while self.busy:
            self.admit()
            self.step()
        return dict(self.finished)

    def _feed(self, texts: Sequence[Ids]) -> None:
        """Let the first rows read their texts in as few passes as possible. A pass has either all
        tokens of one row, or one token of each row; then all rows end at the same pass.
        """
        longest = max(map(len, texts))
        if longest > len(texts):
            for row, ids in enumerate(texts):
                self._read(row, ids)
            return
        for left in range(longest, 0, -1):
            tokens = [ids[-left] if len(ids) >= left else 0 for ids in texts]
            reads = [len(ids) >= left for ids in texts]
            self.drawn[: self.rows] = self._sent(tokens)
            self.active[: self.rows] = self._sent(reads)
            self._advance(reads)

    def _read(self, row: int, ids: Ids) -> None:
        assert self.hidden is not None
        place = self._sent([row])
        stored = self.cached[row]
        before = [
            (keys[place, :, :stored], values[place, :, :stored])
            for keys, values in self.cache.stores
        ]
        states, layers = self.decoder.prefill(self._sent([ids]), before)
        for slot, (keys, values) in zip(self.cache.slots, layers, strict=True):
            slot.fill(place, keys, values, self.cache.capacity)
        self.hidden[row] = states[0, -1]
        self.active[row] = True
        self.cached[row] += len(ids)
        self.lengths[row] = self.cached[row]

    def _free(self, row: int) -> None:
        self.owner[row] = self.request[row]
        self.request[row] = -1

    def _leave(self, ended: torch.Tensor) -> None:
        rows = len(ended)
        self.active[:rows] &= ~ended
        self.steps[:rows].masked_fill_(ended, 0)

    def _move(self, sources: list[int], targets: list[int]) -> None:
        super()._move(sources, targets)
        for a, b in zip(sources, targets, strict=True):
            self.owner[a], self.owner[b] = self.owner[b], self.owner[a]
