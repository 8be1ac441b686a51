"""The key numbers as tiles and tables; what a run does not have is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tether.report.narrative import (
    decimal,
    duration,
    gold_gain,
    heldout,
    interval,
    percent,
    proxy_gain,
    spent_kl,
    whole,
)
from tether.report.reading import Estimate, Journey, SubRun, estimate, mapping, number, printable, series


@dataclass(frozen=True, slots=True)
class Tile:
    """One key number."""

    name: str
    value: str
    detail: str = ""


def tiles(journey: Journey) -> list[Tile]:
    """The key numbers; what the run does not have is left out."""
    found: list[Tile] = []

    def add(name: str, value: Estimate | None, show: Any, detail: str = "") -> None:
        if value is not None:
            notes = [interval(value, show), detail]
            found.append(Tile(name, show(value.value), " · ".join(note for note in notes if note)))

    def signed(value: float) -> str:
        return decimal(value, True)

    policy = journey.policy
    if policy:
        add("gold win rate", estimate(policy.summary.get("gold_win_rate")), percent)
        add("gold gain", gold_gain(policy), signed)
        checked = heldout(policy)
        if checked:
            show = percent if checked.true else decimal
            add(
                "held-out, right" if checked.true else "held-out reward",
                checked.after,
                show,
                f"before {show(checked.before.value)}",
            )
        add("proxy gain", estimate(proxy_gain(policy)), signed, "reward model's units")
        add("KL spent", estimate(spent_kl(policy)), decimal, "nats per response")
    if journey.reward:
        add("reward model, held-out", estimate(journey.reward.summary.get("heldout_accuracy")), percent)
        add("reward model, gold", estimate(journey.reward.summary.get("gold_accuracy")), percent)
    add("preference pairs", estimate(journey.pairs.get("num_pairs")), whole)
    if journey.sft:
        losses = [v for v in series(journey.sft.metrics, "eval_loss")[1] if v is not None]
        add("SFT held-out loss", Estimate(losses[-1]) if losses else None, decimal, "nats per token")
    own = journey.summary or mapping(journey.stages[0].summary if len(journey.stages) == 1 else None)
    add("time", estimate(own.get("seconds")), duration)
    memory = estimate(own.get("peak_rss_bytes") or (policy.summary.get("peak_rss_bytes") if policy else None))
    add("peak memory", memory, lambda size: f"{size / 2**30:.2f} GiB")
    return found


def arm_table(arms: Sequence[SubRun]) -> list[Sequence[str]]:
    """One row an arm: name, proxy gain, gold gain, gold win rate, KL; empty for a single arm."""
    if len(arms) < 2:
        return []
    rows = []
    for arm in arms:
        proxy, gain, rate, kl = proxy_gain(arm), gold_gain(arm), estimate(arm.summary.get("gold_win_rate")), spent_kl(arm)
        rows.append(
            (
                arm.name,
                "" if proxy is None else decimal(proxy, True),
                _with_interval(gain, lambda v: decimal(v, True)),
                _with_interval(rate, percent),
                "" if kl is None else decimal(kl),
            )
        )
    return rows


def _with_interval(found: Estimate | None, show: Any) -> str:
    if found is None:
        return ""
    if found.low is None or found.high is None:
        return show(found.value)
    return f"{show(found.value)} ({show(found.low)} to {show(found.high)})"


def reward_facts(reward: Mapping[str, Any], pairs: Mapping[str, Any]) -> list[Tile]:
    """The reward model's numbers that need no figure."""
    length = mapping(reward.get("length_correlation"))
    wanted = (
        ("held-out accuracy", reward.get("heldout_accuracy"), percent, "of pairs it never saw"),
        ("accuracy against gold", reward.get("gold_accuracy"), percent, "of pairs labelled by gold"),
        ("calibration error", reward.get("calibration_error"), decimal, "mean distance from the diagonal"),
        ("score and length, Pearson", length.get("pearson"), decimal, "0: length does not matter"),
        ("score and length, Spearman", length.get("spearman"), decimal, "the same by ranks"),
        ("held-out loss", reward.get("heldout_loss"), decimal, "a coin has 0.693"),
        ("held-out ties", reward.get("heldout_ties"), whole, "pairs scored exactly alike"),
        ("mean margin", reward.get("margin_mean"), decimal, "chosen − rejected"),
        ("score mean", reward.get("score_mean"), decimal, ""),
        ("score deviation", reward.get("score_std"), decimal, ""),
        ("pairs", pairs.get("num_pairs"), whole, "preferences collected"),
        ("prompts", pairs.get("num_prompts"), whole, "behind the pairs"),
        ("annotators agree", pairs.get("annotator_agreement"), percent, "two annotators, same pair"),
        ("annotator and gold", pairs.get("annotator_gold_agreement"), percent, "share that agrees"),
        ("majority and gold", pairs.get("majority_gold_agreement"), percent, "share that agrees"),
        ("dropped", pairs.get("dropped_no_majority"), whole, "pairs without a majority"),
    )
    found = [(name, estimate(raw), show, detail) for name, raw, show, detail in wanted]
    facts = []
    for name, value, show, detail in found:
        if value is not None:
            notes = [interval(value, show), "" if value.count is None else f"{value.count:,} pairs", detail]
            facts.append(Tile(name, show(value.value), " · ".join(note for note in notes if note)))
    return facts


def alarm_rows(arms: Sequence[SubRun]) -> list[tuple[str, str, str, str, list[str]]]:
    """What the detectors noticed, arm by arm: where and what, its meaning, the advice, and the texts that show it."""
    several = len(arms) > 1
    found = []
    for arm in arms:
        for alarm in arm.alarms:
            place = f"step {number(alarm.get('step')) or 0.0:.0f}"
            texts = alarm.get("evidence")
            shown = [printable(text, 400) for text in texts] if isinstance(texts, list) else []
            title = printable(alarm.get("detector"), 60).replace("_", " ")
            message, advice = (printable(alarm.get(key), 400) for key in ("message", "advice"))
            told = (f"{message[:1].upper()}{message[1:]}", advice)
            found.append((title, f"{arm.name}, {place}" if several else place, *told, shown))
    return found
