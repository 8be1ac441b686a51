"""Files that another process appends to, and folders that are being written, moved or hostile."""

import json
import os
import random
import shutil
import tracemalloc

from tether.core.lines import CHUNK, Lines
from tether.watch.live.condition import json_inside, runs_below
from tether.watch.live.followed import MOST, MOST_KEYS, MOST_ROLLOUTS, Curve, FollowedRun


def line(step, **more):
    return json.dumps({"step": step, **more}) + "\n"


def test_only_whole_lines_come_and_each_comes_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = Lines(path)
    assert lines.read() == []
    text, given, draw = "".join(line(step) for step in range(200)), [], random.Random(3)
    with path.open("w") as file:
        while text:
            cut = draw.randrange(1, 40)
            file.write(text[:cut])
            file.flush()
            text = text[cut:]
            while rows := lines.read():
                given += rows
    assert [row["step"] for row in given] == list(range(200))
    assert (lines.writing, lines.left_out) == (0, 0)


def test_of_a_file_that_is_written_anew_all_rows_come_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2) + line(3))
    lines = Lines(path)
    assert len(lines.read()) == 3
    (tmp_path / "new").write_text(line(1) + line(2))
    os.replace(tmp_path / "new", path)
    assert [row["step"] for row in lines.read()] == [1, 2] and lines.writing == 1


def test_damaged_and_endless_lines_are_counted_and_the_rest_comes(tmp_path):
    path = tmp_path / "samples.jsonl"
    long = json.dumps({"step": 2, "response": "x" * 10_000_000})
    endless = "[" * (CHUNK + 1000)
    path.write_text(
        line(1) + "{half\n" + long + "\n" + endless + "\n" + "[1]\n" + line(3) + '{"step": 4',
    )
    lines, given = Lines(path), []
    while rows := lines.read():
        given += rows
    assert [row["step"] for row in given] == [1, 2, 3]
    assert len(given[1]["response"]) == 10_000_000 and lines.left_out == 3


def test_links_pipes_and_devices_are_not_read(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.jsonl").write_text(line(1, key="secret"))
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "metrics.jsonl").symlink_to(outside / "secret.jsonl")
    os.mkfifo(inside / "alarms.jsonl")
    (inside / "config.json").symlink_to(outside / "secret.jsonl")
    assert Lines(inside / "metrics.jsonl").read() == []
    assert Lines(inside / "alarms.jsonl").read() == []
    assert json_inside(inside / "config.json") == {}


def test_runs_are_those_below_without_links(tmp_path):
    for name in ("a/one", "b/c/two", "b/c/two/ppo"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.json").write_text("{}")
        (tmp_path / "runs" / name / "manifest.json").write_text("{}")
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(tmp_path / "runs" / "a" / "one", elsewhere / "three")
    (tmp_path / "runs" / "link").symlink_to(elsewhere)
    (tmp_path / "runs" / "model").mkdir()
    (tmp_path / "runs" / "model" / "config.json").write_text("{}")
    (tmp_path / "runs" / "b" / "round").symlink_to(tmp_path / "runs")
    names = [
        path.relative_to(tmp_path / "runs").as_posix() for path in runs_below(tmp_path / "runs")
    ]
    assert names == ["a/one", "b/c/two"]


def test_a_curve_keeps_its_ends_and_its_latest_points():
    curve = Curve()
    for step in range(1, 50_001):
        curve.add(step, step / 3, step)
    steps, values = curve.after(0, 50_000)
    assert len(curve.steps) <= MOST and steps[0] == 1 and steps[-1] == 50_000
    assert steps == sorted(steps) and steps[-100:] == list(range(49_901, 50_001))
    assert all(
        abs(value - step / 3) <= 1e-5 * step for step, value in zip(steps, values, strict=True)
    )
    assert curve.after(49_998, 60_000)[0] == [49_999, 50_000] and curve.after(50_000, 60_000) == (
        [],
        [],
    )
    assert curve.after(49_990, 49_992)[0] == [49_991, 49_992]


def test_a_resumed_run_begins_its_curves_anew(tmp_path):
    folder = tmp_path / "run" / "ppo"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(line(s, loss=s, time=s) for s in range(1, 6)))
    run = FollowedRun(tmp_path / "run", "run")
    run.look(1)
    (folder / "new").write_text("".join(line(s, loss=9, time=s) for s in range(1, 4)))
    os.replace(folder / "new", folder / "metrics.jsonl")
    run.look(2)
    stage = run.stages["ppo"]
    assert stage.begun == 2 and stage.curves["loss"].after(0, 9) == ([1, 2, 3], [9, 9, 9])


def test_a_day_of_updates_takes_no_more_memory_than_an_hour(tmp_path):
    """A step a second, with as many keys as are followed, and four rollouts in each."""
    folder = tmp_path / "run"
    folder.mkdir()
    run = FollowedRun(folder, "run")

    def write(first, last):
        with (
            (folder / "metrics.jsonl").open("a") as metrics,
            (folder / "samples.jsonl").open("a") as samples,
        ):
            for step in range(first, last):
                metrics.write(line(step, time=1e9 + step, **{f"m{step % 7}": 0.5, "loss": 1.5}))
                samples.write(line(step, prompt="p", response="word " * 20, proxy=0.1))

    write(0, 5000)
    run.look(1)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for hour in range(24):
        write(5000 + 3600 * hour, 5000 + 3600 * (hour + 1))
        run.look(hour + 2)
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert after - before < 3_000_000
    assert run.active.step == 5000 + 24 * 3600 - 1
    assert (
        len(run.rollouts) == MOST_ROLLOUTS
        and max(len(curve.steps) for curve in run.active.curves.values()) <= MOST
    )


def test_a_row_of_countless_keys_is_bounded(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(line(1, **{f"key{i}": i for i in range(100_000)}))
    run = FollowedRun(tmp_path, "run")
    run.look(1)
    assert len(run.stages[""].curves) == MOST_KEYS
