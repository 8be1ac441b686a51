"""A trained reward model as a reward source."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tether.core.types import Rollout, Score
from tether.data.batches import cut_batches, make_batch
from tether.data.chat import ChatEncoder
from tether.models.trunk import Role


class LearnedReward:
    """Scores the sampled token ids themselves, ended by a stop token as in training; no text in between.

    Args:
        encoder: the encoder the reward model was trained with.
        foreign: the policy speaks with another tokenizer or template. Only then text is decoded and encoded anew.
    """

    name = "learned"

    def __init__(self, role: Role, encoder: ChatEncoder, *, micro_batch_tokens: int = 4096, foreign: bool = False) -> None:
        self.role = role
        self.encoder = encoder
        self.micro_batch_tokens = micro_batch_tokens
        self.foreign = foreign
        role.train_mode(False)

    @torch.no_grad()
    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score a rollout; a number that is not finite becomes a failed score."""
        sequences = [self._encoded(rollout) for rollout in rollouts]
        values = [math.nan] * len(rollouts)
        limit = self.role.document_tokens(self.micro_batch_tokens)
        for cut in cut_batches(sequences, self.micro_batch_tokens, document_tokens=limit):
            batch = make_batch([sequences[i] for i in cut], self.encoder.pad_id, document_tokens=limit).to(self.role.device)
            for index, value in zip(cut, self.role.scores(batch).tolist(), strict=True):
                values[index] = value
        return [Score(v) if math.isfinite(v) else Score(None, reason=f"the reward model returned {v}") for v in values]

    def _encoded(self, rollout: Rollout):
        if not self.foreign:
            return self.encoder.rollout_for_scoring(rollout.prompt_ids, rollout.response_ids)
        from tether.core.types import assistant

        return self.encoder.conversation((*rollout.prompt.messages, assistant(rollout.text or " ")), "last")
