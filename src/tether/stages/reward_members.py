"""What several reward models make of the same comparisons: each alone, all together, and how far they agree."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from tether.algorithms.reward_ensembles import combine_members, spread_of_members
from tether.data.comparisons import Ranking
from tether.evaluation.winrate import correlation, pairwise_accuracy
from tether.stages.reward import RewardModeling


def evaluate_members(members: Sequence[RewardModeling], rankings: Sequence[Ranking], num_ties: int = 0) -> dict[str, Any]:
    """Pairwise accuracy of the mean of standardized scores and of each member, and how far the members differ.

    `spread` is the mean over responses of the members' standard deviation; `correlation` is Pearson's between the scores of two
    members, over all pairs of members.
    """
    rows = [[values for ranked in member.scores(rankings) for values in ranked] for member in members]
    table = torch.tensor(rows, dtype=torch.float64)
    lengths = [s.num_trained for ranking in rankings for s in ranking.sequences]
    groups = [ranking.group for ranking in rankings for _ in ranking.chosen]
    starts = list(itertools.accumulate((len(ranking.sequences) for ranking in rankings), initial=0))
    sides = [
        [start + i for start, ranking in zip(starts, rankings, strict=False) for i in getattr(ranking, side)]
        for side in ("chosen", "rejected")
    ]

    def accuracy(scores: Sequence[float]) -> dict[str, Any]:
        chosen, rejected = ([scores[i] for i in side] for side in sides)
        return pairwise_accuracy(chosen, rejected, groups).as_dict()

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
