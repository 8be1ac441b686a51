"""Policy gradients against a reward source: PPO, GRPO, RLOO, REINFORCE and their kin are settings of one step.

They differ in what is taken off a score, in whether a critic spreads it over the tokens, and in what is descended.
PPO: Schulman et al. 2017 (https://arxiv.org/abs/1707.06347) as Ziegler et al. 2019 (https://arxiv.org/abs/1909.08593) brought it
to language models. The others, with their links: docs/algorithms.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from tether.algorithms.advantages import (
    gae,
    group_relative,
    leave_one_out,
    overlong_penalty,
    returns_to_go,
    running_mean,
    zero_signal,
)
from tether.algorithms.kl import adapt_kl_coefficient, kl_policy_reference_k1, kl_target_reached
from tether.algorithms.masked import masked_sum, whiten
from tether.algorithms.policy_losses import entropy_bonus, value_loss
from tether.algorithms.process import place_step_rewards
from tether.core.protocols import Engine, RewardSource
from tether.core.rundir import RunDirectory
from tether.core.types import Prompt, Rollout, Score
from tether.data.batches import TokenBatch
from tether.data.chat import ChatEncoder
from tether.learner.local import LocalLearner
from tether.models.trunk import Role
from tether.stages.experience import Clock, Experience, deal, describe, gather
from tether.stages.policy import WeightAverage, clipped_epochs, train
from tether.stages.policy_config import PolicyConfig
from tether.stages.sampled import Hooks, sampled
from tether.stages.surrogates import kl_term, surrogate

Samples = tuple[list[Rollout], list[Score]]


class PolicyGradient:
    """One policy and a reward source; with a tether its frozen reference, with a critic a value function.

    Args:
        policy, reference, value: roles on one trunk or on several. A value role with the policy's own adapter and model
            reads the policy's hidden states, at no extra pass.
        engine: samples from the policy; its weights are told apart by `policy_version`.

    Raises:
        ValueError: a critic or a tether without its role, or a value role that the settings have no use for.
    """

    def __init__(
        self,
        config: PolicyConfig,
        policy: Role,
        reference: Role | None,
        value: Role | None,
        reward: RewardSource,
        engine: Engine,
        encoder: ChatEncoder,
    ) -> None:
        if config.critic != (value is not None):
            raise ValueError("critic = true needs a value role, and critic = false takes none")
        if config.needs_reference and reference is None:
            raise ValueError("a KL in reward or loss, or reported, needs a reference role")
        self.config, self.policy, self.value = config, policy, value
        self.reference = reference if config.needs_reference else None
        self.reward, self.engine, self.encoder = reward, engine, encoder
        self.kl_coefficient, self.stopped = config.kl.coefficient, False
        self.normalizer: tuple[float, float] | None = None
        copied = value.head if value is not None and config.value_init == "reward" else None
        self.copied_units = None if copied is None else (copied.offset.clone(), copied.scale.clone())
        """Of the scores that a value copied from the reward model gives before `settle`."""
        self.past_scores, self.reserves = (0.0, 0), 0
        """Prompts that earlier steps sampled beyond their own batches."""
        in_reward = config.kl.coefficient > 0 and config.kl.place != "loss"
        self.late = config.one_update and value is None and not in_reward
        """The old log-probabilities come from the update's own pass: nothing needs them before, and nothing moves between."""
        self.shares_pass = value is not None and value.model is policy.model and value.adapter == policy.adapter
        self.roles = [role for role in (policy, self.reference, value) if role is not None]
        critic = [] if value is None else value.parameters()
        if self.shares_pass and value is not None and value.head is not None:
            critic = list(value.head.parameters())
        self.learner = LocalLearner(policy.parameters() + critic, config.optimizer_for(policy.adapter), config.total_updates)
        self.average = WeightAverage(self.learner, config.ema_decay, self.roles)
        for role in self.roles:
            role.train_mode(False)

    def step(self, prompts: Sequence[Prompt], number: int) -> tuple[dict[str, float], list[Rollout], list[Score]]:
        """One step of the algorithm; returns its metrics, rollouts and proxy scores."""
        clock = Clock()
        (rollouts, scores), sampled = self.sample(prompts, number, clock)
        metrics = self.learn(rollouts, scores, number, clock)
        self.engine.update_weights(number + 1)
        clock.lap("update")
        return {**metrics, **sampled, **clock.times(sum(len(r.response_ids) for r in rollouts))}, rollouts, scores

    def learn(
        self, rollouts: Sequence[Rollout], scores: Sequence[Score], number: int, clock: Clock | None = None
    ) -> dict[str, float]:
        """Everything after scoring; `experience` keeps what was made of it."""
        clock, config = clock or Clock(), self.config
        limit = min(role.document_tokens(config.micro_batch_tokens) for role in self.roles)
        scored = [score.value is not None for score in scores]
        minibatches = deal(scored, config.samples_per_prompt, config.minibatches, f"{config.seed}/{number}")
        self.experience = experience = gather(
            rollouts,
            scores,
            self.encoder,
            config.micro_batch_tokens,
            self.policy.device,
            document_tokens=limit,
            minibatches=minibatches,
        )
        self.settle(scores)
        self.evaluate(experience)
        experience.rewards = self.shape(experience)
        experience.advantages, experience.returns = self.advantages(experience)
        clock.lap("evaluate")
        metrics = self.update(experience, number)
        coefficient = None if self.reference is None else self.kl_coefficient
        metrics.update(describe(experience, coefficient=coefficient, critic=config.critic))
        self._follow(experience, metrics)
        experience.common = []
        return metrics

    def sample(self, prompts: Sequence[Prompt], number: int, clock: Clock) -> tuple[Samples, dict[str, float]]:
        """Responses and scores; with `filter_groups` those of prompts that teach something, from as many batches as needed."""
        config, size = self.config, self.config.prompts_per_step
        kept: list[tuple[Rollout, Score]] = []
        seen: list[tuple[Rollout, Score]] = []
        silent = start = 0
        for start in range(0, len(prompts), size):
            groups = sampled(self.engine, config, prompts[start : start + size], self.ordinals(number)[start:])
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            clock.lap("rollout")
            pairs = list(zip(rollouts, self.reward.score(rollouts), strict=True))
            clock.lap("reward")
            useless = self._silent([score for _, score in pairs])
            silent, seen = silent + sum(useless), seen + pairs
            kept += [pair for pair, drop in zip(pairs, useless, strict=True) if not (drop and config.filter_groups)]
            if len(kept) >= size * config.samples_per_prompt or not config.filter_groups:
                break
        self.reserves += start
        used = kept[: size * config.samples_per_prompt] or seen
        metrics = {"group/zero_signal": silent / len(seen)} if config.samples_per_prompt > 1 else {}
        if config.filter_groups:  # what was left out counts in how good the policy is
            known = [score.value for _, score in seen if score.value is not None]
            metrics.update({"reward/proxy": statistics.fmean(known) if known else float("nan"), "group/sampled": len(seen)})
        return ([rollout for rollout, _ in used], [score for _, score in used]), metrics

    def ordinals(self, number: int) -> range:
        """The places of a step's own batch, and of `refill` batches in reserve; the next step goes on after the last sampled."""
        first = number * self.config.prompts_per_step + self.reserves
        return range(first, first + self.config.prompts_per_step * (1 + self.config.refill))

    def _silent(self, scores: Sequence[Score]) -> list[bool]:
        values = torch.tensor([0.0 if s.value is None else s.value for s in scores], dtype=torch.float64)
        known = torch.tensor([s.value is not None for s in scores])
        return zero_signal(values, self._groups(len(scores), values.device), known).tolist()

    def _groups(self, count: int, device: torch.device) -> Tensor:
        return torch.arange(count, device=device) // self.config.samples_per_prompt

    @torch.no_grad()
    def evaluate(self, experience: Experience) -> None:
        """Log-probabilities of policy and reference, entropies and values of every response token, before the update."""
        reference = self.reference
        one_trunk = reference is None or reference.model is self.policy.model
        passes = (not self.late) + (reference is not None) + self.config.epochs
        reused = one_trunk and passes > 1
        experience.common = [self.policy.common(batch) if reused else None for batch in experience.batches]
        experience.put_rollout_logprobs()
        for number, batch in enumerate(experience.batches):
            common, found = experience.common[number], {}
            if not self.late:
                found["logprobs"], found["entropy"], found["values"] = self.forward(batch, common)
            if reference is not None:
                found["reference_logprobs"] = reference.logprobs(batch, self.config.temperature, common)[0]
            for name, flat in found.items():
                if flat is not None:
                    experience.put(name, number, batch.scatter(flat))

    def forward(self, batch: TokenBatch, common: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Policy log-probabilities, entropies and values (None without a critic) of the counted tokens, each (N,)."""
        hidden = self.policy.hidden(batch, common)
        logprobs, entropy = self.policy.logprobs_of(hidden, batch, self.config.temperature)
        if self.value is None:
            return logprobs, entropy, None
        if self.shares_pass:
            states = hidden if self.config.value_trains_trunk else hidden.detach()
        else:
            states = self.value.hidden(batch, common if self.value.model is self.policy.model else None)
        return logprobs, entropy, self.value.values_of(states, batch)

    def shape(self, experience: Experience) -> Tensor:
        """The reward of every token: -beta (log pi - log pi_ref) where the tether pulls at tokens, and the score, over its
        baseline, once at the last real token (or the rewards of single steps at theirs)."""
        mask, config = experience.mask, self.config
        rewards = torch.zeros_like(experience.rewards)
        if config.kl.place == "token":
            rewards -= self.kl_coefficient * kl_policy_reference_k1(experience.logprobs, experience.reference_logprobs)
        if config.step_rewards:
            rewards += self._step_rewards(experience)
        else:
            groups = self._groups(len(mask), mask.device)
            rewards += experience.at_last(self.relative(self.totals(experience), groups, mask.any(-1)))
        return torch.where(mask, rewards, 0.0)

    def totals(self, experience: Experience) -> Tensor:
        """(sequences,) normalised, clipped scores less the penalties, and less the response's whole KL where it belongs there.

        In float64: what a group's scores differ by may be small beside them.
        """
        scores = torch.tensor(self.paid(experience.scores), dtype=torch.float64, device=experience.mask.device)[:, 0]
        totals = scores - self.length_penalties(experience)
        if self.config.kl.place == "sequence":
            k1 = kl_policy_reference_k1(experience.logprobs, experience.reference_logprobs)
            totals -= self.kl_coefficient * masked_sum(k1, experience.mask, -1)
        return totals

    def length_penalties(self, experience: Experience) -> Tensor:
        """(sequences,) what is taken off a response for its length: it did not end in time, or nearly not."""
        config, rollouts, device = self.config, experience.rollouts, experience.mask.device
        penalties = config.missing_stop_penalty * torch.tensor([float(not r.finished) for r in rollouts], device=device)
        if config.overlong_buffer:
            lengths = torch.tensor([len(r.response_ids) for r in rollouts], device=device)
            penalties -= config.overlong_penalty * overlong_penalty(lengths, config.max_new_tokens, config.overlong_buffer)
        return penalties

    def relative(self, totals: Tensor, groups: Tensor, known: Tensor) -> Tensor:
        """Scores, of responses or of steps, over their baseline."""
        match self.config.baseline:
            case "group":
                return group_relative(totals, groups, known, scale=self.config.scale_advantages)
            case "leave_one_out":
                return totals - leave_one_out(totals, groups, known)
            case "running_mean":
                return totals - self.past_scores[0]
            case "none":
                return totals

    def _step_rewards(self, experience: Experience) -> Tensor:
        """Rewards of single steps at their last tokens, each over the baseline of all steps of its group; penalties last."""
        mask, device, paid = experience.mask, experience.mask.device, self.paid(experience.scores)
        width = max(map(len, paid))
        ends = [[end for end, _ in s.steps] + [0] * (width - len(s.steps)) for s in experience.scores]
        places = torch.tensor(ends, dtype=torch.long, device=device)
        values = torch.tensor([[*row, *[0.0] * (width - len(row))] for row in paid], dtype=torch.float64, device=device)
        counts = torch.tensor([len(row) for row in paid], device=device)
        known = (torch.arange(width, device=device) < counts[:, None]) & mask.any(-1, keepdim=True)
        groups = self._groups(len(paid), device)[:, None].expand_as(known)
        relative = torch.zeros_like(values)
        relative[known] = self.relative(values[known], groups[known], torch.ones_like(groups[known], dtype=torch.bool))
        return place_step_rewards(relative, places, known, mask) - experience.at_last(self.length_penalties(experience))

    def settle(self, scores: Sequence[Score]) -> None:
        """Fix the scale of the scores, once: step 0 samples from the reference itself, so its scores set it.

        Rewards of single steps are divided by the deviation of a response's sum of them and not shifted: taken off each, a mean
        would pay for their number.
        """
        steps, scored = self.config.step_rewards, [s for s in scores if s.value is not None]
        if self.normalizer is not None or not scored:
            return
        totals = torch.tensor([sum(v for _, v in s.steps) if steps else s.value for s in scored], dtype=torch.float64)
        spread = float(totals.std(correction=0))
        fits = self.config.normalize_scores and spread > 1e-6
        self.normalizer = (0.0 if steps else float(totals.mean()), spread) if fits else (0.0, 1.0)
        self._put_value_on_scale()

    def _put_value_on_scale(self) -> None:
        """A value that was copied from the reward model predicts its scores; from now on on the scale of what is learned from."""
        if self.copied_units is not None and self.value is not None and self.value.head is not None:
            (offset, scale), (mean, deviation) = self.copied_units, self.normalizer or (0.0, 1.0)
            self.value.head.offset.copy_(offset + mean / scale)
            self.value.head.scale.copy_(scale / deviation)

    def paid(self, scores: Sequence[Score]) -> list[tuple[float, ...]]:
        """Every response's score, or the rewards of its steps, on the reference's scale and clipped; 0 for an unknown score."""
        self.settle(scores)
        (mean, deviation), limit = self.normalizer or (0.0, 1.0), self.config.score_clip or math.inf
        rows = [[v for _, v in s.steps] if self.config.step_rewards else [mean if s.value is None else s.value] for s in scores]
        return [tuple(max(-limit, min(limit, (value - mean) / deviation)) for value in row) for row in rows]

    def advantages(self, experience: Experience) -> tuple[Tensor, Tensor]:
        """(sequences, time) every token's advantage times its weight, and what its value should have been."""
        config, mask = self.config, experience.mask
        if config.critic:
            advantages, returns = gae(experience.rewards, experience.values, mask, config.gamma, config.lam)
        else:
            advantages = returns = returns_to_go(experience.rewards, mask, config.gamma)
        if config.whiten_advantages:
            advantages = whiten(advantages, mask)
        return advantages * self.weights(experience), returns

    def weights(self, experience: Experience) -> Tensor:
        """Positive weights of the tokens that count, relative to one over their number in their minibatch; (sequences, time)."""
        lengths, counts = experience.mask.sum(-1).float(), experience.mask.any(-1).float()
        tokens = experience.minibatch_sums(lengths)
        sequences = experience.minibatch_sums(counts).clamp(min=1)
        share = {
            "token": torch.ones_like(lengths),
            "sequence": tokens / (sequences * lengths.clamp(min=1)),
            "constant": tokens / (sequences * self.config.max_new_tokens),
        }[self.config.normalize]
        return share[:, None] * experience.mask

    def update(self, experience: Experience, number: int) -> dict[str, float]:
        """Several epochs of updates over the same rollouts; one is on policy."""
        experience.weights = self.weights(experience)

        def finish() -> Mapping[str, float]:
            metrics = self.learner.step()
            self.average.update()
            return metrics

        return clipped_epochs(experience, self.config, number, lambda *at: self._accumulate(experience, *at), finish)

    def _accumulate(self, experience: Experience, index: int, denominator: int) -> dict[str, float]:
        """Add one micro-batch's gradient: surrogate + beta KL + c_v value loss - c_e entropy."""
        batch, mask, config = experience.batches[index], experience.part("mask", index), self.config
        flat = self.forward(batch, experience.common[index])
        logprobs, entropy = batch.scatter(flat[0]), batch.scatter(flat[1])
        if self.late:
            experience.put("logprobs", index, logprobs.detach())
            experience.put("entropy", index, entropy.detach())
        policy, diagnostics = surrogate(config, logprobs, experience, index, denominator)
        loss, stats = policy, {"policy/loss": float(policy.detach())}
        if config.kl.place == "loss" and self.kl_coefficient:
            kl = kl_term(config.kl.estimator, logprobs, experience, index) * experience.part("weights", index)
            loss = loss + self.kl_coefficient * masked_sum(kl, mask) / denominator
        if flat[2] is not None:
            critic, clipped = value_loss(
                batch.scatter(flat[2]),
                experience.part("values", index),
                experience.part("returns", index),
                mask,
                clip_range=config.value_clip_range,
                denominator=denominator,
            )
            loss = loss + config.value_coefficient * critic
            stats |= {"value/loss": float(critic.detach()), "value/clip_fraction": float(clipped)}
        if config.entropy_coefficient:
            loss = loss - config.entropy_coefficient * entropy_bonus(entropy, mask, denominator=denominator)
        self.learner.backward(loss)
        return stats | {
            "loss": float(loss.detach()),
            "policy/clip_fraction": float(diagnostics.clip_fraction),
            "policy/approximate_kl": float(diagnostics.approximate_kl),
            "ratio_max": float(diagnostics.ratio_max),
            "ratio_min": float(diagnostics.ratio_min),
        }

    def _follow(self, experience: Experience, metrics: Mapping[str, float]) -> None:
        """Move what the next step depends on: the running baseline, and the KL controller."""
        config = self.config
        known = experience.mask.any(-1)
        if config.baseline == "running_mean":
            steps = [v for row in self.paid(experience.scores) for v in row] if config.step_rewards else None
            scores = self.totals(experience)[known].tolist() if steps is None else steps
            finite = [score for score in scores if math.isfinite(score)]
            self.past_scores = running_mean(*self.past_scores, finite, config.baseline_window)
        observed = metrics.get("kl/policy_reference_k1", 0.0)
        if not math.isfinite(observed):  # of a step whose update was left out
            return
        if config.kl.mode == "adaptive":
            self.kl_coefficient = adapt_kl_coefficient(
                self.kl_coefficient, observed, config.kl.target, config.kl.horizon, len(experience.rollouts)
            )
        self.stopped = config.kl.mode == "stop" and kl_target_reached(observed, config.kl.target)

    def train(self, prompts: Sequence[Prompt], run: RunDirectory, **hooks: Unpack[Hooks]) -> dict[str, Any]:
        """See policy.train."""
        summary = train(self, prompts, run, **hooks)
        return {**summary, "kl_coefficient": self.kl_coefficient}

    def state(self) -> dict[str, Any]:
        return {
            "kl_coefficient": self.kl_coefficient,
            "stopped": self.stopped,
            "normalizer": self.normalizer,
            "past_scores": self.past_scores,
            "reserves": self.reserves,
        }

    def load_state(self, values: Mapping[str, Any]) -> None:
        self.kl_coefficient, self.stopped = values["kl_coefficient"], values["stopped"]
        self.normalizer = tuple(values["normalizer"]) if values["normalizer"] else None
        self.past_scores = tuple(values["past_scores"])
        every_reserve = self.config.prompts_per_step * self.config.refill  # what each step used up in checkpoints without a count
        self.reserves = values["reserves"] if "reserves" in values else values["step"] * every_reserve
        self._put_value_on_scale()
