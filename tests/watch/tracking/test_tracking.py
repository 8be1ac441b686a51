"""Trackers have what a run writes, each step once; one that is down, slow or gone changes nothing
about the run.
"""

import importlib.util
import json
import shutil
import sqlite3
import sys
import threading
import time
import warnings
from collections import defaultdict

import pytest
from tests.every_stage import recipe
from tests.watch.tracking import tracked

from tether.core.errors import ConfigError
from tether.core.rundir import RunDirectory
from tether.core.types import Alarm
from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.watch.tracking import follow as tracking

LAST = "summary/seconds"
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")


class Recorder:
    """A tracker that writes down its calls, and in which a test can plant a fault."""

    def __init__(self, calls):
        self.id, self.calls = "7", calls

    def log(self, metrics, step, at):
        self.calls.fault()
        self.calls.append(("log", step, metrics))

    def samples(self, rows, step):
        self.calls.append(("samples", step, [*rows]))

    def alarm(self, alarm):
        self.calls.append(("alarm", alarm["step"], alarm["detector"]))

    def close(self, complete):
        self.calls.append(("close", complete, None))


@pytest.fixture
def calls(monkeypatch):
    """The calls of a recorder in W&B's place; `calls.fault` is called by its `log`, and
    `calls.started` are its starts.
    """

    class Calls(list):
        fault = staticmethod(lambda: None)

    calls = Calls()
    calls.started = []

    def start(name, run):
        calls.started.append(run)
        return Recorder(calls)

    monkeypatch.setattr(tracking, "start_tracker", start)
    monkeypatch.setattr(tracking, "check_trackers", lambda names: None)
    monkeypatch.setattr(tracking, "LOOK_EVERY", 0.01)
    monkeypatch.setattr(tracking, "RETRY_AFTER", 0.01)
    return calls


def started(folder, steps=()):
    run = RunDirectory.open(folder / "run" / "ppo", {"a": 1})
    for step in steps:
        run.log({"loss": step / 2, "gone": None}, step)
        run.sample([{"step": step, "prompt": "p", "response": str(step)}] * 2)
    return run


def logged(calls):
    return [(step, values) for what, step, values in calls if what == "log"]


def test_a_step_comes_with_its_measurement_alarms_and_samples_and_the_summary_last(tmp_path, calls):
    with tracking.tracking(["wandb"], tmp_path / "run"):
        run = started(tmp_path)
        run.hold_out(
            {"step": 0, "name": "gold", "length": 3.0, "scores": {"score": [1.0, None, 2.0]}},
        )
        run.hold_out({"step": 0, "name": "gold", "temperature": 0.5, "scores": {"score": [9.0]}})
        run.alarm(
            [
                Alarm(
                    detector="kl",
                    step=1,
                    value=2.0,
                    threshold=1.0,
                    message="far.",
                    advice="stop.",
                ),
            ],
        )
        run.log({"loss": 0.5}, 1)
        run.sample([{"step": 1, "prompt": "p", "response": "r"}])
        run.finish({"seconds": 3, "gold": {"value": 1.5, "verdict": "better"}})
    assert calls == [
        ("log", 0, {"gold/score": 1.5, "gold/length": 3.0}),
        ("log", 1, {"loss": 0.5}),
        ("alarm", 1, "kl"),
        ("samples", 1, [{"step": 1, "prompt": "p", "response": "r"}]),
        ("log", 2, {"summary/seconds": 3.0, "summary/gold/value": 1.5}),
        ("close", True, None),
    ]
    (start,) = calls.started
    assert (start.name, start.whole, start.config, start.id) == ("ppo", "run", {"a": 1}, None)
    assert start.group.startswith("run-") and len(start.group) == len("run-") + 8


def test_a_measurement_that_its_step_repeats_is_sent_once(tmp_path, calls):
    with tracking.tracking(["wandb"], tmp_path / "run"):
        run = started(tmp_path)
        run.hold_out({"step": 1, "name": "gold", "scores": {"score": [1.0]}})
        time.sleep(0.1)
        run.log({"loss": 0.5, "gold/score": 1.0}, 1)
    assert logged(calls) == [(1, {"gold/score": 1.0, "loss": 0.5})] and calls[-1] == (
        "close",
        False,
        None,
    )


def test_a_resumed_run_goes_on_where_the_tracker_is(tmp_path, calls):
    with tracking.tracking(["wandb"], tmp_path / "run"):
        run = started(tmp_path, [1, 2, 3])
    with tracking.tracking(["wandb"], tmp_path / "run"):
        run.truncate(1)
        time.sleep(0.1)
        for step in (2, 3, 4):
            run.log({"loss": -1.0}, step)
    assert logged(calls) == [
        (1, {"loss": 0.5}),
        (2, {"loss": 1.0}),
        (3, {"loss": 1.5}),
        (4, {"loss": -1.0}),
    ]
    assert [(start.id, start.step) for start in calls.started] == [(None, -1), ("7", 3)]
    assert [step for what, step, _ in calls if what == "samples"] == [1, 2, 3]


def identities(calls, folder, steps):
    """Track a run that gains these steps; the identity that its tracker was given."""
    with tracking.tracking(["trackio"], folder / "run"):
        started(folder, steps)
    return calls.started[-1].own


def test_folders_of_one_name_have_identities_of_their_own_that_last(tmp_path, calls):
    """A resumed and a moved run keep theirs; a copy beside its original is another run, shown from
    its beginning.
    """
    one, other = (identities(calls, tmp_path / name, [1]) for name in ("one", "other"))
    assert one != other
    assert identities(calls, tmp_path / "one", [2]) == one and calls.started[-1].id == "7"
    shutil.move(tmp_path / "one", tmp_path / "moved")
    assert identities(calls, tmp_path / "moved", [3]) == one and calls.started[-1].step == 2
    shutil.copytree(tmp_path / "moved", tmp_path / "copied")
    calls.clear()
    third = identities(calls, tmp_path / "copied", [4])
    assert third not in (one, other) and (calls.started[-1].id, calls.started[-1].step) == (
        None,
        -1,
    )
    assert [step for step, _ in logged(calls)] == [1, 2, 3, 4]
    assert identities(calls, tmp_path / "copied", [5]) == third
    assert identities(calls, tmp_path / "moved", [4]) == one


def groups(calls, folder, *stages):
    """Track a run of these stages; the group labels that its tracker was given."""
    calls.started.clear()
    for stage in stages:
        with tracking.tracking(["wandb"], folder / "run"):
            RunDirectory.open(folder / "run" / stage, {"a": 1}).log({"loss": 1.0}, 1)
    return {start.group for start in calls.started}


def test_stages_of_a_run_share_a_group_and_runs_of_one_name_do_not(tmp_path, calls):
    """A run in several starts is one group, a moved one the same, a copy beside it another."""
    (one,) = groups(calls, tmp_path / "one", "sft", "round-01/ppo")
    (other,) = groups(calls, tmp_path / "other", "sft")
    assert one != other and one.startswith("run-") and other.startswith("run-")
    shutil.move(tmp_path / "one", tmp_path / "moved")
    assert groups(calls, tmp_path / "moved", "reward") == {one}
    shutil.copytree(tmp_path / "moved", tmp_path / "copied")
    (third,) = groups(calls, tmp_path / "copied", "dpo")
    assert third not in (one, other)
    assert groups(calls, tmp_path / "moved", "kto") == {one}


def test_a_run_that_is_its_only_stage_has_one_identity(tmp_path, calls):
    with tracking.tracking(["wandb"], tmp_path / "run"):
        RunDirectory.open(tmp_path / "run", {"a": 1}).log({"loss": 1.0}, 1)
    (start,) = calls.started
    assert (start.name, start.group) == ("run", f"run-{start.own}")


def test_a_run_that_was_killed_while_its_tracker_began_keeps_its_identity(
    tmp_path,
    calls,
    monkeypatch,
):
    begin = tracking.start_tracker

    def killed(name, run):
        begin(name, run)
        raise ConnectionError("gone")

    monkeypatch.setattr(tracking, "start_tracker", killed)
    monkeypatch.setattr(tracking, "RETRY_AFTER", 60.0)
    first = identities(calls, tmp_path, [1])
    monkeypatch.setattr(tracking, "start_tracker", begin)
    assert identities(calls, tmp_path, [2]) == first
    assert [step for step, _ in logged(calls)] == [1, 2]


def test_a_tracker_that_comes_back_gets_what_it_missed_and_the_fault_is_told_once(
    tmp_path,
    calls,
    caplog,
):
    def down():
        raise ConnectionError("no route to host")

    calls.fault = down
    with tracking.tracking(["wandb"], tmp_path / "run"):
        run = started(tmp_path, [1, 2])
        time.sleep(0.2)
        assert not calls and len(calls.started) > 1
        calls.fault = lambda: None
        run.log({"loss": 1.5}, 3)
    assert [step for step, _ in logged(calls)] == [1, 2, 3]
    (told,) = [record.getMessage() for record in caplog.records if record.name == tracking.__name__]
    assert "wandb takes nothing (ConnectionError:" in told and str(tmp_path / "run") in told


def test_a_tracker_that_hangs_is_left_behind(tmp_path, calls, caplog, monkeypatch):
    monkeypatch.setattr(tracking, "LAST_WAIT", 0.2)
    released = threading.Event()
    calls.fault = lambda: released.wait(60) and None
    began = time.monotonic()
    with tracking.tracking(["wandb"], tmp_path / "run"):
        run = started(tmp_path, range(1, 50))
    assert time.monotonic() - began < 5 and len(run.metrics()) == 49
    assert [record.getMessage()[:42] for record in caplog.records] == [
        "wandb takes nothing (it does not answer). ",
    ]
    released.set()


def test_a_tracker_that_does_not_start_stops_no_training(tmp_path, calls, caplog, monkeypatch):
    def start(name, run):
        raise OSError("no disk")

    monkeypatch.setattr(tracking, "start_tracker", start)
    values = recipe(tmp_path, tmp_path / "run")
    values = {name: values[name] for name in ("run", "model", "sft")}
    plain = run_recipe(build(Recipe, {**values, "run": str(tmp_path / "plain")}))
    summary = run_recipe(build(Recipe, values, ["track=wandb"]))
    assert summary["sft"]["train_loss"] == plain["sft"]["train_loss"]
    assert sum("no disk" in record.getMessage() for record in caplog.records) == 1


def test_a_missing_package_is_told_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    values = recipe(tmp_path, tmp_path / "run")
    config = build(
        Recipe,
        {**{name: values[name] for name in ("run", "model", "sft")}, "track": ["mlflow"]},
    )
    with pytest.raises(
        ConfigError,
        match=r"\['mlflow'\] needs .*'tether-rlhf\[track\]'",
    ):
        run_recipe(config)
    assert not (tmp_path / "run" / "sft").exists()


def test_a_tracker_of_another_name_is_refused():
    with pytest.raises(ConfigError, match="'tensorboard', 'wandb', 'mlflow' or 'trackio'"):
        build(Recipe, {"run": "r", "model": {"source": "tiny"}, "track": ["neptune"]})


def test_trackers_may_change_while_a_run_goes_on(tmp_path, calls):
    values = recipe(tmp_path, tmp_path / "run")
    values = {name: values[name] for name in ("run", "model", "sft")}
    config = build(Recipe, values)
    run_recipe(config)
    assert not calls
    # a finished stage is shown from its beginning
    run_recipe(build(Recipe, {**values, "track": ["wandb"]}))
    rows = RunDirectory(tmp_path / "run" / "sft").metrics()
    assert [(step, values["loss"]) for step, values in logged(calls)[:-1]] == [
        (row["step"], row["loss"]) for row in rows
    ]
    calls.clear()
    run_recipe(build(Recipe, {**values, "track": ["wandb"]}))
    assert not calls


@pytest.fixture
def forgotten():
    """W&B's own process and trackio's module keep the folders of their start: the next test starts
    them anew.
    """
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()
    for module in [module for module in sys.modules if module.partition(".")[0] == "trackio"]:
        del sys.modules[module]


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("name", TRACKERS)
def test_two_folders_of_one_name_do_not_write_into_one_another(name, tmp_path, monkeypatch):
    """Both are resumed, one after the other: each loss is there once, and those of a folder are
    together.
    """
    monkeypatch.chdir(tmp_path)
    for variable, value in {
        **tracked.ENVIRONMENT,
        "TENSORBOARD_LOGGING_DIR": "{}/out/events",
    }.items():
        monkeypatch.setenv(variable, value.format(tmp_path))
    pytest.importorskip(name, reason=f"{name} is in the extra `track`")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for steps in ([1, 2], [3, 4]):
            for number, folder in enumerate(("one", "other")):
                with tracking.tracking([name], tmp_path / folder / "run"):
                    run = RunDirectory.open(tmp_path / folder / "run" / "ppo", {"a": 1})
                    for step in steps:
                        run.log({"loss": 100.0 * number + step}, step)
        runs = in_time(lambda: losses(name, tmp_path), lambda runs: sum(map(len, runs)) == 8)
    assert sorted(runs) == [[1.0, 2.0, 3.0, 4.0], [101.0, 102.0, 103.0, 104.0]]
    if name != "tensorboard":
        labels = in_time(lambda: group_labels(name, tmp_path), lambda labels: len(labels) == 2)
        assert len(labels) == 2 and all(label.startswith("run-") for label in labels)


def in_time(read, complete):
    """The result of `read`, repeated until it is complete: W&B's own process writes its file a
    moment after the run's end.
    """
    deadline = time.monotonic() + 30
    while not complete(result := read()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return result


def losses(name, folder):
    """The losses of each run that a tracker has, by its own reader."""
    if name == "mlflow":
        from mlflow import MlflowClient

        client = MlflowClient()
        (experiment,) = [one for one in client.search_experiments() if one.name == "tether"]
        runs = [run.info.run_id for run in client.search_runs([experiment.experiment_id])]
        return [[metric.value for metric in client.get_metric_history(run, "loss")] for run in runs]
    if name == "wandb":  # offline, a resumed run is another file with the same identity
        from wandb.proto import wandb_internal_pb2

        runs = defaultdict(list)
        for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
            for data in tracked.records(path):
                record = wandb_internal_pb2.Record()
                record.ParseFromString(data)
                for item in record.history.item if record.HasField("history") else ():
                    if (item.key or "/".join(item.nested_key)) == "loss":
                        runs[path.stem.removeprefix("run-")].append(json.loads(item.value_json))
        return list(runs.values())
    points, _ = getattr(tracked, name)(folder)
    runs = defaultdict(list)
    for (run, metric, _), values in sorted(points.items()):
        runs[run] += values if metric == "loss" else []
    return list(runs.values())


def group_labels(name, folder):
    """The different labels of groups in a tracker's own files."""
    if name == "mlflow":
        from mlflow import MlflowClient

        client = MlflowClient()
        (experiment,) = [one for one in client.search_experiments() if one.name == "tether"]
        return {run.data.tags["group"] for run in client.search_runs([experiment.experiment_id])}
    if name == "wandb":
        from wandb.proto import wandb_internal_pb2

        labels = set()
        for path in folder.glob("wandb/offline-run-*/*.wandb"):
            for data in tracked.records(path):
                record = wandb_internal_pb2.Record()
                record.ParseFromString(data)
                if record.HasField("run"):
                    labels.add(record.run.run_group)
        return labels
    (path,) = (folder / "trackio").glob("tether*.db")
    with sqlite3.connect(path) as database:
        configs = [json.loads(text) for (text,) in database.execute("select config from configs")]
    return {config["_Group"] for config in configs}


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("name", TRACKERS)
def test_each_tracker_has_the_numbers_and_texts_of_a_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # before the import: trackio reads its folder then
    for variable, value in tracked.ENVIRONMENT.items():
        monkeypatch.setenv(variable, value.format(tmp_path))
    pytest.importorskip(name, reason=f"{name} is in the extra `track`")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tracking.tracking([name], tmp_path / "out" / "run"):
            run = started(tmp_path / "out", [1, 2, 3])
            run.hold_out(
                {"step": 0, "name": "gold", "length": 3.0, "scores": {"score": [1.0, 2.0]}},
            )
            run.alarm(
                [
                    Alarm(
                        detector="kl",
                        step=3,
                        value=2.0,
                        threshold=1.0,
                        message="far.",
                        advice="stop.",
                    ),
                ],
            )
        with tracking.tracking([name], tmp_path / "out" / "run"):
            run.truncate(2)
            run.log({"loss": 9.0}, 3)
            run.log({"loss": 2.0}, 4)
            run.finish({"seconds": 3.0})
        points, tables = in_time(
            lambda: getattr(tracked, name)(tmp_path),
            lambda result: any(metric == LAST for _, metric, _ in result[0]),
        )
    points = {(metric, step): values for (_, metric, step), values in points.items()}
    steps = {("loss", step): [step / 2] for step in (1, 2, 3, 4)}
    assert points == {
        **steps,
        ("gold/score", 0): [1.5],
        ("gold/length", 0): [3.0],
        ("summary/seconds", 5): [3.0],
    }
    assert tables == 6
