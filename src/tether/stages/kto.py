"""Kahneman-Tversky optimisation: the policy learns from single responses that were found good or bad, with no pairs.

Ethayarajh et al. 2024 (https://arxiv.org/abs/2402.01306): a response's value is its implicit reward seen from a reference point
z0, saturating on both sides. z0 is the KL that the policy has come from its reference, estimated on prompts with responses that
belong to other prompts.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from tether.algorithms.preference_losses import kto_loss
from tether.core.rundir import RunDirectory
from tether.core.types import Comparison, Feedback
from tether.data.batches import cut_batches
from tether.data.chat import ChatEncoder, Encoded
from tether.data.comparisons import cut_rankings
from tether.data.feedback import Judged, mismatched, prepare_feedback, verdicts_of
from tether.learner.config import RATES, Rates, SupervisedConfig
from tether.learner.local import LocalLearner
from tether.learner.loop import SupervisedLoop, plan_updates
from tether.models.trunk import Role
from tether.stages.reference import Likelihoods, ReferenceTable

RECOMMENDED_BALANCE = (1.0, 4 / 3)
"""What the paper's eq. 8 asks of λ_D n_D / λ_U n_U."""


class KTOConfig(SupervisedConfig):
    """Settings of the stage; lengths are in tokens."""

    rates: ClassVar[Rates] = RATES["kto"]

    beta: float = Field(default=0.1, gt=0, description="strength of the tether")
    desirable_weight: float | None = Field(
        default=None, gt=0, description="λ_D; unset: such that both classes weigh the same, with 1 for the larger one"
    )
    undesirable_weight: float | None = Field(default=None, gt=0, description="λ_U; unset: likewise")
    reference_logprobs: Literal["each_update", "precomputed"] = Field(
        default="each_update",
        description="ask the reference along with the policy, or once before training, after which it can go",
    )
    epochs: int = Field(default=1, ge=1)
    prompts_per_update: int = Field(
        default=16, ge=2, description="all responses to a prompt stand in one update; z0 is estimated over the whole of it"
    )
    max_length: int = Field(default=1024, ge=8, description="longer responses are left out and counted")
    micro_batch_tokens: int = Field(default=2048, ge=8, description="padded size of a micro-batch")
    heldout_fraction: float = Field(default=0.1, ge=0, lt=1)
    evaluate_every: int = Field(default=0, ge=0, description="updates between evaluations; 0: only at the end")

    def weights(self, num_desirable: int, num_undesirable: int) -> tuple[float, float]:
        """(λ_D, λ_U) for so many responses of each class: what is set, and for the rest what balances it."""
        ratio, desirable, undesirable = num_undesirable / num_desirable, self.desirable_weight, self.undesirable_weight
        if desirable is None:
            desirable = max(1.0, ratio) if undesirable is None else undesirable * ratio
        return desirable, desirable / ratio if undesirable is None else undesirable


class KTO:
    """Trains a policy role on single responses, each desirable or not, against a frozen reference.

    Args:
        reference: a role, or a table of what one said about all the responses and mismatched pairs; with reference_logprobs =
            "precomputed" the role may run the policy's own untrained weights, and is let go before training.
    """

    def __init__(self, config: KTOConfig, policy: Role, reference: Role | ReferenceTable, encoder: ChatEncoder) -> None:
        if isinstance(reference, ReferenceTable) and config.reference_logprobs != "precomputed":
            raise ValueError("a table of the reference's log-probabilities needs reference_logprobs = 'precomputed'")
        self.config, self.policy, self.encoder = config, policy, encoder
        self.likelihoods = Likelihoods(policy, reference, encoder, config.micro_batch_tokens)
        self.weights = config.weights(1, 1)
        self.learner: LocalLearner | None = None

    def step(self, judged: list[Judged]) -> dict[str, float]:
        """One update over all responses to some prompts; z0 belongs to the update as a whole, so it comes first."""
        assert self.learner is not None
        baseline, num_mismatched = self.baseline(judged)
        num_responses = sum(len(j.responses) for j in judged)
        total, rewards, desirable = 0.0, [], []
        for micro in self._micro_batches(judged):
            loss, found = self.loss(micro, baseline, num_responses)
            self.learner.backward(loss)
            total += float(loss.detach())
            rewards += found
            desirable += verdicts_of(micro).desirable
        measured = {"loss": total, **described(rewards, desirable), "kl_baseline": baseline, "mismatched": num_mismatched}
        return {**measured, **self.learner.step()}

    @torch.no_grad()
    def baseline(self, judged: Sequence[Judged]) -> tuple[float, int]:
        """z0, max(0, mean log ratio) of responses behind other prompts, in nats, and how many they are (0: z0 is unknown)."""
        pairs = mismatched(judged, self.config.max_length)
        sequences, counts = [pair for pair, _ in pairs], torch.tensor([count for _, count in pairs], dtype=torch.float64)
        total, limit = 0.0, self.likelihoods.document_tokens
        for cut in cut_batches(sequences, self.config.micro_batch_tokens, document_tokens=limit):
            ratios = self._log_ratios([sequences[i] for i in cut]).double().cpu()
            total += float(ratios @ counts[cut])
        return max(0.0, total / max(1.0, float(counts.sum()))), int(counts.sum())

    def loss(self, judged: Sequence[Judged], baseline: float, num_responses: int) -> tuple[Tensor, list[float]]:
        """The loss of these prompts' responses over `num_responses`, and the reward beta × log ratio of each."""
        verdicts, beta = verdicts_of(judged), self.config.beta
        ratios = self._log_ratios([s for j in judged for s in j.sequences])[verdicts.responses]
        loss = kto_loss(
            ratios,
            torch.tensor(verdicts.desirable, device=ratios.device),
            ratios.new_tensor(baseline),
            beta=beta,
            desirable_weight=self.weights[0],
            undesirable_weight=self.weights[1],
            denominator=num_responses,
        )
        return loss, (beta * ratios.detach()).tolist()

    def _log_ratios(self, sequences: Sequence[Encoded]) -> Tensor:
        logprobs, _, reference = self.likelihoods(sequences)
        return logprobs.sum(-1) - reference

    def _micro_batches(self, judged: Sequence[Judged]) -> list[list[Judged]]:
        return cut_rankings(judged, self.config.micro_batch_tokens, document_tokens=self.likelihoods.document_tokens)

    @torch.no_grad()
    def evaluate(self, judged: Sequence[Judged]) -> dict[str, Any]:
        """Loss and rewards of held-out responses, as if all were one update."""
        baseline, num_mismatched = self.baseline(judged)
        num_responses, total = sum(len(j.responses) for j in judged), 0.0
        rewards, desirable = [], []
        for micro in self._micro_batches(judged):
            loss, found = self.loss(micro, baseline, num_responses)
            total += float(loss)
            rewards += found
            desirable += verdicts_of(micro).desirable
        return {"loss": total, **described(rewards, desirable), "kl_baseline": baseline, "mismatched": num_mismatched}

    def train(
        self,
        rows: Sequence[Feedback | Comparison],
        run: RunDirectory,
        progress: Callable[[int, int, Any], None] | None = None,
    ) -> dict[str, Any]:
        """Train, or go on training, in `run`; returns the summary.

        Raises:
            DataError: nothing can be used, all responses are of one class, or all answer one prompt.
        """
        start, config = time.perf_counter(), self.config
        train, test, skipped = prepare_feedback(
            rows,
            self.encoder,
            config.max_length,
            "kto.max_length",
            heldout_fraction=config.heldout_fraction,
            seed=config.seed,
        )
        self.likelihoods.without_dropout()
        plan = _without_lone_prompts(plan_updates(len(train), config.prompts_per_update, config.epochs, config.seed))
        if config.reference_logprobs == "precomputed" and isinstance(self.likelihoods.reference, Role):
            updates = [[train[i] for i in numbers] for numbers in plan]
            pairs = [pair for update in (*updates, test) for pair, _ in mismatched(update, config.max_length)]
            responses = [s for judged in (*train, *test) for s in judged.sequences]
            self.likelihoods.precompute(responses + pairs, run.path / "reference.safetensors")
        balance = self._settle_weights(train)
        self.learner = LocalLearner(self.policy.parameters(), config.optimizer_for(self.policy.adapter), len(plan))

        def evaluated() -> dict[str, float]:
            return {f"eval_{key}": value for key, value in self.evaluate(test).items()}

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
            **balance,
            "updates": len(plan),
            "num_prompts": len(train),
            "skipped": skipped,
            "seconds": run.seconds(start),
        }

    def _settle_weights(self, train: Sequence[Judged]) -> dict[str, float]:
        """Take the weights for these responses; warn where the classes would not be balanced as the paper asks."""
        verdicts = [verdict for judged in train for verdict in judged.desirable]
        good, bad = verdicts.count(True), verdicts.count(False)
        self.weights = self.config.weights(good, bad)
        balance, (low, high) = self.weights[0] * good / (self.weights[1] * bad), RECOMMENDED_BALANCE
        if not low - 1e-9 <= balance <= high + 1e-9:
            warnings.warn(
                f"kto: λ_D n_D / λ_U n_U is {balance:.3g} with {good} desirable and {bad} undesirable responses; the paper asks "
                "for 1 to 4/3. Unset kto.desirable_weight or kto.undesirable_weight to have it balanced.",
                stacklevel=3,
            )
        weights = {"desirable_weight": self.weights[0], "undesirable_weight": self.weights[1]}
        return {"num_desirable": good, "num_undesirable": bad, **weights, "class_balance": balance}


def described(rewards: Sequence[float], desirable: Sequence[bool]) -> dict[str, float]:
    """Mean rewards by class, and the share of all pairs across the classes in the right order (NaN without both)."""
    classes = [[r for r, good in zip(rewards, desirable, strict=True) if good is kind] for kind in (True, False)]
    means = [statistics.fmean(rewards) if rewards else math.nan for rewards in classes]
    return {"accuracy": separation(*classes), "reward_desirable": means[0], "reward_undesirable": means[1]}


def separation(above: Sequence[float], below: Sequence[float]) -> float:
    """The chance that a number of the first list is the larger one, ties half: the area under the ROC curve; NaN without both."""
    ordered = torch.tensor(sorted(below), dtype=torch.float64)
    values = torch.tensor(above, dtype=torch.float64)
    smaller, not_larger = (torch.searchsorted(ordered, values, right=right) for right in (False, True))
    return float((smaller + not_larger).double().mean() / (2 * len(below))) if len(above) and len(below) else math.nan


def _without_lone_prompts(plan: list[list[int]]) -> list[list[int]]:
    """An update of one prompt, which has no other to be mismatched with, joins the one before it."""
    joined: list[list[int]] = []
    for update in plan:
        if len(update) == 1:
            joined[-1] = joined[-1] + update
        else:
            joined.append(update)
    return joined
