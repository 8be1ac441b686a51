"""The process reward model: a head that judges every step of a solution at the step's last token.
The outcome model has the same code and one label at the end.

Lightman et al. 2023 (https://arxiv.org/abs/2305.20050), Uesato et al. 2022
(https://arxiv.org/abs/2211.14275); labels from roll-outs: Math-Shepherd
(https://arxiv.org/abs/2312.08935).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from tether.algorithms.process import right_probabilities, step_cross_entropy
from tether.core.errors import DataError
from tether.core.protocols import Progress
from tether.core.rundir import RunDirectory, write_json
from tether.core.types import Json, Metrics, StepLabels
from tether.data.batches import batches_for, cut_batches, make_batch
from tether.data.chat import ChatEncoder
from tether.data.prepare import Split, warn_without_held_out
from tether.data.sources import split_by_group
from tether.data.steps import Solution, StepEncoder, encode_solutions, step_states
from tether.evaluation.process import compare_with_chance
from tether.models.trunk import Role
from tether.settings.supervised import ProcessRewardConfig
from tether.stages.learner.ranks import ALONE, Ranks
from tether.stages.supervised import Update, go_through, measure

_LOG = logging.getLogger(__name__)


class ProcessRewardModeling:
    """Trains a role with a head of `config.outputs` numbers."""

    dropout = True

    def __init__(
        self,
        config: ProcessRewardConfig,
        role: Role,
        encoder: ChatEncoder,
        *,
        ranks: Ranks = ALONE,
    ) -> None:
        if role.head is None or role.head.outputs != config.outputs:
            raise ValueError(f"the role needs a head of {config.outputs} outputs")
        self.config = config
        self.role = role
        self.head = role.head
        self.ranks = ranks
        self.encoder = StepEncoder.of(config, encoder)

    def update(self, solutions: Sequence[Solution]) -> Update[list[Solution]]:
        """L = -(1/N) sum log p(label of a step | all before and in it), N the labels of the whole
        update.
        """
        start = time.perf_counter()
        num_targets = sum(s.num_targets for s in solutions)

        def loss(micro: list[Solution]) -> tuple[Tensor, Tensor]:
            logits = self._logits(micro)
            targets, labelled = self._targets(micro)
            if self.config.classes == 2:
                agree = (logits.detach() > 0) == (targets > 0.5)
            else:
                agree = logits.argmax(-1) == targets.argmax(-1)
            right = (agree & labelled).sum()
            return step_cross_entropy(logits, targets, labelled, denominator=num_targets), right

        def metrics(right: list[list[float]]) -> Metrics:
            rate = sum(len(s.sequence) for s in solutions) / (time.perf_counter() - start)
            return {
                "accuracy": sum(count for (count,) in right) / num_targets,
                "labels": num_targets,
                "tokens_per_second": rate,
            }

        cuts = cut_batches([s.sequence for s in solutions], self.config.micro_batch_tokens)
        return Update([[solutions[i] for i in cut] for cut in cuts], loss, metrics)

    def evaluate(self, solutions: Sequence[Solution]) -> Metrics:
        """Mean cross-entropy a label."""
        return {"loss": measure(self.update(solutions), self.ranks)["loss"]}

    @torch.no_grad()
    def probabilities(self, solutions: Sequence[Solution]) -> list[list[float]]:
        """For every judged step of every solution the probability that it is right.

        The outcome model judges whole solutions, so it scores each step as if the solution ended
        there.
        """
        if self.config.target == "process":
            return self._at_steps(solutions)
        prefixes = [self.encoder.prefix(s, k + 1) for s in solutions for k in s.judged]
        values = torch.zeros(len(prefixes), dtype=torch.float64)
        for cut, batch in batches_for(
            self.role,
            prefixes,
            self.encoder.encoder.pad_id,
            self.config.micro_batch_tokens,
        ):
            values[cut] = right_probabilities(self.role.scores(batch)).double().cpu()
        probabilities = iter(values.tolist())
        return [[next(probabilities) for _ in s.judged] for s in solutions]

    def report(
        self,
        solutions: Sequence[Solution],
        calibration: Sequence[Solution],
        run: RunDirectory,
    ) -> Json:
        """Step F1 and first-error F1 with their intervals, of the model and of chance; see
        `compare_with_chance`.

        Every judgement is written to the run's heldout.json.

        Args:
            calibration: solutions of other problems, on which thresholds are chosen.
        """
        right, labels = (
            [[bool(s.labels[k]) for k in s.judged] for s in part]
            for part in (solutions, calibration)
        )
        probabilities = self.probabilities(solutions)
        judged = zip(solutions, right, probabilities, strict=True)
        rows = [
            {"id": s.id, "problem": s.group, "right": r, "probabilities": p} for s, r, p in judged
        ]
        write_json(run.path / "heldout.json", rows)
        return compare_with_chance(
            right,
            probabilities,
            [s.group for s in solutions],
            (labels, self.probabilities(calibration)),
        )

    def train(
        self,
        rows: Sequence[StepLabels],
        run: RunDirectory,
        progress: Progress | None = None,
    ) -> Json:
        """Train, or go on training, in `run`; returns the summary with the evaluation on held-out
        problems.

        Raises:
            DataError: no solution can be used for training.
        """
        start = time.perf_counter()
        train, calibration, test, skipped = self.prepare(rows)
        split = Split(train, calibration, skipped)
        loop = go_through(self, split, run, progress, self.config.solutions_per_update)
        summary: Json = {
            "num_train": len(train),
            "num_calibration": len(calibration),
            "num_heldout": len(test),
            "num_heldout_problems": len({s.group for s in test}),
            "skipped": skipped,
        }
        train, calibration, test = (
            [s for s in part if s.judged] for part in (train, calibration, test)
        )
        if test and not (calibration or train):
            _LOG.warning("every judged solution is held out: there is none to choose thresholds on")
        elif test:
            summary["heldout"] = self.report(test, calibration or train, run)
        return {**summary, **loop.summary(start)}

    def prepare(
        self,
        rows: Sequence[StepLabels],
    ) -> tuple[list[Solution], list[Solution], list[Solution], dict[str, int]]:
        """Solutions to train on, to calibrate on and to report on, no problem in two of them, and
        why others were left out.
        """
        config = self.config
        solutions, skipped = encode_solutions(rows, self.encoder, config)
        rest, test = split_by_group(solutions, config.heldout_fraction, config.seed)
        train, calibration = split_by_group(rest, config.calibration_fraction, config.seed + 1)
        if not train:
            raise DataError(
                f"none of {len(rows)} solutions can be used for training: "
                f"{skipped or 'there are none'}",
            )
        warn_without_held_out(len(test), config.heldout_fraction, "solutions")
        return train, calibration, test, skipped

    def _logits(self, solutions: Sequence[Solution]) -> Tensor:
        """The head's numbers at each step's last token, solution by solution."""
        batch = make_batch([s.sequence for s in solutions], self.encoder.encoder.pad_id).to(
            self.role.device,
        )
        return self.head(self.role.hidden(batch)[step_states(batch, [s.ends for s in solutions])])

    def _at_steps(self, solutions: Sequence[Solution]) -> list[list[float]]:
        rows: dict[int, list[float]] = {}
        for cut in cut_batches([s.sequence for s in solutions], self.config.micro_batch_tokens):
            part = [solutions[i] for i in cut]
            probabilities = (
                right_probabilities(self._logits(part)).cpu().split([len(s.ends) for s in part])
            )
            rows |= {
                i: row[solutions[i].judged].tolist()
                for i, row in zip(cut, probabilities, strict=True)
            }
        return [rows[i] for i in range(len(solutions))]

    def _targets(self, solutions: Sequence[Solution]) -> tuple[Tensor, Tensor]:
        """The label of each step, and whether there is one."""
        classes = self.config.classes
        device = self.role.device
        flat = [target for s in solutions for target in s.targets]
        labelled = torch.tensor([target is not None for target in flat], device=device)
        targets = torch.tensor([target or 0.0 for target in flat], device=device)
        if classes > 2:
            targets = one_hot(targets.long(), classes).float()
        return targets, labelled
