"""The table of stages: everything that reads a list of them reads this one. A new stage is a row
here, its settings, and the module that trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tether.settings.evaluation import EvaluationSection
from tether.settings.pairs import PairsSection
from tether.settings.reward import RewardSection
from tether.settings.rounds import RoundsSection
from tether.settings.sampling import (
    BestOfNSection,
    GRPOSection,
    OnlineDirectSection,
    PPOSection,
    ReinforceSection,
)
from tether.settings.section import Section
from tether.settings.supervised import DirectSection, KTOSection, ProcessSection, SFTSection

Makes = Literal["sft", "reward", "direct", "policy", "rounds", "pairs", "verdict"]
POLICIES: tuple[Makes, ...] = ("policy", "direct", "rounds")
"""Results that are a policy: trained on its own samples, on rows, or on rows made of its samples in
rounds.
"""


@dataclass(frozen=True, kw_only=True)
class StageKind:
    """A row of the table.

    Args:
        makes: what a finished stage leaves; a report shows those that make the same in the same
            way.
        section: the class of the recipe's section.
        method: the module with `train(section, context, rows, run)`, which trains and saves; a
            name, since settings load no torch.
        help: one line for the command line.
    """

    name: str
    makes: Makes
    section: type[Section]
    method: str
    help: str

    @property
    def answers(self) -> bool:
        """True if the result is a model that answers."""
        return self.makes in (*POLICIES, "sft")

    @property
    def trains_policy(self) -> bool:
        """True if the result is a policy, which can be compared with the model that it started
        from.
        """
        return self.makes in POLICIES

    @property
    def scores(self) -> bool:
        """True if the result is a model that scores."""
        return self.makes == "reward"

    @property
    def trains(self) -> bool:
        """True if weights are changed."""
        return self.answers or self.scores

    @property
    def alone(self) -> bool:
        """True if the first rank runs it while the others wait."""
        return self.makes in ("rounds", "pairs", "verdict")

    @property
    def results(self) -> str:
        """Folders of the results below the stage's own, as a pattern; the last in order is the
        final one.
        """
        return (
            "round-*/policy"
            if self.makes == "rounds"
            else "policy"
            if self.trains_policy
            else "model"
        )


_ROWS = (
    StageKind(
        name="sft",
        makes="sft",
        section=SFTSection,
        method="tether.methods.supervised",
        help="Fine-tune on demonstrations (SFT)",
    ),
    StageKind(
        name="pairs",
        makes="pairs",
        section=PairsSection,
        method="tether.methods.pairs",
        help="Sample answers, choose pairs of them, and collect judgments",
    ),
    StageKind(
        name="reward",
        makes="reward",
        section=RewardSection,
        method="tether.methods.reward",
        help="Train a reward model on comparisons",
    ),
    StageKind(
        name="process",
        makes="reward",
        section=ProcessSection,
        method="tether.methods.supervised",
        help="Train a reward model on judged steps of solutions (PRM, ORM)",
    ),
    StageKind(
        name="direct",
        makes="direct",
        section=DirectSection,
        method="tether.methods.supervised",
        help="Train on comparisons without a reward model (DPO, IPO, ORPO, SimPO)",
    ),
    StageKind(
        name="kto",
        makes="direct",
        section=KTOSection,
        method="tether.methods.supervised",
        help="Train on single answers marked good or bad (KTO)",
    ),
    StageKind(
        name="ppo",
        makes="policy",
        section=PPOSection,
        method="tether.methods.sampling",
        help="Raise the reward with a critic and a KL penalty (PPO)",
    ),
    StageKind(
        name="grpo",
        makes="policy",
        section=GRPOSection,
        method="tether.methods.sampling",
        help="Raise the reward by comparing answers to one prompt, no critic (GRPO, DAPO)",
    ),
    StageKind(
        name="reinforce",
        makes="policy",
        section=ReinforceSection,
        method="tether.methods.sampling",
        help="Raise the reward with the plain policy gradient (REINFORCE, RLOO)",
    ),
    StageKind(
        name="best_of_n",
        makes="policy",
        section=BestOfNSection,
        method="tether.methods.sampling",
        help="Imitate the best of many answers, again and again (RAFT)",
    ),
    StageKind(
        name="online_direct",
        makes="policy",
        section=OnlineDirectSection,
        method="tether.methods.sampling",
        help="DPO on the policy's own answers, ordered by the reward",
    ),
    StageKind(
        name="rounds",
        makes="rounds",
        section=RoundsSection,
        method="tether.methods.rounds",
        help="Sample, make pairs, train on them, repeat (iterative DPO, SPIN)",
    ),
    StageKind(
        name="evaluate",
        makes="verdict",
        section=EvaluationSection,
        method="tether.methods.evaluate",
        help="Compare policies with the start model on held-out prompts",
    ),
)
STAGES = {kind.name: kind for kind in _ROWS}
"""By the name of a recipe's section, in the order in which a recipe runs them."""


def making(*what: str) -> list[str]:
    """Names of the stages that make one of these."""
    return [name for name, kind in STAGES.items() if kind.makes in what]
