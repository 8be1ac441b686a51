"""Policy gradients against a reward source: PPO, GRPO, RLOO, REINFORCE and their kin are settings
of one step.

They differ in what is taken off a score, in whether a critic spreads it over the tokens, and in
what is descended.
PPO: Schulman et al. 2017 (https://arxiv.org/abs/1707.06347) as Ziegler et al. 2019
(https://arxiv.org/abs/1909.08593) brought it to language models. The others, with their links:
docs/methods.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tether.algorithms import policy_losses as losses
from tether.algorithms.advantages import gae, returns_to_go
from tether.algorithms.masked import masked_sum, whiten
from tether.algorithms.transfer import to_device
from tether.core.protocols import Engine, RewardSource
from tether.core.types import Facts, Json, Metrics, Prompt, Readings, Rollout, Score
from tether.data.batches import TokenBatch
from tether.data.chat import ChatEncoder
from tether.models.trunk import Role
from tether.settings.policy import PolicyConfig
from tether.stages.given_answers import partly_given
from tether.stages.learner.local import LocalLearner
from tether.stages.learner.loop import epoch_order
from tether.stages.learner.ranks import ALONE, Ranks
from tether.stages.reward_shaping import RewardShaping
from tether.stages.rollouts import (
    Clock,
    Experience,
    Step,
    deal,
    drawn_metrics,
    learned_scores,
    reported,
    sample_and_score,
    silent,
    step_metrics,
)
from tether.stages.surrogates import kl_term, surrogate
from tether.stages.teachers import ALONE as TAUGHT
from tether.stages.teachers import Teachers
from tether.stages.tethered import Tethered
from tether.stages.update_metrics import UpdateMetrics

_log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class PolicyGradient(Tethered):
    """One policy and a reward source; with a tether its frozen reference, with a critic a value
    function.

    Args:
        policy, reference, value: roles on one trunk or on several. A value role with the policy's
            own adapter and model reads the policy's hidden states, at no extra pass.
        engine: samples from the policy; `policy_version` identifies its weights.

    Raises:
        ValueError: a critic or a tether without its role, or a value role that the settings have no
            use for.
    """

    config: PolicyConfig
    policy: Role
    reference: Role | None
    value: Role | None
    reward: RewardSource
    engine: Engine
    encoder: ChatEncoder
    teachers: Teachers | None = None
    ranks: Ranks = ALONE

    def __post_init__(self) -> None:
        config, policy, value = self.config, self.policy, self.value
        if config.critic != (value is not None):
            raise ValueError("critic = true needs a value role, and critic = false takes none")
        if config.needs_reference and self.reference is None:
            raise ValueError("a KL in reward or loss, or reported, needs a reference role")
        self.reference = self.reference if config.needs_reference else None
        self.shaping = RewardShaping(config, value.head if value is not None else None)
        self.kl_coefficient, self.stopped = config.kl.coefficient, False
        self.reserves = 0
        """Prompts that earlier steps sampled beyond their own batches."""
        self.tethered = config.kl.coefficient > 0 or config.kl.mode != "fixed"
        """True if training needs the KL of every answer. If only the report needs it, the reference
        reads a part of the answers.
        """
        kl_in_reward = config.kl.coefficient > 0 and config.kl.place != "loss"
        in_reward = kl_in_reward or config.by_token
        self.old_from_update = config.one_update and value is None and not in_reward
        """True if the update's own pass gives the old log-probabilities. They are then unneeded
        before, and the policy is unchanged between.
        """
        self.shares_pass = (
            value is not None and value.model is policy.model and value.adapter == policy.adapter
        )
        self.roles = [role for role in (policy, self.reference, value) if role is not None]
        # each once
        learned = dict.fromkeys(policy.parameters() + ([] if value is None else value.parameters()))
        self.learner = LocalLearner(
            list(learned),
            config.optimizer_for(policy.adapter),
            config.steps * config.epochs * config.minibatches,
            config.ema_decay or config.follow,
            ranks=self.ranks,
        )
        self.follow()
        for role in self.roles:
            role.train_mode(False)

    def step(self, prompts: Sequence[Prompt], number: int) -> Step:
        """One step of the algorithm: sample, score, learn, hand the weights to the engine."""
        clock = Clock()
        rollouts, scores, sampling = self.sample(prompts, number, clock)
        metrics = self.learn(rollouts, scores, number, clock)
        if self.config.max_staleness:
            ages = [number - rollout.policy_version for rollout in rollouts]
            metrics |= {
                "policy/staleness": sum(ages) / len(ages),
                "policy/staleness_max": float(max(ages)),
            }
        scores = self.experience.scores
        return Step(metrics | sampling, rollouts, scores).hand_over(self.engine, number, clock)

    def learn(
        self,
        rollouts: Sequence[Rollout],
        scores: Sequence[Score],
        number: int,
        clock: Clock | None = None,
    ) -> Metrics:
        """Everything after scoring: evaluate, shape rewards, estimate advantages, several epochs of
        updates, adapt the KL.
        """
        clock, config = clock or Clock(), self.config
        self.experience = experience = self.gather(rollouts, scores, number)
        self.shaping.settle(learned_scores(config, rollouts, scores))
        self.evaluate(experience, number)
        experience.rewards = self.shape(experience)
        experience.advantages, experience.returns = self.advantages(experience)
        clock.lap("evaluate")
        metrics = self.update(experience, number)
        self.follow()
        if self.teachers is not None:
            metrics |= experience.compared(score=self.reward.name == TAUGHT)
            metrics |= self.teachers.coverage()
        beta = None if self.reference is None else self.kl_coefficient
        metrics |= step_metrics(experience, coefficient=beta, critic=config.critic)
        if config.truncated == "mask":
            metrics["response/masked"] = 1.0 - metrics["response/stop_rate"]
        metrics.update(self.shaping.kl_price(metrics, self.kl_coefficient))
        self.shaping.follow(experience, self.kl_coefficient)
        if metrics["policy/updates"]:  # a step that moves nothing says nothing of the tether
            self.adapt_kl(metrics.get("kl/policy_reference_k1", math.nan), len(rollouts))
        experience.common = []
        return metrics

    def sample(
        self,
        prompts: Sequence[Prompt],
        number: int,
        clock: Clock,
    ) -> tuple[list[Rollout], list[Score], Metrics]:
        """Responses, scores and metrics; with `filter_groups` of prompts that teach something, from
        as many batches as needed.
        """
        config, size = self.config, self.config.prompts_per_step
        used: list[tuple[Rollout, Score]] = []
        drawn: list[tuple[Rollout, Score]] = []
        num_silent = start = 0
        for start in range(0, len(prompts), size):
            places = self.ordinals(number)[start:]
            rollouts, scores = sample_and_score(
                partly_given(self.engine, self.encoder, config.own_answers),
                self.reward,
                config,
                prompts[start : start + size],
                places,
                clock,
            )
            pairs = list(zip(rollouts, scores, strict=True))
            useless = silent(config, learned_scores(config, rollouts, scores))
            num_silent, drawn = num_silent + sum(useless), drawn + pairs
            used += [
                pair
                for pair, drop in zip(pairs, useless, strict=True)
                if not (drop and config.filter_groups)
            ]
            if len(used) >= size * config.samples_per_prompt or not config.filter_groups:
                break
        self.reserves += start
        metrics: Metrics = {}
        if config.samples_per_prompt > 1 and self.reward.name != TAUGHT:
            metrics["group/zero_signal"] = num_silent / len(drawn)
        if config.filter_groups:  # what was left out counts in how good the policy is
            metrics |= drawn_metrics(drawn)
        rollouts, scores = zip(*(used or drawn)[: size * config.samples_per_prompt], strict=True)
        return list(rollouts), list(scores), metrics

    def follow(self) -> None:
        """Move the teacher that follows the policy."""
        if self.teachers is not None:
            self.teachers.follow(self.learner.averages)

    def ordinals(self, number: int) -> range:
        """The places of a step's own batch, and of `refill` batches in reserve; the next step goes
        on after the last sampled.
        """
        first = number * self.config.prompts_per_step + self.reserves
        return range(first, first + self.config.prompts_per_step * (1 + self.config.refill))

    def gather(
        self,
        rollouts: Sequence[Rollout],
        scores: Sequence[Score],
        number: int,
    ) -> Experience:
        """The rollouts dealt to minibatches, and cut into micro-batches.

        Where `filter_groups` finds no group that teaches something, none of them counts.
        """
        config, learned = self.config, learned_scores(self.config, rollouts, scores)
        taught = [score.value is not None for score in learned]
        if config.filter_groups and all(silent(config, learned)):
            _log.warning(
                "step %d: in every group all answers score alike: filter_groups leaves nothing to "
                "learn from",
                number + 1,
            )
            taught = [False] * len(taught)
        minibatches = deal(
            taught,
            config.samples_per_prompt,
            config.minibatches,
            f"{config.seed}/{number}",
        )
        return self.cut(rollouts, scores, minibatches=minibatches, taught=taught)

    def cut(
        self,
        rollouts: Sequence[Rollout],
        scores: Sequence[Score],
        *,
        minibatches: Sequence[Sequence[int]] | None = None,
        taught: Sequence[bool] | None = None,
    ) -> Experience:
        """The rollouts cut into micro-batches that every role can read."""
        budget = self.config.micro_batch_tokens
        return Experience(
            rollouts,
            scores,
            self.encoder,
            budget,
            self.policy.device,
            document_tokens=min(role.document_tokens(budget) for role in self.roles),
            minibatches=minibatches,
            taught=taught,
            ranks=self.ranks,
        )

    @torch.no_grad()
    def evaluate(self, experience: Experience, number: int = 0) -> None:
        """Log-probabilities of policy and reference, entropies and values of every response token,
        before the update.

        Each rank measures its share; the matrices are zero elsewhere, and their sums over the ranks
        are whole. A reference for the report alone is run on the rollouts `reported` for step
        `number`.
        """
        count = len(experience.rollouts)
        part = [*range(count)] if self.tethered else reported(self.config, count, number)
        reference = self.reference if len(part) == count else None
        others = (reference is not None) + (self.teachers is not None)
        passes = (not self.old_from_update) + others + self.config.epochs
        reused = passes > 1 and (reference is None or reference.model is self.policy.model)
        for place in self.ranks.in_step(experience.own, spare=0):
            batch, flat = experience.batches[place], {}
            common = experience.common[place] = self.policy.common(batch) if reused else None
            if not self.old_from_update:
                flat["logprobs"], flat["entropy"], flat["values"] = self.forward(batch, common)
            if reference is not None:
                flat["reference_logprobs"] = reference.logprobs(
                    batch,
                    self.config.temperature,
                    common,
                )[0]
            if self.teachers is not None and self.config.by_token:
                flat["teacher_logprobs"] = self.teachers.logprobs(experience.read(place))
            for name, values in flat.items():
                if values is not None:
                    experience.put(name, place, batch.scatter(values))
        experience.complete()
        experience.has_logprobs.fill_(not self.old_from_update)
        experience.has_reference.index_fill_(
            0,
            to_device(torch.tensor(part), experience.has_reference.device),
            self.reference is not None,
        )
        if reference is None and self.reference is not None:
            self._compare(self.reference, experience, part)

    def _compare(self, reference: Role, experience: Experience, places: Sequence[int]) -> None:
        """The reference's log-probabilities of some of the rollouts."""
        some = self.cut(
            [experience.rollouts[i] for i in places],
            [experience.scores[i] for i in places],
        )
        for number in self.ranks.in_step(some.own, spare=0):
            batch = some.batches[number]
            some.put(
                "reference_logprobs",
                number,
                batch.scatter(reference.logprobs(batch, self.config.temperature)[0]),
            )
        some.complete("reference_logprobs")
        experience.reference_logprobs[places, : some.written_mask.shape[1]] = (
            some.reference_logprobs
        )

    def forward(
        self,
        batch: TokenBatch,
        common: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Policy log-probabilities, entropies and values (None without a critic) of the counted
        tokens, each (N,).

        Args:
            hidden: the policy's states, where they are known.
        """
        hidden = self.policy.hidden(batch, common) if hidden is None else hidden
        logprobs, entropy = self.policy.logprobs_of(hidden, batch, self.config.temperature)
        if self.value is None:
            return logprobs, entropy, None
        if self.shares_pass:
            states = hidden if self.config.value_trains_trunk else hidden.detach()
        else:
            states = self.value.hidden(
                batch,
                common if self.value.model is self.policy.model else None,
            )
        return logprobs, entropy, self.value.values_of(states, batch)

    def shape(self, experience: Experience) -> Tensor:
        """The reward of every token, (sequences, time); see RewardShaping."""
        return self.shaping.token_rewards(experience, self.kl_coefficient)

    def advantages(self, experience: Experience) -> tuple[Tensor, Tensor]:
        """(sequences, time) every token's advantage times its weight, and what its value should
        have been. The teachers' log-ratio of a token is added to its own advantage alone.
        """
        config, rewards, mask = self.config, experience.rewards, experience.mask
        if config.critic:
            advantages, returns = gae(rewards, experience.values, mask, config.gamma, config.lam)
        else:
            advantages = returns = returns_to_go(rewards, mask, config.gamma)
        if config.whiten_advantages:
            advantages = whiten(advantages, mask)
        advantages = self.shaping.taught(advantages, experience)
        return advantages * self.weights(experience), returns

    def weights(self, experience: Experience) -> Tensor:
        """Positive weights of the tokens that count, relative to one over their number in their
        minibatch; (sequences, time).
        """
        lengths, counts = experience.mask.sum(-1).float(), experience.mask.any(-1).float()
        tokens = experience.minibatch_sums(lengths)
        sequences = experience.minibatch_sums(counts).clamp(min=1)
        share = {
            "token": torch.ones_like(lengths),
            "sequence": tokens / (sequences * lengths.clamp(min=1)),
            "constant": tokens / (sequences * self.config.max_new_tokens),
        }[self.config.normalize]
        return share[:, None] * experience.mask

    def update(self, experience: Experience, number: int) -> Metrics:
        """Several epochs over the same rollouts: an optimizer step a minibatch, their order new in
        every epoch.

        A minibatch in which nothing counts or nothing is to be learned takes no step.
        "policy/updates" counts the optimizer steps, also those that the learner left out because a
        number was not finite. Beyond
        `target_kl` none is taken, and the epochs end.

        Raises:
            TrainingError: old and new log-probabilities disagree before any update.
        """
        config, tokens = self.config, experience.token_counts()
        metrics, limit = UpdateMetrics(), config.target_kl
        experience.weights = self.weights(experience)
        parts = (
            (epoch, part)
            for epoch in range(config.epochs)
            for part in epoch_order(len(experience.minibatches), config.seed + number, epoch)
            if tokens[part]
        )
        for epoch, part in parts:
            if metrics.made and limit and self.moved(experience, part, tokens[part]) > limit:
                break
            measured = experience.measure(
                part,
                partial(self.accumulate, experience, denominator=tokens[part]),
            )
            metrics.add(measured, self.learner.step(), epoch)
            if self.old_from_update:
                rows = [experience.rows[n] for n in experience.minibatches[part]]
                experience.has_logprobs[torch.cat(rows)] = True
        late = ["logprobs", "entropy"] * self.old_from_update + ["divergence"] * config.by_word
        if late:
            experience.complete(*late)
        return metrics.means() | {"policy/updates_planned": config.epochs * config.minibatches}

    @torch.no_grad()
    def moved(self, experience: Experience, part: int, denominator: int) -> float:
        """KL(old || new) of the tokens of minibatch `part`, in nats over `denominator`, as the
        weights are.
        """

        def approximate_kl(index: int) -> float:
            batch = experience.batches[index]
            logprobs = batch.scatter(self.forward(batch, experience.common[index])[0])
            return float(
                surrogate(self.config, logprobs, experience, index, denominator)[1].approximate_kl,
            )

        return sum(experience.each(part, approximate_kl))

    def accumulate(self, experience: Experience, index: int, denominator: int) -> dict[str, Tensor]:
        """Add one micro-batch's gradient: surrogate + beta KL + c_v value loss - c_e entropy.

        Args:
            denominator: tokens of the whole optimizer step; the metrics add up over its
                micro-batches, the extreme ratios do not.
        """
        config, batch = self.config, experience.batches[index]
        mask = experience.rows_of("mask", index)
        common = experience.common[index]
        hidden = self.policy.hidden(batch, common)
        flat_logprobs, flat_entropy, flat_values = self.forward(batch, common, hidden)
        logprobs, entropy = batch.scatter(flat_logprobs), batch.scatter(flat_entropy)
        if self.old_from_update:
            experience.put("logprobs", index, logprobs.detach())
            experience.put("entropy", index, entropy.detach())
        loss, diagnostics = surrogate(config, logprobs, experience, index, denominator)
        stats = {"policy/loss": loss.detach()}
        if config.kl.place == "loss" and self.kl_coefficient:
            kl = kl_term(config, logprobs, experience, index) * experience.rows_of("weights", index)
            loss = loss + self.kl_coefficient * masked_sum(kl, mask) / denominator
        if flat_values is not None:
            values = experience.rows_of("values", index)
            returns = experience.rows_of("returns", index)
            critic, clipped = losses.value_loss(
                batch.scatter(flat_values),
                values,
                returns,
                mask,
                clip_range=config.value_clip_range,
                denominator=denominator,
            )
            loss = loss + config.value_coefficient * critic
            stats |= {"value/loss": critic.detach(), "value/clip_fraction": clipped}
        if self.teachers is not None and config.by_word:
            gap = batch.scatter(self.teachers.divergence(hidden, experience.read(index)))
            experience.put("divergence", index, gap.detach())
            gap = gap * experience.rows_of("weights", index)
            loss = loss + config.teacher_coefficient * masked_sum(gap, mask) / denominator
        if config.entropy_coefficient:
            loss = loss - config.entropy_coefficient * losses.entropy_bonus(
                entropy,
                mask,
                denominator=denominator,
            )
        self.learner.backward(loss)
        measured = {f"policy/{name}": value for name, value in diagnostics._asdict().items()}
        return {**stats, "loss": loss.detach(), **measured}

    def summary(self, history: Sequence[Readings]) -> Json:
        """The part of the run's summary that this stage adds."""
        idle = sum(row.get("policy/updates") == 0 for row in history)
        bounds = self.kl_bounds if self.config.kl.mode == "adaptive" else ()
        held = sum(row.get("kl/coefficient") in bounds for row in history)
        return {
            "kl_coefficient": self.kl_coefficient,
            **({"steps_at_kl_bound": held} if held else {}),
            **({"steps_without_update": idle} if idle else {}),
        }

    def state(self) -> Json:
        """Everything that the next step depends on beside weights and optimizer."""
        return {
            "kl_coefficient": self.kl_coefficient,
            "stopped": self.stopped,
            "normalizer": self.shaping.normalizer,
            "past_scores": self.shaping.past_scores,
            "reserves": self.reserves,
        }

    def load_state(self, values: Facts) -> None:
        self.kl_coefficient, self.stopped = values["kl_coefficient"], values["stopped"]
        self.shaping.normalizer = tuple(values["normalizer"]) if values["normalizer"] else None
        self.shaping.past_scores = tuple(values["past_scores"])
        self.reserves = values["reserves"]
        self.shaping.settle(())
        self.follow()
