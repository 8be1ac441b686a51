"""How far a training has moved the model from where it began, as its log tells.

Five measures, the surest that the log allows. The KL to the reference, and the margins of rewards that are log ratios to it, are
0 at the start whatever the rows, so that any value is movement. A loss on held-out rows is of the same rows before and after; a
new reward head ranks held-out pairs like a coin. Without those, what the log has is tried for a trend, and the run is called
still only where none of several columns has any and a rise worth having can be ruled out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tether.algorithms.preference_losses import REFERENCE_FREE
from tether.monitoring.doctor import Result, Unexamined, diagnose
from tether.monitoring.trends import KL, TRENDS, near_reference, still

Rows = Sequence[Mapping[str, Any]]
STILL_MARGIN = 0.05
"""Between the rewards of a pair: below it the better response is preferred by one percent."""
STILL_LOSS = 0.005
"""Share of a held-out loss."""
LEAST_STEPS, LEAST_UPDATES = 10, 5
"""Steps with samples, and updates on rows, after the warm-up, before a distance is judged."""


Reading = tuple[bool | None, str]
"""At rest or not (None: this measure cannot tell), and the number behind it."""


def check_movement(rows: Rows, settings: Mapping[str, Any], summary: Mapping[str, Any] | None = None) -> Result:
    """The model stands where it began, it does not, or the log cannot tell.

    Args:
        rows: of metrics.jsonl.
        settings: the section of the stage.
        summary: of the finished stage.
    """
    steady, results = after_warmup(rows), summary or {}
    least = LEAST_STEPS if any("reward/proxy" in row for row in rows) else LEAST_UPDATES
    if len(steady) < least:
        return Unexamined("movement", f"it takes {least} steps after the warm-up to tell, and there are {len(steady)}")
    readings = (_by_kl(rows), _by_margin(rows, settings), _by_loss(results), _by_ranking(results), _by_trend(steady))
    resting, evidence = next((reading for reading in readings if reading[0] is not None), (None, ""))
    if resting is None:
        reason = f"no distance from the start in the log, and {len(steady)} steps too few or too noisy for a trend"
        return Unexamined("movement", reason)
    if resting:
        rate = next((f" at a learning rate of up to {r:.2g}" for r in numbers(steady, "learning_rate") if r), "")
        evidence += f", after {len(rows)} steps{rate}"
    return diagnose("movement", evidence, {"still": resting})


def after_warmup(rows: Rows) -> Rows:
    """The rows from the highest learning rate on; all, where the rates are not known."""
    rates = [row.get("learning_rate") or 0.0 for row in rows]
    return rows[rates.index(max(rates)) :] if rates else rows


def numbers(rows: Rows, key: str) -> list[float]:
    """A column of a log, without what is missing or not finite."""
    return [row[key] for row in rows if isinstance(row.get(key), int | float) and math.isfinite(row[key])]


def _by_kl(rows: Rows) -> Reading:
    """How far the policy is from its reference; where it is exactly 0 throughout, the reference may move along."""
    kls = numbers(rows, KL)
    return near_reference(kls) if len(kls) >= LEAST_STEPS and any(kls) else (None, "")


def _by_margin(rows: Rows, settings: Mapping[str, Any]) -> Reading:
    """Rewards that are log ratios to a reference are all 0 before the first update."""
    pairs = [(row.get("reward_desirable"), row.get("reward_undesirable")) for row in rows]
    margins = numbers(rows, "margin") or [good - bad for good, bad in pairs if good is not None and bad is not None]
    if "beta" not in settings or settings.get("loss") in REFERENCE_FREE or len(margins) < LEAST_UPDATES:
        return None, ""
    value = statistics.fmean(margins[-max(3, len(margins) // 3) :])
    return abs(value) < STILL_MARGIN, f"the preferred responses are ahead by {value:.2g} in reward"


def _by_loss(summary: Mapping[str, Any]) -> Reading:
    before, after = summary.get("eval_loss_before"), summary.get("eval_loss")
    if not before or after is None:
        return None, ""
    return abs(after / before - 1) < STILL_LOSS, f"the held-out loss went from {before:.4g} to {after:.4g}"


def _by_ranking(summary: Mapping[str, Any]) -> Reading:
    """It has moved where it clearly beats a coin on ten pairs or more; that it does not would be no proof of rest."""
    accuracy = summary.get("heldout_accuracy")
    if not isinstance(accuracy, Mapping) or accuracy.get("count", 10) < 10 or not (accuracy.get("low") or 0) > 0.5:
        return None, ""
    return False, f"{accuracy['value']:.1%} of held-out pairs are ranked right, clearly more than half"


def _by_trend(rows: Rows) -> Reading:
    """Still: nothing that would change has a trend, and scores cannot have risen by half a deviation."""
    columns = {name: numbers(rows, name) for name in (*TRENDS, "loss", "margin", "accuracy")}
    spread = statistics.fmean(numbers(rows, "reward/proxy_std") or [math.inf])
    resting, trends = still(columns, spread)
    return resting, f"{'no trend' if resting else 'trends'}: {trends}"
