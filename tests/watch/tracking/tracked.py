"""What trackers have of runs, read back from their own files."""

from __future__ import annotations

import json
import sqlite3
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

Points = dict[tuple[str, str, int], list[float]]
"""Run, metric and step -> the values that were sent; more than one is a step that was sent
twice.
"""
ENVIRONMENT = {
    **{
        "WANDB_MODE": "offline",
        "WANDB_DIR": "{}",
        "WANDB_SILENT": "true",
        "TRACKIO_DIR": "{}/trackio",
    },
    **{
        "MLFLOW_TRACKING_URI": "sqlite:///{}/mlflow.db",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    },
}


def tensorboard(folder: Path) -> tuple[Points, int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    points, tables = defaultdict(list), 0
    for place in sorted({path.parent for path in folder.glob("out/*/**/events.out*")}):
        events = EventAccumulator(str(place), size_guidance={"scalars": 0, "tensors": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            for event in events.Scalars(tag):
                points[str(place.relative_to(folder / "out")), tag, event.step].append(event.value)
        if "samples/text_summary" in events.Tags()["tensors"]:
            texts = [
                event.tensor_proto.string_val[0].decode()
                for event in events.Tensors("samples/text_summary")
            ]
            tables += sum(text.count("\n") - 2 for text in texts)
    return points, tables


def mlflow(folder: Path) -> tuple[Points, int]:
    from mlflow import MlflowClient

    client, points, tables = MlflowClient(), defaultdict(list), 0
    (experiment,) = [one for one in client.search_experiments() if one.name == "tether"]
    for run in client.search_runs([experiment.experiment_id], max_results=1000):
        for key in run.data.metrics:
            for metric in client.get_metric_history(run.info.run_id, key):
                points[run.info.run_name or "", key, metric.step].append(metric.value)
        for file in client.list_artifacts(run.info.run_id, "samples"):
            tables += len(client.load_table(experiment.experiment_id, file.path, [run.info.run_id]))
    return points, tables


def trackio(folder: Path) -> tuple[Points, int]:
    points, tables = defaultdict(list), 0
    (path,) = (folder / "trackio").glob("tether*.db")
    with sqlite3.connect(path) as database:
        for run, step, text in database.execute("select run_name, step, metrics from metrics"):
            row = json.loads(text)
            tables += len(row.pop("samples", {"_value": []})["_value"])
            for name, value in row.items():
                points[run, name, step].append(value)
    return points, tables


def wandb(folder: Path) -> tuple[Points, int]:
    from wandb.proto import wandb_internal_pb2

    points, tables = defaultdict(list), 0
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        run = ""
        for data in records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                run = record.run.display_name
            for item in record.history.item if record.HasField("history") else ():
                name, value, step = (
                    item.key or "/".join(item.nested_key),
                    json.loads(item.value_json),
                    record.history.step.num,
                )
                if name.startswith("samples/"):  # a table is written as its parts
                    tables += value if name == "samples/nrows" else 0
                elif not name.startswith("_"):
                    points[run, name, step].append(value)
    return points, tables


def records(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format (blocks of 32 KiB; checksum, length and
    kind before each part).
    """
    content, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if (rest := 32768 - place % 32768) < 7:
            place += rest
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole one, or the last part
            yield whole
            whole = b""
