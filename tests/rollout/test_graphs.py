"""Which passes are recorded and replayed, on a pretended recorder: `tests/device/test_gpu.py` has the
real one.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tether.rollout import graphs
from tether.rollout.graphs import Graphs


class Recorder:
    """Stands in for `torch.cuda`. Passes append their name to `done` when they are executed, and
    are noted alone while they are recorded.
    """

    OutOfMemoryError = torch.OutOfMemoryError

    def __init__(self):
        self.done, self.recording, self.failing = [], None, None
        self.calls, self.free, self.reserved = [], 10, 0
        self.default_generators = [
            SimpleNamespace(
                clone_state=lambda: "a new state",
                graphsafe_set_state=self.calls.append,
            ),
        ]
        recorder = self

        class Graph:
            def capture_begin(self, pool, capture_error_mode):
                self.passes = recorder.recording = []

            def capture_end(self):
                recorder.recording = None
                if recorder.failing:
                    raise RuntimeError("the recording was broken")

            def replay(self):
                recorder.done += [f"{name} again" for name in self.passes]

        self.CUDAGraph = Graph

    def work(self, name):
        def run():
            if self.recording is not None and self.failing:
                raise self.failing
            (self.done if self.recording is None else self.recording).append(name)

        return run

    def graph_pool_handle(self):
        return (0, 1)

    def current_stream(self, device):
        return SimpleNamespace(wait_stream=lambda other: None)

    Stream = current_stream

    def stream(self, stream):
        return nullcontext()

    def mem_get_info(self, device):
        return self.free, 100

    def memory_reserved(self, device):
        return self.reserved

    def memory_allocated(self, device):
        return 0

    def empty_cache(self):
        self.calls.append("emptied")


@pytest.fixture
def recorder(monkeypatch):
    made = Recorder()
    native = SimpleNamespace(
        _cuda_endAllocateToPool=lambda *where: made.calls.append(("ended", *where)),
        _cuda_releasePool=lambda *where: made.calls.append(("released", *where)),
    )
    stand_in = SimpleNamespace(cuda=made, _C=native, OutOfMemoryError=torch.OutOfMemoryError)
    monkeypatch.setattr(graphs, "torch", stand_in)
    monkeypatch.setattr(graphs, "graphs_run_on", lambda device: True)
    monkeypatch.setattr(graphs, "_recording_stream", made.current_stream)
    monkeypatch.setattr(graphs, "once", lambda log, *words: made.calls.append(words[0]))
    return made


DEVICE = torch.device("cuda", 0)


def test_a_pass_is_executed_once_a_call_and_replayed_from_the_second_on(recorder):
    passes = Graphs(DEVICE)
    for _ in range(3):
        passes.run("a", recorder.work("a"))
    passes.run("b", recorder.work("b"))
    assert recorder.done == ["a", "a again", "a again", "b"]


def test_the_graph_that_was_used_longest_ago_goes_first(recorder, monkeypatch):
    monkeypatch.setattr(graphs, "GRAPHS_AT_ONCE", 2)
    passes = Graphs(DEVICE)
    for name in "aabbaccdd":
        passes.run(name, recorder.work(name))
        assert len(passes.graphs) <= 2
    # a was used after b, and c and d came last
    assert list(passes.graphs) == ["c", "d"]
    recorder.done.clear()
    passes.run("b", recorder.work("b"))
    assert recorder.done == ["b again"] and list(passes.graphs) == ["d", "b"]


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (RuntimeError("it waits"), graphs.UNRECORDED),
        (torch.OutOfMemoryError("full"), graphs.NO_ROOM),
    ],
)
def test_a_graph_that_cannot_be_recorded_is_executed_and_released(recorder, error, sentence):
    passes = Graphs(DEVICE)
    passes.run("a", recorder.work("a"))
    recorder.failing = error
    for _ in range(3):
        passes.run("a", recorder.work("a"))
    assert recorder.done == ["a"] * 4 and not passes.graphs and not passes.records
    ends = [("ended", 0, (0, 1)), ("released", 0, (0, 1)), "a new state"]
    assert recorder.calls == [sentence, *ends]


@pytest.mark.parametrize(("free", "emptied"), [(60, []), (40, ["emptied"])])
def test_memory_that_torch_keeps_is_given_back_where_the_card_has_less(recorder, free, emptied):
    """Once a call, before its first recording."""
    recorder.free, recorder.reserved = free, 50
    passes = Graphs(DEVICE)
    for name in "abab":
        passes.run(name, recorder.work(name))
    assert recorder.calls == emptied
