"""The heap for tensors: what lies in it stays what it is, and it reaches hardly further than what
is in use at once.
"""

import os
import subprocess
import sys
import textwrap

import pytest

from tether.models.cpu.memory import own_heap

pytestmark = pytest.mark.skipif(own_heap() is None, reason="needs Linux and a C++ compiler")
START = """
import ctypes, gc, os, random, threading, torch
from tether.models.cpu.memory import free_memory, own_heap

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")

def occupied():
    # Bytes of tensors in the heap, and how far it has ever reached.
    used, reached = ctypes.c_size_t(), ctypes.c_size_t()
    own_heap().occupied(ctypes.byref(used), ctypes.byref(reached))
    return used.value, reached.value

assert own_heap() is not None
"""


def alone(script: str) -> str:
    """What a script prints, in a process whose heap nobody else uses."""
    command = [sys.executable, "-c", START + textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_blocks_never_overlap_and_are_counted_exactly() -> None:
    """Every block holds its own number in every place until it is freed, whatever is taken and
    freed beside it.
    """
    said = alone("""
        draw, live, number = random.Random(0), {}, 0
        for _ in range(4000):
            if live and draw.random() < 0.5:
                freed = draw.choice(list(live))
                assert bool((live.pop(freed) == freed).all())
            else:
                number += 1
                live[number] = torch.full((draw.choice((1, 5000, 70_000, draw.randrange(300_000))),), number, dtype=torch.int32)
                assert live[number].data_ptr() % 64 == 0
        assert all(bool((block == name).all()) for name, block in live.items())
        large = [block.untyped_storage().nbytes() for block in live.values()]
        print(sum(-(-size // 64) * 64 for size in large if size >= 1 << 14), occupied()[0])
        live.clear(); gc.collect()
        print(occupied()[0])
    """)
    (expected, used), (nothing,) = (map(int, line.split()) for line in said.splitlines())
    assert used == expected > 1e6 and nothing == 0


@pytest.mark.slow
def test_passes_that_keep_small_things_between_large_ones_do_not_spread() -> None:
    """glibc before 2.38 puts small objects into what is left between aligned blocks: the same takes
    it over twice the memory.
    """
    said = alone("""
        def run(rows):
            kept, small = [], []
            for _ in range(200):
                temporary = [torch.empty(rows, 576), torch.empty(rows, 1536)]
                kept.append(temporary[0] * 2)
                small.append(torch.empty(20))
                del temporary
            while kept:
                kept.pop(), torch.empty(rows, 576), torch.empty(rows, 1536)

        most = 0
        for rows in (700, 990, 850, 990, 300, 991):
            run(rows)
            most = max(most, 4 * rows * (200 * 576 + 2 * (576 + 1536)))
        print(most, occupied()[1])
    """)
    most, reached = map(int, said.split())
    assert reached < 1.1 * most


def test_freed_pages_go_back_between_stages() -> None:
    before, with_tensors, after = map(
        int,
        alone("""
        before = resident()
        kept = [torch.ones(1_000_000) for _ in range(50)]
        there = resident()
        del kept[::2]
        free_memory()
        assert all(bool((block == 1).all()) for block in kept)
        print(before, there, resident())
    """).split(),
    )
    assert with_tensors - before > 190e6 and after < with_tensors - 90e6


@pytest.mark.slow
def test_threads_and_children_use_it_too() -> None:
    said = alone("""
        def work(name):
            draw = random.Random(name)
            for _ in range(300):
                blocks = [torch.full((draw.randrange(4096, 90_000),), name) for _ in range(5)]
                assert all(bool((block == name).all()) for block in blocks)
            done.append(name)

        done = []
        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        [thread.start() for thread in threads]
        for _ in range(5):  # while others hold the lock
            if (child := os.fork()) == 0:
                torch.set_num_threads(1)
                os._exit(int(torch.full((100_000,), 3).sum()) != 300_000)
            assert os.waitpid(child, 0)[1] == 0
        [thread.join() for thread in threads]
        print(sorted(done))
    """)
    assert said.strip() == "[0, 1, 2, 3]"


@pytest.mark.slow
def test_the_profiler_sees_it() -> None:
    said = alone("""
        from torch.profiler import ProfilerActivity, profile
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            kept = torch.ones(1_000_000)
            lost = torch.ones(500_000)
            del lost
        print([event.cpu_memory_usage for event in recorded.events() if event.name in ("aten::ones", "[memory]")])
    """)
    assert sorted(map(int, said.strip("[]\n").split(","))) == [-2_000_000, 2_000_000, 4_000_000]


@pytest.mark.slow
def test_a_heap_chosen_by_the_user_is_left_alone() -> None:
    for variable in ("MALLOC_ARENA_MAX", "TETHER_KERNELS"):
        script = "from tether.models.cpu.memory import free_memory, own_heap; print(own_heap()); free_memory()"
        environment = {**os.environ, variable: "0" if variable == "TETHER_KERNELS" else "1"}
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
        assert done.stdout.strip() == "None"
