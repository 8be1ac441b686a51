"""Best of n of the start: the second control. What a reward picks is told by hand, against pools
that are written here.
"""

import json
import math

import pytest

from tether.core.types import Prompt, Rollout, Sampling, Score, StopReason, user
from tether.evaluation.best_of_n import favourites, over_best_of_n

POOLS = {  # by prompt: (reward, gold) of every answer in the order in which they are drawn
    "a": [(1.0, 5.0), (3.0, 2.0), (2.0, 9.0), (4.0, 1.0)],
    "b": [(2.0, 6.0), (1.0, 8.0), (None, 9.0), (0.0, 9.0)],
    "c": [(None, 1.0), (None, 2.0), (0.5, 3.0), (0.5, 4.0)],
}


class Engine:
    """Draws the pools; the seed and the number of answers are noted."""

    def __init__(self):
        self.asked = []

    def generate(self, prompts, sampling, *, num_samples, seed, **_):
        self.asked.append((num_samples, seed))
        how = (StopReason.STOP_TOKEN, 0, 0)
        rows = [
            [
                Rollout((1,), (2,), (0.0,), how[0], json.dumps(pair), 0, 0, sampling, p)
                for pair in POOLS[p.id][:num_samples]
            ]
            for p in prompts
        ]
        return [type("Group", (), {"rollouts": row}) for row in rows]


def scored(place, seen=None):
    def score(rollouts):
        if seen is not None:
            seen.extend(r.text for r in rollouts)
        return [Score(json.loads(r.text)[place]) for r in rollouts]

    return score


def test_the_reward_picks_and_the_judge_scores_its_picks_once():
    engine, seen = Engine(), []
    prompts = [Prompt((user(name),), name) for name in POOLS]
    found = favourites(engine, prompts, Sampling(), scored(0), scored(1, seen), (2, 4), seed=3)
    # of c's first two answers none has a reward
    assert found == {2: [2.0, 6.0, None], 4: [1.0, 6.0, 3.0]}
    # b's favourite is the same for both
    assert engine.asked == [(4, 3)] and len(seen) == len(set(seen)) == 4


def test_the_policy_stands_beside_it_prompt_by_prompt():
    start, after, groups = (
        {2: [2.0, 6.0, None], 4: [1.0, 6.0, 3.0]},
        [3.0, 6.0, 1.0, 100.0],
        list("abcd"),
    )
    found = over_best_of_n(start, after, groups)  # the fourth prompt has no best of n
    assert found["4"]["kl"] == pytest.approx(math.log(4) - 3 / 4)
    assert found["4"]["before"]["value"] == pytest.approx(10 / 3) and found["4"]["after"][
        "value"
    ] == pytest.approx(10 / 3)
    # one won, one even, one lost
    assert found["4"]["gain"]["value"] == 0.0 and found["4"]["win_rate"]["value"] == 0.5
    assert found["2"]["gain"]["value"] == 0.5 and found["2"]["gain"]["count"] == 2
