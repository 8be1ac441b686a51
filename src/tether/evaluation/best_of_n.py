"""The best-of-n curve: what the proxy's favourites are worth to the gold score, as the choice widens."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from tether.algorithms.overoptimization import best_of_n_weights, kl_best_of_n
from tether.core.protocols import Engine
from tether.core.types import Json, Prompt, Rollout, Sampling, Score
from tether.evaluation.winrate import MaybeScores, before_and_after, mean_estimate
from tether.stats import Array

Scorer = Callable[[Sequence[Rollout]], Sequence[Score]]


class CurvePoint(NamedTuple):
    """Best of n: its KL in nats, the mean proxy and gold score, the interval of gold, and the number of prompts."""

    n: int
    kl: float
    proxy: float
    gold: float
    low: float
    high: float
    count: int


def best_of_n_by_prompt(proxy: Sequence[MaybeScores], gold: Sequence[MaybeScores]) -> tuple[list[int], Array, Array]:
    """Estimate for every prompt the proxy and the gold score of the best by proxy of n = 1, 2, 4, … samples, up to the pool.

    Equation: algorithms.overoptimization.best_of_n_estimate.
    Shapes: a pool of samples a prompt; a sample counts where both scores are known. Gives the n, and (prompts, n) for each score.
    Raises: ``ValueError`` when lengths differ, a score is NaN, or no prompt has a sample with both scores.
    Trap: all prompts stand behind every n, so the largest is the smallest pool's size; a prompt of which nothing could be scored
    is left out.
    """
    if len(proxy) != len(gold) or any(len(p) != len(g) for p, g in zip(proxy, gold, strict=False)):
        raise ValueError("expected a proxy and a gold score for every sample of every prompt")
    scored = [[pair for pair in zip(*pool, strict=True) if None not in pair] for pool in zip(proxy, gold, strict=True)]
    pools = [torch.tensor(pairs, dtype=torch.float64).T.contiguous() for pairs in scored if pairs]
    if not pools:
        raise ValueError("nothing to choose from: no sample has both a proxy and a gold score")
    if any(bool(pool.isnan().any()) for pool in pools):
        raise ValueError("NaN among the scores; a score that failed is None")
    largest = min(pool.shape[1] for pool in pools)
    sizes = [2**power for power in range(largest.bit_length()) if 2**power < largest] + [largest]
    values = torch.stack([torch.stack([pool @ best_of_n_weights(pool[0], n) for n in sizes], 1) for pool in pools])
    return sizes, values[:, 0].numpy(), values[:, 1].numpy()


def best_of_n_curve(proxy: Sequence[MaybeScores], gold: Sequence[MaybeScores], *, confidence: float = 0.95) -> list[CurvePoint]:
    """Estimate the best-of-n curve, with intervals of gold over prompts.

    Equation: the mean over prompts of best_of_n_estimate; KL ``log n − (n − 1)/n``.
    Paper: Gao et al. 2022, https://arxiv.org/abs/2210.10760.
    Shapes: a pool of samples a prompt, the last n being the size of the smallest; KL in nats a response, scores in their unit.
    Raises: as best_of_n_by_prompt.
    Trap: the intervals hold what prompts differ by, so neighbouring points move together. Whether gold falls after a peak is read
    off differences prompt by prompt (best_of_n_by_prompt), not off whether intervals overlap.
    """
    sizes, by_proxy, by_gold = best_of_n_by_prompt(proxy, gold)
    return [
        CurvePoint(n, kl_best_of_n(n), float(proxies.mean()), *mean_estimate(golds.tolist(), confidence=confidence))
        for n, proxies, golds in zip(sizes, by_proxy.T, by_gold.T, strict=True)
    ]


def favourites(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    reward: Scorer,
    judge: Scorer,
    sizes: Sequence[int],
    *,
    seed: int,
) -> dict[int, list[float | None]]:
    """The judge's scores, by n, of the answer that the reward likes best among the first n to each prompt.

    An answer whose reward failed is never the best; a prompt of which all failed has None. The judge is asked once for each pick.
    """
    groups = [group.rollouts for group in engine.generate(prompts, sampling, num_samples=max(sizes), seed=seed)]
    rewards = iter(score.value for score in reward([rollout for group in groups for rollout in group]))
    values = [[next(rewards) for _ in group] for group in groups]
    picks = {n: [(place, _favourite(pool[:n])) for place, pool in enumerate(values)] for n in sizes}
    chosen = sorted({(place, best) for row in picks.values() for place, best in row if best is not None})
    judged = {key: score.value for key, score in zip(chosen, judge([groups[p][k] for p, k in chosen]), strict=True)}
    return {n: [None if best is None else judged[place, best] for place, best in row] for n, row in picks.items()}


def _favourite(scores: Sequence[float | None]) -> int | None:
    """The place of the largest score; the first of equals."""
    scored = {place: score for place, score in enumerate(scores) if score is not None}
    return max(scored, key=scored.__getitem__, default=None)


def over_best_of_n(start: Mapping[int, MaybeScores], after: MaybeScores, groups: Sequence[str]) -> dict[str, Json]:
    """By n: best of n of the start (`before`) and one answer of the policy (`after`), gain and win rate, and KL of the former.

    What the reward buys without training, for n times the answers. Prompts that `start` does not reach are left out.
    Equation: KL ``log n − (n − 1)/n``, in nats a response, https://arxiv.org/abs/2210.10760.
    """
    rows = {n: before_and_after(picks, after[: len(picks)], groups[: len(picks)]) for n, picks in start.items()}
    return {str(n): {"kl": kl_best_of_n(n), **row} for n, row in rows.items() if row is not None}
