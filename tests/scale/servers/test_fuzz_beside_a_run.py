"""A run samples and scores through servers while somebody with the token sends them fuzz: its
results are those without.
"""

import http.client
import json
import os
import random
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
from tests.every_stage import results
from tests.runner.journeys import numbered_prompts
from tests.scale.servers.test_http import ODD, fuzzed

from tether.rollout.wire import GENERATE
from tether.runner.run import run_recipe
from tether.scale.servers.launch import free_port
from tether.settings.reading import build
from tether.settings.recipe import Recipe

TOKEN = "a token that the attacker has, too"
BY_CLOCK = ("engine/", "policy/engine_gap", "alarms")
"""Beginnings of what a server's load may change: its speed, and the rounding of log-probabilities
that are only measured.
"""


class Client:
    """Somebody with the token, over one connection to each server."""

    def __init__(self, ports):
        self.ports, self.lines = ports, {}

    def ask(self, server, method, path, body=None):
        """(status, answer) of a request."""
        for attempt in (0, 1):
            line = self.lines.setdefault(
                server,
                http.client.HTTPConnection("127.0.0.1", self.ports[server], timeout=60),
            )
            try:
                line.request(
                    method,
                    path,
                    body,
                    {"Authorization": (f"Bearer {TOKEN}"), "Content-Type": "application/json"},
                )
                answer = line.getresponse()
                return answer.status, answer.read()
            except (http.client.HTTPException, ConnectionError):  # a refused body ends a connection
                self.lines.pop(server).close()
                if attempt:
                    raise
        raise AssertionError


@pytest.fixture
def servers(tmp_path, monkeypatch):
    """Processes of `tether engine` and `tether rewards`: their ports, and the recipe of a run that
    uses them.
    """
    monkeypatch.setenv("TETHER_SERVER_TOKEN", TOKEN)
    ports = {name: free_port("127.0.0.1") for name in ("engine", "reward", "control")}
    model = {"source": "tiny", "dtype": "float32"}
    section = {
        "data": numbered_prompts(tmp_path),
        "function": {"call": "tether.quickstart.judges:letters"},
        "steps": 12,
    }
    section |= {
        "prompts_per_step": 4,
        "samples_per_prompt": 2,
        "max_new_tokens": 8,
        "sample_rows": 8,
        "checkpoint_every": 4,
    }
    section |= {"optimizer": {"learning_rate": 1e-2}}
    section |= {"engine": {"kind": "served", "addresses": [f"http://127.0.0.1:{ports['engine']}"]}}
    section |= {"reward_servers": {"addresses": [f"http://127.0.0.1:{ports['reward']}"]}}

    def recipe(name):
        return build(Recipe, {"run": str(tmp_path / name), "model": model, "grpo": section})

    scoring = (
        recipe("x")
        .section("grpo")
        .model_dump(mode="json", include={"reward_source", "function"}, exclude_unset=True)
    )
    (tmp_path / "settings.json").write_text(
        json.dumps({"reward": scoring, "scorer": None, "model": model}),
    )
    commands = {
        "engine": ["engine", "--model", "tiny", "--dtype", "float32"],
        "reward": ["rewards", str(tmp_path / "settings.json")],
        "control": ["rewards", str(tmp_path / "settings.json")],
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tether", *command, "--port", str(ports[name])],
            stdout=subprocess.DEVNULL,
        )
        for name, command in commands.items()
    ]
    end, client = time.monotonic() + 120, Client(ports)
    for name in ports:
        while True:
            try:
                client.ask(name, "GET", "/health")
                break
            except OSError:
                assert time.monotonic() < end
                time.sleep(0.2)
    yield ports, recipe, tmp_path
    for process in started:
        assert process.poll() is None, "a server has ended"
        process.kill()
        process.wait()


def compared(folder, name):
    """What a run amounts to, without what depends on the load of its servers."""
    found = {}
    for file, value in results(folder / name).items():
        if file.endswith("metrics.jsonl"):
            value = [
                {key: cell for key, cell in row.items() if not key.startswith(BY_CLOCK)}
                for row in value
            ]
        if "/engine/" not in file and "/reward/" not in file and not file.endswith("summary.json"):
            found[file] = value
    return found


def attack(ports, count, statuses):
    """Send so many requests, in turns to both servers: odd bodies, odd paths, halves, wrong
    tokens.
    """
    draw, client, name = random.Random(0), Client(ports), "policy"
    for number in range(count):
        if number % 200 == 0:
            status, answer = client.ask("engine", "GET", "/v1/models")
            names = [one["id"] for one in json.loads(answer)["data"]]
            name = names[-1] if status == 200 else name
        if number % 2:
            body = {
                "rollouts": draw.choice([*ODD, [draw.choice(ODD)], [{"text": draw.choice(ODD)}]]),
            }
            statuses.append(
                client.ask(
                    "reward",
                    "POST",
                    draw.choice(["/v1/score", "/v1/reward"]),
                    json.dumps(body),
                )[0],
            )
            continue
        path = draw.choice(
            [GENERATE, GENERATE, GENERATE, "/v1/load_lora_adapter", "/v1/unload_lora_adapter"],
        )
        body = (
            {**fuzzed(draw), "model": draw.choice([name, draw.choice(ODD)])}
            if path == GENERATE
            else {}
        )
        body = body or {"lora_name": draw.choice(ODD), "lora_path": draw.choice(ODD)}
        text = json.dumps(body)
        statuses.append(
            client.ask(
                "engine",
                "POST",
                path,
                text[: draw.randrange(len(text))] if draw.random() < 0.05 else text,
            )[0],
        )


def watch(ports, waits, ended):
    """Note how long an honest program waits for each server, every 20 ms; nobody else asks the
    control.
    """
    client = Client(ports)
    while not ended.wait(0.02):
        for server, path in (
            ("engine", "/v1/models"),
            ("control", "/v1/reward"),
            ("reward", "/v1/reward"),
        ):
            start = time.monotonic()
            assert client.ask(server, "GET", path)[0] == 200
            waits[server].append(time.monotonic() - start)


def watched(ports, work):
    """The longest wait of an honest program for each server, in seconds, while something is
    done.
    """
    waits, ended = {name: [] for name in ports}, threading.Event()
    watcher = threading.Thread(target=watch, args=(ports, waits, ended))
    watcher.start()
    try:
        work()
    finally:
        ended.set()
        watcher.join()
    assert len(waits["control"]) > 10
    return {name: max(times) for name, times in waits.items()}


def runs_beside_fuzz(servers, count):
    """Run undisturbed, then again and again until all of the fuzz is sent; the longest waits of an
    honest program.
    """
    ports, recipe, folder = servers
    run_recipe(recipe("calm"))
    wanted, statuses = compared(folder, "calm"), []
    attacker = threading.Thread(target=attack, args=(ports, count, statuses))
    attacker.start()
    worst, number = dict.fromkeys(ports, 0.0), 0
    while attacker.is_alive() or not number:
        number += 1
        longest = watched(ports, partial(run_recipe, recipe(f"fuzzed-{number}")))
        worst = {name: max(wait, longest[name]) for name, wait in worst.items()}
        other = compared(folder, f"fuzzed-{number}")
        assert [
            name for name in sorted({*wanted, *other}) if wanted.get(name) != other.get(name)
        ] == []
        print(
            f"run {number} is the same; {len(statuses)} requests so far; the longest waits in "
            f"seconds {worst}",
            flush=True,
        )
    attacker.join()
    for log in folder.glob("fuzzed-*/grpo/*/fleet.jsonl"):
        states = {json.loads(line)["after"] for line in log.read_text().splitlines()}
        assert states and not states & {"suspect", "dead", "retired"}, log.read_text()
    assert len(statuses) == count and set(statuses) <= {200, 400, 404}, sorted(set(statuses))
    assert min(statuses.count(400), statuses.count(200)) > count // 100
    return worst


def test_a_run_beside_fuzz_has_the_results_of_one_without(servers):
    runs_beside_fuzz(servers, 300)


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one processor is shared by all")
def test_a_run_beside_twenty_thousand_fuzzed_requests_has_the_results_of_one_without_and_never_waits_a_second(
    servers,
):
    worst = runs_beside_fuzz(servers, 20_000)
    # the machine makes the control wait, too
    assert max(worst["engine"], worst["reward"]) < worst["control"] + 1.0, worst
