"""What one step of policy optimisation knows about its rollouts, and how it is measured."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tether.algorithms.kl import kl_policy_reference_k1
from tether.algorithms.masked import masked_mean, masked_variance
from tether.core.types import Rollout, Score
from tether.data.batches import TokenBatch, cut_batches, make_batch
from tether.data.chat import ChatEncoder
from tether.stages.sampled import described


@dataclass
class Experience:
    """Rollouts and their (sequence, response time) matrices, padded on the right with zeros.

    `batches` are micro-batches cut once: scoring and every epoch of the update see the same tensors in the same order, so
    old and new log-probabilities come from the same numerics to the bit (rule: the first ratio is 1). `rows` are the places of
    their sequences, and `minibatches` the micro-batches of each optimizer step. `common` holds what the layers below the first
    adapter make of each micro-batch: the same for all roles and all epochs.
    """

    rollouts: list[Rollout]
    scores: list[Score]
    batches: list[TokenBatch]
    rows: list[Tensor]
    mask: Tensor
    logprobs: Tensor
    reference_logprobs: Tensor
    values: Tensor
    entropy: Tensor
    rewards: Tensor
    advantages: Tensor
    returns: Tensor
    weights: Tensor
    rollout_logprobs: Tensor
    minibatches: list[list[int]] = field(kw_only=True)
    common: list[Tensor | None] = field(default_factory=list, kw_only=True)

    def part(self, name: str, number: int) -> Tensor:
        """One matrix, cut to micro-batch `number`."""
        return getattr(self, name)[self.rows[number], : self.batches[number].num_steps]

    def put(self, name: str, number: int, values: Tensor) -> None:
        """The other way: (sequences, time) of micro-batch `number` into the matrix."""
        getattr(self, name)[self.rows[number], : self.batches[number].num_steps] = values

    def put_rollout_logprobs(self) -> None:
        """What the engine itself thought of its tokens, where it said so."""
        for row, rollout in enumerate(self.rollouts):
            if rollout.logprobs:
                self.rollout_logprobs[row, : len(rollout.logprobs)] = torch.tensor(rollout.logprobs)

    def at_last(self, values: Tensor) -> Tensor:
        """(sequences,) values at the last token of each response, zeros elsewhere; (sequences, time)."""
        last = torch.tensor([len(r.response_ids) - 1 for r in self.rollouts], device=values.device)
        return torch.zeros_like(self.rewards).scatter(1, last[:, None], values[:, None].to(self.rewards.dtype))

    def token_counts(self) -> list[int]:
        """Counted tokens of each micro-batch: failed rewards count nothing."""
        return [int(self.part("mask", n).sum()) for n in range(len(self.batches))]

    def minibatch_sums(self, values: Tensor) -> Tensor:
        """(sequences,) each value replaced by the sum over the sequences of its minibatch."""
        sums = torch.zeros_like(values)
        for micro_batches in self.minibatches:
            rows = torch.cat([self.rows[n] for n in micro_batches])
            sums[rows] = values[rows].sum()
        return sums


def deal(counts: Sequence[bool], group_size: int, parts: int, seed: str) -> list[list[int]]:
    """Sequences as minibatches, each with nearly as many that count: a function of `counts` and `seed` alone.

    Whole groups are dealt in a random order, each to the minibatch that has fewest; where there are fewer groups that count than
    minibatches, single sequences. With fewer sequences that count than `parts` some minibatches hold none of them.
    """
    groups = [range(start, min(start + group_size, len(counts))) for start in range(0, len(counts), group_size)]
    if sum(any(counts[i] for i in group) for group in groups) < parts:
        groups = [range(i, i + 1) for i in range(len(counts))]
    random.Random(seed).shuffle(groups)
    minibatches: list[list[int]] = [[] for _ in range(parts)]
    sizes = [0] * parts
    for group in sorted(groups, key=lambda group: -sum(counts[i] for i in group)):
        lightest = min(range(parts), key=lambda part: (sizes[part], len(minibatches[part]), part))
        minibatches[lightest] += group
        sizes[lightest] += sum(counts[i] for i in group)
    return [sorted(minibatch) for minibatch in minibatches if minibatch]


def gather(
    rollouts: Sequence[Rollout],
    scores: Sequence[Score],
    encoder: ChatEncoder,
    micro_batch_tokens: int,
    device: torch.device,
    *,
    document_tokens: int = 0,
    minibatches: Sequence[Sequence[int]] | None = None,
) -> Experience:
    """Rollouts as micro-batches, with empty matrices; a rollout whose reward failed is masked out whole.

    Args:
        minibatches: the rollouts of each optimizer step, every one in one of them; unset: all in one. A micro-batch never holds
            rollouts of two, so that its budget of tokens decides memory alone.
    """
    sequences = [encoder.rollout(r.prompt_ids, r.response_ids) for r in rollouts]
    cuts: list[list[int]] = []
    owned: list[list[int]] = []
    for places in minibatches or [range(len(rollouts))]:
        parts = cut_batches([sequences[i] for i in places], micro_batch_tokens, document_tokens=document_tokens)
        owned.append([*range(len(cuts), len(cuts) + len(parts))])
        cuts += [[places[i] for i in part] for part in parts]
    parts = [[sequences[i] for i in cut] for cut in cuts]
    batches = [make_batch(part, encoder.pad_id, document_tokens=document_tokens).to(device) for part in parts]
    lengths = torch.tensor([len(r.response_ids) for r in rollouts], device=device)
    width = int(lengths.max())
    scored = torch.tensor([s.value is not None for s in scores], device=device)
    mask = (torch.arange(width, device=device)[None] < lengths[:, None]) & scored[:, None]
    zeros = torch.zeros(mask.shape, device=device)
    return Experience(
        list(rollouts),
        list(scores),
        batches,
        [torch.tensor(cut, device=device) for cut in cuts],
        mask,
        *(zeros.clone() for _ in range(9)),
        minibatches=owned,
    )


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 is a perfect value function, 0 a constant, below 0 worse than one."""
    spread = masked_variance(returns, mask)
    return float(1 - masked_variance(returns - values, mask) / spread) if spread > 0 else 0.0


def describe(experience: Experience, *, coefficient: float | None, critic: bool = False) -> dict[str, float]:
    """The step's metrics that are read off the rollouts. KL is the sum over a response, averaged over responses, in nats.

    Args:
        coefficient: the KL's weight; None: the reference was not asked.
        critic: there are values, and rewards a token.
    """
    mask, rollouts, metrics = experience.mask, experience.rollouts, {}
    spreads = [score.parts["spread"] for score in experience.scores if "spread" in score.parts]
    if spreads:
        metrics["reward/spread"] = statistics.fmean(spreads)
    if all(r.logprobs for r in rollouts):
        gap = (experience.logprobs - experience.rollout_logprobs).abs()
        metrics["policy/engine_gap"] = float(masked_mean(gap, mask))
    if coefficient is not None:
        kl = (kl_policy_reference_k1(experience.logprobs, experience.reference_logprobs) * mask).sum(-1)
        mean_kl = float(masked_mean(kl, mask.any(-1)))
        metrics |= {"kl/policy_reference_k1": mean_kl, "kl/coefficient": coefficient, "reward/kl": -coefficient * mean_kl}
    if critic:
        metrics["reward/shaped"] = float(masked_mean((experience.rewards * mask).sum(-1), mask.any(-1)))
        metrics["value/explained_variance"] = explained_variance(experience.values, experience.returns, mask)
        metrics["value/mean"] = float(masked_mean(experience.values, mask))
    return {
        **described(rollouts, experience.scores),
        **metrics,
        "policy/entropy": float(masked_mean(experience.entropy, mask)),
    }


class Clock:
    """Seconds of each phase of a step."""

    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[f"time/{name}"] = self.laps.get(f"time/{name}", 0.0) + now - self.last
        self.last = now

    def times(self, num_tokens: int) -> dict[str, float]:
        total = self.last - self.start
        return {**self.laps, "time/step": total, "tokens_per_second": num_tokens / total}
