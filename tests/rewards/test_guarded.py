"""The guard around users' functions: faults of every kind, and a process whose state is the run's
again after each call.
"""

import asyncio
import decimal
import itertools
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.rewards.test_function import ASKED

import tether
from tether.api.rows import rows_in
from tether.core.errors import ConfigError, RewardError, RunError, one_line
from tether.core.protocols import Turn
from tether.core.stopping import Interrupted
from tether.core.types import Message, Prompt, Score, user
from tether.rewards import loading, surroundings
from tether.rewards.calling import in_place, source_of
from tether.rewards.environments import EnvironmentThreads
from tether.rewards.function import FunctionReward
from tether.rewards.loading import load_function, register
from tether.runner.assembly.judges import text_judge
from tether.settings.judges import FunctionJudge

QUESTION = Prompt((user("q"),))


class CrackedError(Exception):
    def __str__(self) -> str:
        raise SystemExit

    __repr__ = __str__


class OddError(BaseException):
    pass


class Number:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __float__(self) -> float:
        raise self.error

    def __repr__(self) -> str:
        raise self.error


class Items(list[float]):
    def __iter__(self) -> Iterator[float]:
        raise OSError("no items")

    def __len__(self) -> int:
        raise OSError("no length")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No state of the functions of other tests."""
    monkeypatch.setattr(surroundings, "_LEFT", [])


def scored(function: Any, count: int = 3, **how: Any) -> list[Score]:
    return FunctionReward(function, **{"time_limit": 20.0, **how}).score(ASKED[:count])


def raising(error: BaseException) -> Any:
    def f(prompts: Any, responses: Any) -> list[float]:
        raise error

    return f


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("no"), "raised ValueError: no"),
        (SystemExit(), "raised SystemExit"),
        (SystemExit(0), "raised SystemExit: 0"),
        (OddError("no"), "raised OddError: no"),
        (GeneratorExit(), "raised GeneratorExit"),
        (StopIteration(), "raised StopIteration"),
        (MemoryError(), "raised MemoryError"),
        (CrackedError(), "raised CrackedError"),
        (
            ExceptionGroup("several", [ValueError("a"), CrackedError()]),
            "raised ExceptionGroup: several (2 sub-exceptions)",
        ),
        (ValueError("long " * 1000), "raised ValueError: long long"),
        (RuntimeError("token=hf_abcdefghijkl"), "raised RuntimeError: token=***"),
    ],
)
def test_any_error_is_a_failed_score_with_the_names_of_function_and_file(
    error: BaseException,
    words: str,
) -> None:
    reasons = {score.reason for score in scored(raising(error))}
    (reason,) = reasons
    assert (
        reason.startswith(f"the reward function raising.f (test_guarded.py) {words}")
        and len(reason) < 400
    )


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), Interrupted("stopped")])
def test_exceptions_that_stop_a_run_pass_through(stop: BaseException) -> None:
    with pytest.raises(type(stop)):
        scored(raising(stop))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (10**400, "returned a number beyond 1e+15: scale the scores"),
        (1e308, "returned 1e+308, beyond 1e+15: scale the scores"),
        (-2e15, "returned -2e+15, beyond 1e+15"),
        (math.nan, "returned nan"),
        (np.float32(math.inf), "returned inf"),
        (
            Number(KeyError("x")),
            "returned a Number that cannot be read: it raised KeyError: the key 'x' is missing",
        ),
        (Number(CrackedError()), "returned a Number that cannot be read: it raised CrackedError"),
        (1 + 2j, "returned a complex, not a number"),
        ("0.5", "returned a str, not a number"),
        ([0.5], "returned a list, not a number"),
        (torch.ones(2), "returned a Tensor, not a number"),
        (torch.ones((), device="meta"), "returned a Tensor, not a number"),
        (Score(1.0, parts={"a": "x"}), "returned a str, not a number"),  # type: ignore[dict-item]
        (
            Score(1.0, parts={"score": 1.0}),
            "returned a Score whose part is named 'score', as a column of the run is",
        ),
        (Score(1.0, parts=[1.0]), "returned a Score that cannot be read: it raised AttributeError"),  # type: ignore[arg-type]
        (
            Score(1.0, steps=((10**9, 1.0),)),
            "returned a step that ends at token 1000000000 of a response of 1",
        ),
        (
            Score(1.0, steps=((-1, 1.0),)),
            "returned a step that ends at token -1 of a response of 1",
        ),
        (Score(1.0, steps="ab"), "returned a Score that cannot be read: it raised ValueError"),  # type: ignore[arg-type]
        (Score(None, reason=""), "gave no score"),
        (Score(None, reason="no idea"), "no idea"),
    ],
)
def test_a_value_that_is_no_usable_number_fails_its_answer_alone(value: Any, words: str) -> None:
    first, *others = scored(lambda prompts, responses: [value, 1.0, True])
    assert first.value is None and words in first.reason
    assert [score.value for score in others] == [1.0, 1.0]


def test_a_value_that_ends_the_program_fails_the_call() -> None:
    reasons = {
        score.reason
        for score in scored(lambda prompts, responses: [Number(SystemExit(0)), 1.0, 1.0])
    }
    assert len(reasons) == 1 and reasons.pop().endswith(
        "raised SystemExit: 0 while its list was read",
    )


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_and_arrays_of_one_dimension_are_used(dtype: torch.dtype) -> None:
    column = torch.tensor([3, 1, 2], dtype=dtype)
    forms: list[Any] = [column, list(column), column[:, None][:, 0], column.flip(0).flip(0)]
    forms += [column.double().clone().requires_grad_()] + (
        [] if dtype == torch.bfloat16 else [column.numpy(), column.numpy().astype(object)]
    )
    for form in forms:
        assert [score.value for score in scored(lambda prompts, responses, form=form: form)] == [
            3.0,
            1.0,
            2.0,
        ]


@pytest.mark.parametrize(
    "numbers",
    [
        [True, False, True],
        [np.bool_(True), np.int8(0), np.longdouble(1)],
        [Fraction(1), decimal.Decimal(0), 1],
        torch.tensor([True, False, True]),
        np.array([True, False, True]),
        np.ma.array([1, 0, 1]),
    ],
)
def test_booleans_and_all_kinds_of_numbers_count(numbers: Any) -> None:
    assert [score.value for score in scored(lambda prompts, responses: numbers)] == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (torch.ones(3, 1), "returned a list, not a number"),
        (np.ones((1, 3)), "returned 1 scores for 3 responses"),
        (torch.tensor(1.0), "returned a float, not a list of numbers"),
        (
            torch.ones(3, device="meta"),
            "raised NotImplementedError: Cannot copy out of meta tensor",
        ),
        (torch.ones(3, dtype=torch.complex64), "returned a complex, not a number"),
        (np.array(["a", "b", "c"]), "returned a str, not a number"),
        (np.ma.array([1.0, 2.0, 3.0], mask=True), "gave no score"),
        (None, "returned nothing (None), not a list of numbers"),
        ({"a": 1.0}, "returned a dict, not a list of numbers"),
        ("123", "returned a str, not a list of numbers"),
        (b"123", "returned a bytes, not a list of numbers"),
        ([], "returned 0 scores for 3 responses"),
        ([1.0] * 4, "returned more than 3 scores for 3 responses"),
        (itertools.repeat(1.0), "returned more than 3 scores for 3 responses"),
        ([[1.0, 2.0, 3.0]], "returned 1 scores for 3 responses"),
        (Items([1.0, 2.0, 3.0]), "raised OSError: no items while its Items was read"),
        (sum, "returned a builtin_function_or_method, not a list of numbers"),
    ],
)
def test_a_result_that_is_no_list_of_as_many_numbers_fails_the_call(
    returned: Any,
    words: str,
) -> None:
    scores = scored(lambda prompts, responses: returned)
    assert [score.value for score in scores] == [None] * 3 and words in scores[0].reason


def test_generators_and_coroutines_are_used_and_may_fail_while_they_are_read() -> None:
    def yields(prompts: Any, responses: Any) -> Any:
        yield from (float(len(r)) for r in responses)

    async def waits(prompts: Any, responses: Any) -> Any:
        await asyncio.sleep(0)
        return [float(len(r)) for r in responses]

    async def yields_later(prompts: Any, responses: Any) -> Any:
        for r in responses:
            yield float(len(r))

    class Waits:
        async def __call__(self, prompts: Any, responses: Any) -> Any:
            return await waits(prompts, responses)

    def stops(prompts: Any, responses: Any) -> Any:
        yield 1.0
        raise ValueError("no more")

    def sleeps(prompts: Any, responses: Any) -> Any:
        yield time.sleep(60)

    for function in (yields, waits, yields_later, Waits()):
        assert [score.value for score in scored(function)] == [8.0] * 3
    assert "raised ValueError: no more while its generator was read" in scored(stops)[0].reason
    assert "gave no answer within 0.3 s, it was in" in scored(sleeps, time_limit=0.3)[0].reason


def drawn_by_numpy() -> int:
    state: Any = np.random.get_state()
    return state[2]


CHANGES: dict[str, tuple[Any, Any]] = {
    "default dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "threads": (
        lambda: torch.set_num_threads(torch.get_num_threads() + 2),
        lambda: (torch.get_num_threads(), threads_of_another_thread()),
    ),
    "torch's random numbers": (lambda: torch.rand(1), lambda: torch.get_rng_state().tolist()),
    "numpy's random numbers": (lambda: np.random.rand(1), drawn_by_numpy),
    "Python's random numbers": (random.random, random.getstate),
    "the working directory": (lambda: os.chdir("/"), os.getcwd),
    "standard output": (lambda: setattr(sys, "stdout", None), lambda: sys.stdout),
}


def threads_of_another_thread() -> int:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("raises", [False, True])
def test_global_state_is_put_back_after_a_call(what: str, raises: bool) -> None:
    change, read = CHANGES[what]
    before = read()

    def f(prompts: Any, responses: Any) -> list[float]:
        change()
        return [1.0 / (0.0 if raises else 1.0)] * len(responses)

    source = FunctionReward(f, time_limit=20.0)
    for _ in range(2):
        assert [score.value for score in source.score(ASKED[:2])] == [None if raises else 1.0] * 2
        assert read() == before


def test_a_function_finds_what_it_left() -> None:
    """Random numbers go on: they are not the run's."""
    seen: list[Any] = []

    def f(prompts: Any, responses: Any) -> list[float]:
        if not seen:
            random.seed(5)
        seen.append(random.random())
        return [1.0] * len(responses)

    source, oracle = FunctionReward(f, time_limit=20.0), random.Random(5)
    for _ in range(3):
        source.score(ASKED[:1])
        random.random()  # of the run
    assert seen == [oracle.random() for _ in range(3)]


def test_every_call_begins_in_the_working_directory_of_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "next.py").write_text("import os\ndef f(p, r): return [os.path.exists('next.py')]")
    seen: list[str] = []

    def wanders(prompts: Any, responses: Any) -> list[float]:
        seen.append(os.getcwd())
        os.chdir("/")
        return [1.0]

    source = FunctionReward(wanders, time_limit=20.0)
    for _ in range(2):
        source.score(ASKED[:1])
    assert seen == [str(tmp_path)] * 2
    assert scored(load_function("next.py:f"), 1)[0].value == 1.0


def test_stacks_of_a_call_that_went_elsewhere_lie_in_the_folder_of_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    def hangs(prompts: Any, responses: Any) -> list[float]:
        os.chdir("elsewhere")
        time.sleep(3)
        return [1.0]

    source = FunctionReward(hangs, time_limit=0.5)
    source.watchdog.path = Path("run/stacks.txt")
    assert source.score(ASKED[:1])[0].value is None
    assert (tmp_path / "run/stacks.txt").is_file() and Path.cwd() == tmp_path


def test_a_thread_that_never_ends_does_not_keep_the_program(tmp_path: Path) -> None:
    """Executors wait for their threads at the end of a program."""
    program = (
        "import sys, time\nfrom concurrent.futures import ThreadPoolExecutor\nfrom tether.core "
        "import stopping\n"
        "from tether.rewards.function import FunctionReward\nfrom tether.core.types import "
        "Prompt, user\n"
        "def f(prompts, responses):\n    return ThreadPoolExecutor(1).submit(time.sleep, "
        "1000).result()\n"
        "score, = FunctionReward(f, time_limit=0.5).score_texts([Prompt((user('q'),))], "
        "['x'])\nprint(score.reason[-30:])\n"
        "stopping.PATIENCE = 0.5\nsys.argv = ['tether', 'nonsense']\n"
        "from tether.__main__ import program\nprogram()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2 and "gave no answer within" not in done.stderr
    assert (
        "the program ends without threads of a user's function that do not end: ThreadPoolExecutor"
    ) in done.stderr


def test_changes_of_prompts_stay_within_the_call() -> None:
    prompt = Prompt((user("q"),), metadata={"tests": [1, 2]}, row={"answer": {"of": [3]}})
    seen: list[Any] = []

    def f(prompts: Any, responses: Any) -> list[float]:
        seen.append(
            (
                prompts[0].metadata["tests"].pop(),
                prompts[0].row["answer"].pop("of"),
                prompts[0] is prompts[1],
                responses.pop(),
            ),
        )
        return [1.0, 1.0]

    # of several functions each gets the same
    source, how = {"first": f, "second": f}, {"first": 1.0, "second": 1.0}
    for _ in range(2):
        FunctionReward(source, how).score_texts([prompt, prompt], ["a", "b"])
    assert (
        seen == [(2, [3], True, "b")] * 4
        and prompt.metadata == {"tests": [1, 2]}
        and prompt.row == {"answer": {"of": [3]}}
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("import sys; sys.exit()", "cannot be imported: SystemExit"),
        (
            "class E(BaseException):\n    def __str__(self): return 1/0\nraise E",
            "cannot be imported: E",
        ),
        ("def __getattr__(name): raise SystemExit(0)", "cannot be imported: SystemExit: 0"),
    ],
)
def test_a_module_that_ends_the_program_is_refused(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "mine.py").write_text(line)
    with pytest.raises(ConfigError, match=rf"^judge.call = .*mine.py:f': .*mine.py {words}$"):
        load_function(f"{tmp_path}/mine.py:f", key="judge.call")


def judge(tmp_path: Path, body: str, **limits: Any) -> Any:
    (tmp_path / "mine.py").write_text(f"import time\ndef f(prompts, responses):\n    {body}\n")
    return text_judge(FunctionJudge(call=f"{tmp_path}/mine.py:f", **limits), tmp_path)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("time.sleep(60)", r"gave no answer within 0.3 s, it was in f \(mine.py, line 3\)"),
        ("raise SystemExit(0)", r"raised SystemExit: 0"),
        ("return None", r"returned nothing \(None\), not a list of numbers"),
    ],
)
def test_a_judge_has_the_guard_of_a_reward(tmp_path: Path, body: str, words: str) -> None:
    with pytest.raises(
        RewardError,
        match=(
            r"^the judge f \(mine.py\) scored none of 2 answers: "
            rf"the judge f \(mine.py\) {words}"
        ),
    ):
        judge(tmp_path, body, time_limit=0.3)([QUESTION] * 2, ["a", "b"])


def test_a_judge_is_called_by_batches_of_whole_prompts_and_a_failed_call_costs_its_own(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompts = [Prompt((user(f"q{n}"),)) for n in range(4) for _ in range(3)]
    body = (
        "print(len(responses)); return [1.0 / ('q3' not in [p.text for p in prompts])] * "
        "len(responses)"
    )
    scores = judge(tmp_path, body, batch=4)(prompts, ["x"] * 12)
    assert [score.value for score in scores] == [1.0] * 9 + [None] * 3
    (message,) = [record.message for record in caplog.records]
    assert (
        "scored 3 of 12 answers not; they are left out: the judge f (mine.py) raised "
        "ZeroDivisionError"
    ) in message


def test_a_function_of_on_step_leaves_the_run_its_state_and_cannot_end_the_program_without_a_word() -> (
    None
):
    seen: list[Any] = []

    def watch(stage: str, step: int, metrics: Any) -> None:
        torch.set_default_dtype(torch.float64)
        metrics.clear()
        seen.append(step)
        if step == 2:
            sys.exit()
        if step == 3:
            raise ValueError("enough")

    call = in_place(watch, "the function of on_step")
    call("grpo", 1, {})
    assert seen == [1] and torch.get_default_dtype() == torch.float32
    with pytest.raises(
        RunError,
        match=(
            r"^the function of on_step .*watch \(test_guarded.py\) raised SystemExit. "
            r"Mend the function"
        ),
    ):
        call("grpo", 2, {})
    with pytest.raises(ValueError, match="enough") as caught:
        call("grpo", 3, {})
    assert (
        "watch (test_guarded.py) raised this" in caught.value.__notes__[0]
        and torch.get_default_dtype() == torch.float32
    )


def test_a_generator_of_rows_that_fails_is_refused_by_name(tmp_path: Path) -> None:
    def rows() -> Any:
        yield "one"
        sys.exit()

    words = r"prompts: the generator .*rows \(test_guarded.py\) raised SystemExit after 1 rows"
    with pytest.raises(ConfigError, match=words):
        tether.grpo("tiny", prompts=rows(), reward="random", run=tmp_path / "run")


def test_a_generator_of_rows_leaves_the_run_its_state(tmp_path: Path) -> None:
    def rows() -> Any:
        torch.set_default_dtype(torch.float64)
        os.chdir("/")
        yield from ("one", "two")

    assert rows_in(rows(), "prompts") == [{"prompt": "one"}, {"prompt": "two"}]
    assert torch.get_default_dtype() == torch.float32 and os.getcwd() != "/"


def test_a_slow_import_is_named_while_it_lasts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(loading, "QUICK_IMPORT", 0.02)
    (tmp_path / "slow.py").write_text(
        "import time\ntime.sleep(1)\ndef f(p, r): return [1.0] * len(r)",
    )
    load_function(f"{tmp_path}/slow.py:f")
    assert "slow.py" in caplog.text and "line 2" in caplog.text


def test_any_callable_has_a_name_and_a_digest() -> None:
    class Slotted:
        __slots__ = ()

        def __call__(self, prompts: Any, responses: Any) -> list[float]:
            return [1.0] * len(responses)

    def unfinished(prompts: Any, responses: Any) -> list[float]:
        return [later] * len(responses)

    for function in (Slotted(), unfinished, math.fsum):
        assert load_function(register(function)) is function
    assert (
        source_of("the judge", Slotted()).endswith("Slotted (test_guarded.py)")
        and source_of("the judge", math.fsum) == "the judge fsum"
    )
    assert [score.value for score in scored(Slotted())] == [1.0] * 3
    later = 1.0
    assert one_line(CrackedError()) == "CrackedError"


def test_an_import_leaves_the_run_its_state(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os, random, signal, sys, torch\nos.chdir('/')\nrandom.seed(1)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntorch.set_grad_enabled(False)\n"
        "torch.set_default_dtype(torch.float64)\nsys.stdout = None\n"
        "def f(prompts, responses): return [float(torch.ones(1).dtype == torch.float64)] * 3\n",
    )
    readers = (
        lambda: signal.getsignal(signal.SIGTERM),
        lambda: sys.stdout,
        *(os.getcwd, random.getstate, torch.is_grad_enabled, torch.get_default_dtype),
    )
    before = [read() for read in readers]
    function = load_function(f"{tmp_path}/mine.py:f")
    assert [read() for read in readers] == before
    assert [score.value for score in scored(function)] == [1.0] * 3  # its own default dtype


def test_the_stack_of_a_call_that_keeps_the_interpreter_is_shown() -> None:
    """No thread of Python has a turn in such a call."""
    program = (
        "import re, time\nfrom tether.rewards import calling\nfrom tether.rewards.function import "
        "FunctionReward\nfrom tether.core.types import Prompt, user\ncalling.GRACE = 0.2\n"
        "def match(length):\n    began = time.monotonic()\n"
        "    re.match(r'(a+)+$', 'a' * length + 'b')\n    return time.monotonic() - began\n"
        "length = 16\nwhile match(length) < 0.1: length += 1\n"  # each doubles the time
        "def kindness(prompts, responses):\n    match(length + 4)\n    return [1.0]\n"
        "FunctionReward(kindness, time_limit=0.3).score_texts([Prompt((user('q'),))], ['x'])\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert "Timeout (0:00:00.5" in done.stderr and "in kindness" in done.stderr


def test_environments_that_several_threads_step_leave_the_runs_state_as_it_was(
    tmp_path: Path,
) -> None:
    """One steps while the other's code is running, and is left after it."""
    both = threading.Barrier(2, timeout=20)
    drawn: list[float] = []

    class Wanders:
        def reset(self, task: dict[str, Any]) -> None:
            self.first = task["first"]

        def step(self, message: dict[str, Any]) -> tuple[str, float, bool]:
            both.wait()
            os.chdir(tmp_path)
            torch.rand(1)
            drawn.append(random.random())
            time.sleep(0.5 * self.first)
            return "go on", 1.0, True

    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), random.getstate(), os.getcwd(), sys.stdout

    pool = EnvironmentThreads(Wanders)
    pool.begin({n: Prompt((user("?"),), row={"first": n == 0}) for n in range(2)})
    own = states()
    for _ in range(2):
        with pool.several(), ThreadPoolExecutor(2) as threads:
            turns = threads.map(lambda n: pool.step({n: Message("assistant", "a")})[n], range(2))
            assert {type(turn) for turn in turns} == {Turn}
        assert states() == own
    assert len(set(drawn)) == 4
