"""The evaluator of a policy's distance from the model that it started from."""

from __future__ import annotations

from dataclasses import dataclass

from tether.evaluation.held_out import HeldOutAnswers, column_figures
from tether.evaluation.likelihood import kl_to_reference
from tether.evaluation.suite import Figures, MeasuredPolicy
from tether.models.trunk import Role


@dataclass
class DistanceFromStart:
    """Implements core.protocols.Evaluator: `kl`, the KL from the start in nats an answer, on
    held-out answers.

    Args:
        answers: sampled above temperature 0.
        reference: the frozen start.
    """

    name = "kl"

    answers: HeldOutAnswers
    reference: Role

    def __call__(self, policy: MeasuredPolicy, step: int) -> Figures:
        moved = kl_to_reference(
            policy.role,
            self.reference,
            self.answers.of(policy),
            policy.encoder,
            self.answers.sampling.temperature,
        )
        return column_figures({"kl": list(moved)}, self.answers.groups)
