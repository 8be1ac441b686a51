"""A reward that the user wrote: whatever it does, raise, hang, return nonsense, the run goes on
with what it did score.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy

from tether.core.errors import RewardError
from tether.core.secrets import redact
from tether.core.types import Prompt, Rollout, Score
from tether.core.watchdog import Watchdog
from tether.rewards.calling import Guarded
from tether.rewards.forms import Function, LastReply
from tether.rewards.loading import load_function
from tether.rewards.parts import RewardParts
from tether.rewards.returned import NO_SCORE, TAKEN_PARTS, in_parts, placed, scores_of, whole_groups


def function_reward(parts: RewardParts) -> FunctionReward:
    """The reward of a recipe's function; of several the weighted sum, with each as a part."""
    config = parts.settings
    functions = {call: load_function(call, config.completions) for call in config.calls}
    if isinstance(config.call, str):
        return FunctionReward(functions[config.call], **config.limits)
    weights = dict(zip(config.calls, config.weights or (1.0,) * len(config.calls), strict=True))
    return FunctionReward(functions, weights, **config.limits)


class FunctionReward:
    """Implements core.protocols.RewardSource. An unusable value becomes a failed score that names
    its reason.

    Args:
        function: one function, or several by the names that recipes have for them.
        weights: of several, by the same names.
        role: the words for the function in messages.

    A response to which one of several gives None is scored by the others, as TRL has it; it fails
    where none gives a number. A call or a value that one of several fails is failed. Other
    arguments as for
    `Guarded`. The stacks of calls that hang go to the file of `watchdog`; nothing is written until
    the run names one.
    """

    name = "function"

    def __init__(
        self,
        function: Function | Mapping[str, Function],
        weights: Mapping[str, float] | None = None,
        *,
        batch: int = 8,
        time_limit: float = 60.0,
        dump_after: float = 30.0,
        role: str = "the reward function",
    ) -> None:
        functions = function if isinstance(function, Mapping) else {"": function}
        self.weights = weights
        self.batch = batch
        self.watchdog = Watchdog(None)
        self.guarded = {
            call: Guarded(one, role, self.watchdog, time_limit=time_limit, dump_after=dump_after)
            for call, one in functions.items()
        }
        self.source = next(iter(self.guarded.values())).source
        """The words for the function in messages."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """A score for each; the answers to one prompt are in one call, whatever `batch` is."""
        groups = whole_groups(rollouts, self.batch)
        scores = self._scored([(r.prompt, LastReply.of(r)) for r in group] for group in groups)
        return [
            placed(score, rollout, self.source)
            for score, rollout in zip(scores, rollouts, strict=True)
        ]

    def score_texts(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Score]:
        """The same of texts; neighbours with one prompt are in one call."""
        pairs = list(zip(prompts, map(LastReply, responses), strict=True))
        return self._scored(in_parts(pairs, self.batch, lambda before, one: before[0] == one[0]))

    def _scored(self, parts: Iterable[list[tuple[Prompt, LastReply]]]) -> list[Score]:
        return [score for part in parts for score in self._call(part)]

    def _call(self, pairs: list[tuple[Prompt, LastReply]]) -> list[Score]:
        """Scores of one call; the function gets copies, so that the run's prompts stay as they
        are.
        """
        count = len(pairs)
        prompts, responses = zip(*pairs, strict=True)
        try:
            columns = {
                call: one(
                    lambda returned, source: scores_of(returned, count, source),
                    deepcopy(list(prompts)),
                    list(responses),
                )
                for call, one in self.guarded.items()
            }
        except RewardError as error:
            # an error may quote a server's key
            return [Score(None, reason=redact(str(error)))] * count
        if self.weights is None:
            return columns[""]
        return [
            _sum({call: scores[i] for call, scores in columns.items()}, self.weights)
            for i in range(count)
        ]


def _sum(scores: Mapping[str, Score], weights: Mapping[str, float]) -> Score:
    """The weighted sum of the numbers, with their parts, and with their steps where each has some.

    The score has failed where one function returned neither a number nor None.
    """
    absent = {call: score.reason for call, score in scores.items() if score.value is None}
    failed = [reason for reason in absent.values() if not reason.endswith(NO_SCORE)]
    if failed or len(absent) == len(scores):
        return Score(None, reason="; ".join(dict.fromkeys(failed or absent.values())))
    total = 0.0
    parts = dict[str, float]()
    steps = defaultdict[int, float](float)
    for call, name in zip(scores, _part_names(tuple(scores)), strict=True):
        score = scores[call]
        weight = weights[call]
        if score.value is None:
            continue
        total += weight * score.value
        parts |= {name: score.value, **{f"{name}/{key}": part for key, part in score.parts.items()}}
        for end, reward in score.steps:
            steps[end] += weight * reward
    whole = all(score.steps for score in scores.values() if score.value is not None)
    return Score(total, parts, steps=tuple(sorted(steps.items())) if whole else ())


def _part_names(calls: Sequence[str]) -> list[str]:
    """The names of functions; whole calls where two, or a column of the run, have the same name."""
    short = [call.rpartition(":")[2].partition("@")[0] for call in calls]
    return [
        call if short.count(name) > 1 or name in TAKEN_PARTS else name
        for call, name in zip(calls, short, strict=True)
    ]
