"""What stands on the screen while a command works."""

import io
import re
import time

import pytest
from rich.console import Console

from tether.cli.progress import bars
from tether.core.protocols import doing

pytestmark = pytest.mark.audit


class Screen(Console):
    """A console with a clock that is set by hand."""

    def __init__(self, terminal):
        self.now = 0.0
        super().__init__(file=io.StringIO(), width=100, force_terminal=terminal, get_time=lambda: self.now)

    @property
    def lines(self):
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.file.getvalue())
        return [" ".join(line.split()) for line in re.split(r"[\r\n]+", text) if line.strip()]


def test_a_phase_is_seen_before_its_first_step_has_ended():
    screen = Screen(terminal=True)

    def appears(words):
        end = time.monotonic() + 10  # a thread draws, ten times a second
        while not (seen := [line for line in screen.lines if re.fullmatch(words, line)]) and time.monotonic() < end:
            time.sleep(0.02)
        return bool(seen)

    with bars(screen) as announce:
        bar = announce("grpo")
        assert appears(r"grpo \S+ 0/\? 0:00:00 loading …")
        screen.now = 7.0
        doing(bar, "sampling for step 1")
        assert appears(r"grpo \S+ 0/\? 0:00:07 sampling for step 1 …")
        bar(1, 4, {"loss": 0.25})
        assert appears(r"grpo .* 1/4 0:00:07 --:-- loss 0.250")


def test_the_clock_starts_with_the_phase_and_not_with_its_first_step():
    screen = Screen(terminal=False)
    with bars(screen) as announce:
        announce("sft")  # finished earlier: nothing is done
        screen.now = 3.0
        bar = announce("grpo")
        for step in range(1, 5):
            screen.now = 3.0 + 45.0 * step
            bar(step, 4, {"loss": 0.5, "kl/policy_reference_k1": -0.04})
    *_, line = screen.lines
    assert line.startswith("grpo") and "4/4 0:03:00 " in line and "KL 0.0" in line


def test_a_log_gets_a_line_every_half_minute():
    screen = Screen(terminal=False)
    with bars(screen) as announce:
        announce("sft")
        bar = announce("grpo")
        for step in range(1, 9):
            screen.now = 10.0 * step
            doing(bar, f"sampling for step {step}")
            bar(step, 8, {"loss": 0.5})
    shown = [
        re.fullmatch(r"grpo \S+ (\d)/(\d|\?) 0:(\d\d:\d\d) (?:--:-- |\d\d:\d\d )?(.*)", line).groups() for line in screen.lines
    ]
    assert [(done, clock) for done, _, clock, _ in shown] == [("2", "00:30"), ("5", "01:00"), ("8", "01:20")]
    assert shown[0][3] == "sampling for step 3 …" and shown[-1][3] == "loss 0.500"


@pytest.mark.parametrize(("steps", "stands"), [(0, False), (3, True)])
def test_an_error_before_anything_was_done_leaves_no_bar(steps, stands):
    screen = Screen(terminal=True)

    def broken():
        with bars(screen) as announce:
            bar = announce("sft")
            if steps:
                bar(steps, 6, {})
            raise ValueError("settings differ")

    with pytest.raises(ValueError, match="settings differ"):
        broken()
    left = screen.file.getvalue().rsplit("\x1b[2K", 1)[-1]  # what stands there once the last drawing has been wiped
    assert ("sft" in left) == ("3/6" in left) == stands
