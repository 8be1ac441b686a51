"""What the dashboard says of a run beside its curves: the verdict, its report, its place in a
sweep, tags and a note.
"""

import json
import os

import pytest

pytest.importorskip("fastapi", reason="needs the extra dashboard")
from fastapi.testclient import TestClient
from tests.watch.live.measured import write_runs

from tether.core.rundir import RunDirectory
from tether.people.annotation.server.address import Address
from tether.people.annotation.server.guard import form_token
from tether.watch.live.board import NOTES, Board
from tether.watch.live.server import dashboard_app

ORIGIN, TOKEN = "http://127.0.0.1:8766", "a-token-that-nobody-guesses"
FORM = {"token": form_token(TOKEN), "tags": "keep, <b>", "note": "the\nbaseline"}


def looked(folder, times=20):
    board = Board(folder)
    for _ in range(times):
        board.look()
    return board


def visitor(board, inside=True):
    client = TestClient(dashboard_app(board, Address(port=8766), TOKEN), base_url=ORIGIN)
    if inside:
        assert client.get("/open", params={"token": TOKEN}).status_code == 200
    return client


def told(board, since=0):
    """What a page is sent about runs, by name."""
    _, news = board.overview("loss", since)
    return {run["name"]: run["about"] for run in news.get("runs", {}).values() if run["about"]}


def key_of(board, name):
    return next(key for key, run in board.runs.items() if run.name == name)


def test_an_ended_run_has_the_verdict_of_its_report_and_a_going_one_none(tmp_path):
    write_runs(tmp_path, 16, 30)
    going = tmp_path / "sweep" / "run-15"
    (going / ".lock").write_text(str(os.getpid()))
    board = looked(tmp_path)
    said = {name: one["verdict"] for name, one in told(board).items()}
    words = {name: one.get("word") for name, one in said.items()}
    assert words["sweep/run-0"] == "undecided" and words["sweep/run-10"] == "higher"
    assert said["sweep/run-15"] == {}
    assert said["sweep/run-10"]["rate"] == "56.0% [50.0%, 62.0%]"
    (going / ".lock").unlink()
    tick = board.tick
    board.look()
    assert list(told(board, tick)) == ["sweep/run-15"]
    assert told(board)["sweep/run-15"]["verdict"]["word"] == "better"
    page = visitor(board).get(f"/run/{key_of(board, 'sweep/run-15')}/report.html").text
    assert told(board)["sweep/run-15"]["verdict"]["headline"] in page


def test_verdicts_wait_where_a_look_would_take_too_long(tmp_path, monkeypatch):
    """The first look makes none, so that pages open; later ones as many as their time allows."""
    write_runs(tmp_path, 4, 10)
    board = looked(tmp_path, 1)
    assert not any("verdict" in one for one in told(board).values())
    monkeypatch.setattr("tether.watch.live.board.JUDGING", 1e-9)
    board.look()
    assert not any("verdict" in one for one in told(board).values())
    monkeypatch.setattr("tether.watch.live.board.JUDGING", 60.0)
    board.look()
    assert all(one["verdict"]["word"] for one in told(board).values())
    tick = board.tick
    board.look()
    assert told(board, tick) == {}


def test_a_report_is_made_on_demand_and_leaves_nothing_in_the_folder(tmp_path):
    write_runs(tmp_path, 1, 30)
    run = tmp_path / "sweep" / "run-0"
    before = sorted(str(path) for path in run.rglob("*"))
    board = looked(tmp_path)
    place = f"/run/{key_of(board, 'sweep/run-0')}/report.html"
    assert visitor(board, inside=False).get(place).status_code == 401
    answer = visitor(board).get(place)
    policy = answer.headers["content-security-policy"]
    assert answer.status_code == 200 and "not shown to be better" in answer.text
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert "script-src 'sha256-" in answer.text.partition("<style")[0]
    assert sorted(str(path) for path in run.rglob("*")) == before
    assert visitor(board).get("/run/nothing/report.html").status_code == 404
    (run / "ppo" / "metrics.jsonl").unlink()
    (run / "ppo" / "summary.json").unlink()
    answer = visitor(board).get(place)
    assert answer.status_code == 404 and "holds no results" in answer.text


def test_links_in_a_run_are_not_read_for_its_verdict_or_its_report(tmp_path):
    write_runs(tmp_path / "secret", 1, 30)
    write_runs(tmp_path / "runs", 1, 30)
    run = tmp_path / "runs" / "sweep" / "run-0"
    (run / "sft").symlink_to(tmp_path / "secret" / "sweep" / "run-0" / "ppo")
    board = looked(tmp_path / "runs")
    said = told(board)["sweep/run-0"]["verdict"]
    assert said["word"] == "not read" and "inks" in said["headline"]
    answer = visitor(board).get(f"/run/{key_of(board, 'sweep/run-0')}/report.html")
    assert answer.status_code == 404 and "links" in answer.text
    (run / "sft").unlink()
    with (run / "ppo" / "samples.jsonl").open("wb") as file:
        file.truncate(1 << 40)  # a hole
    assert looked(tmp_path / "runs").runs
    assert told(looked(tmp_path / "runs"))["sweep/run-0"]["verdict"]["word"] == "not read"


@pytest.mark.parametrize("text", ["[]", '{"policies": 3, "gold_win_rate": "x"}', "{", '"\\ud800"'])
def test_files_that_hold_anything_hide_no_other_run(tmp_path, text):
    write_runs(tmp_path, 2, 30)
    for name in ("summary.json", "config.json"):
        (tmp_path / "sweep" / "run-0" / "ppo" / name).write_text(text)
    (tmp_path / "sweep" / "run-0" / NOTES).write_text(text)
    (tmp_path / "sweep" / "run-0" / "sweep.json").write_text(text)
    said = told(looked(tmp_path))
    assert said["sweep/run-1"]["verdict"]["word"] == "undecided"
    assert said["sweep/run-0"]["tags"] == said["sweep/run-0"]["note"] == ""


def test_notes_are_written_with_the_token_alone_and_are_no_file_of_the_run(tmp_path):
    run = RunDirectory.open(tmp_path / "runs" / "one", {"ppo": {"steps": 2}})
    run.log({"loss": 1.0}, 1)
    board = looked(tmp_path / "runs")
    client, stranger = visitor(board), visitor(board, inside=False)
    place, ours = f"/run/{key_of(board, 'one')}/note", {"origin": ORIGIN}
    assert stranger.post(place, data=FORM, headers=ours).status_code == 401
    assert client.post(place, data={**FORM, "token": "no"}, headers=ours).status_code == 403
    elsewhere = {"origin": "http://evil.example"}
    assert client.post(place, data=FORM, headers=elsewhere).status_code == 403
    assert not (run.path / NOTES).exists()
    assert client.post(place, data=FORM, headers=ours).status_code == 200
    assert json.loads((run.path / NOTES).read_text()) == {
        "tags": "keep, <b>",
        "note": "the\nbaseline",
    }
    tick = board.tick
    board.look()
    assert told(board, tick)["one"]["tags"] == "keep, <b>"
    again = RunDirectory.open(tmp_path / "runs" / "one", {"ppo": {"steps": 2}})
    again.truncate(0)
    assert (run.path / NOTES).is_file()
    client.post(place, data={**FORM, "note": "x" * 5000}, headers=ours)
    board.look()
    assert len(told(board)["one"]["note"]) == 2000


def test_a_folder_with_a_note_alone_may_become_a_run(tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / NOTES).write_text("{}")
    assert not RunDirectory.open(tmp_path / "new", {"ppo": {"steps": 2}}).begun


def test_a_note_is_not_written_through_a_link(tmp_path):
    run = RunDirectory.open(tmp_path / "runs" / "one", {"ppo": {"steps": 2}})
    run.log({"loss": 1.0}, 1)
    other = tmp_path / "other.json"
    other.write_text('{"tags": "secret"}')
    (run.path / NOTES).symlink_to(other)
    board = looked(tmp_path / "runs")
    assert told(board)["one"]["tags"] == ""
    place = f"/run/{key_of(board, 'one')}/note"
    assert visitor(board).post(place, data=FORM, headers={"origin": ORIGIN}).status_code == 200
    assert other.read_text() == '{"tags": "secret"}' and not (run.path / NOTES).is_symlink()
