"""Progress bars with the time that is left and the numbers worth watching."""

from __future__ import annotations

import contextlib
import importlib.util
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.status import Status
from rich.table import Column
from rich.text import Text

from tether.cli.terminal.console import Terminal
from tether.core import threads
from tether.core.pace import Crowd, Forecast
from tether.core.types import Facts, Readings, Texts

FINISHED = (
    "finished already, nothing to do. To run it again, name another folder with run=PATH. To train "
    "further, start there from an export of this run (`tether export RUN FOLDER`) as the model."
)
SLEEP = (
    "They spin while they wait, which slows all. Stop this command with Ctrl-C and start it again: "
    "its threads then sleep while they wait. The result stays the same."
)
OnStep = Callable[[str, int, Facts], None]
"""(stage, step, metrics): called after every step; what it raises ends the training, which goes on
from its last checkpoint.
"""
SHOWN = (
    ("loss", "loss {:.3f}"),
    ("accuracy", "training accuracy {:.2f}"),
    ("eval_accuracy", "held-out accuracy {:.2f}"),
    ("reward/proxy", "reward {:+.2f}"),
    ("kl/policy_reference_k1", "KL {:z.1f}"),
    ("gold/score", "judge {:.2f}"),
    ("heldout/score", "held out {:.2f}"),
    ("response/stop_rate", "ended {:.0%}"),
)


def starting(what: str = "starting") -> Status:
    """A sign of life while a command's modules are loaded, or a model."""
    return Terminal(stderr=True).status(what)


EVERY = 25.0
"""Seconds between two lines where nothing can move: in a log, or in a notebook without ipywidgets.
A busy machine adds some: none of the silences shall exceed half a minute.
"""
LOOK_AFTER = 1.0
"""Seconds between two looks at whether a line is due."""


class TimeLeft(ProgressColumn):
    """The time that is left of a stage, and of all stages where there are more."""

    def render(self, task: Task) -> Text:
        """See rich."""
        return Text(task.fields["left"](), style="progress.remaining")


class Bar:
    """One phase's updater (done, total, metrics): on the screen, with its clock running, from the
    moment that it is announced.

    Until the first step has ended, and after the last, `doing` says what is being done.
    """

    def __init__(self, screen: Screen, phase: str, expected: float | None) -> None:
        self.screen, self.forecast = screen, Forecast(screen.now, expected)
        self.phase, *combination = phase.split("  ", 1)
        self.title = "  ".join([screen.names.get(self.phase, self.phase), *combination])
        self.worked = time.process_time()
        self.waited = threads.waited()
        self.stepped = screen.now
        self.notes: dict[str, str] = {}
        self.alarms = 0
        self.written = screen.now
        self.what = ""
        self.task = screen.progress.add_task(
            escape(self.title),
            total=None,
            note="",
            left=self.left,
        )
        self.doing("loading")

    def doing(self, what: str, done: int = 0, total: int = 0) -> None:
        """Show the present work; before the first step and after the last it replaces the numbers."""
        self.forecast.part(self.screen.now)
        self.what = f"{what}, {done} of {total} …" if total else f"{what} …"
        self._show("  ".join([*self.notes.values(), f"[dim]{self.what}[/]"]))

    def left(self) -> str:
        """The time that is left, in a few characters."""
        seconds = self.forecast.left(self.screen.now)
        later = self.screen.later(self.phase)
        if seconds is None:
            late = self.forecast.expected and self.forecast.done < (self.forecast.total or 1)
            return "longer than expected" if late else ""
        return f"{as_clock(seconds)} left" + (f", all {as_clock(seconds + later)}" if later else "")

    @property
    def line(self) -> str:
        """All of it in one line of a log."""
        done = self.forecast.done
        total = self.forecast.total
        passed = self.screen.now - self.forecast.begun
        noted = "  ".join(Text.from_markup(note).plain for note in self.notes.values())
        return "  ".join(
            filter(
                None,
                (
                    self.title,
                    f"{done}/{total or '?'}",
                    as_clock(passed),
                    self.left(),
                    self.what,
                    noted,
                ),
            ),
        )

    def _look_around(self) -> None:
        """Write once that other processes make the steps slow."""
        worked = time.process_time()
        waited = threads.waited()
        now = self.screen.now
        share = self.screen.crowd.add(
            now - self.stepped,
            worked - self.worked,
            max(0.0, waited - self.waited),
        )
        self.worked = worked
        self.waited = waited
        self.stepped = now
        if share is not None:
            advice = f" {SLEEP}" if threads.spin_while_waiting() else ""
            self.screen.note(
                f"{self.title}: threads wait for a core {share:.0%} of the time, because other "
                f"processes use this machine.{advice}",
            )

    def _show(self, note: str, done: int | None = None, total: int | None = None) -> None:
        self.screen.progress.update(self.task, completed=done, total=total, note=note)
        self.screen.tick()

    def __call__(self, done: int, total: int, metrics: Readings) -> None:
        self.screen.worked = True
        self.forecast.step(self.screen.now, done, total, metrics.get("time/step"))
        self._look_around()
        self.alarms += int(metrics.get("alarms", 0))
        if self.alarms:
            self.notes["alarms"] = (
                f"[bold yellow]{self.alarms} alarm{'s' if self.alarms > 1 else ''}[/]"
            )
        self.notes.update(
            {key: text.format(metrics[key]) for key, text in SHOWN if metrics.get(key) is not None},
        )
        self.what = ""
        self._show("  ".join(self.notes.values()), done, total)
        if self.screen.on_step is not None:
            self.screen.on_step(self.phase, done, dict(metrics))


class Screen:
    """Implements core.protocols.Announcer: a bar a phase where a screen can move, else a line every
    half minute and at its end.

    names: of stages, for people, by their sections. worked: any stage has made a step.
    """

    def __init__(
        self,
        console: Console,
        progress: Progress,
        on_step: OnStep | None,
        names: Texts,
    ) -> None:
        self.console = console
        self.progress = progress
        self.on_step = on_step
        self.names = names
        self.worked = False
        self.shows = not console.quiet
        self.crowd = Crowd()
        self.expected: Readings = {}
        self.bar: Bar | None = None
        self._lock = threading.Lock()

    @property
    def now(self) -> float:
        """Seconds of the console's clock."""
        return self.console.get_time()

    def __call__(self, phase: str) -> Bar:
        self.close()
        self.bar = Bar(self, phase, self.expected.get(phase.partition(" ")[0]))
        return self.bar

    def price(self, lines: Iterable[str], expected: Readings) -> None:
        """See Announcer."""
        self.expected = expected
        for line in lines:
            self.note(line)

    def note(self, line: str) -> None:
        """See Announcer."""
        self.progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def later(self, phase: str) -> float:
        """Seconds that were expected of the stages after this one."""
        names = list(self.expected)
        after = names[names.index(phase) + 1 :] if phase in names else ()
        return sum(self.expected[name] for name in after)

    def tick(self) -> None:
        """Write the line of the bar in hand, where nothing moves and the last line is half a minute
        old.
        """
        with self._lock:
            if (
                self.bar is not None
                and self.progress.disable
                and self.now - self.bar.written >= EVERY
            ):
                self._write(self.bar)

    def close(self) -> None:
        """End the bar in hand: one in which nothing was done goes."""
        bar = self.bar
        self.bar = None
        if bar is None:
            return
        if bar.forecast.total is None:
            self.progress.remove_task(bar.task)
        elif self.progress.disable:
            self._write(bar)

    def _write(self, bar: Bar) -> None:
        bar.written = self.now
        self.note(bar.line)


@contextlib.contextmanager
def bars(
    console: Console,
    on_step: OnStep | None = None,
    names: Texts | None = None,
) -> Iterator[Screen]:
    """Yields what opens a bar for a phase; on a quiet console nothing is drawn, and `on_step` alone
    is called.

    Args:
        names: see `Screen`.
    """
    columns = (
        TextColumn("[bold]{task.description}", table_column=Column(no_wrap=True, min_width=15)),
        BarColumn(bar_width=8),
        MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=7)),
        TimeElapsedColumn(Column(no_wrap=True, min_width=7)),
        TimeLeft(Column(no_wrap=True, min_width=5)),
        TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
    )
    with Progress(
        *columns,
        console=console,
        disable=console.quiet or not moves(console),
    ) as progress:
        screen = Screen(console, progress, on_step, names or {})
        ended = threading.Event()
        threading.Thread(target=_look, args=(screen, ended), daemon=True).start()
        try:
            yield screen
        finally:
            ended.set()
            screen.close()


def _look(screen: Screen, ended: threading.Event) -> None:
    """Break the silence of a log for as long as it lasts."""
    while not ended.wait(LOOK_AFTER):
        screen.tick()


def moves(console: Console) -> bool:
    """True if what was drawn can be drawn again: on a terminal, and in a notebook that has
    ipywidgets.
    """
    return console.is_terminal or (
        console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None
    )


def as_clock(seconds: float) -> str:
    """Hours, minutes and seconds, as 0:02:10."""
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"
