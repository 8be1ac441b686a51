"""Programs of one machine: which GPUs each of them sees, and what is known of one that cannot be
started.
"""

import time

import pytest

from tether.core.errors import ConfigError
from tether.runner.assembly.launching import Placement
from tether.scale.servers.launch import Processes, Servers

SAYS = ["sh", "-c", "echo gpus:$CUDA_VISIBLE_DEVICES"]


def seen(launcher, name, folder):
    launcher.start(name, SAYS, {}, folder / name)
    while launcher.ended(name) is None:
        time.sleep(0.01)
    return (folder / name).read_text().split()[-1]


def test_each_program_has_gpus_of_its_own_and_gives_them_back(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5,6,7")
    engines = Processes({"a": 2, "b": 1, "none": 0}, ["4", "5", "6", "7"])
    assert [seen(engines, name, tmp_path) for name in ("a", "b", "none")] == [
        "gpus:4,5",
        "gpus:6",
        "gpus:3,4,5,6,7",
    ]
    with pytest.raises(ConfigError, match="2 servers need 2 GPUs, and 1 of this machine are left"):
        Processes({"c": 1, "d": 1}, ["4", "5", "6", "7"])
    rewards = Processes({"c": 1}, ["4", "5", "6", "7"])
    assert seen(rewards, "c", tmp_path) == "gpus:7"
    engines.close(), rewards.close()
    again = Processes({"e": 4}, ["4", "5", "6", "7"])
    assert seen(again, "e", tmp_path) == "gpus:4,5,6,7"
    again.close()


def test_without_a_spare_gpu_programs_see_what_this_process_sees(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    spare = Placement("local", "cuda").spare_gpus()
    assert spare == []
    launcher = Processes({"a": 1, "b": 1}, spare)
    assert [seen(launcher, name, tmp_path) for name in "ab"] == ["gpus:3", "gpus:3"]
    launcher.close()


@pytest.mark.parametrize(
    ("visible", "ranks", "device", "spare"),
    [
        ("2,3,5", "1", "cuda", ["3", "5"]),
        ("2,3,5", "1", "cuda:1", ["2", "5"]),
        ("2,3,5", "1", "cpu", ["2", "3", "5"]),
        ("0,1,2,3", "2", "cuda", ["2", "3"]),
        ("", "1", "cuda", []),
    ],
)
def test_servers_have_the_gpus_that_the_learner_has_not(monkeypatch, visible, ranks, device, spare):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert Placement("local", device).spare_gpus() == spare


def test_a_server_that_cannot_be_started_again_has_no_address_meanwhile(tmp_path):
    """The fleet asks one that has an address whether it works, and starts one that has none."""
    servers = Servers(lambda host, port: ["sleep", "60"], ["a"], tmp_path)
    servers.start("a")
    assert servers.addresses["a"].startswith("http://127.0.0.1:")

    def lost(name):
        raise OSError("no machine yet")

    servers.launcher.place = lost
    with pytest.raises(OSError, match="no machine yet"):
        servers.start("a")
    assert "a" not in servers.addresses
    servers.launcher.close()
