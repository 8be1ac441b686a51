"""Direct preference optimisation and its kin: the policy learns from comparisons with no reward model and no sampling.

Rafailov et al. 2023 (https://arxiv.org/abs/2305.18290): under a KL tether of strength beta the best policy's log ratio to the
reference *is* a reward, so that the Bradley-Terry loss can be taken on it directly.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from tether.algorithms.preference_losses import (
    dpo_loss,
    ipo_loss,
    negative_log_likelihood,
    orpo_loss,
    robust_dpo_loss,
    simpo_loss,
)
from tether.core.config import Config
from tether.core.rundir import RunDirectory
from tether.core.types import Comparison
from tether.data.batches import TokenBatch, make_batch
from tether.data.chat import ChatEncoder
from tether.data.comparisons import Ranking, cut_rankings, pairs_of, prepare_comparisons
from tether.evaluation.winrate import pairwise_accuracy
from tether.learner.config import OptimizerConfig
from tether.learner.local import LocalLearner
from tether.learner.loop import SupervisedLoop, plan_updates
from tether.models.trunk import Role

REFERENCE_FREE = ("orpo", "simpo")


class DirectConfig(Config):
    """Settings of the stage; lengths are in tokens."""

    loss: Literal["dpo", "robust", "ipo", "orpo", "simpo"] = "dpo"
    beta: float | None = Field(
        default=None, gt=0, description="strength of the tether (orpo: weight of the odds ratio); unset: 0.1, for simpo 2.5"
    )
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5, description="rate of wrong labels that dpo and robust assume")
    margin: float = Field(default=0.0, ge=0, description="simpo's target margin, not multiplied by beta")
    average: bool = Field(default=False, description="ipo on the mean log ratio of a response's tokens instead of their sum")
    likelihood_weight: float | None = Field(
        default=None, ge=0, description="weight of the chosen responses' likelihood beside the loss; unset: 1 for orpo, else 0"
    )
    epochs: int = Field(default=1, ge=1)
    prompts_per_update: int = Field(default=16, ge=1, description="all pairs of a prompt stand in one update")
    max_length: int = Field(default=1024, ge=8, description="longer responses are left out and counted")
    micro_batch_tokens: int = Field(default=2048, ge=8, description="padded size of a micro-batch")
    heldout_fraction: float = Field(default=0.1, ge=0, lt=1)
    evaluate_every: int = Field(default=0, ge=0, description="updates between evaluations; 0: only at the end")
    checkpoint_every: int = Field(default=20, ge=1)
    seed: int = 0
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-6)

    @model_validator(mode="after")
    def _check(self) -> DirectConfig:
        owners = {"label_smoothing": ("dpo", "robust"), "margin": ("simpo",), "average": ("ipo",)}
        for option, losses in owners.items():
            if option in self.model_fields_set and self.loss not in losses:
                raise ValueError(
                    f"direct.{option} has no effect with direct.loss = '{self.loss}'; it belongs to {' and '.join(losses)}"
                )
        if self.loss == "robust" and self.label_smoothing == 0:
            raise ValueError("direct.loss = 'robust' needs the rate of wrong labels: set direct.label_smoothing above 0")
        return self

    @property
    def strength(self) -> float:
        """Beta, or what the loss's own paper takes."""
        return self.beta or (2.5 if self.loss == "simpo" else 0.1)

    @property
    def likelihood(self) -> float:
        """The likelihood's weight: without it ORPO has no tether at all."""
        return float(self.loss == "orpo") if self.likelihood_weight is None else self.likelihood_weight


class Direct:
    """Trains a policy role on comparisons against a frozen reference (none for orpo and simpo)."""

    def __init__(self, config: DirectConfig, policy: Role, reference: Role | None, encoder: ChatEncoder) -> None:
        if (reference is None) != (config.loss in REFERENCE_FREE):
            raise ValueError(f"loss {config.loss!r} {'takes no' if config.loss in REFERENCE_FREE else 'needs a'} reference")
        self.config, self.policy, self.reference, self.encoder = config, policy, reference, encoder
        self.learner: LocalLearner | None = None

    def step(self, rankings: list[Ranking]) -> dict[str, float]:
        """One update over all pairs of some prompts."""
        assert self.learner is not None
        num_pairs = sum(len(r.chosen) for r in rankings)
        total, margins = 0.0, []
        for micro in self._micro_batches(rankings):
            loss, difference = self.loss(micro, num_pairs)
            self.learner.backward(loss)
            total += float(loss.detach())
            margins += difference.tolist()
        accuracy = statistics.fmean((m > 0) + 0.5 * (m == 0) for m in margins)
        return {"loss": total, "accuracy": accuracy, "margin": statistics.fmean(margins), **self.learner.step()}

    def loss(self, rankings: Sequence[Ranking], num_pairs: int) -> tuple[Tensor, Tensor]:
        """The loss of some rankings' pairs over `num_pairs`, and each pair's difference of implicit rewards, detached.

        A pair whose label is only probable counts both ways, each by its probability.
        """
        config, pairs = self.config, pairs_of(rankings)
        sequences, limit = [s for r in rankings for s in r.sequences], self._document_tokens
        batch = make_batch(sequences, self.encoder.pad_id, document_tokens=limit).to(self.policy.device)
        common = self.policy.common(batch) if self.reference and self.reference.model is self.policy.model else None
        logprobs = batch.scatter(self.policy.logprobs(batch, common=common)[0])
        lengths = batch.mask.sum(-1)
        rewards = logprobs.sum(-1) - self._reference_logprobs(batch, common)
        if config.loss in REFERENCE_FREE or config.average:
            rewards = rewards / lengths
        chosen, rejected = pairs.chosen + pairs.rejected, pairs.rejected + pairs.chosen
        weights = rewards.new_tensor([*pairs.probability, *(1.0 - p for p in pairs.probability)])
        sides = {"weights": weights, "denominator": num_pairs}
        loss = self._preference(rewards[chosen], rewards[rejected], sides)
        if config.likelihood:
            # Each preferred response counts once a pair, by the mean over its tokens, as ORPO and RPO have it.
            per_token = (logprobs / lengths[:, None])[chosen] * weights[:, None]
            loss = loss + config.likelihood * negative_log_likelihood(per_token, batch.mask[chosen], denominator=num_pairs)
        return loss, config.strength * (rewards[pairs.chosen] - rewards[pairs.rejected]).detach()

    def _preference(self, chosen: Tensor, rejected: Tensor, sides: dict[str, Any]) -> Tensor:
        config, beta = self.config, self.config.strength
        match config.loss:
            case "dpo":
                return dpo_loss(chosen, rejected, beta=beta, label_smoothing=config.label_smoothing, **sides)
            case "robust":
                return robust_dpo_loss(chosen, rejected, beta=beta, label_smoothing=config.label_smoothing, **sides)
            case "ipo":
                return ipo_loss(chosen, rejected, beta=beta, **sides)
            case "simpo":
                return simpo_loss(chosen, rejected, beta=beta, margin=config.margin, **sides)
            case "orpo":
                return beta * orpo_loss(chosen, rejected, **sides)

    @torch.no_grad()
    def _reference_logprobs(self, batch: TokenBatch, common: Tensor | None) -> Tensor | float:
        """Summed log-probabilities under the frozen reference, (S,).

        Asked in the policy's own micro-batch: the same numerics, at little more than half a pass where they share a trunk, and
        nothing that a resumed run would have to remember.
        """
        if self.reference is None:
            return 0.0
        return batch.scatter(self.reference.logprobs(batch, common=common)[0]).sum(-1)

    def _micro_batches(self, rankings: Sequence[Ranking]) -> list[list[Ranking]]:
        return cut_rankings(rankings, self.config.micro_batch_tokens, document_tokens=self._document_tokens)

    @property
    def _document_tokens(self) -> int:
        roles = [self.policy] if self.reference is None else [self.policy, self.reference]
        return min(role.document_tokens(self.config.micro_batch_tokens) for role in roles)

    @torch.no_grad()
    def evaluate(self, rankings: Sequence[Ranking]) -> dict[str, Any]:
        """Loss, margins and accuracy of the implicit reward on held-out comparisons."""
        num_pairs, total = sum(len(r.chosen) for r in rankings), 0.0
        margins: list[float] = []
        groups: list[str] = []
        for micro in self._micro_batches(rankings):
            loss, difference = self.loss(micro, num_pairs)
            total += float(loss)
            margins += difference.tolist()
            groups += [r.group for r in micro for _ in r.chosen]
        accuracy = pairwise_accuracy(margins, [0.0] * len(margins), groups).as_dict()
        return {"loss": total, "accuracy": accuracy, "margin_mean": statistics.fmean(margins)}

    def train(
        self, comparisons: Sequence[Comparison], run: RunDirectory, progress: Callable[[int, int, Any], None] | None = None
    ) -> dict[str, Any]:
        """Train, or go on training, in `run`; returns the summary.

        Raises:
            DataError: no comparison can be used.
        """
        start, config = time.perf_counter(), self.config
        train, test, skipped, _ = prepare_comparisons(
            comparisons,
            self.encoder,
            config.max_length,
            "direct.max_length",
            heldout_fraction=config.heldout_fraction,
            seed=config.seed,
            one_turn=True,
        )
        for role in (self.policy, self.reference):
            if role is not None:
                role.train_mode(False)  # dropout would make policy and reference differ before anything was learned
        plan = plan_updates(len(train), config.prompts_per_update, config.epochs, config.seed)
        self.learner = LocalLearner(self.policy.parameters(), config.optimizer, len(plan))

        def evaluated() -> dict[str, float]:
            result = self.evaluate(test)
            return {"eval_loss": result["loss"], "eval_accuracy": result["accuracy"]["value"]}

        loop = SupervisedLoop(
            run,
            self.learner,
            self.step,
            evaluate=evaluated if test and config.evaluate_every else None,
            evaluate_every=config.evaluate_every,
            checkpoint_every=config.checkpoint_every,
            progress=progress,
        )
        loop.train(train, plan)
        summary = {f"heldout_{k}": v for k, v in self.evaluate(test).items()} if test else {}
        return {
            "train_loss": statistics.fmean(row["loss"] for row in run.metrics()[-10:]),
            **summary,
            "updates": len(plan),
            "num_prompts": len(train),
            "num_pairs": sum(len(r.chosen) for r in train),
            "skipped": skipped,
            "seconds": time.perf_counter() - start,
        }
