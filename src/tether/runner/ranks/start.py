"""Start of a training's ranks: this process starts the others, or torchrun or runner.ranks.restarts has
started all.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tether.core.errors import ConfigError, RunError
from tether.core.keeping import check_own, own_file
from tether.models.loading import pick_device
from tether.runner.assembly.launching import Placement
from tether.scale.servers.launch import Launcher
from tether.settings.learner import LearnerConfig
from tether.settings.recipe import BaseRecipe
from tether.stages.learner.ranks import ALONE, COMING, Ranks, close, joined

WORKER = "tether.runner.ranks.worker"
"""The program of a rank that is started here."""
LEAVE = 10.0
"""Seconds that a rank has to end by itself after the request."""


@contextlib.contextmanager
def together(recipe: BaseRecipe, stages: Sequence[str]) -> Iterator[Ranks]:
    """Within this block the ranks that a recipe asks for train together; on leaving it those
    started here have ended.

    Where RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set (by torchrun or runner.ranks.restarts), this
    is one of those. Otherwise it is rank 0, and starts the others, on this machine or where Ray has
    room.

    Raises:
        ConfigError: torchrun has started another number of them, or should restart them, or this
            machine has fewer GPUs.
        LostRankError: a rank has not come, has ended or is lost; it is named.
    """
    settings = recipe.learner
    given = os.environ.get("WORLD_SIZE")
    on_gpu = pick_device(recipe.model.device).type == "cuda"
    if given is not None and int(given) != settings.ranks:
        raise ConfigError(
            f"torchrun has started {given} processes and learner.ranks is "
            f"{settings.ranks}: make them the same",
        )
    if given is not None and "restarts" in settings.model_fields_set and settings.restarts:
        raise ConfigError(
            "learner.restarts is for ranks that tether starts; torchrun has "
            "--max-restarts: leave one of them out",
        )
    if settings.ranks == 1:
        yield ALONE
        return
    local = int(os.environ.get("LOCAL_RANK", "0"))
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", given or str(settings.ranks)))
    # those that a cluster places have machines, or GPUs, of their own
    here_too = beside if given is not None or recipe.on == "local" else 1
    if on_gpu and torch.cuda.device_count() < here_too:
        raise ConfigError(
            f"learner.ranks puts {here_too} ranks on this machine, which has "
            f"{torch.cuda.device_count()} GPUs",
        )
    if on_gpu:
        torch.cuda.set_device(local)
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(max(1, torch.get_num_threads() // beside))
        stack.callback(close)
        ranks = _placed(recipe, stages, stack) if given is None else _found(settings)
        stack.enter_context(joined(ranks, on_gpu, settings.shard))
        yield ranks


def _found(settings: LearnerConfig) -> Ranks:
    """The ranks that torchrun has started, by the store at its address, which rank 0 keeps unless
    torchrun itself does.
    """
    given = os.environ
    rank = int(given["RANK"])
    address = given["MASTER_ADDR"]
    port = int(given["MASTER_PORT"])
    keeps = rank == 0 and given.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        limit = timedelta(seconds=settings.timeout)
        store = dist.TCPStore(address, port, is_master=keeps, wait_for_workers=False, timeout=limit)
    except RuntimeError as error:
        reason = (
            f"cannot reach rank 0 at {address}:{port} within {settings.timeout:g} s "
            f"({str(error).splitlines()[0]})"
        )
        raise RunError(f"rank {rank} of {settings.ranks} {reason}") from None
    start = given.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Ranks(dist.PrefixStore(f"tether/{start}", store), rank, settings.ranks, settings.timeout)


def _placed(recipe: BaseRecipe, stages: Sequence[str], ends: contextlib.ExitStack) -> Ranks:
    """This process as rank 0, and the others, which `ends` ends."""
    keeper = keep_store(placement_of(recipe))
    settings = recipe.learner
    store = dist.PrefixStore("tether/0", keeper)
    starter = cluster(recipe, ends)
    for rank in range(1, settings.ranks):
        child = ends.enter_context(started(rank, recipe, stages, keeper, starter=starter))
        threading.Thread(target=_attend, args=(child, rank, store), daemon=True).start()
    return Ranks(store, 0, settings.ranks, settings.timeout)


def placement_of(recipe: BaseRecipe) -> Placement:
    """The place where a recipe's programs start."""
    return Placement(recipe.on, recipe.model.device)


def keep_store(place: Placement) -> dist.TCPStore:
    """The store in which ranks meet, at an address that all of them reach, for as long as it is
    held.
    """
    server = socket.create_server((place.host_address(), 0))
    host, port = server.getsockname()
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        master_listen_fd=server.detach(),
        wait_for_workers=False,
    )


def cluster(recipe: BaseRecipe, ends: contextlib.ExitStack) -> Launcher | None:
    """A launcher that places all ranks but the first on other machines, until `ends` closes it.
    None if all are processes of this machine.

    Raises:
        ConfigError: the cluster cannot be reached, or is too small.
        RunError: others use it for too long.
    """
    if recipe.on == "local":
        return None
    kind = "GPU" if pick_device(recipe.model.device).type == "cuda" else "CPU"
    needs = {_name(rank): {kind: 1.0} for rank in range(1, recipe.learner.ranks)}
    starter = placement_of(recipe).launcher(Path(recipe.run), needs, COMING)
    return ends.enter_context(contextlib.closing(starter))


def _name(rank: int) -> str:
    return f"rank-{rank}"


class PlacedRank:
    """A rank on a machine that a launcher has chosen, with what is asked of a process of this
    machine.
    """

    def __init__(
        self,
        starter: Launcher,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        with own_file(log) as file:
            check_own(file, log, rb"tether starts rank-.*")
            file.truncate(0)
            file.write(f"tether starts {name}\n".encode())
        self.starter = starter
        self.name = name
        self.log = log
        self.returncode: int | None = None
        starter.place(name)
        starter.start(name, command, environment, log)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.starter.ended(self.name)
        return self.returncode

    def wait(self, timeout: float = math.inf) -> None:
        """Raises: TimeoutExpired: it runs on."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.name, timeout)
            time.sleep(0.2)

    def kill(self) -> None:
        if self.poll() is None:
            self.starter.stop(self.name)
            self.returncode = -signal.SIGKILL

    terminate = kill

    @property
    def stdout(self) -> Iterator[bytes]:
        """The lines that it has written, once it has ended."""
        self.wait()
        yield from self.log.read_bytes().splitlines(keepends=True)[1:]


Rank = subprocess.Popen[bytes] | PlacedRank


@contextlib.contextmanager
def started(
    rank: int,
    recipe: BaseRecipe,
    stages: Sequence[str],
    store: dist.TCPStore,
    start: int = 0,
    pipe: int | None = None,
    starter: Launcher | None = None,
) -> Iterator[Rank]:
    """A rank as a process that does not outlive the block.

    Args:
        start: how often the ranks were started before; those of one start meet.
        pipe: the end of a pipe (a file descriptor) through which the rank reports its progress.
        starter: places it; unset: it runs on this machine.
    """
    size = recipe.learner.ranks
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "MASTER_ADDR": store.host,
        "MASTER_PORT": store.port,
    }
    place |= {"TORCHELASTIC_RESTART_COUNT": start, "TORCHELASTIC_USE_AGENT_STORE": True}
    if recipe.on != "local":  # alone on its machine, or with a GPU of its own there
        place |= {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    environment = {key: str(value) for key, value in place.items()}
    task = json.dumps(recipe.model_dump(mode="json", exclude_unset=True))
    command = [sys.executable, "-m", WORKER, "" if pipe is None else str(pipe), task, *stages]
    if starter is not None:
        child: Rank = PlacedRank(
            starter,
            _name(rank),
            command,
            environment,
            Path(recipe.run) / "ranks" / f"{rank}.log",
        )
    else:
        child = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=pipe is not None,
            pass_fds=() if pipe is None else (pipe,),
        )
    try:
        yield child
    except BaseException:
        child.terminate()
        raise
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(LEAVE)
        child.kill()
        child.wait()


def _attend(process: Rank, rank: int, store: Any) -> None:
    """Note the end of a process that gave no reason, with its last line."""
    lines = b"".join(process.stdout or ()).decode(errors="replace").strip().splitlines()
    process.wait()
    store.compare_set(
        f"ended/{rank}",
        "",
        f"exit code {process.returncode}; {lines[-1] if lines else 'it said nothing'}",
    )


def is_other() -> bool:
    """True if torchrun has started this process as another rank than the first."""
    return int(os.environ.get("RANK", "0")) > 0
