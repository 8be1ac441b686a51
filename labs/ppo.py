"""PPO in 40 lines, for every game of the labs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tether.algorithms.advantages import gae
from tether.algorithms.kl import kl_policy_reference_k1
from tether.algorithms.masked import masked_sum, whiten
from tether.algorithms.policy_losses import ppo_clip_loss, value_loss


class Step(NamedTuple):
    """A step as a log has it: the KL in nats an answer, the ratio before the first update."""

    score: float
    kl: float
    first_ratio: float
    clip_fraction: float


def shaped(scores: Tensor, policy: Tensor, reference: Tensor, mask: Tensor, beta: float) -> Tensor:
    """r_t = −β (log π − log π_ref), and the score once, at the last token."""
    rewards = -beta * kl_policy_reference_k1(policy, reference) * mask
    last = mask.sum(1) - 1
    rewards[torch.arange(len(scores)), last] += scores
    return rewards


def train(
    game: Any,
    *,
    steps: int,
    beta: float,
    lam: float = 0.95,
    epochs: int = 4,
    shape: Callable[..., Tensor] = shaped,
) -> list[Step]:
    """Raise the score of a game, with a value as the baseline and a KL as the tether."""
    history = []
    for step in range(steps):
        # sample, score, evaluate
        batch, scores = game.sample(step)
        mask = batch.mask
        tokens = int(mask.sum())
        with torch.no_grad():
            old, values = game.evaluate(batch)
            reference = game.reference_logprobs(batch)
        # rewards, advantages
        rewards = shape(scores, old, reference, mask, beta)
        advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=lam)
        advantages = whiten(advantages, mask)
        # several clipped epochs
        first_ratio = 0.0
        for epoch in range(epochs):
            logprobs, predicted = game.evaluate(batch)
            surrogate, seen = ppo_clip_loss(
                logprobs, old, advantages, mask, clip_range=0.2, denominator=tokens
            )
            critic, _ = value_loss(
                predicted, values, returns, mask, clip_range=0.2, denominator=tokens
            )
            game.update(surrogate + 0.5 * critic, step + 1)
            if epoch == 0:
                first_ratio = float(seen.ratio_max)
        # record
        kl = masked_sum(old - reference, mask) / len(scores)
        history.append(
            Step(float(scores.mean()), float(kl), first_ratio, float(seen.clip_fraction))
        )
    return history
