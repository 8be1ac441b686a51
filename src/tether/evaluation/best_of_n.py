"""The best-of-n curve: what the proxy's favourites are worth to the gold score, as the choice widens."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tether.algorithms.overoptimization import best_of_n_weights, kl_best_of_n
from tether.evaluation.winrate import MaybeScores, mean_estimate


class CurvePoint(NamedTuple):
    """Best of n: its KL in nats, the mean proxy and gold score, the interval of gold, and the number of prompts."""

    n: int
    kl: float
    proxy: float
    gold: float
    low: float
    high: float
    count: int


def best_of_n_by_prompt(
    proxy: Sequence[MaybeScores], gold: Sequence[MaybeScores]
) -> tuple[list[int], NDArray[np.float64], NDArray[np.float64]]:
    """Estimate for every prompt the proxy and the gold score of the best by proxy of n = 1, 2, 4, … samples, up to the pool.

    Equation: algorithms.overoptimization.best_of_n_estimate.
    Shapes: a pool of samples a prompt; a sample counts where both scores are known. Gives the n, and (prompts, n) for each score.
    Raises: ``ValueError`` when lengths differ, a score is NaN, or no prompt has a sample with both scores.
    Trap: all prompts stand behind every n, so the largest is the smallest pool's size; a prompt of which nothing could be scored
    is left out.
    """
    if len(proxy) != len(gold) or any(len(p) != len(g) for p, g in zip(proxy, gold, strict=False)):
        raise ValueError("expected a proxy and a gold score for every sample of every prompt")
    pools = [
        torch.tensor(known, dtype=torch.float64).T.contiguous()
        for pool in zip(proxy, gold, strict=True)
        if (known := [pair for pair in zip(*pool, strict=True) if None not in pair])
    ]
    if not pools:
        raise ValueError("nothing to choose from: no sample has both a proxy and a gold score")
    if any(bool(pool.isnan().any()) for pool in pools):
        raise ValueError("NaN among the scores; a score that failed is None")
    largest = min(pool.shape[1] for pool in pools)
    sizes = [2**power for power in range(largest.bit_length()) if 2**power < largest] + [largest]
    values = torch.stack([torch.stack([pool @ best_of_n_weights(pool[0], n) for n in sizes], 1) for pool in pools])
    return sizes, values[:, 0].numpy(), values[:, 1].numpy()


def best_of_n_curve(
    proxy: Sequence[MaybeScores],
    gold: Sequence[MaybeScores],
    *,
    confidence: float = 0.95,
) -> list[CurvePoint]:
    """Estimate the best-of-n curve, with intervals of gold over prompts.

    Equation: the mean over prompts of best_of_n_estimate; KL ``log n − (n − 1)/n``.
    Paper: Gao et al. 2022, https://arxiv.org/abs/2210.10760.
    Shapes: a pool of samples a prompt, the last n being the size of the smallest; KL in nats a response, scores in their unit.
    Raises: as best_of_n_by_prompt.
    Trap: the intervals hold what prompts differ by, so neighbouring points move together. Whether gold falls after a peak is read
    off differences prompt by prompt (best_of_n_by_prompt), not off whether intervals overlap.
    """
    sizes, proxies, golds = best_of_n_by_prompt(proxy, gold)
    points = []
    for column, n in enumerate(sizes):
        estimate = mean_estimate(golds[:, column].tolist(), confidence=confidence)
        points.append(CurvePoint(n, kl_best_of_n(n), float(proxies[:, column].mean()), *estimate))
    return points
