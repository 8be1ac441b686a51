"""Numbers with intervals that show their reliability, for observations that are correlated within
groups.

All intervals are computed here. Standard errors come from leaving out one group at a time (the
jackknife). Each kind of number has its own interval:

- `means`: means
- `shares`: shares and differences of two shares
- `trends`: the movement of a series
- `contests`: the best of several against the best of others, and the place of the highest mean

`python -m benchmarks.coverage` measures the coverage of each. If observations are too few, or too
much alike, the bounds are infinite, and `Estimate.reason` has the reason.
"""

from tether.stats.contests import best_against_best, peak
from tether.stats.counts import few_interval
from tether.stats.estimates import (
    TOO_FEW,
    Estimate,
    EstimateFields,
    holm,
    p_above_zero,
    shown_difference,
    side,
    without_interval,
)
from tether.stats.groups import Array, Influence, group_indices, in_accord, jackknife
from tether.stats.means import grouped_mean, mean_interval, mean_of_runs
from tether.stats.shares import (
    grouped_balance,
    grouped_share,
    mid_interval,
    share_interval,
    trials_interval,
    wilson_interval,
)
from tether.stats.trends import Trend, trend, vague

__all__ = [
    "Array",
    "Estimate",
    "EstimateFields",
    "Influence",
    "TOO_FEW",
    "Trend",
    "best_against_best",
    "few_interval",
    "group_indices",
    "grouped_balance",
    "grouped_mean",
    "grouped_share",
    "holm",
    "in_accord",
    "jackknife",
    "mean_interval",
    "mean_of_runs",
    "mid_interval",
    "p_above_zero",
    "peak",
    "share_interval",
    "shown_difference",
    "side",
    "trend",
    "trials_interval",
    "vague",
    "wilson_interval",
    "without_interval",
]
