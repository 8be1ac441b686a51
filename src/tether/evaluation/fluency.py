"""How likely a text is to a frozen language model: a measure of whether it reads as its language."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tether.core.types import Prompt, assistant
from tether.data.batches import batches_for
from tether.data.chat import ChatEncoder
from tether.models.trunk import Role


class Fluency:
    """Mean log-probability a token, in nats, of responses under a frozen model, stop token left out."""

    def __init__(self, role: Role, encoder: ChatEncoder, *, micro_batch_tokens: int = 1024) -> None:
        self.role, self.encoder, self.micro_batch_tokens = role, encoder, micro_batch_tokens
        role.train_mode(False)

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        """One number a response; an empty one gets minus infinity."""
        written = [i for i, response in enumerate(responses) if response.strip()]
        sequences = [self.encoder.conversation((*prompts[i].messages, assistant(responses[i])), "last") for i in written]
        means = [float("-inf")] * len(responses)
        for cut, batch in batches_for(self.role, sequences, self.encoder.pad_id, self.micro_batch_tokens):
            logprobs = batch.scatter(self.role.logprobs(batch)[0]).tolist()
            for k, row in zip(cut, logprobs, strict=True):
                # The stop token stands last; whether a text ends is another question than how it reads.
                length = max(1, sequences[k].num_trained - 1)
                means[written[k]] = sum(row[:length]) / length
        return means
