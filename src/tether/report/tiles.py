"""The key numbers as tiles and tables; what a run does not have is left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from tether.core.types import Facts
from tether.report.gains import gold_gain, heldout_gain, proxy_gain, spent_kl
from tether.report.narrative import at_temperature, control_of
from tether.report.numbers import (
    Show,
    bracketed,
    centre,
    decimal,
    duration,
    gigabytes,
    interval,
    moved_in_words,
    percent,
    signed,
    thousands,
    versus,
)
from tether.report.reading import Estimate, Journey, LoopRun, SubRun, estimate, mapping, present


class Tile(NamedTuple):
    """One key number."""

    name: str
    value: str
    detail: str = ""


def _tiles(rows: Iterable[tuple[str, object, Show, str]]) -> list[Tile]:
    """Tiles of the numbers that there are: name, estimate or what a file has of one, how it is
    shown, detail.
    """
    return [
        estimate_tile(name, parts, show, detail)
        for name, raw, show, detail in rows
        if (parts := estimate(raw))
    ]


def estimate_tile(name: str, value: Estimate, show: Show, detail: str = "") -> Tile:
    """The tile of a number with its interval."""
    details = interval(value, show), f"n = {value.count:,}" if value.count else "", detail
    return Tile(name, centre(value, show), " · ".join(filter(None, details)))


def tiles(journey: Journey) -> list[Tile]:
    """The key numbers; what the run does not have is left out."""
    policy = journey.judged
    reward = journey.stage("reward").summary
    summary = policy.summary
    checked = heldout_gain(policy)
    show, name = (
        (percent, "held-out, right")
        if checked and checked.checked
        else (decimal, "held-out reward")
    )
    losses = [value for _, value in present(journey.stage("sft").metrics, "eval_loss")]
    own = journey.own.summary or mapping(
        journey.stages[0].summary if len(journey.stages) == 1 else None,
    )
    reward_gain = (
        ("reward gain", "in its own units")
        if journey.own_reward
        else ("proxy gain", "reward model's units")
    )
    kl = spent_kl(policy)
    over = mapping(control_of(summary).get("over_best_decoding"))
    alike = "both at the temperature of training"
    moved = f"nats per response: {moved_in_words(kl.value)}" if kl else ""
    vague = kl is not None and (kl.value <= 0 or -math.inf < kl.low <= 0)
    return _tiles(
        (
            (
                "best against best decoding",
                over.get("win_rate"),
                percent,
                "won against the model before",
            ),
            ("gain, best against best", over, signed, ""),
            ("gold win rate", summary.get("gold_win_rate"), percent, alike),
            ("gold gain", gold_gain(policy), signed, alike),
            (
                name,
                checked and checked.after,
                show,
                (f"before {show(checked.before.value)}") if checked else "",
            ),
            (reward_gain[0], proxy_gain(policy), signed, reward_gain[1]),
            ("KL spent", kl, decimal, "nats: indistinguishable from 0" if vague else moved),
            ("reward model, held-out", reward.get("heldout_accuracy"), percent, ""),
            ("reward model, gold", reward.get("gold_accuracy"), percent, ""),
            (
                "held-out pairs, ranked right",
                journey.stage("direct", "rounds").summary.get("heldout_accuracy"),
                percent,
                "",
            ),
            ("preference pairs", journey.stage("pairs").summary.get("num_pairs"), thousands, ""),
            ("SFT held-out loss", losses[-1] if losses else None, decimal, "nats per token"),
            ("time", own.get("seconds"), duration, ""),
            (
                "peak memory",
                own.get("peak_rss_bytes") or summary.get("peak_rss_bytes"),
                gigabytes,
                "",
            ),
            ("peak memory of the GPU", summary.get("peak_gpu_bytes"), gigabytes, ""),
        ),
    )


def reward_facts(reward: Facts, pairs: Facts) -> list[Tile]:
    """The reward model's numbers that need no figure."""
    length = mapping(reward.get("length_correlation"))
    return _tiles(
        (
            ("held-out accuracy", reward.get("heldout_accuracy"), percent, "of pairs it never saw"),
            (
                "accuracy against gold",
                reward.get("gold_accuracy"),
                percent,
                "of pairs labelled by gold",
            ),
            (
                "… where neither reads better",
                reward.get("gold_accuracy_equally_fluent"),
                percent,
                "of pairs that are equally fluent",
            ),
            (
                "calibration error",
                reward.get("calibration_error"),
                decimal,
                "mean distance from the diagonal",
            ),
            (
                "score and length, Pearson",
                length.get("pearson"),
                decimal,
                "0: length does not matter",
            ),
            ("score and length, Spearman", length.get("spearman"), decimal, "the same by ranks"),
            ("held-out loss", reward.get("heldout_loss"), decimal, "a coin has 0.693"),
            ("held-out ties", reward.get("heldout_ties"), thousands, "pairs scored exactly alike"),
            ("mean margin", reward.get("margin_mean"), decimal, "chosen − rejected"),
            ("score mean", reward.get("score_mean"), decimal, ""),
            ("score deviation", reward.get("score_std"), decimal, ""),
            ("pairs", pairs.get("num_pairs"), thousands, "preferences collected"),
            ("prompts", pairs.get("num_prompts"), thousands, "behind the pairs"),
            (
                "annotators agree",
                pairs.get("annotator_agreement"),
                percent,
                "two annotators, same pair",
            ),
            (
                "annotator and gold",
                pairs.get("annotator_gold_agreement"),
                percent,
                "share that agrees",
            ),
            (
                "majority and gold",
                pairs.get("majority_gold_agreement"),
                percent,
                "share that agrees",
            ),
            ("dropped", pairs.get("dropped_no_majority"), thousands, "pairs without a majority"),
        ),
    )


ARM_COLUMNS: dict[str, tuple[Callable[[SubRun], object], Show]] = {
    "proxy gain": (proxy_gain, signed),
    "held-out gain": (lambda arm: (measured := heldout_gain(arm)) and measured.gain, signed),
    "gold gain": (gold_gain, signed),
    "gold win rate": (lambda arm: arm.summary.get("gold_win_rate"), percent),
    "KL, nats": (spent_kl, decimal),
}


def arm_table(arms: Sequence[SubRun]) -> tuple[list[str], list[list[str]]]:
    """Columns that an arm has values for, and a row an arm; empty for a single arm."""
    if len(arms) < 2:
        return [], []
    shown = {
        name: [bracketed(read(arm), show) for arm in arms]
        for name, (read, show) in ARM_COLUMNS.items()
    }
    columns = {"policy": [arm.title for arm in arms]}
    columns |= {name: texts for name, texts in shown.items() if any(texts)}
    return [*columns], [list(row) for row in zip(*columns.values(), strict=True)]


ROUND_OF_PAIRS = (
    "round",
    "pairs",
    "tied",
    "failed",
    "mean score of samples",
    "tokens of a sample",
    "ended in time",
    "held-out pairs, ranked right",
)


def pair_rounds(stage: SubRun) -> list[list[str]]:
    """A row a round of a stage that samples pairs and trains on them, of ROUND_OF_PAIRS."""
    return [
        _pair_round(place, one, mapping(one.get("sampling")))
        for place, one in enumerate(stage.rounds, 1)
    ]


def _pair_round(place: int, one: Facts, sampled: Facts) -> list[str]:
    shown = (
        ("tied", thousands),
        ("failed", thousands),
        ("proxy", decimal),
        ("length", decimal),
        ("finished", percent),
    )
    return [
        str(place),
        bracketed(one.get("num_pairs"), thousands),
        *(bracketed(sampled.get(key), show) for key, show in shown),
        bracketed(one.get("heldout_accuracy"), percent),
    ]


CONTROL_COLUMNS = ("temperature", "before", "after", "gain", "win rate")


def control_rows(control: Facts) -> list[Sequence[str]]:
    """A row a temperature, of CONTROL_COLUMNS, one for the best of each side, and the reward's
    choice among n answers before.
    """
    temperatures = mapping(control.get("by_temperature"))
    best_of_n = mapping(control.get("best_of_n"))
    rows = [
        (at_temperature(float(value)).removeprefix("at temperature "), row)
        for value, row in temperatures.items()
    ]
    table: list[Sequence[str]] = [(name, *texts) for name, row in rows if (texts := versus(row))]
    if table:
        over = mapping(control.get("over_best_decoding"))
        table.append(
            (
                "best against best",
                "",
                "",
                bracketed(over, signed),
                bracketed(over.get("win_rate"), percent),
            ),
        )
    chosen = ((f"before: best of {n}, by the reward", versus(row)) for n, row in best_of_n.items())
    return table + [(name, *texts) for name, texts in chosen if texts]


ROUND_COLUMNS = (
    "round",
    "labels",
    "so far",
    "reward model: held-out labels",
    "gold order",
    "gold",
    "gain of the round",
    "gold per 100 labels",
    "KL, nats",
    "alarms",
)


def round_rows(loop: LoopRun) -> list[tuple[str, ...]]:
    """A line a round, of ROUND_COLUMNS; what was not measured is left empty."""
    return [
        (
            str(place),
            f"{one['labels']} of {one['asked']} pairs",
            str(one["labels_so_far"]),
            *(
                bracketed(mapping(one.get("reward")).get(key), percent)
                for key in ("heldout_accuracy", "gold_accuracy")
            ),
            decimal(one["gold_after"]),
            *(
                bracketed(one.get(key), signed)
                for key in ("gold_gain_of_round", "gold_per_100_labels")
            ),
            decimal(one["kl"]["value"]),
            str(one["alarms"]),
        )
        for place, one in enumerate(loop.rounds, 1)
    ]
