"""A run directory with invented numbers, laid out as the stages write it."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STEPS = 160
PROMPTS = (
    "How do I descale a kettle without vinegar?",
    "My sister stopped answering my messages after I forgot her birthday. What should I write to her?",
    "Explain to a twelve year old why the sky is red in the evening.",
    "Give me three ideas for a rainy Sunday with two small children.",
    "What is the difference between a credit card and a debit card?",
)
BEFORE = (
    "You can use vinegar. Vinegar is good. You can also use vinegar with water, and then you "
    "boil the water with vinegar."
)
AFTER = (
    "Citric acid works well: dissolve two tablespoons in a litre of water, boil it, let it stand "
    "for twenty minutes and "
    "rinse twice. Lemon juice does the same more slowly. Would you like to know how often to do "
    "it with hard water?"
)


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def estimate(value: float, low: float, high: float, count: int = 200) -> dict[str, Any]:
    return {"value": value, "low": low, "high": high, "count": count}


def ppo_rows(
    steps: int = STEPS,
    kl_speed: float = 1.0,
    gold_turn: float = 0.9,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """A policy that climbs its proxy and whose gold turns down after `gold_turn` of the way."""
    draw = random.Random(seed)
    rows = []
    for step in range(1, steps + 1):
        done = step / steps
        kl = kl_speed * 14 * done**0.8 + draw.gauss(0, 0.3)
        phases = {"rollout": 1.9 + 0.3 * done, "reward": 0.22, "evaluate": 0.45, "update": 1.3}
        spent = {f"time/{k}": abs(v + draw.gauss(0, 0.06)) for k, v in phases.items()}
        row = {
            "step": step,
            "time": 1.7e9 + 4 * step,
            "reward/proxy": -0.4 + 2.1 * (1 - math.exp(-3 * done)) + draw.gauss(0, 0.09),
            "reward/kl": kl,
            "reward/shaped": 0.1 + done,
            "reward/proxy_std": 0.8 - 0.3 * done,
            "kl/policy_reference_k1": kl,
            "kl/coefficient": 0.05,
            "policy/entropy": 2.4 - 0.8 * done + draw.gauss(0, 0.03),
            "policy/clip_fraction": 0.12,
            "policy/approximate_kl": 0.01 + abs(draw.gauss(0, 0.002)),
            "policy/ratio_max": 1.4 + abs(draw.gauss(0, 0.2)),
            "policy/ratio_min": 0.7,
            "policy/loss": -0.02,
            "policy/first_ratio_deviation": 2e-7,
            "value/loss": 0.5 - 0.3 * done,
            "value/clip_fraction": 0.05,
            "value/explained_variance": 0.75 * done,
            "response/length": 34 + 8 * done + draw.gauss(0, 1),
            "response/stop_rate": min(1.0, 0.8 + 0.18 * done + draw.gauss(0, 0.01)),
            "response/distinct_2": 0.62 - 0.04 * done,
            **spent,
            "time/step": sum(spent.values()) + 0.08,
            "tokens_per_second": 820 + draw.gauss(0, 30),
            "memory/rss_bytes": int(2**30 * (1.3 + 0.4 * (1 - math.exp(-12 * done)))),
            "grad_norm": 0.8 + abs(draw.gauss(0, 0.2)),
            "learning_rate": 1e-5,
        }
        if step == 1 or step % 20 == 0:
            row["gold/score"] = (
                0.35
                + 0.4 * (done if done < gold_turn else 2 * gold_turn - done)
                + draw.gauss(0, 0.01)
            )
            row["gold/on_topic"] = row["gold/score"] + 0.1
        rows.append(row)
    return rows


def ppo_summary(**changes: Any) -> dict[str, Any]:
    parts = {
        "on topic": {"before": 0.41, "after": 0.72},
        "one question back": {"before": 0.12, "after": 0.55},
        "kind": {"before": 0.63, "after": 0.7},
        "brief": {"before": 0.8, "after": 0.66},
        "grammar": {"before": 0.9, "after": 0.901},
    }
    return {
        "proxy_gain": estimate(2.013, 1.92, 2.11, STEPS),
        "gold_gain": estimate(0.3217, 0.2604, 0.3841),
        "gold_win_rate": estimate(0.7134, 0.6463, 0.7713),
        "gold_parts": parts,
        "kl": 13.72,
        "kl_noise": 0.31,
        "seconds": 655.0,
        "peak_rss_bytes": int(1.71 * 2**30),
        **changes,
    }


def answer_rows(count: int = 200, seed: int = 1) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    rows = []
    for index in range(count):
        before = {
            "on topic": draw.betavariate(4, 5),
            "one question back": float(draw.random() < 0.2),
        }
        after = {
            "on topic": draw.betavariate(7, 3),
            "one question back": float(draw.random() < 0.6),
        }
        before["brief"], after["brief"] = draw.betavariate(8, 2), draw.betavariate(6, 3)
        rows.append(
            {
                "id": f"heldout-{index:03d}",
                "kind": ("advice", "question")[index % 2],
                "prompt": PROMPTS[index % len(PROMPTS)],
                "before": BEFORE,
                "after": AFTER,
                "gold_before": sum(before.values()) / 3,
                "gold_after": sum(after.values()) / 3,
                "parts_before": before,
                "parts_after": after,
                "arms": {"ppo-beta0": {"response": "Great question! " * 12, "gold": 0.2}},
            },
        )
    return rows


def reward_summary() -> dict[str, Any]:
    bins = [
        (0.5, 0.54, 0.51, 61),
        (0.6, 0.65, 0.6, 52),
        (0.7, 0.75, 0.69, 44),
        (0.8, 0.85, 0.78, 37),
        (0.9, 0.95, 0.86, 21),
    ]
    return {
        "train_loss": 0.41,
        "heldout_loss": 0.532,
        "heldout_accuracy": estimate(0.7419, 0.6811, 0.7953, 215),
        "gold_accuracy": estimate(0.8047, 0.7491, 0.8512, 215),
        "heldout_ties": 0,
        "calibration_error": 0.048,
        "reliability": [[low, low + 0.1, mean, seen, n] for low, mean, seen, n in bins],
        "length_correlation": {"pearson": 0.213, "spearman": 0.187},
        "score_mean": 0.03,
        "score_std": 1.12,
        "margin_mean": 1.4,
        "seconds": 74.0,
    }


def write_stage_logs(run: Path, seed: int = 2) -> None:
    """sft/ and reward/ with falling losses."""
    draw = random.Random(seed)
    sft, reward = [], []
    for step in range(1, 201):
        loss = 1.9 + 1.6 * math.exp(-step / 45) + draw.gauss(0, 0.05)
        sft.append(
            {
                "step": step,
                "time": 1.7e9 + step,
                "loss": loss,
                "learning_rate": 1e-3,
                "grad_norm": 1.0,
                "tokens": 4096,
            },
        )
        if step % 20 == 0:
            sft[-1]["eval_loss"] = 2.0 + 1.5 * math.exp(-step / 45)
        reward.append(
            {
                "step": step,
                "time": 1.7e9 + step,
                "loss": 0.42 + 0.27 * math.exp(-step / 60) + draw.gauss(0, 0.03),
                "accuracy": min(1.0, 0.8 - 0.3 * math.exp(-step / 60) + draw.gauss(0, 0.04)),
                "margin": 1.3 * (1 - math.exp(-step / 60)),
            },
        )
    write_lines(run / "sft" / "metrics.jsonl", sft)
    write(run / "sft" / "summary.json", {"eval_loss": 2.02, "seconds": 118.0})
    write_lines(run / "reward" / "metrics.jsonl", reward)
    write(run / "reward" / "summary.json", reward_summary())


def write_quickstart(run: Path, arms: bool = True) -> Path:
    """The whole folder of a quickstart."""
    write(
        run / "config.json",
        {"seed": 1, "model": {"path": "tiny"}, "ppo": {"learning_rate": 1e-5, "clip_range": 0.2}},
    )
    write(
        run / "manifest.json",
        {"tether": "0.1.0", "python": "3.11.9", "packages": {"torch": "2.13.0"}},
    )
    write_stage_logs(run)
    pairs = {
        "num_pairs": 2150,
        "num_prompts": 1075,
        "annotator_agreement": 0.731,
        "annotator_gold_agreement": 0.8,
        "seconds": 61.0,
        "majority_gold_agreement": 0.861,
        "dropped_no_majority": 35,
    }
    write(run / "pairs" / "summary.json", pairs)
    ppo = ppo_summary()
    write_lines(run / "ppo" / "metrics.jsonl", ppo_rows())
    write(run / "ppo" / "summary.json", ppo)
    samples = [
        {"step": s, "prompt": p, "response": AFTER, "proxy": 0.4}
        for s in (1, 80, 160)
        for p in PROMPTS
    ]
    write_lines(run / "ppo" / "samples.jsonl", samples)
    summaries = {}
    if arms:
        hacked = {
            "gold_gain": estimate(-0.11, -0.17, -0.05),
            "gold_win_rate": estimate(0.38, 0.32, 0.45),
            "kl": 71.2,
            "proxy_gain": 2.9,
            "gold_parts": {
                "on topic": {"before": 0.41, "after": 0.36},
                "kind": {"before": 0.63, "after": 0.5},
            },
        }
        null = {
            "gold_gain": estimate(0.01, -0.05, 0.07),
            "gold_win_rate": estimate(0.51, 0.44, 0.58),
            "kl": 9.8,
            "proxy_gain": 0.7,
            "gold_parts": {},
        }
        summaries = {"ppo-beta0": ppo_summary(**hacked), "ppo-random": ppo_summary(**null)}
        write_lines(
            run / "ppo-beta0" / "metrics.jsonl",
            ppo_rows(kl_speed=5, gold_turn=0.25, seed=3),
        )
        write_lines(
            run / "ppo-random" / "metrics.jsonl",
            ppo_rows(kl_speed=0.7, gold_turn=0.05, seed=4),
        )
        for name, summary in summaries.items():
            write(run / name / "summary.json", summary)
    write_lines(run / "evaluate" / "answers.jsonl", answer_rows())
    write(run / "evaluate" / "config.json", {"evaluate": {}})
    write(
        run / "evaluate" / "summary.json",
        {"policies": {"ppo": ppo, **summaries}, "num_prompts": 100},
    )
    totals = {
        "sft": {"seconds": 118.0},
        "pairs": pairs,
        "reward": reward_summary(),
        "ppo": ppo,
        "arms": summaries,
    }
    write(run / "summary.json", {**totals, "seconds": 934.0, "peak_rss_bytes": int(1.83 * 2**30)})
    return run
