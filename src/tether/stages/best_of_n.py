"""Rejection sampling: sample several answers to a prompt, keep the best, imitate them, and begin
again from the new policy.

One round a step, as RAFT (Dong et al. 2023, https://arxiv.org/abs/2304.06767) and, with a
threshold, ReST (Gulcehre et al. 2023, https://arxiv.org/abs/2308.08998). Each round moves the
policy towards its own best-of-n, and only the order of scores matters.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor

from tether.algorithms.kl import kl_best_of_n
from tether.algorithms.preference_losses import negative_log_likelihood
from tether.core.protocols import Engine, RewardSource
from tether.core.types import Json, Metrics, Prompt, Readings, Rollout, Score
from tether.data.batches import TokenBatch, batches_for
from tether.data.chat import ChatEncoder, Encoded
from tether.models.trunk import Role
from tether.settings.sampling import BestOfNConfig
from tether.stages.learner.local import LocalLearner
from tether.stages.learner.loop import epoch_order, split_evenly
from tether.stages.learner.ranks import ALONE, Ranks
from tether.stages.reference import whole_logprobs
from tether.stages.rollouts import Clock, Step, penalised_scores, sample_and_score, sample_metrics
from tether.stages.supervised import Update, accumulate


@dataclass(eq=False, kw_only=True)
class BestOfN:
    """One policy and a reward source; with a reference also the measured distance from it, which
    does not affect the training.

    Args:
        policy, reference: roles on one trunk or on two models; the reference is not run with
            `report_kl` off.
        engine: samples from the policy; `policy_version` identifies its weights.

    Raises:
        ValueError: `report_kl` without a reference.
    """

    config: BestOfNConfig
    policy: Role
    reference: Role | None
    reward: RewardSource
    engine: Engine
    encoder: ChatEncoder
    ranks: Ranks = ALONE
    stopped = False

    def __post_init__(self) -> None:
        config = self.config
        policy = self.policy
        if config.report_kl and self.reference is None:
            raise ValueError("report_kl needs a reference role")
        self.reference = self.reference if config.report_kl else None
        updates = config.steps * config.epochs * config.minibatches
        self.learner = LocalLearner(
            policy.parameters(),
            config.optimizer_for(policy.adapter),
            updates,
            config.ema_decay,
            ranks=self.ranks,
        )
        for role in filter(None, (policy, self.reference)):
            role.train_mode(False)

    def step(self, prompts: Sequence[Prompt], number: int) -> Step:
        """One round: sample, score, select, measure, imitate."""
        clock = Clock()
        rollouts, scores = sample_and_score(
            self.engine,
            self.reward,
            self.config,
            prompts,
            self.ordinals(number),
            clock,
        )
        selected = self.select(rollouts, scores)
        metrics = self.measure(rollouts, scores, selected)
        clock.lap("evaluate")
        metrics.update(self.update([rollouts[i] for i in selected], number))
        return Step(metrics, rollouts, scores).hand_over(self.engine, number, clock)

    def ordinals(self, number: int) -> range:
        return self.config.ordinals(number)

    def summary(self, history: Sequence[Readings]) -> Json:
        return {}

    def select(self, rollouts: Sequence[Rollout], scores: Sequence[Score]) -> list[int]:
        """Places of the rollouts to imitate: the best of each prompt's samples, of equals the
        first; never a failed score.
        """
        config = self.config
        floor = -math.inf if config.threshold is None else config.threshold
        penalised = penalised_scores(rollouts, scores, config.missing_stop_penalty)
        values = {
            i: value for i, value in enumerate(penalised) if value is not None and value >= floor
        }
        prompts = groupby(values, lambda i: i // config.samples_per_prompt)
        return [
            i
            for _, samples in prompts
            for i in sorted(samples, key=lambda i: -values[i])[: config.keep]
        ]

    def measure(
        self,
        rollouts: Sequence[Rollout],
        scores: Sequence[Score],
        selected: Sequence[int],
    ) -> Metrics:
        """Metrics of all samples and of those selected. KL is the sum over a response, averaged
        over all responses, in nats.
        """
        config = self.config
        size = config.samples_per_prompt
        sequences = [self.encoder.sampled(r) for r in rollouts]
        if all(r.logprobs for r in rollouts):
            policy = [sum(r.logprobs) for r in rollouts]
        else:
            policy = self._totals(self.policy, sequences)
        metrics = {
            **sample_metrics(rollouts, scores),
            "policy/entropy": -sum(policy) / sum(s.num_trained for s in sequences),
            "kept/responses": float(len(selected)),
            "kept/prompts_without": float(
                len(rollouts) // size - len({i // size for i in selected}),
            ),
        }
        if selected:
            metrics["reward/kept"] = statistics.fmean(
                value for i in selected if (value := scores[i].value) is not None
            )
            metrics["kept/length"] = statistics.fmean(rollouts[i].num_written for i in selected)
        if config.keep == 1 and config.threshold is None:
            metrics["kl/best_of_n"] = kl_best_of_n(size)
        if self.reference is not None:
            reference = self._totals(self.reference, sequences)
            metrics["kl/policy_reference_k1"] = statistics.fmean(
                p - q for p, q in zip(policy, reference, strict=True)
            )
        return metrics

    def update(self, selected: Sequence[Rollout], number: int) -> Metrics:
        """Several epochs of imitation; where nothing was selected, nothing moves."""
        if not selected:
            return {}
        config = self.config
        sequences = [self.encoder.sampled(r) for r in selected]
        losses = []
        metrics = {}
        for epoch in range(config.epochs):
            order = epoch_order(len(sequences), config.seed + number, epoch)
            for cut in split_evenly(order, config.minibatches):
                losses.append(self._accumulate([sequences[i] for i in cut]))
                metrics |= self.learner.step()
        return {
            "policy/loss": statistics.fmean(losses),
            **metrics,
            "policy/updates": len(losses),
            "policy/updates_planned": config.epochs * config.minibatches,
        }

    def _accumulate(self, sequences: list[Encoded]) -> float:
        """Add the gradient of L = -(1/N) sum w log pi of one update, N its tokens (w = 1) or
        responses (w = 1/length).

        pi is the policy at the temperature it was sampled at, so that imitating all of its own
        samples would change nothing on average. At another temperature (RAFT fine-tunes at 1) that
        alone sharpens or flattens it.
        """
        by_token = self.config.normalize == "token"
        denominator = sum(s.num_trained for s in sequences) if by_token else len(sequences)

        def loss(batch: TokenBatch) -> tuple[Tensor, Tensor]:
            logprobs = batch.scatter(self.policy.logprobs(batch, self.config.temperature)[0])
            weighted = logprobs if by_token else logprobs / batch.mask.sum(-1, keepdim=True)
            return negative_log_likelihood(
                weighted,
                batch.mask,
                denominator=denominator,
            ), logprobs.new_zeros(0)

        batches = batches_for(
            self.policy,
            sequences,
            self.encoder.pad_id,
            self.config.micro_batch_tokens,
        )
        update = Update((batch for _, batch in batches), loss)
        return accumulate(update, self.ranks, self.learner)[0]

    def _totals(self, role: Role, sequences: Sequence[Encoded]) -> list[float]:
        """Log-probability of each whole response."""
        config = self.config
        return whole_logprobs(
            role,
            sequences,
            self.encoder.pad_id,
            config.micro_batch_tokens,
            config.temperature,
        ).tolist()
