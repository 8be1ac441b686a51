"""A quarter of the labels turned round: what ensembles and averaged weights save of what a single
reward model loses.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.learning import toy
from benchmarks.learning.picture import COLOURS, GREY, band, figure
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

from tether.algorithms.reward_ensembles import combine_members
from tether.core.types import Comparison, Rollout, Score
from tether.rewards.learned import LearnedReward
from tether.settings.rewards import Combine

MEMBERS, FLIPPED, PAIRS = 5, 0.25, 1000
BETAS = (0.0, 0.03, 0.1)
SINGLES = 2
"""Policies against a single model of these members, whose mean is what the others are compared
with: less noise than one.
"""
Result = dict[str, Any]


class Several:
    """Reward models of their own weights, each with mean 0 and deviation 1 on the replies that the
    labels were about.
    """

    name = "several"

    def __init__(
        self,
        models: Sequence[LearnedReward],
        known: Sequence[Rollout],
        combine: Combine = "mean",
    ) -> None:
        self.models = models
        self.combine: Combine = combine
        table = self._table(known)
        self.centre, self.scale = table.mean(1, keepdim=True), table.std(1, keepdim=True)

    def _table(self, rollouts: Sequence[Rollout]) -> torch.Tensor:
        return torch.tensor(
            [[score.value for score in model.score(rollouts)] for model in self.models],
            dtype=torch.float64,
        )

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        opinions = (self._table(rollouts) - self.centre) / self.scale
        return [Score(value) for value in combine_members(opinions, self.combine).tolist()]


def turned(pairs: Sequence[Comparison], seed: int) -> list[Comparison]:
    """The same pairs, a quarter of them with the other answer in front."""
    places = set(random.Random(seed).sample(range(len(pairs)), round(FLIPPED * len(pairs))))
    return [
        Comparison(pair.prompt, pair.rejected, pair.chosen, group=pair.group)
        if place in places
        else pair
        for place, pair in enumerate(pairs)
    ]


@torch.no_grad()
def averaged(models: Sequence[LearnedReward]) -> LearnedReward:
    """One model with the mean of the weights (WARM, https://arxiv.org/abs/2401.12187), heads
    included.
    """
    one = copy.deepcopy(models[0])
    for part in ("model", "head"):
        modules = [getattr(model.role, part) for model in models]
        for target, *values in zip(
            getattr(one.role, part).parameters(),
            *(m.parameters() for m in modules),
            strict=True,
        ):
            target.copy_(torch.stack(values).mean(0))
    return one


def run(
    seed: int,
    *,
    demonstrations: int = 16000,
    pairs: int = PAIRS,
    steps: int = 60,
    betas: Sequence[float] = BETAS,
) -> Result:
    """One seed: labels, five reward models of them, PPO against each kind of reward at every
    beta.
    """
    start = toy.fine_tuned(seed, demonstrations)
    clean = toy.labelled_pairs(start, pairs, seed + 100)
    noisy, seeds = turned(clean, seed), [1000 * k + seed for k in range(MEMBERS)]
    members = [toy.reward_model(start, noisy, one) for one in seeds]
    alike = [toy.reward_model(start, noisy, one, head_seed=seed) for one in seeds]
    known = sample(start, toy.PROMPTS, toy.LENGTH, num_samples=32, seed=seed + 200)
    rewards = {
        **{f"single {k}": Several(members[k : k + 1], known) for k in range(SINGLES)},
        "mean of 5": Several(members, known),
        "worst of 5": Several(members, known, "worst"),
        "mean less spread": Several(members, known, "uncertainty"),
        "averaged weights": Several([averaged(alike)], known),
        "single, clean labels": Several([toy.reward_model(start, clean, seed)], known),
    }
    arms = {
        f"{name} {beta:g}": _trained(start, reward, beta, steps, seed)
        for name, reward in rewards.items()
        for beta in betas
    }
    accuracy = {name: toy.accuracy(reward, known) for name, reward in rewards.items()}  # type: ignore[arg-type]
    return {
        "seed": seed,
        "betas": list(betas),
        "accuracy": accuracy,
        "sft": toy.measure(known)["true"],
        "arms": arms,
    }


def _trained(start: Any, reward: Several, beta: float, steps: int, seed: int) -> Result:
    settings = {
        "algorithm": "ppo",
        "steps": steps,
        "prompts_per_step": 64,
        "samples_per_prompt": 1,
        "max_new_tokens": toy.LENGTH,
        "normalize_scores": True,
    }
    settings |= {"kl": {"coefficient": beta}, "seed": seed, "optimizer": optimizer(1e-3)}
    policy, curve = optimise(start, reward, toy.PROMPTS, toy.measure, settings)
    replies = sample(policy, toy.PROMPTS, toy.LENGTH, num_samples=32, seed=seed + 300)
    return {
        **toy.measure(replies),
        "kl": kl(replies, start),
        "curve": [point["true"] for point in curve],
    }


def names(result: Result) -> list[str]:
    """The kinds of reward, the single models first and as one."""
    return [
        "single",
        *(
            name
            for name in result["accuracy"]
            if not name[-1].isdigit() or name.startswith(("mean", "worst"))
        ),
    ]


def value(result: Result, name: str, beta: float, key: str = "true") -> float:
    """A kind of reward's figure at a beta; the single models' mean."""
    kinds = [f"single {k}" for k in range(SINGLES)] if name == "single" else [name]
    return mean([result["arms"][f"{kind} {beta:g}"][key] for kind in kinds])


def table(results: Sequence[Result]) -> str:
    rows = []
    for name in names(results[0]):
        kinds = [f"single {k}" for k in range(SINGLES)] if name == "single" else [name]
        row = [
            name,
            told([mean([result["accuracy"][kind] for kind in kinds]) for result in results]),
        ]
        for beta in results[0]["betas"]:
            ahead = [
                value(result, name, beta) - value(result, "single", beta) for result in results
            ]
            error = spread(ahead) / len(ahead) ** 0.5
            more = "" if name == "single" else f" ({mean(ahead):+.2f} ± {error:.2f})"
            row.append(f"{mean([value(result, name, beta) for result in results]):.2f}{more}")
        rows.append(row)
    head = ("reward", "accuracy", *(f"true reward at β {beta:g}" for beta in results[0]["betas"]))
    before = told([result["sft"] for result in results])
    return markdown(head, rows) + (
        f"\n\nSFT: {before}. In brackets: the paired difference from a "
        "single model ± standard error."
    )


def draw(results: Sequence[Result], path: Path) -> None:
    with figure(path, len(results[0]["betas"])) as axes:
        for axis, beta in zip(axes, results[0]["betas"], strict=True):
            for name, colour in zip(names(results[0]), (*COLOURS[:5], GREY), strict=False):
                kinds = [f"single {k}" for k in range(SINGLES)] if name == "single" else [name]
                curves = [
                    result["arms"][f"{kind} {beta:g}"]["curve"]
                    for result in results
                    for kind in kinds
                ]
                steps = [5 * (place + 1) for place in range(len(curves[0]) // 5)]
                smooth = [[mean(curve[step - 5 : step]) for step in steps] for curve in curves]
                band(axis, steps, smooth, colour, name, ":" if "clean" in name else "-")
            axis.set_title(f"β {beta:g}")
            axis.set_xlabel("step")
        axes[0].set_ylabel("true reward")
        axes[0].legend()
