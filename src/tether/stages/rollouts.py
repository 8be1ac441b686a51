"""The rollouts of a step: how they are drawn, scored, cut into minibatches and measured."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tether.algorithms.advantages import zero_signal
from tether.algorithms.kl import kl_policy_reference_k1
from tether.algorithms.masked import masked_mean, masked_variance
from tether.algorithms.transfer import to_device
from tether.core.protocols import Engine, RewardSource, count_of, now_doing
from tether.core.types import Metrics, Prompt, Rollout, Score
from tether.data.batches import Cuts, cut_batches, make_batch
from tether.data.chat import ChatEncoder
from tether.settings.policy import PolicyConfig, SampledConfig
from tether.stages.learner.ranks import ALONE, Ranks
from tether.stages.teachers import Read

T = TypeVar("T")


AFTER = {"rollout": "scoring", "reward": "working out log-probabilities", "evaluate": "learning"}
"""The phase that follows on each phase of a step."""


class Clock:
    """Seconds of each phase of a step."""

    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()
        self.laps: Metrics = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[f"time/{name}"] = self.laps.get(f"time/{name}", 0.0) + now - self.last
        self.last = now
        now_doing(AFTER.get(name, "sampling"))

    def times(self, num_tokens: int) -> Metrics:
        total = self.last - self.start
        return {**self.laps, "time/step": total, "tokens_per_second": num_tokens / total}


class Step(NamedTuple):
    """The result of a step: its metrics, all rollouts and their proxy scores."""

    metrics: Metrics
    rollouts: list[Rollout]
    scores: list[Score]

    def hand_over(self, engine: Engine, number: int, clock: Clock) -> Step:
        """Give the new weights to the engine, and the metrics their times."""
        engine.update_weights(number + 1)
        clock.lap("update")
        return self._replace(
            metrics={**self.metrics, **clock.times(sum(r.num_written for r in self.rollouts))},
        )


def sample_and_score(
    engine: Engine,
    reward: RewardSource,
    config: SampledConfig,
    prompts: Sequence[Prompt],
    ordinals: Sequence[int],
    clock: Clock,
) -> tuple[list[Rollout], list[Score]]:
    """Draw `samples_per_prompt` responses to each prompt, in order, and score them.

    A sample is a function of the seed and of the prompt's place in the run (`ordinals`).
    """
    ordinals = ordinals[: len(prompts)]
    count = config.samples_per_prompt
    groups = engine.generate(
        prompts,
        config.sampling,
        num_samples=count,
        seed=config.seed,
        ordinals=ordinals,
        progress=count_of("sampling", len(prompts) * count),
    )
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    clock.lap("rollout")
    scores = reward.score(rollouts)
    clock.lap("reward")
    return rollouts, scores


def group_numbers(config: SampledConfig, count: int, device: torch.device | None = None) -> Tensor:
    """(count,) the number of the prompt that each of a step's responses answers."""
    return torch.arange(count, device=device) // config.samples_per_prompt


def penalised_scores(
    rollouts: Sequence[Rollout],
    scores: Sequence[Score],
    penalty: float,
) -> list[float | None]:
    """The scores, less a penalty where the response did not end in time; None where scoring
    failed.
    """
    return [
        None if s.value is None else s.value - penalty * (not r.finished)
        for r, s in zip(rollouts, scores, strict=True)
    ]


def learned_scores(
    config: PolicyConfig,
    rollouts: Sequence[Rollout],
    scores: Sequence[Score],
) -> list[Score]:
    """The scores that a step learns from: with truncated = "mask" none of an answer without end."""
    return [
        score if rollout.finished or config.truncated == "score" else Score(None)
        for rollout, score in zip(rollouts, scores, strict=True)
    ]


def silent(config: SampledConfig, scores: Sequence[Score]) -> list[bool]:
    """For each response, whether all samples of its prompt score the same, so that a group baseline
    learns nothing from it.
    """
    values = torch.tensor([s.value or 0.0 for s in scores], dtype=torch.float64)
    scored = torch.tensor([s.value is not None for s in scores])
    return zero_signal(values, group_numbers(config, len(scores)), scored).tolist()


REPORTED, LEAST_REPORTED = 4, 16
"""One group in so many is compared with the reference for the report of the KL alone, and at least
so many responses are.
"""


def reported(config: SampledConfig, count: int, number: int) -> list[int]:
    """Places of the responses by which step `number` reports a KL that nothing else needs: whole
    groups, other ones each step.
    """
    every = max(1, min(REPORTED, count // LEAST_REPORTED))
    groups = [
        range(start, min(start + config.samples_per_prompt, count))
        for start in range(0, count, config.samples_per_prompt)
    ]
    every = min(every, len(groups))
    return [place for group in groups[number % every :: every] for place in group]


EVALUATED = "logprobs", "reference_logprobs", "values", "entropy", "teacher_logprobs"
"""The matrices that come from models."""


class Experience:
    """Rollouts as micro-batches, and their (sequence, response time) matrices, padded on the right
    with zeros. A time is a token that the policy wrote: tokens of an environment are context.

    `batches` are micro-batches cut once. Scoring and every epoch of the update see the same tensors
    in the same order. So old and new log-probabilities have the same numerics to the bit, and the
    first ratio is 1. `rows` are the places of their sequences, and `minibatches` the micro-batches
    of each optimizer step. `common` holds the output of the layers below the first adapter for each
    micro-batch: the same for all roles and all epochs. `written_mask` marks all tokens that the policy
    wrote. `mask` leaves out the rollouts that teach nothing, such as one whose reward failed, and
    `num_taught` counts its tokens. `has_logprobs` and `has_reference` mark the rollouts whose
    log-probabilities the policy and the reference have given. Only `rollout_logprobs`, the engine's
    own, are there at the start.

    Args:
        minibatches: the rollouts of each optimizer step, every one in one of them; unset: all in
            one. A micro-batch never holds rollouts of two, so that its budget of tokens decides
            memory alone.
        taught: the rollouts that count; unset: those with a score.
        ranks: those that share the micro-batches among them.
    """

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        scores: Sequence[Score],
        encoder: ChatEncoder,
        micro_batch_tokens: int,
        device: torch.device,
        *,
        document_tokens: int = 0,
        minibatches: Sequence[Sequence[int]] | None = None,
        taught: Sequence[bool] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.rollouts = list(rollouts)
        self.scores = list(scores)
        self.ranks = ranks
        sequences = [encoder.sampled(r) for r in rollouts]
        cuts: Cuts = []
        self.minibatches: Cuts = []
        for places in minibatches or [range(len(rollouts))]:
            parts = cut_batches(
                [sequences[i] for i in places],
                micro_batch_tokens,
                document_tokens=document_tokens,
            )
            self.minibatches.append([*range(len(cuts), len(cuts) + len(parts))])
            cuts += [[places[i] for i in part] for part in parts]
        together = ([sequences[i] for i in cut] for cut in cuts)
        self.batches = [
            make_batch(part, encoder.pad_id, document_tokens=document_tokens).to(device)
            for part in together
        ]
        self.cuts = cuts
        self.rows = [to_device(torch.tensor(cut), device) for cut in cuts]
        self.common: list[Tensor | None] = [None] * len(self.batches)
        lengths = [sequence.num_trained for sequence in sequences]
        taught = [s.value is not None for s in scores] if taught is None else taught
        self.num_taught = [length * counts for length, counts in zip(lengths, taught, strict=True)]
        self.lengths = to_device(torch.tensor(lengths), device)
        self.written_mask = torch.arange(max(lengths), device=device)[None] < self.lengths[:, None]
        self.mask = self.written_mask & to_device(torch.tensor(taught), device)[:, None]
        self.has_logprobs, self.has_reference = (
            torch.zeros_like(self.lengths, dtype=torch.bool) for _ in range(2)
        )
        (
            self.logprobs,
            self.reference_logprobs,
            self.values,
            self.entropy,
            self.teacher_logprobs,
            self.divergence,
            self.rewards,
            self.weights,
            self.advantages,
            self.returns,
        ) = (torch.zeros(self.mask.shape, device=device) for _ in range(10))
        drawn = [torch.tensor(r.logprobs or (0.0,) * r.num_written) for r in rollouts]
        self.rollout_logprobs = to_device(pad_sequence(drawn, batch_first=True), device)

    def read(self, number: int) -> Read:
        """Micro-batch `number` for the teachers."""
        rollouts = [self.rollouts[i] for i in self.cuts[number]]
        return Read(self.batches[number], rollouts, self.common[number])

    def compared(self, *, score: bool) -> Metrics:
        """The mean divergence from the teachers, in nats a token; with `score` minus the mean of
        each answer is its score, unless scoring it failed.
        """
        if score:
            means = masked_mean(self.divergence, self.written_mask, -1).tolist()
            self.scores = [
                one if one.value is None else replace(one, value=-mean)
                for one, mean in zip(self.scores, means, strict=True)
            ]
        return {"teacher/divergence": float(masked_mean(self.divergence, self.written_mask))}

    @property
    def own(self) -> list[int]:
        """The micro-batches that are this rank's: of each minibatch its share, the same in every
        epoch.
        """
        return [
            part[i]
            for part in self.minibatches
            for i in self.ranks.share([self.size(number) for number in part])
        ]

    def size(self, number: int) -> int:
        """Tokens of micro-batch `number`, padding and all."""
        return self.batches[number].ids.numel()

    def each(self, minibatch: int, work: Callable[[int], T]) -> Iterable[T]:
        """The results of the micro-batches of a minibatch, by its number. The rank that owns a
        micro-batch computes its result when the caller reads it.
        """
        return self.ranks.map(work, self.minibatches[minibatch], self.size)

    def measure(
        self,
        minibatch: int,
        work: Callable[[int], Mapping[str, Tensor]],
    ) -> list[Metrics]:
        """Numbers by name, scalars, of each micro-batch of a minibatch, by its number. The host
        reads them after the last one.
        """
        rows = self.ranks.measure(work, self.minibatches[minibatch], self.size)
        return [{name: value for name, (value,) in row.items()} for row in rows]

    def complete(self, *names: str) -> None:
        """Sum matrices over the ranks, each of which has `put` its own rows; none named: all that
        come from models.
        """
        self.ranks.sum_([getattr(self, name) for name in names or EVALUATED])

    def rows_of(self, name: str, number: int) -> Tensor:
        """One matrix, cut to micro-batch `number`."""
        return getattr(self, name)[self.rows[number], : self.batches[number].num_steps]

    def put(self, name: str, number: int, values: Tensor) -> None:
        """The inverse of `rows_of`: (sequences, time) of micro-batch `number` into the matrix."""
        if not self.ranks.idle:
            getattr(self, name)[self.rows[number], : self.batches[number].num_steps] = values

    def at_last(self, values: Tensor) -> Tensor:
        """(sequences,) values at the last token of each response, zeros elsewhere; (sequences,
        time).
        """
        return torch.zeros_like(self.rewards).scatter(
            1,
            self.lengths[:, None] - 1,
            values[:, None].to(self.rewards.dtype),
        )

    def token_counts(self) -> list[int]:
        """Counted tokens of each minibatch: failed rewards count nothing."""
        return [
            sum(self.num_taught[i] for number in part for i in self.cuts[number])
            for part in self.minibatches
        ]

    def minibatch_sums(self, values: Tensor) -> Tensor:
        """(sequences,) each value replaced by the sum over the sequences of its minibatch."""
        sums = torch.zeros_like(values)
        for micro_batches in self.minibatches:
            rows = torch.cat([self.rows[n] for n in micro_batches])
            sums[rows] = values[rows].sum()
        return sums


def deal(counts: Sequence[bool], group_size: int, parts: int, seed: str) -> Cuts:
    """Sequences as minibatches, each with nearly as many that count: a function of `counts` and
    `seed` alone.

    Whole groups are dealt in a random order, each to the smallest minibatch. With fewer counted
    groups than minibatches, single sequences are dealt. With fewer sequences that count than
    `parts` some minibatches hold none of them.
    """
    every = range(len(counts))

    def counted(places: Sequence[int]) -> int:
        return sum(counts[i] for i in places)

    groups = [every[start : start + group_size] for start in every[::group_size]]
    if sum(map(bool, map(counted, groups))) < parts:
        groups = [every[i : i + 1] for i in every]
    random.Random(seed).shuffle(groups)
    minibatches: Cuts = [[] for _ in range(parts)]
    for group in sorted(groups, key=counted, reverse=True):
        lightest = min(minibatches, key=lambda part: (counted(part), len(part)))
        lightest += group
    return [sorted(minibatch) for minibatch in minibatches if minibatch]


def sample_metrics(rollouts: Sequence[Rollout], scores: Sequence[Score]) -> Metrics:
    """The metrics that need no pass through a model."""
    values = [score.value for score in scores if score.value is not None]
    metrics = {
        "reward/proxy": statistics.fmean(values) if values else math.nan,
        "reward/proxy_std": statistics.pstdev(values) if values else math.nan,
        "reward/failed": float(len(scores) - len(values)),
        "response/length": statistics.fmean(r.num_written for r in rollouts),
        "response/stop_rate": statistics.fmean(float(r.finished) for r in rollouts),
        "response/distinct_2": distinct(rollouts),
    }
    if episodes := [rollout.outcome.parts for rollout in rollouts if rollout.outcome]:
        turns, unread, segments = (
            statistics.fmean(parts[name] for parts in episodes)
            for name in ("turns", "unread_calls", "segments")
        )
        metrics |= {
            "episode/turns": turns,
            "episode/unread_calls": unread / turns,
            "episode/segments": segments,
        }
        if given := [
            r.outcome.value for r in rollouts if r.outcome and r.outcome.value is not None
        ]:
            metrics["episode/reward"] = statistics.fmean(given)
    return metrics


def drawn_metrics(drawn: Sequence[tuple[Rollout, Score]]) -> Metrics:
    """Scores of the policy over all samples that were drawn, used or not."""
    of_all = sample_metrics(*zip(*drawn, strict=True))
    names = ("reward/proxy", "reward/proxy_std", "reward/failed")
    return {**{name: of_all[name] for name in names}, "group/sampled": len(drawn)}


def distinct(rollouts: Sequence[Rollout]) -> float:
    """Distinct pairs of neighbouring tokens over all such pairs of all responses
    (https://arxiv.org/abs/1510.03055).
    """
    pairs = [
        pair
        for r in rollouts
        for start, stop in r.spans
        for pair in itertools.pairwise(r.response_ids[start:stop])
    ]
    return len(set(pairs)) / max(1, len(pairs))


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 is a perfect value function, 0 a constant, below
    0 worse than one.
    """
    spread = masked_variance(returns, mask)
    return float(1 - masked_variance(returns - values, mask) / spread) if spread > 0 else 0.0


def step_metrics(
    experience: Experience,
    *,
    coefficient: float | None,
    critic: bool = False,
) -> Metrics:
    """All metrics of the experience. KL is the sum over a response, averaged over responses, in
    nats; it needs no score.

    Args:
        coefficient: the KL's weight; None without a reference.
        critic: there are values, and rewards a token.
    """
    mask = experience.mask
    written = experience.written_mask
    rollouts = experience.rollouts
    scores = experience.scores
    values = experience.values
    metrics = sample_metrics(rollouts, scores)
    drawn = to_device(torch.tensor([bool(r.logprobs) for r in rollouts]), mask.device)
    drawn |= ~drawn.any()  # where others wrote all of them
    seen = written & (experience.has_logprobs & drawn)[:, None]
    if spreads := [score.parts["spread"] for score in scores if "spread" in score.parts]:
        metrics["reward/spread"] = statistics.fmean(spreads)
    if bool(seen.any()):
        metrics["policy/entropy"] = float(masked_mean(experience.entropy, seen))
        if any(r.logprobs for r in rollouts):
            gap = (experience.logprobs - experience.rollout_logprobs).abs()
            metrics["policy/engine_gap"] = float(masked_mean(gap, seen))
    if coefficient is not None:
        metrics["kl/coefficient"] = coefficient
        both = experience.has_logprobs & experience.has_reference & drawn
        ratios = kl_policy_reference_k1(experience.logprobs, experience.reference_logprobs)
        if bool(both.any()):
            mean_kl = float(masked_mean((ratios * written).sum(-1), both))
            metrics |= {"kl/policy_reference_k1": mean_kl, "reward/kl": -coefficient * mean_kl}
    if critic:
        rewards = (experience.rewards * mask).sum(-1)
        metrics |= {
            "reward/shaped": float(masked_mean(rewards, mask.any(-1))),
            "value/explained_variance": explained_variance(values, experience.returns, mask),
            "value/mean": float(masked_mean(values, mask)),
        }
    return metrics
