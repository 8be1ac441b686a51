"""What stands on the screen while a command works."""

import importlib.machinery
import importlib.util
import io
import itertools
import re
import sys
import time
import types

import pytest
from rich.console import Console
from rich.jupyter import JupyterRenderable

from tether.cli.terminal.bars import bars
from tether.core.protocols import doing

pytestmark = pytest.mark.audit


class Screen(Console):
    """A console with a clock that is set by hand."""

    def __init__(self, terminal):
        self.now = 0.0
        super().__init__(
            file=io.StringIO(),
            width=100,
            force_terminal=terminal,
            get_time=lambda: self.now,
        )

    @property
    def lines(self):
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.file.getvalue())
        return [" ".join(line.split()) for line in re.split(r"[\r\n]+", text) if line.strip()]


def test_the_lines_of_a_sweep_name_the_combination_and_on_step_the_stage():
    screen, seen = Screen(terminal=False), []
    with bars(screen, lambda *step: seen.append(step), {"direct": "dpo"}) as announce:
        announce("direct  direct.beta=[a], seed=1")(1, 1, {"loss": 0.5})
    assert screen.lines == ["dpo direct.beta=[a], seed=1 1/1 0:00:00 loss 0.500"]
    assert seen == [("direct", 1, {"loss": 0.5})]


def test_a_phase_is_seen_before_its_first_step_has_ended():
    screen = Screen(terminal=True)

    def appears(words):
        end = time.monotonic() + 10  # a thread draws, ten times a second
        while (
            not (seen := [line for line in screen.lines if re.fullmatch(words, line)])
            and time.monotonic() < end
        ):
            time.sleep(0.02)
        return bool(seen)

    with bars(screen) as announce:
        bar = announce("grpo")
        assert appears(r"grpo \S+ 0/\? 0:00:00 loading …")
        screen.now = 7.0
        doing(bar, "sampling for step 1")
        assert appears(r"grpo \S+ 0/\? 0:00:07 sampling for step 1 …")
        screen.now = 14.0
        bar(1, 4, {"loss": 0.25})
        # three steps of seven seconds
        assert appears(r"grpo .* 1/4 0:00:14 0:00:21 left loss 0.250")


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
    assert (
        line.startswith("grpo 4/4 0:03:00 ")
        and "KL 0.0" in line
        and not any("sft" in line for line in screen.lines)
    )


def test_a_log_gets_a_line_every_half_minute():
    screen = Screen(terminal=False)
    with bars(screen) as announce:
        announce("sft")
        bar = announce("grpo")
        for step in range(1, 9):
            screen.now = 10.0 * step
            doing(bar, f"sampling for step {step}")
            bar(step, 8, {"loss": 0.5})
    assert screen.lines == [
        "grpo 2/8 0:00:30 0:00:50 left sampling for step 3 … loss 0.500",
        "grpo 5/8 0:01:00 0:00:20 left sampling for step 6 … loss 0.500",
        "grpo 8/8 0:01:20 loss 0.500",
    ]


PARTS = (
    "loading",
    "measuring held-out answers",
    "sampling",
    "scoring 300 answers by gold",
    "learning",
    "saving",
)


def test_no_half_minute_is_silent_whatever_part_is_in_hand():
    """Ten minutes of a run in which each part takes a hundred seconds and calls nothing."""
    screen = Screen(terminal=False)
    with bars(screen) as announce:
        announce.price(
            ["grpo: a price"],
            {"grpo": 600.0, "sft": 60.0},
        )
        bar, told = announce("grpo"), []
        for number, part in enumerate(PARTS):
            doing(bar, part)
            for second in range(1, 101):
                screen.now, before = 100.0 * number + second, len(screen.lines)
                announce.tick()
                told += [screen.now] * (len(screen.lines) - before)
    assert [b - a for a, b in itertools.pairwise([0.0, *told])] == [25.0] * 24
    assert screen.lines[0] == "grpo: a price"
    assert screen.lines[1] == "grpo 0/? 0:00:25 0:09:35 left, all 0:10:35 loading …"
    assert screen.lines[12] == "grpo 0/? 0:05:00 0:05:00 left, all 0:06:00 sampling …"
    assert [part for part in PARTS if not any(part in line for line in screen.lines)] == []


def test_a_thread_breaks_the_silence(monkeypatch):
    monkeypatch.setattr("tether.cli.terminal.bars.LOOK_AFTER", 0.01)
    screen = Screen(terminal=False)
    with bars(screen) as announce:
        announce("reward")
        screen.now, end = 31.0, time.monotonic() + 10
        while not screen.lines and time.monotonic() < end:
            time.sleep(0.02)
    assert screen.lines == ["reward 0/? 0:00:31 loading …"]


def test_the_time_of_later_stages_is_what_was_expected():
    """Nine steps of five seconds are left, and the next stage."""
    screen = Screen(terminal=False)
    with bars(screen) as announce:
        announce.price([], {"sft": 100.0, "grpo": 100.0})
        bar = announce("sft")
        screen.now = 5.0
        bar(1, 10, {"time/step": 5.0})
        assert bar.left() == "0:00:45 left, all 0:02:25"


def test_controls_after_the_last_step_are_named_and_never_counted_as_no_time():
    """Controls run on after the last step: no line reads as an end."""
    screen = Screen(terminal=False)
    with bars(screen) as announce:
        announce.price([], {"grpo": 60.0})
        bar = announce("grpo")
        for step in range(1, 5):
            screen.now = 10.0 * step
            bar(step, 4, {"time/step": 10.0})
        for done in range(11):
            screen.now = 41.0 + done
            doing(bar, "measuring controls: answers at temperature 0.5", done, 10)
            assert "0:00:00" not in bar.line and bar.left() == ""
            assert f"answers at temperature 0.5, {done} of 10 …" in bar.line


class Notebook(Screen):
    """A console in a notebook."""

    def __init__(self):
        super().__init__(terminal=False)
        self.is_jupyter = True


@pytest.mark.parametrize("widgets", [True, False])
def test_a_notebook_has_a_bar_where_ipywidgets_is_there_and_lines_elsewhere(
    widgets,
    monkeypatch,
    recwarn,
):
    drawn = []

    class Output:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def clear_output(self, **_):
            drawn.append("wiped")

    display, shown = types.ModuleType("IPython.display"), types.ModuleType("ipywidgets")
    display.display, display.clear_output, shown.Output = drawn.append, lambda **_: None, Output
    shown.__spec__ = importlib.machinery.ModuleSpec("ipywidgets", None)
    for name, module in (
        ("IPython", types.ModuleType("IPython")),
        ("IPython.display", display),
        ("ipywidgets", shown),
    ):
        monkeypatch.setitem(sys.modules, name, module if widgets or name != "ipywidgets" else None)
    screen = Notebook()
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: shown.__spec__ if widgets else None,
    )
    with bars(screen) as announce:
        bar = announce("grpo")
        screen.now = 40.0
        bar(1, 4, {"loss": 0.5})
    assert any(isinstance(thing, Output) for thing in drawn) == widgets
    assert (
        any(
            "grpo  1/4  0:00:40" in thing.text
            for thing in drawn
            if isinstance(thing, JupyterRenderable)
        )
        != widgets
    )
    assert not recwarn.list  # rich would ask for ipywidgets


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
    # what stands there once the last drawing has been wiped
    left = screen.file.getvalue().rsplit("\x1b[2K", 1)[-1]
    assert ("sft" in left) == ("3/6" in left) == stands


@pytest.mark.parametrize(
    ("waits", "policy", "share", "spins"),
    [
        ([0.0] * 4 + [6.0] * 8, "", "38%", True),
        ([6.0] * 12, "PASSIVE", "38%", False),
        ([0.0, 0.0, 9.0] * 4, "", "", False),
        ([2.0] * 12, "", "", False),
        ([6.0] * 12, "idle", "", False),
    ],
    ids=["from the fifth step on", "threads sleep", "one step in three", "seldom", "idle"],
)
def test_one_line_says_that_others_slow_the_steps(waits, policy, share, spins, monkeypatch):
    """A step works for ten seconds, and its threads wait for a core for some more."""
    screen = Screen(terminal=False)
    worked = itertools.accumulate(itertools.repeat(10.0))
    waited = itertools.accumulate([0.0, *waits[:9], 0.0, *waits[9:]])
    monkeypatch.setattr("tether.cli.terminal.bars.time.process_time", lambda: next(worked))
    monkeypatch.setattr("tether.core.threads.waited", lambda: next(waited))
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with bars(screen) as announce:
        bar = announce("ppo")
        for number in range(9):
            screen.now += 100.0 if policy == "idle" else 10.0
            bar(number + 1, 9, {})
        bar = announce("evaluate")
        for number in range(3):
            screen.now += 100.0 if policy == "idle" else 10.0
            bar(number + 1, 3, {})
    lines = [line for line in screen.lines if "other processes" in line]
    assert len(lines) == bool(share)
    assert all(f"ppo: threads wait for a core {share} of the time" in line for line in lines)
    assert any("start it again" in line for line in lines) == spins
