"""An average of the weights of a training, to end with instead of the last ones."""

from __future__ import annotations

import torch
from torch import Tensor

from tether.learner.local import LocalLearner


class WeightAverage:
    """An exponential moving average of a learner's masters (cf. Polyak and Juditsky 1992, https://doi.org/10.1137/0330046).

    Trap: of an adapter both factors are averaged, and their product is the average of the products only as far as the factors
    change little within the average's span.
    """

    def __init__(self, learner: LocalLearner, decay: float | None) -> None:
        self.learner, self.decay = learner, decay
        self.tensors: list[Tensor] | None = None
        """The averaged weights, one for each master; None before the first update."""

    @torch.no_grad()
    def update(self) -> None:
        if self.decay is None:
            return
        masters = [master.detach() for master in self.learner.masters]
        if self.tensors is None:
            self.tensors = [master.clone() for master in masters]
        for average, now in zip(self.tensors, masters, strict=True):
            average.lerp_(now, 1 - self.decay)

    def load(self, tensors: list[Tensor]) -> None:
        """Go on from the averages of a checkpoint; from none, if there are none."""
        pairs = zip(tensors, self.learner.masters, strict=False)
        self.tensors = [average.to(master.device, copy=True) for average, master in pairs] or None

    @torch.no_grad()
    def apply(self) -> None:
        """End with the average instead of the last weights."""
        self.learner.put(self.tensors or ())
