"""Several reward models of the same comparisons: each alone, all together, their student, and how far they agree."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from tether.algorithms.reward_ensembles import Combine, combine_members, spread_of_members
from tether.core.types import Json
from tether.data.prepare import Ranking, pairs_of, sequences_of
from tether.evaluation.winrate import correlation, pairwise_accuracy, share_in_order
from tether.stages.reward import RewardModeling
from tether.stages.supervised import Update


class Distillation(RewardModeling):
    """A reward model that learns the scores that others together give each response, instead of the labels.

    L = (1/R) sum (r - t)^2 over the R responses of an update, t the teachers' score. As Fisch et al. 2024
    (https://arxiv.org/abs/2405.19316) distil a reward, of single responses rather than of differences.
    """

    def taught(self, teachers: Sequence[RewardModeling], rankings: Sequence[Ranking], combine: Combine) -> None:
        """Ask the teachers, once."""
        together = combine_members(_table(teachers, rankings), combine).tolist()
        self.targets = dict(zip((s.ids for s in sequences_of(rankings)), together, strict=True))

    def update(self, rankings: Sequence[Ranking]) -> Update[list[Ranking]]:
        """One update towards the teachers' scores."""
        micros, count = self.micro_batches(rankings), sum(len(r.sequences) for r in rankings)

        def loss(micro: list[Ranking]) -> tuple[Tensor, list[float]]:
            sequences, pairs = sequences_of(micro), pairs_of(micro)
            scores = self.heads(sequences)[:, 0]
            distances = scores - scores.new_tensor([self.targets[s.ids] for s in sequences])
            return distances.square().sum() / count, (scores[pairs.chosen] - scores[pairs.rejected]).tolist()

        labels = pairs_of(list(itertools.chain(*micros))).probability
        return Update(micros, loss, lambda leads: {"accuracy": share_in_order(list(itertools.chain(*leads)), labels)})

    def center(self, rankings: Sequence[Ranking]) -> None:
        """Nothing: its scores are on its teachers' scale."""


def _table(members: Sequence[RewardModeling], rankings: Sequence[Ranking]) -> Tensor:
    """(members, responses) float64 scores."""
    rows = [[score for row in member.scores(rankings) for score in row] for member in members]
    return torch.tensor(rows, dtype=torch.float64)


def evaluate_members(members: Sequence[RewardModeling], rankings: Sequence[Ranking], num_ties: int = 0) -> Json:
    """Pairwise accuracy of the mean of standardized scores and of each member, and how far the members differ.

    `spread` is the mean over responses of the members' standard deviation; `correlation` is Pearson's between the scores of two
    members, over all pairs of members.
    """
    table, pairs = _table(members, rankings), pairs_of(rankings)
    rows, together = table.tolist(), combine_members(table).tolist()

    def accuracy(scores: Sequence[float]) -> Json:
        chosen, rejected = ([scores[i] for i in side] for side in (pairs.chosen, pairs.rejected))
        return pairwise_accuracy(chosen, rejected, pairs.groups, probabilities=pairs.probability).as_dict()

    pearson = [correlation(a, b)["pearson"] for a, b in itertools.combinations(rows, 2)]
    return {
        "accuracy": accuracy(together),
        "ties": num_ties,
        "length_correlation": correlation(together, [s.num_trained for s in sequences_of(rankings)]),
        "score_mean": statistics.fmean(together),
        "score_std": statistics.pstdev(together),
        "member_accuracy": [accuracy(row)["value"] for row in rows],
        "spread": float(spread_of_members(table).mean()),
        "correlation": {"mean": statistics.fmean(pearson), "lowest": min(pearson)},
    }
