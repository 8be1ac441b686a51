"""Proof, on the loaded model itself, that texts in one pass do not affect each other.

A pass packs texts into one row, puts answers after one prompt, or pads rows to one width. Attention
that reads masks or positions separates such texts. Recurrent states, convolutions and attention
that counts by place may mix them. So a few tokens run together and alone. Later passes combine only
texts with equal results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tether.core.types import Facts

Pass = Callable[[Tensor, Tensor, Tensor | None, bool], Tensor]
"""Ids (rows, time), their positions, what sees what (rows, 1, time, time) or None, and whether
masks are given: states.
"""
SAME = {torch.float32: 1e-4, torch.float64: 1e-4}
"""Largest relative difference that other neighbours may make of a state; in fewer bits 2e-2:
experts group their tokens anew.
"""
EQUAL = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Largest relative difference between a text in company and alone; in fewer bits 0.1, and the
median of its tokens.
"""
FIRST = 4
"""Tokens of a document that its predecessor in the row reaches most."""


@dataclass(frozen=True)
class Independence:
    """The parts of a batch that a model computes independently of each other.

    - causal: no token sees a later one
    - rows: adjacent rows, padded on the right
    - packing: documents in one row whose positions restart
    - masks: any mask, so that answers can share their prompt
    """

    causal: bool = True
    rows: bool = True
    packing: bool = False
    masks: bool = False


def prove_independence(
    run: Pass,
    vocabulary: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    masks: bool,
    packing: bool,
) -> Independence:
    """Run a few tokens alone and in company.

    Args:
        run: a pass of the bare model in evaluation mode.
        masks, packing: worth trying; what is impossible by design need not be run.
    """
    trial = _Trial(run, vocabulary, dtype, device)
    masks = masks and trial.holds(trial.masks)
    causal, rows = trial.rows(masks)
    return Independence(
        causal,
        rows,
        packing=masks or (packing and trial.holds(trial.packing)),
        masks=masks,
    )


class _Trial:
    """Texts of a few tokens: `long` and `other` of one length, and `short`; `answer` and `reply`
    continue `long`.
    """

    def __init__(
        self,
        run: Pass,
        vocabulary: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.run = run
        self.device = device
        self.same = SAME.get(dtype, 2e-2)
        generator = torch.Generator().manual_seed(0)

        def draw(count: int) -> Tensor:
            return torch.randint(vocabulary, (count,), generator=generator)

        self.long, self.other, self.short = draw(9), draw(9), draw(7)
        self.answer, self.reply, self.another = draw(4), draw(4), draw(4)
        self.alone_short = self._states(self.short, range(7))
        self.alone_reply = self._states(torch.cat([self.long, self.reply]), range(13))

    def _states(
        self,
        ids: Tensor,
        positions: Iterable[int],
        visible: Tensor | None = None,
        masks: bool = False,
    ) -> Tensor:
        """Of one row."""
        places = torch.tensor([*positions], device=self.device)
        return self.run(ids[None].to(self.device), places[None], visible, masks)[0]

    def holds(self, trial: Callable[[], bool]) -> bool:
        """A trial's outcome; a model that cannot be run so fails it."""
        try:
            return trial()
        except Exception:  # noqa: BLE001  (a model of any author is run in a way that it may not know)
            return False

    def packing(self) -> bool:
        """Two documents in one row, and padding behind them, each pad a document of its own."""
        pads = torch.zeros(8, dtype=torch.long)
        positions = [*range(9), *range(7), *[0] * 8]
        first, second = (
            self._states(torch.cat([text, self.short, pads]), positions)[9:16]
            for text in (self.long, self.other)
        )
        return self._unmoved(first, second) and agrees(first, self.alone_short)

    def masks(self) -> bool:
        """A prompt with two answers, and a document behind it, in one row."""
        document = torch.tensor([0] * 17 + [1] * 7)
        branch = torch.tensor([0] * 9 + [1] * 4 + [2] * 4 + [0] * 7)
        sees = (document[:, None] == document) & ((branch == 0) | (branch[:, None] == branch))
        visible = (sees & torch.ones_like(sees).tril())[None, None].to(self.device)
        positions = [*range(13), *range(9, 13), *range(7)]
        rows = [
            torch.cat([self.long, answer, self.reply, self.short])
            for answer in (self.answer, self.another)
        ]
        first, second = (self._states(row, positions, visible, True) for row in rows)
        together = torch.cat([first[:9], first[13:17]])
        return (
            self._unmoved(first[13:17], second[13:17])
            and self._unmoved(first[17:], second[17:])
            and agrees(together, self.alone_reply)
            and agrees(first[17:], self.alone_short)
        )

    def rows(self, masks: bool) -> tuple[bool, bool]:
        """Two results: no token sees a later one; rows beside each other get the states that each
        gets alone."""
        first = self._beside(self.long, 0, masks)
        second = self._beside(self.other, 1, masks)
        if self._unmoved(first[:6], second[:6]):
            return True, agrees(first, self.alone_short)
        return self._unmoved(first[:6], self._beside(self.long, 1, masks)[:6]), False

    def _beside(self, neighbour: Tensor, change: int, masks: bool) -> Tensor:
        """The states of `short`, padded to the width of a neighbour; `change` 1: with another last
        token and other padding.
        """
        own = torch.cat([self.short, torch.full((2,), change)])
        own[6] = (own[6] + change) % (int(own.max()) + 1)
        ids = torch.stack([neighbour, own]).to(self.device)
        positions = torch.arange(9, device=self.device).expand(2, 9)
        return self.run(ids, positions, None, masks)[1, :7]

    def _unmoved(self, first: Tensor, second: Tensor) -> bool:
        """The first tokens' states do not depend on what was changed."""
        return bool(relative_difference(first, second)[:FIRST].median() <= self.same)


def agrees(states: Tensor, expected: Tensor) -> bool:
    """True if states equal the expected ones up to rounding.

    In few bits a router of experts may send a token elsewhere, so the median decides there.
    """
    difference = relative_difference(states, expected)
    exact = expected.dtype in EQUAL
    return bool(
        (difference.max() if exact else difference.median()) <= EQUAL.get(expected.dtype, 0.1),
    )


def relative_difference(states: Tensor, expected: Tensor) -> Tensor:
    """(time, dim) states -> (time,) how far each is from the expected one, relative to that."""
    states = states.flatten(0, -2).float()
    expected = expected.flatten(0, -2).float()
    return (states - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-12)


def windows(values: Facts) -> Iterator[tuple[str, object]]:
    """Settings of a configuration by which attention reaches a number of places: a mask from
    outside would overrule them.
    """
    for name, value in values.items():
        reach = name in ("attention_chunk_size", "attention_types") or (
            "window" in name and not name.endswith(("layers", "pattern"))
        )
        if reach and value and not isinstance(value, bool):
            yield name, value
