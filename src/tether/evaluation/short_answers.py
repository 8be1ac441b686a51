"""Greedy answers to questions with one known answer: the share that is right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tether.core.errors import DataError
from tether.core.protocols import RewardSource, count_of
from tether.core.types import Prompt, Rollout, Sampling
from tether.evaluation.suite import Figures, MeasuredPolicy, by_row
from tether.evaluation.winrate import MaybeScores
from tether.stats import Estimate, grouped_share


class ShortAnswers:
    """Implements core.protocols.Evaluator: `accuracy`, and `finished`, the share of answers that
    ended.

    Args:
        prompts: each with its own id and what the check needs in `metadata`.
        check: 1 for the known answer, 0 for another; a check that failed counts as neither.
    """

    name = "short_answers"

    def __init__(
        self,
        prompts: Sequence[Prompt],
        check: RewardSource,
        *,
        max_new_tokens: int = 256,
    ) -> None:
        self.prompts = list(prompts)
        self.check = check
        self.max_new_tokens = max_new_tokens

    def __call__(self, policy: MeasuredPolicy, step: int) -> Figures:
        """Raises: DataError: every check failed."""
        answers = greedy_answers(policy, self.prompts, self.max_new_tokens)
        checked = self.check.score(answers)
        scores = [score.value for score in checked]
        if all(score is None for score in scores):
            raise DataError(f"short_answers: no answer can be checked: {checked[0].reason}")
        finished = [float(answer.finished) for answer in answers]
        ids = [prompt.id for prompt in self.prompts]
        columns = {"accuracy": scores, "finished": finished}
        shares = {name: share_of_ones(column) for name, column in columns.items()}
        return Figures(shares, by_row(ids, columns))


def greedy_answers(
    policy: MeasuredPolicy,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
) -> list[Rollout]:
    """The likeliest answer to each prompt, token by token."""
    groups = policy.engine.generate(
        prompts,
        Sampling(max_new_tokens, temperature=0.0),
        progress=count_of("answering", len(prompts)),
    )
    return [group.rollouts[0] for group in groups]


def share_of_ones(values: MaybeScores) -> Estimate:
    """The share of ones among zeros and ones, with an interval also where all are alike.

    Shapes: a value a row; a None, a check that failed, is dropped.
    Raises: ``ValueError`` when none remains.
    """
    checked = [value for value in values if value is not None]
    if not checked:
        raise ValueError("nothing to estimate: every check failed")
    return grouped_share(np.array(checked), None)
