"""How far a policy has moved, on answers of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tether.algorithms.kl import kl_policy_reference_k1
from tether.core.types import Rollout
from tether.data.batches import cut_batches, make_batch
from tether.data.chat import ChatEncoder
from tether.models.trunk import Role


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
    """KL(policy || reference) in nats a response by k1: one unbiased number for each of the policy's own answers.

    Args:
        temperature: that the answers were sampled at; both models are read at it.
    """
    sums = [0.0] * len(rollouts)
    sequences = [encoder.rollout(r.prompt_ids, r.response_ids) for r in rollouts]
    limit = min(role.document_tokens(micro_batch_tokens) for role in (policy, reference))
    for cut in cut_batches(sequences, micro_batch_tokens, document_tokens=limit):
        batch = make_batch([sequences[i] for i in cut], encoder.pad_id, document_tokens=limit).to(policy.device)
        common = policy.common(batch) if reference.model is policy.model else None
        ours, theirs = (batch.scatter(role.logprobs(batch, temperature, common)[0]) for role in (policy, reference))
        for index, value in zip(cut, kl_policy_reference_k1(ours, theirs).sum(-1).tolist(), strict=True):
            sums[index] = value
    return sums
