"""Rewards that servers work out: the scores of this process, whatever happens to a server on the
way.
"""

import json
import os
import signal
import threading
import time
from dataclasses import replace

import psutil
import pytest

from tether.core.errors import ConfigError, ModelError
from tether.core.types import Message, Prompt, Rollout, Sampling, Score, StopReason
from tether.rewards.function import FunctionReward
from tether.rewards.servers import ServedReward, reward_server
from tether.runner.run import run_recipe
from tether.scale.servers.launch import Servers
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.settings.rewards import RewardServersConfig
from tether.settings.sampling import GRPOSection

CALL = json.dumps({"function": {"name": "f", "arguments": {}}})
PROMPT = Prompt(
    (
        Message("user", "say it", tools="[]"),
        Message("assistant", "", (CALL,)),
        Message("tool", "7"),
    ),
    "p",
    {"answer": 7},
)
ROLLOUTS = [
    Rollout(
        (1, 2),
        (3, number),
        (-0.1, -0.2),
        StopReason.LENGTH,
        f"text {number}",
        number % 4,
        3,
        Sampling(),
        PROMPT,
    )
    for number in range(19)
]


class Reward:
    """Scores that say what was seen of a rollout; some fail, one has parts and steps."""

    name = "own"

    def __init__(self):
        self.batches, self.at_once, self.most = [], 0, 0

    def score(self, rollouts):
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        self.batches.append(len(rollouts))
        time.sleep(0.01)
        self.at_once -= 1
        return [self.one(rollout) for rollout in rollouts]

    @staticmethod
    def one(rollout):
        number = rollout.response_ids[1]
        if number == 5:
            return Score(None, reason="no opinion")
        seen = hash(
            (
                rollout.prompt.messages,
                rollout.text,
                rollout.stop_reason,
                rollout.prompt_ids,
                rollout.sample_index,
            ),
        )
        return Score(
            float(seen % 1000 + number),
            {"answer": rollout.prompt.metadata["answer"]},
            steps=((1, 0.5),),
        )


@pytest.fixture
def served(tmp_path):
    """A function that makes a reward of servers in threads of this process, one for each source."""
    ends = []

    def make(*sources, digests=("d", "d"), **config):
        servers = [
            reward_server(source, digest, ("127.0.0.1", 0))
            for source, digest in zip(sources, digests, strict=False)
        ]
        for server in servers:
            threading.Thread(
                target=server.serve_forever,
                kwargs={"poll_interval": 0.02},
                daemon=True,
            ).start()
            ends.append(lambda server=server: (server.shutdown(), server.server_close()))
        addresses = tuple(f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
        settings = RewardServersConfig(addresses=addresses, **{"start_seconds": 5, **config})
        fleet = Servers(lambda host, port: [], [], tmp_path / "reward", settings.running)
        reward = ServedReward("own", fleet, settings, tmp_path / "reward", "d")
        ends.insert(0, reward.close)
        return reward, servers

    yield make
    for end in ends:
        end()


def test_scores_are_those_of_this_process_in_order(served):
    sources = Reward(), Reward()
    reward, _ = served(*sources, batch=4)
    assert reward.score(ROLLOUTS) == Reward().score(ROLLOUTS) and reward.score([]) == []
    batches = [size for source in sources for size in source.batches]
    assert sorted(batches) == [3, 4, 4, 4, 4] and all(source.batches for source in sources)


def test_no_more_requests_are_under_way_than_is_said(served):
    source, seen = Reward(), []
    reward, servers = served(source, batch=1, waiting=3)
    score, lock = servers[0].post["/v1/score"], threading.Lock()
    inside = [0]

    def counted(body):
        with lock:
            inside[0] += 1
            seen.append(inside[0])
        time.sleep(0.1)  # longer than the others are on their way
        answer = score(body)
        with lock:
            inside[0] -= 1
        return answer

    servers[0].post = {"/v1/score": counted}
    assert reward.score(ROLLOUTS) == Reward().score(ROLLOUTS)
    assert max(seen) == 3 and source.most == 1  # two wait there, and one is worked on


def test_another_server_scores_a_spoilt_answer(served, tmp_path):
    reward, servers = served(Reward(), Reward(), batch=2)
    answers = iter([(200, {"scores": []}), (500, {"error": "broken"}), (200, {"nothing": 1})])
    score = servers[0].post["/v1/score"]
    servers[0].post = {"/v1/score": lambda body: next(answers, None) or score(body)}
    assert reward.score(ROLLOUTS) == Reward().score(ROLLOUTS)
    changes = [
        json.loads(line) for line in (tmp_path / "reward" / "fleet.jsonl").read_text().splitlines()
    ]
    assert any(row["after"] == "suspect" and row["server"] == "reward-0" for row in changes)


def test_a_batch_that_no_server_can_score_fails_alone(served):
    reward, servers = served(Reward(), Reward(), batch=1)
    for server in servers:
        score = server.post["/v1/score"]
        server.post = {
            "/v1/score": lambda b, s=score: (
                (500, {}) if b["rollouts"][0]["text"] == "text 7" else s(b)
            ),
        }
    scores = reward.score(ROLLOUTS)
    assert [
        i for i, (a, b) in enumerate(zip(scores, Reward().score(ROLLOUTS), strict=True)) if a != b
    ] == [7]
    assert scores[7].value is None and "3 servers failed with it" in scores[7].reason


def test_a_refused_request_is_a_failed_score_and_not_repeated(served):
    reward, servers = served(Reward(), Reward(), batch=19)
    tried = []
    for server in servers:
        server.post = {"/v1/score": lambda body: (tried.append(1), (400, {"error": "not that"}))[1]}
    (reason,) = {score.reason for score in reward.score(ROLLOUTS)}
    assert reason == "reward servers: not that" and len(tried) == 1


def test_a_server_that_scores_by_something_else_is_refused(served):
    def ask():
        reward, _ = served(Reward(), Reward(), digests=("d", "e"))
        while True:  # the other may have been ready before this one was asked
            reward.score(ROLLOUTS)

    with pytest.raises(
        ModelError,
        match=(
            r"reward-1 .*scores by other settings \(e\) than this "
            r"run \(d\)"
        ),
    ):
        ask()


def test_metadata_that_is_no_json_is_told(served):
    reward, _ = served(Reward())
    odd = replace(ROLLOUTS[0], prompt=replace(PROMPT, metadata={"when": object()}))
    with pytest.raises(ConfigError, match="reward_servers get prompts as JSON"):
        reward.score([odd])


FUNCTION = """
import os, time

def vowels(prompts, responses):
    with open({log!r}, "a") as file:
        file.write(f"{{os.getpid()}} {{len(responses)}}\\n")
    time.sleep(0.05)
    return [float(sum(letter in "aeiou" for letter in response)) for response in responses]
"""
RUN = {
    "model": {"source": "tiny", "dtype": "float32"},
    "grpo": {
        "steps": 6,
        "prompts_per_step": 2,
        "samples_per_prompt": 4,
        "max_new_tokens": 8,
        "checkpoint_every": 1,
    },
}


def test_a_run_is_the_same_and_a_killed_server_comes_back(tmp_path):
    call = f"{tmp_path}/own.py:vowels"
    (tmp_path / "own.py").write_text(FUNCTION.format(log=str(tmp_path / "log")))
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(12)),
    )
    plain = {
        **RUN["grpo"],
        "data": {"path": str(tmp_path / "prompts.jsonl")},
        "function": {"call": call, "batch": 2},
    }
    killed = []

    def at(phase):
        def bar(done, *_):
            children = [
                child
                for child in psutil.Process().children(recursive=True)
                if "rewards" in child.cmdline()
            ]
            if done == 2 and not killed:
                killed.append(children[0].pid)
                os.kill(children[0].pid, signal.SIGKILL)
                log, start = (
                    tmp_path / "there" / "grpo" / "reward" / "fleet.jsonl",
                    time.monotonic(),
                )
                # the rest of the run takes a moment
                while '"dead"' not in log.read_text() and time.monotonic() - start < 20:
                    time.sleep(0.02)

        return bar

    for name, more in (("here", {}), ("there", {"reward_servers": {"servers": 2}})):
        run_recipe(
            build(Recipe, {**RUN, "grpo": {**plain, **more}, "run": str(tmp_path / name)}),
            progress=at if more else None,
        )
    rows = [
        [
            json.loads(line)
            for line in (tmp_path / n / "grpo" / "metrics.jsonl").read_text().splitlines()
        ]
        for n in ("here", "there")
    ]
    for one, other in zip(*rows, strict=True):
        assert one["reward/proxy"] == other["reward/proxy"] and one["loss"] == other["loss"]
    calls = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    # Whole groups of four, whatever `batch` is.
    # This process in the first run and a server or more in the second: on a slow machine one does
    # all before the other is there.
    assert {size for _, size in calls} == {"4"} and len({pid for pid, _ in calls}) >= 2
    changes = [
        json.loads(line)
        for line in (tmp_path / "there" / "grpo" / "reward" / "fleet.jsonl")
        .read_text()
        .splitlines()
    ]
    assert any(row["after"] == "dead" and "ended with status -9" in row["why"] for row in changes)
    assert not [
        child for child in psutil.Process().children(recursive=True) if "rewards" in child.cmdline()
    ]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"reward_source": "random"}, "a random one"),
        ({"function": {"call": "python:f@1"}}, "cannot take a function of this process"),
        (
            {"function": {"call": "a.py:f"}, "reward_servers": {"batch": 3}},
            "reward_servers.batch has no effect of a function",
        ),
        ({"reward_servers": {"addresses": ["http://a:1"], "servers": 2}}, "how many to start"),
    ],
)
def test_settings_that_exclude_reward_servers_are_refused(change, says):
    with pytest.raises(ConfigError, match=says):
        build(GRPOSection, {"reward_servers": {"servers": 2}, **change}, where="grpo")


def test_a_function_is_called_as_in_this_process(served):
    seen = []
    own = FunctionReward(
        lambda prompts, responses: seen.append(responses) or [1.0] * len(responses),
        batch=4,
    )
    reward, _ = served(own, batch=4)
    reward.score(ROLLOUTS)
    served_calls, seen[:] = sorted(seen), []
    own.score(ROLLOUTS)
    assert served_calls == sorted(seen)
