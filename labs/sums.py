"""The game of lab 13: sums of six numbers in lines, by a solver with two bad habits.

The policy is a table: logits over what is done in a line, for each count of numbers added before.
In the third line the solver mostly forgets a carry, in the fifth it takes one that is not there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

RIGHT, FEW, MANY, AGAIN = range(4)
ERRORS = torch.tensor([0, -1, 1, 0])
NUMBERS = 6
MOST_LINES = 16
PLACES = [0, 1, 2, 3, 5]
"""Of the six places those of a shorter sum, which lacks the second habit."""
HABITS = torch.tensor(
    [
        [0.84, 0.06, 0.06, 0.04],
        [0.84, 0.06, 0.06, 0.04],
        [0.25, 0.65, 0.06, 0.04],
        [0.84, 0.06, 0.06, 0.04],
        [0.25, 0.06, 0.65, 0.04],
        [0.84, 0.06, 0.06, 0.04],
    ]
)


class Solutions(NamedTuple):
    """Solutions as rows of lines: what was done in each, and how many numbers were added before."""

    lines: Tensor
    places: Tensor
    mask: Tensor

    @property
    def errors(self) -> Tensor:
        return ERRORS[self.lines] * self.mask

    @property
    def finished(self) -> Tensor:
        return ((self.lines != AGAIN) & self.mask).sum(1) == self.places.amax(1) + 1

    @property
    def right(self) -> Tensor:
        """The last line is right, and there is one."""
        return (self.errors.sum(1) == 0) & self.finished

    @property
    def sound(self) -> Tensor:
        """Every line is right."""
        return (self.errors == 0).all(1) & self.finished


def solve(table: Tensor, count: int, luck: torch.Generator, numbers: int = NUMBERS) -> Solutions:
    """Draw solutions line by line, from logits by place and action."""
    chances = table.softmax(1)
    place = torch.zeros(count, dtype=torch.long)
    rows: list[Tensor] = []
    places: list[Tensor] = []
    for _ in range(MOST_LINES):
        here = place.clamp(max=numbers - 1)
        action = torch.multinomial(chances[here], 1, generator=luck)[:, 0]
        rows.append(action)
        places.append(place)
        place = place + (action != AGAIN)
    before = torch.stack(places, dim=1)
    return Solutions(torch.stack(rows, 1), before.clamp(max=numbers - 1), before < numbers)


class Solver:
    """The policy in training, its reference and its values."""

    def __init__(
        self, seed: int, start: Tensor, score: Callable[[Solutions], Tensor], answers: int = 64
    ) -> None:
        self.luck = torch.Generator().manual_seed(seed)
        self.start = start
        self.score = score
        self.answers = answers
        self.table = start.clone().requires_grad_()
        self.values = torch.zeros(MOST_LINES, NUMBERS, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.table, self.values], lr=0.05)
        self.seen: list[Solutions] = []

    def sample(self, step: int) -> tuple[Solutions, Tensor]:
        """Fresh solutions, and their scores."""
        batch = solve(self.table.detach(), self.answers, self.luck)
        self.seen.append(batch)
        return batch, self.score(batch)

    def evaluate(self, batch: Solutions) -> tuple[Tensor, Tensor]:
        """The policy's log-probabilities and values of the lines."""
        logprobs = self.table.log_softmax(1)[batch.places, batch.lines]
        return logprobs, self.values[torch.arange(MOST_LINES).expand_as(batch.lines), batch.places]

    def reference_logprobs(self, batch: Solutions) -> Tensor:
        return self.start.log_softmax(1)[batch.places, batch.lines]

    def update(self, loss: Tensor, step: int) -> None:
        """One step of the optimizer."""
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
