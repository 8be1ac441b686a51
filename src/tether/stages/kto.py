"""Kahneman-Tversky optimisation: the policy learns from single responses that were found good or
bad, with no pairs.

The method is that of Ethayarajh et al. 2024 (https://arxiv.org/abs/2402.01306). A response's value
is its implicit reward seen from a reference point z0, saturating on both sides. The point z0 is the
KL of the policy to its reference. It is estimated on prompts with responses that belong to other
prompts.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from tether.algorithms.preference_losses import kto_loss
from tether.algorithms.transfer import to_device
from tether.core.protocols import Progress
from tether.core.rundir import RunDirectory
from tether.core.types import Feedback, Json, Metrics
from tether.data.batches import Cuts, cut_batches
from tether.data.chat import ChatEncoder, Encoded
from tether.data.prepare import (
    JudgedPrompt,
    Split,
    mismatched,
    prepare_feedback,
    sequences_of,
    verdicts_of,
)
from tether.models.trunk import Role
from tether.settings.supervised import KTOConfig
from tether.stages.learner.loop import plan_updates
from tether.stages.learner.ranks import ALONE, Ranks
from tether.stages.reference import Likelihoods
from tether.stages.supervised import Update, go_through, heldout, measure

RECOMMENDED_BALANCE = (1.0, 4 / 3)
"""Of λ_D n_D / λ_U n_U, by the paper's eq. 8."""
WATCHED = (
    "loss",
    "accuracy",
    "reward_desirable",
    "reward_undesirable",
    "kl_baseline",
    "mismatched",
)


class KTO:
    """Trains a policy role on single responses, each desirable or not, against a frozen reference.

    Args:
        reference: with reference_logprobs = "precomputed" it may run the policy's own untrained
            weights, and is dropped before training.
    """

    dropout = False

    def __init__(
        self,
        config: KTOConfig,
        policy: Role,
        reference: Role,
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
        self.weights = config.weights(1, 1)

    def update(self, judged: Sequence[JudgedPrompt]) -> Update[list[JudgedPrompt]]:
        """One update over all responses to some prompts; z0 belongs to the update as a whole, so it
        comes first.
        """
        baseline, num_mismatched = self.baseline(judged)
        micros = self.likelihoods.micro_batches(judged)
        num_responses = sum(len(j.responses) for j in judged)

        def metrics(rewards: list[list[float]]) -> Metrics:
            _, desirable = verdicts_of(list(chain(*micros)))
            means = rewards_by_class(list(chain(*rewards)), desirable)
            return {**means, "kl_baseline": baseline, "mismatched": num_mismatched}

        return Update(
            micros,
            partial(self.loss, baseline=baseline, num_responses=num_responses),
            metrics,
        )

    @property
    def _most(self) -> int:
        """Tokens of a prompt with a response to another one."""
        return min(self.config.max_length, self.encoder.context_length)

    @torch.no_grad()
    def baseline(self, judged: Sequence[JudgedPrompt]) -> tuple[float, int]:
        """z0, max(0, mean log ratio) of responses behind other prompts, in nats, and how many they
        are (0: z0 is unknown).
        """
        pairs = mismatched(judged, self._most)
        sequences = [pair for pair, _ in pairs]
        counts = torch.tensor([count for _, count in pairs], dtype=torch.float64)
        total = 0.0
        limit = self.likelihoods.document_tokens
        for cut in cut_batches(sequences, self.config.micro_batch_tokens, document_tokens=limit):
            ratios = self._log_ratios([sequences[i] for i in cut]).double().cpu()
            total += float(ratios @ counts[cut])
        return max(0.0, total / max(1.0, float(counts.sum()))), int(counts.sum())

    def loss(
        self,
        judged: Sequence[JudgedPrompt],
        baseline: float,
        num_responses: int,
    ) -> tuple[Tensor, Tensor]:
        """The loss of these prompts' responses over `num_responses`, and the reward beta × log
        ratio of each.
        """
        (places, desirable), beta = verdicts_of(judged), self.config.beta
        ratios = self._log_ratios(sequences_of(judged))
        ratios = ratios[to_device(torch.tensor(places), ratios.device)]
        labels = to_device(torch.tensor(desirable), ratios.device)
        z0 = ratios.new_full((), baseline)
        loss = kto_loss(ratios, labels, z0, beta=beta, denominator=num_responses, **self.weights)
        return loss, beta * ratios.detach()

    def _log_ratios(self, sequences: Sequence[Encoded]) -> Tensor:
        logprobs, _, reference = self.likelihoods(sequences)
        return logprobs.sum(-1) - reference

    def evaluate(self, judged: Sequence[JudgedPrompt]) -> Metrics:
        """Loss and rewards of held-out responses, as if all were one update."""
        return measure(self.update(judged), self.ranks)

    def train(
        self,
        rows: Sequence[Feedback],
        run: RunDirectory,
        progress: Progress | None = None,
    ) -> Json:
        """Train, or go on training, in `run`; returns the summary.

        Raises:
            DataError: nothing can be used, all responses are of one class, or all answer one
                prompt.
        """
        start = time.perf_counter()
        config = self.config
        split = prepare_feedback(rows, config, self.encoder)
        plan = _without_lone_prompts(
            plan_updates(len(split.train), config.prompts_per_update, config.epochs, config.seed),
        )
        self.likelihoods.begin(self._responses(split, plan), run.path / "reference.safetensors")
        balance = self._settle_weights(split.train)
        loop = go_through(self, split, run, progress, plan, watched=WATCHED)
        return {
            **heldout(self, split.test),
            **balance,
            "num_prompts": len(split.train),
            "num_heldout": sum(len(row.responses) for row in split.test),
            **split.counts,
            **loop.summary(start),
        }

    def _responses(
        self,
        split: Split[JudgedPrompt],
        plan: Sequence[Sequence[int]],
    ) -> Iterator[Encoded]:
        """All responses whose reference log-probabilities training and evaluation need."""
        yield from sequences_of((*split.train, *split.test))
        for update in (*([split.train[i] for i in numbers] for numbers in plan), split.test):
            yield from (pair for pair, _ in mismatched(update, self._most))

    def _settle_weights(self, train: Sequence[JudgedPrompt]) -> Metrics:
        """Take the weights for these responses; warn where the classes would not be balanced as the
        paper asks.
        """
        verdicts = [verdict for judged in train for verdict in judged.desirable]
        good = verdicts.count(True)
        bad = verdicts.count(False)
        self.weights = self.config.weights(good, bad)
        of_desirable, of_undesirable = self.weights.values()
        balance = of_desirable * good / (of_undesirable * bad)
        low, high = RECOMMENDED_BALANCE
        if not low - 1e-9 <= balance <= high + 1e-9:
            warnings.warn(
                f"kto: λ_D n_D / λ_U n_U is {balance:.3g} with {good} desirable and {bad} "
                "undesirable responses; the paper asks for 1 to 4/3. Unset kto.desirable_weight "
                "or kto.undesirable_weight to have it balanced.",
                stacklevel=3,
            )
        return {
            "num_desirable": good,
            "num_undesirable": bad,
            **self.weights,
            "class_balance": balance,
        }


def rewards_by_class(rewards: Sequence[float], desirable: Sequence[bool]) -> Metrics:
    """Mean rewards by class, and the share of all pairs across the classes in the right order (NaN
    without both).
    """
    classes = [
        [r for r, good in zip(rewards, desirable, strict=True) if good is kind]
        for kind in (True, False)
    ]
    means = [statistics.fmean(rewards) if rewards else math.nan for rewards in classes]
    return {
        "accuracy": separation(*classes),
        "reward_desirable": means[0],
        "reward_undesirable": means[1],
    }


def separation(above: Sequence[float], below: Sequence[float]) -> float:
    """The chance that a number of the first list is the larger one, ties half: the area under the
    ROC curve; NaN without both.
    """
    from scipy.stats import mannwhitneyu

    if not (above and below):
        return math.nan
    return (
        float(mannwhitneyu(above, below, method="asymptotic").statistic) / len(above) / len(below)
    )


def _without_lone_prompts(plan: Cuts) -> Cuts:
    """An update of one prompt, which has no other to be mismatched with, joins the one before
    it.
    """
    joined: Cuts = []
    for update in plan:
        if len(update) == 1:
            joined[-1] = joined[-1] + update
        else:
            joined.append(update)
    return joined
