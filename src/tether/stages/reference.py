"""The policy beside its frozen reference, which runs in every update, or once before the first."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tether.core.digest import digest
from tether.core.errors import RunError
from tether.core.keeping import durable
from tether.data.batches import TokenBatch, batches_for, make_batch
from tether.data.chat import ChatEncoder, Encoded
from tether.data.prepare import GatheredT, cut_rankings
from tether.models.loading import weights_digest
from tether.models.trunk import Role

MADE_OF = "made_of"
"""The entry of a table's file for what the table was made of: one, because safetensors writes
several in any order.
"""


@dataclass(kw_only=True)
class Likelihoods:
    """Log-probabilities of responses under the policy, with gradient, and under its reference,
    without.

    Args:
        reference: a frozen role, or None for a method that needs none. Where reference and policy
            are the same weights the reference must run in `begin`, before they change.
        temperature: of the distribution that both are taken to be.
        precomputed: the reference runs once, before training, and is dropped; `table` holds its
            sums from then on.
    """

    policy: Role
    reference: Role | None
    encoder: ChatEncoder
    micro_batch_tokens: int
    temperature: float = 1.0
    precomputed: bool = False
    table: dict[Encoded, float] | None = None

    def begin(self, sequences: Iterable[Encoded], path: Path) -> None:
        """Prepare the first update: no dropout, and with `precomputed` a table of the reference's
        log-probabilities.

        Args:
            sequences: all responses that training and evaluation will ask for.
            path: of the table, which a resumed run reads.

        Raises:
            RunError: `path` holds those of another reference, of other responses, or in another
                encoding.
        """
        self.without_dropout()
        role = self.reference
        if role is None or not self.precomputed:
            return
        distinct = sorted(set(sequences), key=lambda s: (s.ids, s.trained))
        key = {
            "reference model": f"{role_digest(role)} in {str(role.model.dtype).removeprefix('torch.')}",
            "chat template, system prompt or stop tokens": digest(self.encoder.describe()),
            "data": _responses_digest(distinct),
        }
        if path.is_file():
            values = _read(path, key)
        else:
            values = whole_logprobs(
                role,
                distinct,
                self.encoder.pad_id,
                self.micro_batch_tokens,
                self.temperature,
            )
            with durable(path) as unfinished:
                save_file({"logprobs": values}, unfinished, metadata={MADE_OF: json.dumps(key)})
        self.reference = None
        self.table = dict(zip(distinct, values.tolist(), strict=True))

    def without_dropout(self) -> None:
        """Dropout would make policy and reference differ before anything was learned."""
        for role in self.roles:
            role.train_mode(False)

    @property
    def roles(self) -> list[Role]:
        """The roles that run in an update."""
        return [self.policy] if self.reference is None else [self.policy, self.reference]

    def __call__(self, sequences: Sequence[Encoded]) -> tuple[Tensor, Tensor, Tensor]:
        """The policy's per token (S, R) with the mask of those that count, and the reference's sums
        (S,), zeros without one.

        A reference role runs in the policy's own micro-batch: the same numerics, at little more
        than half a pass where they share a trunk.
        """
        role = self.reference
        policy = self.policy
        shared = role is not None and role.model is policy.model
        if role and shared and role.adapter == policy.adapter:
            raise ValueError(
                "the reference is the policy itself, which will change: precompute, "
                "or give it weights of its own",
            )
        batch = make_batch(sequences, self.encoder.pad_id, document_tokens=self.document_tokens).to(
            policy.device,
        )
        common = policy.common(batch) if shared else None
        logprobs = batch.scatter(policy.logprobs(batch, self.temperature, common)[0])
        if self.table is not None:
            sums = logprobs.new_tensor([self.table[sequence] for sequence in sequences])
        elif role is None:
            sums = logprobs.new_zeros(len(sequences))
        else:
            sums = _summed(role, batch, self.temperature, common)
        return logprobs, batch.mask, sums

    @property
    def document_tokens(self) -> int:
        """Largest length in tokens of a document of several responses to one prompt."""
        return min(role.document_tokens(self.micro_batch_tokens) for role in self.roles)

    def micro_batches(self, rows: Sequence[GatheredT]) -> list[list[GatheredT]]:
        """Rows that go through the models together."""
        return cut_rankings(rows, self.micro_batch_tokens, document_tokens=self.document_tokens)


def whole_logprobs(
    role: Role,
    sequences: Sequence[Encoded],
    pad_id: int,
    micro_batch_tokens: int,
    temperature: float,
) -> Tensor:
    """(S,) float64 the log-probability of each whole response under a role, without gradient."""
    totals = torch.zeros(len(sequences), dtype=torch.float64)
    for cut, batch in batches_for(role, sequences, pad_id, micro_batch_tokens):
        totals[cut] = _summed(role, batch, temperature).double().cpu()
    return totals


@torch.no_grad()
def _summed(
    role: Role,
    batch: TokenBatch,
    temperature: float,
    common: Tensor | None = None,
) -> Tensor:
    return batch.scatter(role.logprobs(batch, temperature, common)[0]).sum(-1)


def role_digest(role: Role) -> str:
    """The digest of the weights that a role runs. Adapters of other roles do not count, so another
    adapter on the model changes nothing.
    """
    weights = role.causal_model.state_dict()
    own = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in weights.items()
        if ".lora_" not in name or (role.adapter is not None and f".{role.adapter}." in name)
    }
    return weights_digest(own)


def _responses_digest(sequences: Sequence[Encoded]) -> str:
    hasher = hashlib.sha256()
    for sequence in sequences:
        hasher.update(array("q", (len(sequence), sequence.prompt_length, *sequence.ids)).tobytes())
    return hasher.hexdigest()[:16]


def _read(path: Path, key: Mapping[str, str]) -> Tensor:
    with safe_open(path, "pt") as file:
        stored = file.metadata() or {}
        # older tables have an entry for each
        stored = json.loads(stored[MADE_OF]) if MADE_OF in stored else stored
        changed = [
            f"{name} (was {stored.get(name)}, is {value})"
            for name, value in key.items()
            if stored.get(name) != value
        ]
        if changed:
            raise RunError(
                f"{path} holds the reference's log-probabilities for another "
                f"{' and another '.join(changed)}. "
                "Delete that file to have them computed again, or take another run directory.",
            )
        return file.get_tensor("logprobs")
