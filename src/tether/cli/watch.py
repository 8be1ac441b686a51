"""The commands that look at runs while they train: `watch` in a terminal, `dashboard` in a
browser.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tether.cli.options import Host, Port
from tether.core.errors import MissingFileError, RunError
from tether.core.types import Json
from tether.terminal.bars import SHOWN, as_clock, moves
from tether.terminal.console import Terminal, print_line

if TYPE_CHECKING:
    from tether.live.followed import FollowedRun, Stage

EVERY = 1.0
"""Seconds between two looks at a run."""
BARS = "▁▂▃▄▅▆▇█"
COLOURS = {"running": "cyan", "ended": "green", "crashed": "bold red", "stopped": "yellow"}
WIDTH, ROLLOUTS, ALARMS = 40, 3, 4
"""Characters of a small curve; rollouts and alarms that are shown."""


def watch(
    run: Annotated[
        Path,
        typer.Argument(help="A run directory, or the folder of a stage in a run."),
    ],
) -> None:
    """Show a run while it trains: stage, step, time left, metrics, alarms, answers.

    The view ends with the run. If the output is not a terminal, the view is a line for each new step.
    Ctrl-C ends the view only.
    """
    from tether.live.condition import MEANS, Condition, is_run
    from tether.live.followed import FollowedRun
    from tether.report.page import whole_run

    if not run.is_dir():
        raise MissingFileError(f"run directory not found: {run}. Give the folder of a run.")
    root = whole_run(run)
    if not is_run(root):
        raise RunError(
            f"{run} is not a run directory of tether. Give the folder of a run. To see "
            f"all runs in a folder: tether dashboard {run}",
        )
    console = Terminal()
    followed = FollowedRun(root.resolve(), root.resolve().name)
    followed.look(1)
    try:
        if moves(console):
            _watch_screen(console, followed)
        else:
            _watch_lines(console, followed)
    except KeyboardInterrupt:
        return
    state = followed.condition
    if state is not Condition.RUNNING:
        console.print(f"{root}: {state}. {MEANS[state]}", markup=False, soft_wrap=True)


def _watch_screen(console: Terminal, followed: FollowedRun) -> None:
    with Live(_screen(followed, console.height), console=console, auto_refresh=False) as live:
        while _goes_on(followed):
            time.sleep(EVERY)
            followed.look(1)
            live.update(_screen(followed, console.height), refresh=True)


def _watch_lines(console: Terminal, followed: FollowedRun) -> None:
    """Print a line a step: of what was there before, the last step alone."""
    rows = [(stage, stage.last)] if (stage := followed.active) else []
    followed.fresh = []
    while True:
        for stage, row in rows:
            console.print(
                _line(followed, stage, row),
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
        if not _goes_on(followed):
            return
        time.sleep(EVERY)
        followed.look(1)
        rows = followed.fresh


def _goes_on(followed: FollowedRun) -> bool:
    """True while a process is at work on the run; of one that is not begun, too."""
    if not followed.folder.is_dir():
        raise RunError(f"{followed.folder} has been deleted.")
    return followed.condition == "running"


def _line(followed: FollowedRun, stage: Stage, row: Json) -> str:
    from tether.report.numbers import plural

    status = followed.status()
    words = [f"{stage.name or followed.name}  {row.get('step')}/{stage.steps() or '?'}"]
    if status["left"] is not None and row is stage.last:
        words.append(f"{as_clock(status['left'])} left")
    if status["alarms"]:
        words.append(plural(status["alarms"], "alarm"))
    return "  ".join((*words, *(text for _, text in _shown(row))))


def _shown(row: Json) -> list[tuple[str, str]]:
    """The numbers worth watching, with their keys."""
    from tether.report.reading import finite

    return [(key, form.format(n)) for key, form in SHOWN if (n := finite(row.get(key))) is not None]


def _screen(followed: FollowedRun, height: int) -> RenderableType:
    """The whole view, which fits into so many lines."""
    status = followed.status()
    stage = followed.active
    head = Text.assemble(
        (status["name"], "bold"),
        "  ",
        (status["condition"], COLOURS.get(status["condition"], "")),
    )
    parts: list[RenderableType] = [head]
    if stage is None:
        return Group(head, Text("no step has ended yet", style="dim"))
    left = "" if status["left"] is None else f"   {as_clock(status['left'])} left"
    parts.append(Text(f"{status['stage']}   step {stage.step} of {status['steps'] or '?'}{left}"))
    numbers = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for key, text in _shown(stage.last):
        curve = stage.curves.get(key)
        numbers.add_row(text, Text(sparkline(curve.values if curve else ()), style="cyan"))
    parts.append(numbers)
    alarms = list(followed.alarms)[-ALARMS:]
    rollouts = list(followed.rollouts)[-ROLLOUTS:]
    for one in alarms:
        parts.append(_one_line(f"! step {one.row.get('step')}: {one.row.get('message')}", "yellow"))
    for one in rollouts if height >= 12 + 2 * ROLLOUTS else ():
        parts.append(_one_line(f"step {one.row.get('step')}: {one.row.get('prompt')}", "dim"))
        score = one.row.get("proxy")
        parts.append(_one_line(f"  {'' if score is None else score} {one.row.get('response')}"))
    parts += [_one_line(note, "dim") for note in status["notes"]]
    return Group(*parts)


def _one_line(text: str, style: str = "") -> Text:
    return Text(" ".join(text.split()), style=style, no_wrap=True, overflow="ellipsis")


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """A small curve of characters: means of equal parts, from the lowest to the highest."""
    # small enough that sums of the largest floats are finite
    values = [value / 1e9 for value in values]
    count = min(width, len(values))
    cuts = [len(values) * i // count for i in range(count + 1)] if count else []
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(cuts)]
    low, high = (min(means), max(means)) if means else (0.0, 0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def dashboard(
    folder: Annotated[Path, typer.Argument(help="A folder of run directories, at any depth.")],
    host: Host = "127.0.0.1",
    port: Port = 8766,
    address: Annotated[
        str,
        typer.Option(
            help="Public address of the proxy in front of the server, "
            "such as https://runs.example.org.",
        ),
    ] = "",
) -> None:
    """Show all runs in a folder in the browser while they train: curves, answers, alarms, and buttons
    to stop a run or save a checkpoint.

    The page needs the token in the printed address. Only the buttons change a run.
    """
    from tether.core.errors import require

    require("fastapi", "tether dashboard", "dashboard")
    require("uvicorn", "tether dashboard", "dashboard")
    from tether.annotation.server.address import LOOPBACK, Address, listen
    from tether.live.server import serve_board
    from tether.settings.reading import build

    if not folder.is_dir():
        raise MissingFileError(f"{folder} is not a folder. Give the folder that holds your runs.")
    given = {"host": host, "port": port, "address": address}
    socket, settings = listen(build(Address, given, where="tether dashboard"))
    token = secrets.token_urlsafe(24)
    if settings.host not in LOOPBACK:
        typer.secho(
            f"Other machines can reach the dashboard. Everybody with the token sees all "
            "texts of the runs and can stop "
            f"runs.{'' if settings.secure else ' The connection is not encrypted.'}",
            fg="yellow",
            err=True,
        )
    print_line(f"{folder}: {settings.origin}/open?token={token}")
    print_line("Open this address in a browser. Ctrl-C ends the dashboard, but not the runs.")
    serve_board(folder, settings, socket, token)
