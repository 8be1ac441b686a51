"""A process reward model as a reward source: a reward for every step, and one for the response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch

from tether.algorithms.process import aggregate_steps, right_probabilities, weakest_step
from tether.core.types import Rollout, Score
from tether.data.batches import batches_for
from tether.data.chat import ChatEncoder
from tether.data.steps import StepEncoder, step_states
from tether.models.trunk import Role


@dataclass
class ProcessReward:
    """Scores the sampled token ids themselves, ended by a stop token as in training; steps are found in the ids.

    A step's reward is the probability that it is right. `Score.steps` names the token of the response that ends the step; for the
    last step of a response that was cut off it is the last token there is, though the model read the stop token after it.

    Args:
        encoder: the encoder the process model was trained with.
        delimiters: those it was trained with.
        aggregate: how the steps' probabilities become the score of the response.
    """

    name = "process"
    role: Role
    encoder: ChatEncoder
    _: KW_ONLY
    delimiters: tuple[str, ...] = ("\n\n",)
    aggregate: Literal["min", "product", "last"] = "min"
    micro_batch_tokens: int = 4096

    def __post_init__(self) -> None:
        self.steps = StepEncoder(self.encoder, self.delimiters)
        self.role.train_mode(False)

    @torch.no_grad()
    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score a rollout; a response without a step, or a number that is not finite, is a failed score."""
        assert self.role.head is not None
        sequences = [self.encoder.rollout_for_scoring(r.prompt_ids, r.response_ids) for r in rollouts]
        ends = [self.steps.step_ends(s.ids[s.prompt_length :]) for s in sequences]
        scores = [Score(None, reason="the response has no step") for _ in rollouts]
        for cut, batch in batches_for(self.role, sequences, self.encoder.pad_id, self.micro_batch_tokens):
            states = self.role.hidden(batch)[step_states(batch, [ends[i] for i in cut])]
            given = iter(right_probabilities(self.role.head(states)).tolist())
            for i in cut:
                if ends[i]:
                    scores[i] = self._score(rollouts[i], ends[i], [next(given) for _ in ends[i]])
        return scores

    def _score(self, rollout: Rollout, ends: Sequence[int], probabilities: list[float]) -> Score:
        matrix = torch.tensor([probabilities])
        judged = torch.ones_like(matrix, dtype=torch.bool)
        last = len(rollout.response_ids) - 1
        score = Score(
            float(aggregate_steps(matrix, judged, self.aggregate)),
            parts={"num_steps": float(len(ends)), "weakest_step": float(weakest_step(matrix, judged))},
            steps=tuple((min(end, last), p) for end, p in zip(ends, probabilities, strict=True)),
        )
        return score.finite("the process reward model", probabilities)
