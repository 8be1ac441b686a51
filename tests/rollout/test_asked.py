"""Servers that teach: the same model at all addresses, each token's number, and faults with names."""

import contextlib
import math
import threading
import time

import pytest

from tether.core.errors import ModelError, RunError
from tether.core.types import Prompt, Rollout, Sampling, StopReason, user
from tether.data.chat import ChatEncoder
from tether.models.tiny import tiny_tokenizer
from tether.rollout.asked import AskedTeacher
from tether.rollout.served import PROBED, probe_ids
from tether.runner.assembly.engines import engine_server
from tether.runner.assembly.models import open_model
from tether.scale.servers.http import JsonServer
from tether.settings.model import ModelConfig
from tether.settings.workers import ServersConfig

ENCODER = ChatEncoder(tiny_tokenizer(), (1,))
GENERATE = "/inference/v1/generate"


class Pretended:
    """A server whose log-probability of a token is minus its id over a hundred, less `off`."""

    def __init__(self, off=0.0, answer=None):
        self.asked, self.off, self.answer = [], off, answer
        models = {"/v1/models": lambda: {"data": [{"id": "large"}]}}
        health = {"/health": lambda: (200, {"at_work": 0.0})}
        self.server = JsonServer(("127.0.0.1", 0), models | health, {GENERATE: self.score})
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def score(self, body):
        ids = body["token_ids"]
        self.asked.append(ids)
        rows = [{str(i): {"logprob": -i / 100 - self.off}} for i in ids[1:]]
        answer = {"choices": [], "prompt_logprobs": [None, *rows]}
        return self.answer(ids, answer) if self.answer else (200, answer)


@pytest.fixture
def teach(tmp_path, monkeypatch):
    monkeypatch.delenv("TETHER_SERVER_TOKEN", raising=False)
    with contextlib.ExitStack() as ends:

        def start(*servers, top=0, **limits):
            for one in servers:
                ends.callback(one.server.server_close)
            config = ServersConfig(
                addresses=tuple(one.address for one in servers),
                start_seconds=5,
                request_seconds=2,
                **limits,
            )
            teacher = AskedTeacher(config, ENCODER, tmp_path, top)
            ends.callback(teacher.close)
            return teacher

        yield start


def rollout(count, spans=()):
    ids = tuple(range(20, 20 + count))
    return Rollout(
        (7, 8, 9),
        ids,
        (),
        StopReason.STOP_TOKEN,
        "",
        0,
        0,
        Sampling(),
        Prompt((user("x"),)),
        spans,
    )


def test_each_written_token_has_its_own_number(teach):
    """Also in episodes, whose other tokens are read and not counted."""
    first, second = Pretended(), Pretended()
    teacher = teach(first, second)
    found = teacher([rollout(5), rollout(6, ((0, 2), (4, 6)))] * 8)
    exact = [[-i / 100 for i in range(20, 25)], [-i / 100 for i in (20, 21, 24, 25)]]
    assert found == exact * 8
    asked = [ids for ids in first.asked + second.asked if ids[:3] == [7, 8, 9]]
    assert sorted(map(len, asked)) == [8] * 8 + [9] * 8


def test_servers_that_disagree_are_refused_with_both_numbers(teach):
    with pytest.raises(ModelError, match=r"nats, and http://\S+ gave them -\d+\.\d+.*one model"):
        teach(Pretended(), Pretended(off=0.5))


def test_a_stage_that_goes_on_finds_the_teacher_of_its_start(teach):
    server = Pretended()
    teach(server).close()
    teach(server).close()
    server.off = 0.5
    start = sum(-i / 100 for i in probe_ids(ENCODER)[1:])
    numbers = rf"{start - 0.5 * (PROBED - 1):.4f} nats, and {server.address} gave them {start:.4f}"
    with pytest.raises(ModelError, match=numbers):
        teach(server)


@pytest.mark.parametrize("other", [0, 1])
def test_a_server_that_decodes_ids_to_other_texts_is_refused(teach, other):
    """By the name of its model, which [sft] can have write; spaces around a token say nothing."""
    decode = ENCODER.tokenizer.decode

    def answer(ids, body):
        for i, row in zip(ids[1:], body["prompt_logprobs"][1:], strict=True):
            row[str(i)]["decoded_token"] = f" {decode([i + other])}"
        return 200, body

    if other:
        with pytest.raises(ModelError, match=r"teacher large has another tokenizer.*\[sft\]"):
            teach(Pretended(answer=answer))
    else:
        assert teach(Pretended(answer=answer))([rollout(2)]) == [[-0.2, -0.21]]


def test_tethers_own_server_gives_the_text_of_each_token(tmp_path):
    server = engine_server(open_model(ModelConfig(source="tiny", dtype="float32")), ("", 0), 4)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    config = ServersConfig(addresses=(address,), start_seconds=5, request_seconds=5)
    other = ChatEncoder(tiny_tokenizer(), (1,))
    try:
        AskedTeacher(config, other, tmp_path / "same").close()
        other.tokenizer.decode = lambda ids: f"<{ids[0]}>"
        with pytest.raises(ModelError, match="another tokenizer"):
            AskedTeacher(config, other, tmp_path / "other")
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda ids, answer: (200, {**answer, "prompt_logprobs": [None] * len(ids)}), "leaves out"),
        (
            lambda ids, answer: (422, {"error": "no prompt_logprobs here"}),
            "no prompt_logprobs here",
        ),
    ],
)
def test_a_server_that_gives_no_numbers_is_refused_in_its_words(teach, wrong, words):
    with pytest.raises(ModelError, match=words):
        teach(Pretended(answer=wrong))


@pytest.mark.parametrize(
    "hostile",
    [
        lambda ids, answer: (
            200,
            {**answer, "prompt_logprobs": [None, *[{"1": {"logprob": math.nan}}] * 3]},
        ),
        lambda ids, answer: (200, {"prompt_logprobs": "many"}),
        lambda ids, answer: (200, {**answer, "prompt_logprobs": answer["prompt_logprobs"][:3]}),
        lambda ids, answer: (500, {"error": "out of memory"}),
    ],
)
def test_one_that_turns_to_nonsense_is_left_and_another_gives_the_same(teach, hostile):
    bad = Pretended()
    teacher = teach(bad, Pretended())
    bad.answer = hostile
    assert teacher([rollout(4)] * 12) == [[-i / 100 for i in range(20, 24)]] * 12


def test_a_dead_one_and_a_late_one_lose_nothing(teach):
    late, dead, good = Pretended(), Pretended(), Pretended()
    teacher = teach(late, dead, good)
    late.answer = lambda ids, answer: time.sleep(30) or (200, answer)
    dead.server.server_close()
    assert teacher([rollout(4)] * 12) == [[-i / 100 for i in range(20, 24)]] * 12


def test_the_last_one_that_dies_ends_the_run_in_a_sentence(teach):
    only = Pretended()
    teacher = teach(only, restarts=0)
    only.answer = lambda ids, answer: (500, {"error": "out of memory"})
    with pytest.raises(RunError, match="no server is left"):
        teacher([rollout(4)])


def likeliest(body, ids):
    """Three tokens in the place of each, the written one among four."""
    rows = [
        {"5": {"logprob": -1.0}, "6": {"logprob": -0.5}, "7": {"logprob": -2.0}} for _ in ids[1:]
    ]
    for row, i in zip(rows, ids[1:], strict=True):
        row[str(i)] = {"logprob": -9.0}
    return 200, {**body, "prompt_logprobs": [None, *rows]}


def test_the_likeliest_tokens_come_in_their_order(teach):
    """Also where an output layer has rows without a token, of which one is likeliest."""

    def answer(ids, body):
        status, body = likeliest(body, ids)
        body["prompt_logprobs"][-1]["99999"] = {"logprob": -0.1}
        return status, body

    servers = [Pretended(answer=answer) for _ in range(2)]
    (rows,) = teach(*servers, top=3).likeliest([rollout(4, spans=((0, 1), (3, 4)))])
    assert rows == [([6, 5, 7], [-0.5, -1.0, -2.0])] * 2


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda rows: [row.popitem() for row in rows[1:]], "gives 3 likeliest tokens where 4"),
        (lambda rows: rows.pop(), "answers for"),
        (lambda rows: rows[-1].update({"-1": {"logprob": -0.1}}) or rows[-1].pop("5"), "gives 3"),
    ],
)
def test_likeliest_tokens_that_are_few_end_the_run(teach, spoil, words):
    def answer(ids, body):
        status, spoiled = likeliest(body, ids)
        if not sound:
            spoil(spoiled["prompt_logprobs"])
        return status, spoiled

    sound = [True]
    teacher = teach(Pretended(answer=answer), top=4)
    sound.clear()
    with pytest.raises(RunError, match=words):
        teacher.likeliest([rollout(4)])


def test_a_server_that_never_gives_so_many_is_refused_at_the_start(teach):
    """Before the policy has sampled."""
    with pytest.raises((RunError, ModelError), match="gives 4 likeliest tokens where 5"):
        teach(Pretended(answer=lambda ids, body: likeliest(body, ids)), top=5)
