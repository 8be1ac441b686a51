"""Whether a training has moved anything: what its log tells of how far the model is from where it began.

Four measures, the surest that the log allows. The KL to the reference, and the margins of rewards that are log ratios to it, are
0 at the start whatever the rows, so that any value is movement. A loss on held-out rows is of the same rows before and after.
Without those, what the log has is tried for a trend, and the run is called still only where none of several columns has any and a
rise worth having can be ruled out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tether.monitoring.doctor import Finding, Healthy, Result, Untold
from tether.monitoring.trends import KL, TRENDS, near_reference, still

Rows = Sequence[Mapping[str, Any]]
STILL_MARGIN = 0.05
"""Between the rewards of a pair: below it the better response is preferred by one percent."""
STILL_LOSS = 0.005
"""Share of a held-out loss."""
LEAST_STEPS, LEAST_UPDATES = 10, 5
"""Steps with samples, and updates on rows, after the warm-up, before a distance is judged."""
ADVICE = (
    "Raise optimizer.learning_rate (adapters need 10 to 100 times the rate of a whole model; left out, it is chosen by lora), or "
    "train longer; look at grad_norm, and whether the scores or labels differ at all."
)


def moved(rows: Rows, settings: Mapping[str, Any], summary: Mapping[str, Any] | None = None) -> list[Result]:
    """One result: the model stands where it began, it does not, or the log cannot tell.

    Args:
        rows: of metrics.jsonl.
        settings: the section of the stage.
        summary: of the finished stage.
    """
    name, steady = "movement", after_warmup(rows)
    sampled = any("reward/proxy" in row for row in rows)
    least = LEAST_STEPS if sampled else LEAST_UPDATES
    if len(steady) < least:
        return [Untold(name, f"it takes {least} steps after the warm-up to tell, and there are {len(steady)}")]
    measures: tuple[Callable[[], tuple[bool, str] | None], ...] = (
        lambda: _by_kl(rows),
        lambda: _by_margin(rows, settings),
        lambda: _by_loss(summary or {}),
        lambda: _by_trend(steady),
    )
    resting, evidence = next((reading for measure in measures if (reading := measure()) is not None), (None, ""))
    if resting is None:
        return [Untold(name, f"no distance from the start in the log, and {len(steady)} steps too few or too noisy for a trend")]
    if not resting:
        return [Healthy(name, evidence)]
    rate = next((row["learning_rate"] for row in steady if row.get("learning_rate")), None)
    after = f"after {len(rows)} steps" + ("" if rate is None else f" at a learning rate of up to {rate:.2g}")
    return [Finding(name, "warning", "What was trained is still where it began.", f"{evidence}, {after}", ADVICE)]


def after_warmup(rows: Rows) -> Rows:
    """The rows from the highest learning rate on; all, where the rates are not known."""
    rates = [row.get("learning_rate") or 0.0 for row in rows]
    return rows[rates.index(max(rates)) :] if rates else rows


def _late(values: Sequence[float]) -> float:
    return statistics.fmean(values[-max(3, len(values) // 3) :])


def _by_kl(rows: Rows) -> tuple[bool, str] | None:
    """How far the policy is from its reference; where it is exactly 0 throughout, the reference may move along."""
    kls = _known(rows, KL)
    verdict, words = near_reference(kls) if len(kls) >= LEAST_STEPS and any(kls) else (None, "")
    return None if verdict is None else (verdict, words)


def _by_margin(rows: Rows, settings: Mapping[str, Any]) -> tuple[bool, str] | None:
    """Rewards that are log ratios to a reference are all 0 before the first update."""
    if "beta" not in settings or settings.get("loss") in ("orpo", "simpo"):
        return None
    margins = _known(rows, "margin")
    if not margins:
        both = [(row.get("reward_desirable"), row.get("reward_undesirable")) for row in rows]
        margins = [good - bad for good, bad in both if good is not None and bad is not None]
    if len(margins) < LEAST_UPDATES:
        return None
    value = _late(margins)
    return abs(value) < STILL_MARGIN, f"the preferred responses are ahead by {value:.2g} in reward"


def _by_loss(summary: Mapping[str, Any]) -> tuple[bool, str] | None:
    before, after = summary.get("eval_loss_before"), summary.get("eval_loss")
    if not before or after is None:
        return None
    return abs(after / before - 1) < STILL_LOSS, f"the held-out loss went from {before:.4g} to {after:.4g}"


def _by_trend(rows: Rows) -> tuple[bool, str] | None:
    """Still: nothing that would change has a trend, and scores cannot have risen by half a deviation."""
    columns = {name: _known(rows, name) for name in (*TRENDS, "loss", "margin", "accuracy")}
    spread = statistics.fmean(_known(rows, "reward/proxy_std") or [math.inf])
    verdict, trends = still({name: values for name, values in columns.items() if values}, spread)
    return None if verdict is None else (verdict, f"{'no trend' if verdict else 'trends'}: {trends}")


def _known(rows: Rows, key: str) -> list[float]:
    return [row[key] for row in rows if isinstance(row.get(key), int | float) and math.isfinite(row[key])]
