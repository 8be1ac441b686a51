"""Checks of a stage of one's own, with a few samples: tether's own stages guarantee them by construction."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from tether.core.protocols import RewardSource
from tether.core.types import Prompt, Score
from tether.models.trunk import Role
from tether.monitoring import doctor
from tether.monitoring.doctor import Finding, Result, Unexamined
from tether.rewards.function import FailureLimit
from tether.rewards.learned import EnsembleReward, LearnedReward, ObjectivesReward, ProcessReward
from tether.run.online_stage import OnlineStage
from tether.stages.online_direct import OnlineDirect
from tether.stages.policy_gradient import PolicyGradient
from tether.stages.reference import role_digest
from tether.stages.rollouts import Experience, gather

TOKENS = 32
"""At most, of a sample of a probe."""


def check_stage(stage: OnlineStage, prompts: Sequence[Prompt], *, digest: str | None = None) -> list[Result]:
    """Dropout, reference, optimizer and shaped rewards of a stage; weights, random state and training modes stay as they are.

    Args:
        digest: of the model that the reference should be.
    """
    with unseeded(stage):
        probe, results = Probe(stage, prompts), []
        for name, role in _roles(stage).items():
            results.append(doctor.dropout(name, role, lambda role=role: probe.hidden(role)))
        if any(isinstance(result, Finding) for result in results):
            return [*results, Unexamined("all else", "dropout would look like other faults: switch it off first")]
        results += [*_reference_checks(stage, probe, digest), doctor.lost_updates(stage.learner.optimizer)]
        if isinstance(stage, PolicyGradient):
            return [*results, *_shaping_checks(stage, probe)]
        return [*results, Unexamined("KL sign", "this stage takes no KL off a reward")]


def unseeded(stage: OnlineStage) -> AbstractContextManager[None]:
    """A context that leaves torch's random state as it was."""
    return torch.random.fork_rng(devices=[stage.policy.device] if stage.policy.device.type == "cuda" else [])


class Probe:
    """A few samples of a stage's policy, and what its roles say about them."""

    def __init__(self, stage: OnlineStage, prompts: Sequence[Prompt]) -> None:
        self.stage, config = stage, stage.config
        self.limit = min(config.max_new_tokens, TOKENS)
        sampling = replace(config.sampling, max_new_tokens=self.limit)
        groups = stage.engine.generate(prompts, sampling, num_samples=config.samples_per_prompt, seed=config.seed)
        self.rollouts = [rollout for group in groups for rollout in group.rollouts]
        self.experience = self.gathered()
        self.mask = self.experience.mask
        self.logprobs, self.entropy = self.measure(stage.policy)
        self.engine: Tensor | None = None
        if all(r.logprobs for r in self.rollouts):
            self.engine = self.experience.rollout_logprobs
        self.tolerance = 0.01 if stage.policy.model.dtype == torch.float32 else 0.12

    def gathered(self) -> Experience:
        """The stage's own matrices for the samples, with scores that all differ."""
        stage, size = self.stage, self.stage.config.micro_batch_tokens
        limit = stage.policy.document_tokens(size)
        scores = [Score(0.5 + n, steps=((len(r.response_ids) - 1, 0.5 + n),)) for n, r in enumerate(self.rollouts)]
        return gather(self.rollouts, scores, stage.encoder, size, stage.policy.device, document_tokens=limit)

    @torch.no_grad()
    def hidden(self, role: Role) -> Tensor:
        return role.hidden(self.experience.batches[0]).float()

    @torch.no_grad()
    def measure(self, role: Role, temperature: float | None = None) -> tuple[Tensor, Tensor]:
        """(sequences, time) log-probabilities and entropies by a role, from a pass of its own; unset: the stage's temperature."""
        logprobs, entropies = (torch.zeros_like(self.experience.logprobs) for _ in range(2))
        for rows, batch in zip(self.experience.rows, self.experience.batches, strict=True):
            flat = role.logprobs(batch, temperature or self.stage.config.temperature)
            for matrix, values in zip((logprobs, entropies), flat, strict=True):
                matrix[rows, : batch.num_steps] = batch.scatter(values)
        return logprobs, entropies


def source(stage: OnlineStage) -> RewardSource:
    """The reward itself: a limit of failures would end the examination that should report them, and remember the probe."""
    return stage.reward.source if isinstance(stage.reward, FailureLimit) else stage.reward


def _roles(stage: OnlineStage) -> dict[str, Role]:
    """Every role that a stage runs, by its name."""
    reward, scorers = source(stage), []
    if isinstance(reward, EnsembleReward | ObjectivesReward):
        scorers = list(reward.scorers.members)
    elif isinstance(reward, LearnedReward | ProcessReward):
        scorers = [reward.role]
    value = stage.value if isinstance(stage, PolicyGradient) else None
    roles = {"policy": stage.policy, "reference": _reference(stage), "value model": value}
    roles |= {f"reward model{f' {n}' if n else ''}": role for n, role in enumerate(scorers)}
    return {name: role for name, role in roles.items() if role is not None}


def _reference(stage: OnlineStage) -> Role | None:
    reference = stage.pairs.likelihoods.reference if isinstance(stage, OnlineDirect) else stage.reference
    return reference if isinstance(reference, Role) else None


def _reference_checks(stage: OnlineStage, probe: Probe, digest: str | None) -> list[Result]:
    reference = _reference(stage)
    if reference is None:
        return [Unexamined(name, "the stage asks no reference") for name in ("reference", "shared weights")]
    offloaded = any(p.is_meta for p in reference.model.parameters())
    digests = None if digest is None or offloaded else (role_digest(reference), digest)
    theirs, ours = lambda: probe.measure(reference)[0], lambda: probe.measure(stage.policy)[0]
    return [
        doctor.wrong_reference(probe.logprobs, theirs(), probe.mask, digests),
        doctor.shared_weights(stage.learner.parameters, reference, ours, theirs),
    ]


def _shaping_checks(stage: PolicyGradient, probe: Probe) -> list[Result]:
    """The stage's own `shape` and loss, on a policy that has drifted from its reference, and on scores alone."""
    config, state = stage.config, stage.state()
    drifted = torch.zeros_like(probe.logprobs)
    drifted[:: config.samples_per_prompt] = 1.0  # one sample of each group: a drift of all would vanish in the baseline
    try:
        calm, moved = (_shaped(stage, probe, drift) for drift in (torch.zeros_like(drifted), drifted))
        results = [doctor.score_once(calm, [len(r.response_ids) for r in probe.rollouts])]
        if not stage.kl_coefficient:
            return [*results, Unexamined("KL sign", "kl.coefficient = 0: no KL is paid")]
        place: Literal["reward", "loss"] = "loss" if config.kl.place == "loss" else "reward"
        change = float(((moved - calm) * drifted.bool().any(-1, keepdim=True)).sum())
        if place == "loss":
            change = _loss(stage, probe, 2.0) - _loss(stage, probe, 1.0)
        return [*results, doctor.kl_sign(change, stage.kl_coefficient, place)]
    finally:
        stage.load_state(state)


@torch.no_grad()
def _shaped(stage: PolicyGradient, probe: Probe, drift: Tensor) -> Tensor:
    """Rewards where the policy stands `drift` nats a token above its reference."""
    experience = probe.gathered()
    experience.logprobs = probe.logprobs * probe.mask
    experience.reference_logprobs = (probe.logprobs - drift) * probe.mask
    return stage.shape(experience)


def _loss(stage: PolicyGradient, probe: Probe, drift: float) -> float:
    """The loss of the first micro-batch at no advantage, the reference `drift` nats a token below the policy."""
    experience = probe.gathered()
    experience.logprobs, experience.reference_logprobs = probe.logprobs.clone(), probe.logprobs - drift
    experience.weights, experience.common = stage.weights(experience), [None] * len(experience.batches)
    try:
        return stage.accumulate(experience, 0, max(1, experience.token_counts()[0]))["loss"]
    finally:
        stage.learner.optimizer.zero_grad(set_to_none=True)
