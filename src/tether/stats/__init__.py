"""Numbers with intervals that show their reliability, for observations that are correlated within
groups.

All intervals are computed here. Standard errors come from leaving out one group at a time (the
jackknife). Each kind of number has its own interval:

- `means`: means
- `shares`: shares and differences of two shares
- `trends`: the movement of a series
- `contests`: the best of several against the best of others
- `peaks`: the place of the highest mean

`python -m benchmarks.coverage` measures the coverage of each. If observations are too few, or too
much alike, the bounds are infinite, and `Estimate.reason` has the reason.
"""

from tether.stats.contests import best_against_best as best_against_best
from tether.stats.counts import few_interval as few_interval
from tether.stats.estimates import TOO_FEW as TOO_FEW
from tether.stats.estimates import Estimate as Estimate
from tether.stats.estimates import EstimateFields as EstimateFields
from tether.stats.estimates import shown_difference as shown_difference
from tether.stats.estimates import side as side
from tether.stats.estimates import without_interval as without_interval
from tether.stats.groups import Array as Array
from tether.stats.groups import Influence as Influence
from tether.stats.groups import group_indices as group_indices
from tether.stats.groups import in_accord as in_accord
from tether.stats.groups import jackknife as jackknife
from tether.stats.means import grouped_mean as grouped_mean
from tether.stats.means import mean_interval as mean_interval
from tether.stats.means import mean_of_runs as mean_of_runs
from tether.stats.peaks import peak as peak
from tether.stats.shares import grouped_balance as grouped_balance
from tether.stats.shares import grouped_share as grouped_share
from tether.stats.shares import mid_interval as mid_interval
from tether.stats.shares import share_interval as share_interval
from tether.stats.shares import trials_interval as trials_interval
from tether.stats.shares import wilson_interval as wilson_interval
from tether.stats.significance import holm as holm
from tether.stats.significance import p_above_zero as p_above_zero
from tether.stats.trends import Trend as Trend
from tether.stats.trends import trend as trend
from tether.stats.trends import vague as vague
