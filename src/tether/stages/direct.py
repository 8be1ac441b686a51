"""Direct preference optimisation and its kin: the policy learns from comparisons, without a reward
model or samples.

Rafailov et al. 2023 (https://arxiv.org/abs/2305.18290): under a KL tether of strength beta the best
policy's log ratio to the reference *is* a reward. So it can enter the Bradley-Terry loss directly.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from tether.algorithms import preference_losses as losses
from tether.algorithms.transfer import to_device
from tether.core.protocols import Progress
from tether.core.rundir import RunDirectory
from tether.core.types import Comparison, Json
from tether.data.chat import ChatEncoder
from tether.data.prepare import (
    Ranking,
    Split,
    encoded_split,
    num_pairs,
    pair_counts,
    pairs_of,
    sequences_of,
)
from tether.evaluation.winrate import pairwise_accuracy, share_in_order
from tether.models.trunk import Role
from tether.settings.supervised import DirectConfig, PairLossConfig
from tether.stages.learner.ranks import ALONE, Ranks
from tether.stages.reference import Likelihoods
from tether.stages.supervised import Update, accumulate, go_through, heldout


@dataclass(eq=False)
class PairLoss:
    """The loss of some pairs: the one function behind pairs that were collected, sampled in a step,
    or sampled in a round.
    """

    config: PairLossConfig
    likelihoods: Likelihoods

    def __post_init__(self) -> None:
        needed = self.config.needs_reference
        if (self.likelihoods.reference is None) == needed:
            raise ValueError(
                f"loss {self.config.loss!r} {'needs a' if needed else 'takes no'} reference",
            )

    def __call__(self, rankings: Sequence[Ranking], num_pairs: int) -> tuple[Tensor, Tensor]:
        """The loss of these rankings' pairs over `num_pairs`, and the responses' rewards, detached.

        The reward of a response is what the loss compares: beta times its log ratio, or its mean
        log-probability.
        """
        config = self.config
        pairs = pairs_of(rankings)
        logprobs, mask, reference = self.likelihoods(sequences_of(rankings))
        lengths = mask.sum(-1)
        rewards = logprobs.sum(-1) - reference
        if config.per_token:
            rewards = rewards / lengths
        # A label p counts both ways: p for the pair as it is, and 1 - p for the pair with its sides
        # exchanged.
        better = pairs.chosen + pairs.rejected
        worse = pairs.rejected + pairs.chosen
        labels = torch.tensor(
            [*pairs.probability, *(1.0 - p for p in pairs.probability)],
            dtype=rewards.dtype,
        )
        weights = to_device(labels, rewards.device)
        sides = to_device(torch.tensor([better, worse]), rewards.device)
        loss = self._compare(
            *(rewards[side] for side in sides),
            weights=weights,
            denominator=num_pairs,
        )
        if config.likelihood:
            # Each preferred response counts once a pair, by the mean over its tokens, as ORPO and
            # RPO have it.
            per_token = (logprobs / lengths[:, None])[sides[0]] * weights[:, None]
            loss = loss + config.likelihood * losses.negative_log_likelihood(
                per_token,
                mask[sides[0]],
                denominator=num_pairs,
            )
        return loss, config.strength * rewards.detach()

    def _compare(
        self,
        better: Tensor,
        worse: Tensor,
        *,
        weights: Tensor,
        denominator: int,
    ) -> Tensor:
        config = self.config
        beta = config.strength
        smoothing = config.label_smoothing
        compared: dict[str, Callable[..., Tensor]] = {
            "dpo": partial(losses.dpo_loss, beta=beta, label_smoothing=smoothing),
            "robust": partial(losses.robust_dpo_loss, beta=beta, label_smoothing=smoothing),
            "ipo": partial(losses.ipo_loss, beta=beta),
            "simpo": partial(losses.simpo_loss, beta=beta, margin=config.margin),
            "orpo": losses.orpo_loss,
        }
        loss = compared[config.loss](better, worse, weights=weights, denominator=denominator)
        return beta * loss if config.loss == "orpo" else loss

    def update(self, rankings: Sequence[Ranking]) -> Update[list[Ranking]]:
        """One update over all pairs of some prompts."""
        micros = self.likelihoods.micro_batches(rankings)
        return Update(
            micros,
            partial(self, num_pairs=num_pairs(rankings)),
            lambda rewards: preferred(*leads_of(micros, rewards)),
        )


class Direct:
    """Trains a policy role on comparisons against a frozen reference (none for orpo and simpo).

    Args:
        reference: with reference_logprobs = "precomputed" it may run the policy's own untrained
            weights, and is dropped before training.
    """

    dropout = False

    def __init__(
        self,
        config: DirectConfig,
        policy: Role,
        reference: Role | None,
        encoder: ChatEncoder,
        *,
        ranks: Ranks = ALONE,
    ) -> None:
        self.config = config
        self.role = policy
        self.encoder = encoder
        self.ranks = ranks
        self.likelihoods = Likelihoods(
            policy=policy,
            reference=reference,
            encoder=encoder,
            micro_batch_tokens=config.micro_batch_tokens,
            precomputed=config.precomputed,
        )
        self.pairs = PairLoss(config, self.likelihoods)

    def update(self, rankings: Sequence[Ranking]) -> Update[list[Ranking]]:
        """One update over all pairs of some prompts."""
        return self.pairs.update(rankings)

    @torch.no_grad()
    def evaluate(self, rankings: Sequence[Ranking]) -> Json:
        """Loss, margins and accuracy of the implicit reward on held-out comparisons."""
        update = self.pairs.update(rankings)
        loss, rewards = accumulate(update, self.ranks)
        leads, labels = leads_of(update.micro_batches, rewards)
        groups = pairs_of([*chain(*update.micro_batches)]).groups
        accuracy = pairwise_accuracy(
            leads,
            [0.0] * len(leads),
            groups,
            probabilities=labels,
        ).as_dict()
        return {"loss": loss, "accuracy": accuracy, "margin_mean": statistics.fmean(leads)}

    def train(
        self,
        comparisons: Sequence[Comparison],
        run: RunDirectory,
        progress: Progress | None = None,
    ) -> Json:
        """Train, or go on training, in `run`; returns the summary.

        Raises:
            DataError: no comparison can be used.
        """
        split = encoded_split(comparisons, self.config, self.encoder, "direct")
        return {**self.fit(split, run, progress), **split.counts}

    def fit(
        self,
        split: Split[Ranking],
        run: RunDirectory,
        progress: Progress | None = None,
    ) -> Json:
        """The same on pairs of token ids."""
        start = time.perf_counter()
        self.likelihoods.begin(
            sequences_of((*split.train, *split.test)),
            run.path / "reference.safetensors",
        )
        loop = go_through(self, split, run, progress, self.config.prompts_per_update)
        return {
            **heldout(self, split.test),
            **pair_counts(split),
            **loop.summary(start),
        }


def leads_of(
    micros: Iterable[list[Ranking]],
    rewards: Sequence[Sequence[float]],
) -> tuple[list[float], list[float]]:
    """By how much each pair's chosen response is ahead, and its label."""
    pairs = pairs_of(list(chain(*micros)))
    values = torch.tensor(list(chain(*rewards)))
    return (values[pairs.chosen] - values[pairs.rejected]).tolist(), pairs.probability


def preferred(margins: Sequence[float], labels: Sequence[float]) -> dict[str, float]:
    """The share of pairs in the right order and the mean margin; pairs whose label is one half have
    no right order.
    """
    return {"accuracy": share_in_order(margins, labels), "margin": statistics.fmean(margins)}
