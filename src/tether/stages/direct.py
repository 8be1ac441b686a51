"""Direct preference optimisation and its kin: the policy learns from comparisons with no reward model and no sampling.

Rafailov et al. 2023 (https://arxiv.org/abs/2305.18290): under a KL tether of strength beta the best policy's log ratio to the
reference *is* a reward, so that the Bradley-Terry loss can be taken on it directly.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

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
from tether.data.chat import ChatEncoder
from tether.data.comparisons import Ranking, cut_rankings, pairs_of, prepare_comparisons
from tether.evaluation.winrate import pairwise_accuracy, share_in_order
from tether.learner.config import RATES, Rates, SupervisedConfig
from tether.learner.local import LocalLearner
from tether.learner.loop import SupervisedLoop, plan_updates
from tether.models.trunk import Role
from tether.stages.reference import Likelihoods, ReferenceTable

REFERENCE_FREE = ("orpo", "simpo")


class PairLossConfig(Config):
    """The loss on pairs and its numbers, for pairs that were collected and for pairs that are sampled."""

    section: ClassVar[str]

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
    micro_batch_tokens: int = Field(default=2048, ge=8, description="padded size of a micro-batch")

    @model_validator(mode="after")
    def _check_loss(self) -> PairLossConfig:
        owners = {"label_smoothing": ("dpo", "robust"), "margin": ("simpo",), "average": ("ipo",)}
        for option, losses in owners.items():
            if option in self.model_fields_set and self.loss not in losses:
                raise ValueError(
                    f"{self.section}.{option} has no effect with {self.section}.loss = '{self.loss}'; "
                    f"it belongs to {' and '.join(losses)}"
                )
        if self.loss == "robust" and self.label_smoothing == 0:
            raise ValueError(
                f"{self.section}.loss = 'robust' needs the rate of wrong labels: set {self.section}.label_smoothing above 0"
            )
        return self

    @property
    def strength(self) -> float:
        """Beta, or what the loss's own paper takes."""
        return self.beta or (2.5 if self.loss == "simpo" else 0.1)

    @property
    def likelihood(self) -> float:
        """The likelihood's weight: without it ORPO has no tether at all."""
        return float(self.loss == "orpo") if self.likelihood_weight is None else self.likelihood_weight


class DirectConfig(PairLossConfig, SupervisedConfig):
    """Settings of the stage; lengths are in tokens."""

    section: ClassVar[str] = "direct"
    rates: ClassVar[Rates] = RATES["direct"]

    reference_logprobs: Literal["each_update", "precomputed"] = Field(
        default="each_update",
        description="ask the reference along with the policy, or once before training, after which it can go",
    )
    epochs: int = Field(default=1, ge=1)
    prompts_per_update: int = Field(default=16, ge=1, description="all pairs of a prompt stand in one update")
    max_length: int = Field(default=1024, ge=8, description="longer responses are left out and counted")
    heldout_fraction: float = Field(default=0.1, ge=0, lt=1)
    evaluate_every: int = Field(default=0, ge=0, description="updates between evaluations; 0: only at the end")

    @model_validator(mode="after")
    def _check_reference(self) -> DirectConfig:
        if "reference_logprobs" in self.model_fields_set and self.loss in REFERENCE_FREE:
            raise ValueError(f"direct.reference_logprobs has no effect with direct.loss = '{self.loss}', which asks no reference")
        return self


class PairLoss:
    """The loss of some pairs: the one function behind pairs that were collected, sampled in a step, or sampled in a round."""

    def __init__(self, config: PairLossConfig, likelihoods: Likelihoods) -> None:
        if (likelihoods.reference is None) != (config.loss in REFERENCE_FREE):
            raise ValueError(f"loss {config.loss!r} {'takes no' if config.loss in REFERENCE_FREE else 'needs a'} reference")
        self.config, self.likelihoods = config, likelihoods

    def __call__(self, rankings: Sequence[Ranking], num_pairs: int) -> tuple[Tensor, Tensor]:
        """The loss of these rankings' pairs over `num_pairs`, and the responses' rewards, detached.

        The reward of a response is what the loss compares: beta times its log ratio, or its mean log-probability. A pair whose
        label is only probable counts both ways, each by its probability.
        """
        config, pairs = self.config, pairs_of(rankings)
        logprobs, mask, reference = self.likelihoods([s for r in rankings for s in r.sequences])
        lengths = mask.sum(-1)
        rewards = logprobs.sum(-1) - reference
        if config.loss in REFERENCE_FREE or config.average:
            rewards = rewards / lengths
        chosen, rejected = pairs.chosen + pairs.rejected, pairs.rejected + pairs.chosen
        weights = rewards.new_tensor([*pairs.probability, *(1.0 - p for p in pairs.probability)])
        loss = self._preference(rewards[chosen], rewards[rejected], {"weights": weights, "denominator": num_pairs})
        if config.likelihood:
            # Each preferred response counts once a pair, by the mean over its tokens, as ORPO and RPO have it.
            per_token = (logprobs / lengths[:, None])[chosen] * weights[:, None]
            loss = loss + config.likelihood * negative_log_likelihood(per_token, mask[chosen], denominator=num_pairs)
        return loss, config.strength * rewards.detach()

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

    def micro_batches(self, rankings: Sequence[Ranking]) -> list[list[Ranking]]:
        """Rankings that go through the models together."""
        limit = self.likelihoods.document_tokens
        return cut_rankings(rankings, self.config.micro_batch_tokens, document_tokens=limit)


class Direct:
    """Trains a policy role on comparisons against a frozen reference (none for orpo and simpo).

    Args:
        reference: a role, or a table of what one said about all the responses; with reference_logprobs = "precomputed" the role
            may run the policy's own untrained weights, and is let go before training.
    """

    def __init__(self, config: DirectConfig, policy: Role, reference: Role | ReferenceTable | None, encoder: ChatEncoder) -> None:
        if isinstance(reference, ReferenceTable) and config.reference_logprobs != "precomputed":
            raise ValueError("a table of the reference's log-probabilities needs reference_logprobs = 'precomputed'")
        self.config, self.policy, self.encoder = config, policy, encoder
        self.likelihoods = Likelihoods(policy, reference, encoder, config.micro_batch_tokens)
        self.pairs = PairLoss(config, self.likelihoods)
        self.learner: LocalLearner | None = None

    def step(self, rankings: list[Ranking]) -> dict[str, float]:
        """One update over all pairs of some prompts."""
        assert self.learner is not None
        num_pairs = sum(len(r.chosen) for r in rankings)
        total, margins, labels = 0.0, [], []
        for micro in self.pairs.micro_batches(rankings):
            loss, rewards = self.pairs(micro, num_pairs)
            self.learner.backward(loss)
            total += float(loss.detach())
            margins += margins_of(micro, rewards)
            labels += pairs_of(micro).probability
        return {"loss": total, **preferred(margins, labels), **self.learner.step()}

    @torch.no_grad()
    def evaluate(self, rankings: Sequence[Ranking]) -> dict[str, Any]:
        """Loss, margins and accuracy of the implicit reward on held-out comparisons."""
        num_pairs, total = sum(len(r.chosen) for r in rankings), 0.0
        margins: list[float] = []
        groups: list[str] = []
        labels: list[float] = []
        for micro in self.pairs.micro_batches(rankings):
            loss, rewards = self.pairs(micro, num_pairs)
            total += float(loss)
            margins += margins_of(micro, rewards)
            groups += [r.group for r in micro for _ in r.chosen]
            labels += pairs_of(micro).probability
        accuracy = pairwise_accuracy(margins, [0.0] * len(margins), groups, probabilities=labels).as_dict()
        return {"loss": total, "accuracy": accuracy, "margin_mean": statistics.fmean(margins)}

    def train(
        self, comparisons: Sequence[Comparison], run: RunDirectory, progress: Callable[[int, int, Any], None] | None = None
    ) -> dict[str, Any]:
        """Train, or go on training, in `run`; returns the summary.

        Raises:
            DataError: no comparison can be used.
        """
        train, test, skipped, _ = prepare_comparisons(
            comparisons,
            self.encoder,
            self.config.max_length,
            "direct.max_length",
            heldout_fraction=self.config.heldout_fraction,
            seed=self.config.seed,
            one_turn=True,
        )
        return {**self.fit(train, test, run, progress), "skipped": skipped}

    def fit(
        self,
        train: Sequence[Ranking],
        test: Sequence[Ranking],
        run: RunDirectory,
        progress: Callable[[int, int, Any], None] | None = None,
    ) -> dict[str, Any]:
        """The same on pairs of token ids."""
        start, config = time.perf_counter(), self.config
        self.likelihoods.without_dropout()
        if config.reference_logprobs == "precomputed" and isinstance(self.likelihoods.reference, Role):
            responses = [s for ranking in (*train, *test) for s in ranking.sequences]
            self.likelihoods.precompute(responses, run.path / "reference.safetensors")
        plan = plan_updates(len(train), config.prompts_per_update, config.epochs, config.seed)
        self.learner = LocalLearner(self.policy.parameters(), config.optimizer_for(self.policy.adapter), len(plan))

        def evaluated() -> dict[str, float]:
            result = self.evaluate(test)
            return {"eval_loss": result["loss"], "eval_accuracy": result["accuracy"]["value"]}

        loop = SupervisedLoop(
            run,
            self.learner,
            self.step,
            config,
            evaluate=evaluated if test and config.evaluate_every else None,
            evaluate_every=config.evaluate_every,
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
            "seconds": run.seconds(start),
        }


def margins_of(rankings: Sequence[Ranking], rewards: Tensor) -> list[float]:
    """By how much each pair's chosen response is ahead."""
    pairs = pairs_of(rankings)
    return (rewards[pairs.chosen] - rewards[pairs.rejected]).tolist()


def preferred(margins: Sequence[float], labels: Sequence[float]) -> dict[str, float]:
    """The share of pairs in the right order and the mean margin; pairs whose label is one half have no right order."""
    return {"accuracy": share_in_order(margins, labels), "margin": statistics.fmean(margins)}
