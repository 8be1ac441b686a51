"""A control for checked answers: agreement with the plurality of a prompt's answers, in place of the
known one.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations

from tether.core.protocols import RewardSource
from tether.core.types import Rollout, Score
from tether.data.formats.fields import fold
from tether.rewards.answers import find_answer, format_part
from tether.rewards.control import CheckedControl
from tether.rewards.latex import number_in
from tether.rewards.parts import RewardParts
from tether.rewards.verifiable import VerifiableReward
from tether.settings.rewards import VerifiableConfig

Answer = Fraction | str
_COMPARED = "math", "gsm8k", "numeric"
"""Kinds whose check may call two answers equal that are not written alike."""
_PLAIN = re.compile(r"[-+]?\d+(?:\.\d+)?")


def majority_reward(parts: RewardParts) -> CheckedControl:
    """The majority's reward, judged by the checks that it replaces."""
    config = parts.section.verifiable
    assert config is not None
    check = VerifiableReward(config)
    return CheckedControl(MajorityReward(config, check), check)


@dataclass
class MajorityReward:
    """Implements core.protocols.RewardSource: 1 for the answer that most answers to the prompt
    give, 0 otherwise, plus `format_weight` for the format.

    The known answer is never read, so what a policy gains is self-consistency. A response without
    an answer gets 0. Of several answers that are equally frequent each counts as the plurality.
    Paper: TTRL, https://arxiv.org/abs/2504.16084; as a control: https://arxiv.org/abs/2606.05932.

    Args:
        check: compares two answers in LaTeX, as it compares an answer with a known one.
    """

    name = "majority"

    config: VerifiableConfig
    check: RewardSource

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score a rollout, in their order; one call has all answers to a prompt."""
        groups: defaultdict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
        for place, rollout in enumerate(rollouts):
            groups[rollout.prompt.id, tuple(rollout.prompt_ids)].append(place)
        texts = [rollout.whole_text for rollout in rollouts]
        answers = list(map(self._answer, texts))
        alike = self._alike(rollouts, answers, groups.values())
        agreed = [0.0] * len(rollouts)
        for places in groups.values():
            counts = Counter(alike[place] for place in places if place in alike)
            most = max(counts.values(), default=0)
            for place in places:
                agreed[place] = float(place in alike and counts[alike[place]] == most)
        return list(map(self._score, texts, agreed))

    def _score(self, text: str, agreed: float) -> Score:
        parts = {"agreement": agreed, **format_part(self.config.pattern, text)}
        weight = self.config.format_weight * parts.get("format", 0.0)
        return Score(agreed + weight, parts, "" if agreed else "another answer, or none")

    def _answer(self, text: str) -> Answer | None:
        """The answer, as a number where the check compares numbers."""
        if (answer := find_answer(text, self.config.marks)) is None:
            return None
        match self.config.kind:
            case "numeric":
                return number_in(answer)
            case "gsm8k" if "\\" not in answer:
                number = number_in(answer)
                return fold(answer) if number is None else number
            case "math" | "gsm8k":
                return answer.strip()
            case _:
                plain = _PLAIN.fullmatch(answer.strip().rstrip("."))
                return fold(answer) if plain is None else Fraction(plain[0])

    def _alike(
        self,
        rollouts: Sequence[Rollout],
        answers: Sequence[Answer | None],
        groups: Iterable[Sequence[int]],
    ) -> dict[int, int]:
        """By the place of a rollout with an answer: the first of its group with an equal one."""
        alike: dict[int, int] = {}
        pairs: list[tuple[int, int]] = []
        for places in groups:
            firsts: dict[Answer, int] = {}
            for place in places:
                if (answer := answers[place]) is not None:
                    alike[place] = firsts.setdefault(answer, place)
            pairs += combinations(firsts.values(), 2)
        merged = self._equal(rollouts, pairs) if self.config.kind in _COMPARED else {}
        return {place: merged.get(first, first) for place, first in alike.items()}

    def _equal(
        self,
        rollouts: Sequence[Rollout],
        pairs: Sequence[tuple[int, int]],
    ) -> dict[int, int]:
        """By place: the first answer of its group that the check calls equal to it."""
        questions = []
        for a, b in pairs:
            prompt = rollouts[b].prompt
            known = {"answer": find_answer(rollouts[a].whole_text, self.config.marks)}
            question = replace(prompt, metadata={**prompt.metadata, **known})
            questions.append(replace(rollouts[b], prompt=question))
        scores = self.check.score(questions) if questions else []
        merged: dict[int, int] = {}
        for (a, b), score in zip(pairs, scores, strict=True):
            if score.parts.get("correct") == 1:
                merged.setdefault(b, merged.get(a, a))
        return merged
