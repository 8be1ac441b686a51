"""Log-probabilities of texts: their likelihood under a frozen model, and the distance of a policy
from another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tether.algorithms.kl import kl_policy_reference_k1
from tether.core.protocols import count_of
from tether.core.types import Prompt, Rollout, assistant
from tether.data.batches import batches_for, cut_batches, make_batch
from tether.data.chat import ChatEncoder
from tether.evaluation.held_out import HeldOutAnswers, column_figures
from tether.evaluation.suite import Figures, MeasuredPolicy
from tether.models.trunk import Role


class Fluency:
    """Mean log-probability a token, in nats, of responses under a frozen model, stop token left
    out.

    A measure of whether a text reads as its language.
    """

    def __init__(self, role: Role, encoder: ChatEncoder, *, micro_batch_tokens: int = 1024) -> None:
        self.role = role
        self.encoder = encoder
        self.micro_batch_tokens = micro_batch_tokens
        role.train_mode(False)

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        """One number a response; an empty one gets minus infinity."""
        written = [i for i, response in enumerate(responses) if response.strip()]
        sequences = [
            self.encoder.conversation((*prompts[i].messages, assistant(responses[i])), "last")
            for i in written
        ]
        means = [float("-inf")] * len(responses)
        tell = count_of("reading answers", len(written))
        read = 0
        for cut, batch in batches_for(
            self.role,
            sequences,
            self.encoder.pad_id,
            self.micro_batch_tokens,
        ):
            logprobs = batch.scatter(self.role.logprobs(batch)[0]).tolist()
            for k, row in zip(cut, logprobs, strict=True):
                # The stop token stands last; whether a text ends is another question than how it
                # reads.
                length = max(1, sequences[k].num_trained - 1)
                means[written[k]] = sum(row[:length]) / length
            read += len(cut)
            tell(read)
        return means


@torch.no_grad()
def kl_to_reference(
    policy: Role,
    reference: Role,
    rollouts: Sequence[Rollout],
    encoder: ChatEncoder,
    temperature: float,
    *,
    micro_batch_tokens: int = 2048,
) -> list[float]:
    """KL(policy || reference) in nats a response by k1: one unbiased number for each of the
    policy's own answers.

    Args:
        temperature: that the answers were sampled at; both models are read at it.
    """
    sums = torch.zeros(len(rollouts), dtype=torch.float64)
    sequences = [encoder.sampled(r) for r in rollouts]
    limit = min(role.document_tokens(micro_batch_tokens) for role in (policy, reference))
    tell = count_of("comparing answers with the reference", len(rollouts))
    read = 0
    for cut in cut_batches(sequences, micro_batch_tokens, document_tokens=limit):
        batch = make_batch([sequences[i] for i in cut], encoder.pad_id, document_tokens=limit).to(
            policy.device,
        )
        common = policy.common(batch) if reference.model is policy.model else None
        ours, theirs = (
            batch.scatter(role.logprobs(batch, temperature, common)[0])
            for role in (policy, reference)
        )
        sums[cut] = kl_policy_reference_k1(ours, theirs).sum(-1).double().cpu()
        read += len(cut)
        tell(read)
    return sums.tolist()


@dataclass
class DistanceFromStart:
    """Implements core.protocols.Evaluator: `kl`, the KL from the start in nats an answer, on
    held-out answers.

    Args:
        answers: sampled above temperature 0.
        reference: the frozen start.
    """

    name = "kl"

    answers: HeldOutAnswers
    reference: Role

    def __call__(self, policy: MeasuredPolicy, step: int) -> Figures:
        moved = kl_to_reference(
            policy.role,
            self.reference,
            self.answers.of(policy),
            policy.encoder,
            self.answers.sampling.temperature,
        )
        return column_figures({"kl": list(moved)}, self.answers.groups)
