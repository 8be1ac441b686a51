"""A step that takes far longer than those before it is written down and said once; nothing is
ended.
"""

import threading
import time

import pytest

from tether.core.watchdog import Watchdog, dump_stacks, place


def work(seconds):
    time.sleep(seconds)


@pytest.fixture
def said():
    return []


def test_a_step_that_hangs_is_written_down_and_said_once(tmp_path, said):
    watchdog = Watchdog(tmp_path / "run" / "stacks.txt", times=5, least=0.1, say=said.append)
    for seconds in (0.0, 0.0, 0.0, 0.3, 0.3, 0.0):
        with watchdog.step("step of PPO"):
            work(seconds)
    stacks = (tmp_path / "run" / "stacks.txt").read_text()
    assert stacks.count("== ") == 2 and "in work" in stacks
    assert len(said) == 1 and said[0].startswith(
        "a step of PPO has taken 0.1 s so far, in work (test_watchdog.py, line ",
    )
    assert "stacks.txt" in said[0]


def test_the_limit_follows_the_median_and_is_never_below_the_least(tmp_path, said):
    watchdog = Watchdog(None, times=10, least=2.0, say=said.append)
    assert watchdog.limit == 12.0  # nothing is known yet
    watchdog.durations.extend([1.0, 1.0])
    assert watchdog.limit == 12.0
    watchdog.durations.extend([100.0])
    assert watchdog.limit == 10.0
    watchdog.durations.extend([0.01] * 10)
    assert watchdog.limit == 2.0 and said == []


def test_the_limit_of_a_run_is_what_the_page_of_safety_says():
    watchdog = Watchdog(None)
    assert watchdog.limit == 1800
    watchdog.durations.extend([10, 12, 11])
    assert watchdog.limit == 300
    watchdog.durations.extend([60, 60, 60, 60])
    assert watchdog.limit == 600


def test_a_step_that_raises_ends_its_watch(tmp_path, said):
    before = threading.active_count()
    watchdog = Watchdog(tmp_path / "stacks.txt", least=0.02, say=said.append)
    with pytest.raises(KeyError), watchdog.step():
        raise KeyError
    time.sleep(0.25)
    assert (
        said == [] and not (tmp_path / "stacks.txt").exists() and threading.active_count() <= before
    )


def test_a_wall_clock_that_jumps_changes_nothing(tmp_path, said, monkeypatch):
    watchdog = Watchdog(tmp_path / "stacks.txt", least=0.2, say=said.append)
    for jump in (1e9, -1e9, 0.0, 1e9):
        monkeypatch.setattr(time, "time", lambda jump=jump: jump)
        with watchdog.step():
            # and while a step goes on
            monkeypatch.setattr(time, "time", lambda jump=jump: jump + 1e6)
    assert said == [] and 0 <= min(watchdog.durations) <= max(watchdog.durations) < 0.1


def test_the_watch_costs_little():
    watchdog = Watchdog(None)
    start = time.perf_counter()
    for _ in range(200):
        with watchdog.step():
            pass
    assert (time.perf_counter() - start) / 200 < 0.005


def test_places_of_threads(tmp_path):
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait, name="waits")
    thread.start()
    assert place(thread.ident).startswith("wait (threading.py, line ")
    # it is nowhere in that file
    assert place(thread.ident, __file__).startswith("wait (threading.py")
    gate.set()
    thread.join()
    assert "over" in place(thread.ident)
    dump_stacks(tmp_path / "a", "asked")
    assert "test_places_of_threads" in (tmp_path / "a").read_text()
