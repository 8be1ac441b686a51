"""Where statistics go: a new run directory, and the tracker if its package is installed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tether.core.rundir import RunDirectory

Send = Callable[[Mapping[str, float], int], Any]


class Log:
    """Speaks core.protocols.Tracker.

    Args:
        output_dir: run directories are `runs/001` and so on in it; None keeps none.
        tracker: "wandb", "tensorboard" or None; one whose package is missing is warned of and left out.
        options: for the tracker's own start; of tensorboard's, `logging_dir` is used.
    """

    def __init__(
        self, output_dir: str | None, config: Mapping[str, Any], tracker: str | None, options: Mapping[str, Any]
    ) -> None:
        self.run, self.send = None, None
        if output_dir is not None:
            runs = Path(output_dir) / "runs"
            self.run = RunDirectory.open(runs / f"{1 + len(list(runs.glob('*'))):03d}", config)
        place = self.run.path if self.run else None
        rest = f"{place / 'metrics.jsonl'} alone" if place else "nowhere, since output_dir is not set either"
        try:
            self.send = _guarded(_sender(tracker, config, options, place), tracker, rest) if tracker else None
        except ImportError:
            warnings.warn(f"{tracker} is not installed, so that statistics go to {rest}", stacklevel=4)
        except Exception as error:  # noqa: BLE001  (whatever a tracker's server does, training goes on)
            warnings.warn(f"{tracker} does not start ({error}), so that statistics go to {rest}", stacklevel=4)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """The numbers among the metrics."""
        numbers = {k: float(v) for k, v in metrics.items() if isinstance(v, (int, float))}
        if self.run:
            self.run.log(numbers, step)
        if self.send:
            self.send(numbers, step)


def _guarded(send: Send, tracker: str, rest: str) -> Send:
    """The same, but a tracker that fails is told of once and tried again at the next step; training goes on."""
    told = False

    def call(numbers: Mapping[str, float], step: int) -> None:
        nonlocal told
        try:
            send(numbers, step)
            told = False
        except Exception as error:  # noqa: BLE001
            if not told:
                message = f"{tracker} takes no statistics of step {step} ({error}); until it does they go to {rest}"
                warnings.warn(message, stacklevel=3)
            told = True

    return call


def _sender(tracker: str, config: Mapping[str, Any], options: Mapping[str, Any], place: Path | None) -> Send:
    if tracker == "wandb":
        import wandb

        started = wandb.init(config=dict(config), **{k: v for k, v in options.items() if k != "logging_dir"})
        return lambda numbers, step: started.log(numbers, step=step)
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(options.get("logging_dir") or place)
    return lambda numbers, step: [writer.add_scalar(name, value, step) for name, value in numbers.items()]
