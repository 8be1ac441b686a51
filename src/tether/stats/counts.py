"""Proportions of independent trials of which few succeed, or few fail."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from tether.stats.groups import Array, Bounds

MOST_MISSED = 0.4
"""The part by which more of the draws than 1 − confidence may be missed: 7% in place of 5%."""
FEW = 10
"""Successes, or failures, from which on `mid_interval` holds its level by itself."""
_PLACES = 400


@lru_cache(maxsize=4096)
def few_interval(successes: int, total: int, confidence: float = 0.95) -> Bounds:
    """Compute the interval of a proportion by Blaker's acceptability, with mid-P.

    Equation: at p let ``γ(x) = min(P(X ≤ x), P(X ≥ x))`` of X from Binomial(n, p). The interval
    leaves p out where ``P(γ(X) < γ(x)) + P(γ(X) = γ(x)) / 2 ≤ 1 − confidence``, unless that missed
    more than 1.4 (1 − confidence) of all draws at this p: ``P(γ(X) ≤ γ(x))``.
    Paper: Blaker 2000, https://doi.org/10.2307/3315916; mid-P: Lancaster 1961,
    https://doi.org/10.1080/01621459.1961.10482105. The limit of 1.4 is ours. With it every p is
    held in 93% of draws or more, and in at most 97% if counts are large enough to allow it.
    Trap: where p is near 0 or 1 all misses may lie on one side.
    """
    if 2 * successes > total:
        low, high = few_interval(total - successes, total, confidence)
        return 1 - high, 1 - low
    from scipy.special import betaincinv

    # Clopper and Pearson's bounds lie outside
    tail = (1 - confidence) / 2
    share = successes / total
    high = float(betaincinv(successes + 1, total - successes, 1 - tail))
    if successes == 0:
        return 0.0, _farthest(0, total, 0.0, high, confidence)
    low = float(betaincinv(successes, total - successes + 1, tail))
    return (
        _farthest(successes, total, share, low, confidence),
        _farthest(successes, total, share, high, confidence),
    )


def _farthest(successes: int, total: int, inside: float, outside: float, level: float) -> float:
    """The value between two, as near to `outside` as possible, that the interval does not leave
    out.
    """
    places = np.linspace(inside, outside, _PLACES + 1)[1:]
    held = np.flatnonzero(np.logical_not(_left_out(places, successes, total, level)))
    if not len(held):
        return inside
    last = int(held[-1])
    inner = float(places[last])
    outer = float(places[min(last + 1, _PLACES - 1)])
    for _ in range(40):
        middle = (inner + outer) / 2
        if _left_out(np.array([middle]), successes, total, level)[0]:
            outer = middle
        else:
            inner = middle
    return inner


def _left_out(places: Array, successes: int, total: int, confidence: float) -> Array:
    """Of each p, True if the interval leaves it out."""
    from scipy.special import bdtr

    # counts beyond have no weight that shows
    most = min(total, int(places.max() * total + 12 * np.sqrt(places.max() * total + 1)) + 12)
    below = bdtr(np.arange(most + 1), total, places[:, None])
    mass = np.diff(below, axis=1, prepend=0.0)
    least = np.minimum(below, 1 - below + mass)
    own = least[:, [successes]]
    slack = 1e-9
    rarer = (mass * (least < own * (1 - slack))).sum(1)
    alike = (mass * (np.abs(least - own) <= own * slack)).sum(1)
    missed = 1 - confidence
    return (rarer + alike / 2 <= missed) & (rarer + alike <= (1 + MOST_MISSED) * missed)
