"""The table of stages: everything that reads a list of them reads this one. A new stage is a row
here and a module in `run`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Makes = Literal["sft", "reward", "direct", "policy", "rounds", "pairs", "verdict"]
POLICIES: tuple[Makes, ...] = ("policy", "direct", "rounds")
"""Results that are a policy: trained on its own samples, on rows, or on rows made of its samples in
rounds.
"""


@dataclass(frozen=True)
class StageKind:
    """A row of the table.

    Args:
        makes: what a finished stage leaves; a report shows those that make the same in the same
            way.
        home: module and class of the section; beside the class stands `train`, which trains and
            saves.
        help: one line for the command line.
    """

    name: str
    makes: Makes
    home: str
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

    @property
    def section(self) -> type[Any]:
        """The config class of the recipe's section."""
        return pkgutil.resolve_name(self.home)

    @property
    def train(self) -> Callable[..., dict[str, Any]]:
        """(section, context, rows, run directory) -> summary, with the result saved."""
        return pkgutil.resolve_name(f"{self.home.partition(':')[0]}:train")


_ROWS: tuple[tuple[str, Makes, str, str], ...] = (
    ("sft", "sft", "supervised:SFTSection", "Fine-tune on demonstrations (SFT)"),
    (
        "pairs",
        "pairs",
        "pairs:PairsSection",
        "Sample answers, choose pairs of them, have them judged",
    ),
    ("reward", "reward", "reward:RewardSection", "Train a reward model on comparisons"),
    (
        "process",
        "reward",
        "supervised:ProcessSection",
        "Train a reward model on judged steps of solutions (PRM, ORM)",
    ),
    (
        "direct",
        "direct",
        "supervised:DirectSection",
        "Train on comparisons without a reward model (DPO, IPO, ORPO, SimPO)",
    ),
    ("kto", "direct", "supervised:KTOSection", "Train on single answers marked good or bad (KTO)"),
    ("ppo", "policy", "online:PPOSection", "Raise the reward with a critic and a KL penalty (PPO)"),
    (
        "grpo",
        "policy",
        "online:GRPOSection",
        "Raise the reward by comparing answers to one prompt, no critic (GRPO, DAPO)",
    ),
    (
        "reinforce",
        "policy",
        "online:ReinforceSection",
        "Raise the reward with the plain policy gradient (REINFORCE, RLOO)",
    ),
    (
        "best_of_n",
        "policy",
        "online:BestOfNSection",
        "Imitate the best of many answers, again and again (RAFT)",
    ),
    (
        "online_direct",
        "policy",
        "online:OnlineDirectSection",
        "DPO on the policy's own answers, ordered by the reward",
    ),
    (
        "rounds",
        "rounds",
        "rounds:RoundsSection",
        "Sample, make pairs, train on them, repeat (iterative DPO, SPIN)",
    ),
    (
        "evaluate",
        "verdict",
        "evaluate:EvaluationSection",
        "Compare policies with their start on held-out prompts",
    ),
)
STAGES = {
    name: StageKind(name, makes, f"tether.run.{home}", text) for name, makes, home, text in _ROWS
}
"""By the name of a recipe's section, in the order in which a recipe runs them."""


def making(*what: str) -> list[str]:
    """Names of the stages that make one of these."""
    return [name for name, kind in STAGES.items() if kind.makes in what]
