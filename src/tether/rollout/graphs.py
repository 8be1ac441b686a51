"""Passes of one shape recorded as a CUDA graph and replayed. A decoding step launches thousands of
small kernels, which take a GPU less time than Python needs to launch them.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import cache

import torch

from tether.core.once import once

ROWS = 16
"""Rows by which passes shrink: every new shape costs a CPU's matrix kernels a set-up."""
WIDTH = 64
"""Places of the cache by which passes grow: every width is a graph of its own."""
GRAPHS_AT_ONCE = 32
"""Graphs at once. Each takes some megabytes of the card, and widths that rows have grown beyond do
not come back.
"""
UNRECORDED = "decoding without CUDA graphs, which this model cannot have (%s): every step is slower"
NO_ROOM = (
    "decoding without CUDA graphs, for which the card lacks memory (%s): every step is slower. "
    "Lower engine_rows, or the tokens of a micro-batch"
)
_LOG = logging.getLogger(__name__)


def graphs_run_on(device: torch.device) -> bool:
    """True if this PyTorch can record graphs of a device; `TETHER_GRAPHS=0` turns them off."""
    built = torch.version.cuda is not None and torch.cuda.is_available()
    return device.type == "cuda" and built and os.environ.get("TETHER_GRAPHS") != "0"


class Graphs:
    """Runs passes, and replays those of a shape that has been run before.

    A pass reads and writes tensors that live as long as this object; its results are in them. The
    first pass of a shape is run as it is, the second is recorded. Where something in a model cannot
    be recorded (it waits for the host, or copies from it), all passes are run as they are.

    Args:
        device: a GPU; elsewhere every pass is run as it is.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.records = graphs_run_on(device)
        self.pool = torch.cuda.graph_pool_handle() if self.records else None
        self.seen: set[Hashable] = set()
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def width(self, places: int, most: int) -> int:
        """As many places as a pass over `places` of `most` reads."""
        return min(most, -(-places // WIDTH) * WIDTH) if self.records else places

    def rows(self, count: int) -> int:
        """Number of rows of a pass for `count` of them. With graphs these are powers of two and the
        halves between them, so that each is replayed often.
        """
        if not self.records:
            return -(-count // ROWS) * ROWS
        whole = 1 << (count - 1).bit_length()
        return max(ROWS, whole * 3 // 4 if count <= whole * 3 // 4 else whole)

    def run(self, shape: Hashable, work: Callable[[], None]) -> None:
        """Run `work`, or replay what it did to tensors of this `shape`."""
        graphs = self.graphs
        if self.records and shape in self.seen and shape not in graphs:
            self._record(shape, work)
        self.seen.add(shape)
        if shape in graphs:
            # the last one used stands last
            graphs[shape] = graphs.pop(shape)
            graphs[shape].replay()
        else:
            work()

    def _record(self, shape: Hashable, work: Callable[[], None]) -> None:
        device = self.device
        graphs = self.graphs
        if not graphs:
            _make_room(device)
        graph = torch.cuda.CUDAGraph()
        stream = _recording_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            why = NO_ROOM if _is_lack_of_memory(error) else UNRECORDED
            once(_LOG.warning, why, str(error).partition("\n")[0])
            self.records = False
            _abandon(device, self.pool)
        else:
            graphs[shape] = graph
            if len(graphs) > GRAPHS_AT_ONCE:
                del graphs[next(iter(graphs))]
        torch.cuda.current_stream(device).wait_stream(stream)


def _make_room(device: torch.device) -> None:
    """Give free memory back to the card where torch keeps more of it than the card has.

    A recording takes new memory from the card: what torch keeps for later is out of its reach, and
    cannot be given back meanwhile.
    """
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if torch.cuda.mem_get_info(device)[0] < idle:
        torch.cuda.empty_cache()


def _is_lack_of_memory(error: BaseException | None) -> bool:
    """True of an error, or of one that it came after: a recording that lacked memory ends with an
    error of its own.
    """
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__context__
    return error is not None


def _abandon(device: torch.device, pool: tuple[int, int] | None) -> None:
    """Repair the state after a failed recording.

    Older versions of PyTorch then still treat the allocator and the device's random generator as
    recording. The next `empty_cache`, or the next random number, fails with an assertion. Newer
    ones refuse to end twice.
    """
    assert pool is not None
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index or 0, pool)
        torch._C._cuda_releasePool(device.index or 0, pool)
    generator = torch.cuda.default_generators[device.index or 0]
    generator.graphsafe_set_state(generator.clone_state())


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all recordings: products have 32 MB of scratch space on each stream, for as
    long as the process lives.
    """
    return torch.cuda.Stream(device)
