"""The game of labs 3 to 6: a tiny model with random weights answers in 12 bytes, and vowels are good."""

from __future__ import annotations

import torch
from torch import Tensor

import tether
from tether.core.types import Sampling
from tether.data.batches import TokenBatch

PROMPTS = [f"Say {word}." for word in ("hello", "yes", "no", "why")]
TOKENS = 12
TEMPERATURES = (0.1, 0.3, 0.5, 0.7, 1.0)


def vowels(text: str) -> float:
    """The share of vowels among the characters of an answer."""
    return sum(letter in "aeiou" for letter in text) / max(1, len(text))


class Game:
    """The model in its roles, an engine that samples from the policy, and a learner."""

    def __init__(
        self, seed: int, *, updates: int, learning_rate: float = 1e-2, random_reward: bool = False
    ) -> None:
        self.seed = seed
        self.luck = torch.Generator().manual_seed(seed) if random_reward else None
        self.shares: list[float] = []
        self.model = tether.load_model("tiny", seed=seed)
        self.reference = self.model.role()
        self.policy = self.model.role("policy", rank=8, seed=seed)
        self.value = self.model.value(self.policy)
        self.engine = self.model.engine(self.policy)
        self.learner = self.model.learner(
            self.policy, self.value, learning_rate=learning_rate, updates=updates
        )

    def sample(
        self, step: int, samples: int = 16, temperature: float = 1.0
    ) -> tuple[TokenBatch, Tensor]:
        """Answers to the four prompts as tensors, and the score of each: its share of vowels, or
        with `random_reward` a number that knows nothing of the answer.
        """
        prompts = self.model.prompts(PROMPTS)
        places = range(step * len(prompts), (step + 1) * len(prompts))
        how = Sampling(TOKENS, temperature)
        groups = self.engine.generate(
            prompts, how, num_samples=samples, seed=self.seed, ordinals=places
        )
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        scores = torch.tensor([vowels(rollout.text) for rollout in rollouts])
        self.shares.append(float(scores.mean()))
        if self.luck:
            scores = torch.rand(len(scores), generator=self.luck)
        return self.model.batch(rollouts), scores

    def evaluate(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """The policy's log-probabilities and values of the answers' tokens, in one pass."""
        hidden = self.policy.hidden(batch)
        logprobs, _ = self.policy.logprobs_of(hidden, batch)
        return batch.scatter(logprobs), batch.scatter(self.value.values_of(hidden, batch))

    def reference_logprobs(self, batch: TokenBatch) -> Tensor:
        """The reference's log-probabilities of the same tokens."""
        with torch.no_grad():
            return batch.scatter(self.reference.logprobs(batch)[0])

    def update(self, loss: Tensor, step: int) -> None:
        """One step of the optimizer; then the engine takes the new weights."""
        self.learner.backward(loss)
        self.learner.step()
        self.engine.update_weights(step)

    def answers(self) -> list[str]:
        """One answer to each prompt, of the policy as it is now."""
        how = Sampling(TOKENS, 1.0)
        groups = self.engine.generate(self.model.prompts(PROMPTS), how, seed=self.seed)
        return [group.rollouts[0].text for group in groups]

    def by_temperature(self) -> dict[float, float]:
        """The mean score of 256 answers at each temperature, of the policy as it is now."""
        for temperature in TEMPERATURES:
            self.sample(10**6, 64, temperature)
        shares = [self.shares.pop() for _ in TEMPERATURES]
        return dict(zip(TEMPERATURES, reversed(shares), strict=True))
