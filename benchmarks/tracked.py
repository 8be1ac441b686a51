"""Every stage on the tiny model with trackers, and what each tracker then has, read back from its
own files.

`python -m benchmarks.tracked FOLDER [tensorboard wandb mlflow trackio]` runs the recipes of
`benchmarks.every_stage` and compares each number with metrics.jsonl. With `--only-read` the runs
are there already.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from tether.core.rundir import read_json, read_jsonl
from tether.tracking.follow import measured_means, numbers_in

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


def written(folder: Path) -> Points:
    """What the runs' own files say."""
    points: Points = defaultdict(list)
    for manifest in folder.glob("*/**/manifest.json"):
        run = str(manifest.parent.relative_to(folder))
        rows = list(read_jsonl(manifest.parent / "metrics.jsonl"))
        for row in rows:
            for name, value in numbers_in(
                {k: v for k, v in row.items() if k not in ("step", "time")},
            ).items():
                points[run, name, row["step"]].append(value)
        for row in read_jsonl(manifest.parent / "heldout.jsonl"):
            for name, value in (
                () if "temperature" in row or "best_of" in row else measured_means(row).items()
            ):
                points[run, name, row["step"]] = [value]
        last = max(
            (row["step"] for row in [*rows, *read_jsonl(manifest.parent / "alarms.jsonl")]),
            default=-1,
        )
        if (manifest.parent / "summary.json").is_file():
            for name, value in numbers_in(
                read_json(manifest.parent / "summary.json"),
                "summary/",
            ).items():
                points[run, name, last + 1].append(value)
    return points


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


def compare(ours: Points, theirs: Mapping[tuple[str, str, int], list[float]]) -> str:
    """How many numbers are equal (to float32, which is TensorBoard's), missing, doubled, different,
    or of nothing written.
    """
    missing = [key for key in ours if key not in theirs]
    doubled = [key for key, values in theirs.items() if len(values) > 1]
    other = [
        key
        for key in ours.keys() & theirs.keys()
        if abs(theirs[key][-1] - ours[key][-1]) > 1e-6 * abs(ours[key][-1])
    ]
    more = [key for key in theirs if key not in ours]
    faults = {"missing": missing, "doubled": doubled, "different": other, "unknown": more}
    equal = len(ours) - len(missing) - len(other)
    return f"{equal} of {len(ours)} equal; " + ", ".join(
        (f"{len(keys)} {what} {keys[:2]}") for what, keys in faults.items()
    )


READERS = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow, "trackio": trackio}


def main(folder: Path, names: list[str], only_read: bool) -> None:
    for name, value in ENVIRONMENT.items():
        os.environ[name] = value.format(folder)
    if not only_read:
        from benchmarks.every_stage import loop_recipe, recipe

        from tether.runner.run import run_recipe
        from tether.settings.reading import build
        from tether.settings.recipe import Recipe

        (folder / "out").mkdir(parents=True)
        run_recipe(build(Recipe, {**recipe(folder, folder / "out" / "stages"), "track": names}))
        run_recipe(build(Recipe, {**loop_recipe(folder / "out" / "loop"), "track": names}))
    ours = written(folder / "out")
    rows = sum(1 for path in folder.glob("out/**/samples.jsonl") for _ in read_jsonl(path))
    runs = {run for run, _, _ in ours}
    print(
        f"{len(runs)} run directories, {len(ours)} numbers, {rows} samples: "
        f"{', '.join(sorted(runs))}",
    )
    for name in names:
        points, tables = READERS[name](folder)
        if name == "trackio":  # whose runs have the folder's identity in their names
            points = {
                (run.rpartition("-")[0], key, step): values
                for (run, key, step), values in points.items()
            }
        print(f"{name}: {compare(ours, points)}; {tables} samples")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tracked", description=__doc__)
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        help=("a new folder for the runs and what the trackers write"),
    )
    parser.add_argument(
        "trackers",
        nargs="*",
        choices=[*READERS, []],
        help=("all four when none is named"),
    )
    parser.add_argument("--only-read", action="store_true", help="the runs are there already")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help=("run nothing; compare what is read of no run"),
    )
    asked = parser.parse_args()
    if asked.smoke:
        print(compare({}, {}))
    elif asked.folder is None:
        parser.error("a folder is needed")
    else:
        main(asked.folder.resolve(), asked.trackers or list(READERS), asked.only_read)
