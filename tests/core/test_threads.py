"""Threads of OpenMP: as many as a control group and the fast cores allow; asleep beside others."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tether.core import threads


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of eight cores, whose limits lie in files of this folder."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(threads, "QUOTAS", (tmp_path / "cpu.max", tmp_path / "cpu.cfs_quota_us"))
    monkeypatch.setattr(threads, "FAST", tmp_path / "fast")
    return tmp_path


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "200000 100000"}, 2),
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "5000 100000"}, 1),
        ({"cpu.max": "1600000 100000"}, None),
        ({"cpu.cfs_quota_us": "300000", "cpu.cfs_period_us": "100000"}, 3),
        ({"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, None),
        ({"fast": "0-3"}, 4),
        ({"fast": "0-1,6"}, 3),
        ({"fast": "8-11"}, None),
        ({"fast": "0-3", "cpu.max": "200000 100000"}, 2),
    ],
)
def test_threads_are_those_that_a_group_and_the_fast_cores_allow(machine, files, expected):
    for name, text in files.items():
        (machine / name).write_text(text + "\n")
    assert threads.fewer_cores() == expected


@pytest.mark.parametrize(
    ("cores", "running", "environment", "expected"),
    [
        # alone; a neighbour; a neighbour for whom a core is left; one in few of the looks
        (2, "1111111", {}, None),
        (2, "2222222", {}, "PASSIVE"),
        (8, "2222222", {"OMP_NUM_THREADS": "7"}, None),
        (8, "3333333", {"OMP_NUM_THREADS": "7"}, "PASSIVE"),
        (2, "2212111", {}, None),
        (2, "3333333", {"OMP_NUM_THREADS": "1"}, None),
        # a user has chosen
        (2, "3333333", {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
        (2, "3333333", {"GOMP_SPINCOUNT": "1000"}, None),
        (2, "3333333", {"KMP_BLOCKTIME": "0"}, None),
        # a system without the file
        (2, "", {}, None),
    ],
)
def test_threads_sleep_where_others_need_the_cores(
    machine,
    monkeypatch,
    cores,
    running,
    environment,
    expected,
):
    for name in (threads.THREADS, *threads.CHOSEN):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    looks = iter(running)

    def read(path):
        count = next(looks, None) if path == threads.RUNNING else None
        return f"cpu 1 2\nprocs_running {count}\nprocs_blocked 0" if count else ""

    monkeypatch.setattr(threads, "_read", read)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.delitem(threads.sys.modules, "torch", raising=False)
    threads.share_the_machine()
    assert os.environ.get(threads.WAITING) == expected


def test_a_busy_neighbour_is_counted():
    if not threads.RUNNING.exists():
        pytest.skip("needs /proc/stat")
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
        try:
            end = time.monotonic() + 20
            while threads._others() < 1 and time.monotonic() < end:
                time.sleep(0.05)
            assert threads._others() >= 1
        finally:
            neighbour.kill()


def test_seconds_of_waiting_for_a_core_are_counted():
    """Two loops on one core: each waits for about half of the time."""
    if not threads.THREADS_TIMES.exists() or not hasattr(os, "sched_setaffinity"):
        pytest.skip("needs Linux")
    core = min(os.sched_getaffinity(0))
    waits = (
        "import os, sys, time; sys.path.insert(0, sys.argv[2])\n"
        "from tether.core.threads import waited\n"
        "os.sched_setaffinity(0, {int(sys.argv[1])}); end = time.monotonic() + 3\n"
        "while time.monotonic() < end: pass\n"
        "print(waited())"
    )
    source = str(Path(threads.__file__).parents[2])
    command = [sys.executable, "-c", waits, str(core), source]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    seconds = [float(program.communicate()[0]) for program in both]
    # their starts are not at one moment, and another program may take the core, too
    assert all(seconds_of_one >= 0.5 for seconds_of_one in seconds)
