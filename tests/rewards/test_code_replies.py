"""Programs that write their own reply, of any shape: the reply costs its program, and nobody else."""

import pytest

from tether.core.types import Prompt, Rollout, Sampling, StopReason, user
from tether.rewards.verifiable import VerifiableConfig, VerifiableReward

FORGE = """
import sys, os
def f():
    frame = sys._getframe()
    while frame:
        token = frame.f_locals.get("token")
        if token:
            os.write(3, {text}.replace("TOKEN", token).encode({coding}))
            os._exit(0)
        frame = frame.f_back
"""
REPLIES = [
    *(
        f'["TOKEN",{outcomes}]'
        for outcomes in (
            *(
                "[5]",
                "[null]",
                '["gave"]',
                '[["gave"]]',
                '[["gave",1,2]]',
                '[{"a":1}]',
                '[["won",1]]',
            ),
            *('[["raised",5]]', "[[5,5]]", '{"0":["gave",1]}', "null", "[]", '[["gave",1e400]]'),
            *('[["gave",NaN]]', '[["gave","\\\\ud800"]]', '[["gave","\u00ff"]]', '[["gave",true'),
            '[["gave",' + "9" * 5000 + "]]",
            '[["gave",' + "[" * 5000 + "]" * 5000 + "]]",
            '[["gave",' + '{"a":' * 5000 + "1" + "}" * 5000 + "]]",
            '[["gave",' + "1," * 300_000 + "1]]",
        )
    ),
    *('["TOKEN"]', '["other",[["gave",1]]]', '{"TOKEN":[["gave",1]]}', "5", "null", "", "[" * 9000),
]
HONEST = {
    "a list nested 970 times": "def f():\n    x = []\n    for _ in range(970):\n        x = [x]\n    return x",
    "a dictionary nested 970 times": "def f():\n    x = 1\n    for _ in range(970):\n        x = {1: x}\n    return x",
    "a list in itself": "def f():\n    x = []\n    x.append(x)\n    return x",
    "a number of 5,000 digits": "def f():\n    return 10**5000",
    "half a surrogate pair": "def f():\n    return '\\ud800'",
    "an error of half a surrogate pair": "def f():\n    raise ValueError('\\ud800' * 500)",
}
RIGHT = "def f():\n    return 1"


def rollout(program):
    prompt = Prompt((user("q"),), metadata={"answer": "assert f() == 1\nassert 2 == 2"})
    text = f"```python\n{program}\n```"
    return Rollout((1,), (1,), (0.0,), StopReason.STOP_TOKEN, text, 0, 0, Sampling(), prompt)


def deep(depth, call):
    """A call from a stack as deep as that of a training."""
    return call() if depth == 0 else deep(depth - 1, call)


@pytest.fixture(scope="module")
def reward():
    with VerifiableReward(VerifiableConfig(kind="code", workers=1, credit="share")) as reward:
        yield reward


def scores(reward, programs):
    found = deep(100, lambda: reward.score([rollout(program) for program in programs]))
    assert [score.value is None for score in found] == [False] * len(programs)
    return found


def test_forged_replies_are_failed_programs_among_others(reward):
    forged = [
        FORGE.format(text=repr(text), coding="'latin-1'" if "\xff" in text else "")
        for text in REPLIES
    ]
    found = scores(reward, [one for forgery in forged for one in (forgery, RIGHT)])
    assert [score.value for score in found[1::2]] == [1.0] * len(REPLIES)
    assert [score.value for score in found[::2]] == [0.0] * len(REPLIES)
    assert all(0 < len(score.reason) < 400 for score in found[::2])


@pytest.mark.parametrize("name", HONEST)
def test_values_that_no_reply_holds_fail_their_own_test_alone(reward, name):
    wrong, right = scores(reward, [HONEST[name], RIGHT])
    assert wrong.value < right.value == 1.0
    assert wrong.reason.startswith("f(): raised ")


def test_nested_values_that_a_reply_holds_are_compared(reward):
    nested = "def f():\n    x = 1\n    for _ in range(60):\n        x = [x]\n    return x"
    prompt = Prompt((user("q"),), metadata={"answer": f"assert f() == {'[' * 60}1{']' * 60}"})
    text = f"```python\n{nested}\n```"
    one = Rollout((1,), (1,), (0.0,), StopReason.STOP_TOKEN, text, 0, 0, Sampling(), prompt)
    assert deep(100, lambda: reward.score([one]))[0].value == 1.0
