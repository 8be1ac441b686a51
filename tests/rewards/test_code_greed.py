"""Programs that take all that they can get: how much, in which environment, and what is reported of
the guards there.
"""

import contextlib
import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator

import psutil
import pytest
from benchmarks.sandbox import ENVIRONMENTS, HEAD, PROGRAMS, possible, rows_of

from tether.rewards import code, verifiable
from tether.rewards.guard import Guards
from tether.rewards.sandbox import Sandbox
from tether.rewards.scratch import excess
from tether.rewards.verifiable import VerifiableReward
from tether.settings.rewards import VerifiableConfig

HELD = code.guards()
needs_guards = pytest.mark.skipif(
    not (HELD.files and HELD.processes),
    reason=("this kernel offers no Landlock or no seccomp"),
)
KERNELS_OWN = (
    *(
        "buffers of pipes",
        "huge pages in pipes",
        "buffers of sockets",
        "tables of open files of its own",
        "tables of pages",
    ),
    *(
        "threads",
        "threads of the library of C",
        "timers",
        "watches of files",
        "asynchronous input and output",
        "the input of a program",
    ),
    *("removed files, sent and not received", "files that are reserved"),
    *("pages far apart", "many mappings", "guards of pages", "large pages, hardly mapped"),
    *("memory that is shared and hardly mapped", "/dev/zero, hardly mapped"),
)
"""What no limit of a process counts, and what a filter or a measurement must therefore bound."""


def within(rows):
    return [
        (row["program"], row["beyond"], row["survived"], row["left"])
        for row in rows
        if row["beyond"] or not row["survived"]
    ]


@needs_guards
@pytest.mark.skipif(not possible(), reason="no environment can be made here")
def test_memory_of_the_kernel_is_bounded_too():
    rows = rows_of(possible()[0], [*KERNELS_OWN])
    assert [row["program"] for row in rows] == [*KERNELS_OWN] and within(rows) == []


@pytest.mark.slow
@needs_guards
@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_no_program_gets_more_than_its_limit_in_any_environment(environment):
    if environment not in possible():
        pytest.skip(
            "this process cannot make the environment: root makes all, another user those of itself",
        )
    rows = rows_of(environment, [*PROGRAMS])
    assert len(rows) == len(PROGRAMS) and within(rows) == []


@needs_guards
@pytest.mark.parametrize(
    "deed",
    [
        "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
        "socket.socketpair()[0].bind(b'\\0tether')",
        "socket.send_fds(socket.socketpair()[0], [b'x'], [0])",
        "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)",
        "fcntl.fcntl(os.pipe()[1], 1031, 1 << 20)",
        "called(libc.close_range, 1000, 2000, 2)",
        "called(libc.shmat, 0, 0, 0)",
        "called(libc.shmctl, 0, 0, 0)",
        "called(libc.msgrcv, 0, 0, 0, 0, 0)",
        "called(libc.semctl, 0, 0, 0)",
        "called(libc.mq_unlink, b'/x')",
        "called(libc.syscall, 463, -100, b'mine', 0, b'user.x', 0, 0)",
        "called(libc.syscall, 469, -100, b'mine', 0, 0, 0)",
        "called(libc.prctl, 1, 0)",
        "called(libc.syscall, 470)",
        "called(libc.syscall, 4000)",
        "called(libc.inotify_init)",
        "called(libc.syncfs, 0)",
        "called(libc.fallocate, 0, 1, 0, 1)",
        "mmap.mmap(-1, 4096)",
        "os.open('/dev/zero', os.O_RDWR)",
        "called(libc.madvise, ctypes.c_void_p(1 << 40), ctypes.c_size_t(1 << 30), 102)",
        "called(libc.remap_file_pages, ctypes.c_void_p(here), ctypes.c_size_t(4096), 0, 0, 0)",
        "os.write(0, b'x')",
        "os.setuid(0)",
        "os.setresuid(-1, 0, -1)",
        "called(libc.setfsuid, 0)",
        "os.setgid(0)",
        "os.setgroups([])",
    ],
)
def test_no_program_makes_such_a_call(score, deed):
    called = (
        "def called(call, *arguments):\n    ctypes.set_errno(0)\n    if call(*arguments) == -1:\n"
        "        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))\n"
        "here = libc.mmap(0, 4096, 3, 0x22, -1, 0)\nassert here != FAILED\n"
    )
    reason = score(
        f"{HEAD}{called}def f(): return [{deed}, 'done']",
        "assert f() == 'harmless'",
    ).reason
    assert any(word in reason for word in ("PermissionError", "Errno 38", "Errno 9")), reason
    assert "done" not in reason


@needs_guards
def test_programs_map_and_free_memory_as_they_like(score):
    """Blocks, libraries, threads with stacks of their own, a deep stack, a heap that grows."""
    program = """
        import mmap, sqlite3, sys, threading
        def deep(n): return n and 1 + deep(n - 1)
        def f():
            with mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE) as block: block[5] = 7
            grown = bytearray(1 << 20)
            for _ in range(30): grown.extend(bytes(1 << 20))
            small = [bytes(1 << 16) for _ in range(1000)]
            threads = [threading.Thread(target=lambda: bytearray(1 << 22)) for _ in range(8)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            sys.setrecursionlimit(20_000)
            return [len(grown) >> 20, len(small), deep(9000), sqlite3.connect(":memory:").execute("select 2").fetchone()[0]]
    """
    right = "assert f() == [31, 1000, 9000, 2]"
    assert score(textwrap.dedent(program), right).value == 1.0


@needs_guards
def test_ordinary_programs_still_run(score):
    program = """
        import asyncio, concurrent.futures, socket
        async def later(x):
            await asyncio.sleep(0.01)
            return x * x
        def f():
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                squares = list(pool.map(lambda x: x * x, range(5)))
            left, right = socket.socketpair()
            left.sendall(b"hi")
            return [asyncio.run(later(3)), squares, right.recv(2).decode()]
    """
    assert score(textwrap.dedent(program), "assert f() == [9, [0, 1, 4, 9, 16], 'hi']").value == 1.0


@contextlib.contextmanager
def worker_of(seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a worker that has run a program."""
    how = {"workers": 1, "seconds": seconds, "memory_mb": 512, "guarded": False}
    with Sandbox("tether.rewards.code:make_runner", {"seconds": seconds}, **how) as sandbox:
        assert sandbox.run([{"program": "f = lambda: 1", "asks": [["value", "f()"]]}])[
            0
        ].result == [["gave", 1]]
        process = sandbox._workers[0].process
        assert process is not None
        yield process


def sleeping_program(process: subprocess.Popen[bytes]) -> psutil.Process:
    """The process of a program that a worker runs, once it sleeps."""
    worker = psutil.Process(process.pid)
    request = {"program": "import time\ndef f(): time.sleep(1000)", "asks": [["value", "f()"]]}
    assert process.stdin is not None
    process.stdin.write(json.dumps(request).encode() + b"\n")
    end = time.monotonic() + 30
    while not (children := worker.children()) and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.3)  # it has begun to sleep
    (program,) = children
    return program


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel to end a process with another")
def test_a_sleeping_program_ends_with_its_worker():
    with worker_of(60.0) as process:
        program = sleeping_program(process)
        os.kill(process.pid, signal.SIGKILL)
        assert psutil.wait_procs([program], timeout=10)[1] == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_where_memory_runs_out_programs_are_ended_first():
    def first(number: int) -> str:
        with open(f"/proc/{number}/oom_score_adj", encoding="ascii") as file:
            return file.read().strip()

    own = first(os.getpid())
    with worker_of(60.0) as process:
        assert [first(process.pid), first(sleeping_program(process).pid)] == ["1000", "1000"]
    assert first(os.getpid()) == own, "what trains stays as it was"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_program_has_no_large_pages():
    with worker_of(60.0) as process:
        number = sleeping_program(process).pid
        with open(f"/proc/{number}/status", encoding="ascii", errors="replace") as file:
            lines = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    if "THP_enabled" not in lines:
        pytest.skip("this kernel does not say whether a process may have large pages")
    assert lines["THP_enabled"] == "0"


@needs_guards
@pytest.mark.skipif(not HELD.space, reason="nothing can be mounted here")
def test_the_kernel_counts_the_threads_of_a_program_alone(score):
    """By its own user id, or in a namespace of its own; a limit that it cannot raise."""
    program = (
        "import os, resource\n"
        "def f(): return [*resource.getrlimit(resource.RLIMIT_NPROC), os.getuid()]"
    )
    words = score(program, "assert f() == 0").reason.partition("gave ")[2]
    _, soft, hard, user = json.loads(words.replace("'", '"'))
    assert (soft, hard) == (512, 512)
    assert user >= 0x70000000 if os.geteuid() == 0 else user == os.geteuid()


@needs_guards
@pytest.mark.parametrize("place", ["/proc/self", "/proc/thread-self", "/proc/{worker}"])
def test_no_program_changes_who_is_ended_first(score, place):
    deed = f"open(f'{place.format(worker='{os.getppid()}')}/oom_score_adj', 'w').write('-1000')"
    reason = score(f"import os\ndef f(): return {deed}", "assert f() == 'harmless'").reason
    assert "PermissionError" in reason, reason


REFUSING = """
import ctypes, os, struct, sys
calls = [int(one) for one in sys.argv[1].split(",")]
steps = [(0x20, 0, 0, 0), *((0x15, len(calls) - n, 0, call) for n, call in enumerate(calls))]
steps += [(6, 0, 0, 0x7FFF0000), (6, 0, 0, 0x50001)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
library = ctypes.CDLL(None)
assert library.prctl(38, 1, 0, 0, 0) == 0
assert library.prctl(22, 2, struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code))) == 0
os.execv(sys.executable, [sys.executable, "-c", sys.argv[2]])
"""
"""Runs a program where the kernel refuses these calls, as a container's policy would."""
CALLS = {
    "x86_64": {"files": [444], "processes": [317], "space": [165, 272]},
    "aarch64": {"files": [444], "processes": [277], "space": [40, 97]},
}


@needs_guards
@pytest.mark.skipif(not HELD.space, reason="nothing can be mounted here")
@pytest.mark.parametrize(
    "lacking",
    [["files"], ["processes"], ["space"], ["files", "processes", "space"], []],
)
def test_reported_guards_are_those_that_hold(lacking):
    calls = [call for name in lacking for call in CALLS[os.uname().machine][name]] or [4001]
    program = "from tether.rewards import code; print(*code.guards()); print(code.missing_guards())"
    command = [sys.executable, "-c", REFUSING, ",".join(map(str, calls)), program]
    flags, words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(
        "\n",
    )[:2]
    assert flags.split() == [str(name not in lacking) for name in Guards._fields]
    shown = {"files": "Landlock", "processes": "seccomp", "space": "a mount"}
    assert [name for name, word in shown.items() if word in words] == lacking


@pytest.mark.parametrize("kind", ["run", "program"])
def test_the_folder_of_a_killed_check_goes_with_the_next_check(kind, tmp_path, monkeypatch):
    program = (
        "from tether.rewards.code import make_runner\n"
        f"make_runner(60)('open(\"half\", \"w\"); import time; time.sleep(60)', [[{kind!r}, 'x']])"
    )

    def start():
        before = {*tmp_path.iterdir()}
        process = subprocess.Popen([sys.executable, "-c", program], env=environment)
        while not psutil.Process(process.pid).children():
            assert process.poll() is None
            time.sleep(0.01)
        (folder,) = {*tmp_path.iterdir()} - before
        return process, folder

    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (killed, left), (living, used) = start(), start()
    try:
        killed.kill()
        killed.wait()
        assert {*tmp_path.iterdir()} == {left, used}
        assert code.make_runner(30)("x = 2", [["value", "x * x"]]) == [["gave", 4]]
        assert {*tmp_path.iterdir()} == {used}
    finally:
        living.kill()
        living.wait()
    code.guards.cache_clear()
    assert code.guards() == HELD
    assert [*tmp_path.iterdir()] == []


def test_a_reward_of_programs_reports_a_guard_that_is_missing(monkeypatch, caplog):
    monkeypatch.setattr(code, "guards", lambda: Guards(True, True, False))
    verifiable.once.cache_clear()
    with VerifiableReward(VerifiableConfig(kind="code", workers=1)):
        pass
    assert "this machine lacks a mount, so files are measured every 10 ms" in caplog.text
    caplog.clear()
    monkeypatch.setattr(code, "guards", lambda: Guards(True, True, True))
    with VerifiableReward(VerifiableConfig(kind="code", workers=1)):
        pass
    assert caplog.text == ""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc of Linux")
@pytest.mark.parametrize(("own", "words"), [(False, ""), (True, "more than 1 MB of files")])
def test_removed_files_count_where_a_forked_program_maps_them_itself(tmp_path, own, words):
    library, size = ctypes.CDLL(None), mmap.PAGESIZE
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]

    def mapped():  # without a descriptor, which the mmap of Python keeps
        with tempfile.TemporaryFile(dir=tmp_path) as file:
            file.truncate(size)
            return library.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)

    mapped()
    ready, said = os.pipe()
    if (child := os.fork()) == 0:
        if own:
            mapped()
        os.write(said, b"!")
        signal.pause()
    try:
        assert os.read(ready, 1) == b"!"
        bounds = {"num_bytes": 1 << 20, "file_bytes": (1 << 20) + 1, "memory": -1}
        assert excess(child, str(tmp_path), **bounds) == words
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(said)
