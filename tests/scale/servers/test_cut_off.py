"""A machine whose cable is pulled is noticed soon, whatever was under way with it."""

import os
import shutil
import subprocess
import sys

import pytest

SERVER = """
import time
from tether.scale.servers.http import JsonServer
def slow(body):
    time.sleep(body["seconds"])
    return 200, {}
JsonServer(("10.78.0.2", 8000), {}, {"/slow": slow}).serve_forever()
"""
CLIENT = """
import pathlib, sys, time
from types import SimpleNamespace
from tether.scale.servers import pool
pool.CUT_OFF.update(TCP_KEEPIDLE=1, TCP_KEEPINTVL=1, TCP_KEEPCNT=2, TCP_USER_TIMEOUT=3000)
launcher = SimpleNamespace(ended=lambda name: None, close=lambda: None)
servers = SimpleNamespace(token="t", names=["a"], addresses={"a": "http://10.78.0.2:8000"}, launcher=launcher)
together = pool.ServerPool(servers, pool.ServersConfig(), pathlib.Path("."), None, 4)
for _ in range(600):
    try:
        together.get("a", "/health")
        break
    except pool.EXCHANGES:
        time.sleep(0.1)
together.post("a", "/slow", {"seconds": 0})
print("cut", flush=True)
if sys.argv[1] == "request":
    input()  # the connection of the last request is still open, and is used for the next one
start = time.monotonic()
try:
    together.post("a", "/slow", {"seconds": 60 if sys.argv[1] == "answer" else 0})
except pool.EXCHANGES:
    print(time.monotonic() - start)
"""
ADDRESSES = {"here": "10.78.0.1", "there": "10.78.0.2"}


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, check=False).returncode


@pytest.fixture
def hosts():
    """Two networks with a cable between them: what starts a program in one, and what pulls the
    cable.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    names = {where: f"tether-{where}-{os.getpid()}" for where in ADDRESSES}
    if any(ip("netns", "add", name) for name in names.values()):
        pytest.skip("no network namespace can be made here")
    programs = []

    def start(where, text, *words):
        command = ["ip", "netns", "exec", names[where], sys.executable, "-c", text, *words]
        programs.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True),
        )
        return programs[-1]

    try:
        assert not ip(
            "link",
            "add",
            "cable",
            "netns",
            names["here"],
            "type",
            "veth",
            "peer",
            "name",
            "cable",
            "netns",
            names["there"],
        )
        for where, address in ADDRESSES.items():
            assert not ip("-n", names[where], "addr", "add", f"{address}/24", "dev", "cable")
            assert not ip("-n", names[where], "link", "set", "cable", "up")
        yield start, lambda: ip("-n", names["there"], "link", "set", "cable", "down")
    finally:
        for program in programs:
            program.kill(), program.communicate()
        for name in names.values():
            ip("netns", "del", name)


@pytest.mark.parametrize("under_way", ["answer", "request"])
def test_a_cut_is_noticed_while_an_answer_is_waited_for_and_while_a_request_is_sent(
    hosts,
    under_way,
):
    start, pull = hosts
    start("there", SERVER)
    client = start("here", CLIENT, under_way)
    assert client.stdout.readline() == "cut\n"
    pull()
    assert float(client.communicate("\n", timeout=60)[0]) < 10
