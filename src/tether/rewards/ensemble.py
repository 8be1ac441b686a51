"""Several trained reward models on one trunk as one cautious reward source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from tether.algorithms.reward_ensembles import Combine, combine_members, spread_of_members
from tether.core.types import Rollout, Score
from tether.data.batches import batches_for
from tether.data.chat import ChatEncoder
from tether.models.members import as_members
from tether.models.trunk import Role


class Scorers:
    """Reward models on one trunk, with the encoder that all of them were trained with; layers below their adapters run once."""

    def __init__(self, roles: Sequence[Role], encoder: ChatEncoder, micro_batch_tokens: int = 4096) -> None:
        self.members, self.encoder, self.micro_batch_tokens = as_members(roles), encoder, micro_batch_tokens
        for member in self.members:
            member.train_mode(False)

    @torch.no_grad()
    def table(self, rollouts: Sequence[Rollout]) -> Tensor:
        """(members, responses) scores of sampled token ids, float64."""
        sequences = [self.encoder.rollout_for_scoring(r.prompt_ids, r.response_ids) for r in rollouts]
        table = torch.full((len(self.members), len(rollouts)), torch.nan, dtype=torch.float64)
        for cut, batch in batches_for(self.members[0], sequences, self.encoder.pad_id, self.micro_batch_tokens):
            common = self.members[0].common(batch)
            for number, member in enumerate(self.members):
                table[number, cut] = member.scores(batch, common).double().cpu()
        return table


@dataclass
class EnsembleReward:
    """Scores the sampled token ids as `LearnedReward` does, by every member; the layers below their adapters run once.

    `Score.parts` holds each member's score, `member_0` and so on, and their standard deviation, `spread`.

    Args:
        members: reward models on one trunk, each with scores of deviation 1.
        encoder: the encoder that all of them were trained with.
        combine: what the members say on average, at worst, or on average less `uncertainty_weight` times their variance.
    """

    name = "ensemble"
    members: Sequence[Role]
    encoder: ChatEncoder
    combine: Combine = "mean"
    _: KW_ONLY
    uncertainty_weight: float = 0.1
    micro_batch_tokens: int = 4096

    def __post_init__(self) -> None:
        self.scorers = Scorers(self.members, self.encoder, self.micro_batch_tokens)

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score a rollout; where any member's number is not finite it is a failed score."""
        table = self.scorers.table(rollouts)
        values = combine_members(table, self.combine, uncertainty_weight=self.uncertainty_weight)
        spreads = spread_of_members(table).tolist()
        return [self._score(*row) for row in zip(table.T.tolist(), values.tolist(), spreads, strict=True)]

    def _score(self, opinions: list[float], value: float, spread: float) -> Score:
        parts = {**{f"member_{k}": opinion for k, opinion in enumerate(opinions)}, "spread": spread}
        return Score(value, parts=parts).finite("the reward ensemble", opinions)
