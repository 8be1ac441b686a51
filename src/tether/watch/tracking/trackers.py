"""Four trackers behind one protocol, each set up by its own environment variables."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tether.core.errors import require
from tether.core.protocols import Tracker
from tether.core.types import Json, Readings
from tether.settings.tracking import TrackerName

EVENTS = "TENSORBOARD_LOGGING_DIR"
"""The variable that names another folder for TensorBoard's files than the run directory."""


class TrackedRun(NamedTuple):
    """Facts of a run directory that a tracker needs.

    - name: of the stage, with the folders above it (`round-01/ppo`)
    - whole: the name of the whole run
    - group: that name and the whole run's identity, the same for all its stages
    - own: letters and digits that no other folder has, also where names are alike
    - id: the tracker's name for this run, None at the beginning
    - step: the last that it has
    """

    folder: Path
    name: str
    whole: str
    group: str
    config: Json
    own: str
    id: str | None = None
    step: int = -1

    @property
    def unique(self) -> str:
        """A name for trackers that know a run by its name alone."""
        return f"{self.whole}/{self.name}-{self.own}"


def check_trackers(names: Sequence[TrackerName]) -> None:
    """Check that the packages of these trackers are installed.

    Raises:
        ConfigError: one is not.
    """
    for name in names:
        require(name, f"track = ['{name}']", "track")


def start_tracker(name: TrackerName, run: TrackedRun) -> Tracker:
    """The tracker of this name, at the beginning of a run or where it was left."""
    return {"tensorboard": TensorBoard, "wandb": _wandb, "mlflow": MLflow, "trackio": _trackio}[
        name
    ](run)


class TensorBoard:
    """Event files in the run directory itself, or below the folder that `EVENTS` names."""

    id = ""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = os.environ.get(EVENTS)
        place = Path(folder) / run.unique if folder else run.folder
        self.writer = SummaryWriter(str(place), purge_step=None if run.id is None else run.step + 1)
        if run.id is None:
            self.writer.add_text("config", f"```json\n{json.dumps(run.config, indent=2)}\n```", 0)

    def log(self, metrics: Readings, step: int, at: float) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step, walltime=at)
        self.writer.flush()

    def samples(self, rows: Sequence[Json], step: int) -> None:
        self.writer.add_text("samples", markdown_table(rows), step)
        self.writer.flush()

    def alarm(self, alarm: Json) -> None:
        self.writer.add_text(
            "alarms",
            f"**{alarm['detector']}**: {alarm['message']} {alarm['advice']}",
            alarm["step"],
        )
        self.writer.flush()

    def close(self, complete: bool) -> None:
        self.writer.close()


class Wandb:
    """A run of W&B, or of trackio, which has the same interface.

    Args:
        table: makes a table of rows.
        warning: the level of an alert.
    """

    def __init__(
        self,
        run: Any,
        table: Callable[[Sequence[Json]], object],
        warning: object,
    ) -> None:
        self.run = run
        self.table = table
        self.warning = warning
        self.id = run.id

    def log(self, metrics: Readings, step: int, at: float) -> None:
        self.run.log({**metrics}, step=step)

    def samples(self, rows: Sequence[Json], step: int) -> None:
        self.run.log({"samples": self.table(rows)}, step=step)

    def alarm(self, alarm: Json) -> None:
        self.run.alert(
            alarm["detector"],
            f"{alarm['message']} {alarm['advice']}",
            level=self.warning,
        )

    def close(self, complete: bool) -> None:
        self.run.finish()


def _wandb(run: TrackedRun) -> Wandb:
    """A run of W&B for each stage, in the group of the whole run."""
    import wandb

    settings = {
        "project": os.environ.get("WANDB_PROJECT", "tether"),
        "group": os.environ.get("WANDB_RUN_GROUP", run.group),
        "name": f"{os.environ.get('WANDB_NAME', run.whole)}/{run.name}",
        "settings": wandb.Settings(console="off", quiet=True, x_transaction_log_flush_interval=1.0),
    }
    try:
        resume = "allow" if run.id else None
        begun = wandb.init(
            config=run.config,
            id=run.id,
            resume=resume,
            reinit="create_new",
            **settings,
        )
    except Exception:
        with contextlib.suppress(Exception):
            # a service of wandb that has died is forgotten, and the next start makes another
            wandb.teardown()
        raise
    return Wandb(
        begun,
        lambda rows: wandb.Table([*rows[0]], [[row.get(c) for c in rows[0]] for row in rows]),
        "WARN",
    )


def _trackio(run: TrackedRun) -> Wandb:
    """A run of trackio for each stage: a database below TRACKIO_DIR, a Space, or a server."""
    import trackio

    project = os.environ.get("TRACKIO_PROJECT", "tether")
    quiet: dict[str, bool] = dict.fromkeys(("embed", "auto_log_gpu", "auto_log_cpu"), False)
    begun = trackio.init(
        project=project,
        name=run.unique,
        group=run.group,
        config=run.config,
        resume="allow",
        **quiet,
    )
    return Wandb(begun, lambda rows: trackio.Table(data=[*rows]), trackio.AlertLevel.WARN)


class MLflow:
    """A run of MLflow for each stage, where MLFLOW_TRACKING_URI says."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient, entities

        self.client = MlflowClient()
        self.entities = entities
        if run.id is not None:
            self.id = run.id
            self.client.update_run(self.id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "tether")
        experiment = self.client.get_experiment_by_name(name)
        place = experiment.experiment_id if experiment else self.client.create_experiment(name)
        title = f"{os.environ.get('MLFLOW_RUN_NAME', run.whole)}/{run.name}"
        self.id = self.client.create_run(
            place,
            run_name=title,
            tags={"group": run.group},
        ).info.run_id
        self.client.log_dict(self.id, run.config, "config.json")

    def log(self, metrics: Readings, step: int, at: float) -> None:
        values = [
            self.entities.Metric(name, value, int(at * 1000), step)
            for name, value in metrics.items()
        ]
        for first in range(0, len(values), 1000):
            self.client.log_batch(self.id, values[first : first + 1000])

    def samples(self, rows: Sequence[Json], step: int) -> None:
        table = {column: [row.get(column) for row in rows] for column in rows[0]}
        self.client.log_table(self.id, table, f"samples/step-{step:06d}.json")

    def alarm(self, alarm: Json) -> None:
        self.client.log_dict(
            self.id,
            alarm,
            f"alarms/step-{alarm['step']:06d}-{alarm['detector']}.json",
        )

    def close(self, complete: bool) -> None:
        self.client.set_terminated(self.id, "FINISHED" if complete else "KILLED")


def markdown_table(rows: Sequence[Json]) -> str:
    """Rows as a table of Markdown; line breaks and bars inside a cell stay inside it."""

    def line(cells: Sequence[object]) -> str:
        words = (str(cell).replace("|", "&#124;").replace("\n", "<br>") for cell in cells)
        return f"| {' | '.join(words)} |\n"

    columns = list(rows[0])
    return (
        line(columns)
        + line(["---"] * len(columns))
        + "".join(line([row.get(c, "") for c in columns]) for row in rows)
    )
