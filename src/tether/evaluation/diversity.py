"""Diversity and length of answers: a policy that says the same to everyone has lost something."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from tether.core.protocols import count_of
from tether.core.types import Prompt, Sampling
from tether.evaluation.suite import Figures, MeasuredPolicy, by_row
from tether.evaluation.winrate import mean_estimate
from tether.stats import Estimate, jackknife, without_interval
from tether.stats.means import FEWEST_GROUPS, mean_interval

SEED = 4242


@dataclass
class Diversity:
    """Implements core.protocols.Evaluator: `distinct_1`, `distinct_2`, `adjusted_distinct`,
    `length` in tokens.

    Args:
        sampling: temperature 1 shows the policy's own distribution.
    """

    name = "diversity"

    prompts: Sequence[Prompt]
    sampling: Sampling

    def __call__(self, policy: MeasuredPolicy, step: int) -> Figures:
        tell = count_of("answering", len(self.prompts))
        groups = policy.engine.generate(self.prompts, self.sampling, seed=SEED, progress=tell)
        answers = [group.rollouts[0] for group in groups]
        words = [re.findall(r"\w+|[^\w\s]", answer.text.lower()) for answer in answers]
        tokens = [answer.written for answer in answers]
        lengths = [float(len(ids)) for ids in tokens]
        figures = {
            "distinct_1": distinct_share(words, 1),
            "distinct_2": distinct_share(words, 2),
            "adjusted_distinct": distinct_share(tokens, 1, vocabulary=policy.role.num_tokens),
            "length": mean_estimate(lengths),
        }
        ids = [prompt.id for prompt in self.prompts]
        return Figures(figures, by_row(ids, {"length": lengths}))


def distinct_share(
    texts: Sequence[Sequence[Hashable]],
    size: int,
    *,
    vocabulary: int | None = None,
) -> Estimate:
    """The share of n-grams of all texts together that are different ones.

    Equation: ``D / C`` with D different n-grams of C; with a vocabulary of V tokens ``D / (V (1 −
        ((V − 1)/V)^C))``, the share of what C uniform draws would show.
    Paper: Li et al. 2016, https://arxiv.org/abs/1510.03055; the adjustment: Liu et al. 2022,
        https://arxiv.org/abs/2202.13587.
    Interval: a jackknife over texts, for texts of as many prompts of the same kind.
    Trap: D / C falls as texts grow longer, so compare it at equal length alone; the adjusted one
        depends less on length.
    """
    grams = [
        Counter(tuple(text[i : i + size]) for i in range(len(text) - size + 1)) for text in texts
    ]
    holders = Counter(gram for own in grams for gram in own)
    total = float(sum(own.total() for own in grams))
    if not total:
        return without_interval(0.0, len(texts), f"words: no text has {size}")
    alone = np.array([sum(holders[gram] == 1 for gram in own) for own in grams], dtype=np.float64)
    counts = np.array([own.total() for own in grams], dtype=np.float64)

    def share(different: np.ndarray, drawn: np.ndarray) -> np.ndarray:
        if vocabulary is None:
            return different / np.maximum(drawn, 1)
        shown = vocabulary * -np.expm1(drawn * np.log1p(-1 / vocabulary))
        return different / np.maximum(shown, 1e-12)

    value = float(share(np.array(float(len(holders))), np.array(total)))
    if len(texts) < FEWEST_GROUPS:
        return without_interval(
            value,
            len(texts),
            f"texts: {len(texts)}, and {FEWEST_GROUPS} are needed",
        )
    influence = jackknife(share(len(holders) - alone, total - counts))
    low, high = mean_interval(value, influence)
    return Estimate(value, max(low, 0.0), high, len(texts))
