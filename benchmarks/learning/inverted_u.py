"""The whole pipeline on the toy language: the strength of the tether against what is truly
gained.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning import toy
from benchmarks.learning.picture import BLUE, GREY, ORANGE, RED, band, figure
from benchmarks.learning.workbench import (
    NEVER,
    TOKENS,
    encoder,
    kl,
    markdown,
    mean,
    optimise,
    optimizer,
    sample,
    scratch,
    told,
)

from tether.core.types import Comparison
from tether.models.trunk import Role
from tether.rewards.learned import LearnedReward
from tether.settings.supervised import DirectConfig
from tether.stages.direct import Direct

BETAS = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0)
BATCH = 64
NAMES = {"ppo": "PPO", "rloo": "RLOO", "grpo": "GRPO", "dr_grpo": "Dr. GRPO", "dpo": "DPO"}
Result = dict[str, Any]


def run(
    seed: int,
    *,
    demonstrations: int = 16000,
    pairs: int = 500,
    steps: int = 60,
    betas: Sequence[float] = BETAS,
    others: bool = True,
) -> Result:
    """One seed: SFT, labels, reward model, PPO at every beta, and the other methods at the best
    one.
    """
    start = toy.fine_tuned(seed, demonstrations)
    labels = toy.labelled_pairs(start, pairs, seed + 100)
    reward = toy.reward_model(start, labels, seed)
    replies = sample(start, toy.PROMPTS, toy.LENGTH, num_samples=64, seed=seed + 200)
    scores = [score.value or 0.0 for score in reward.score(replies)]
    arms = {f"ppo {beta:g}": _trained("ppo", start, reward, beta, steps, seed) for beta in betas}
    best = max(betas, key=lambda beta: arms[f"ppo {beta:g}"]["true"])
    if others:
        arms |= {
            name: {**_trained(name, start, reward, best, steps, seed), "beta": best}
            for name in ("rloo", "grpo", "dr_grpo")
        }
        arms["dpo"] = {
            **_direct(start, labels, reward, best * statistics.pstdev(scores), seed),
            "beta": best,
        }
    before = {
        **toy.measure(replies),
        "proxy": mean(scores),
        "accuracy": toy.accuracy(reward, replies),
    }
    return {"seed": seed, "sft": before, "best": best, "arms": arms}


def _trained(
    method: str,
    start: Any,
    reward: LearnedReward,
    beta: float,
    steps: int,
    seed: int,
) -> Result:
    """All methods see as many replies a step; those that compare replies to the same prompt see
    four to each.
    """
    grouped = {"prompts_per_step": BATCH // 4, "samples_per_prompt": 4}
    grouped = {"prompts_per_step": BATCH, "samples_per_prompt": 1} if method == "ppo" else grouped
    settings = {"algorithm": method, "steps": steps, "max_new_tokens": toy.LENGTH, **grouped}
    rate = 1e-3 if method == "ppo" else 2e-3  # PPO makes four updates of a batch, the others one
    settings |= {
        "normalize_scores": True,
        "kl": {"coefficient": beta},
        "seed": seed,
        "optimizer": optimizer(rate),
    }
    policy, curve = optimise(start, reward, toy.PROMPTS, toy.measure, settings)
    return {**_final(policy, start, reward, seed), "curve": curve}


def _direct(
    start: Any,
    labels: Sequence[Comparison],
    reward: LearnedReward,
    beta: float,
    seed: int,
) -> Result:
    """DPO on the reward model's labels. Its beta is in units of the reward itself, not of the
    reward's deviation.
    """
    policy = Role(copy.deepcopy(start))
    config = DirectConfig(
        beta=beta,
        epochs=4,
        micro_batch_tokens=TOKENS,
        heldout_fraction=0.0,
        checkpoint_every=NEVER,
        seed=seed,
        optimizer=optimizer(1e-3, "cosine"),
    )
    with scratch() as folder:
        Direct(config, policy, Role(start), encoder()).train(labels, folder)
    return _final(policy.model, start, reward, seed)


def _final(policy: Any, start: Any, reward: LearnedReward, seed: int) -> Result:
    """What fresh replies of the trained policy are worth."""
    replies = sample(policy, toy.PROMPTS, toy.LENGTH, num_samples=32, seed=seed + 300)
    proxy = mean([score.value or 0.0 for score in reward.score(replies)])
    return {**toy.measure(replies), "proxy": proxy, "kl": kl(replies, start)}


def table(results: Sequence[Result]) -> str:
    """A line an arm: the truth, what the training saw of it, and how it was bought."""
    rows = [
        [
            "SFT",
            *(told([r["sft"][key] for r in results]) for key in ("true", "proxy")),
            "0",
            _share(results, "sft"),
            "",
        ],
    ]
    for name in results[0]["arms"]:
        arms = [result["arms"][name] for result in results]
        peak = (
            told([max(_smooth(arm["curve"], "true")) for arm in arms]) if "curve" in arms[0] else ""
        )
        columns = (told([arm[key] for arm in arms]) for key in ("true", "proxy", "kl"))
        rows.append(
            [
                _label(name, results),
                *columns,
                f"{mean([arm['repeats'] for arm in arms]):.0%}",
                peak,
            ],
        )
    head = (
        "arm",
        "true reward at the end",
        "proxy",
        "KL, nats",
        "letters repeated",
        "highest true reward on the way",
    )
    seen = told([result["sft"]["accuracy"] for result in results])
    return markdown(head, rows) + f"\n\nThe reward model orders {seen} of pairs as the truth does."


def _share(results: Sequence[Result], key: str) -> str:
    return f"{mean([result[key]['repeats'] for result in results]):.0%}"


def _label(name: str, results: Sequence[Result]) -> str:
    method, _, beta = name.partition(" ")
    betas = sorted({f"{result['best']:g}" for result in results}, key=float)
    return f"{NAMES[method]} β {beta or ' / '.join(betas)}"


def _smooth(curve: Sequence[dict[str, float]], key: str, width: int = 5) -> list[float]:
    values = [point[key] for point in curve]
    return [mean(values[max(0, i - width // 2) : i + width // 2 + 1]) for i in range(len(values))]


def draw(results: Sequence[Result], path: Path) -> None:
    ppo = [name for name in results[0]["arms"] if name.startswith("ppo")]
    places = range(len(ppo))
    weak = ppo[0] if len(ppo) == 1 else ppo[1]
    with figure(path, 3) as (over_beta, distance, training):
        for key, colour, label in (("true", BLUE, "true reward"), ("proxy", ORANGE, "proxy")):
            band(
                over_beta,
                places,
                [[r["arms"][name][key] for name in ppo] for r in results],
                colour,
                f"PPO, {label}",
            )
        over_beta.axhline(
            mean([r["sft"]["true"] for r in results]),
            color=GREY,
            linestyle=":",
            label="SFT, true reward",
        )
        others = [name for name in results[0]["arms"] if name not in ppo]
        for name, mark in zip(others, "sD^v", strict=False):
            at = mean([ppo.index(f"ppo {r['best']:g}") for r in results])
            value = mean([r["arms"][name]["true"] for r in results])
            over_beta.plot(
                [at],
                [value],
                mark,
                color=RED,
                label=(f"{NAMES[name]}, true reward"),
                markersize=5,
                fillstyle="none",
            )
        band(
            distance,
            places,
            [[r["arms"][name]["kl"] for name in ppo] for r in results],
            BLUE,
            "KL, nats",
        )
        repeated = [[10 * r["arms"][name]["repeats"] for name in ppo] for r in results]
        band(distance, places, repeated, RED, "letters repeated, tenths", "--")
        for axis in (over_beta, distance):
            axis.set_xticks(places, [name.split()[1] for name in ppo])
            axis.set_xlabel("β")
        steps = range(1, len(results[0]["arms"][weak]["curve"]) + 1)
        lines = (
            ("true", BLUE, "true reward", 1),
            ("proxy", ORANGE, "proxy", 1),
            ("repeats", RED, "letters repeated, tenths", 10),
        )
        for key, colour, label, scale in lines:
            curves = [[scale * v for v in _smooth(r["arms"][weak]["curve"], key)] for r in results]
            band(training, steps, curves, colour, label, "--" if key == "repeats" else "-")
        training.set_xlabel("step")
        for axis in (over_beta, training):
            axis.set_ylabel("reward")
        titles = (
            "at the end of training",
            "what it cost",
            f"PPO at β {weak.split()[1]}, step by step",
        )
        for axis, title in zip((over_beta, distance, training), titles, strict=True):
            axis.set_title(title)
            axis.legend()
