"""Signals while a step is in hand: the first waits for its end, the second does not."""

import gc
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tether.core.stopping import Interrupted, Stopping, begin_program


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_is_noted_and_the_second_stops(number, code, caplog, tmp_path):
    (tmp_path / "command.json").write_text("{}")
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    done = []

    def train(place):
        with Stopping() as stopping:
            for step in range(3):
                os.kill(os.getpid(), number)
                done.append(step)
                if stopping.asked:
                    stopping.leave(step + 1, 3, place)

    def two_at_once():
        with Stopping():
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)

    with pytest.raises(
        Interrupted,
        match=(
            r"stopped after step 1 of 3 of ppo, which is saved. .*tether resume "
            rf"{tmp_path}$"
        ),
    ) as stopped:
        train(tmp_path / "ppo")
    assert done == [0] and stopped.value.exit_code == code and "second signal stops" in caplog.text
    with pytest.raises(Interrupted, match=r"elsewhere\. Start the same"):
        train(Path("elsewhere"))
    with pytest.raises(Interrupted, match="at once") as stopped:
        two_at_once()
    assert stopped.value.exit_code == code
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_another_thread_is_left_alone():
    found = []

    def work():
        with Stopping() as stopping:
            found.append(stopping.asked)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [None]


def test_sigterm_ends_a_program_as_ctrl_c_does():
    before = signal.getsignal(signal.SIGTERM)
    try:
        begin_program()
        with pytest.raises(Interrupted, match="terminated"):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
        Stopping.came = None


def test_a_program_seeks_garbage_seldom():
    """A million new objects that stay are no reason to look through all that there are, again and
    again.
    """
    thresholds, before = gc.get_threshold(), signal.getsignal(signal.SIGTERM)
    passes = lambda: sum(generation["collections"] for generation in gc.get_stats())  # noqa: E731
    try:
        gc.set_threshold(700, 10, 10)  # as Python begins
        begin_program()
        earlier = passes()
        stays = [[] for _ in range(1_000_000)]
        assert passes() - earlier < 200 and stays  # 1,400 and more as Python begins
    finally:
        gc.set_threshold(*thresholds)
        signal.signal(signal.SIGTERM, before)


def test_sigterm_that_was_lost_in_a_finalizer_ends_the_program_before_it_trains():
    class Late:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    try:
        begin_program()
        late = Late()
        del late  # python prints what is raised here, and goes on
        with pytest.raises(Interrupted, match="terminated") as stopped, Stopping():
            pass
        assert stopped.value.exit_code == 143
        with pytest.raises(Interrupted, match="terminated"):  # it is sent again where nobody looks
            time.sleep(5)
        begin_program()
        with Stopping() as stopping:
            assert stopping.asked is None
    finally:
        signal.signal(signal.SIGTERM, before)
        Stopping.came = None
