"""The doctor's checks on the rows of a finished or interrupted run, as far as its log shows faults
of the set-up.

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
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tether.core.budget import BUDGET
from tether.core.types import Facts
from tether.monitoring.doctor import Finding, Result, Unexamined, diagnose, kl_scale
from tether.monitoring.trends import HELD_KL, HELD_PRICE, KL, TRENDS, near_reference, still
from tether.settings.supervised import REFERENCE_FREE

Rows = Sequence[Facts]
STILL_MARGIN = 0.05
"""Between the rewards of a pair: below it the better response is preferred by one percent."""
STILL_LOSS = 0.005
"""Share of a held-out loss."""
FIRST_RATIO, SELDOM = 0.05, 0.1
"""Of the ratio before an update; and the share of a log's steps in which a fault may show and be an
accident.
"""
SELDOM_ENDED = 0.2
"""Share of answers that end by themselves, at or below which most are cut off."""
LEAST_STEPS, LEAST_UPDATES = 10, 5
"""Steps with samples, and updates on rows, after the warm-up, before a distance is judged."""


class StageLog(NamedTuple):
    """The rows of metrics.jsonl, and the section of the stage as the run's config.json has it."""

    rows: Rows
    settings: Facts


def reference_at_start(log: StageLog, kls: list[float]) -> Result:
    """The first step's samples are the reference's own, and later ones are not."""
    evidence = (
        f"KL {kls[0]:.3g} nats a response at the first step, {kls[-1]:.3g} at the last of "
        f"{len(kls)}"
    )
    follows = (
        len(kls) >= 3 and not any(kls) and any(norm > 0 for norm in numbers(log.rows, "grad_norm"))
    )
    faults = {
        "reference-is-not-the-start": log.rows[0].get("step") == 1 and abs(kls[0]) > 0.5,
        "reference-moves-along": follows,
    }
    return diagnose("shared weights" if follows else "reference", evidence, faults)


def kl_sign_logged(log: StageLog, kls: list[float]) -> Result:
    """The KL is a divergence: estimates of it are not negative on average."""
    late = statistics.fmean(kls[-max(3, len(kls) // 3) :])
    evidence = (
        f"KL {min(kls):.3g} to {max(kls):.3g} nats a response, {late:.3g} in the last "
        "third of the steps"
    )
    return diagnose("KL sign", evidence, {"kl-negative": len(kls) >= 3 and late < -0.5})


def moved_too_far(log: StageLog, clipped: list[float], kls: list[float]) -> Result:
    """Check how far the updates on one batch of rollouts carry the policy from the one that drew
    them.
    """
    if log.settings.get("surrogate") == "sequence" or log.settings.get("algorithm") == "gspo":
        clipped = [0.0]  # whole sequences are clipped at 1e-4: a large part of them is meant to be
    fraction, kl = statistics.median(clipped), statistics.median(kls)
    evidence = f"median: {fraction:.1%} of tokens clipped, KL(old || new) {kl:.2g} nats a token"
    faults = {
        "updates-far-too-long": fraction > 0.4 or kl > 0.15,
        "updates-too-long": fraction > 0.2 or kl > 0.05,
    }
    return diagnose("epochs", evidence, faults)


def check_update(metrics: Facts) -> Finding | None:
    """The error of a single step whose updates went far too long, as soon as it has been made;
    None: it shows none.
    """
    clipped, kls = (numbers([metrics], name) for name in MOVEMENT)
    result = moved_too_far(StageLog([metrics], {}), clipped or [0.0], kls or [0.0])
    return result if isinstance(result, Finding) and result.severity == "error" else None


def first_ratio(log: StageLog, deviations: list[float]) -> Result:
    """Before an update the ratio is 1, unless dropout or other numerics separate old and new.

    Either shows at almost every step. In many steps, one may hold a token whose logarithm changes
    much by rounding.
    """
    off = sum(deviation > FIRST_RATIO for deviation in deviations)
    evidence = f"before any update the ratio is 1 to within {max(deviations):.2g}"
    evidence += f"; farther than {FIRST_RATIO:g} in {off} of {len(deviations)} steps" if off else ""
    often = off > SELDOM * len(deviations)
    return diagnose(
        "dropout",
        evidence,
        {"first-ratio-is-not-one": often, "first-ratio-strays": off > 0},
    )


def engine_gap(log: StageLog, gaps: list[float]) -> Result:
    """The engine's log-probabilities of its own samples against the learner's, where both had the
    same weights.
    """
    gaps = (
        numbers([row for row in log.rows if not row.get("policy/staleness")], "policy/engine_gap")
        or gaps
    )
    gap = statistics.median(gaps)
    evidence = (
        f"engine and learner differ by {gap:.3g} nats a token (median over {len(gaps)} steps)"
    )
    return diagnose("temperature", evidence, {"engine-disagreed": gap > 0.12})


def answers_end(log: StageLog, rates: list[float], lengths: list[float]) -> Result:
    """Answers end by themselves, and neither shrink to nothing nor grow to the limit."""
    span = max(1, len(rates) // 10)
    first, last, short = (
        statistics.fmean(values) for values in (rates[:span], rates[-span:], lengths[-span:])
    )
    evidence = f"{first:.0%} of answers ended in the first steps, {last:.0%} in the last; "
    evidence += f"length {lengths[0]:.0f} to {short:.0f} tokens"
    cut = max(rates) < 0.02
    shrunk = short <= 2 < lengths[0] / 4
    endless = last < 0.2 and first > 0.5
    check = "empty or endless answers" if (shrunk or endless) and not cut else "stop tokens"
    faults = {"answers-cut-off": cut, "answers-shrunk": shrunk, "answers-run-on": endless}
    return diagnose(check, evidence, {**faults, "answers-mostly-cut-off": last <= SELDOM_ENDED})


def scores_logged(log: StageLog) -> Result:
    """Scores that differ and do not fail."""
    proxies = [row["reward/proxy"] for row in log.rows if "reward/proxy" in row]
    spreads, failed = numbers(log.rows, "reward/proxy_std"), sum(numbers(log.rows, "reward/failed"))
    if not proxies:
        return Unexamined("scores", "no scores in the log")
    evidence = (
        f"{len(proxies)} steps, {failed:.0f} failed scores, {proxies.count(None)} steps "
        "without a finite mean"
    )
    if spreads:
        evidence += f", deviation {statistics.median(spreads):.3g}"
    equal, none = not any(spread > 1e-6 for spread in spreads), proxies.count(None)
    faults = {
        "steps-without-a-score": none > SELDOM * len(proxies),
        "scores-of-steps-equal": equal,
        "some-steps-without-a-score": none > 0,
    }
    faults["rewards-failed"] = failed > 0
    return diagnose("scores", evidence, faults)


def kl_weight(log: StageLog) -> Result:
    """Scores weigh about as much as the KL that was reached, and the penalty lets the policy go
    there.
    """
    paid, kls, spreads = (
        numbers(log.rows, key) for key in ("kl/coefficient", KL, "reward/proxy_std")
    )
    reached = statistics.fmean(kls[-max(1, len(kls) // 5) :]) if kls else 0.0
    settings, proxies = log.settings, numbers(log.rows, "reward/proxy")
    in_loss = settings.get("kl", {}).get("place", "token") == "loss"
    if (
        not paid
        or not paid[-1]
        or not (kls and proxies)
        or not any(spread > 1e-6 for spread in spreads)
    ):
        return Unexamined("KL scale", "no KL is paid, or all scores are equal: nothing to weigh")
    spread = unit = statistics.median(spreads)
    if settings.get("normalize_scores") and spreads[0] > 1e-6:
        unit = spread / spreads[0]
    if settings.get("scale_advantages") or (in_loss and settings.get("whiten_advantages")):
        unit = 1.0
    third = max(1, len(proxies) // 3)
    rise = (statistics.fmean(proxies[-third:]) - statistics.fmean(proxies[:third])) / spread
    if (
        paid[-1] >= HELD_PRICE * unit
        and reached < HELD_KL
        and rise < 0.5
        and len(after_warmup(log.rows)) >= LEAST_STEPS
    ):
        evidence = (
            f"coefficient {paid[-1]:g}: a nat costs {paid[-1] / unit:.3g} deviations of "
            f"the score; the KL is {reached:.2g}"
        )
        evidence += f" nats, the score has risen by {rise:.2g} deviations"
        return diagnose("KL scale", evidence, {"kl-holds-the-policy": True})
    if in_loss or reached < 0.5:
        return Unexamined("KL scale", "the KL is in the loss, or below 0.5 nats: nothing to weigh")
    return kl_scale(paid[-1], reached, unit)


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
    done, total, minutes = ended["ended_at"], ended["total"], ended["minutes"]
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


MOVEMENT = ("policy/clip_fraction", "policy/approximate_kl")
Check = tuple[str, tuple[str, ...], Callable[..., Result], str]
CHECKS: tuple[Check, ...] = (
    ("reference", (KL,), reference_at_start, "the reference was not asked"),
    ("KL sign", (KL,), kl_sign_logged, "the reference was not asked"),
    ("epochs", MOVEMENT, moved_too_far, "neither clip fraction nor KL(old || new) in the log"),
    ("dropout", ("policy/first_ratio_deviation",), first_ratio, "no first ratio in the log"),
    (
        "temperature",
        ("policy/engine_gap",),
        engine_gap,
        "the engine's own log-probabilities are not in the log",
    ),
    (
        "stop tokens",
        ("response/stop_rate", "response/length"),
        answers_end,
        "neither lengths nor stop rates in the log",
    ),
    ("scores", (), scores_logged, ""),
    ("KL scale", (), kl_weight, ""),
)
"""Each with the columns of the log that it takes, and the reason where one of them is not there."""


SAMPLES = ("stop tokens", "scores")
"""The checks that need the samples alone."""


def check_samples(rows: Rows, settings: Facts) -> list[Result]:
    """The checks that need nothing but samples and their scores, where there are any.

    Args:
        rows: columns of metrics.jsonl, one row for all samples that were drawn together.
        settings: the section of the stage.
    """
    log, logged = StageLog(rows, settings), set[str]().union(*rows)
    chosen = [
        entry
        for entry in CHECKS
        if entry[0] in SAMPLES and logged & {*(entry[1] or ("reward/proxy",))}
    ]
    return [_checked(entry, log) for entry in chosen]


def check_rows(rows: Rows, settings: Facts) -> list[Result]:
    """Every check of a log.

    Args:
        rows: of metrics.jsonl.
        settings: the section of the stage, as the run's config.json has it.
    """
    log = StageLog(rows, settings)
    return [*(_checked(entry, log) for entry in CHECKS), check_movement(rows, settings)]


def _checked(entry: Check, log: StageLog) -> Result:
    name, columns, check, reason = entry
    values = [numbers(log.rows, column) for column in columns]
    return check(log, *values) if all(values) else Unexamined(name, reason)


Reading = tuple[bool | None, str]
"""At rest or not (None: this measure cannot tell), and the number behind it."""


def check_movement(rows: Rows, settings: Facts, summary: Facts | None = None) -> Result:
    """The model is unmoved, or has moved, or the log cannot show it.

    Args:
        rows: of metrics.jsonl.
        settings: the section of the stage.
        summary: of the finished stage.
    """
    steady, results = after_warmup(rows), summary or {}
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


def after_warmup(rows: Rows) -> Rows:
    """The rows from the highest learning rate on; all, where the rates are not known."""
    rates = [row.get("learning_rate") or 0.0 for row in rows]
    return rows[rates.index(max(rates)) :] if rates else rows


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
    before, after = summary.get("eval_loss_before"), summary.get("eval_loss")
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
