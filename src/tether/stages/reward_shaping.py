"""From the scores of responses to the reward of every token: scale, penalties, the tether and the
baseline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tether.algorithms.advantages import (
    group_relative,
    leave_one_out_baseline,
    overlong_penalty,
    running_mean,
)
from tether.algorithms.kl import kl_policy_reference_k1
from tether.algorithms.masked import masked_sum
from tether.algorithms.process import place_step_rewards
from tether.algorithms.transfer import to_device
from tether.core.types import Metrics, Readings, Score
from tether.models.heads import ScalarHead
from tether.settings.policy import PolicyConfig
from tether.stages.rollouts import Experience, group_numbers


class RewardShaping:
    """The rewards of tokens, and what they depend on beside the step's own scores.

    `normalizer` is the (mean, deviation) of the first step's scores, `past_scores` the (mean,
    number) of the running baseline.

    Args:
        value_head: of the critic; one copied from the reward model is put on the scale of the
            normalised scores.
    """

    def __init__(self, config: PolicyConfig, value_head: ScalarHead | None) -> None:
        self.config = config
        self.value_head = value_head if config.value_init == "reward" else None
        self.copied_units = (
            None
            if self.value_head is None
            else (self.value_head.offset.clone(), self.value_head.scale.clone())
        )
        self.normalizer: tuple[float, float] | None = None
        self.past_scores = (0.0, 0)

    def taught(self, advantages: Tensor, experience: Experience) -> Tensor:
        """The advantages of tokens, (sequences, time), with the log-ratio of teachers and policy."""
        if not self.config.by_token:
            return advantages
        experience.divergence = experience.logprobs - experience.teacher_logprobs
        return advantages - self.config.teacher_coefficient * experience.divergence

    def token_rewards(self, experience: Experience, kl_coefficient: float) -> Tensor:
        """The reward of every token, (sequences, time).

        Equation: if the KL penalty is part of the reward, a token gets -beta (log pi - log pi_ref).
        The last real token also gets the score, less its baseline. With rewards of single steps,
        the last token of each step gets the reward of the step.
        """
        mask = experience.mask
        config = self.config
        rewards = torch.zeros_like(experience.rewards)
        if config.kl.place == "token":
            rewards -= kl_coefficient * kl_policy_reference_k1(
                experience.logprobs,
                experience.reference_logprobs,
            )
        if config.step_rewards:
            rewards += self._step_rewards(experience)
        else:
            totals = self.totals(experience, kl_coefficient)
            rewards += experience.at_last(
                self.over_baseline(
                    totals,
                    group_numbers(config, len(mask), mask.device),
                    mask.any(-1),
                ),
            )
        return torch.where(mask, rewards, 0.0)

    def totals(self, experience: Experience, kl_coefficient: float) -> Tensor:
        """(sequences,) normalised, clipped scores less the penalties, and less the response's whole
        KL where it belongs there.

        In float64: the differences within a group may be small beside its scores.
        """
        scores = to_device(
            torch.tensor(self.scaled(experience.scores), dtype=torch.float64)[:, 0],
            experience.mask.device,
        )
        totals = scores - self.length_penalties(experience)
        if self.config.kl.place == "sequence":
            k1 = kl_policy_reference_k1(experience.logprobs, experience.reference_logprobs)
            totals -= kl_coefficient * masked_sum(k1, experience.mask, -1)
        return totals

    def length_penalties(self, experience: Experience) -> Tensor:
        """(sequences,) positive penalties. A response that did not end gets `missing_stop_penalty`.
        A response that ends within `overlong_buffer` tokens of the limit gets a share of
        `overlong_penalty`.
        """
        config = self.config
        rollouts = experience.rollouts
        device = experience.mask.device
        penalties = config.missing_stop_penalty * to_device(
            torch.tensor([float(not r.finished) for r in rollouts]),
            device,
        )
        if config.overlong_buffer:
            # from 0 to 1
            overlong = -overlong_penalty(
                experience.lengths,
                config.max_new_tokens,
                config.overlong_buffer,
            )
            penalties += config.overlong_penalty * overlong
        return penalties

    def over_baseline(self, totals: Tensor, groups: Tensor, scored: Tensor) -> Tensor:
        """Scores, of responses or of steps, over their baseline."""
        match self.config.baseline:
            case "group":
                return group_relative(totals, groups, scored, scale=self.config.scale_advantages)
            case "leave_one_out":
                return totals - leave_one_out_baseline(totals, groups, scored)
            case "running_mean":
                return totals - self.past_scores[0]
            case "none":
                return totals

    def _step_rewards(self, experience: Experience) -> Tensor:
        """Rewards of single steps, each at the step's last token by the policy and over the
        baseline of all steps of its group; penalties last.
        """
        mask = experience.mask
        device = experience.mask.device
        rows = self.scaled(experience.scores)
        ends = [
            torch.tensor(
                [max(0, r.written_before(end + 1) - 1) for end, _ in s.steps],
                dtype=torch.long,
                device=device,
            )
            for r, s in zip(experience.rollouts, experience.scores, strict=True)
        ]
        places = pad_sequence(ends, batch_first=True)
        values = pad_sequence(
            [torch.tensor(row, dtype=torch.float64, device=device) for row in rows],
            batch_first=True,
        )
        counts = torch.tensor([len(row) for row in rows], device=device)
        counted = (torch.arange(values.shape[1], device=device) < counts[:, None]) & mask.any(
            -1,
            keepdim=True,
        )
        groups = group_numbers(self.config, len(rows), device)[:, None].expand_as(counted)[counted]
        relative = torch.zeros_like(values)
        relative[counted] = self.over_baseline(
            values[counted],
            groups,
            torch.ones_like(groups, dtype=torch.bool),
        )
        return place_step_rewards(relative, places, counted, mask) - experience.at_last(
            self.length_penalties(experience),
        )

    def settle(self, scores: Sequence[Score]) -> None:
        """Fix the scale of the scores, once: step 0 samples from the reference itself, so its
        scores set it.

        Where they are all the same, the first later step in which they differ does. Rewards of
        single steps are divided by the deviation of their sum in a response. They keep their mean:
        subtracting it from each would change the pay for their number.
        """
        steps = self.config.step_rewards
        scored = [s for s in scores if s.value is not None]
        if self.normalizer is None and scored:
            totals = torch.tensor(
                [sum(v for _, v in s.steps) if steps else s.value for s in scored],
                dtype=torch.float64,
            )
            spread = float(totals.std(correction=0))
            if self.config.normalize_scores and spread > 1e-6:
                self.normalizer = (0.0 if steps else float(totals.mean()), spread)
        if self.value_head is not None and self.copied_units is not None:
            (offset, scale), (mean, deviation) = self.copied_units, self.normalizer or (0.0, 1.0)
            self.value_head.offset.copy_(offset + mean / scale)
            self.value_head.scale.copy_(scale / deviation)

    def scaled(self, scores: Sequence[Score]) -> list[tuple[float, ...]]:
        """Every response's score, or the rewards of its steps, on the reference's scale and
        clipped; 0 for a failed score.
        """
        (mean, deviation), limit = self.normalizer or (0.0, 1.0), self.config.score_clip or math.inf
        rows = [
            [v for _, v in s.steps]
            if self.config.step_rewards
            else [mean if s.value is None else s.value]
            for s in scores
        ]
        return [
            tuple(max(-limit, min(limit, (value - mean) / deviation)) for value in row)
            for row in rows
        ]

    def follow(self, experience: Experience, kl_coefficient: float) -> None:
        """Move the running baseline by the scores of a step."""
        if self.config.baseline != "running_mean":
            return
        if self.config.step_rewards:
            scores = [value for row in self.scaled(experience.scores) for value in row]
        else:
            scores = self.totals(experience, kl_coefficient)[experience.mask.any(-1)].tolist()
        self.past_scores = running_mean(
            *self.past_scores,
            [s for s in scores if math.isfinite(s)],
            self.config.baseline_window,
        )

    def kl_price(self, metrics: Readings, kl_coefficient: float) -> Metrics:
        """The cost of one nat of KL in standard deviations of the step's scores. Empty if nothing
        is penalised.

        Trap: division by a group's deviation comes before a KL in tokens or in the loss, and after
        a KL in the response's score.
        """
        config = self.config
        spread = metrics["reward/proxy_std"]
        _, unit = self.normalizer or (0.0, 1.0)
        if not kl_coefficient or config.step_rewards or not spread > 0:
            return {}
        place = config.kl.place
        relative = (config.scale_advantages and place != "sequence") or (
            config.whiten_advantages and place == "loss"
        )
        return {"kl/price": kl_coefficient * (1.0 if relative else unit / spread)}
