"""Servers of this machine and the work that is given to them: one that hangs is told from one that
is slow.
"""

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tether.scale.servers import pool
from tether.scale.servers.fleet import Limits, State
from tether.scale.servers.launch import Servers
from tether.scale.servers.pool import ServerPool
from tether.settings.workers import ServersConfig

PROGRAM = """
import sys, time
from tether.scale.servers.http import JsonServer
def work(body):
    time.sleep(body["seconds"])
    return 200, {"port": int(sys.argv[2])}
JsonServer((sys.argv[1], int(sys.argv[2])), {}, {"/work": work}).serve_forever()
"""


@pytest.fixture
def together(tmp_path, monkeypatch):
    """Two servers that work for as long as they are told, looked after more often than
    elsewhere.
    """
    monkeypatch.setattr(pool, "CONNECT", 0.5)
    servers = Servers(
        lambda host, port: [sys.executable, "-c", PROGRAM, host, str(port)],
        ["a", "b"],
        tmp_path,
    )
    made = ServerPool(servers, ServersConfig(), tmp_path, lambda name, task: None, 4)
    made.fleet.limits = Limits(quiet=0.5, suspect_seconds=1.0)
    made.start(partial(made.want, "v0"))
    while len(made.fleet.at(State.HEALTHY)) < 2:
        time.sleep(0.01)
    yield made
    made.close()


def given(together, seconds):
    """A future of some work, and the server that has it."""
    senders, names = ThreadPoolExecutor(1), []

    def work(name):
        names.append(name)
        body = {"seconds": seconds if len(names) == 1 else 0}
        return json.loads(together.post(name, "/work", body))["port"]

    future = senders.submit(together.give, work)
    while not names:
        time.sleep(0.01)
    return future, names


def test_a_server_that_hangs_is_started_again_and_another_does_its_work(together):
    future, names = given(together, 2)
    time.sleep(0.2)
    stopped = together.servers.launcher.processes[names[0]]
    os.killpg(stopped.pid, signal.SIGSTOP)
    assert (
        future.result(30) == int(together.servers.addresses[names[1]].rpartition(":")[2])
        and names[0] != names[1]
    )
    assert any(
        change.server == names[0] and change.why.startswith("look: ")
        for change in together.fleet.changes
    )
    while len(together.fleet.at(State.HEALTHY)) < 2:
        time.sleep(0.01)
    assert stopped.poll() == -signal.SIGKILL


def test_a_server_that_is_slow_is_left_to_work(together):
    before = len(together.fleet.changes)
    future, names = given(together, 4)
    assert future.result(30) and len(names) == 1
    assert len(together.fleet.changes) == before
