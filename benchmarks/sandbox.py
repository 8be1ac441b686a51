"""`python -m benchmarks.sandbox [--json] [--page]`: the most that greedy programs get of a machine, in
six environments.

The programs of `greedy.toml` run under the guard of model-written programs (`tether.rewards.code`).
Each environment is a process of its own: as root and as an ordinary user (uid 65534), where
programs can mount and where a filter refuses it, and in a group of a memory controller that has
less than a program may take. Where this machine allows it, a group counts the memory, the kernel's
own included, and a tmpfs counts the files; else both are sampled from /proc. `--page` writes the
largest values into the table of docs/trust/safety.md. Exit status 1: a program got more than its
limit and margin, or what trains did not outlive it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tether.core.keeping import durable
from tether.rewards import code
from tether.rewards.sandbox import CheckResult, Sandbox
from tether.rewards.scratch import FILES, THREADS

_GREEDY = tomllib.loads((Path(__file__).parent / "greedy.toml").read_text(encoding="utf-8"))
HEAD: str = _GREEDY["head"]
PROGRAMS: dict[str, str] = _GREEDY["programs"]
NOBODY = 65534
ENVIRONMENTS = {
    "root": {},
    "root, nothing can be mounted": {"mounts": False},
    "user": {"user": NOBODY},
    "user, nothing can be mounted": {"user": NOBODY, "mounts": False},
    "root, in a group of less memory": {"group": 512},
    "user, in a group of less memory": {"user": NOBODY, "group": 512},
}
"""What a process becomes before it runs programs; `group`: MB that the trainer, the worker and the
program have together.
"""
SECONDS, MEMORY, GREEDY_MEMORY = 3.0, 256, 4096
MB = 1 << 20
LIMITS = {
    "memory": (MEMORY * MB, 32 * MB),
    "disk": (code.SCRATCH, MB),
    "files": (FILES, 1),
    "processes": (1, 0),
    "threads": (THREADS, 0),
    "open_files": (64, 0),
    "seconds": (SECONDS, 1.0),
}
"""Of each thing: the stated limit, and by how much it may be exceeded. Memory's margin is the
kernel's own: buffers, stacks.
"""
UNMOUNTED = {
    "memory": (MEMORY * MB, 64 * MB),
    "disk": (code.SCRATCH, 512 * MB),
    "files": (FILES, 20_000),
    "threads": (THREADS, 3000),
}
"""Where nothing can be mounted, a program goes on between two measurements, of 10 ms and more."""
TICK = 0.005
PAGE = Path(__file__).resolve().parent.parent / "docs/trust/safety.md"
ON_THE_PAGE = {
    "root, in a group of less memory": "root, `memory_mb = 4096` in a group of 512 MB",
    "user, in a group of less memory": "user, `memory_mb = 4096` in a group of 512 MB",
}
"""Names of environments on the page, where they are others than here."""


@dataclass(slots=True)
class Row:
    """The most that a program had at a time: bytes of memory and disk, numbers, and seconds until
    it was over.
    """

    program: str
    environment: str
    memory: int = 0
    disk: int = 0
    files: int = 0
    processes: int = 0
    threads: int = 0
    open_files: int = 0
    seconds: float = 0.0
    outcome: str = ""
    survived: bool = False
    left: int = 0
    beyond: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sandbox", description=__doc__)
    parser.add_argument(
        "--json",
        action="store_true",
        help=("one line of JSON for each program in each environment"),
    )
    parser.add_argument(
        "--page",
        action="store_true",
        help="write the largest values into docs/trust/safety.md",
    )
    parser.add_argument("--environments", nargs="*", choices=ENVIRONMENTS, default=possible())
    parser.add_argument("--programs", nargs="*", choices=PROGRAMS, default=[*PROGRAMS])
    parser.add_argument("--smoke", action="store_true", help="one program: does it run?")
    parser.add_argument("--inside", choices=ENVIRONMENTS, help=argparse.SUPPRESS)
    parser.add_argument("--ready", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        if not given.ready:
            become(ENVIRONMENTS[given.inside])
        for row in measured(given.inside, given.programs):
            print(json.dumps(asdict(row)), flush=True)
        return 0
    programs = ["heap"] if given.smoke else given.programs
    if given.page and {*programs} != {*PROGRAMS}:
        parser.error("--page needs all programs: its table has the largest value of any program")
    rows: list[dict[str, Any]] = []
    for name in given.environments[: 1 if given.smoke else None]:
        start = time.monotonic()
        rows += rows_of(name, programs)
        seconds = time.monotonic() - start
        print(f"{name}: {len(programs)} programs, {seconds:.0f} s", file=sys.stderr, flush=True)
    print("\n".join(json.dumps(row) for row in rows) if given.json else table(rows))
    if given.page:
        write_page(rows, PAGE)
    return any(row["beyond"] or not row["survived"] for row in rows)


def possible() -> list[str]:
    """The environments that this process can make: root makes all of them, another user those of
    itself.
    """
    names = [name for name in ENVIRONMENTS if name.startswith("user" if os.geteuid() else "")]
    mounts = code.guards().space
    names = [name for name in names if mounts or not ENVIRONMENTS[name].get("mounts", True)]
    return [
        name for name in names if "group" not in ENVIRONMENTS[name] or memory_group() is not None
    ]


def rows_of(environment: str, programs: list[str]) -> list[dict[str, Any]]:
    """What programs got in one environment."""
    with tempfile.TemporaryDirectory(prefix="tether-greedy-") as folder:
        group = memory_group()
        if group is not None:
            os.mkdir(group / Path(folder).name)
            group = group / Path(folder).name
        try:
            command = [
                sys.executable,
                "-m",
                "benchmarks.sandbox",
                "--inside",
                environment,
                "--programs",
                *programs,
            ]
            variables = {**os.environ, "TMPDIR": folder, "TETHER_GROUP": str(group or "")}
            finished = subprocess.run(
                command,
                env=variables,
                capture_output=True,
                text=True,
                check=False,
            )
        finally:
            if group is not None:
                time.sleep(0.1)
                os.rmdir(group)
    if finished.returncode:
        raise SystemExit(
            f"{environment}: the process that trains ended with "
            f"{finished.returncode}\n{finished.stderr[-2000:]}",
        )
    return [json.loads(line) for line in finished.stdout.splitlines()]


def table(rows: list[dict[str, Any]]) -> str:
    """The most that programs got, as Markdown."""
    heads = (
        "environment",
        "program",
        "memory",
        "disk",
        "files",
        "processes",
        "threads",
        "open files",
        "seconds",
        "beyond",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        sizes = (f"{row[name] / MB:.0f} MB" for name in ("memory", "disk"))
        numbers = (str(row[name]) for name in ("files", "processes", "threads", "open_files"))
        faults = ", ".join(row["beyond"]) or (
            "" if row["survived"] else ("the trainer did not survive")
        )
        cells = (
            row["environment"],
            row["program"],
            *sizes,
            *numbers,
            f"{row['seconds']:.1f}",
            faults,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_page(rows: list[dict[str, Any]], page: Path) -> None:
    """Put the largest values of each environment into its line of the page's table.

    Raises:
        SystemExit: the page has no such line, or its sentences do not hold: a program got more than
            its limit (of time alone, which a busy machine exceeds, the line shows it).
    """
    if bad := [row for row in rows if {*row["beyond"]} - {"seconds"} or not row["survived"]]:
        names = ", ".join(f"{row['program']} ({row['environment']})" for row in bad)
        raise SystemExit(f"{page} is unchanged, because its sentences do not hold of: {names}")
    lines = page.read_text(encoding="utf-8").splitlines(keepends=True)
    for environment in dict.fromkeys(row["environment"] for row in rows):
        head = f"| {ON_THE_PAGE.get(environment, environment)} | "
        places = [place for place, line in enumerate(lines) if line.startswith(head)]
        if len(places) != 1:
            raise SystemExit(f"{page} has {len(places)} lines that begin with {head!r}, not one")
        own = [row for row in rows if row["environment"] == environment]
        most = {name: max(row[name] for row in own) for name in LIMITS}
        if unseen := [name for name, value in most.items() if not value]:
            raise SystemExit(f"{page} is unchanged: {environment}: {unseen} were not measured")
        cells = [f"{most[name] / MB:.0f} MB" for name in ("memory", "disk")]
        cells += [f"{most[name]:,}" for name in ("files", "processes", "threads", "open_files")]
        lines[places[0]] = f"{head}{' | '.join(cells)} | {most['seconds']:.1f} |\n"
    with durable(page) as file:
        file.write_text("".join(lines), encoding="utf-8")


# The process that trains: it becomes what the environment says, and starts again as that.


def memory_group() -> Path | None:
    """The folder below which this process may make groups of a memory controller, of either
    version.
    """
    for line in (
        Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
        if sys.platform == "linux"
        else ()
    ):
        _, controllers, own = line.split(":", 2)
        for root in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup"):
            folder = Path(root + own)
            usage = (
                "memory.usage_in_bytes"
                if "memory" in controllers.split(",")
                else "memory.max"
                if not controllers
                else "-"
            )
            if (folder / usage).exists() and os.access(folder, os.W_OK):
                enabled = folder / "cgroup.subtree_control"
                if not enabled.exists() or "memory" in enabled.read_text(encoding="ascii").split():
                    return folder
    return None


def become(environment: dict[str, Any]) -> None:
    """Take the rights of an environment and start anew with them."""
    if group := os.environ["TETHER_GROUP"]:
        if much := environment.get("group"):
            limit = next(
                one
                for one in ("memory.limit_in_bytes", "memory.max")
                if (Path(group) / one).exists()
            )
            (Path(group) / limit).write_text(str(much * MB), encoding="ascii")
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    library = ctypes.CDLL(None, use_errno=True)
    folder, user = os.environ["TMPDIR"], environment.get("user", 0)
    if os.geteuid() == 0:
        _own_mounts(library, folder, readable=user != 0)
    if user and os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        os.environ["HOME"] = folder
    if not environment.get("mounts", True):
        _refuse_mounts(library)
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.sandbox", *sys.argv[1:], "--ready"])


def _own_mounts(library: ctypes.CDLL, folder: str, *, readable: bool) -> None:
    """A tmpfs over `folder`, which counts exactly; `readable`: this Python and this checkout can be
    reached by everybody.
    """
    private, bind = 1 << 18 | 1 << 14, 1 << 12
    assert library.unshare(0x20000) == 0, "root may make a mount namespace"
    assert library.mount(None, b"/", None, private, None) == 0, "root may change its mounts"
    assert library.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, b"size=4g,mode=777") == 0, (
        "root may mount a tmpfs"
    )
    for path in (sys.base_prefix, sys.prefix, *filter(os.path.isdir, sys.path)) if readable else ():
        closed = next(
            (one for one in reversed(Path(path).resolve().parents) if not one.stat().st_mode & 1),
            None,
        )
        if closed is not None:
            held = os.open(path, os.O_PATH)
            assert library.mount(b"tmpfs", bytes(closed), b"tmpfs", 0, b"mode=755") == 0
            Path(path).mkdir(parents=True)
            assert (
                library.mount(f"/proc/self/fd/{held}".encode(), path.encode(), None, bind, None)
                == 0
            )
            os.close(held)


def _refuse_mounts(library: ctypes.CDLL) -> None:
    """A filter, which what is started inherits: unshare and mount are refused, as by a container's
    policy.
    """
    unshare, mount = {"x86_64": (272, 165), "aarch64": (97, 40)}[os.uname().machine]
    steps = (
        (0x20, 0, 0, 0),
        (0x15, 2, 0, unshare),
        (0x15, 1, 0, mount),
        (0x06, 0, 0, 0x7FFF0000),
        (0x06, 0, 0, 0x50001),
    )
    filtered = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(filtered))
    assert library.prctl(38, 1, 0, 0, 0) == 0 and library.prctl(22, 2, program) == 0


# Programs, and what is taken meanwhile.


def measured(environment: str, programs: list[str]) -> Iterator[Row]:
    """A row for each program."""
    unmounted = not ENVIRONMENTS[environment].get("mounts", True)
    limits = LIMITS | (UNMOUNTED if unmounted else {})
    group = ENVIRONMENTS[environment].get("group")
    if group:
        limits["memory"] = group * MB, 0
    guards = code.guards()
    assert guards.space == (not unmounted), f"the guards are reported as {guards}"
    for name in programs:
        row = Row(name, environment)
        how = {
            "workers": 1,
            "seconds": SECONDS + 5,
            "memory_mb": GREEDY_MEMORY if group else MEMORY,
            "guarded": False,
        }
        with Sandbox("tether.rewards.code:make_runner", {"seconds": SECONDS}, **how) as sandbox:
            _run(sandbox, "f = lambda: 1")
            with _watching(row):
                start = time.monotonic()
                answer = _run(sandbox, HEAD + PROGRAMS[name])
                row.seconds = round(time.monotonic() - start, 2)
            row.survived = _run(sandbox, "f = lambda: 1").result == [["gave", 1]]
        row.outcome = str(answer.result or answer.detail)[:200]
        time.sleep(0.05)
        row.left = len(_processes()) + len(os.listdir(os.environ["TMPDIR"]))
        row.beyond = [
            name for name, (limit, margin) in limits.items() if getattr(row, name) > limit + margin
        ]
        row.beyond += ["left behind"] if row.left else []
        yield row


def _run(sandbox: Sandbox, program: str) -> CheckResult:
    return sandbox.run([{"program": program, "asks": [["value", "f()"]]}])[0]


@contextlib.contextmanager
def _watching(row: Row) -> Iterator[None]:
    """Note the most that there is of each thing beyond what there was."""
    ended, before, workers = threading.Event(), Sample.now(set()), _processes()

    def watch() -> None:
        while not ended.wait(TICK):
            now = Sample.now(workers)
            row.memory = max(row.memory, now.memory - before.memory)
            row.disk = max(row.disk, now.disk - before.disk)
            row.files = max(row.files, now.files)
            row.processes = max(row.processes, now.processes)
            row.threads, row.open_files = (
                max(row.threads, now.threads),
                max(row.open_files, now.open_files),
            )

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


@dataclass(slots=True)
class Sample:
    """What there is now: of the programs' processes, of the group's memory and of the temporary
    folder.
    """

    memory: int = 0
    disk: int = 0
    files: int = 0
    processes: int = 0
    threads: int = 0
    open_files: int = 0

    @classmethod
    def now(cls, workers: set[int]) -> Sample:
        sample = cls()
        sample.disk, sample.files = _space(os.environ["TMPDIR"])
        group = os.environ["TETHER_GROUP"]
        for process in _processes() - workers if workers else ():
            sample.processes += 1
            with contextlib.suppress(psutil.Error, OSError):
                sample._add(psutil.Process(process), counted=bool(group))
        if group:
            usage = next(
                one
                for one in ("memory.usage_in_bytes", "memory.current")
                if os.path.exists(f"{group}/{one}")
            )
            sample.memory = int(Path(group, usage).read_text(encoding="ascii")) - sample.disk
        return sample

    def _add(self, process: psutil.Process, *, counted: bool) -> None:
        self.threads += process.num_threads()
        own = [f"/proc/{process.pid}/task/{thread.id}/fd" for thread in process.threads()[:50]]
        self.open_files = max(self.open_files, sum(len(os.listdir(one)) for one in own[:1]))
        if not counted:
            self.memory += process.memory_info().rss
        for folder in Path(os.environ["TMPDIR"]).glob(f".{code.SCRATCH_NAME}.*"):
            disk, files = _space(f"/proc/{process.pid}/root{folder}")
            if os.stat(f"/proc/{process.pid}/root{folder}").st_dev != folder.stat().st_dev:
                self.disk, self.files = self.disk + disk, max(self.files, files)


def _space(folder: str) -> tuple[int, int]:
    """Bytes in use of the file system of a folder, and files in the folders of programs."""
    status = os.statvfs(folder)
    count = 0
    for place in (folder, *(one.path for one in os.scandir(folder) if one.is_dir())):
        with contextlib.suppress(OSError):
            count += sum(not one.is_dir() for one in os.scandir(place))
    return (status.f_blocks - status.f_bfree) * status.f_frsize, count


def _processes() -> set[int]:
    """All processes that began below this one, whoever their parent is now; this one is left
    out.
    """
    mark, own = f"TMPDIR={os.environ['TMPDIR']}".encode(), set()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    own.add(int(name))
    return own


if __name__ == "__main__":
    sys.exit(main())
