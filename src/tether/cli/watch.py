"""The commands that look at runs while they train: `watch` in a terminal, `dashboard` in a
browser.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tether.cli.terminal.bars import SHOWN, as_clock, moves
from tether.cli.terminal.console import Terminal, print_line
from tether.core.amounts import sparkline
from tether.core.command import command_line
from tether.core.errors import MissingFileError, RunError
from tether.core.rundir import missing_run
from tether.core.types import Json

if TYPE_CHECKING:
    from tether.watch.live.followed import FollowedRun, Stage

EVERY = 1.0
"""Seconds between two looks at a run."""
COLOURS = {"running": "cyan", "ended": "green", "crashed": "bold red", "stopped": "yellow"}
ROLLOUTS, ALARMS = 3, 4
"""Rollouts and alarms that are shown."""


def watch(run: Path) -> None:
    """Show a run while it trains: stage, step, time left, metrics, alarms, answers.

    The view ends with the run. If the output is not a terminal, the view is a line for each new step.
    Ctrl-C ends the view only.
    """
    from tether.watch.live.condition import MEANS, Condition, is_run
    from tether.watch.live.followed import FollowedRun
    from tether.watch.report.page import whole_run

    if not run.is_dir():
        raise missing_run(run)
    root = whole_run(run)
    if not is_run(root):
        raise RunError(
            f"{run} is not a run directory of tether. Give the folder of a run. To see "
            f"all runs in a folder: {command_line('dashboard', run)}",
        )
    console = Terminal()
    followed = FollowedRun(root.resolve(), root.resolve().name)
    followed.look(1)
    try:
        if moves(console):
            _watch_screen(console, followed)
        else:
            _watch_lines(followed)
    except KeyboardInterrupt:
        return
    state = followed.condition
    if state is not Condition.RUNNING:
        print_line(f"{root}: {state}. {MEANS[state]}")


def _watch_screen(console: Terminal, followed: FollowedRun) -> None:
    with Live(_screen(followed, console.height), console=console, auto_refresh=False) as live:
        while _goes_on(followed):
            time.sleep(EVERY)
            followed.look(1)
            live.update(_screen(followed, console.height), refresh=True)


def _watch_lines(followed: FollowedRun) -> None:
    """Print a line a step: of what was there before, the last step alone."""
    rows = [(stage, stage.last)] if (stage := followed.active) else []
    followed.fresh = []
    while True:
        for stage, row in rows:
            print_line(_line(followed, stage, row))
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
    from tether.core.amounts import plural

    status = followed.status()
    words = [f"{stage.name or followed.name}  {row.get('step')}/{stage.steps() or '?'}"]
    if status["left"] is not None and row is stage.last:
        words.append(f"{as_clock(status['left'])} left")
    if status["alarms"]:
        words.append(plural(status["alarms"], "alarm"))
    return "  ".join((*words, *(text for _, text in _shown(row))))


def _shown(row: Json) -> list[tuple[str, str]]:
    """The numbers worth watching, with their keys."""
    from tether.watch.report.reading import finite

    return [(key, form.format(n)) for key, form in SHOWN if (n := finite(row, key)) is not None]


def _screen(followed: FollowedRun, height: int) -> RenderableType:
    """The whole view, which fits into so many lines."""
    from tether.watch.report.reading import finite

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
        score = finite(one.row, "proxy")
        shown = "" if score is None else f"{score:+.2f}"
        parts.append(_one_line(f"  {shown} {one.row.get('response')}"))
    parts += [_one_line(note, "dim") for note in status["notes"]]
    return Group(*parts)


def _one_line(text: str, style: str = "") -> Text:
    return Text(" ".join(text.split()), style=style, no_wrap=True, overflow="ellipsis")


def dashboard(folder: Path, host: str = "127.0.0.1", port: int = 8766, address: str = "") -> None:
    """Show all runs in a folder in the browser while they train: curves, answers, alarms, and buttons
    to stop a run or save a checkpoint.

    The page needs the token in the printed address. Only the buttons change a run.
    """
    from tether.core.errors import require

    require("fastapi", "tether dashboard", "dashboard")
    from tether.people.annotation.server.address import LOOPBACK, Address, listen
    from tether.settings.reading import build
    from tether.watch.live.server import serve_board

    if not folder.is_dir():
        raise MissingFileError(f"{folder} is not a folder. Give the folder that holds your runs.")
    given = {"host": host, "port": port, "address": address}
    socket, settings = listen(build(Address, given, where="tether dashboard"))
    token = secrets.token_urlsafe(24)
    if settings.host not in LOOPBACK:
        print_line(
            f"Other machines can reach the dashboard. Everybody with the token sees all "
            "texts of the runs and can stop "
            f"runs.{'' if settings.secure else ' The connection is not encrypted.'}",
            err=True,
        )
    print_line(f"{folder}: {settings.origin}/open?token={token}")
    print_line("Open this address in a browser. Ctrl-C ends the dashboard, but not the runs.")
    serve_board(folder, settings, socket, token)
