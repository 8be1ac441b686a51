"""Progress bars with the time that is left and the numbers worth watching."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

SHOWN = (
    ("loss", "loss {:.3f}"),
    ("accuracy", "accuracy {:.2f}"),
    ("reward/proxy", "proxy {:+.2f}"),
    ("kl/policy_reference_k1", "KL {:.1f}"),
    ("gold/score", "gold {:.2f}"),
    ("heldout/score", "held out {:.2f}"),
    ("response/stop_rate", "ended {:.0%}"),
)


@contextlib.contextmanager
def bars(console: Console) -> Iterator[Callable[[str], Callable[[int, int, Any], None]]]:
    """Yields a function that opens a bar for a phase and returns its updater (done, total, metrics)."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    fixed, flexible = Column(no_wrap=True, min_width=7), Column(no_wrap=True, overflow="ellipsis")
    columns = (
        TextColumn("[bold]{task.description}", table_column=Column(no_wrap=True, min_width=15)),
        BarColumn(bar_width=12),
        MofNCompleteColumn(table_column=fixed),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True, table_column=fixed),
        TextColumn("{task.fields[note]}", table_column=flexible),
    )
    with Progress(*columns, console=console) as progress:

        def announce(phase: str) -> Callable[[int, int, Any], None]:
            tasks: list[Any] = []
            notes: dict[str, str] = {}
            alarms = 0

            def update(done: int, total: int, metrics: Any) -> None:
                nonlocal alarms
                alarms += int(metrics.get("alarms", 0))
                if alarms:
                    notes["alarms"] = f"[bold yellow]{alarms} alarm{'s' if alarms > 1 else ''}[/]"
                if not tasks:
                    tasks.append(progress.add_task(phase, total=total, note=""))
                notes.update({key: text.format(metrics[key]) for key, text in SHOWN if metrics.get(key) is not None})
                progress.update(tasks[0], completed=done, total=total, note="  ".join(notes.values()))

            return update

        yield announce
