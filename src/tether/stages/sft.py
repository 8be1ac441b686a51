"""Supervised fine-tuning: negative log-likelihood of the assistant's tokens, packed, exact under
accumulation.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tether.algorithms.preference_losses import negative_log_likelihood
from tether.core.protocols import Progress, now_doing
from tether.core.rundir import RunDirectory
from tether.core.types import Demonstration, Json, Metrics
from tether.data.batches import TokenBatch, document_length, documents_of, make_batch, pack
from tether.data.chat import ChatEncoder, Encoded
from tether.data.prepare import encoded_split
from tether.models.trunk import Role
from tether.settings.supervised import SFTConfig
from tether.stages.learner.loop import plan_updates
from tether.stages.learner.ranks import ALONE, Ranks
from tether.stages.supervised import Update, evaluating, go_through


@dataclass(eq=False)
class SFT:
    """Fine-tunes a role on demonstrations.

    After `train` the role's weights are those of the best evaluation loss (without held-out rows:
    the last ones).
    """

    config: SFTConfig
    role: Role
    encoder: ChatEncoder
    ranks: Ranks = ALONE
    dropout = True

    def __post_init__(self) -> None:
        self.heldout: Sequence[Encoded] = ()
        """The conversations that `train` holds out."""

    def update(self, conversations: Sequence[Encoded]) -> Update[TokenBatch]:
        """L = -(1/N) sum log p(token), N all counted tokens of the update, however it is cut up."""
        start = time.perf_counter()
        num_tokens = sum(c.num_trained for c in conversations)

        def loss(batch: TokenBatch) -> tuple[Tensor, Tensor]:
            logprobs, _ = self.role.logprobs(batch)
            mask = torch.ones_like(logprobs, dtype=torch.bool)
            return negative_log_likelihood(
                logprobs,
                mask,
                denominator=num_tokens,
            ), logprobs.new_zeros(0)

        def metrics(_: list[list[float]]) -> Metrics:
            seconds = time.perf_counter() - start
            return {
                "tokens": num_tokens,
                "tokens_per_second": sum(map(len, conversations)) / seconds,
            }

        return Update(self.batches(conversations), loss, metrics)

    def evaluate(self, conversations: Sequence[Encoded]) -> Metrics:
        """Mean negative log-likelihood a counted token on held-out conversations."""
        now_doing(f"evaluating on {len(conversations)} held-out conversations")
        with evaluating(self.role):
            total = sum(
                float(-self.role.logprobs(batch)[0].sum()) for batch in self.batches(conversations)
            )
        return {"loss": total / max(1, sum(c.num_trained for c in conversations))}

    def batches(self, conversations: Sequence[Encoded]) -> Iterator[TokenBatch]:
        """Micro-batches: packed rows of bounded length, or one row a conversation."""
        config = self.config
        packing = config.packing and self.role.independence.packing
        limit = self.role.document_tokens(config.row_tokens) if packing else 0
        documents = documents_of(conversations, limit)
        lengths = [document_length([conversations[i] for i in document]) for document in documents]
        rows = pack(lengths, config.row_tokens) if packing else [[d] for d in range(len(documents))]
        for start in range(0, len(rows), config.rows_per_micro_batch):
            part = rows[start : start + config.rows_per_micro_batch]
            chosen = [conversations[i] for row in part for d in row for i in documents[d]]
            capacity = config.row_tokens if packing else None
            yield make_batch(
                chosen,
                self.encoder.pad_id,
                capacity=capacity,
                document_tokens=limit,
            ).to(self.role.device)

    def train(
        self,
        demonstrations: Sequence[Demonstration],
        run: RunDirectory,
        progress: Progress | None = None,
    ) -> Json:
        """Train, or go on training, in `run`; returns the summary.

        Raises:
            DataError: no demonstration can be used.
        """
        start = time.perf_counter()
        config = self.config
        split = encoded_split(demonstrations, config, self.encoder, "sft")
        plan = plan_updates(len(split.train), config.batch_size, config.epochs, config.seed)
        self.heldout = split.test
        before = self.evaluate(split.test)["loss"] if split.test else None
        every = {"evaluate_every": config.evaluate_every or len(plan) // config.epochs}
        loop = go_through(self, split, run, progress, plan, config.model_copy(update=every))
        return {
            **loop.summary(start),
            "eval_loss": loop.best_loss if split.test else None,
            "eval_loss_before": before,
            "best_update": loop.best_update,
            "num_train": len(split.train),
            "num_heldout": len(split.test),
            **split.counts,
        }
