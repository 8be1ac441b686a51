"""What several reward models make of the same comparisons: each alone, all together, and how far they agree."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from tether.algorithms.reward_ensembles import Combine, combine_members, spread_of_members
from tether.data.comparisons import Ranking, pairs_of
from tether.evaluation.winrate import correlation, pairwise_accuracy, share_in_order
from tether.stages.reward import RewardModeling


class Distillation(RewardModeling):
    """A reward model that learns what others together say of each response, instead of the labels.

    L = (1/R) sum (r - t)^2 over the R responses of an update, t the teachers' score. As Fisch et al. 2024
    (https://arxiv.org/abs/2405.19316) distil a reward, of single responses rather than of differences.
    """

    def taught(self, teachers: Sequence[RewardModeling], rankings: Sequence[Ranking], combine: Combine) -> None:
        """Ask the teachers, once."""
        rows = [[value for values in teacher.scores(rankings) for value in values] for teacher in teachers]
        together = combine_members(torch.tensor(rows, dtype=torch.float64), combine).tolist()
        ids = [sequence.ids for ranking in rankings for sequence in ranking.sequences]
        self.targets = dict(zip(ids, together, strict=True))

    def step(self, rankings: list[Ranking]) -> dict[str, float]:
        """One update towards the teachers' scores."""
        assert self.learner is not None
        self._known.clear()
        count, total, leads, labels = sum(len(r.sequences) for r in rankings), 0.0, [], []
        for micro in self._micro_batches(rankings):
            sequences = [s for ranking in micro for s in ranking.sequences]
            scores = self._scores(sequences)
            loss = (scores - scores.new_tensor([self.targets[s.ids] for s in sequences])).square().sum() / count
            self.learner.backward(loss)
            total += float(loss.detach())
            places = pairs_of(micro)
            leads += (scores[places.chosen] - scores[places.rejected]).tolist()
            labels += places.probability
        return {"loss": total, "accuracy": share_in_order(leads, labels), **self.learner.step()}

    def center(self, rankings: Sequence[Ranking], limit: int = 32) -> None:
        """Nothing: its scores are on its teachers' scale."""
        self._known.clear()


def evaluate_members(members: Sequence[RewardModeling], rankings: Sequence[Ranking], num_ties: int = 0) -> dict[str, Any]:
    """Pairwise accuracy of the mean of standardized scores and of each member, and how far the members differ.

    `spread` is the mean over responses of the members' standard deviation; `correlation` is Pearson's between the scores of two
    members, over all pairs of members.
    """
    rows = [[values for ranked in member.scores(rankings) for values in ranked] for member in members]
    table = torch.tensor(rows, dtype=torch.float64)
    lengths = [s.num_trained for ranking in rankings for s in ranking.sequences]
    groups = [ranking.group for ranking in rankings for _ in ranking.chosen]
    labels = [p for ranking in rankings for p in ranking.probability]
    starts = list(itertools.accumulate((len(ranking.sequences) for ranking in rankings), initial=0))
    sides = [
        [start + i for start, ranking in zip(starts, rankings, strict=False) for i in getattr(ranking, side)]
        for side in ("chosen", "rejected")
    ]

    def accuracy(scores: Sequence[float]) -> dict[str, Any]:
        chosen, rejected = ([scores[i] for i in side] for side in sides)
        return pairwise_accuracy(chosen, rejected, groups, probabilities=labels).as_dict()

    together = combine_members(table).tolist()
    pearson = [correlation(a, b)["pearson"] for a, b in itertools.combinations(rows, 2)]
    return {
        "accuracy": accuracy(together),
        "ties": num_ties,
        "length_correlation": correlation(together, lengths),
        "score_mean": statistics.fmean(together),
        "score_std": statistics.pstdev(together),
        "member_accuracy": [accuracy(row)["value"] for row in rows],
        "spread": float(spread_of_members(table).mean()),
        "correlation": {"mean": statistics.fmean(pearson), "lowest": min(pearson)},
    }
