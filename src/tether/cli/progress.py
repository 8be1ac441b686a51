"""Progress bars with the time that is left and the numbers worth watching."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.status import Status
from rich.table import Column

from tether.cli.terminal import Terminal

OnStep = Callable[[str, int, Mapping[str, Any]], None]
"""(stage, step, metrics): called after every step; what it raises ends the training, which goes on from its last checkpoint."""
SHOWN = (
    ("loss", "loss {:.3f}"),
    ("accuracy", "training accuracy {:.2f}"),
    ("eval_accuracy", "held-out accuracy {:.2f}"),
    ("reward/proxy", "proxy {:+.2f}"),
    ("kl/policy_reference_k1", "KL {:z.1f}"),
    ("gold/score", "gold {:.2f}"),
    ("heldout/score", "held out {:.2f}"),
    ("response/stop_rate", "ended {:.0%}"),
)


def starting(what: str = "starting") -> Status:
    """A sign of life while a command's modules are loaded, or a model."""
    return Terminal(stderr=True).status(what)


EVERY = 30.0
"""Seconds between two lines of a bar where the output is no terminal."""


class Bar:
    """One phase's updater (done, total, metrics): on the screen, with its clock running, from the moment that it is announced.

    Until the first step has ended, `doing` says what is being done. In a log, where nothing can move, the bar is written as it
    stands, every half minute.
    """

    def __init__(self, progress: Progress, phase: str, on_step: OnStep | None) -> None:
        self.progress, self.task, self.notes, self.alarms = progress, progress.add_task(phase, total=None, note=""), {}, 0
        self.phase, self.on_step = phase, on_step
        self.written = progress.get_time()
        self.doing("loading")

    def doing(self, what: str) -> None:
        self._show(note=f"[dim]{what} …[/]")

    def _show(self, **fields: Any) -> None:
        progress, now = self.progress, self.progress.get_time()
        progress.update(self.task, **fields)
        tasks = [task for task in progress.tasks if task.id == self.task and not task.finished]
        if tasks and not progress.console.is_terminal and now - self.written >= EVERY:
            progress.console.print(progress.make_tasks_table(tasks))
            self.written = now

    def __call__(self, done: int, total: int, metrics: Any) -> None:
        self.alarms += int(metrics.get("alarms", 0))
        if self.alarms:
            self.notes["alarms"] = f"[bold yellow]{self.alarms} alarm{'s' if self.alarms > 1 else ''}[/]"
        self.notes.update({key: text.format(metrics[key]) for key, text in SHOWN if metrics.get(key) is not None})
        self._show(completed=done, total=total, note="  ".join(self.notes.values()))
        if self.on_step is not None:
            self.on_step(self.phase, done, metrics)


@contextlib.contextmanager
def bars(console: Console, on_step: OnStep | None = None) -> Iterator[Callable[[str], Bar]]:
    """Yields a function that opens a bar for a phase; one in which nothing was done goes when the next is opened.

    On a quiet console nothing is drawn, and `on_step` alone is told of the steps.
    """
    columns = (
        TextColumn("[bold]{task.description}", table_column=Column(no_wrap=True, min_width=15)),
        BarColumn(bar_width=8),
        MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=7)),
        TimeElapsedColumn(Column(no_wrap=True, min_width=7)),
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True, min_width=5)),
        TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
    )
    with Progress(*columns, console=console, disable=console.quiet) as progress:

        def clear() -> None:
            for task in [task for task in progress.tasks if task.total is None]:
                progress.remove_task(task.id)

        def announce(phase: str) -> Bar:
            clear()
            return Bar(progress, phase, on_step)

        try:
            yield announce
        finally:
            clear()
