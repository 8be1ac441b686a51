"""The process reward model: a head that judges every step of a solution at the step's last token; and the outcome model, by the
same code with one label at the end.

Lightman et al. 2023 (https://arxiv.org/abs/2305.20050), Uesato et al. 2022 (https://arxiv.org/abs/2211.14275); labels from
roll-outs: Math-Shepherd (https://arxiv.org/abs/2312.08935).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import one_hot

from tether.algorithms.process import right_probabilities, step_cross_entropy
from tether.core.errors import DataError
from tether.core.rundir import RunDirectory, write_json
from tether.core.types import StepLabels
from tether.data.batches import cut_batches, make_batch
from tether.data.chat import ChatEncoder, Encoded
from tether.data.packing import cut_by_tokens
from tether.data.sources import split_by_group
from tether.data.steps import Solution, StepEncoder, branching_batch, branching_length, encode_solutions, step_states
from tether.evaluation.process import compare_with_chance
from tether.learner.config import RATES, Rates, SupervisedConfig
from tether.learner.local import LocalLearner
from tether.learner.loop import SupervisedLoop, plan_updates
from tether.models.trunk import Role


class ProcessRewardConfig(SupervisedConfig):
    """Settings of the stage; lengths are in tokens."""

    rates: ClassVar[Rates] = RATES["process"]

    target: Literal["process", "outcome"] = Field(
        "process", description="a label at every step, or one at the last: whether all steps are right"
    )
    delimiters: tuple[str, ...] = Field(
        ("\n\n",), min_length=1, description="what ends a step; the first stands between the steps of labelled solutions"
    )
    classes: Literal[2, 3] = Field(2, description="right or wrong, or PRM800K's ratings -1, 0, 1 in label_column")
    label_column: str = Field(
        "", description="metadata column with a target a step: a probability (Math-Shepherd) or a rating; empty: right or wrong"
    )
    problem_column: str = Field(
        "", description="metadata column that names the problem, whose solutions are never split; empty: the prompt"
    )
    epochs: int = Field(default=1, ge=1)
    solutions_per_update: int = Field(default=16, ge=1)
    max_length: int = Field(default=1024, ge=8, description="longer solutions are left out and counted")
    micro_batch_tokens: int = Field(default=2048, ge=8, description="padded size of a micro-batch")
    head_dropout: float = Field(default=0.0, ge=0, lt=1)
    heldout_fraction: float = Field(default=0.2, ge=0, lt=1, description="share of the problems that the summary reports on")
    calibration_fraction: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="share of the other problems on which thresholds and the best weights are chosen; 0: those trained on",
    )
    evaluate_every: int = Field(default=0, ge=0, description="updates between losses on calibration problems; 0: none")

    @model_validator(mode="after")
    def _check(self) -> ProcessRewardConfig:
        if not all(self.delimiters):
            raise ValueError("delimiters holds an empty text, which ends a step everywhere; remove it")
        if self.target == "outcome" and (self.classes != 2 or self.label_column):
            raise ValueError(
                "classes and label_column have no effect with target = 'outcome', which is right or wrong; remove them"
            )
        if self.classes == 3 and not self.label_column:
            raise ValueError("classes = 3 needs label_column, the column of the rows that holds the ratings -1, 0 and 1")
        if self.evaluate_every and not self.calibration_fraction:
            raise ValueError("evaluate_every needs problems to evaluate on: set calibration_fraction above 0, or leave it out")
        return self

    @property
    def outputs(self) -> int:
        """Numbers that the head must give: a log-odds, or one a class."""
        return 1 if self.classes == 2 else self.classes


class ProcessRewardModeling:
    """Trains a role with a head of `config.outputs` numbers."""

    def __init__(self, config: ProcessRewardConfig, role: Role, encoder: ChatEncoder) -> None:
        if role.head is None or role.head.outputs != config.outputs:
            raise ValueError(f"the role needs a head of {config.outputs} outputs")
        self.config = config
        self.role = role
        self.head = role.head
        self.encoder = StepEncoder(
            encoder, config.delimiters, config.target, config.classes, config.label_column, config.problem_column
        )
        self.learner: LocalLearner | None = None

    def step(self, solutions: list[Solution]) -> dict[str, float]:
        """One update: L = -(1/N) sum log p(label of a step | all before and in it), N the labels of the whole update."""
        assert self.learner is not None
        start, num_targets = time.perf_counter(), sum(s.num_targets for s in solutions)
        total = right = 0.0
        for micro in self._micro_batches(solutions):
            logits = self._logits(micro)
            targets, known = self._targets(micro)
            loss = step_cross_entropy(logits, targets, known, denominator=num_targets)
            self.learner.backward(loss)
            total += float(loss.detach())
            right += float(self._agree(logits.detach(), targets)[known].sum())
        metrics = self.learner.step()
        rate = sum(len(s.sequence) for s in solutions) / (time.perf_counter() - start)
        return {"loss": total, "accuracy": right / num_targets, **metrics, "labels": num_targets, "tokens_per_second": rate}

    @torch.no_grad()
    def loss(self, solutions: Sequence[Solution]) -> float:
        """Mean cross-entropy a label."""
        num_targets, total = sum(s.num_targets for s in solutions), 0.0
        for micro in self._micro_batches(solutions):
            logits = self._logits(micro)
            total += float(step_cross_entropy(logits, *self._targets(micro), denominator=num_targets))
        return total

    @torch.no_grad()
    def probabilities(self, solutions: Sequence[Solution]) -> list[list[float]]:
        """For every judged step of every solution the probability that it is right.

        The outcome model judges whole solutions, so it is asked about each step as if the solution ended there.
        """
        if self.config.target == "process":
            return self._at_steps(solutions)
        prefixes = [[self.encoder.prefix(s, k + 1) for k in s.judged] for s in solutions]
        rows = prefixes if self.role.reads_masks else [[prefix] for row in prefixes for prefix in row]
        given = iter(self._at_ends(rows))
        return [[next(given) for _ in s.judged] for s in solutions]

    def evaluate(
        self, solutions: Sequence[Solution], calibration: Sequence[Solution], run: RunDirectory | None = None
    ) -> dict[str, Any]:
        """Step F1 and first-error F1 with their intervals, of the model and of chance; see `compare_with_chance`.

        Solutions of which nobody judged a step (there are only targets) are left aside.

        Args:
            calibration: solutions of other problems, on which thresholds are chosen.
            run: where every judgement is written down, in heldout.json.
        """
        solutions, calibration = ([s for s in part if s.judged] for part in (solutions, calibration))
        right, known = ([[bool(s.labels[k]) for k in s.judged] for s in part] for part in (solutions, calibration))
        probabilities = self.probabilities(solutions)
        if run is not None:
            rows = zip(solutions, right, probabilities, strict=True)
            judgements = [{"id": s.id, "problem": s.group, "right": r, "probabilities": p} for s, r, p in rows]
            write_json(run.path / "heldout.json", judgements)
        groups = [s.group for s in solutions]
        return compare_with_chance(right, probabilities, groups, (known, self.probabilities(calibration)))

    def train(
        self, rows: Sequence[StepLabels], run: RunDirectory, progress: Callable[[int, int, Any], None] | None = None
    ) -> dict[str, Any]:
        """Train, or go on training, in `run`; returns the summary with the evaluation on held-out problems.

        Raises:
            DataError: no solution can be used for training.
        """
        start, config = time.perf_counter(), self.config
        train, calibration, test, skipped = self.prepare(rows)
        plan = plan_updates(len(train), config.solutions_per_update, config.epochs, config.seed)
        self.learner = LocalLearner(self.role.parameters(), config.optimizer_for(self.role.adapter), len(plan))

        def evaluated() -> dict[str, float]:
            self.role.train_mode(False)
            loss = self.loss(calibration)
            self.role.train_mode(True)
            return {"eval_loss": loss}

        loop = SupervisedLoop(
            run,
            self.learner,
            self.step,
            config,
            evaluate=evaluated if calibration and config.evaluate_every else None,
            evaluate_every=config.evaluate_every,
            progress=progress,
        )
        self.role.train_mode(True)
        loop.train(train, plan)
        self.role.train_mode(False)
        judged = calibration if any(s.judged for s in calibration) else train
        return {
            "train_loss": statistics.fmean(row["loss"] for row in run.metrics()[-10:]),
            **({"heldout": self.evaluate(test, judged, run)} if any(s.judged for s in test) else {}),
            "updates": len(plan),
            "num_train": len(train),
            "num_calibration": len(calibration),
            "num_heldout": len(test),
            "num_heldout_problems": len({s.group for s in test}),
            "skipped": skipped,
            "seconds": run.seconds(start),
        }

    def prepare(self, rows: Sequence[StepLabels]) -> tuple[list[Solution], list[Solution], list[Solution], dict[str, int]]:
        """Solutions to train on, to calibrate on and to report on, no problem in two of them, and why others were left out."""
        config = self.config
        solutions, skipped = encode_solutions(rows, self.encoder, config.max_length, "process.max_length")
        rest, test = split_by_group(solutions, config.heldout_fraction, config.seed)
        train, calibration = split_by_group(rest, config.calibration_fraction, config.seed + 1)
        if not train:
            raise DataError(f"none of {len(rows)} solutions can be used for training: {skipped or 'there are none'}")
        return train, calibration, test, skipped

    def _micro_batches(self, solutions: Sequence[Solution]) -> list[list[Solution]]:
        cuts = cut_batches([s.sequence for s in solutions], self.config.micro_batch_tokens)
        return [[solutions[i] for i in cut] for cut in cuts]

    def _logits(self, solutions: Sequence[Solution]) -> Tensor:
        """The head's numbers at each step's last token, solution by solution."""
        batch = make_batch([s.sequence for s in solutions], self.encoder.encoder.pad_id).to(self.role.device)
        return self.head(self.role.hidden(batch)[step_states(batch, [s.ends for s in solutions])])

    def _at_steps(self, solutions: Sequence[Solution]) -> list[list[float]]:
        found: dict[int, list[float]] = {}
        for cut in cut_batches([s.sequence for s in solutions], self.config.micro_batch_tokens):
            logits = self._logits([solutions[i] for i in cut])
            given = iter(right_probabilities(logits).tolist())
            for i in cut:
                row = [next(given) for _ in solutions[i].ends]
                found[i] = [row[k] for k in solutions[i].judged]
        return [found[i] for i in range(len(solutions))]

    def _at_ends(self, rows: Sequence[Sequence[Encoded]]) -> list[float]:
        """At the last token of every sequence of every row; those of a row begin alike."""
        found: dict[int, list[float]] = {}
        for cut in cut_by_tokens([branching_length(row) for row in rows], self.config.micro_batch_tokens):
            batch = branching_batch([rows[i] for i in cut], self.encoder.encoder.pad_id).to(self.role.device)
            given = iter(right_probabilities(self.role.scores(batch)).tolist())
            found.update({i: [next(given) for _ in rows[i]] for i in cut})
        return [probability for i in range(len(rows)) for probability in found[i]]

    def _targets(self, solutions: Sequence[Solution]) -> tuple[Tensor, Tensor]:
        """What each step should get, and whether anything is known."""
        flat = [target for s in solutions for target in s.targets]
        known = torch.tensor([target is not None for target in flat], device=self.role.device)
        targets = torch.tensor([target or 0.0 for target in flat], device=self.role.device)
        return targets if self.config.classes == 2 else one_hot(targets.long(), self.config.classes).float(), known

    def _agree(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Where the likelier answer is the label."""
        return (logits > 0) == (targets > 0.5) if self.config.classes == 2 else logits.argmax(-1) == targets.argmax(-1)
