"""The share of scores that may fail before a training stops."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from tether.core.errors import RewardError
from tether.core.protocols import AdaptiveReward, JudgingReward, RewardSource, Scoring, Stateful
from tether.core.types import Facts, Json, Metrics, Rollout, Score
from tether.rewards.function import FunctionReward

WINDOW = 10
"""Batches of answers, of a step or of a measurement, over which the share of failures is taken."""
Ask = Callable[[Scoring, Sequence[Rollout]], list[Score]]


@dataclass(eq=False)
class FailureLimit:
    """A source with a limit for the share of failed scores.

    Its state holds what failed so far, so that a training that goes on stops where an uninterrupted
    one would.

    Args:
        share: of the scores of the last ten calls of `score` and `judge`; beyond it there is
            nothing left to learn from.
        ask: how the source is asked; by several ranks, not by each of them.
        needs_steps: training learns from the rewards of single steps (`Score.steps`); a score
            without them has failed.
    """

    source: RewardSource
    share: float
    ask: Ask = lambda score, rollouts: score(rollouts)
    _: KW_ONLY
    needs_steps: bool = False

    def __post_init__(self) -> None:
        self.name = self.source.name
        self.reasons: Counter[str] = Counter()
        self.recent: deque[tuple[Counter[str], int]] = deque(maxlen=WINDOW)

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """The source's scores.

        Raises:
            RewardError: too many of the last ones failed.
        """
        return self._limited(self.source.score, rollouts)

    def judge(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """Scores that mean the same at every step, for measurements.

        Raises:
            RewardError: see `score`.
        """
        source = self.source
        judge = source.judge if isinstance(source, JudgingReward) else source.score
        return self._limited(judge, rollouts)

    def _limited(
        self,
        score: Scoring,
        rollouts: Sequence[Rollout],
    ) -> list[Score]:
        """Scores, once their failures are counted."""
        recent = self.recent
        scores = self.ask(score, rollouts)
        assert len(scores) == len(rollouts)
        scores = [
            Score(None, reason=r.failure) if r.failure else score
            for r, score in zip(rollouts, scores, strict=True)
        ]
        if self.needs_steps:
            reason = f"the reward {self.name!r} gave no steps, and step_rewards = true needs them"
            without = Score(None, reason=reason)
            scores = [score if score.steps or score.value is None else without for score in scores]
        reasons = Counter(s.reason or "no reason given" for s in scores if s.value is None)
        recent.append((reasons, len(scores)))
        failed = sum((counts for counts, _ in recent), Counter[str]())
        total = sum(number for _, number in recent)
        if reasons and failed.total() > self.share * total:
            recent.clear()  # a reward that was mended is not judged by what it did before
            common = "; ".join(
                f"{reason} ({count} times)" for reason, count in failed.most_common(3)
            )
            raise RewardError(
                f"{failed.total()} of the last {total} scores failed, more than max_failed = "
                f"{self.share:g}: {common}. "
                "Mend the reward and start the same command again: it goes on from the last step",
            )
        self.reasons.update(reasons)
        return scores

    def keep_stacks(self, path: Path) -> None:
        """Set the file for the stacks of calls that hang, if the source writes them down."""
        if isinstance(self.source, FunctionReward):
            self.source.watchdog.path = path

    def learn(self, scores: Sequence[Score]) -> Metrics:
        """Tell the source what a step of training scored, if it follows that; its metrics."""
        return self.source.learn(scores) if isinstance(self.source, AdaptiveReward) else {}

    def state(self) -> Json:
        """Values that the source's next scores depend on, and the failures so far."""
        own = self.source.state() if isinstance(self.source, Stateful) else {}
        counts = {"recent": [list(batch) for batch in self.recent], "reasons": dict(self.reasons)}
        return {**own, "failures": counts} if self.recent or self.reasons else own

    def load_state(self, values: Facts) -> None:
        own = {name: value for name, value in values.items() if name != "failures"}
        if own and isinstance(self.source, Stateful):
            self.source.load_state(own)
        if (counts := values.get("failures")) is not None:
            self.reasons = Counter(counts["reasons"])
            self.recent = deque(
                ((Counter(failed), total) for failed, total in counts["recent"]),
                maxlen=WINDOW,
            )

    def close(self) -> None:
        """End what the source keeps open."""
        if isinstance(self.source, AbstractContextManager):
            self.source.__exit__(None, None, None)
