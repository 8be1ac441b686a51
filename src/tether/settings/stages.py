"""The table of stages: everything that reads a list of them reads this one. A new stage is a row
here, its settings, and the module that trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tether.core.types import Json, Prompt
from tether.settings.distill import DistillSection
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
from tether.settings.synonyms import METHODS

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
        method: the module with `train(job, rows, run, ranks)`, which trains and saves; a
            name, since settings load no torch.
        help: one line for the command line.
        check: the function (job, the recipe's model) that looks for the stage's own faults before
            the first stage begins, as `module:name`.
    """

    name: str
    makes: Makes
    section: type[Section]
    method: str
    help: str
    check: str = ""

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
    def share(self) -> int:
        """Its part of a budget of the whole run: a policy's training has twice as much."""
        return 1 + self.trains_policy

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


def _sampling(name: str, section: type[Section], words: str) -> StageKind:
    """The row of a stage that samples at every step; `words` are its help."""
    return StageKind(
        name=name,
        makes="policy",
        section=section,
        method="tether.runner.methods.sampling",
        help=words,
        check="tether.runner.assembly.checks:check_online",
    )


_ROWS = (
    StageKind(
        name="sft",
        makes="sft",
        section=SFTSection,
        method="tether.runner.methods.supervised",
        help="Fine-tune on demonstrations (SFT)",
        check="tether.runner.methods.writing:check_writing",
    ),
    StageKind(
        name="pairs",
        makes="pairs",
        section=PairsSection,
        method="tether.runner.methods.pairs",
        help="Sample answers, choose pairs of them, and collect judgments",
        check="tether.runner.methods.pairs:check_pairs",
    ),
    StageKind(
        name="reward",
        makes="reward",
        section=RewardSection,
        method="tether.runner.methods.reward",
        help="Train a reward model on comparisons",
        check="tether.runner.methods.reward:check_reward",
    ),
    StageKind(
        name="process",
        makes="reward",
        section=ProcessSection,
        method="tether.runner.methods.supervised",
        help="Train a reward model on judged steps of solutions (PRM, ORM)",
    ),
    StageKind(
        name="direct",
        makes="direct",
        section=DirectSection,
        method="tether.runner.methods.supervised",
        help="Train on comparisons without a reward model (DPO, IPO, ORPO, SimPO)",
    ),
    StageKind(
        name="kto",
        makes="direct",
        section=KTOSection,
        method="tether.runner.methods.supervised",
        help="Train on single answers marked good or bad (KTO)",
        check="tether.runner.methods.supervised:check_verdicts",
    ),
    _sampling("ppo", PPOSection, "Raise the reward with a critic and a KL penalty (PPO)"),
    _sampling(
        "grpo",
        GRPOSection,
        "Raise the reward by comparing answers to one prompt, no critic (GRPO, DAPO)",
    ),
    _sampling(
        "reinforce",
        ReinforceSection,
        "Raise the reward with the plain policy gradient (REINFORCE, RLOO)",
    ),
    _sampling(
        "distill",
        DistillSection,
        "Learn from a teacher's opinion of each token of the policy's own answers",
    ),
    _sampling(
        "best_of_n",
        BestOfNSection,
        "Imitate the best of many answers, again and again (RAFT)",
    ),
    _sampling(
        "online_direct",
        OnlineDirectSection,
        "DPO on the policy's own answers, ordered by the reward",
    ),
    StageKind(
        name="rounds",
        makes="rounds",
        section=RoundsSection,
        method="tether.runner.methods.rounds",
        help="Sample, make pairs, train on them, repeat (iterative DPO, SPIN)",
    ),
    StageKind(
        name="evaluate",
        makes="verdict",
        section=EvaluationSection,
        method="tether.runner.methods.evaluate",
        help="Compare policies with the start model on held-out prompts",
        check="tether.runner.methods.evaluate:check_evaluation",
    ),
)
STAGES = {kind.name: kind for kind in _ROWS}
"""By the name of a recipe's section, in the order in which a recipe runs them."""


def making(*what: str) -> list[str]:
    """Names of the stages that make one of these."""
    return [name for name, kind in STAGES.items() if kind.makes in what]


def method_stage(name: str) -> tuple[StageKind, Json]:
    """The stage that a method is, and the keys that make it this method."""
    if name in STAGES:
        return STAGES[name], {}
    section, key, value = METHODS[name]
    return STAGES[section], {key: value}


def by_place(name: str) -> list[str]:
    """The arguments of a method that may go by place; a reward only where the caller chooses it."""
    kind, fixed = method_stage(name)
    fields = kind.section.model_fields
    example = kind.section.model_construct(**fixed)
    rows = "prompts" if example.kind is Prompt and "prompts" not in fields else "data"
    scored = "reward_source" in fields and example.scorer is not None
    rest = (("reward", scored), ("judge", "judge" in fields))
    return ["model", rows, *(key for key, there in rest if there)]
