"""As many labels at once, on the fine-tuned model's replies, or in rounds, on those of the policy
that the last labels made.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning import toy
from benchmarks.learning.picture import COLOURS, band, figure
from benchmarks.learning.workbench import (
    kl,
    markdown,
    mean,
    optimise,
    optimizer,
    sample,
    spread,
    told,
)

from tether.core.types import Comparison, Rollout

LABELS, ROUNDS, SPARE = 450, 3, 4
"""All labels of an arm, its rounds, and how many pairs there are to choose from for each label."""
BETA = 0.03
ARMS = {
    "at once": (1, "random"),
    "three rounds": (ROUNDS, "random"),
    "three rounds, uncertain pairs": (ROUNDS, "uncertain"),
}
AGAINST = "at once"
Result = dict[str, Any]


def run(
    seed: int,
    *,
    demonstrations: int = 16000,
    labels: int = LABELS,
    steps: int = 60,
    beta: float = BETA,
) -> Result:
    """One seed: every arm from the same fine-tuned model, with the same number of labels."""
    start = toy.fine_tuned(seed, demonstrations)
    before = toy.measure(sample(start, toy.PROMPTS, toy.LENGTH, num_samples=32, seed=seed + 300))
    arms = {
        name: _arm(start, how, labels // rounds, rounds, steps, beta, seed)
        for name, (rounds, how) in ARMS.items()
    }
    return {"seed": seed, "sft": before, "arms": arms}


def _arm(
    start: Any,
    how: str,
    labels: int,
    rounds: int,
    steps: int,
    beta: float,
    seed: int,
) -> list[Result]:
    """What is known after each round. Every reward model and every policy starts from the
    fine-tuned model.
    """
    known: list[Comparison] = []
    policy, reward, found = start, None, []
    for number in range(rounds):
        pairs = toy.pairs_of_replies(policy, SPARE * labels, seed + 100 * (number + 1))
        pairs = [pair for pair in pairs if pair[0].text != pair[1].text]
        if how == "uncertain" and reward is not None:
            scores = iter(reward.score([reply for pair in pairs for reply in pair]))
            gaps = [abs((next(scores).value or 0.0) - (next(scores).value or 0.0)) for _ in pairs]
            pairs = [pairs[place] for place in sorted(range(len(pairs)), key=gaps.__getitem__)]
        rng = random.Random(seed + number)
        known += [
            toy.label(*pair, rng, f"{number}-{place}") for place, pair in enumerate(pairs[:labels])
        ]
        reward = toy.reward_model(start, known, seed)
        settings = {
            "algorithm": "ppo",
            "steps": steps,
            "prompts_per_step": 64,
            "max_new_tokens": toy.LENGTH,
            "seed": seed + number,
        }
        settings |= {
            "normalize_scores": True,
            "kl": {"coefficient": beta},
            "optimizer": optimizer(1e-3),
        }
        policy, _ = optimise(start, reward, toy.PROMPTS, toy.measure, settings)
        found.append(_measured(policy, start, reward, len(known), pairs[:labels], seed))
    return found


def _measured(
    policy: Any,
    start: Any,
    reward: Any,
    labels: int,
    judged: Sequence[tuple[Rollout, Rollout]],
    seed: int,
) -> Result:
    replies = sample(policy, toy.PROMPTS, toy.LENGTH, num_samples=32, seed=seed + 300)
    seen = mean([toy.repeats(reply.text) > 1 for pair in judged for reply in pair])
    accuracy = toy.accuracy(reward, replies)
    return {
        **toy.measure(replies),
        "kl": kl(replies, start),
        "labels": labels,
        "repeats_judged": seen,
        "accuracy": accuracy,
    }


def table(results: Sequence[Result]) -> str:
    rows = [["SFT", "", told([result["sft"]["true"] for result in results]), "", "", "", ""]]
    for name in ARMS:
        for number in range(len(results[0]["arms"][name])):
            rounds = [result["arms"][name][number] for result in results]
            ahead = [
                one["true"] - result["arms"][AGAINST][-1]["true"]
                for one, result in zip(rounds, results, strict=True)
            ]
            last = number + 1 == len(results[0]["arms"][name])
            more = (
                (f"{mean(ahead):+.2f} ± {spread(ahead) / len(ahead) ** 0.5:.2f}")
                if last and name != AGAINST
                else ""
            )
            shares = f"{mean([one['repeats_judged'] for one in rounds]):.0%}"
            columns = [told([one[key] for one in rounds]) for key in ("true", "kl", "accuracy")]
            rows.append([name, str(rounds[0]["labels"]), columns[0], more, *columns[1:], shares])
    head = (
        "labels are had",
        "so far",
        "true reward",
        f"ahead of {AGAINST}, ± standard error",
        "KL, nats",
    )
    return markdown(
        (*head, "reward model on the policy's replies", "judged replies that repeat letters"),
        rows,
    )


def draw(results: Sequence[Result], path: Path) -> None:
    with figure(path, 1) as (axis,):
        for (name, (rounds, _)), colour in zip(ARMS.items(), COLOURS, strict=False):
            curves = [
                [result["sft"]["true"], *(one["true"] for one in result["arms"][name])]
                for result in results
            ]
            band(
                axis,
                [0, *(LABELS // rounds * (n + 1) for n in range(rounds))],
                curves,
                colour,
                name,
            )
        axis.set_xlabel("labels")
        axis.set_ylabel("true reward of the policy")
        axis.legend()
