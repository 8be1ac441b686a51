"""Ranks: processes that train one model together, each on its share of a step's micro-batches.

All of them have the same data, the same plan and the same weights, and cut a step alike. A rank
runs forward and backward for its share alone, under the denominators of the whole step; gradients
are summed once a step. So every rank takes the same step, the one that a single process would have
taken, to the rounding of a sum. Each rank computes cheap values for itself.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tether.algorithms.transfer import read_back
from tether.core.errors import RunError, TetherError
from tether.core.keeping import temporary_folder
from tether.core.protocols import DrawArguments, Engine, Scoring
from tether.core.types import Metrics, Prompt, Rollout, RolloutGroup, Sampling, Score

T = TypeVar("T")
Item = TypeVar("Item")
COLLECTIVE = "collective"
"""The name of a thread that waits in a collective."""
AGAIN = "Start the same command again: it goes on from the last checkpoint."
LOST = 2
"""Exit code of a rank that has lost another one; a rank with an error of its own has 1."""
PASS = timedelta(minutes=10)
"""Timeout of a collective within a pass over sharded layers."""
LOOK_EVERY = 1.0
"""Seconds between two signs of life of a rank."""
BLAME = 4.0
"""After a failed collective, a rank without a sign of life for so many seconds counts as lost."""
COMING = 300.0
"""Seconds that a rank has at least before its first sign of life."""


class LostRankError(RunError):
    """Another rank has ended, hangs, or has never come."""


class Ranks:
    """The ranks of a learner, as one of them sees them. With one process every method gives that
    process's own value.

    Each gives a sign of life every second, in a store that all can reach. A rank that cannot reach
    the store ends itself: rank 0, or who started them all, keeps it. So a rank may wait for an hour
    while the first asks a judge, and yet not for a dead one.

    Args:
        store: of torch.distributed; who sees a rank end without a word of its own notes that there
            under ended/RANK.
        timeout: seconds without a sign of life after which a rank is lost.
    """

    def __init__(self, store: Any = None, rank: int = 0, size: int = 1, timeout: float = 0) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.first = rank == 0
        """True on the rank that writes the run's files and logs."""
        self.mesh: DeviceMesh | None = None
        """The ranks over which layers are cut, as torch's DeviceMesh; unset: weights are whole, and
        passes are a rank's own.
        """
        self.idle = False
        """True while this rank runs a pass for the others alone. The results of this pass are
        dropped.
        """
        self.sums: dist.ProcessGroup | int | None = None
        """The group of processes that sums; unset: that of everything else."""
        self.scratch = Path()
        """The folder in which another rank than the first writes down what a stage does; it goes
        with the process.
        """
        self.others_wait = False
        """True while this rank alone computes what `once` gives to all."""
        self.seen = {other: (b"", time.monotonic()) for other in range(size) if other != rank}
        self.ended = threading.Event()
        if size > 1:
            threading.Thread(target=self._give_signs, name="signs of life", daemon=True).start()

    def share(self, sizes: Sequence[int]) -> list[int]:
        """Places of the items that are this rank's, by their sizes: the largest goes to the rank
        that has least.
        """
        loads = [0] * self.size
        mine = []
        for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
            lightest = loads.index(min(loads))
            loads[lightest] += sizes[place]
            mine += [place] if lightest == self.rank else []
        return sorted(mine)

    def map(
        self,
        work: Callable[[Item], T],
        items: Iterable[Item],
        size: Callable[[Item], int] = lambda _: 1,
    ) -> Iterable[T]:
        """The results of all items, in order, each worked out by one rank. To be gone through to
        the end.
        """
        if self.size == 1:
            return map(work, items)
        items = [*items]
        own = dict[int, T]()
        for place in self.in_step(self.share([size(item) for item in items]), 0):
            result = work(items[place])
            own |= {} if self.idle else {place: result}
        return self._joined(own)

    def measure(
        self,
        work: Callable[[Item], Mapping[str, Tensor]],
        items: Iterable[Item],
        size: Callable[[Item], int] = lambda _: 1,
    ) -> list[dict[str, list[float]]]:
        """`map` for work that gives numbers by name: the host reads those of all items together,
        after the last.
        """
        if self.size > 1:
            return [*self.map(lambda item: read_back([work(item)])[0], items, size)]
        return read_back([*map(work, items)])

    def in_step(self, own: Sequence[Item], spare: Item) -> Iterator[Item]:
        """A rank's own items; where passes need all ranks, also a `spare` one for each that the
        busiest rank has more.
        """
        others = max(self.gather(len(own))) - len(own) if self.mesh else 0
        yield from own
        self.idle = others > 0
        yield from itertools.repeat(spare, others)
        self.idle = False

    def spread(
        self,
        work: Callable[[list[Item]], Sequence[T]],
        items: Sequence[Item],
        size: Callable[[Item], int] = lambda _: 1,
    ) -> Sequence[T]:
        """The same where a rank works out all of its items at once; where passes need all ranks,
        each works out everything.
        """
        if self.size == 1 or self.mesh:
            return work(list(items))
        mine = self.share([size(item) for item in items])
        own = work([items[place] for place in mine]) if mine else ()
        return self._joined(dict(zip(mine, own, strict=True)))

    def _joined(self, own: dict[int, T]) -> list[T]:
        """Results of all ranks, in order."""
        results = {place: result for part in self.gather(own) for place, result in part.items()}
        return [results[place] for place in sorted(results)]

    def gather(self, value: T) -> list[T]:
        """Values of all ranks, in their order."""
        if self.size == 1:
            return [value]
        values = [value] * self.size
        self.together(lambda: dist.all_gather_object(values, value))
        return values

    def agreed(self, value: T) -> T | None:
        """The value of the first rank that has one, on all ranks; None if none has."""
        return next(filter(None, self.gather(value)), None)

    def once(self, work: Callable[[], T]) -> T:
        """Result of `work` on all ranks. The first rank alone computes it, with `ALONE` for its
        ranks.
        """
        if self.size == 1:
            return work()
        values: list[Any] = [None]
        if self.first:
            self.others_wait = True
            try:
                values = [work()]
            finally:
                self.others_wait = False
        self.together(lambda: dist.broadcast_object_list(values, 0))
        return values[0]

    def score_by_share(self, score: Scoring, rollouts: Sequence[Rollout]) -> list[Score]:
        """Scores of which each rank computes its share. A response's score must not depend on its
        batch.
        """
        return [
            *self.spread(score, rollouts, lambda one: len(one.prompt_ids) + len(one.response_ids)),
        ]

    def score_by_first(self, score: Scoring, rollouts: Sequence[Rollout]) -> list[Score]:
        """Scores for which the first rank alone asks: whatever costs, remembers, or wants to see
        all responses.
        """
        return self.once(lambda: score(rollouts))

    @torch.no_grad()
    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their sums over the ranks, which have the same bits on all of them; in
        float32, at one go.
        """
        if self.size == 1:
            return
        flat = torch.cat([tensor.float().flatten() for tensor in tensors])
        # on a GPU too: until it is done
        self.together(lambda: (dist.all_reduce(flat, group=self.sums), flat[:1].tolist()))
        for tensor, part in zip(
            tensors,
            flat.split([tensor.numel() for tensor in tensors]),
            strict=True,
        ):
            tensor.copy_(part.view_as(tensor))

    def together(self, collective: Callable[[], object]) -> None:
        """Take part in what needs all ranks, for as long as all of them live.

        Raises:
            LostRankError: one of them does not; it is named.
            RuntimeError: the other ranks wait for the result of `once`.
        """
        if self.others_wait:
            raise RuntimeError("a collective within `once`, for whose result the other ranks wait")
        future: Future[object] = Future()
        # a new thread begins on the first GPU, whatever this rank's is: it would wait for that one
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        threading.Thread(
            target=_settle,
            args=(future, collective, gpu),
            name=COLLECTIVE,
            daemon=True,
        ).start()
        patience = self.timeout
        deadline = math.inf
        reason = ""
        while not reason:
            try:
                future.result(LOOK_EVERY)
                return
            except TimeoutError:
                reason = self._lost(patience)
            except RuntimeError as error:  # torch's, when another's connection has closed
                patience = min(patience, BLAME)
                deadline = min(deadline, time.monotonic() + 2 * BLAME)
                late = (
                    f"rank {self.rank} of {self.size} has lost the others "
                    f"({str(error).splitlines()[0]})"
                )
                reason = self._lost(patience) or (late if time.monotonic() > deadline else "")
                time.sleep(LOOK_EVERY / 4)
        raise LostRankError(f"{reason}. {AGAIN}")

    def _meet(self) -> bool:
        """Wait until every rank has given a sign; whether they have before this one left."""
        while not self.ended.wait(0.05):
            if self.store.check([f"sign/{other}" for other in self.seen]):
                return True
        return False

    def _give_signs(self) -> None:
        for count in itertools.count():
            try:
                self.store.set(f"sign/{self.rank}", str(count))
            except RuntimeError:
                # the main thread may say why, if it is not deep in a pass
                if not self.ended.wait(2 * BLAME):
                    os._exit(LOST)
            if self.ended.wait(LOOK_EVERY):
                return

    def _lost(self, patience: float) -> str:
        """The rank that has ended, and why, or that has given no sign for `patience` seconds; empty
        if there is none.
        """
        try:
            for other, (before, since) in self.seen.items():
                sign = self._read(f"sign/{other}")
                name = f"rank {other} of {self.size}"
                if words := self._read(f"ended/{other}"):
                    return f"{name} has ended: {words.decode()}"
                if sign != before:
                    self.seen[other] = sign, time.monotonic()
                elif time.monotonic() - since > (
                    limit := patience if sign else max(patience, COMING)
                ):
                    return (
                        f"{name} {'has given no sign of life' if sign else 'has not come'} for "
                        f"{limit:g} s"
                    )
        except RuntimeError:
            return (
                f"what keeps the {self.size} ranks together, rank 0 or who started them, does "
                "not answer any more"
            )
        return ""

    def blamed(self) -> str:
        """The rank that has ended; empty if none has in a while."""
        deadline = time.monotonic() + 2 * BLAME
        lost = ""
        while not lost and time.monotonic() < deadline:
            lost = self._lost(BLAME)
            time.sleep(LOOK_EVERY / 4)
        return lost

    def _read(self, key: str) -> bytes:
        return self.store.get(key) if self.store.check([key]) else b""

    def leave(self, reason: str) -> None:
        """Give no more signs; with a reason, tell the others why."""
        self.ended.set()
        if reason:
            with contextlib.suppress(RuntimeError):
                self.store.set(f"ended/{self.rank}", reason)

    @contextlib.contextmanager
    def workplace(self, folder: Path, original: Path) -> Iterator[None]:
        """Within this block every rank but the first writes into a copy of a stage's folder, which
        is not read.
        """
        if not self.first:
            shutil.copytree(
                original,
                folder,
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns("checkpoints", ".lock"),
            )
        self.gather(None)
        yield
        self.gather(None)


ALONE = Ranks()
"""The ranks of a process that trains alone."""


@contextlib.contextmanager
def joined(ranks: Ranks, on_gpu: bool, shard: bool = False) -> Iterator[None]:
    """Within this block the ranks train together, and perhaps cut layers over all of them.

    Raises:
        LostRankError: a rank has not come, has ended or is lost; it is named.
    """
    # not the one that signs go through: it will wait
    reason = ""
    own = dist.PrefixStore("group", ranks.store.clone())
    # the signs of life decide
    patience = timedelta(days=30)
    try:
        ranks.together(
            lambda: (
                ranks._meet()
                and dist.init_process_group(
                    "gloo",
                    store=own,
                    rank=ranks.rank,
                    world_size=ranks.size,
                    timeout=patience,
                )
            ),
        )
        ranks.sums = dist.new_group(backend="nccl", timeout=patience) if on_gpu else None
        if shard:
            # of its own on GPUs, too: nobody watches a pass for the signs of life
            group: Any = dist.new_group(backend="nccl" if on_gpu else None, timeout=PASS)
            ranks.mesh = DeviceMesh.from_group(group, "cuda" if on_gpu else "cpu")
        with temporary_folder(f"tether-rank-{ranks.rank}") as ranks.scratch:
            yield
            ranks.gather(None)
    except BaseException as error:
        reason = str(error) or type(error).__name__
        if (
            ranks.mesh
            and isinstance(error, RuntimeError)
            and not isinstance(error, TetherError)
            and (lost := ranks.blamed())
        ):
            raise LostRankError(f"{lost}. {AGAIN}") from error  # in the middle of a pass
        raise
    finally:
        ranks.leave(reason)


def close() -> None:
    """Forget the group of processes, once they have left it."""
    collectives = [thread for thread in threading.enumerate() if thread.name == COLLECTIVE]
    for thread in collectives:
        thread.join(BLAME)
    # torch would wait for it before the interpreter ends
    if any(thread.is_alive() for thread in collectives):
        atexit.register(lambda: (sys.stdout.flush(), sys.stderr.flush(), os._exit(LOST)))
    elif dist.is_initialized():
        dist.destroy_process_group()


def _settle(future: Future[object], work: Callable[[], object], gpu: int | None) -> None:
    try:
        if gpu is not None:
            torch.cuda.set_device(gpu)
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001  (told to the thread that waits)
        future.set_exception(error)


@dataclass(eq=False)
class SharedEngine:
    """An engine on every rank: each samples for its share of the prompts, by their ordinals, and
    all have all groups.
    """

    engine: Engine
    ranks: Ranks

    def __post_init__(self) -> None:
        self.policy_version = self.engine.policy_version

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        **how: Unpack[DrawArguments],
    ) -> list[RolloutGroup]:
        places = how.get("ordinals") or range(len(prompts))

        def sample(mine: list[tuple[Prompt, int]]) -> list[RolloutGroup]:
            how["ordinals"] = [place for _, place in mine]
            return self.engine.generate([prompt for prompt, _ in mine], sampling, **how)

        return [*self.ranks.spread(sample, list(zip(prompts, places, strict=True)))]

    def update_weights(self, version: int) -> None:
        self.engine.update_weights(version)
        self.policy_version = version


def shared(engine: Engine, ranks: Ranks) -> Engine:
    """The engine itself where there is one rank; else all ranks sample."""
    return engine if ranks.size == 1 else SharedEngine(engine, ranks)


@dataclass(eq=False)
class FirstEngine:
    """An engine that the first rank alone has, such as one of servers: it samples there, and all
    ranks have the groups.

    Args:
        engine: on the first rank; None on the others.
        probe: what the engine compares new weights with; asked of all ranks, for a pass may need
            them.
        sample: what samples with the engine, such as episodes; unset: the engine itself.
    """

    engine: Any
    probe: Callable[[], list[float]]
    ranks: Ranks
    sample: Callable[..., list[RolloutGroup]] | None = None
    policy_version = 0

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        **how: Unpack[DrawArguments],
    ) -> list[RolloutGroup]:
        return self.ranks.once(
            lambda: (self.sample or self.engine.generate)(prompts, sampling, **how),
        )

    def begin(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        **how: Unpack[DrawArguments],
    ) -> Callable[[], list[RolloutGroup]]:
        """Ask for samples with the weights of now; what comes back waits for them, on all ranks at
        once.
        """
        collect = self.engine.begin(prompts, sampling, **how) if self.ranks.first else list
        return lambda: self.ranks.once(collect)

    def update_weights(self, version: int) -> None:
        expected = self.probe()
        self.ranks.once(lambda: self.engine.update_weights(version, expected))
        self.policy_version = version

    @property
    def context_length(self) -> int:
        """The longest sequence that the engine takes, in tokens."""
        return self.ranks.once(lambda: self.engine.context_length)

    def measured(self, step: int) -> Metrics:
        return self.ranks.once(lambda: self.engine.measured(step))
