"""Servers of a run answer programs that have its token, and survive whatever is sent to them."""

import copy
import http.client
import json
import random
import socket
import threading
import time

import pytest

from tether.core.types import Sampling
from tether.rollout.wire import GENERATE, as_request
from tether.runner.assembly.engines import engine_server
from tether.runner.assembly.models import open_model
from tether.scale.servers import http as servers_http
from tether.scale.servers.http import JsonServer
from tether.settings.model import ModelConfig

TOKEN = "a secret of the run"


@pytest.fixture
def serve():
    """Start a server, and give a function that asks it: (method, path, body, headers) -> status and
    answer.
    """
    started = []

    def start(server):
        threading.Thread(
            target=server.serve_forever,
            kwargs={"poll_interval": 0.02},
            daemon=True,
        ).start()
        started.append(server)

        def ask(method, path, body=b"", **headers):
            connection = http.client.HTTPConnection(*server.server_address[:2], timeout=10)
            given = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
            given |= {name.replace("_", "-"): value for name, value in headers.items()}
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.putrequest(method, path, skip_host="Host" in given)
            if method == "POST" and "Content-Length" not in given:
                given["Content-Length"] = str(len(content))
            for name, value in given.items():
                if value is not None:
                    connection.putheader(name, value)
            connection.endheaders(content or None)
            answer = connection.getresponse()
            content = answer.read() or b"{}"
            connection.close()
            is_json = answer.headers.get_content_type() == "application/json"
            return answer.status, json.loads(content) if is_json else {}

        return ask

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def echo(body):
    if body.get("fail"):
        raise {"key": KeyError, "zero": ZeroDivisionError, "memory": MemoryError}[body["fail"]](
            "as asked",
        )
    return 200, {"got": body}


@pytest.fixture
def ask(serve):
    return serve(
        JsonServer(
            ("127.0.0.1", 0),
            {"/described": lambda: {"name": "it"}},
            {"/echo": echo},
            TOKEN,
        ),
    )


def test_a_program_with_the_token_is_answered(ask):
    assert ask("POST", "/echo", {"a": 1}) == (200, {"got": {"a": 1}})
    assert ask("GET", "/described") == (200, {"name": "it"})


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": None}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": f"Basic {TOKEN}"}, 401),
        ({"Authorization": "Bearer é"}, 401),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:8000"}, 403),
        ({"Host": ""}, 403),
    ],
)
def test_strangers_and_web_pages_are_refused(ask, headers, status):
    for method, path in (("POST", "/echo"), ("GET", "/described")):
        refused, answer = ask(method, path, {"a": 1} if method == "POST" else b"", **headers)
        assert refused == status and TOKEN not in json.dumps(answer)
    assert ask("GET", "/health", Authorization=None)[0] == 200


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:99", "localhost:1", "[::1]:1", "LOCALHOST"],
)
def test_addresses_and_own_names_are_known(ask, host):
    assert ask("GET", "/described", Host=host)[0] == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content_Length": "-1"}, 400),
        ({"Content_Length": "many"}, 400),
        ({"Content_Length": "٣"}, 400),
        ({"Content_Length": "9" * 30}, 400),
        ({"Content_Length": str(10**9)}, 413),
        ({"Content_Length": ""}, 400),
    ],
)
def test_bodies_have_a_kind_and_a_size(ask, headers, status):
    headers = {
        name: value.encode() if not value.isascii() else value for name, value in headers.items()
    }
    start = time.monotonic()
    # A body that arrives after the refusal would reset the connection.
    assert ask("POST", "/echo", b"", **headers)[0] == status
    assert time.monotonic() - start < 5, "nothing is waited for or read"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b"\xff", 400),
        (b"[" * 100_000, 400),
        ({"fail": "key"}, 400),
        ({"fail": "zero"}, 500),
        ({"fail": "memory"}, 500),
    ],
)
def test_whatever_a_body_brings_about_is_an_answer(ask, body, status):
    assert ask("POST", "/echo", body)[0] == status
    assert ask("POST", "/echo", {"a": 1})[0] == 200


def test_half_a_body_is_given_up(ask, monkeypatch, serve):
    monkeypatch.setattr(servers_http, "BODY_SECONDS", 0.3)
    server = JsonServer(("127.0.0.1", 0), {}, {"/echo": echo}, TOKEN)
    alive = serve(server)
    with socket.create_connection(server.server_address[:2]) as half:
        half.sendall(
            f"POST /echo HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
            "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{".encode(),
        )
        half.settimeout(5)
        assert half.recv(100) == b"", "the server closes the connection"
    assert alive("POST", "/echo", {})[0] == 200


TINY = ModelConfig.model_validate({"source": "tiny", "dtype": "float32"})
GOOD = as_request((5, 6, 7), Sampling(4), 2, 3, 1, stop_ids=(1,), ours=True)
ODD = [
    *(None, True, -1, 0, 2**70, 1e308, -(2**63), 0.5, "", "x" * 50, "NaN", "\x00"),
    *([], {}, [[]], {"a": []}, [1, 2, [3]], [None], ["a"]),
]


def fuzzed(draw):
    """A request with one to three parts replaced by something odd, taken away or added."""
    body = json.loads(json.dumps({"model": "policy", **GOOD}))
    for _ in range(draw.randrange(1, 4)):
        part = draw.choice([body, body.get("sampling_params"), (body.get("sampling_params") or {})])
        if not isinstance(part, dict):
            continue
        key = draw.choice([*part, "prompt_logprobs", "extra_args", "n"]) if part else "n"
        if draw.random() < 0.15:
            part.pop(key, None)
        else:
            part[key] = copy.deepcopy(draw.choice(ODD))  # later changes stay within this request
    return body


def attack(serve, count):
    """(statuses of `count` fuzzed requests, samples of a well-behaved program meanwhile, its
    longest wait in seconds).
    """
    server = engine_server(open_model(TINY), ("127.0.0.1", 0), 16, TOKEN)
    server.engines["policy"] = server.engines["other"] = _whole(server)
    ask = serve(server)
    statuses, samples, waits, ended = [], [], [], threading.Event()

    def sample():
        while not ended.is_set():
            start = time.monotonic()
            samples.append(ask("POST", GENERATE, {"model": "policy", **GOOD}))
            waits.append(time.monotonic() - start)

    wanted = ask("POST", GENERATE, {"model": "policy", **GOOD})
    assert wanted[0] == 200
    thread = threading.Thread(target=sample)
    thread.start()
    draw = random.Random(0)
    try:
        for _ in range(count):
            path = draw.choice(
                [GENERATE, GENERATE, "/v1/load_lora_adapter", "/v1/unload_lora_adapter"],
            )
            body = (
                fuzzed(draw)
                if path == GENERATE
                else {"lora_name": draw.choice(ODD), "lora_path": draw.choice(ODD)}
            )
            statuses.append(ask("POST", path, body)[0])
    finally:
        ended.set()
        thread.join()
    assert ask("GET", "/health")[0] == 200 and server.worker.is_alive()
    for answer in samples:
        assert tokens(answer) == tokens(wanted), "nothing lost and nothing different"
    return statuses, samples, max(waits)


def tokens(answer):
    """The sampled ids; log-probabilities may differ by rounding, for requests that meet are decoded
    together.
    """
    status, body = answer
    assert status == 200, body
    return [one["token_ids"] for one in body["choices"]]


def _whole(server):
    from tether.data.chat import ChatEncoder
    from tether.models.tiny import tiny_model, tiny_tokenizer
    from tether.models.trunk import Role
    from tether.rollout.local import LocalEngine

    return LocalEngine(Role(tiny_model(0)), ChatEncoder(tiny_tokenizer(), (1,)), max_rows=16)


def test_an_engine_survives_fuzzed_requests(serve):
    statuses, samples, _ = attack(serve, 150)
    assert set(statuses) <= {200, 400, 404} and 400 in statuses and len(samples) > 1


@pytest.mark.slow
def test_an_engine_survives_twenty_thousand_fuzzed_requests(serve):
    statuses, samples, longest = attack(serve, 20_000)
    assert set(statuses) <= {200, 400, 404} and len(samples) > 100
    assert longest < 1.0


def test_a_dead_worker_is_not_healthy(serve):
    server = engine_server(open_model(TINY), ("127.0.0.1", 0), 16, TOKEN)
    ask = serve(server)
    assert ask("GET", "/health")[0] == 200
    server.asked.put(None)
    server.worker.join(5)
    assert ask("GET", "/health")[0] == 503
    assert ask("POST", GENERATE, {"model": "policy", **GOOD})[0] == 503
