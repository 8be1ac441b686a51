"""Environments: those of other libraries, those in processes of their own, and those that fail."""

import collections
import contextlib
import json
import os
import random
import select
import shlex
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import uvicorn
from tests.rewards import published

from tether.core.errors import ConfigError
from tether.core.types import Message, Prompt, user
from tether.rewards.environments import EnvironmentThreads, environments_of
from tether.rewards.loading import register
from tether.rewards.tools import ToolEnvironment
from tether.settings.environment import EnvironmentConfig

EPISODES, TURNS = 100, 40
SERVER = Path(__file__).with_name("mcp_server.py")


def made(name, **settings):
    call = f"{published.__file__}:{name}"
    return environments_of(EnvironmentConfig(call=call, **{"time_limit": 60, **settings}))


def prompts(numbers, **row):
    message = (Message("user", "Play."),)
    return {n: Prompt(message, row={"seed": n, "idx": n, "answer": "4", **row}) for n in numbers}


def call(name, **arguments):
    function = {"name": name, "arguments": arguments}
    text = json.dumps({"id": "1", "type": "function", "function": function})
    return Message("assistant", "", tool_calls=(text,))


def play(environments, reply, episodes=EPISODES):
    """The scores of whole episodes; the episodes that had none, by reason."""
    begun = environments.begin(prompts(range(episodes)))
    failures = collections.Counter(one for one in begun.values() if isinstance(one, str))
    living = {number: 0.0 for number, one in begun.items() if not isinstance(one, str)}
    scores, draw = {}, random.Random(0)
    for _ in range(TURNS):
        for number, turn in environments.step({n: reply(draw) for n in living}).items():
            if isinstance(turn, str):
                failures[turn] += 1
                del living[number]
                continue
            living[number] += turn.reward or 0.0
            if turn.done:
                scores[number] = living.pop(number)
    environments.end()
    return {**scores, **living}, failures


def says(words):
    return lambda draw: Message("assistant", words(draw))


@pytest.mark.parametrize(
    ("name", "package", "words", "possible"),
    [
        ("textarena_guess", "textarena", lambda draw: f"[{draw.randint(1, 20)}]", (0, 1)),
        ("gymnasium_lake", "gymnasium", lambda draw: f"I go {draw.randint(0, 3)}", (0, 1)),
        ("minigrid_room", "minigrid", lambda draw: str(draw.randint(0, 2)), (0, 1)),
        ("gem_guess", "gem", lambda draw: f"\\boxed{{{draw.randint(1, 10)}}}", (-1, 1)),
        ("reasoning_gym_sums", "reasoning_gym", lambda draw: str(draw.randint(0, 99)), (0, 1)),
        ("skyrl_gym_gsm8k", "skyrl_gym", lambda draw: f"#### {draw.randint(3, 4)}", (0, 1)),
        ("openenv_echo", "openenv", lambda draw: "hello", (20, 20)),
        ("verifiers_sums", "verifiers", lambda draw: str(draw.randint(0, 9)), (1, 3)),
    ],
)
def test_an_environment_of_another_library_plays_whole_episodes(name, package, words, possible):
    pytest.importorskip(package)
    scores, failures = play(made(name), says(words))
    assert len(scores) == EPISODES and not failures
    assert all(possible[0] <= score <= possible[1] for score in scores.values())
    assert possible[0] == possible[1] or len({*scores.values()}) > 1


def test_verifiers_rewards_are_summed_by_their_weights():
    pytest.importorskip("verifiers")
    environments = made("verifiers_sums")
    environments.begin(prompts([7, 18]))
    turns = environments.step({7: Message("assistant", " 7\n"), 18: Message("assistant", "seven")})
    assert [turns[n].reward for n in (7, 18)] == [3.0, 0.0]


@pytest.mark.parametrize("processes", [False, True])
def test_the_public_methods_of_a_class_are_tools(processes):
    environments = made("Safe", processes=processes)
    (tool,) = json.loads(environments.tools)
    assert tool["function"]["name"] == "turn"
    environments.begin(prompts([1, 2], code=3))
    hints = environments.step({1: call("turn", number=5), 2: call("turn", number=3)})
    assert [hints[n].messages[0].content for n in (1, 2)] == ["too high", "open"]
    ends = environments.step({n: Message("assistant", "done") for n in (1, 2)})
    assert [(ends[n].reward, ends[n].done) for n in (1, 2)] == [(0.0, True), (1.0, True)]


def test_what_a_class_says_at_its_beginning_ends_the_last_turn():
    """As TRL 1.16 has it: `{**prompt[-1], "content": content + observation}`."""
    environments = made("Talking")
    turns = (Message("system", "s"), Message("user", "u"), Message("assistant", "a"))
    (opening,) = environments.begin({0: Prompt((*turns, Message("user", "Play.")))}).values()
    assert opening == (*turns, Message("user", "Play. The safe has 3 digits."))


def test_tools_that_only_a_task_brings_are_refused():
    """No prompt would show them, and no call would be read."""
    environments = made("safe_of_a_task")
    assert environments.tools == ""
    (reason,) = environments.begin(prompts([1])).values()
    assert "Make it without the row" in reason


@pytest.mark.parametrize(
    ("name", "reason"),
    [("Broken", "ValueError: no"), ("Endless", r"no answer within 0\.5 s")],
)
def test_one_that_cannot_be_made_is_refused_before_anything_runs(name, reason, monkeypatch):
    monkeypatch.setattr("tether.rewards.environments.FIRST", 0.5)
    with pytest.raises(ConfigError, match=f"{name} cannot be made: .*{reason}"):
        made(name)


def test_a_tool_that_hangs_is_answered_and_the_episode_goes_on():
    tool = f"{published.__file__}:hang"
    environments = environments_of(EnvironmentConfig(tools=(tool,), time_limit=2))
    environments.begin(prompts([1]))
    (turn,) = environments.step({1: call("hang", seconds=20)}).values()
    assert json.loads(turn.messages[0].content) == {"error": "TimeoutError: no answer within 1 s"}
    (turn,) = environments.step({1: call("hang", seconds=0)}).values()
    assert turn.messages[0].content == "0"


@pytest.mark.parametrize("processes", [False, True])
def test_what_makes_an_environment_may_take_the_task(processes):
    environments = made("counting", processes=processes)
    environments.begin(prompts([1, 2]))
    turns = environments.step({n: Message("assistant", "x" * n) for n in (1, 2)})
    assert [turns[n].reward for n in (1, 2)] == [1.0 - 4, 2.0 - 4]


def test_whatever_an_environment_does_in_its_process_is_a_reason_and_no_reward():
    kinds = ["raise", "hang", "big", "unicode", "die", "nan", "fine", "array"]
    environments = made("Bad", processes=True, time_limit=3, retries=0)
    begun = environments.begin(prompts(range(len(kinds))))
    assert not [one for one in begun.values() if isinstance(one, str)]
    replies = {n: Message("assistant", kind) for n, kind in enumerate(kinds)}
    turns = dict(zip(kinds, environments.step(replies).values(), strict=True))
    assert turns["raise"] == "the environment raised RuntimeError: boom"
    assert turns["hang"] == "the environment Bad gave no answer within 3 s"
    assert turns["big"] == "the environment answered with more than 1,000,000 bytes"
    assert turns["die"] == "the environment's process ended"
    assert turns["nan"] == "the environment returned nan"
    assert turns["unicode"].messages[0].content == "? odd"
    assert turns["fine"].reward == turns["array"].reward == 1.0


def test_an_environment_whose_process_dies_once_is_led_to_the_same_place(tmp_path):
    environments = made("Mortal", processes=True)
    environments.begin(prompts([0], mark=str(tmp_path / "died")))
    heard = [environments.step({0: Message("assistant", word)})[0] for word in ("a", "die", "b")]
    assert [turn.messages[0].content for turn in heard] == ["a", "a die", "a die b"]


def test_what_one_does_in_its_process_reaches_no_other():
    environments = made("Random", processes=True)
    scores, failures = play(environments, says(lambda draw: "go"), 20)
    assert not failures and len({*scores.values()}) == 1


@pytest.mark.parametrize("processes", [False, True])
def test_what_an_environment_holds_is_closed_at_the_end_of_its_episode(tmp_path, processes):
    environments = made("Holds", processes=processes)
    environments.begin(prompts(range(4), marks=str(tmp_path)))
    assert len([*tmp_path.iterdir()]) == 4
    environments.step({n: Message("assistant", "go") for n in range(4)})
    environments.end()
    for _ in range(200):
        if not [*tmp_path.iterdir()]:
            break
        time.sleep(0.05)
    assert not [*tmp_path.iterdir()]


def test_one_that_is_made_too_late_is_closed_once_it_is_there(tmp_path):
    environments = made("Late", time_limit=0.3, retries=1)
    assert {*map(type, environments.begin(prompts(range(2), marks=str(tmp_path))).values())} == {
        str,
    }
    environments.end()
    for _ in range(200):
        if len([*tmp_path.glob("*.closed")]) == 4:
            break
        time.sleep(0.05)
    assert len([*tmp_path.iterdir()]) == len([*tmp_path.glob("*.closed")]) == 4


def test_one_that_begins_at_the_second_try_is_not_made_a_third_time(tmp_path):
    environments = made("BeginsLate", retries=1)
    environments.begin(prompts(range(1), marks=str(tmp_path)))
    (turn,) = environments.step({0: Message("assistant", "go")}).values()
    assert turn.reward == 1.0 and len([*tmp_path.iterdir()]) == 2


def test_processes_of_one_task_draw_alike_and_those_of_two_do_not(tmp_path):
    environments = made("Holds", processes=True)
    first = {n: Prompt((Message("user", "Play."),), row={"seed": n // 2, "marks": str(tmp_path)})
             for n in range(4)}  # fmt: skip
    one, same, other, _ = (turns[-1].content for turns in environments.begin(first).values())
    environments.end()
    assert one == same != other
    assert environments.begin({0: first[0]})[0][-1].content == one  # another step, the same game
    environments.end()


def test_one_with_the_two_methods_is_itself_whatever_helpers_it_has():
    environments = made("Helped")
    environments.begin(prompts([3]))
    assert environments.step({3: Message("assistant", "go")})[3].reward == 3.0


def test_processes_for_servers_as_tools_are_refused():
    with pytest.raises(
        ValueError,
        match="processes needs an environment in a file: servers as tools",
    ):
        EnvironmentConfig(tools=("mcp:python server.py",), processes=True)


def test_a_server_of_openenv_plays_by_its_socket():
    pytest.importorskip("openenv")
    pytest.importorskip("websockets")
    from openenv.core.env_server import create_fastapi_app

    echo, action = published.openenv_echo(), published.openenv_action()
    app = create_fastapi_app(type(echo), action, type(echo.reset()), max_concurrent_envs=EPISODES)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    address = f"ws://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    environments = environments_of(EnvironmentConfig(call=address, time_limit=60))
    scores, failures = play(environments, says(lambda draw: "hello"))
    server.should_exit = True
    thread.join(20)
    assert not failures and {*scores.values()} == {20.0}


def test_the_tools_of_a_server_are_called_by_the_protocol():
    pytest.importorskip("mcp")
    path = f"PYTHONPATH={':'.join(map(shlex.quote, filter(None, sys.path)))}"
    address = f"mcp:env {path} {sys.executable} {SERVER}"
    environments = environments_of(EnvironmentConfig(tools=(address,), time_limit=30))
    names = [tool["function"]["name"] for tool in json.loads(environments.tools)]
    assert names == ["multiply", "fail", "leave", "picture"]
    environments.begin(prompts(range(3)))
    calls = {0: call("multiply", a=6, b=7), 1: call("multiply", a="x"), 2: call("fail", why="no")}
    turns = environments.step(calls)
    assert turns[0].messages[0].content == "42"
    assert all("error" in json.loads(turns[n].messages[0].content) for n in (1, 2))
    strange = environments.step({0: call("multiply", self=1), 1: call("picture")})
    assert "error" in json.loads(strange[0].messages[0].content)
    assert strange[1].messages[0].content == "a square\n[image, which cannot be shown]"
    assert isinstance(environments.step({0: call("leave")})[0], str)
    environments.begin(prompts(range(2)))
    again = environments.step({n: call("multiply", a=6, b=n) for n in range(2)})
    assert [again[n].messages[0].content for n in range(2)] == ["0", "6"], "it is connected anew"
    other = environments_of(EnvironmentConfig(tools=(address,), time_limit=30))
    assert other.make.args[0][0].server is environments.make.args[0][0].server


def test_a_server_without_tools_is_refused():
    with pytest.raises(ConfigError, match=r"mcp:/nowhere.* gave no list of its tools"):
        environments_of(EnvironmentConfig(tools=("mcp:/nowhere/at/all",)))


def test_what_python_hands_over_is_in_no_other_process():
    with pytest.raises(ValueError, match="needs an environment in a file"):
        EnvironmentConfig(call=register(published.Safe), processes=True)


def test_a_process_that_has_ended_is_not_killed_by_its_number(monkeypatch):
    """The number may be another process's by then."""
    environments = made("Safe", processes=True)
    ended, living = environments.make(), environments.make()
    number = living.process
    os.kill(ended.process, signal.SIGKILL)
    assert select.select([ended.socket], [], [], 60)[0]
    killed = []
    monkeypatch.setattr(os, "kill", lambda *one: killed.append(one))
    ended.close(), living.close()
    assert killed == [(number, signal.SIGKILL)]
    monkeypatch.undo()
    with contextlib.suppress(ProcessLookupError):
        os.kill(number, signal.SIGKILL)


@pytest.mark.parametrize("processes", [False, True])
def test_an_episode_that_a_limit_ended_is_worth_what_its_environment_says(processes):
    safe, bad = made("Safe", processes=processes), made("Bad", processes=processes)
    for environments in (safe, bad):
        environments.begin(prompts([1, 2], code=3))
    safe.step({1: call("turn", number=3), 2: call("turn", number=4)})
    assert safe.end([1, 2]) == {1: 1.0, 2: 0.0}
    assert bad.end([1]) == {1: None}


def test_what_a_class_of_tools_holds_is_closed():
    closed = []

    class Tools:
        def reset(self, **_):
            return None

        def look(self) -> str:
            """Look."""
            return "a wall"

        def close(self):
            closed.append(self)

    pool = EnvironmentThreads(Tools)
    pool.begin({0: Prompt((user("?"),))})
    pool.end()
    deadline = time.monotonic() + 10
    while not closed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(closed) == 1


def test_what_no_message_can_hold_is_a_fault_of_its_tool():
    def long() -> str:
        return "x" * 200_000

    def leave() -> str:
        sys.exit(3)

    def greet() -> dict[str, str]:
        return {"ü": "ä"}

    environment = ToolEnvironment([long, leave, greet])
    calls = [
        {"id": "1", "function": {"name": name, "arguments": {}}}
        for name in ("long", "leave", "greet")
    ]
    answers, _, _ = environment.step({"tool_calls": calls})
    contents = [answer["content"] for answer in answers]
    assert "the result has 200,000 characters" in contents[0]
    assert "SystemExit: 3" in contents[1]
    assert contents[2] == '{"ü": "ä"}'
    with pytest.raises(ConfigError, match="several tools are named long"):
        ToolEnvironment([long, greet, long])
