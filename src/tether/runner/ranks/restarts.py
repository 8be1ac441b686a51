"""Ranks that come back: this process starts all of them and watches; when one is lost, all begin
again from the last checkpoint.

A rank cannot work without the others, and a checkpoint holds all inputs of the next step. So the
whole group begins anew. An error with which a rank ends by itself would come again, and ends the
run.
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from tether.core.errors import RunError
from tether.core.protocols import Announce, Progress, doing
from tether.core.rundir import append_jsonl
from tether.core.stopping import Interrupted, Stopping
from tether.core.types import Json
from tether.runner.launch import Launch
from tether.runner.ranks.start import PlacedRank, Rank, cluster, keep_store, placement_of, started
from tether.settings.learner import LearnerConfig
from tether.settings.recipe import BaseRecipe
from tether.stages.learner.ranks import AGAIN, BLAME, LOST, LostRankError

LOG = "ranks.jsonl"
"""In the run's folder: a line for every rank that was lost (kind, why), and one when the ranks have
made a step again.
"""
LOOK_EVERY = 0.2
"""Seconds between two looks at the ranks."""
GONE = -1
"""Status of a placed rank whose machine is lost: `scale.ray.LOST`."""


def needs_watching(settings: LearnerConfig) -> bool:
    """True if this process shall only watch the ranks, rank 0 included."""
    return settings.ranks > 1 and settings.restarts > 0 and "WORLD_SIZE" not in os.environ


def run_watched(launch: Launch) -> Json:
    """Run ranks that all start again whenever one is lost, and return the result of rank 0.

    Raises:
        LostRankError: that happened more often than `learner.restarts` without a further step in
            between.
        Exception, Interrupted: what rank 0 ended with.
    """
    recipe = launch.recipe
    idle = 0
    limit = recipe.learner.restarts
    bars = Bars(launch.progress, launch.root / LOG)
    alone = recipe.model_copy(update={"learner": recipe.learner.model_copy(update={"restarts": 0})})
    keeper = keep_store(placement_of(recipe))
    start = 0
    with Stopping() as stopping:
        while True:
            bars.begin(start)
            with contextlib.ExitStack() as ends:
                group = Group(alone, launch.names, keeper, start, ends)
                end = group.watch(bars, stopping)
            if isinstance(end, dict):
                return end
            if group.kind:
                bars.note(kind=group.kind, rank=group.rank, why=group.why)
            if not isinstance(end, LostRankError) or stopping.asked:
                raise end
            idle = 1 if bars.further else idle + 1
            if idle > limit:
                raise LostRankError(
                    f"{group.why}. The ranks began again {limit} times and got no further. {AGAIN}",
                )
            start += 1


class Group:
    """The processes of one start of the ranks; `ends` kills those that are left: a checkpoint is
    whole or not there.
    """

    def __init__(
        self,
        recipe: BaseRecipe,
        stages: Sequence[str],
        store: TCPStore,
        start: int,
        ends: contextlib.ExitStack,
    ) -> None:
        self.children: list[Rank] = []
        self.words = ["it said nothing"] * recipe.learner.ranks
        self.end: Json | BaseException | None = None
        self.kind = ""
        self.rank = 0
        self.why = ""
        self.hears, tells = Pipe(duplex=False)
        ends.callback(self.hears.close)
        with tells:
            starter = cluster(recipe, ends)
            for rank in range(recipe.learner.ranks):
                child = started(
                    rank,
                    recipe,
                    stages,
                    store,
                    start,
                    pipe=None if rank else tells.fileno(),
                    starter=starter if rank else None,
                )
                self.children.append(ends.enter_context(child))
                ends.callback(self.children[-1].kill)
                threading.Thread(target=self._read, args=(rank,), daemon=True).start()

    def _read(self, rank: int) -> None:
        """Keep the last line that a rank wrote; the output of rank 0 is the output of this process."""
        for line in self.children[rank].stdout or ():
            text = line.decode(errors="replace")
            self.words[rank] = text.strip() or self.words[rank]
            if rank == 0:
                sys.stderr.write(text)

    def watch(self, bars: Bars, stopping: Stopping) -> Json | BaseException:
        """The results, or why there are none."""
        passed_on = False
        ending = float("inf")
        while True:
            self._hear(bars)
            codes = [child.poll() for child in self.children]
            if stopping.asked and not passed_on:
                self.children[0].terminate()  # who tells the others
                passed_on = True
            ending = min(ending, time.monotonic() + BLAME) if any(codes) else ending
            if (
                None not in codes
                or min(code or 0 for code in codes) < 0
                or time.monotonic() > ending
            ):
                while self._hear(bars):
                    pass
                return self._verdict(codes, stopping)

    def _hear(self, bars: Bars) -> bool:
        """Read the next report of rank 0, and wait a moment for it; True if there was one."""
        try:
            if heard := self.hears.poll(LOOK_EVERY):
                kind, *values = self.hears.recv()
                if kind == "end":
                    (self.end,) = values
                else:
                    bars.show(kind, *values)
        except (EOFError, OSError):
            heard = False
            time.sleep(LOOK_EVERY)
        return heard

    def _verdict(self, codes: Sequence[int | None], stopping: Stopping) -> Json | BaseException:
        end = self.end
        if isinstance(end, Interrupted) and stopping.asked:
            end.exit_code = 128 + stopping.asked
        if end is not None and not isinstance(end, LostRankError):
            return end
        killed = [rank for rank, code in enumerate(codes) if code is not None and code < 0]
        own = [
            rank
            for rank, code in enumerate(codes)
            if code not in (None, 0, LOST) and rank not in killed
        ]
        hangs = [rank for rank, code in enumerate(codes) if code is None]
        self.rank = (killed or own or hangs or [0])[0]
        self.kind = "killed" if killed else "error" if own else "hung"
        name = f"rank {self.rank} of {len(codes)}"
        code = codes[self.rank] or -9
        if not (killed or own):
            self.why = str(end or f"{name} hangs").removesuffix(f". {AGAIN}")
        else:
            ended = self.words[self.rank]
            if code == GONE and isinstance(self.children[self.rank], PlacedRank):
                ended = "its machine is gone"
            elif killed:
                ended = signal.Signals(-code).name
            self.why = f"{name} has ended: {ended}"
        kind = RunError if own else LostRankError
        return kind(f"{self.why}. {AGAIN}")


class Bars:
    """The progress bars of rank 0, shown by the process that watches it; and the log of what
    happens to the ranks.
    """

    def __init__(self, progress: Announce | None, log: Path) -> None:
        self.progress = progress
        self.log = log
        self.start = 0
        self.bars: dict[str, Progress] = {}
        self.reached: dict[str, int] = {}
        self.further = self.stepped = False

    def begin(self, start: int) -> None:
        self.start = start
        self.further = False
        self.stepped = False

    def show(self, kind: str, title: str, *values: Any) -> None:
        if kind == "step":
            step = values[0]
            if step > self.reached.get(title, 0):
                self.reached[title] = step
                self.further = True
            if self.start and not self.stepped:
                self.stepped = True
                self.note(kind="training", stage=title, step=step)
        if self.progress is None:
            return
        bar = self.bars.get(title) or self.bars.setdefault(title, self.progress(title))
        bar(*values) if kind == "step" else doing(bar, *values)

    def note(self, **values: object) -> None:
        append_jsonl(self.log, [{"time": time.time(), "start": self.start, **values}])


class Teller:
    """The same bars on the side of rank 0: through a pipe, as everything that the rank ends
    with.
    """

    def __init__(self, descriptor: int) -> None:
        self.connection = Connection(descriptor, readable=False)

    def tell(self, *values: object) -> None:
        # who watched has gone, and the store with it: that ends this rank
        with contextlib.suppress(OSError):
            self.connection.send(values)

    def tell_end(self, error: BaseException) -> None:
        """The error itself, or its words where it cannot be made again on the other side."""
        try:
            copy.copy(error)
            self.tell("end", error)
        except Exception:  # noqa: BLE001  (an error of any library, which may hold anything)
            self.tell("end", RunError(f"{type(error).__name__}: {error}"))

    def bar(self, title: str) -> Progress:
        return _Bar(self, title)


class _Bar:
    def __init__(self, teller: Teller, title: str) -> None:
        self.teller = teller
        self.title = title
        self.doing("loading")

    def __call__(self, done: int, total: int, metrics: Any) -> None:
        self.teller.tell("step", self.title, done, total, dict(metrics))

    def doing(self, what: str, done: int = 0, total: int = 0) -> None:
        self.teller.tell("doing", self.title, what, done, total)
