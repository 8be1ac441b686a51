"""Runs of every faulty function of `faulty.py`: each ends with its numbers, or with one sentence
and a way to go on.
"""

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pytest
from tests.rewards.faulty import CASES, PLACES, USED

LIMIT = 300.0
"""Seconds for a case, a run and the run that goes on."""


def outcomes(folder: Path, cases: Sequence[str]) -> Iterator[dict[str, Any]]:
    """An outcome for each case, all in one process; one that hangs or ends too early costs its
    case, and another goes on.
    """
    left = list(cases)
    while left:
        command = [sys.executable, "-m", "tests.rewards.faulty", str(folder), *left]
        with (
            (folder / "errors.txt").open("ab") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as child,
        ):
            lines: queue.Queue[bytes] = queue.Queue()
            assert child.stdout is not None
            threading.Thread(target=_pass_on, args=(child.stdout, lines), daemon=True).start()
            while left:
                try:
                    line = lines.get(timeout=LIMIT)
                except queue.Empty:
                    yield {"case": left.pop(0), "ends": "hangs"}
                    break
                if not line:
                    yield {"case": left.pop(0), "ends": f"died with code {child.wait()}"}
                    break
                if line.startswith(b'{"case"'):
                    left.pop(0)
                    yield json.loads(line)
            child.kill()


def _pass_on(stream: IO[bytes], lines: queue.Queue[bytes]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(b"")


def ends(outcome: dict[str, Any], good: dict[str, Any]) -> str:
    """The way in which a case ended, in words."""
    text, name = outcome.get("text", ""), "mine.py"
    if "ends" in outcome:
        return outcome["ends"]
    if outcome["code"] == -1 or "Traceback" in text:
        return f"has a traceback: {text}"
    if outcome["numbers"] is not None:
        same = outcome["numbers"] == good[outcome["case"].partition(": ")[0]]
        return "has its numbers" if same and outcome["code"] == 0 else "has other numbers"
    if outcome["code"] == 0:
        return "ends with code 0 and no result"
    sentence = text.strip().splitlines()[-1]
    if name not in sentence or not sentence.startswith("tether: "):
        return f"does not name the function: {text}"
    return (
        "is refused by name"
        if outcome["again"] == 0
        else (f"is refused, and does not go on: {outcome}")
    )


@pytest.mark.slow
@pytest.mark.timeout(len(CASES) * LIMIT)
def test_every_fault_at_every_place_ends_well(tmp_path: Path) -> None:
    good = {
        outcome["case"].partition(": ")[0]: outcome["numbers"]
        for outcome in outcomes(tmp_path, [f"{p}: " for p in PLACES])
    }
    assert all(good[place] for place in PLACES)
    expected = {
        case: "has its numbers" if case.partition(": ")[2] in USED else "is refused by name"
        for case in CASES
    }
    assert {
        outcome["case"]: ends(outcome, good) for outcome in outcomes(tmp_path, CASES)
    } == expected


@pytest.mark.slow
def test_a_process_that_ends_too_early_costs_its_case_alone(tmp_path: Path) -> None:
    """Broken on purpose: the first case is none."""
    first, second = outcomes(tmp_path, ["nowhere: ", "reward: returns a dict"])
    assert first["ends"].startswith("died with code") and ends(second, {}) == "is refused by name"
