"""The reward model: a scalar head on a trunk, trained on comparisons under the Bradley-Terry model;
and several together.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import chain, combinations

import torch
from torch import Tensor

from tether.algorithms.preference_losses import (
    bradley_terry_loss,
    centering_penalty,
    length_disentangling_loss,
)
from tether.algorithms.reward_ensembles import combine_members, spread_of_members
from tether.algorithms.transfer import to_device
from tether.core.errors import TrainingError
from tether.core.protocols import Progress, now_doing
from tether.core.rundir import RunDirectory
from tether.core.types import Comparison, Json, Metrics
from tether.data.batches import make_batch
from tether.data.chat import ChatEncoder, Encoded
from tether.data.prepare import (
    Pairs,
    Ranking,
    Split,
    cut_rankings,
    encode_comparisons,
    encoded_split,
    limit_of,
    num_pairs,
    pair_counts,
    pairs_of,
    sequences_of,
)
from tether.evaluation.calibration import expected_calibration_error, reliability_curve
from tether.evaluation.winrate import correlation, pairwise_accuracy, share_in_order
from tether.models.heads import ScalarHead
from tether.models.trunk import Role
from tether.settings.reward import RewardConfig
from tether.settings.rewards import Combine
from tether.stages.frozen_layers import FrozenStates
from tether.stages.learner.ranks import ALONE, Ranks
from tether.stages.supervised import Update, go_through

CENTERED = 32
"""Training prompts whose responses centre the scores."""


class RewardModeling:
    """Trains a role with a scalar head; afterwards its scores have mean zero on responses of the
    first training prompts.

    Args:
        order_seed: of the order of the training rows; unset: the config's seed, which always
            decides what is held out.
    """

    dropout = True

    def __init__(
        self,
        config: RewardConfig,
        role: Role,
        encoder: ChatEncoder,
        *,
        order_seed: int | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.config = config
        self.role = role
        self.encoder = encoder
        self.ranks = ranks
        self.order_seed = order_seed
        self.frozen: FrozenStates | None = None

    def update(self, rankings: Sequence[Ranking]) -> Update[list[Ranking]]:
        """L = -(1/P) sum log sigma(r_chosen - r_rejected - margin), P the pairs of the update.

        With soft or smoothed labels, a term of the sum is p log sigma(d) + (1 - p) log sigma(-d).
        Each response is scored once, for all of its pairs (InstructGPT,
        https://arxiv.org/abs/2203.02155). ODIN's terms give their gradient alone: the loss stays
        that of the ranking, and an empty micro-batch has the heads' overlap.
        """
        micros = self.micro_batches(rankings)
        count = num_pairs(rankings)
        weight = self.config.disentangle_length
        slopes: dict[tuple[int, ...], Tensor] = {}
        overlap = torch.zeros(())
        if weight:
            slopes = self._length_slopes(micros)
            quality, length = self.head.linear.weight
            overlap = (quality @ length).abs()  # descended, the heads read different directions

        def loss(micro: list[Ranking]) -> tuple[Tensor, Tensor]:
            if not micro:
                return _gradient_alone(weight * overlap), overlap.new_zeros(0)
            sequences = sequences_of(micro)
            pairs = pairs_of(micro)
            heads = self.heads(sequences)
            sides = to_device(torch.tensor([pairs.chosen, pairs.rejected]), heads.device)
            chosen, rejected = (heads.sum(-1)[side] for side in sides)
            total = self._ranking_loss(chosen, rejected, pairs, count)
            if slopes:
                total = total + _gradient_alone(
                    (heads * torch.stack([slopes[s.ids] for s in sequences])).sum(),
                )
            return total, chosen - rejected

        def metrics(measured: list[list[float]]) -> Metrics:
            leads = list(chain(*measured))
            labels = pairs_of(list(chain(*micros))).probability
            heads = {"head_overlap": float(overlap.detach())} if weight else {}
            return {
                "accuracy": share_in_order(leads, labels),
                "margin": statistics.fmean(leads),
                **heads,
            }

        return Update([*micros, []] if weight else micros, loss, metrics)

    def _ranking_loss(
        self,
        chosen: Tensor,
        rejected: Tensor,
        pairs: Pairs,
        num_pairs: int,
    ) -> Tensor:
        config = self.config
        numbers = torch.tensor([pairs.probability, pairs.margin], dtype=chosen.dtype)
        probability, given_margin = to_device(numbers, chosen.device)
        labels = (1 - config.label_smoothing) * probability + config.label_smoothing * (
            1 - probability
        )
        margin = given_margin if config.use_margin else None
        loss = bradley_terry_loss(
            chosen,
            rejected,
            probability=labels,
            margin=margin,
            denominator=num_pairs,
        )
        return (
            loss + config.centering * centering_penalty(chosen, rejected, denominator=num_pairs)
            if config.centering
            else loss
        )

    def _length_slopes(self, micros: Sequence[list[Ranking]]) -> dict[tuple[int, ...], Tensor]:
        """By response: the derivative by its two scores of the loss that drives quality and length
        apart.

        A correlation is no sum over micro-batches. So all responses are scored without a gradient
        first, and the derivative is then the weight of a score in its own micro-batch
        (https://arxiv.org/abs/2101.06983).
        """
        sequences = [s for micro in micros for s in sequences_of(micro)]
        with torch.no_grad():
            heads = torch.cat([self.heads(sequences_of(micro)) for micro in micros])
        scores = heads.double().requires_grad_(True)
        lengths = scores.new_tensor([s.num_trained for s in sequences])
        loss = length_disentangling_loss(scores[:, 0], scores[:, 1], lengths)
        (slopes,) = torch.autograd.grad(self.config.disentangle_length * loss, scores)
        # equal texts weigh alike
        return {s.ids: slope for s, slope in zip(sequences, slopes.to(heads), strict=True)}

    @torch.no_grad()
    def scores(self, rankings: Sequence[Ranking]) -> list[list[float]]:
        """The score of every response of every ranking."""
        scored: dict[tuple[int, ...], float] = {}
        for sequences in map(sequences_of, self.micro_batches(rankings)):
            values = self.heads(sequences)[:, 0].tolist()
            for sequence, value in zip(sequences, values, strict=True):
                scored[sequence.ids] = value
        return [[scored[s.ids] for s in ranking.sequences] for ranking in rankings]

    def evaluate(self, rankings: Sequence[Ranking], num_ties: int = 0) -> Json:
        """Pairwise accuracy with its interval over prompts, loss, margins, calibration, correlation
        with length.

        A label's own probability p counts throughout. The loss is -p log σ(d) - (1 - p) log σ(-d).
        σ(|d|) is compared with the label's probability of the side that is ahead. A pair of p = 1/2
        is in no accuracy.
        """
        now_doing(f"evaluating on {len(rankings)} prompts")
        scores = [score for row in self.scores(rankings) for score in row]
        pairs = pairs_of(rankings)
        chosen, rejected = ([scores[i] for i in side] for side in (pairs.chosen, pairs.rejected))
        leads = [(c - r, p) for c, r, p in zip(chosen, rejected, pairs.probability, strict=True)]
        confidence = [1 / (1 + math.exp(-abs(d))) for d, _ in leads]
        right = [0.5 if d == 0 else p if d > 0 else 1 - p for d, p in leads]
        return {
            "loss": statistics.fmean(
                math.log1p(math.exp(-abs(d))) + max(0.0, -d) + (1 - p) * d for d, p in leads
            ),
            "accuracy": pairwise_accuracy(
                chosen,
                rejected,
                pairs.groups,
                probabilities=pairs.probability,
            ).as_dict(),
            "ties": num_ties,
            "margin_mean": statistics.fmean(d for d, _ in leads),
            "calibration_error": expected_calibration_error(confidence, right),
            "reliability": reliability_curve(confidence, right),
            "length_correlation": correlation(
                scores,
                [s.num_trained for s in sequences_of(rankings)],
            ),
            "score_mean": statistics.fmean(scores),
            "score_std": statistics.pstdev(scores),
        }

    def train(
        self,
        comparisons: Sequence[Comparison],
        run: RunDirectory,
        progress: Progress | None = None,
    ) -> Json:
        """Train, or go on training, in `run`; returns the summary with the evaluation on held-out
        prompts.

        Raises:
            DataError: no comparison can be used.
        """
        return self.fit(self.split(comparisons), run, progress)

    def split(self, comparisons: Sequence[Comparison]) -> Split[Ranking]:
        """Comparisons encoded and parted by prompt; the same for every order of training."""
        return encoded_split(comparisons, self.config, self.encoder, "reward")

    def fit(
        self,
        split: Split[Ranking],
        run: RunDirectory,
        progress: Progress | None = None,
    ) -> Json:
        """`train` on rows that are already encoded."""
        start = time.perf_counter()
        train = split.train
        config = self.config
        if self.order_seed is not None:
            config = config.model_copy(update={"seed": self.order_seed})
        if config.keep_states_gb and self.frozen is None:
            self.frozen = FrozenStates(
                self.role,
                sequences_of(train),
                self.encoder.pad_id,
                config.micro_batch_tokens,
                config.keep_states_gb,
            )
        loop = go_through(self, split, run, progress, config.prompts_per_update, config)
        if config.disentangle_length:
            self.role.head = self.head.only(0)
        self.center(train)
        return {
            **(heldout_summary(self.evaluate(split.test)) if split.test else {}),
            "heldout_ties": split.heldout_ties,
            **pair_counts(split),
            **split.counts,
            **({"kept_states_gb": self.frozen.gigabytes} if self.frozen else {}),
            **loop.summary(start),
        }

    def center(self, rankings: Sequence[Ranking]) -> None:
        """Set the head's offset so that the mean score of (some of) these responses is zero."""
        self._shift(rankings[:CENTERED])

    def standardize(self, rankings: Sequence[Ranking]) -> None:
        """Set the head's offset and scale so that scores of (some of) these responses have mean 0
        and deviation 1.

        Differences of scores are no longer log-odds then.

        Raises:
            TrainingError: all scores are the same.
        """
        deviation = statistics.pstdev(self._shift(rankings[:128]))
        if not deviation > 0:
            raise TrainingError(
                "a reward model gives all responses the same score. Train longer, "
                "or at a higher learning rate.",
            )
        self.head.scale /= deviation

    def _shift(self, rankings: Sequence[Ranking]) -> list[float]:
        """Take the mean score of these responses off all scores; the scores as they were."""
        scores = [score for row in self.scores(rankings) for score in row]
        self.head.offset += statistics.fmean(scores) / float(self.head.scale)
        return scores

    def rankings(self, comparisons: Sequence[Comparison]) -> tuple[list[Ranking], dict[str, int]]:
        """Comparisons gathered by prompt and encoded; what cannot be used is counted by reason."""
        limit = limit_of(self.encoder, self.config, "reward")
        return encode_comparisons(comparisons, self.encoder, limit)

    def micro_batches(self, rankings: Sequence[Ranking]) -> list[list[Ranking]]:
        """Rankings that go through the model together."""
        budget = self.config.micro_batch_tokens
        return cut_rankings(rankings, budget, document_tokens=self.role.document_tokens(budget))

    @property
    def head(self) -> ScalarHead:
        """The role's head."""
        assert self.role.head is not None
        return self.role.head

    def heads(self, sequences: Sequence[Encoded]) -> Tensor:
        """(S, outputs) the score of quality, and while length is disentangled that of length."""
        role = self.role
        limit = role.document_tokens(self.config.micro_batch_tokens)
        batch = make_batch(sequences, self.encoder.pad_id, document_tokens=limit).to(role.device)
        states = self.frozen.of(sequences, batch) if self.frozen else None
        return role.scores(batch, states).view(len(sequences), -1)


def heldout_summary(evaluation: Json) -> Json:
    """An evaluation as a summary has it, where loss, accuracy and ties are those of held-out
    rows.
    """
    names = {"loss": "heldout_loss", "accuracy": "heldout_accuracy", "ties": "heldout_ties"}
    return {names.get(key, key): value for key, value in evaluation.items()}


def _gradient_alone(value: Tensor) -> Tensor:
    """Zero, with the gradient of `value`."""
    return value - value.detach()


class Distillation(RewardModeling):
    """A reward model that learns the scores that others together give each response, instead of the
    labels.

    L = (1/R) sum (r - t)^2 over the R responses of an update, t the teachers' score. As Fisch et
    al. 2024 (https://arxiv.org/abs/2405.19316) distil a reward, of single responses rather than of
    differences.
    """

    targets: Mapping[tuple[int, ...], float]
    """The teachers' score of each sequence that is trained on, by its token ids."""

    def taught(
        self,
        teachers: Sequence[RewardModeling],
        rankings: Sequence[Ranking],
        combine: Combine,
    ) -> None:
        """Ask the teachers, once."""
        together = combine_members(_table(teachers, rankings), combine).tolist()
        self.targets = dict(zip((s.ids for s in sequences_of(rankings)), together, strict=True))

    def update(self, rankings: Sequence[Ranking]) -> Update[list[Ranking]]:
        """One update towards the teachers' scores."""
        micros = self.micro_batches(rankings)
        count = sum(len(r.sequences) for r in rankings)

        def loss(micro: list[Ranking]) -> tuple[Tensor, Tensor]:
            sequences = sequences_of(micro)
            pairs = pairs_of(micro)
            scores = self.heads(sequences)[:, 0]
            targets = to_device(
                torch.tensor([self.targets[s.ids] for s in sequences], dtype=scores.dtype),
                scores.device,
            )
            chosen, rejected = to_device(
                torch.tensor([pairs.chosen, pairs.rejected]),
                scores.device,
            )
            return (scores - targets).square().sum() / count, scores[chosen] - scores[rejected]

        labels = pairs_of(list(chain(*micros))).probability
        return Update(
            micros,
            loss,
            lambda leads: {"accuracy": share_in_order(list(chain(*leads)), labels)},
        )

    def center(self, rankings: Sequence[Ranking]) -> None:
        """Nothing: its scores are on its teachers' scale."""


def _table(members: Sequence[RewardModeling], rankings: Sequence[Ranking]) -> Tensor:
    """(members, responses) float64 scores."""
    rows = [[score for row in member.scores(rankings) for score in row] for member in members]
    return torch.tensor(rows, dtype=torch.float64)


def evaluate_members(
    members: Sequence[RewardModeling],
    rankings: Sequence[Ranking],
    num_ties: int = 0,
) -> Json:
    """Pairwise accuracy of the mean of standardized scores and of each member, and how far the
    members differ.

    `spread` is the mean over responses of the members' standard deviation; `correlation` is
    Pearson's between the scores of two members, over all pairs of members.
    """
    table = _table(members, rankings)
    pairs = pairs_of(rankings)
    rows = table.tolist()
    together = combine_members(table).tolist()

    def accuracy(scores: Sequence[float]) -> Mapping[str, object]:
        chosen, rejected = ([scores[i] for i in side] for side in (pairs.chosen, pairs.rejected))
        return pairwise_accuracy(
            chosen,
            rejected,
            pairs.groups,
            probabilities=pairs.probability,
        ).as_dict()

    pearson = [correlation(a, b)["pearson"] for a, b in combinations(rows, 2)]
    return {
        "accuracy": accuracy(together),
        "ties": num_ties,
        "length_correlation": correlation(
            together,
            [s.num_trained for s in sequences_of(rankings)],
        ),
        "score_mean": statistics.fmean(together),
        "score_std": statistics.pstdev(together),
        "member_accuracy": [accuracy(row)["value"] for row in rows],
        "spread": float(spread_of_members(table).mean()),
        "correlation": {"mean": statistics.fmean(pearson), "lowest": min(pearson)},
    }
