"""The numbers of the updates of one step: means, extreme ratios, and the check of the first
ratio.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tether.core.errors import TrainingError
from tether.core.types import Metrics, Readings

LARGEST_FIRST_DEVIATION = 0.2
"""Of a ratio from 1 before any update. Beyond it the old log-probabilities are wrong."""


class UpdateMetrics:
    """Collects what every minibatch measures; `made` counts the updates: a gradient of 0 makes
    none.
    """

    def __init__(self) -> None:
        self.made = self.passes = self.epochs = 0
        self.totals = defaultdict[str, float](float)
        self.ratio_max = 1.0
        self.ratio_min = 1.0
        self.first_deviation = 0.0
        self.last = {"grad_norm": 0.0, "learning_rate": 0.0}

    def add(
        self,
        measured: Sequence[Metrics],
        stepped: Readings,
        epoch: int,
    ) -> None:
        """Count one minibatch.

        Args:
            measured: the numbers of its micro-batches; all but the ratios add up.
            stepped: the numbers of the optimizer's step.
        """
        high = max(numbers.pop("policy/ratio_max") for numbers in measured)
        low = min(numbers.pop("policy/ratio_min") for numbers in measured)
        self.ratio_max = max(self.ratio_max, high)
        self.ratio_min = min(self.ratio_min, low)
        if not self.passes:
            self.first_deviation = max(high - 1, 1 - low)
        for numbers in measured:
            for key, value in numbers.items():
                self.totals[key] += value
        self.last |= stepped
        self.made += stepped["grad_norm"] != 0
        self.passes = self.passes + 1
        self.epochs = epoch + 1

    def means(self) -> Metrics:
        """The metrics of all minibatches.

        Raises:
            TrainingError: old and new log-probabilities disagree before any update.
        """
        if self.first_deviation > LARGEST_FIRST_DEVIATION:
            raise TrainingError(
                f"before any update the ratio is off by {self.first_deviation:.3f}: old and new "
                "log-probabilities disagree",
            )
        return {
            **{key: value / self.passes for key, value in self.totals.items()},
            **self.last,
            "policy/ratio_max": self.ratio_max,
            "policy/ratio_min": self.ratio_min,
            "policy/first_ratio_deviation": self.first_deviation,
            "policy/epochs": self.epochs,
            "policy/updates": self.made,
        }
