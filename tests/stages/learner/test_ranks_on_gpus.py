"""Ranks on several GPUs, as far as a machine without one shows it: on which GPU a thread works, and
which groups of processes wait for how long.
"""

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tether.stages.learner import ranks as module
from tether.stages.learner.ranks import COLLECTIVE, PASS, Ranks, joined


def test_collective_work_runs_on_the_gpu_of_this_rank(monkeypatch):
    """A new thread begins on the first GPU: copies of this rank would not be waited for."""
    places = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda gpu: places.append((gpu, threading.current_thread().name)),
    )
    ranks = Ranks()
    ranks.together(lambda: places.append("the work"))
    assert places == [(1, COLLECTIVE), "the work"]
    places.clear()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    ranks.together(lambda: places.append("the work"))
    assert places == ["the work"]


@pytest.mark.parametrize(("on_gpu", "shard"), [(True, True), (True, False), (False, True)])
def test_passes_through_cut_layers_have_a_group_that_gives_up(monkeypatch, on_gpu, shard):
    """Sums wait as long as signs of life come; a pass that nobody watches ends after `PASS`."""
    groups, meshes = [], []

    class Alone(Ranks):
        def together(self, collective):
            pass

    monkeypatch.setattr(
        dist,
        "new_group",
        lambda **how: groups.append(how) or ("group", len(groups)),
    )
    monkeypatch.setattr(
        module.DeviceMesh,
        "from_group",
        lambda *how: meshes.append(how),
        raising=False,
    )
    store = dist.HashStore()
    ranks = Alone(store)
    ranks.store = SimpleNamespace(clone=lambda: store)
    with joined(ranks, on_gpu, shard):
        pass
    sums = [{"backend": "nccl", "timeout": timedelta(days=30)}] if on_gpu else []
    passes = [{"backend": "nccl" if on_gpu else None, "timeout": PASS}] if shard else []
    assert groups == sums + passes
    assert meshes == [(("group", len(groups)), "cuda" if on_gpu else "cpu")] * shard
