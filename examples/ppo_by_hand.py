"""PPO written out: every line of the algorithm, on a model's roles, its engine and its learner."""

import torch
from torch import Tensor

import tether
from tether.algorithms.advantages import gae
from tether.algorithms.masked import whiten
from tether.algorithms.policy_losses import ppo_clip_loss, value_loss
from tether.core.types import Sampling
from tether.data.batches import TokenBatch


def vowels(text: str) -> float:
    return sum(c in "aeiou" for c in text) / max(1, len(text))


def train(source: str = "tiny", steps: int = 20, beta: float = 0.005) -> list[float]:
    """The mean reward of every step."""
    model = tether.load_model(source)
    reference, policy = model.role(), model.role("policy", rank=8)
    value, engine = model.value(policy), model.engine(policy)
    learner = model.learner(policy, value, learning_rate=5e-3, updates=2 * steps)
    prompts = model.prompts([f"Say {word}." for word in ("hello", "yes", "no", "why")])
    sampling = Sampling(16, 1.0)
    history = []

    def forward(batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Log-probabilities and values of the response tokens, (responses, time), in one pass."""
        hidden = policy.hidden(batch)
        logprobs, _ = policy.logprobs_of(hidden, batch)
        return batch.scatter(logprobs), batch.scatter(value.values_of(hidden, batch))

    for step in range(steps):
        places = range(step * len(prompts), (step + 1) * len(prompts))
        groups = engine.generate(prompts, sampling, num_samples=16, seed=0, ordinals=places)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        scores = torch.tensor([vowels(rollout.text) for rollout in rollouts])
        batch = model.batch(rollouts)
        mask, n = batch.mask, int(batch.mask.sum())
        with torch.no_grad():
            (old, values), ref = forward(batch), batch.scatter(reference.logprobs(batch)[0])
        rewards = -beta * (old - ref) * mask
        # the score belongs to the last token
        rewards[torch.arange(len(rollouts)), mask.sum(1) - 1] += scores
        advantages, returns = gae(rewards, values, mask, 1.0, 0.95)
        advantages = whiten(advantages, mask)
        for _ in range(2):
            logprobs, predicted = forward(batch)
            loss, _ = ppo_clip_loss(logprobs, old, advantages, mask, clip_range=0.2, denominator=n)
            critic, _ = value_loss(predicted, values, returns, mask, clip_range=0.2, denominator=n)
            learner.backward(loss + 0.1 * critic)
            learner.step()
        engine.update_weights(step + 1)
        history.append(float(scores.mean()))
        kl = float(((old - ref) * mask).sum(1).mean())
        print(f"step {step + 1}: reward {history[-1]:.3f}, KL {kl:.2f} nats")
    return history


if __name__ == "__main__":
    train()
