"""A trained reward model as a reward source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise

import torch

from tether.core.types import Rollout, Score
from tether.data.batches import TokenBatch, batches_for
from tether.data.chat import ChatEncoder
from tether.models.trunk import Role


@dataclass
class LearnedReward:
    """Scores the sampled token ids themselves, ended by a stop token as in training; no text in between.

    Args:
        encoder: the encoder the reward model was trained with.
        per_token: give as `Score.steps` what each token changed of the score, r_t = s_t − s_(t−1). They add up to the score,
            which leaves the best policy what it was (Ng et al. 1999).
    """

    name = "learned"
    role: Role
    encoder: ChatEncoder
    _: KW_ONLY
    micro_batch_tokens: int = 4096
    per_token: bool = False

    def __post_init__(self) -> None:
        self.role.train_mode(False)

    @torch.no_grad()
    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score a rollout; a number that is not finite becomes a failed score."""
        sequences = [self.encoder.rollout_for_scoring(r.prompt_ids, r.response_ids) for r in rollouts]
        courses: list[list[float]] = [[] for _ in rollouts]
        for cut, batch in batches_for(self.role, sequences, self.encoder.pad_id, self.micro_batch_tokens):
            for index, course in zip(cut, self._courses(batch), strict=True):
                courses[index] = course
        return [self._score(course, len(r.response_ids)) for course, r in zip(courses, rollouts, strict=True)]

    def _courses(self, batch: TokenBatch) -> list[list[float]]:
        """The score of each sequence; per token, what it is after each response token, the last of which is the score."""
        if not self.per_token:
            return [[value] for value in self.role.scores(batch).tolist()]
        hidden = self.role.hidden(batch)
        before = batch.scatter(self.role.values_of(hidden, batch)).tolist()
        ends = self.role.values_at(hidden, batch.last).tolist()
        counts = batch.mask.sum(-1).tolist()
        return [[*row[1:count], end] for row, count, end in zip(before, counts, ends, strict=True)]

    def _score(self, course: list[float], length: int) -> Score:
        """A score, and what each token changed of it (potential-based shaping: the steps of a response add up to its score).

        A stop token that scoring adds to an unfinished response belongs to the last token that was sampled.
        """
        value = course[-1]
        tokens = pairwise([0.0, *course[: length - 1], value]) if self.per_token else ()
        steps = tuple((t, now - before) for t, (before, now) in enumerate(tokens))
        return Score(value, steps=steps).finite("the reward model", course)
