"""The dashboard's server: its door, its streams by a cursor, and requests to runs."""

import asyncio
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra dashboard")
from fastapi.testclient import TestClient

from tether.core.requests import Request, take_request
from tether.people.annotation.server.address import Address
from tether.people.annotation.server.guard import form_token
from tether.watch.live.board import Board
from tether.watch.live.server import TO_ENTER, _events, dashboard_app

WRITING = Path(__file__).with_name("writing.py")
ORIGIN = "http://127.0.0.1:8766"
TOKEN = "a-token-that-nobody-guesses"
METRIC = "reward/proxy"


def row(step, **more):
    return json.dumps({"step": step, "time": 1e9 + step, METRIC: step / 2, **more}) + "\n"


@pytest.fixture
def folder(tmp_path):
    """Two runs: one ended, one stopped."""
    for name, steps in (("a", 4), ("b", 6)):
        stage = tmp_path / "runs" / name / "ppo"
        stage.mkdir(parents=True)
        (stage.parent / "command.json").write_text('{"stages": ["ppo"], "config": {}}')
        (stage / "manifest.json").write_text('{"steps": 6}')
        (stage / "metrics.jsonl").write_text("".join(row(s, loss=1.0) for s in range(1, steps + 1)))
    (tmp_path / "runs" / "b" / "ppo" / "summary.json").write_text("{}")
    return tmp_path / "runs"


@pytest.fixture
def board(folder):
    board = Board(folder)
    board.look()
    return board


def visitor(board, inside=True):
    client = TestClient(dashboard_app(board, Address(port=8766), TOKEN), base_url=ORIGIN)
    if inside:
        assert client.get("/open", params={"token": TOKEN}).status_code == 200
    return client


def ids(board):
    return {run.name: key for key, run in board.runs.items()}


@pytest.mark.parametrize("place", ["/", "/stream", "/run/abc", "/stream/abc"])
def test_without_the_token_nothing_is_shown(board, place):
    client = visitor(board, inside=False)
    answer = client.get(place)
    assert answer.status_code == 401 and TO_ENTER.partition("`")[0] in answer.text
    assert client.get("/open", params={"token": "wrong"}).status_code == 401
    assert client.get(place).status_code == 401
    assert visitor(board).get("/").status_code == 200


def test_wrong_tokens_are_counted(board):
    client = visitor(board, inside=False)
    codes = [client.get("/open", params={"token": str(i)}).status_code for i in range(12)]
    assert codes == [401] * 10 + [429] * 2


def test_a_name_of_somebody_else_is_refused(board):
    answer = visitor(board).get("/", headers={"host": "evil.example"})
    assert answer.status_code == 421
    headers = visitor(board).get("/").headers
    assert "script-src 'self'" in headers["content-security-policy"]


def test_a_page_gets_what_came_after_its_tick_and_nothing_twice(board, folder):
    """The points that two pages have, one from the start and one that asks each second."""
    early, since, held = ids(board)["a"], 0, []
    for step in range(5, 9):
        tick, news = board.overview(METRIC, since)
        held += [
            x
            for run in news.get("runs", {}).values()
            for c in run["curves"]
            if run["name"] == "a"
            for x in c["x"]
        ]
        since = tick
        with (folder / "a" / "ppo" / "metrics.jsonl").open("a") as file:
            file.write(row(step))
        board.look()
    _, news = board.overview(METRIC, since)
    assert list(news["runs"]) == [early] and news["runs"][early]["step"] == 8
    (curve,) = news["runs"][early]["curves"]
    assert (curve["x"], curve["y"], curve["anew"]) == ([8], [4.0], False)
    assert held == list(range(1, 8))
    _, whole = board.overview(METRIC, 0)
    assert whole["runs"][early]["curves"][0]["x"] == list(range(1, 9))
    assert (
        "runs" not in board.overview(METRIC, board.tick)[1]
        or not board.overview(METRIC, board.tick)[1]["runs"]
    )


def test_a_run_is_sent_by_the_same_cursor(board, folder):
    key = ids(board)["a"]
    tick, first = board.run(key, 0)
    assert {c["key"] for c in first["curves"]} == {METRIC, "loss"} and first["steps"] == 6
    assert board.run(key, tick)[1] is None
    with (folder / "a" / "ppo" / "samples.jsonl").open("w") as file:
        file.write(
            json.dumps({"step": 5, "prompt": "p", "response": "\x1b[31mred", "proxy": 1}) + "\n",
        )
    with (folder / "a" / "ppo" / "metrics.jsonl").open("a") as file:
        file.write(row(5) + '{"step": 6, "rew')
    board.look()
    _, news = board.run(key, tick)
    assert [c["x"] for c in news["curves"]] == [[5]] and news["reset"] == []
    assert [r["response"] for r in news["rollouts"]] == ["␛[31mred"]


def test_a_run_that_was_closed_and_opened_again_comes_anew(board):
    """Its page must not have its points twice."""
    key = ids(board)["a"]
    tick, _ = board.run(key, 0)
    board.opened.clear()
    board.look()
    _, news = board.run(key, tick - 1)
    assert all(curve["anew"] and len(curve["x"]) == 4 for curve in news["curves"])


def test_a_deleted_run_goes_with_a_sentence(board, folder):
    key = ids(board)["a"]
    client = visitor(board)
    shutil.rmtree(folder / "a")
    for _ in range(6):
        board.look()
    assert list(ids(board)) == ["b"] and board.overview(METRIC, 0)[1]["ids"] == [ids(board)["b"]]
    assert client.get(f"/stream/{key}").status_code == 404
    answer = client.post(
        f"/run/{key}/stop",
        data={"token": form_token(TOKEN)},
        headers={"origin": ORIGIN},
    )
    assert answer.status_code == 404 and "deleted or moved" in answer.json()["error"]


def test_requests_reach_a_run_of_this_machine_and_nobody_else_can_make_them(tmp_path):
    root = tmp_path / "runs" / "live"
    program = subprocess.Popen(
        [sys.executable, str(WRITING), str(root), "1000", "0.1"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert program.stdout is not None and program.stdout.readline() == "1\n"
        board = Board(tmp_path / "runs")
        board.look()
        client, key, token = visitor(board), ids(board)["live"], {"token": form_token(TOKEN)}
        place = f"/run/{key}/checkpoint"
        assert (
            client.post(place, data=token, headers={"origin": "http://evil.example"}).status_code
            == 403
        )
        assert (
            client.post(place, data={"token": "no"}, headers={"origin": ORIGIN}).status_code == 403
        )
        stranger = visitor(board, inside=False)
        assert stranger.post(place, data=token, headers={"origin": ORIGIN}).status_code == 401
        assert not take_request(root / "ppo", Request.CHECKPOINT)
        assert (
            client.post(place, data=token, headers={"origin": ORIGIN}).json()["asked"]
            == "checkpoint"
        )
        assert take_request(root / "ppo", Request.CHECKPOINT)
        assert (
            client.post(f"/run/{key}/delete", data=token, headers={"origin": ORIGIN}).status_code
            == 404
        )
        program.kill()
        began = time.monotonic()
        while board.runs[key].condition != "crashed":
            assert time.monotonic() - began < 10
            board.look()
        answer = client.post(f"/run/{key}/stop", data=token, headers={"origin": ORIGIN})
        assert answer.status_code == 409 and "No process" in answer.json()["error"]
    finally:
        program.kill()
        program.wait()


def test_the_stream_is_of_events_that_go_on_after_the_last_one(board):
    board.over.set()
    client = visitor(board)
    assert client.get("/stream").text == ""
    board.over.clear()

    async def first(since):
        stream = _events(board, lambda tick: board.overview(METRIC, tick), since)
        return (await anext(stream)).decode()

    text = asyncio.run(first(0))
    head, data = text.strip().split("\n", 1)
    assert head == f"id: {board.mark}.{board.tick}" and text.endswith("\n\n")
    assert set(json.loads(data.removeprefix("data: "))["ids"]) == set(board.runs)


def test_a_live_reader_takes_a_hundredth_of_a_step_at_most(tmp_path):
    """Processor seconds of a look at a run that makes a step a second, 40 metrics and 16 rollouts
    in each.
    """
    stage = tmp_path / "runs" / "a" / "ppo"
    stage.mkdir(parents=True)
    (stage.parent / "command.json").write_text('{"stages": ["ppo"], "config": {}}')
    board, spent = Board(tmp_path / "runs"), []
    metrics, samples = (stage / name for name in ("metrics.jsonl", "samples.jsonl"))
    for step in range(1, 31):
        with metrics.open("a") as file:
            file.write(row(step, **{f"metric/{i}": 0.123456789 * i for i in range(40)}))
        with samples.open("a") as file:
            file.writelines(
                json.dumps({"step": step, "prompt": "p" * 300, "response": "r" * 600, "proxy": 0.5})
                + "\n"
                for _ in range(16)
            )
        began = time.process_time()
        board.look()
        key = next(iter(board.runs))
        board.overview(METRIC, board.tick - 1)
        board.run(key, board.tick - 1)
        spent.append(time.process_time() - began)
    assert sorted(spent)[len(spent) // 2] < 0.01
