"""Servers that answer nonsense, by intent or not: an answer costs one verdict, one score or one
request, and never the run.
"""

import gzip
import itertools
import json
import resource
import time
import zlib

import pytest
from tests.scale.servers.raw import RawServer, http

from tether.core.digest import digest
from tether.core.errors import TetherError
from tether.core.received import received
from tether.core.types import Prompt, Rollout, Sampling, StopReason, user
from tether.judges.openai import ServedChat
from tether.rewards.servers import ServedReward
from tether.rollout.wire import DRAWN, MODELS, SCORED, read_drawn
from tether.runner.run import run_recipe
from tether.scale.servers.launch import Servers
from tether.settings.judges import JudgeServerConfig
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.settings.rewards import RewardServersConfig

DIGITS, DEEP = b"9" * 400, b"[" * 200_000 + b"]" * 200_000


@pytest.fixture
def serve():
    servers = []

    def start(answer):
        servers.append(RawServer(answer if callable(answer) else lambda path, body: answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def chat(usage=None, **choice):
    """A chat completion that says A, with parts replaced."""
    message = {"role": "assistant", "content": "A"}
    one = {"index": 0, "finish_reason": "stop", "message": message, **choice}
    usage = {"prompt_tokens": 10, "completion_tokens": 1} if usage is None else usage
    return json.dumps({"id": "x", "choices": [one], "usage": usage}).encode()


def place(raw=None, **parts):
    """The same with log-probabilities, of which a part is replaced; `raw` by bytes."""
    token = {"token": "A", "logprob": -1.0, "top_logprobs": [], **parts}
    text = chat(logprobs={"content": [token]})
    return text if raw is None else text.replace(b"-1.0", raw)


def endless(chunk, pause=0.0):
    yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    while True:
        yield f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n"
        time.sleep(pause)


def dripped_head():
    yield b"HTTP/1.1 200 OK\r\n"
    for number in itertools.count():
        yield f"X-{number}: 1\r\n".encode()
        time.sleep(0.02)


def bomb(bits):
    """300 MB of blanks, compressed a piece at a time."""
    pack = zlib.compressobj(wbits=bits)
    return b"".join([*(pack.compress(b" " * (1 << 20)) for _ in range(300)), pack.flush()])


GZIP, ZLIB = bomb(31), bomb(15)
ANY = {
    "nothing": lambda: b"",
    "no HTTP": lambda: b"hello\r\n\r\n",
    "an empty body": lambda: http(b""),
    "cut off": lambda: http(chat()[:40]),
    "a length that is too great": lambda: http(chat(), Content_Length="100000"),
    "a length that is too small": lambda: http(chat(), Content_Length="20"),
    "a length that is none": lambda: http(chat(), Content_Length="-5"),
    "two lengths": lambda: http(chat(), Content_length="3"),
    "no UTF-8": lambda: http(b'{"choices": "\xff\xfe"}'),
    "half a surrogate pair": lambda: http(b'{"choices": "\\ud800"}'),
    "HTML": lambda: http(b"<html><body>404</body></html>"),
    "a text": lambda: http("A"),
    "a number": lambda: http(5),
    "null": lambda: http(None),
    "true": lambda: http(True),
    "NaN": lambda: http(b"NaN"),
    "a list": lambda: http([]),
    "an object": lambda: http({}),
    "deep lists": lambda: http(DEEP),
    "deep objects": lambda: http(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "a deep error": lambda: http(DEEP, 400),
    "an error of 5 MB": lambda: http({"error": {"message": "x" * (5 << 20)}}, 400),
    "a number of 10,000 digits": lambda: http(b"9" * 10_000),
    "an error with status 200": lambda: http({"error": {"message": "no"}}),
    "a bomb of gzip": lambda: http(GZIP, Content_Encoding="gzip"),
    "a bomb of zlib": lambda: http(ZLIB, Content_Encoding="deflate"),
    "a bomb in an error": lambda: http(GZIP, 400, Content_Encoding="gzip"),
    "gzip that is none": lambda: http(chat(), Content_Encoding="gzip"),
    "another encoding": lambda: http(chat(), Content_Encoding="br, gzip"),
    "a head of 300 kB": lambda: http(chat(), **{f"X-{n}": "x" * 1000 for n in range(300)}),
    "a head that drips": dripped_head,
    "a body that drips": lambda: endless(b" ", 0.05),
    "an endless body": lambda: endless(b" " * 65536),
    "status 999": lambda: http(chat(), 999),
    "status 204": lambda: http(b"", 204),
    "a refusal": lambda: http({"detail": [{"loc": [], "msg": 5}]}, 422),
    "a refusal of nothing": lambda: http(b"", 400),
    "a refusal that names all": lambda: http(
        {"error": {"message": "max_tokens max_x_tokens temperature logprobs seed top_p stop"}},
        400,
    ),
    "a wait of a year": lambda: http(b"", 503, Retry_After="31536000"),
}
OF_A_CHAT = {
    "no choices": b'{"choices": []}',
    "choices that are null": b'{"choices": null}',
    "choices that are an object": b'{"choices": {"0": 1}}',
    "a choice that is null": b'{"choices": [null]}',
    "a choice that is a text": b'{"choices": ["A"]}',
    "no message": chat(message=None),
    "a message that is a text": chat(message="A"),
    "a message that is a list": chat(message=[1]),
    "a content that is a number": chat(message={"content": 5}),
    "a content that is an object": chat(message={"content": {"text": "A"}}),
    "parts that are numbers": chat(message={"content": [1, 2]}),
    "a part that is a number": chat(message={"content": [{"type": "text", "text": 5}]}),
    "a reason that is a number": chat(finish_reason=5),
    "log-probabilities that are a list": chat(logprobs=[1]),
    "log-probabilities that are a text": chat(logprobs={"content": "A"}),
    "a place that is null": chat(logprobs={"content": [None]}),
    "a token that is a number": place(token=5),
    "a token that is null": place(token=None),
    "no log-probability": chat(logprobs={"content": [{"token": "A"}]}),
    "a log-probability that is a text": place(raw=b'"-1.0"'),
    "a log-probability that is true": place(raw=b"true"),
    "a log-probability of 400 digits": place(raw=b"-" + DIGITS),
    "a log-probability of 1e400": place(raw=b"1e400"),
    "a log-probability that is NaN": place(raw=b"NaN"),
    "a log-probability that is infinite": place(raw=b"-Infinity"),
    "likeliest tokens that are numbers": place(top_logprobs=[1]),
    "a likeliest token that is a list": place(top_logprobs=[{"token": ["A"], "logprob": -1}]),
    "negative tokens": chat({"prompt_tokens": -(10**6), "completion_tokens": 0}),
    "tokens of 1e400": chat({"prompt_tokens": 1, "completion_tokens": 77}).replace(b"77", b"1e400"),
    "tokens of 400 digits": chat({"completion_tokens": 77}).replace(b"77", DIGITS),
    "tokens that are true": chat({"prompt_tokens": True, "completion_tokens": 1}),
    "tokens that are a text": chat({"prompt_tokens": "10", "completion_tokens": 1}),
    "tokens that are a fraction": chat({"prompt_tokens": 10.5, "completion_tokens": 1}),
    "a usage that is a list": chat([1]),
}


def judge(server, **settings):
    config = {"url": f"{server.url}/v1", "model": "m", "attempts": 1, "time_limit": 2.0}
    return ServedChat(JudgeServerConfig(**config | {"max_tokens": 100_000} | settings))


def memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


@pytest.mark.parametrize("name", [*ANY, *OF_A_CHAT])
def test_a_hostile_answer_costs_one_verdict(serve, name):
    good = []
    make = ANY.get(name) or (lambda: http(OF_A_CHAT[name]))
    server = serve(lambda path, body: http(chat()) if good else make())
    asked = judge(server)
    before, start = memory(), time.monotonic()
    (verdict,) = asked.verdicts([(user("A or B?"),)], ("A", "B"))
    assert (verdict.logprobs, verdict.parsed) == (None, False) and 0 < len(verdict.reason) < 300
    assert time.monotonic() - start < 20 and memory() - before < 200
    spent = asked.tokens
    assert 0 <= spent < 1000
    good.append(True)
    assert asked.verdicts([(user("A or B?"),)], ("A", "B"))[0].logprobs is not None
    assert asked.tokens > spent


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_carries_no_prompt_to_another_address(serve, status):
    other = serve(http(chat()))
    server = serve(http(b"", status, Location=f"{other.url}/v1/chat/completions"))
    (verdict,) = judge(server).verdicts([(user("A or B?"),)], ("A", "B"))
    assert verdict.logprobs is None and other.url in verdict.reason and other.paths == []


def test_honest_forms_of_an_answer_are_read(serve):
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "B is good."}]}
    parts = [thought, {"type": "text", "text": "A"}]
    forms = [
        http(gzip.compress(chat()), Content_Encoding="gzip"),
        http(zlib.compress(chat()), Content_Encoding="deflate"),
        http(chat(message={"content": parts})),
        http(place(raw=b"-0.1", top_logprobs=[{"token": "B", "logprob": None}])),
        http(chat({}, finish_reason=None)),
    ]
    for form in forms:
        (verdict,) = judge(serve(form)).verdicts([(user("A or B?"),)], ("A", "B"))
        assert verdict.logprobs is not None and verdict.logprobs[0] > verdict.logprobs[1], form


REFUSED = {
    "temperature": [
        {
            "message": "Unsupported value: 'temperature' does not support 0.0",
            "param": "temperature",
        },
    ],
    "max_tokens": [
        {"message": "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."},
        {"message": "this model has no such field", "param": "max_tokens"},
    ],
    "logprobs": [
        {"message": "You are not allowed to request logprobs from this model."},
        {"message": "Logprobs are not available"},
        {"message": "top_logprobs: extra input"},
    ],
}


@pytest.mark.parametrize(
    ("status", "field", "error"),
    [
        (status, field, error)
        for field, errors in REFUSED.items()
        for error in errors
        for status in (400, 403, 422)
    ],
)
@pytest.mark.parametrize("form", ["openai", "fastapi", "nested", "plain"])
def test_a_field_that_a_server_refuses_is_left_out_or_renamed(serve, form, status, field, error):
    words = {
        "openai": {"error": error},
        "fastapi": {"detail": [{"loc": ["body", field], "msg": "extra", "input": {"seed": 1}}]},
        "nested": [{"object": "error", "message": {"detail": [{"loc": [field], "msg": "no"}]}}],
        "plain": {"message": f"{field}: {error['message']}"},
    }[form]
    bodies = []

    def answer(path, body):
        bodies.append(json.loads(body))
        return http(words, status) if field in bodies[-1] else http(chat())

    asked = judge(serve(answer))
    for _ in range(2):
        (verdict,) = asked.verdicts([(user("A or B?"),)], ("A", "B"))
        assert verdict.logprobs is not None
    other = {"temperature": "temperature", "logprobs": "logprobs"}
    left = {"model", "messages", "temperature", "logprobs", "top_logprobs", "max_tokens"}
    left -= {field, *(["top_logprobs"] if field == "logprobs" else ())}
    left |= set() if field in other else {"max_completion_tokens"}
    assert bodies[-1].keys() == left
    assert field not in bodies[-2] or len(bodies) > 3, "it is not asked with the field again"


def test_refusals_of_fields_of_a_sampling_are_learned_one_after_the_other(serve):
    refuses = ["top_k", "min_p", "seed", "stop", "top_p", "temperature"]

    def answer(path, body):
        names = [name for name in refuses if name in json.loads(body)]
        return http({"message": f"`{names[0]}` is no field"}, 400) if names else http(chat())

    how = Sampling(4, 0.5, 7, 0.9, 0.1, ("END",))
    (reply,) = judge(serve(answer)).replies([(user("q"),)], how, seed=0, ordinals=[0])
    assert reply.text == "A"


# Engines.

ROW = {"token_id": 1, "logprob": -1.0}
CHOICE = {
    "index": 0,
    "token_ids": [1, 2],
    "logprobs": {"content": [ROW, ROW]},
    "finish_reason": "stop",
}


def drawn(raw=b"-1.0", **parts):
    text = json.dumps({"model": "v", "choices": [{**CHOICE, **parts}]}).encode()
    return text.replace(b"-1.0", raw)


def read(content):
    return read_drawn(
        received(content, DRAWN),
        "v",
        {"n": 1, "max_tokens": 4},
        spans=False,
        tokens=10,
    )


@pytest.mark.parametrize(
    "content",
    [
        *(
            drawn(raw)
            for raw in (
                b"1e400",
                b"-1e400",
                b"NaN",
                DIGITS,
                b"true",
                b'"-1"',
                b"0.5",
                b"-2e3",
                b"null",
            )
        ),
        *(
            drawn(token_ids=ids)
            for ids in (
                [1, -2],
                [1, 10],
                [1, 2**70],
                [1, True],
                [1, 1.5],
                ["1", "2"],
                [],
                None,
                "12",
                [1],
                [[1], [2]],
            )
        ),
        *(
            drawn(logprobs=it)
            for it in (None, [], {}, {"content": None}, {"content": [1, 2]}, {"content": [{}, {}]})
        ),
        *(drawn(index=it) for it in (None, "0", 1.5)),
        drawn(finish_reason=5),
        drawn(stop_reason=[1]),
        drawn(token_ids=[1] * 9, logprobs={"content": [ROW] * 9}),
        b"{}",
        b"[]",
        b"null",
        DEEP,
        b'{"choices": []}',
        b'{"choices": [null]}',
        b"",
        b"\xff",
        drawn()[:30],
        drawn().replace(b'"v"', b'"w"'),
        drawn().replace(b'"v"', b"5"),
    ],
    ids=lambda content: content[:12].decode("latin-1") + str(len(content)),
)
def test_samples_that_no_policy_draws_are_refused(content):
    assert read(drawn())[0].ids == (1, 2)
    with pytest.raises(ValueError, match=r"."):
        read(content)


@pytest.mark.parametrize("shape", [MODELS, SCORED])
@pytest.mark.parametrize(
    "content",
    [
        b"{}",
        DEEP,
        b'{"data": [], "prompt_logprobs": 5}',
        b'{"data": [{"id": 5}], "prompt_logprobs": [{"1": {"logprob": 1e400}}]}',
        b'{"data": [{"id": "a", "max_model_len": -1}], "prompt_logprobs": [{"1": 5}]}',
    ],
)
def test_descriptions_and_probes_have_a_shape(shape, content):
    with pytest.raises(ValueError, match=r"."):
        received(content, shape)


# Rewards.

ROLLOUT = Rollout(
    (1,),
    (2, 3),
    (-0.1, -0.2),
    StopReason.STOP_TOKEN,
    "text",
    0,
    0,
    Sampling(),
    Prompt((user("q"),)),
)


@pytest.mark.parametrize(
    ("score", "word"),
    [
        *(
            (f'{{"value": {value}}}', "returned")
            for value in (
                "Infinity",
                "-Infinity",
                "NaN",
                "1e400",
                "1e308",
                "-1e16",
                DIGITS.decode(),
            )
        ),
        *(
            (f'{{"value": 1, "parts": {{"a": {value}}}}}', "returned")
            for value in ("NaN", "1e400", "1e308")
        ),
        *((f'{{"value": 1, "steps": [[{end}, 1]]}}', "step") for end in (2, -1, 2**40)),
        ('{"value": 1, "steps": [[0, 1e400]]}', "returned"),
        ('{"value": 1, "parts": {"kl": 1}}', "named"),
        *((f'{{"value": {value}}}', "servers failed") for value in ("true", '"1"', "[1]", "{}")),
        ('{"value": 1, "steps": [[0]]}', "servers failed"),
        ('{"value": 1, "steps": [[0.5, 1]]}', "servers failed"),
        ('{"value": 1, "parts": [1]}', "servers failed"),
        ("5", "servers failed"),
        ("null", "servers failed"),
        ('{"reason": "x"}', "servers failed"),
    ],
)
def test_a_hostile_score_is_none_and_has_its_reason(serve, tmp_path, score, word):
    def answer(path, body):
        if path != "/v1/score":
            return http({"digest": "d", "name": "own"})
        return http(f'{{"scores": [{score}]}}'.encode())

    reward = served(serve(answer), tmp_path)
    try:
        (found,) = reward.score([ROLLOUT])
    finally:
        reward.close()
    assert found.value is None and word in found.reason and found.steps == ()


def served(server, folder, **settings):
    config = RewardServersConfig(addresses=(server.url,), start_seconds=5, restarts=5, **settings)
    servers = Servers(lambda host, port: [], [], folder / "reward", config.running)
    return ServedReward("own", servers, config, folder / "reward", "d")


# Whole runs.


def run(tmp_path, **section):
    (tmp_path / "prompts.txt").write_text("\n".join(f"question {n}" for n in range(8)) + "\n")
    values = {
        "run": str(tmp_path / "run"),
        "model": {"source": "tiny", "dtype": "float32"},
        "grpo": {
            "data": {"path": str(tmp_path / "prompts.txt")},
            "function": {"call": "tether.quickstart.judges:letters"},
            "steps": 2,
            "prompts_per_step": 2,
            "samples_per_prompt": 2,
            "max_new_tokens": 4,
            **section,
        },
    }
    try:
        run_recipe(build(Recipe, values))
    except TetherError as error:
        return str(error)
    return ""


def test_a_run_whose_judge_is_hostile_ends_with_a_result_or_a_sentence(serve, tmp_path):
    quick = [make for name, make in ANY.items() if "drip" not in name and "endless" not in name]
    bodies = itertools.cycle([*quick, *(lambda b=b: http(b) for b in OF_A_CHAT.values())])
    server = serve(lambda path, body: next(bodies)())
    judging = {"url": f"{server.url}/v1", "model": "m", "attempts": 1, "time_limit": 2.0}
    evaluate = {"every": 1, "prompts": 4, "judge": {"server": judging, "rubric": "helpful"}}
    fault = run(tmp_path, evaluate=evaluate)
    assert server.paths and (not fault or "judge" in fault)


def test_a_run_whose_rewards_come_from_a_hostile_server_ends_in_a_sentence(serve, tmp_path):
    digests = []

    def answer(path, body):
        if path == "/v1/reward":
            settings = json.loads((tmp_path / "run/grpo/reward/settings.json").read_text())
            digests.append(digest(settings["reward"]))
            return http({"digest": digests[-1], "name": "function"})
        return http({}) if path == "/health" else next(bodies)()

    bodies = itertools.cycle(make for name, make in ANY.items() if "drip" not in name)
    server = serve(answer)
    rewards = {"addresses": [server.url], "start_seconds": 3, "request_seconds": 2, "restarts": 1}
    fault = run(tmp_path, reward_servers=rewards)
    assert digests and "/v1/score" in server.paths and fault


def test_a_run_whose_engine_is_hostile_ends_in_a_sentence(serve, tmp_path):
    bodies = itertools.cycle(make for name, make in ANY.items() if "drip" not in name)
    server = serve(lambda path, body: http({}) if path == "/health" else next(bodies)())
    engine = {"kind": "served", "addresses": [server.url], "start_seconds": 3, "restarts": 1}
    fault = run(tmp_path, engine=engine, lora={"rank": 2})
    assert len(server.paths) > 1 and fault
