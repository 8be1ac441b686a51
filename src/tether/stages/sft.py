"""Supervised fine-tuning: negative log-likelihood of the assistant's tokens, packed, exact under accumulation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from tether.algorithms.preference_losses import negative_log_likelihood
from tether.core.errors import DataError
from tether.core.rundir import RunDirectory
from tether.core.types import Demonstration
from tether.data.batches import TokenBatch, document_length, documents_of, make_batch
from tether.data.chat import ChatEncoder, Encoded
from tether.data.packing import pack
from tether.data.sources import split_by_group
from tether.learner.config import RATES, Rates, SupervisedConfig
from tether.learner.local import LocalLearner
from tether.learner.loop import SupervisedLoop, plan_updates
from tether.models.trunk import Role


class SFTConfig(SupervisedConfig):
    """Settings of the stage; lengths are in tokens."""

    rates: ClassVar[Rates] = RATES["sft"]

    train_on: Literal["all", "last"] = Field(default="all", description="all assistant turns of a conversation, or its last")
    epochs: int = Field(default=2, ge=1)
    batch_size: int = Field(default=16, ge=1, description="conversations per update")
    max_length: int = Field(default=1024, ge=8, description="longer conversations are left out and counted")
    row_tokens: int = Field(
        default=512, ge=8, description="capacity of a packed row; a longer conversation gets a row of its own"
    )
    rows_per_micro_batch: int = Field(default=2, ge=1)
    packing: bool = True
    heldout_fraction: float = Field(default=0.1, ge=0, lt=1, description="share of the prompts whose conversations are held out")
    evaluate_every: int = Field(default=0, ge=0, description="updates between evaluations; 0: only at the end of every epoch")


class SFT:
    """Fine-tunes a role on demonstrations.

    After `train` the role's weights are those of the best evaluation loss (without held-out rows: the last ones).
    """

    def __init__(self, config: SFTConfig, role: Role, encoder: ChatEncoder) -> None:
        self.config = config
        self.role = role
        self.encoder = encoder
        self.learner: LocalLearner | None = None

    def step(self, conversations: list[Encoded]) -> dict[str, float]:
        """One update: L = -(1/N) sum log p(token), N all counted tokens of the update, however it is cut up."""
        assert self.learner is not None
        start = time.perf_counter()
        num_tokens = sum(c.num_trained for c in conversations)
        total = 0.0
        for batch in self.batches(conversations):
            logprobs, _ = self.role.logprobs(batch)
            loss = negative_log_likelihood(logprobs, torch.ones_like(logprobs, dtype=torch.bool), denominator=num_tokens)
            self.learner.backward(loss)
            total += float(loss.detach())
        metrics = self.learner.step()
        seconds = time.perf_counter() - start
        num_read = sum(map(len, conversations))
        return {"loss": total, **metrics, "tokens": num_tokens, "tokens_per_second": num_read / seconds}

    @torch.no_grad()
    def evaluate(self, conversations: list[Encoded]) -> dict[str, float]:
        """Mean negative log-likelihood a counted token on held-out conversations."""
        training = self.role.model.training
        self.role.train_mode(False)
        total = sum(float(-self.role.logprobs(batch)[0].sum()) for batch in self.batches(conversations))
        self.role.train_mode(training)
        return {"eval_loss": total / max(1, sum(c.num_trained for c in conversations))}

    def batches(self, conversations: list[Encoded]) -> list[TokenBatch]:
        """Micro-batches: packed rows of bounded length, or one row a conversation."""
        config, batches = self.config, []
        if not config.packing:
            cuts = [
                conversations[i : i + config.rows_per_micro_batch]
                for i in range(0, len(conversations), config.rows_per_micro_batch)
            ]
            return [make_batch(cut, self.encoder.pad_id).to(self.role.device) for cut in cuts]
        limit = self.role.document_tokens(config.row_tokens)
        documents = documents_of(conversations, limit)
        rows = pack([document_length([conversations[i] for i in d]) for d in documents], config.row_tokens)
        for start in range(0, len(rows), config.rows_per_micro_batch):
            chosen = [
                conversations[i] for row in rows[start : start + config.rows_per_micro_batch] for d in row for i in documents[d]
            ]
            batch = make_batch(chosen, self.encoder.pad_id, capacity=config.row_tokens, document_tokens=limit)
            batches.append(batch.to(self.role.device))
        return batches

    def train(
        self, demonstrations: Sequence[Demonstration], run: RunDirectory, progress: Callable[[int, int, Any], None] | None = None
    ) -> dict[str, Any]:
        """Train, or go on training, in `run`; returns the summary.

        Raises:
            DataError: no demonstration can be used.
        """
        start, config = time.perf_counter(), self.config
        parts = split_by_group(demonstrations, config.heldout_fraction, config.seed)
        (train, skipped), (test, more) = map(self._encode, parts)
        skipped = {reason: skipped.get(reason, 0) + more.get(reason, 0) for reason in {**skipped, **more}}
        if not train:
            raise DataError(
                f"none of {len(demonstrations)} demonstrations can be used for training: {skipped or 'there are none'}"
            )
        plan = plan_updates(len(train), config.batch_size, config.epochs, config.seed)
        self.learner = LocalLearner(self.role.parameters(), config.optimizer_for(self.role.adapter), len(plan))
        loop = SupervisedLoop(
            run,
            self.learner,
            self.step,
            config,
            evaluate=(lambda: self.evaluate(test)) if test else None,
            evaluate_every=config.evaluate_every or max(1, len(plan) // config.epochs),
            progress=progress,
        )
        initial = self.evaluate(test)["eval_loss"] if test and self.learner.updates == 0 else None
        self.role.train_mode(True)
        loop.train(train, plan)
        self.role.train_mode(False)
        metrics = run.metrics()
        return {
            "train_loss": metrics[-1]["loss"],
            "eval_loss": loop.best_value if test else None,
            "eval_loss_before": initial,
            "best_update": loop.best_update,
            "updates": len(plan),
            "num_train": len(train),
            "num_heldout": len(test),
            "skipped": skipped,
            "seconds": run.seconds(start),
        }

    def _encode(self, demonstrations: Sequence[Demonstration]) -> tuple[list[Encoded], dict[str, int]]:
        encoded: list[Encoded] = []
        skipped: dict[str, int] = {}
        for demonstration in demonstrations:
            try:
                conversation = self.encoder.conversation(demonstration.messages, self.config.train_on)
                if len(conversation) > self.config.max_length:
                    raise DataError(f"longer than sft.max_length = {self.config.max_length} tokens")
                encoded.append(conversation)
            except DataError as error:
                skipped[str(error)] = skipped.get(str(error), 0) + 1
        return encoded, skipped
