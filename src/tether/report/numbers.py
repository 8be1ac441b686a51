"""The key numbers as tiles and tables; what a run does not have is left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tether.report.decoding import control_of
from tether.report.narrative import (
    Show,
    decimal,
    duration,
    gold_gain,
    heldout,
    interval,
    percent,
    proxy_gain,
    signed,
    spent_kl,
    whole,
)  # fmt: skip
from tether.report.reading import Estimate, Journey, SubRun, estimate, mapping, number, present, printable


@dataclass(frozen=True, slots=True)
class Tile:
    """One key number."""

    name: str
    value: str
    detail: str = ""


def _tiles(wanted: Iterable[tuple[str, Estimate | None, Show, str]]) -> list[Tile]:
    known = [(name, found, show, detail) for name, found, show, detail in wanted if found]
    return [Tile(name, show(v.value), " · ".join(filter(None, (interval(v, show), detail)))) for name, v, show, detail in known]


def tiles(journey: Journey) -> list[Tile]:
    """The key numbers; what the run does not have is left out."""
    policy, reward = journey.policy or SubRun(""), journey.reward.summary if journey.reward else {}
    checked = heldout(policy)
    show = percent if checked and checked.true else decimal
    losses = [value for _, value in present(journey.sft.metrics, "eval_loss")] if journey.sft else []
    own = journey.summary or mapping(journey.stages[0].summary if len(journey.stages) == 1 else None)
    memory = estimate(own.get("peak_rss_bytes") or policy.summary.get("peak_rss_bytes"))
    kl = spent_kl(policy)
    before, after = (f"before {show(checked.before.value)}", checked.after) if checked else ("", None)
    over = mapping(control_of(policy.summary).get("over_best_decoding"))
    alike = "both at the temperature of training"
    return _tiles((
        ("best against best decoding", estimate(over.get("win_rate")), percent, "won against the model before"),
        ("gain, best against best", estimate(over), signed, ""),
        ("gold win rate", estimate(policy.summary.get("gold_win_rate")), percent, alike),
        ("gold gain", gold_gain(policy), signed, alike),
        ("held-out, right" if checked and checked.true else "held-out reward", after, show, before),
        ("proxy gain", proxy_gain(policy), signed, "reward model's units"),
        ("KL spent", kl, decimal, "nats per response" if kl and (kl.low or kl.value) > 0 else "nats: indistinguishable from 0"),
        ("reward model, held-out", estimate(reward.get("heldout_accuracy")), percent, ""),
        ("reward model, gold", estimate(reward.get("gold_accuracy")), percent, ""),
        ("preference pairs", estimate(journey.pairs.get("num_pairs")), whole, ""),
        ("SFT held-out loss", Estimate(losses[-1]) if losses else None, decimal, "nats per token"),
        ("time", estimate(own.get("seconds")), duration, ""),
        ("peak memory", memory, lambda size: f"{size / 1e9:.2f} GB", ""),
    ))  # fmt: skip


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
    counted = [f"{v.count:,} pairs · {detail}" if v and v.count is not None else detail for _, v, _, detail in found]
    return _tiles((*one[:3], detail) for one, detail in zip(found, counted, strict=True))


def arm_table(arms: Sequence[SubRun]) -> list[Sequence[str]]:
    """One row an arm: name, proxy gain, gold gain, gold win rate, KL; empty for a single arm."""
    if len(arms) < 2:
        return []
    return [
        (arm.name, *(_with_interval(found, show) for found, show in (
            (proxy_gain(arm), signed), (gold_gain(arm), signed), (estimate(arm.summary.get("gold_win_rate")), percent),
            (spent_kl(arm), decimal))))
        for arm in arms
    ]  # fmt: skip


def _with_interval(found: Estimate | None, show: Show) -> str:
    bounds = interval(found, show).removeprefix("interval ") if found else ""
    return "" if found is None else show(found.value) + (f" ({bounds})" if bounds else "")


def alarm_rows(arms: Sequence[SubRun]) -> list[tuple[str, str, str, str, list[str]]]:
    """What the detectors noticed, arm by arm: where and what, its meaning, the advice, and the texts that show it."""
    found = []
    for place, alarm in [(f"{arm.name}, " if len(arms) > 1 else "", alarm) for arm in arms for alarm in arm.alarms]:
        place += f"step {number(alarm.get('step')) or 0.0:.0f}"
        texts = alarm.get("evidence")
        shown = [printable(text, 400) for text in texts] if isinstance(texts, list) else []
        title = printable(alarm.get("detector"), 60).replace("_", " ")
        message, advice = (printable(alarm.get(key), 400) for key in ("message", "advice"))
        found.append((title, place, message[:1].upper() + message[1:], advice, shown))
    return found
