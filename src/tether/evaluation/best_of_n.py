"""Best of n: what the reward's favourites are worth to the judge, as the choice widens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tether.algorithms.kl import kl_best_of_n
from tether.core.protocols import Engine, count_of
from tether.core.types import Json, Prompt, Sampling
from tether.evaluation.held_out import HeldOutAnswers, Scorer
from tether.evaluation.suite import Figures, MeasuredPolicy
from tether.evaluation.winrate import MaybeScores, before_and_after, mean_estimate

PROMPTS = 64
"""Of the held-out ones: best of n asks for so many times n answers."""


@dataclass
class BestOfStart:
    """Implements core.protocols.Evaluator: the judge's score of the answer among n that the reward
    likes best; figures `best_of_2` and so on.

    Args:
        sizes: the n.
    """

    name = "best_of_n"

    answers: HeldOutAnswers
    reward: Scorer
    sizes: Sequence[int]

    def __call__(self, policy: MeasuredPolicy, step: int) -> Figures:
        best = favourites(
            policy.engine,
            self.answers.prompts[:PROMPTS],
            self.answers.sampling,
            self.reward,
            self.answers.judge,
            self.sizes,
            seed=self.answers.seed + 1,
        )
        rows = {
            f"best_of_{n}": {str(place): score for place, score in enumerate(scores)}
            for n, scores in best.items()
        }
        means = {
            name: mean_estimate(list(column.values()))
            for name, column in rows.items()
            if any(score is not None for score in column.values())
        }
        return Figures(means, rows)


def favourites(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    reward: Scorer,
    judge: Scorer,
    sizes: Sequence[int],
    *,
    seed: int,
) -> dict[int, list[float | None]]:
    """The judge's scores, by n, of the answer that the reward likes best among the first n to each
    prompt.

    An answer whose reward failed is never the best; a prompt of which all failed has None. The
    judge is asked once for each pick.
    """
    tell = count_of("measuring controls: best of n of the start", len(prompts) * max(sizes))
    drawn = engine.generate(prompts, sampling, num_samples=max(sizes), seed=seed, progress=tell)
    groups = [group.rollouts for group in drawn]
    rewards = iter(
        score.value for score in reward([rollout for group in groups for rollout in group])
    )
    values = [[next(rewards) for _ in group] for group in groups]
    picks = {n: [(place, _favourite(pool[:n])) for place, pool in enumerate(values)] for n in sizes}
    chosen = sorted(
        {(place, best) for row in picks.values() for place, best in row if best is not None},
    )
    judged = {
        key: score.value
        for key, score in zip(chosen, judge([groups[p][k] for p, k in chosen]), strict=True)
    }
    return {
        n: [None if best is None else judged[place, best] for place, best in row]
        for n, row in picks.items()
    }


def _favourite(scores: Sequence[float | None]) -> int | None:
    """The place of the largest score; the first of equals."""
    scored = {place: score for place, score in enumerate(scores) if score is not None}
    return max(scored, key=scored.__getitem__, default=None)


def over_best_of_n(
    start: Mapping[int, MaybeScores],
    after: MaybeScores,
    groups: Sequence[str],
) -> dict[str, Json]:
    """By n: best of n of the start (`before`) and one answer of the policy (`after`), gain and win
    rate, and KL of the former.

    The gain from the reward without training, for n times the answers. Prompts that `start` does
    not reach are left out.
    Equation: KL ``log n − (n − 1)/n``, in nats a response, https://arxiv.org/abs/2210.10760.
    """
    rows = {
        n: before_and_after(picks, after[: len(picks)], groups[: len(picks)])
        for n, picks in start.items()
    }
    return {str(n): {"kl": kl_best_of_n(n), **row} for n, row in rows.items() if row is not None}
