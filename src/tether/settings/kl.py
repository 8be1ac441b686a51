"""The penalty for going away from the reference."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from tether.settings.config import Config
from tether.settings.needs import Needs

A_COEFFICIENT = Needs("coefficient > 0", "has no effect with kl.coefficient = 0")
ADAPTIVE = Needs("mode = 'adaptive'", "has no effect without kl.mode='adaptive'")


class KLConfig(Config):
    """The tether: the weight of KL(policy || reference), where it pulls, and how the weight follows
    what is observed.
    """

    table: ClassVar[str] = "kl."
    checked_by_owner: ClassVar[bool] = True
    coefficient: NonNegativeFloat = Field(
        default=0.05,
        description="beta: what a nat of KL costs, in deviations of the scores: those of the "
        "first step with normalize_scores, those of each group with scale_advantages (unless place is "
        "'sequence'); with neither (dr_grpo) in the reward's own unit",
    )
    place: Annotated[Literal["token", "sequence", "loss"], A_COEFFICIENT] = Field(
        default="token",
        description="in every token's reward, in the response's score before its baseline, or in the loss",
    )
    estimator: Annotated[
        Literal["k2", "k3", "k3_corrected"],
        Needs("place = 'loss'", "has no effect outside the loss (kl.place): rewards take k1"),
        A_COEFFICIENT,
    ] = Field(
        default="k2",
        description="in the loss: k2 and k3_corrected have the gradient of KL(policy || "
        "reference), k3 (GRPO) of the reverse",
    )
    mode: Annotated[
        Literal["fixed", "adaptive", "stop"],
        Needs(
            "coefficient > 0",
            "cannot adapt kl.coefficient = 0: it is multiplied; start above 0",
            "adaptive",
        ),
        Needs(
            "coefficient > 0 or report",
            "must see the KL: set kl.report or kl.coefficient",
            "stop",
        ),
    ] = Field(
        default="fixed",
        description="adaptive: towards the target (Ziegler 2019); stop: training ends beyond it",
    )
    target: Annotated[
        PositiveFloat,
        Needs(
            "mode = 'adaptive' or 'stop'",
            "has no effect with kl.mode='fixed'; remove it or set kl.mode='adaptive' or 'stop'",
        ),
    ] = Field(default=6.0, description="nats a response")
    horizon: Annotated[PositiveFloat, ADAPTIVE] = Field(
        default=10_000,
        description="responses over which the coefficient can change by a factor of e",
    )
    max_factor: Annotated[float, ADAPTIVE] = Field(
        default=100.0,
        gt=1,
        description="adaptive: most change, up or down",
    )
    report: Annotated[
        bool,
        Needs(
            "coefficient = 0",
            "has no effect with kl.coefficient above 0: the reference is run anyway",
        ),
    ] = Field(
        default=True,
        description="at coefficient 0 run the reference on a quarter of a step's answers, at "
        "least 16: how far the policy has moved",
    )
