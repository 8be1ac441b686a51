"""The doctor's checks on the rows of a finished or interrupted run: what a log can tell of a faulty set-up, and no more."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from tether.monitoring.doctor import SAME_START, Finding, Healthy, Result, Untold, kl_scale
from tether.monitoring.stillness import moved

Rows = Sequence[Mapping[str, Any]]
Settings = Mapping[str, Any]
KL, SHAPED = "kl/policy_reference_k1", "reward/shaped"


def check_rows(rows: Rows, settings: Settings) -> list[Result]:
    """Every check of a log.

    Args:
        rows: of metrics.jsonl.
        settings: the section of the stage, as the run's config.json has it.
    """
    return [result for check in CHECKS for result in check(rows, settings)]


def reference_at_start(rows: Rows, settings: Settings) -> list[Result]:
    """The first step's samples are the reference's own, and later ones are not."""
    name, kls = "reference", _values(rows, KL)
    if not kls:
        return [Untold(name, "the reference was not asked")]
    if rows[0].get("step") == 1 and abs(kls[0]) > 0.5:
        evidence = f"KL {kls[0]:.3g} nats a response before the first update"
        return [Finding(name, "error", "The reference is not the policy's start.", evidence, SAME_START)]
    trained = any(norm > 0 for norm in _values(rows, "grad_norm"))
    if len(kls) >= 3 and trained and not any(kls):
        evidence = f"KL exactly 0 in all of {len(kls)} steps, with gradients"
        advice = "Give the reference weights that the optimizer does not change; see that the optimizer's steps change any."
        return [Finding("shared weights", "error", "The reference moves with the policy, or nothing moves.", evidence, advice)]
    return [Healthy(name, f"KL {kls[0]:.3g} at the first step, {kls[-1]:.3g} at the last")]


def kl_sign_logged(rows: Rows, settings: Settings) -> list[Result]:
    """The KL is a divergence, and what is logged as its price is minus the coefficient times it."""
    name, kls = "KL sign", _values(rows, KL)
    if not kls:
        return [Untold(name, "the reference was not asked")]
    late = kls[-max(3, len(kls) // 3) :]
    if len(kls) >= 3 and statistics.fmean(late) < -0.5:
        evidence = f"KL {statistics.fmean(late):.3g} nats a response over the last {len(late)} steps"
        advice = "KL(policy || reference) of the policy's samples is the mean of log pi - log pi_ref, in this order."
        return [Finding(name, "error", "The KL is negative, which no divergence is.", evidence, advice)]
    wrong = [
        row["step"]
        for row in rows
        if None not in (row.get(KL), row.get("kl/coefficient"), row.get("reward/kl"))
        and abs(row["reward/kl"] + row["kl/coefficient"] * row[KL]) > 1e-4 * (1 + abs(row["reward/kl"]))
    ]
    if wrong:
        evidence = f"in {len(wrong)} of {len(rows)} steps reward/kl is not -kl/coefficient x {KL}, first in step {wrong[0]}"
        return [Finding(name, "error", "The KL's price is not what the log says of it.", evidence, "Take coefficient x KL off.")]
    return [Healthy(name, f"KL {min(kls):.3g} to {max(kls):.3g} nats a response"), _kl_in_rewards(rows, settings)]


def _kl_in_rewards(rows: Rows, settings: Settings) -> Result:
    """Shaped rewards are scores less coefficient x KL: the slope of what is left over coefficient x KL is -1."""
    name, pairs = "KL sign", []
    scores = _score_parts(rows, settings)
    for row, score in zip(rows, scores or [], strict=scores is not None):
        price = row["kl/coefficient"] * row[KL]
        pairs.append((price, row[SHAPED] - score))
    weight = sum(price**2 for price, _ in pairs)
    if weight < 1e-4:
        return Untold(name, "the log does not tell shaped rewards and scores apart, or no KL was paid")
    slope = sum(price * rest for price, rest in pairs) / weight
    evidence = f"shaped rewards less scores are {slope:+.2f} x coefficient x KL over {len(pairs)} steps"
    if abs(slope + 1) < 0.2:
        return Healthy(name, evidence)
    if abs(slope - 1) < 0.2:
        message = "The KL has the wrong sign: the policy was paid to leave its reference."
        return Finding(name, "error", message, evidence, "The reward is score - coefficient x (log pi - log pi_ref).")
    if abs(slope) < 0.2:
        return Finding(name, "error", "The KL never reached the reward.", evidence, "Take coefficient x KL off the reward.")
    return Untold(name, evidence)


def _score_parts(rows: Rows, settings: Settings) -> list[float] | None:
    """What scores give to the mean shaped reward of each step; None where the log does not tell."""
    keys = (KL, "kl/coefficient", SHAPED, "reward/proxy", "reward/proxy_std", "response/stop_rate")
    kl = settings.get("kl", {})
    altered = any(settings.get(key) for key in ("score_clip", "overlong_buffer", "step_rewards", "filter_groups"))
    known = all(row.get(key) is not None for row in rows for key in keys) and not any(row.get("reward/failed") for row in rows)
    if not rows or altered or not known or kl.get("place", "token") != "token" or rows[0].get("step") != 1:
        return None
    if settings.get("baseline") in ("group", "leave_one_out") or settings.get("group_baseline"):
        return [0.0] * len(rows)  # what is over the mean of its group is 0 on average
    if settings.get("baseline", "none") != "none":
        return None
    penalty = float(settings.get("missing_stop_penalty", 0.0))
    mean, spread = rows[0]["reward/proxy"], rows[0]["reward/proxy_std"]
    if not settings.get("normalize_scores") or spread <= 1e-6:
        mean, spread = 0.0, 1.0
    return [(row["reward/proxy"] - mean) / spread - penalty * (1 - row["response/stop_rate"]) for row in rows]


def moved_too_far(rows: Rows, settings: Settings) -> list[Result]:
    """How far the updates on one batch of rollouts carry the policy from the one that drew them."""
    name, clipped, kls = "epochs", _values(rows, "policy/clip_fraction"), _values(rows, "policy/approximate_kl")
    if not clipped or not kls:
        return [Untold(name, "neither clip fraction nor KL(old || new) in the log")]
    if settings.get("surrogate") == "sequence" or settings.get("algorithm") == "gspo":
        clipped = [0.0]  # whole sequences are clipped at 1e-4: a large part of them is meant to be
    fraction, kl = statistics.median(clipped), statistics.median(kls)
    evidence = f"median: {fraction:.1%} of tokens clipped, KL(old || new) {kl:.2g} nats a token"
    if fraction > 0.2 or kl > 0.05:
        severity: Literal["error", "warning"] = "error" if fraction > 0.4 or kl > 0.15 else "warning"
        advice = "Take fewer epochs or minibatches, lower optimizer.learning_rate, or set target_kl."
        return [Finding(name, severity, "Too many or too long updates on the same samples.", evidence, advice)]
    return [Healthy(name, evidence)]


def first_ratio(rows: Rows, settings: Settings) -> list[Result]:
    """Before an update the ratio is 1, unless dropout or another numerics stands between old and new."""
    name, deviations = "dropout", _values(rows, "policy/first_ratio_deviation")
    if not deviations:
        return [Untold(name, "no first ratio in the log")]
    evidence = f"before any update the ratio is 1 to within {max(deviations):.2g}"
    if max(deviations) > 0.05:
        advice = "Switch dropout off in every role, and take old log-probabilities from the update's own numerics."
        return [Finding(name, "error", "Old and new log-probabilities differ before an update.", evidence, advice)]
    return [Healthy(name, evidence)]


def engine_gap(rows: Rows, settings: Settings) -> list[Result]:
    """The engine's log-probabilities of its own samples against the learner's."""
    name, gaps = "temperature", _values(rows, "policy/engine_gap")
    if not gaps:
        return [Untold(name, "the engine's own log-probabilities are not in the log")]
    evidence = f"engine and learner differ by {statistics.median(gaps):.3g} nats a token (median over {len(gaps)} steps)"
    if statistics.median(gaps) > 0.12:
        advice = "Score at the sampling temperature, sample without top-k and top-p, and hand the engine every update's weights."
        return [Finding(name, "error", "Engine and learner disagree about what was sampled.", evidence, advice)]
    return [Healthy(name, evidence)]


def answers_end(rows: Rows, settings: Settings) -> list[Result]:
    """Answers end by themselves, and neither shrink to nothing nor grow to the limit."""
    rates, lengths = _values(rows, "response/stop_rate"), _values(rows, "response/length")
    if not rates or not lengths:
        return [Untold("stop tokens", "neither lengths nor stop rates in the log")]
    span = max(1, len(rates) // 10)
    first, last = statistics.fmean(rates[:span]), statistics.fmean(rates[-span:])
    short = statistics.fmean(lengths[-span:])
    evidence = (
        f"{first:.0%} of answers ended in the first steps, {last:.0%} in the last; length {lengths[0]:.0f} to {short:.0f} tokens"
    )
    if max(rates) < 0.02:
        advice = "Name the token that ends a turn in model.stop_tokens, or raise max_new_tokens. Fixed lengths may be meant so."
        return [Finding("stop tokens", "warning", "Every answer was cut off.", evidence, advice)]
    name, message = "empty or endless answers", ""
    if last < 0.2 and first > 0.5:
        message = "Answers have come to run on to the limit: the reward seems to like them endless."
    if short <= 2 < lengths[0] / 4:
        message = "Answers have shrunk to nothing: the reward seems to like them empty."
    if message:
        return [Finding(name, "warning", message, evidence, "Read samples.jsonl, and see what the reward gives such answers.")]
    return [Healthy("stop tokens", evidence)]


def scores_logged(rows: Rows, settings: Settings) -> list[Result]:
    """Scores that differ, do not fail, and weigh about as much as the KL."""
    name, kl = "scores", settings.get("kl", {})
    proxies = [row["reward/proxy"] for row in rows if "reward/proxy" in row]
    spreads, failed = _values(rows, "reward/proxy_std"), sum(_values(rows, "reward/failed"))
    if not proxies:
        return [Untold(name, "no scores in the log")]
    evidence = f"{len(proxies)} steps, {failed:.0f} failed scores, {proxies.count(None)} steps without a finite mean"
    if None in proxies:
        return [
            Finding(name, "error", "In whole steps no score was a number.", evidence, "Look at the reasons for the failures.")
        ]
    if not any(spread > 1e-6 for spread in spreads):
        advice = "Nothing can be learned from them: look at the reward."
        return [Finding(name, "error", "All scores of a step are the same.", evidence, advice)]
    results: list[Result] = [Healthy(name, f"{evidence}, deviation {statistics.median(spreads):.3g}")]
    if failed:
        results = [Finding(name, "warning", "Rewards failed.", evidence, "They were masked; look at the reward's time limit.")]
    paid, kls = _values(rows, "kl/coefficient"), _values(rows, KL)
    reached = statistics.fmean(kls[-max(1, len(kls) // 5) :]) if kls else 0.0
    if not paid or not paid[-1] or kl.get("place", "token") == "loss" or reached < 0.5:
        return [*results, Untold("KL scale", "no KL in the reward, or below 0.5 nats: nothing to weigh")]
    spread = statistics.median(spreads)
    normalized = settings.get("normalize_scores") and spreads[0] > 1e-6
    spread = 1.0 if settings.get("scale_advantages") else spread / spreads[0] if normalized else spread
    return [*results, kl_scale(paid[-1], reached, spread)]


CHECKS: tuple[Callable[[Rows, Settings], list[Result]], ...] = (
    reference_at_start,
    kl_sign_logged,
    moved_too_far,
    first_ratio,
    engine_gap,
    answers_end,
    scores_logged,
    moved,
)


def _values(rows: Rows, key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]
