"""The reward model: a scalar head on a trunk, trained on comparisons under the Bradley-Terry model."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from tether.algorithms.preference_losses import bradley_terry_loss, centering_penalty, length_disentangling_loss
from tether.core.errors import TrainingError
from tether.core.rundir import RunDirectory
from tether.core.types import Comparison
from tether.data.batches import make_batch
from tether.data.chat import ChatEncoder, Encoded
from tether.data.comparisons import Pairs, Ranking, by_votes, cut_rankings, encode_comparisons, pairs_of, prepare_comparisons
from tether.evaluation.calibration import expected_calibration_error, reliability_curve
from tether.evaluation.winrate import correlation, pairwise_accuracy, share_in_order
from tether.learner.config import RATES, Rates, SupervisedConfig
from tether.learner.local import LocalLearner
from tether.learner.loop import SupervisedLoop, plan_updates
from tether.models.trunk import Role
from tether.stages.kept_states import KeptStates


class RewardConfig(SupervisedConfig):
    """Settings of the stage; lengths are in tokens."""

    rates: ClassVar[Rates] = RATES["reward"]

    epochs: int = Field(default=1, ge=1, description="more than one usually overfits the annotators")
    prompts_per_update: int = Field(default=4, ge=1, description="all pairs of a prompt stand in one update")
    max_length: int = Field(default=1024, ge=8, description="longer responses are left out and counted")
    micro_batch_tokens: int = Field(
        2048, ge=8, description="padded size of a micro-batch; a prompt's responses are never separated"
    )
    use_margin: bool = Field(default=False, description="demand the label's margin between the scores")
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="share of labels that are taken to be the wrong way round"
    )
    labels: Literal["given", "votes"] = Field(
        default="given", description="votes: a label is the share of its annotators who say so, ties counting half"
    )
    disentangle_length: float = Field(
        default=0.0,
        ge=0,
        description="train a second head for length beside that of quality and keep the latter (ODIN, which has 1.0)",
    )
    centering: float = Field(
        default=0.0, ge=0, description="weight of (r_chosen + r_rejected)^2, https://arxiv.org/abs/2312.09244"
    )
    head_dropout: float = Field(default=0.0, ge=0, lt=1)
    heldout_fraction: float = Field(default=0.1, ge=0, lt=1)
    keep_states_gb: float = Field(
        default=0.0,
        ge=0,
        description="GB for what the layers below the first adapter make of the training rows, computed once for all epochs and "
        "members; 0: in every epoch",
    )
    evaluate_every: int = Field(default=0, ge=0, description="updates between evaluations; 0: only at the end")

    @property
    def outputs(self) -> int:
        """Of the head while it is trained: quality, and perhaps length."""
        return 2 if self.disentangle_length else 1

    @model_validator(mode="after")
    def _check_passes(self) -> RewardConfig:
        if self.disentangle_length and self.head_dropout:
            raise ValueError(
                "disentangle_length scores every response twice, and with head_dropout they would differ: leave one out"
            )
        return self


class Split(NamedTuple):
    """What to train on and what to judge by, the reasons for what was left out, and the held-out ties."""

    train: list[Ranking]
    test: list[Ranking]
    skipped: dict[str, int]
    heldout_ties: int


class RewardModeling:
    """Trains a role with a scalar head; afterwards its scores have mean zero on responses of the first training prompts.

    Args:
        order_seed: of the order of the training rows; unset: the config's seed, which always decides what is held out.
    """

    def __init__(self, config: RewardConfig, role: Role, encoder: ChatEncoder, *, order_seed: int | None = None) -> None:
        self.config = config
        self.role = role
        self.encoder = encoder
        self.order_seed = config.seed if order_seed is None else order_seed
        self.learner: LocalLearner | None = None
        self._known: dict[tuple[int, ...], float] = {}
        self.kept: KeptStates | None = None

    def step(self, rankings: list[Ranking]) -> dict[str, float]:
        """One update: L = -(1/P) sum log sigma(r_chosen - r_rejected - margin), P the pairs of the update; with soft or smoothed
        labels, p log sigma(d) + (1 - p) log sigma(-d).

        Each response is scored once however many pairs it stands in (InstructGPT, https://arxiv.org/abs/2203.02155).
        """
        assert self.learner is not None
        self._known.clear()
        num_pairs = sum(len(r.chosen) for r in rankings)
        apart = self._apart(rankings) if self.config.disentangle_length else {}
        total, differences, labels = 0.0, [], []
        for micro in self._micro_batches(rankings):
            sequences = [s for ranking in micro for s in ranking.sequences]
            raw = self._raw(sequences)
            scores = raw.sum(-1) if apart else raw
            pairs = pairs_of(micro)
            chosen, rejected = scores[pairs.chosen], scores[pairs.rejected]
            loss = self._loss(chosen, rejected, pairs, num_pairs)
            total += float(loss.detach())
            if apart:
                loss = loss + (raw * torch.stack([apart[s.ids] for s in sequences]).to(raw)).sum()
            self.learner.backward(loss)
            differences += (chosen - rejected).detach().tolist()
            labels += pairs.probability
        return {
            "loss": total,
            "accuracy": share_in_order(differences, labels),
            "margin": statistics.fmean(differences),
            **self._orthogonal(),
            **self.learner.step(),
        }

    def _loss(self, chosen: Tensor, rejected: Tensor, pairs: Pairs, num_pairs: int) -> Tensor:
        config, probability = self.config, chosen.new_tensor(pairs.probability)
        smoothing = config.label_smoothing
        loss = bradley_terry_loss(
            chosen,
            rejected,
            probability=(1 - smoothing) * probability + smoothing * (1 - probability),
            margin=chosen.new_tensor(pairs.margin) if config.use_margin else None,
            denominator=num_pairs,
        )
        if config.centering:
            loss = loss + config.centering * centering_penalty(chosen, rejected, denominator=num_pairs)
        return loss

    def _apart(self, rankings: list[Ranking]) -> dict[tuple[int, ...], Tensor]:
        """By response: what its two scores weigh in the loss that drives quality and length apart.

        A correlation is no sum over micro-batches. So all responses are scored without a gradient first, and the loss's
        derivative by each score is then the weight of that score in its own micro-batch (https://arxiv.org/abs/2101.06983).
        """
        micros = self._micro_batches(rankings)
        sequences = [s for micro in micros for ranking in micro for s in ranking.sequences]
        with torch.no_grad():
            raw = torch.cat([self._raw([s for ranking in micro for s in ranking.sequences]) for micro in micros])
        raw = raw.double().requires_grad_(True)
        lengths = raw.new_tensor([s.num_trained for s in sequences])
        loss = self.config.disentangle_length * length_disentangling_loss(raw[:, 0], raw[:, 1], lengths)
        (weights,) = torch.autograd.grad(loss, raw)
        found: dict[tuple[int, ...], Tensor] = {}
        for sequence, weight in zip(sequences, weights, strict=True):
            found[sequence.ids] = weight  # the same text twice in an update weighs alike
        return found

    def _orthogonal(self) -> dict[str, float]:
        """Descend |w_Q · w_L| too, so that the two heads read different directions."""
        if not self.config.disentangle_length:
            return {}
        assert self.role.head is not None and self.learner is not None
        quality, length = self.role.head.linear.weight
        overlap = (quality @ length).abs()
        self.learner.backward(self.config.disentangle_length * overlap)
        return {"head_overlap": float(overlap.detach())}

    @torch.no_grad()
    def scores(self, rankings: Sequence[Ranking]) -> list[list[float]]:
        """The score of every response of every ranking; what was scored since the last update is not scored again."""
        missing = [r for r in rankings if any(s.ids not in self._known for s in r.sequences)]
        for micro in self._micro_batches(missing):
            sequences = [s for ranking in micro for s in ranking.sequences]
            self._known.update(zip((s.ids for s in sequences), self._scores(sequences).tolist(), strict=True))
        return [[self._known[s.ids] for s in ranking.sequences] for ranking in rankings]

    def evaluate(self, rankings: Sequence[Ranking], num_ties: int = 0) -> dict[str, Any]:
        """Pairwise accuracy with its interval over prompts, loss, margins, calibration, correlation with length.

        A label's own probability p counts throughout: the loss is -p log σ(d) - (1 - p) log σ(-d), σ(|d|) is compared with the
        label's probability of the side that is ahead, and a pair of p = 1/2 is in no accuracy.
        """
        chosen, rejected, groups, scores, lengths, labels = [], [], [], [], [], []
        for ranking, values in zip(rankings, self.scores(rankings), strict=True):
            scores += values
            lengths += [s.num_trained for s in ranking.sequences]
            chosen += [values[i] for i in ranking.chosen]
            rejected += [values[i] for i in ranking.rejected]
            groups += [ranking.group] * len(ranking.chosen)
            labels += ranking.probability
        differences = [c - r for c, r in zip(chosen, rejected, strict=True)]
        confidence = [1 / (1 + math.exp(-abs(d))) for d in differences]
        right = [0.5 if d == 0 else p if d > 0 else 1 - p for d, p in zip(differences, labels, strict=True)]
        loss = [math.log1p(math.exp(-abs(d))) + max(0.0, -d) + (1 - p) * d for d, p in zip(differences, labels, strict=True)]
        return {
            "loss": statistics.fmean(loss),
            "accuracy": pairwise_accuracy(chosen, rejected, groups, probabilities=labels).as_dict(),
            "ties": num_ties,
            "margin_mean": statistics.fmean(differences),
            "calibration_error": expected_calibration_error(confidence, right),
            "reliability": reliability_curve(confidence, right),
            "length_correlation": correlation(scores, lengths),
            "score_mean": statistics.fmean(scores),
            "score_std": statistics.pstdev(scores),
        }

    def train(
        self, comparisons: Sequence[Comparison], run: RunDirectory, progress: Callable[[int, int, Any], None] | None = None
    ) -> dict[str, Any]:
        """Train, or go on training, in `run`; returns the summary with the evaluation on held-out prompts.

        Raises:
            DataError: no comparison can be used.
        """
        return self.fit(self.split(comparisons), run, progress)

    def split(self, comparisons: Sequence[Comparison]) -> Split:
        """Comparisons encoded and parted by prompt; the same for every order of training."""
        config = self.config
        return Split(
            *prepare_comparisons(
                by_votes(comparisons) if config.labels == "votes" else comparisons,
                self.encoder,
                config.max_length,
                "reward.max_length",
                heldout_fraction=config.heldout_fraction,
                seed=config.seed,
            )
        )

    def fit(self, split: Split, run: RunDirectory, progress: Callable[[int, int, Any], None] | None = None) -> dict[str, Any]:
        """`train` on rows that are already encoded."""
        start, config = time.perf_counter(), self.config
        train, test, skipped, heldout_ties = split
        plan = plan_updates(len(train), config.prompts_per_update, config.epochs, self.order_seed)
        self.learner = LocalLearner(self.role.parameters(), config.optimizer_for(self.role.adapter), len(plan))

        def evaluated() -> dict[str, float]:
            self.role.train_mode(False)
            result = self.evaluate(test)
            self.role.train_mode(True)
            return {"eval_loss": result["loss"], "eval_accuracy": result["accuracy"]["value"]}

        loop = SupervisedLoop(
            run,
            self.learner,
            self.step,
            config,
            evaluate=evaluated if test and config.evaluate_every else None,
            evaluate_every=config.evaluate_every,
            progress=progress,
            seed=self.order_seed,
        )
        if config.keep_states_gb and self.kept is None:
            self.kept = self._keep(train)
        self.role.train_mode(True)
        loop.train(train, plan)
        self.role.train_mode(False)
        if config.disentangle_length:
            assert self.role.head is not None
            self.role.head = self.role.head.only(0)
            self._known.clear()
        self.center(train)
        summary = (
            {f"heldout_{k}" if k in ("loss", "accuracy", "ties") else k: v for k, v in self.evaluate(test).items()}
            if test
            else {}
        )
        metrics = run.metrics()
        recent = [row["loss"] for row in metrics[-10:]]
        return {
            "train_loss": statistics.fmean(recent),
            **summary,
            "heldout_ties": heldout_ties,
            "updates": len(plan),
            "num_prompts": len(train),
            "num_pairs": sum(len(r.chosen) for r in train),
            "num_heldout_pairs": sum(len(r.chosen) for r in test),
            "skipped": skipped,
            "seconds": run.seconds(start),
        }

    def center(self, rankings: Sequence[Ranking], limit: int = 32) -> None:
        """Set the head's offset so that the mean score of (some of) these responses is zero."""
        assert self.role.head is not None
        values = [v for row in self.scores(rankings[:limit]) for v in row]
        self.role.head.offset += statistics.fmean(values) / float(self.role.head.scale)
        self._known.clear()

    def standardize(self, rankings: Sequence[Ranking], limit: int = 128) -> None:
        """Set the head's offset and scale so that scores of (some of) these responses have mean 0 and deviation 1.

        Differences of scores are no longer log-odds then.

        Raises:
            TrainingError: all scores are the same.
        """
        assert self.role.head is not None
        head, values = self.role.head, [v for row in self.scores(rankings[:limit]) for v in row]
        deviation = statistics.pstdev(values)
        if not deviation > 0:
            raise TrainingError(
                "a reward model gives every response the same score. Train longer, or with a higher learning rate."
            )
        head.offset += statistics.fmean(values) / float(head.scale)
        head.scale /= deviation
        self._known.clear()

    def rankings(self, comparisons: Sequence[Comparison]) -> tuple[list[Ranking], dict[str, int]]:
        """Comparisons gathered by prompt and encoded; what cannot be used is counted by reason."""
        return encode_comparisons(comparisons, self.encoder, self.config.max_length, "reward.max_length")

    def _micro_batches(self, rankings: Sequence[Ranking]) -> list[list[Ranking]]:
        return cut_rankings(rankings, self.config.micro_batch_tokens, document_tokens=self._document_tokens)

    @property
    def _document_tokens(self) -> int:
        return self.role.document_tokens(self.config.micro_batch_tokens)

    def _scores(self, sequences: list[Encoded]) -> Tensor:
        raw = self._raw(sequences)
        return raw if raw.dim() == 1 else raw[:, 0]

    def _raw(self, sequences: list[Encoded]) -> Tensor:
        """(S,) scores; while length is disentangled (S, 2) of quality and of length."""
        batch = make_batch(sequences, self.encoder.pad_id, document_tokens=self._document_tokens).to(self.role.device)
        return self.role.scores(batch, self.kept.of(sequences, batch) if self.kept else None)

    def _keep(self, train: Sequence[Ranking]) -> KeptStates:
        config = self.config
        return KeptStates(
            self.role,
            [s for ranking in train for s in ranking.sequences],
            self.encoder.pad_id,
            micro_batch_tokens=config.micro_batch_tokens,
            gigabytes=config.keep_states_gb,
            option="reward.keep_states_gb",
        )
