"""Each heading of SECURITY.md and docs/trust/safety.md has the tests that show what stands below it
(promises.toml); what no other test shows is shown here.
"""

from __future__ import annotations

import re
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest
from benchmarks.sandbox import ENVIRONMENTS, LIMITS, PAGE, PROGRAMS, Row, write_page

from tether.core.errors import RewardError
from tether.core.types import Prompt, Rollout, Sampling, StopReason, user
from tether.rewards.code import guards
from tether.rewards.sandbox import Sandbox
from tether.rewards.verifiable import VerifiableReward
from tether.runner.assembly.judges import text_judge
from tether.settings.judges import FunctionJudge
from tether.settings.rewards import FunctionConfig, VerifiableConfig

TESTS = Path(__file__).resolve().parent
PROMISES = tomllib.loads((TESTS / "promises.toml").read_text(encoding="utf-8"))
SAFETY = (TESTS.parent / "docs/trust/safety.md").read_text(encoding="utf-8")


ADVICE = {"Safety", "Reporting"}
"""Headings over what promises nothing: an introduction, and how to report a fault."""


def headings(page: str) -> set[str]:
    """The headings of a page, without comments in its programs."""
    return set(re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page, flags=re.DOTALL), re.M))


@pytest.mark.parametrize("page", PROMISES)
def test_every_heading_of_a_page_names_its_tests(page):
    text = (TESTS.parent / page).read_text(encoding="utf-8")
    assert headings(text) - ADVICE == PROMISES[page].keys()


@pytest.mark.parametrize("page", PROMISES)
def test_every_test_that_shows_a_promise_is_there(page):
    for heading, tests in PROMISES[page].items():
        assert tests, heading
        for test in tests:
            file, _, name = test.partition("::")
            text = (TESTS / file).read_text(encoding="utf-8")
            assert re.search(rf"^def {name}\(", text, re.MULTILINE), f"{heading}: {test}"


def test_comments_of_programs_are_no_headings():
    assert headings("# Head\n\n```toml\n# seconds\n```\n\n## The `x` of *y*\n") == {
        "Head",
        "The `x` of *y*",
    }


# Promises that no other test shows


def answer_of(text: str) -> str:
    """The words for what a program gave."""
    prompt = Prompt((user("?"),), "p", {"answer": "assert f() == 'nothing'"})
    rollout = Rollout((1,), (2,), (0.0,), StopReason.STOP_TOKEN, text, 0, 0, Sampling(), prompt)
    config = VerifiableConfig(kind="code", time_limit=20, workers=1, memory_mb=512)
    with VerifiableReward(config) as reward:
        return reward.score([rollout])[0].reason


@pytest.mark.skipif(not guards().processes, reason="this kernel offers no seccomp")
def test_a_program_has_no_capability():
    program = (
        "import ctypes, struct\nlibc = ctypes.CDLL(None)\n"
        "def f():\n    sets = ctypes.create_string_buffer(b'x' * 24, 24)\n"
        "    assert libc.capget(struct.pack('Ii', 0x20080522, 0), sets) == 0\n"
        "    return sets.raw == bytes(24)\n"
    )
    assert "gave True" in answer_of(program)


def test_the_page_has_the_number_of_greedy_programs_and_environments():
    numbers = re.search(r"runs (\d+) programs that take all that they can get, in (\w+)", SAFETY)
    assert numbers is not None
    assert int(numbers[1]) == len(PROGRAMS) and numbers[2] == "six" and len(ENVIRONMENTS) == 6


def greedy_row(environment, **values):
    """A program's row: a MB, a file, a process of each, a second, unless it is said otherwise."""
    numbers = dict.fromkeys(LIMITS, 1) | {"memory": 1 << 20, "disk": 1 << 20, "survived": True}
    return asdict(Row("heap", environment, **{**numbers, **values}))


def test_largest_values_are_written_into_the_table_of_the_page(tmp_path):
    page = tmp_path / "safety.md"
    page.write_text(SAFETY, encoding="utf-8")
    rows = [
        greedy_row(name, memory=(place + 230) << 20, seconds=3.26, files=1024 + place)
        for place, name in enumerate(ENVIRONMENTS)
    ]
    rows.append(greedy_row("user", disk=65 << 20, seconds=4.44, beyond=["seconds"]))
    write_page(rows, page)
    before, after = SAFETY.splitlines(), page.read_text(encoding="utf-8").splitlines()
    changed = [new for old, new in zip(before, after, strict=True) if old != new]
    assert changed == [
        "| root | 230 MB | 1 MB | 1,024 | 1 | 1 | 1 | 3.3 |",
        "| user | 232 MB | 65 MB | 1,026 | 1 | 1 | 1 | 4.4 |",
        "| root, nothing can be mounted | 231 MB | 1 MB | 1,025 | 1 | 1 | 1 | 3.3 |",
        "| user, nothing can be mounted | 233 MB | 1 MB | 1,027 | 1 | 1 | 1 | 3.3 |",
        "| root, `memory_mb = 4096` in a group of 512 MB | 234 MB | 1 MB | 1,028 | 1 | 1 | 1 | 3.3 |",
        "| user, `memory_mb = 4096` in a group of 512 MB | 235 MB | 1 MB | 1,029 | 1 | 1 | 1 | 3.3 |",
    ]
    assert PAGE.read_text(encoding="utf-8") == SAFETY


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"beyond": ["memory", "seconds"]}, r"unchanged.*heap \(root\)"),
        ({"survived": False}, r"unchanged.*heap \(root\)"),
        ({"disk": 0}, r"unchanged: root: \['disk'\] were not measured"),
    ],
)
def test_a_sentence_that_does_not_hold_changes_no_page(tmp_path, fault, words):
    page = tmp_path / "safety.md"
    page.write_text(SAFETY, encoding="utf-8")
    with pytest.raises(SystemExit, match=words):
        write_page([greedy_row("root", **fault)], page)
    assert page.read_text(encoding="utf-8") == SAFETY


def test_a_check_has_no_threads_and_few_open_files():
    """What the workers of other verifiable kinds may do, by a check that tries it."""
    how = {"workers": 1, "seconds": 60.0, "memory_mb": 1024}
    with Sandbox("tests.trial:make_trial", **how) as sandbox:
        (reply,) = sandbox.run([{}])
    threads, files, memory = reply.result
    assert files < 64 and (not threads or not guards().processes), reply
    assert not memory or sys.platform == "darwin", reply


def test_functions_have_the_limits_that_the_page_says():
    for config in (FunctionConfig(call="a:b"), FunctionJudge(call="a:b")):
        assert (config.time_limit, config.dump_after) == (60, 30)


def test_stacks_of_a_judge_lie_in_the_run(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import time\ndef f(prompts, responses):\n    time.sleep(60)\n",
    )
    judge = text_judge(
        FunctionJudge(call=f"{tmp_path}/mine.py:f", time_limit=0.3),
        tmp_path / "run",
    )
    with pytest.raises(RewardError, match="gave no answer"):
        judge([Prompt((user("q"),))], ["a"])
    assert "mine.py" in (tmp_path / "run" / "stacks.txt").read_text()
