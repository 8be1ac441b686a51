"""Another user of the machine and a web page get nothing from a run's servers, at any path; vLLM's
server has the same door.
"""

import asyncio
import http.client
import importlib
import json
import os
import subprocess
import sys
import threading

import pytest

from tether.core.errors import ModelError
from tether.core.types import Score
from tether.rewards.servers import reward_server
from tether.rollout.wire import GENERATE, REPLACE
from tether.runner.assembly.engines import IN_VLLM, engine_server
from tether.runner.assembly.models import open_model
from tether.runner.run import run_recipe
from tether.settings.model import ModelConfig
from tether.settings.reading import build
from tether.settings.recipe import Recipe

TOKEN = "a secret of the run"
STRANGERS = {
    "without a token": ({}, 401),
    "with another token": ({"Authorization": "Bearer guessed"}, 401),
    "a page of another site": ({"Origin": "http://evil.example"}, 403),
    "a page that knows the token": (
        {"Origin": "http://evil.example", "Authorization": (f"Bearer {TOKEN}")},
        403,
    ),
    "a name that leads here": ({"Host": "evil.example"}, 403),
    "a name that leads here, with the token": (
        {"Host": "evil.example", "Authorization": (f"Bearer {TOKEN}")},
        403,
    ),
}


class Length:
    """A reward of text lengths."""

    name = "length"

    def score(self, rollouts):
        return [Score(float(len(one.text))) for one in rollouts]


def engine():
    return engine_server(
        open_model(ModelConfig.model_validate({"source": "tiny", "dtype": "float32"})),
        ("127.0.0.1", 0),
        4,
        TOKEN,
    )


@pytest.fixture(
    params=[engine, lambda: reward_server(Length(), "digest", ("127.0.0.1", 0), TOKEN)],
    ids=["engine", "reward"],
)
def server(request):
    server = request.param()
    threading.Thread(
        target=server.serve_forever,
        kwargs={"poll_interval": 0.02},
        daemon=True,
    ).start()
    yield server
    server.shutdown()
    server.server_close()


def answered(port, method, path, headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    body = b"{}" if method == "POST" else None
    connection.request(method, path, body, {"Content-Type": "application/json", **headers})
    answer = connection.getresponse()
    result = answer.status, json.loads(answer.read() or b"{}")
    connection.close()
    return result


def paths(server):
    return [
        *(("GET", path) for path in server.get),
        *(("POST", path) for path in server.post),
        ("GET", "/x"),
        ("POST", "/x"),
    ]


@pytest.mark.parametrize("who", STRANGERS)
def test_strangers_are_refused_at_every_path(server, who):
    headers, status = STRANGERS[who]
    asked = paths(server)
    assert len(asked) >= 4
    for method, path in asked:
        refused, words = answered(server.server_address[1], method, path, headers)
        assert (refused, [*words]) == (status, ["error"]), (method, path)
        assert TOKEN not in words["error"]
    method, path = asked[0]
    assert (
        answered(server.server_address[1], method, path, {"Authorization": (f"Bearer {TOKEN}")})[0]
        == 200
    )


OTHER_USER = """
import http.client, json, os, sys
port, process, paths = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
def status(method, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, b"{}" if method == "POST" else None, {"Content-Type": "application/json"})
    return connection.getresponse().status
status("GET", "/health")  # which imports all that is needed
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
try:
    secret = open(f"/proc/{process}/environ", "rb").read()
except PermissionError:
    secret = b""
print(json.dumps([os.getuid(), [status(*one) for one in paths], len(secret)]))
"""


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0,
    reason=("root alone becomes another user"),
)
def test_another_user_of_the_machine_is_refused_at_every_path_and_cannot_read_the_token(server):
    asked = paths(server)
    command = [
        sys.executable,
        "-c",
        OTHER_USER,
        str(server.server_address[1]),
        str(os.getpid()),
        json.dumps(asked),
    ]
    user, statuses, seen = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout,
    )
    assert (user, statuses, seen) == (65534, [401] * len(asked), 0)


# vLLM's server


@pytest.fixture
def door(monkeypatch):
    """Who asks an application behind the door: (path, headers) -> the status, or the application's
    own 200.
    """
    monkeypatch.setenv("TETHER_SERVER_TOKEN", TOKEN)
    monkeypatch.syspath_prepend(str(IN_VLLM))
    module = importlib.import_module("tether_door")

    async def application(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    behind = module.Door(application)

    def ask(path, kind="http", **headers):
        sent, headers = [], {"Host": "127.0.0.1:8000", **headers}

        async def send(message):
            sent.append(message)

        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        asyncio.run(behind({"type": kind, "path": path, "headers": raw}, None, send))
        return sent[0].get("status", sent[0]["type"])

    return ask


@pytest.mark.parametrize(
    "path",
    [
        GENERATE,
        "/v1/models",
        "/v1/load_lora_adapter",
        "/weight_info",
        "/metrics",
        "/docs",
        *REPLACE,
    ],
)
def test_the_door_before_vllm_is_closed_at_every_path(door, path):
    assert door(path) == door(path, Authorization="Bearer guessed") == 401
    assert door(path, Authorization=f"Bearer {TOKEN}") == 200
    assert door(path, Authorization=f"Bearer {TOKEN}", Origin="http://evil.example") == 403
    assert door(path, "websocket") == "websocket.close"
    assert door("/health") == 200 and door("/health/") == door("//health") == 401


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((name, 200) for name in ("127.0.0.1", "[::1]:8000", "LOCALHOST:1", "gpu-7:8000")),
        *((name, 403) for name in ("evil.example", "evil.example:8000", "", "localhost.evil", ":")),
    ],
)
def test_the_door_before_vllm_answers_to_its_own_names(monkeypatch, request, host, status):
    monkeypatch.setenv("TETHER_SERVER_NAME", "gpu-7")
    door = request.getfixturevalue("door")
    assert door("/v1/models", Authorization=f"Bearer {TOKEN}", Host=host) == status


def test_the_door_stands_in_starlette_as_vllm_puts_it(monkeypatch):
    """vLLM imports the name and calls add_middleware with the class."""
    applications = pytest.importorskip("starlette.applications")
    routing, responses = (
        pytest.importorskip(f"starlette.{name}") for name in ("routing", "responses")
    )
    client = pytest.importorskip("starlette.testclient").TestClient
    monkeypatch.setenv("TETHER_SERVER_TOKEN", TOKEN)
    monkeypatch.syspath_prepend(str(IN_VLLM))
    app = applications.Starlette(
        routes=[
            routing.Route(
                "/pause",
                lambda _: responses.PlainTextResponse("paused"),
                methods=["POST"],
            ),
        ],
    )
    app.add_middleware(importlib.import_module("tether_door").Door)
    with client(app) as ask:
        own = {"Host": "localhost"}
        assert ask.post("/pause", headers=own).status_code == 401
        allowed = {**own, "Authorization": f"Bearer {TOKEN}"}
        assert ask.post("/pause", headers=allowed).text == "paused"


def test_the_door_needs_a_token(monkeypatch):
    monkeypatch.delenv("TETHER_SERVER_TOKEN", raising=False)
    monkeypatch.syspath_prepend(str(IN_VLLM))
    with pytest.raises(RuntimeError, match="needs the token of the run"):
        importlib.import_module("tether_door").Door(None)


@pytest.mark.parametrize("lora", [{"rank": 8}, False])
def test_vllm_is_started_with_the_token_and_the_door(tmp_path, monkeypatch, lora):
    started = []

    def stop(policy, encoder, servers, *args, **more):
        started.append((servers.command("127.0.0.1", 7), servers.environment, servers.token))
        raise ModelError("far enough")

    monkeypatch.setattr("tether.runner.assembly.engines.ServedEngine", stop)
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    (tmp_path / "prompts.txt").write_text("a\nb\n")
    section = {
        "data": {"path": str(tmp_path / "prompts.txt")},
        "function": {"call": "tether.quickstart.judges:letters"},
    }
    section |= {
        "engine": {"kind": "vllm", "servers": 1, "python": sys.executable},
        "lora": lora,
        "steps": 1,
        "roles": "separate",
    }
    values = {
        "run": str(tmp_path / "run"),
        "model": {"source": "tiny", "dtype": "float32"},
        "grpo": section,
    }
    with pytest.raises(ModelError, match="far enough"):
        run_recipe(build(Recipe, values))
    ((command, environment, token),) = started
    words = [*command]
    assert (
        words[0] == "env"
        and f"PYTHONPATH={IN_VLLM}{os.pathsep}/somewhere" in words[: words.index(sys.executable)]
    )
    assert (
        words[words.index("--middleware") + 1] == "tether_door.Door"
        and "vllm.entrypoints.openai.api_server" in words
    )
    assert (
        environment["VLLM_API_KEY"] == environment["TETHER_SERVER_TOKEN"] == token
        and len(token) > 30
    )
    assert token not in " ".join(words), "a command line can be read by everybody"
    assert ("VLLM_SERVER_DEV_MODE=1" in words) == (lora is False)
