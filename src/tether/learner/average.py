"""An average of the weights of a training, to end with instead of the last ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tether.learner.local import LocalLearner
from tether.models.members import adapter_factors
from tether.models.trunk import Role


class WeightAverage:
    """An exponential moving average of a learner's masters (cf. Polyak and Juditsky 1992, https://doi.org/10.1137/0330046).

    Of an adapter the product B A is averaged: the product of averages is another model. An average of products has no small rank,
    so two linear sketches of it are kept, P R and L P with random R and L that stay (Tropp et al. 2017,
    https://doi.org/10.1137/17M1111590); from them comes, in the end, an adapter of the old rank that is nearly the nearest to it.

    Args:
        roles: whose adapters are among the masters.
    """

    def __init__(self, learner: LocalLearner, decay: float | None, roles: Sequence[Role] = ()) -> None:
        self.learner, self.decay = learner, decay
        self.averages: list[Tensor] | None = None
        self.sketches: list[Tensor] = []
        places = {id(parameter): place for place, parameter in enumerate(learner.parameters)}
        factors = [pair for role in roles for pair in adapter_factors(role)] if decay is not None else []
        self.pairs = list(dict.fromkeys((places[id(a)], places[id(b)]) for a, b in factors if id(a) in places))
        self.tests = [_test_matrices(number, learner.masters[a], learner.masters[b]) for number, (a, b) in enumerate(self.pairs)]

    @torch.no_grad()
    def update(self) -> None:
        if self.decay is None:
            return
        masters = [m.detach() for m in self.learner.masters]
        if self.averages is None:
            self.tensors = [m.clone() for m in masters]
        for average, now in zip([*(self.averages or ()), *self.sketches], [*masters, *self._sketched(masters)], strict=True):
            average.lerp_(now, 1 - self.decay)

    def apply(self) -> None:
        """End with the average instead of the last weights."""
        self.learner.put(self._weights())

    @property
    def tensors(self) -> list[Tensor] | None:
        """The averaged weights, one for each master, and the sketches: what a checkpoint holds. None before the first update."""
        return None if self.averages is None else [*self._weights(), *self.sketches]

    @tensors.setter
    def tensors(self, values: list[Tensor] | None) -> None:
        count, device = len(self.learner.masters), self.learner.masters[0].device
        values = None if values is None else [value.to(device) for value in values]
        self.averages = None if values is None else values[:count]
        self.sketches = [] if values is None else values[count:] or self._sketched(values)

    def _sketched(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """B A R and L B A of every adapted layer."""
        layers = [(tensors[a], tensors[b], *tests) for (a, b), tests in zip(self.pairs, self.tests, strict=True)]
        return [sketch for a, b, right, left in layers for sketch in (b @ (a @ right), (left @ b) @ a)]

    @torch.no_grad()
    def _weights(self) -> list[Tensor]:
        weights = list(self.averages or ())
        for number, (a, b) in enumerate(self.pairs if weights else ()):
            of_columns, of_rows = self.sketches[2 * number : 2 * number + 2]
            basis = torch.linalg.qr(of_columns).Q
            inside = torch.linalg.pinv(self.tests[number][1] @ basis) @ of_rows
            left, sizes, right = torch.linalg.svd(inside, full_matrices=False)
            root = sizes[: len(weights[a])].sqrt()
            down, up = torch.zeros_like(weights[a]), torch.zeros_like(weights[b])
            down[: len(root)], up[:, : len(root)] = root[:, None] * right[: len(root)], basis @ (left[:, : len(root)] * root)
            weights[a], weights[b] = down, up
        return weights


def _test_matrices(number: int, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """R (inputs, 2 rank + 1) and L (4 rank + 3, outputs) of normal numbers, the same whenever they are asked for."""
    generator, (rank, inputs), outputs = torch.Generator().manual_seed(number), down.shape, up.shape[0]
    right = torch.randn(inputs, min(2 * rank + 1, inputs, outputs), generator=generator)
    left = torch.randn(min(4 * rank + 3, outputs), outputs, generator=generator)
    return right.to(down), left.to(up)
