"""The doctor's checks on the rows of a finished or interrupted run, of tether or of another library.

A log is watched a step at a time, as the run was, by all `CHECKS` of the table. What fired is a
finding; besides, the doctor looks at all steps together.

Five measures can show that training has moved the model. The check takes the most reliable one of
the log:

- The KL to the reference, and margins of rewards that are log ratios to it, are 0 at the start for
  all rows. So any value is movement.
- A loss on held-out rows uses the same rows before and after.
- A new reward head ranks held-out pairs at random.
- Otherwise columns of the log are tested for a trend. The run counts as unmoved only if none of
  several columns has one, and a relevant rise can be ruled out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from tether.core.budget import BUDGET
from tether.core.types import Alarm, Facts, Json
from tether.settings.supervised import REFERENCE_FREE
from tether.settings.watch import WatchConfig
from tether.watch.monitoring.detectors import CHECKS
from tether.watch.monitoring.doctor import Finding, Healthy, Result, Unexamined, diagnose
from tether.watch.monitoring.trends import KL, TRENDS, near_reference, still
from tether.watch.monitoring.watch import Watch

Rows = Sequence[Facts]
STILL_MARGIN = 0.05
"""Between the rewards of a pair: below it the better response is preferred by one percent."""
STILL_LOSS = 0.005
"""Share of a held-out loss."""
SELDOM = 0.1
"""Share of a log's steps in which a fault may show and be an accident."""
SELDOM_ENDED = 0.2
"""Share of answers that end by themselves, at or below which most are cut off."""
LEAST_STEPS, LEAST_UPDATES = 10, 5
"""Steps with samples, and updates on rows, after the warm-up, before a distance is judged."""


def check_rows(rows: Rows, settings: Facts) -> list[Result]:
    """Every check of the log of a stage that samples, by the limits that the run itself had.

    Args:
        rows: of metrics.jsonl.
        settings: the section of the stage, as the run's config.json has it.
    """
    # the check of movement has two, and two read texts
    left_out = {"kl_stuck", "unmoved", "length_gaming", "exploit_tokens"}
    if settings.get("surrogate") == "sequence" or settings.get("algorithm") == "gspo":
        left_out.add("long_updates")  # a large part of whole sequences is meant to be clipped
    if rows[0].get("step") != 1:
        left_out.add("wrong_reference")
    checks = {name: check for name, check in CHECKS.items() if name not in left_out}
    watch = Watch(WatchConfig.model_construct(**settings.get("watch", {})), checks)
    fired: dict[str, Alarm] = {}
    for place, row in enumerate(rows, 1):
        seen = {**row, **_derived(row), "run/share": place / len(rows)}
        for alarm in watch.observe_texts(int(row.get("step") or place), seen, []):
            fired.setdefault(alarm.detector, alarm)
    hidden = watch.hidden()
    return [
        *(_result(name, watch, fired.get(name), hidden) for name in watch.checks),
        check_scores(rows),
        check_movement(rows, settings),
    ]


def _derived(row: Facts) -> Json:
    """Columns that checks read beside those of the log."""
    kl = row.get(KL)
    spread = row.get("reward/proxy_std")
    price = row.get("kl/price") or (
        row["kl/coefficient"] / spread if spread and row.get("kl/coefficient") else None
    )
    return {
        "kl/price": price,
        "kl/negative": None if kl is None else -kl,
        "kl/paid": None if kl is None or price is None else kl * price,
        # samples of older weights differ for that alone
        "policy/engine_gap": None if row.get("policy/staleness") else row.get("policy/engine_gap"),
    }


def _result(
    name: str,
    watch: Watch,
    alarm: Alarm | None,
    hidden: Mapping[str, float | None],
) -> Result:
    check = watch.checks[name]
    limit = watch.threshold(name)
    if alarm is not None:
        message = f"{alarm.message[:1].upper()}{alarm.message[1:]}."
        return Finding(name, check.severity, message, f"Step {alarm.step}.", check.advice)
    if name in hidden:
        least = hidden[name]
        shown = "no change shows" if least is None else f"changes show from {least:.2g}"
        return Unexamined(name, f"the noise of so few answers a step: {shown} (limit {limit:g})")
    value = math.nan if watch.view is None else check.measure(watch.view).value
    if math.isnan(value):
        return Unexamined(name, "its numbers are not in the log, or too few")
    return Healthy(name, f"{value:.3g} at the end (limit {limit:g})")


def check_samples(rows: Rows) -> list[Result]:
    """The checks of a few samplings: answers that end by themselves, and scores.

    Args:
        rows: columns of metrics.jsonl, one row for all samples that were drawn together.
    """
    results = [check_scores(rows)] if any("reward/proxy" in row for row in rows) else []
    if rates := numbers(rows, "response/stop_rate"):
        evidence = f"{rates[0]:.0%} of answers ended at first, {rates[-1]:.0%} at last"
        faults = {"answers-mostly-cut-off": rates[-1] <= SELDOM_ENDED}
        results.append(diagnose("stop tokens", evidence, faults))
    return results


def check_scores(rows: Rows) -> Result:
    """Scores that differ and do not fail."""
    proxies = [row["reward/proxy"] for row in rows if "reward/proxy" in row]
    spreads = numbers(rows, "reward/proxy_std")
    failed = sum(numbers(rows, "reward/failed"))
    if not proxies:
        return Unexamined("scores", "no scores in the log")
    evidence = (
        f"{len(proxies)} steps, {failed:.0f} failed scores, {proxies.count(None)} steps "
        "without a finite mean"
    )
    if spreads:
        evidence += f", deviation {statistics.median(spreads):.3g}"
    equal = not any(spread > 1e-6 for spread in spreads)
    none = proxies.count(None)
    faults = {
        "steps-without-a-score": none > SELDOM * len(proxies),
        "scores-of-steps-equal": equal,
        "some-steps-without-a-score": none > 0,
        "rewards-failed": failed > 0,
    }
    return diagnose("scores", evidence, faults)


def seconds_left_out(summary: Facts) -> float:
    """Seconds of the steps that a budget has left out of a training. Those of prompts are not
    known.
    """
    ended = summary.get(BUDGET) or {}
    return float(ended.get("left_out", 0.0))


def check_time(section: str, settings: Facts, summary: Facts, missing: float) -> list[Result]:
    """The check of a training that a budget has ended: it had some steps to learn from.

    Args:
        section: the name of the stage's section in the recipe, which has these settings.
        missing: the seconds that budgets have left out of the whole run.
    """
    ended = summary.get(BUDGET)
    if not ended or section == "rounds" or "left_out" not in ended:
        return []
    done = ended["ended_at"]
    total = ended["total"]
    minutes = ended["minutes"]
    own = bool(settings.get(BUDGET))
    enough = minutes + (seconds_left_out(summary) if own else missing) / 60
    evidence = f"{done} of {total} steps in a budget of {minutes:g} minutes"
    words = {
        "done": str(done),
        "total": str(total),
        "key": f"{section}.{BUDGET}" if own else BUDGET,
        "minutes": str(math.ceil(enough)),
    }
    return [
        diagnose("budget", evidence, {"ended-too-soon": done < min(LEAST_STEPS, total)}, **words),
    ]


Reading = tuple[bool | None, str]
"""At rest or not (None: this measure cannot tell), and the number behind it."""


def check_movement(rows: Rows, settings: Facts, summary: Facts | None = None) -> Result:
    """The model is unmoved, or has moved, or the log cannot show it.

    Args:
        rows: of metrics.jsonl.
        settings: the section of the stage.
        summary: of the finished stage.
    """
    rates = [row.get("learning_rate") or 0.0 for row in rows]
    steady = rows[rates.index(max(rates)) :] if rates else rows  # after the warm-up
    results = summary or {}
    least = LEAST_STEPS if any("reward/proxy" in row for row in rows) else LEAST_UPDATES
    if len(steady) < least:
        return Unexamined(
            "movement",
            f"it takes {least} steps after the warm-up to tell, and there are {len(steady)}",
        )
    readings = (
        _by_kl(rows),
        _by_margin(rows, settings),
        _by_loss(results),
        _by_ranking(results),
        _by_trend(steady),
    )
    resting, evidence = next(
        (reading for reading in readings if reading[0] is not None),
        (None, ""),
    )
    if resting is None:
        reason = (
            f"no distance from the start in the log, and {len(steady)} steps too few or too "
            "noisy for a trend"
        )
        return Unexamined("movement", reason)
    if resting:
        rate = next(
            (
                f" at a learning rate of up to {r:.2g}"
                for r in numbers(steady, "learning_rate")
                if r
            ),
            "",
        )
        evidence += f", after {len(rows)} steps{rate}"
    return diagnose("movement", evidence, {"still": resting})


def numbers(rows: Rows, key: str) -> list[float]:
    """A column of a log, without what is missing or not finite."""
    return [
        row[key]
        for row in rows
        if isinstance(row.get(key), int | float) and math.isfinite(row[key])
    ]


def _by_kl(rows: Rows) -> Reading:
    """Distance of the policy from its reference. If the distance is exactly 0 throughout, the
    reference may move along.
    """
    kls = numbers(rows, KL)
    return near_reference(kls) if len(kls) >= LEAST_STEPS and any(kls) else (None, "")


def _by_margin(rows: Rows, settings: Facts) -> Reading:
    """Rewards that are log ratios to a reference are all 0 before the first update."""
    pairs = [(row.get("reward_desirable"), row.get("reward_undesirable")) for row in rows]
    margins = numbers(rows, "margin") or [
        good - bad for good, bad in pairs if good is not None and bad is not None
    ]
    if (
        "beta" not in settings
        or settings.get("loss") in REFERENCE_FREE
        or len(margins) < LEAST_UPDATES
    ):
        return None, ""
    value = statistics.fmean(margins[-max(3, len(margins) // 3) :])
    return abs(value) < STILL_MARGIN, f"the preferred responses are ahead by {value:.2g} in reward"


def _by_loss(summary: Facts) -> Reading:
    before = summary.get("eval_loss_before")
    after = summary.get("eval_loss")
    if not before or after is None:
        return None, ""
    return abs(after / before - 1) < STILL_LOSS, (
        f"the held-out loss went from {before:.4g} to {after:.4g}"
    )


def _by_ranking(summary: Facts) -> Reading:
    """It has moved where it clearly beats a coin on ten pairs or more; that it does not would be no
    proof of rest.
    """
    accuracy = summary.get("heldout_accuracy")
    if (
        not isinstance(accuracy, Mapping)
        or accuracy.get("count", 10) < 10
        or not (accuracy.get("low") or 0) > 0.5
    ):
        return None, ""
    return (
        False,
        f"{accuracy['value']:.1%} of held-out pairs are ranked right, clearly more than half",
    )


def _by_trend(rows: Rows) -> Reading:
    """Still: nothing that would change has a trend, and scores cannot have risen by half a
    deviation.
    """
    columns = {name: numbers(rows, name) for name in (*TRENDS, "loss", "margin", "accuracy")}
    spread = statistics.fmean(numbers(rows, "reward/proxy_std") or [math.inf])
    resting, trends = still(columns, spread)
    return resting, f"{'no trend' if resting else 'trends'}: {trends}"
