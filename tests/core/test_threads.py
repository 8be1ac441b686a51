"""Threads of OpenMP: as many as a control group and the fast cores allow."""

import os

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
