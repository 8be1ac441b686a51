"""What a baseline takes off the variance of a policy gradient, and that it leaves the mean where it was."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.learning import arithmetic
from benchmarks.learning.picture import COLOURS, figure
from benchmarks.learning.workbench import DIM, TOKENS, encoder, markdown, mean, optimise, optimizer, told
from torch import Tensor, nn

from tether.core.types import Prompt
from tether.models.config import LoraConfig
from tether.models.heads import ScalarHead
from tether.models.loading import add_adapter
from tether.models.trunk import Role
from tether.rollout.local import LocalEngine
from tether.stages.policy import prompts_of
from tether.stages.policy_config import PolicyConfig
from tether.stages.policy_gradient import PolicyGradient

COMMON: dict[str, Any] = {"algorithm": "reinforce", "samples_per_prompt": 4, "max_new_tokens": arithmetic.ANSWER_TOKENS}
COMMON |= {"micro_batch_tokens": TOKENS, "normalize": "constant", "kl": {"coefficient": 0.0, "report": False}}
ARMS: dict[str, dict[str, Any]] = {
    "no baseline": {},
    "running mean": {"baseline": "running_mean"},
    "leave-one-out": {"baseline": "leave_one_out"},
    "learned value": {"critic": True, "lam": 1.0, "value_coefficient": 0.0},
    "group mean": {"baseline": "group"},
}
"""The group's own mean is no baseline in the strict sense: it holds the very score that it is taken off."""
Result = dict[str, Any]


class Caught:
    """In the learner's place: keeps the gradient and moves nothing."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters, self.updates = list(parameters), 0
        self.gradients: list[Tensor] = []

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> Mapping[str, float]:
        parts = [p.grad.flatten() if p.grad is not None else torch.zeros(p.numel()) for p in self.parameters]
        self.gradients.append(torch.cat(parts))
        for parameter in self.parameters:
            parameter.grad = None
        return {}


def run(
    seed: int,
    *,
    demonstrations: int = 8000,
    practice: int = 60,
    value_steps: int = 60,
    batches: int = 150,
    prompts: int = 16,
) -> Result:
    """One seed: a policy halfway through its training, a value function that learns beside it, and many batches of gradients."""
    train, _ = arithmetic.problems(seed)
    start = arithmetic.half_taught(train, seed, demonstrations)
    settings = {"algorithm": "rloo", "steps": practice, "prompts_per_step": 4, "samples_per_prompt": 4, "seed": seed}
    settings |= {"max_new_tokens": arithmetic.ANSWER_TOKENS, "kl": COMMON["kl"], "optimizer": optimizer(4e-4)}
    policy, _ = optimise(start, arithmetic.Sums(), train, arithmetic.measure, settings)
    policy.requires_grad_(False)
    value = Role(copy.deepcopy(policy), None, ScalarHead(DIM))
    role = Role(add_adapter(policy, "policy", LoraConfig(rank=8), seed=seed), "policy")
    engine = LocalEngine(role, encoder())
    explained = learn_value(_stage(role, value, {"critic": True, "lam": 1.0}, value_steps, prompts, seed, engine), train)
    caught, solved = {name: Caught(role.parameters()) for name in ARMS}, []
    stages = {
        name: _stage(role, value if "critic" in arm else None, arm, batches + 1, prompts, seed + 1, engine)
        for name, arm in ARMS.items()
    }
    for number in range(batches + 1):
        config = stages["no baseline"].config
        groups = engine.generate(
            prompts_of(train, config, number),
            config.sampling,
            num_samples=config.samples_per_prompt,
            seed=config.seed,
            ordinals=config.ordinals(number),
        )
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        scores = arithmetic.Sums().score(rollouts)
        solved.append(mean([score.value or 0.0 for score in scores]))
        for name, stage in stages.items():
            stage.learner = caught[name]
            stage.learn(rollouts, scores, number)
    # The first batch only gives the running mean something to remember.
    arms = compare({name: torch.stack(found.gradients[1:]).double() for name, found in caught.items()})
    facts = {"seed": seed, "batches": batches, "replies": 4 * prompts, "solved": mean(solved), "explained": explained}
    return {**facts, "arms": arms}


def _stage(
    role: Role, value: Role | None, arm: dict[str, Any], steps: int, prompts: int, seed: int, engine: LocalEngine
) -> PolicyGradient:
    settings = {**COMMON, **arm, "steps": steps, "prompts_per_step": prompts, "seed": seed, "optimizer": optimizer(1e-3)}
    return PolicyGradient(PolicyConfig.model_validate(settings), role, None, value, arithmetic.Sums(), engine, encoder())


def learn_value(stage: PolicyGradient, prompts: Sequence[Prompt]) -> float:
    """Train the value function on a policy that is put back after every update; the variance of returns that it explains."""
    before = [parameter.detach().clone() for parameter in stage.policy.parameters()]
    explained = []
    for number in range(stage.config.steps):
        metrics, _, _ = stage.step(prompts_of(prompts, stage.config, number), number)
        explained.append(metrics["value/explained_variance"])
        with torch.no_grad():
            for parameter, old in zip(stage.policy.parameters(), before, strict=True):
                parameter.copy_(old)
    return mean(explained[-10:])


def compare(gradients: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Of every arm's (batches, parameters): the trace of the covariance, and how its mean stands to the others'."""
    plain, leave_one_out = gradients["no baseline"], gradients["leave-one-out"]
    found = {}
    for name, rows in gradients.items():
        shift = rows - plain
        found[name] = {
            "trace": float(rows.var(0).sum()),
            "along": float(_apart(rows @ leave_one_out.T).sum() / _apart(leave_one_out @ leave_one_out.T).sum()),
            "deviations": _deviations(shift @ shift.T) if name != "no baseline" else 0.0,
        }
    return found


def _apart(products: Tensor) -> Tensor:
    """Products of different batches alone: their noises are independent, so that only what the means share is left."""
    return products - torch.diag(products.diagonal())


def _deviations(products: Tensor) -> float:
    """By how many of its standard errors the squared length of a mean differs from 0, from the products of all batches."""
    apart = _apart(products)
    return float(apart.sum() / (2 * apart.square().sum()).sqrt())


def table(results: Sequence[Result]) -> str:
    rows = []
    for name in ARMS:
        arms = [result["arms"][name] for result in results]
        factors = [result["arms"]["no baseline"]["trace"] / arm["trace"] for result, arm in zip(results, arms, strict=True)]
        apart = "" if name == "no baseline" else told([arm["deviations"] for arm in arms], 1)
        along = told([arm["along"] for arm in arms])
        rows.append([name, told([1e3 * arm["trace"] for arm in arms]), told(factors), apart, along])
    head = ("taken off the score", "trace of the covariance, thousandths", "times less than without")
    head += ("its mean is off, in standard errors", "its mean along that of leave-one-out")
    solved, explained = (told([result[key] for result in results]) for key in ("solved", "explained"))
    facts = f"{results[0]['batches']} batches of {results[0]['replies']} replies a seed; the policy solves {solved} of the sums"
    return f"{markdown(head, rows)}\n\n{facts}, and the learned value explains {explained} of the returns' variance."


def draw(results: Sequence[Result], path: Path) -> None:
    names = list(ARMS)
    with figure(path, 1) as (axis,):
        for place, (name, colour) in enumerate(zip(names, COLOURS, strict=False)):
            shares = [result["arms"][name]["trace"] / result["arms"]["no baseline"]["trace"] for result in results]
            axis.bar(place, mean(shares), color=colour, alpha=0.55, width=0.6)
            axis.plot([place] * len(shares), shares, "o", color=colour, markersize=4)
        axis.set_xticks(range(len(names)), [name.replace(" ", "\n") for name in names])
        axis.set_ylabel("variance, as a share of that without a baseline")
