"""The controller of a KL's weight, for a stage that has one."""

from __future__ import annotations

import logging
import math

from tether.algorithms import kl as divergences
from tether.settings.policy import PolicyConfig

_log = logging.getLogger(__name__)
BOUND_REACHED = (
    "The KL coefficient has reached its bound %.3g and moves no further: KL %.3g nats a response, "
    "target %.3g. Change kl.target or the learning rate, or raise kl.max_factor"
)


class Tethered:
    """A stage whose policy is held near a reference."""

    config: PolicyConfig
    kl_coefficient: float
    stopped: bool
    """True if the KL has ended the training."""

    def adapt_kl(self, observed: float, num_responses: int) -> None:
        """Move the KL's weight towards its target, or end the training beyond it; `observed` in
        nats a response.
        """
        kl = self.config.kl
        if not math.isfinite(observed):  # of a step whose update was left out
            return
        if kl.mode == "adaptive":
            before = self.kl_coefficient
            bounds = self.kl_bounds
            self.kl_coefficient = divergences.adapt_kl_coefficient(
                before,
                observed,
                kl.target,
                kl.horizon,
                num_responses,
                bounds=bounds,
            )
            if self.kl_coefficient in bounds and before not in bounds:
                _log.warning(BOUND_REACHED, self.kl_coefficient, observed, kl.target)
        self.stopped = kl.mode == "stop" and divergences.kl_target_reached(observed, kl.target)

    @property
    def kl_bounds(self) -> tuple[float, float]:
        """Least and greatest coefficient of the KL."""
        kl = self.config.kl
        return kl.coefficient / kl.max_factor, kl.coefficient * kl.max_factor

    def raise_kl(self) -> None:
        """Double the coefficient of the KL, up to its bound."""
        self.kl_coefficient = min(2 * self.kl_coefficient, self.kl_bounds[1])
