"""A reward for programs, and a way to ask it about one."""

import textwrap

import pytest

from tether.core.types import Prompt, Rollout, Sampling, StopReason, user
from tether.rewards.verifiable import VerifiableReward
from tether.settings.rewards import VerifiableConfig

SQUARES = "assert f(2) == 4\nassert f(3) == 9\n"


@pytest.fixture(scope="session")
def answered():
    """(text, tests) -> a rollout."""

    def make(text, tests=SQUARES):
        known = {"answer": tests} if isinstance(tests, str) else {"tests": tests}
        prompt = Prompt((user("?"),), "p", known)
        return Rollout(
            (1,),
            (2,),
            (0.0,),
            StopReason.STOP_TOKEN,
            textwrap.dedent(text),
            0,
            0,
            Sampling(),
            prompt,
        )

    return make


@pytest.fixture(scope="module")
def score(answered):
    """(program, tests) -> its score, by one worker for all tests of a module."""
    with VerifiableReward(
        VerifiableConfig(kind="code", time_limit=2, workers=1, memory_mb=512),
    ) as reward:
        yield lambda program, tests=SQUARES: reward.score([answered(program, tests)])[0]
