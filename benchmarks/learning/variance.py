"""What a baseline takes off the variance of a policy gradient, and that it leaves the mean where it
was.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.learning import arithmetic, toy
from benchmarks.learning.picture import COLOURS, GREY, figure
from benchmarks.learning.workbench import (
    DIM,
    TOKENS,
    encoder,
    markdown,
    mean,
    optimise,
    optimizer,
    spread,
    told,
)
from torch import Tensor, nn

from tether.core.protocols import RewardSource
from tether.core.types import Prompt, Rollout, Score
from tether.models.heads import ScalarHead
from tether.models.loading import add_adapter
from tether.models.trunk import Role
from tether.rollout.local import LocalEngine
from tether.settings.model import LoraConfig
from tether.settings.policy import PolicyConfig
from tether.stages.learner.local import LocalLearner
from tether.stages.online_loop import step_prompts
from tether.stages.policy_gradient import PolicyGradient
from tether.stages.rollouts import Clock

UNTETHERED = {"coefficient": 0.0, "report": False}
COMMON: dict[str, Any] = {
    "algorithm": "reinforce",
    "normalize_scores": False,
    "prompts_per_step": 16,
    "samples_per_prompt": 4,
}
COMMON |= {"micro_batch_tokens": TOKENS, "normalize": "constant", "kl": UNTETHERED}
ARMS: dict[str, dict[str, Any]] = {
    "no baseline": {"baseline": "none"},
    "running mean": {"baseline": "running_mean"},
    "leave-one-out": {"baseline": "leave_one_out"},
    "learned value": {"baseline": "none", "critic": True, "lam": 1.0, "value_coefficient": 0.0},
    "group mean": {"baseline": "group"},
}
"""The group's own mean is no baseline in the strict sense: it holds the very score that it is taken
off.
"""
CRITIC = {"algorithm": "ppo", "lam": 1.0, "normalize_scores": False, "value_clip_range": None}
CONSTANT = "best constant"
Result = dict[str, Any]
Task = tuple[Any, RewardSource, Sequence[Prompt], int]


class Caught(LocalLearner):
    """In the learner's place: keeps the gradient and moves nothing."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters, optimizer(1e-3), 1)
        self.gradients: list[Tensor] = []

    def step(self) -> Mapping[str, float]:
        parts = [
            p.grad.flatten() if p.grad is not None else torch.zeros(p.numel())
            for p in self.parameters
        ]
        self.gradients.append(torch.cat(parts))
        for parameter in self.parameters:
            parameter.grad = None
        return {}


class Shifted:
    """A reward with a constant added, which no comparison of its scores can see."""

    name = "shifted"

    def __init__(self, source: RewardSource, offset: float) -> None:
        self.source, self.offset = source, offset

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [
            Score(None if score.value is None else score.value + self.offset)
            for score in self.source.score(rollouts)
        ]


def shifted(seed: int, demonstrations: int) -> Task:
    """The toy language at the start: a reward model is only defined up to a constant, and here that
    is 3.
    """
    start = toy.fine_tuned(seed, demonstrations)
    reward = toy.reward_model(start, toy.labelled_pairs(start, 500, seed + 100), seed)
    return start, Shifted(reward, 3.0), toy.PROMPTS, toy.LENGTH


def letters(seed: int, demonstrations: int) -> Task:
    """The toy language after a little optimisation: scores centred on a policy that is now left
    behind.
    """
    start = toy.fine_tuned(seed, demonstrations)
    reward = toy.reward_model(start, toy.labelled_pairs(start, 500, seed + 100), seed)
    return _practised(
        start,
        reward,
        toy.PROMPTS,
        toy.LENGTH,
        seed,
        {"steps": 10, "kl": {"coefficient": 0.1}},
        2e-3,
    )


def sums(seed: int, demonstrations: int) -> Task:
    """Arithmetic after a little optimisation: 1 for a sum that is right, else 0."""
    train, _ = arithmetic.problems(seed)
    start = arithmetic.taught(train, seed, demonstrations // 2, *arithmetic.HALF)
    return _practised(
        start,
        arithmetic.Sums(),
        train,
        arithmetic.ANSWER_TOKENS,
        seed,
        {"steps": 24, "kl": UNTETHERED},
        5e-4,
    )


def _practised(
    start: Any,
    reward: RewardSource,
    prompts: Sequence[Prompt],
    tokens: int,
    seed: int,
    how: dict[str, Any],
    rate: float,
) -> Task:
    settings = {
        "algorithm": "rloo",
        "normalize_scores": False,
        "prompts_per_step": 8,
        "samples_per_prompt": 4,
        "max_new_tokens": tokens,
        "seed": seed,
        **how,
    }
    policy, _ = optimise(
        start,
        reward,
        prompts,
        lambda _: {},
        {**settings, "optimizer": optimizer(rate)},
    )
    return policy, reward, prompts, tokens


TASKS = {
    "letters at the start, scores 3 higher": shifted,
    "letters on the way, a reward model's score": letters,
    "sums, right or wrong": sums,
}


def run(
    seed: int,
    *,
    demonstrations: int = 16000,
    value_steps: int = 40,
    batches: int = 80,
) -> Result:
    """One seed: two policies on their way, a value function that learns each, and many batches of
    gradients.
    """
    return {
        "seed": seed,
        "batches": batches,
        "tasks": {
            name: measured(make(seed, demonstrations), seed, value_steps, batches)
            for name, make in TASKS.items()
        },
    }


def measured(task: Task, seed: int, value_steps: int, batches: int) -> Result:
    """The gradients of all arms on the same replies of a policy that stands still."""
    policy, reward, prompts, tokens = task
    policy.requires_grad_(False)
    value = Role(copy.deepcopy(policy), None, ScalarHead(DIM))
    role = Role(add_adapter(policy, "policy", LoraConfig(rank=8), seed=seed), "policy")
    engine = LocalEngine(role, encoder(), max_rows=64)

    def stage(arm: dict[str, Any], steps: int, offset: int = 0) -> PolicyGradient:
        common = {
            **COMMON,
            "max_new_tokens": tokens,
            "steps": steps,
            "seed": seed + offset,
            "optimizer": optimizer(1e-3),
        }
        config = PolicyConfig.model_validate({**common, **arm})
        return PolicyGradient(
            config=config,
            policy=role,
            reference=None,
            value=value if config.critic else None,
            reward=reward,
            engine=engine,
            encoder=encoder(),
        )

    explained = learn_value(stage(CRITIC, value_steps), prompts)
    caught, scores = {name: Caught(role.parameters()) for name in (*ARMS, CONSTANT)}, []
    stages = {name: stage(arm, batches + 1, offset=1) for name, arm in ARMS.items()}
    for number in range(batches + 1):
        first = stages["no baseline"]
        rollouts, given, _ = first.sample(step_prompts(prompts, first, number), number, Clock())
        scores += [score.value or 0.0 for score in given]
        for name, learning in (*stages.items(), (CONSTANT, first)):
            learning.learner = caught[name]
            learning.learn(
                rollouts,
                [Score(1.0)] * len(given) if name == CONSTANT else given,
                number,
            )
    # The first batch only gives the running mean something to remember.
    gradients = {name: torch.stack(found.gradients[1:]).double() for name, found in caught.items()}
    constant = best_constant(gradients["no baseline"], gradients[CONSTANT])
    gradients[CONSTANT] = gradients["no baseline"] - constant * gradients[CONSTANT]
    facts = {
        "score": mean(scores),
        "deviation": spread(scores),
        "explained": explained,
        "constant": constant,
    }
    return {**facts, "arms": compare(gradients)}


def best_constant(scored: Tensor, ones: Tensor) -> float:
    """The constant whose removal leaves least variance, from the gradients under the scores and
    under a score of 1 for all.

    tr Cov(g_r − b g_1) is smallest at b = tr Cov(g_r, g_1) / tr Cov(g_1).
    """
    apart = [rows - rows.mean(0) for rows in (scored, ones)]
    return float((apart[0] * apart[1]).sum() / apart[1].square().sum())


def learn_value(stage: PolicyGradient, prompts: Sequence[Prompt]) -> float:
    """Train the value function on a policy that is put back after every update; the variance of
    returns that it explains.
    """
    before = [parameter.detach().clone() for parameter in stage.policy.parameters()]
    explained = []
    for number in range(stage.config.steps):
        metrics, _, _ = stage.step(step_prompts(prompts, stage, number), number)
        explained.append(metrics["value/explained_variance"])
        with torch.no_grad():
            for parameter, old in zip(stage.policy.parameters(), before, strict=True):
                parameter.copy_(old)
    return mean(explained[-10:])


def compare(gradients: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Of every arm's (batches, parameters): the trace of the covariance, and how its mean stands to
    that of leave-one-out.
    """
    unbiased = gradients["leave-one-out"]
    length = _apart(unbiased @ unbiased.T).sum()
    return {
        name: {
            "trace": float(rows.var(0).sum()),
            "along": float(_apart(rows @ unbiased.T).sum() / length),
            "deviations": _deviations((rows - unbiased) @ (rows - unbiased).T),
        }
        for name, rows in gradients.items()
    }


def _apart(products: Tensor) -> Tensor:
    """Products of different batches alone: their noises are independent, so that only what the
    means share is left.
    """
    return products - torch.diag(products.diagonal())


def _deviations(products: Tensor) -> float:
    """By how many of its standard errors the squared length of a mean differs from 0, from the
    products of all batches.
    """
    apart = _apart(products)
    return float(apart.sum() / (2 * apart.square().sum()).sqrt().clamp(min=1e-12))


def factors(results: Sequence[Result], task: str, name: str) -> list[float]:
    """How many times less variance than without a baseline, seed by seed; not a number where every
    answer scored the same.
    """
    traces = [
        [result["tasks"][task]["arms"][arm]["trace"] for arm in ("no baseline", name)]
        for result in results
    ]
    return [without / with_it if without and with_it else math.nan for without, with_it in traces]


def table(results: Sequence[Result]) -> str:
    rows, facts = [], []
    for task in TASKS:
        found = [result["tasks"][task] for result in results]
        for name in found[0]["arms"]:
            arms = [one["arms"][name] for one in found]
            along, off = (
                told([arm[key] for arm in arms], digits)
                for key, digits in (("along", 2), ("deviations", 1))
            )
            compared = ["1", ""] if name == "leave-one-out" else [along, off]
            rows.append([task, name, told(factors(results, task, name)), *compared])
        known = {
            key: told([one[key] for one in found])
            for key in ("score", "deviation", "constant", "explained")
        }
        facts.append([task, *known.values()])
    head = ("score", "taken off it", "variance: times less than with nothing taken off")
    head += (
        "its mean along that of leave-one-out",
        "its mean differs from that, in standard errors",
    )
    scores = ("score", "mean", "deviation", "best constant", "variance explained by the value")
    return f"{markdown(head, rows)}\n\nThe scores:\n\n{markdown(scores, facts)}"


def draw(results: Sequence[Result], path: Path) -> None:
    with figure(path, len(TASKS)) as axes:
        for axis, task in zip(axes, TASKS, strict=True):
            names = list(results[0]["tasks"][task]["arms"])[::-1]
            for place, (name, colour) in enumerate(zip(names, COLOURS, strict=True)):
                shares = [1 / factor for factor in factors(results, task, name)]
                axis.plot(shares, [place] * len(shares), "o", color=colour, markersize=5, alpha=0.8)
            axis.axvline(1, color=GREY, linestyle=":")
            axis.set_yticks(range(len(names)), names)
            axis.set_ylim(-0.5, len(names) - 0.5)
            axis.set_xscale("log")
            axis.set_title(task)
            axis.set_xlabel(
                "variance of the gradient, over that without a baseline; a point a seed",
            )
