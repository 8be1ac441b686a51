"""GRPO in a loop of your own: any model, any optimizer, and only the functions of tether.algorithms.

`python examples/losses_in_your_loop.py`
"""

import torch
from torch.nn.functional import log_softmax

from tether.algorithms.advantages import group_relative
from tether.algorithms.kl import kl_policy_reference_k3
from tether.algorithms.masked import masked_mean
from tether.algorithms.policy_losses import ppo_clip_loss

VOCABULARY, LENGTH, PROMPTS, SAMPLES = 20, 6, 4, 16


class Policy(torch.nn.Module):
    """A next-token model that sees the token before: put your own here."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(VOCABULARY, VOCABULARY)
        torch.nn.init.zeros_(self.table.weight)

    def logprobs(self, tokens):
        predicted = log_softmax(self.table(tokens[:, :-1]), dim=-1)
        return predicted.gather(-1, tokens[:, 1:, None]).squeeze(-1)

    @torch.no_grad()
    def sample(self, first):
        tokens = first[:, None]
        for _ in range(LENGTH):
            chances = self.table(tokens[:, -1]).softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1)], dim=1)
        return tokens


def train(steps: int = 40, beta: float = 0.01) -> list[float]:
    """The mean reward of every step; the reward is the share of even tokens."""
    torch.manual_seed(0)
    policy, reference, history = Policy(), Policy(), []
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    groups = torch.arange(PROMPTS).repeat_interleave(SAMPLES)
    for _ in range(steps):
        tokens = policy.sample(groups)
        mask = torch.ones(len(tokens), LENGTH, dtype=torch.bool)
        scores = masked_mean((tokens[:, 1:] % 2 == 0).float(), mask, dim=1)
        advantages = group_relative(scores, groups)[:, None].expand(mask.shape)
        with torch.no_grad():
            old, fixed = policy.logprobs(tokens), reference.logprobs(tokens)
        for _ in range(2):
            new, count = policy.logprobs(tokens), int(mask.sum())
            loss, _ = ppo_clip_loss(new, old, advantages, mask, clip_range=0.2, denominator=count)
            penalty = beta * masked_mean(kl_policy_reference_k3(new, fixed), mask)
            optimizer.zero_grad()
            (loss + penalty).backward()
            optimizer.step()
        history.append(float(scores.mean()))
    return history


if __name__ == "__main__":
    rewards = train()
    print(f"mean reward: {rewards[0]:.2f} at the start, {rewards[-1]:.2f} at the end")
