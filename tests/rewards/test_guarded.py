"""The guard around users' functions: faults of every kind, and a process whose state is the run's
again after each call.
"""

import asyncio
import builtins
import decimal
import gc
import itertools
import json
import locale
import logging
import math
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.rewards.test_function import ASKED

import tether
from tether.api.rows import rows_in
from tether.build.judges import text_judge
from tether.core.errors import ConfigError, RewardError, RunError, one_line
from tether.core.stopping import Interrupted
from tether.core.types import Prompt, Score, user
from tether.rewards import facets, loading, surroundings
from tether.rewards.calling import in_place, source_of
from tether.rewards.function import FunctionReward
from tether.rewards.loading import load_function, register
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
    monkeypatch.setattr(surroundings, "_LEFT", {})
    monkeypatch.setattr(surroundings, "_NAMED", set())


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
def test_what_stops_a_run_is_passed_on(stop: BaseException) -> None:
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
        (Score(1.0, parts={"a": "x"}), "returned a Score whose part 'a' is a str, not a number"),  # type: ignore[dict-item]
        (
            Score(1.0, parts={"score": 1.0}),
            "returned a Score whose part is named 'score', as a column of the run is",
        ),
        (Score(1.0, parts=[1.0]), "returned a Score whose parts are a list, not numbers by name"),  # type: ignore[arg-type]
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
        (torch.ones(3, 1), "returned a Tensor of shape (3, 1), not a list of numbers"),
        (np.ones((1, 3)), "returned a ndarray of shape (1, 3), not a list of numbers"),
        (torch.tensor(1.0), "returned one number, not a list of them"),
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
def test_what_is_no_list_of_as_many_numbers_fails_the_call(returned: Any, words: str) -> None:
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


def chdir() -> None:
    os.chdir("/")


def drawn_by_numpy() -> int:
    state: Any = np.random.get_state()
    return state[2]


def toggle_garbage_collection() -> None:
    (gc.disable if gc.isenabled() else gc.enable)()


CHANGES: dict[str, tuple[Any, Any]] = {
    "torch's default dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        torch.get_default_dtype,
    ),
    "torch's number of threads": (
        lambda: torch.set_num_threads(torch.get_num_threads() + 2),
        torch.get_num_threads,
    ),
    "torch's deterministic algorithms": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        torch.are_deterministic_algorithms_enabled,
    ),
    "torch's kernels and precision": (
        lambda: torch.set_float32_matmul_precision("medium"),
        torch.get_float32_matmul_precision,
    ),
    "torch's random numbers": (lambda: torch.rand(1), lambda: torch.get_rng_state().tolist()),
    "numpy's random numbers": (lambda: np.random.rand(1), drawn_by_numpy),
    "Python's random numbers": (random.random, random.getstate),
    "the working directory": (chdir, os.getcwd),
    "the umask": (lambda: os.umask(0o707), facets._umask),
    "environment variables": (os.environ.clear, lambda: dict(os.environ)),
    "the locale": (
        lambda: locale.setlocale(locale.LC_ALL, "C"),
        lambda: locale.setlocale(locale.LC_ALL),
    ),
    "standard input, output or error": (lambda: setattr(sys, "stdout", None), lambda: sys.stdout),
    "the filters of warnings": (
        lambda: warnings.simplefilter("error"),
        lambda: list(warnings.filters),
    ),
    "garbage collection": (toggle_garbage_collection, gc.isenabled),
    "the log of tether": (
        lambda: logging.disable(logging.CRITICAL),
        lambda: logging.root.manager.disable,
    ),
    "timers of signals": (
        lambda: signal.alarm(1000),
        lambda: round(signal.getitimer(signal.ITIMER_REAL)[0], -2),
    ),
    "limits of the interpreter": (lambda: sys.setrecursionlimit(77_777), sys.getrecursionlimit),
    "limits of the process": (
        lambda: resource.setrlimit(
            resource.RLIMIT_NOFILE,
            (77, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        ),
        lambda: resource.getrlimit(resource.RLIMIT_NOFILE),
    ),
    "the time limit of sockets": (lambda: socket.setdefaulttimeout(0.5), socket.getdefaulttimeout),
}


@pytest.mark.parametrize("facet", CHANGES)
def test_what_a_call_changes_is_the_runs_again_and_named_once(
    facet: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    change, read = CHANGES[facet]
    before = read()
    if facet == "the locale":
        locale.setlocale(locale.LC_ALL, "C.UTF-8")
        before = read()

    def f(prompts: Any, responses: Any) -> list[float]:
        change()
        return [1.0] * len(responses)

    source = FunctionReward(f, time_limit=20.0)
    for _ in range(2):
        assert [score.value for score in source.score(ASKED[:2])] == [1.0, 1.0]
        assert read() == before
    (message,) = [record.message for record in caplog.records]
    assert "f (test_guarded.py) changed " in message and facet in message


MODULES = {
    "os": (os, ["kill", "open", "environ", "path", "getcwd", "dup"]),
    "posixpath": (os.path, ["join", "exists"]),
    "time": (time, ["time", "monotonic", "sleep", "perf_counter"]),
    "json": (json, ["loads", "dumps", "JSONDecodeError"]),
    "random": (random, ["random", "seed", "Random"]),
    "threading": (threading, ["Thread", "enumerate", "current_thread", "Lock", "Timer"]),
    "signal": (signal, ["signal", "getsignal", "setitimer", "valid_signals"]),
    "math": (math, ["isfinite", "floor"]),
    "builtins": (
        builtins,
        [
            *("len", "isinstance", "list", "float", "str", "type", "open", "map", "zip"),
            *("print", "KeyError", "Exception", "BaseException", "set", "super", "__import__"),
        ],
    ),
}


def values_of(module: Any, names: list[str]) -> list[Any]:
    return [vars(module).get(name) for name in names]


@pytest.mark.parametrize("how", ["replaced", "deleted", "replaced, then raises"])
@pytest.mark.parametrize("name", MODULES)
def test_functions_of_pythons_modules_that_a_call_replaces_are_the_runs_again_and_named_once(
    name: str,
    how: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    module, names = MODULES[name]
    before = values_of(module, names)

    def f(prompts: Any, responses: Any) -> list[float]:
        results = [1.0 for _ in responses]
        for one in names:
            if how == "deleted":
                del module.__dict__[one]
            else:
                module.__dict__[one] = None
        return results if how != "replaced, then raises" else 1 / 0  # type: ignore[return-value]

    source = FunctionReward(f, time_limit=20.0)
    for _ in range(2):
        scores = source.score(ASKED[:2])
        assert all(a is b for a, b in zip(before, values_of(module, names), strict=True))
        if how == "replaced, then raises":
            assert "raised ZeroDivisionError" in scores[0].reason
        else:
            assert [score.value for score in scores] == [1.0, 1.0]
    (message,) = [record.message for record in caplog.records if " changed " in record.message]
    assert "f (test_guarded.py) changed " in message
    assert all(f"{name}.{one}" in message for one in names)


def test_every_name_that_the_run_depends_on_at_once_is_put_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = facets.values_of_names()

    def f(prompts: Any, responses: Any) -> list[float]:
        results = [1.0 for _ in responses]
        for one in facets.NAMES:
            for name in one.names:
                one.space[name] = None
        return results

    assert [score.value for score in scored(f)] == [1.0] * 3
    after = facets.values_of_names()
    assert all(
        a is b for x, y in zip(before, after, strict=True) for a, b in zip(x, y, strict=True)
    )
    assert re.search(r"changed builtins\.\w+, .{200,900} and \d{3} more\. ", caplog.messages[-1])


def test_what_a_coroutine_an_import_and_a_hanging_call_replace_is_put_back(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, kill, loads = time.time, os.kill, json.loads

    async def waits(prompts: Any, responses: Any) -> Any:
        os.kill = json.loads = None  # type: ignore[assignment]
        return [1.0] * 3

    def hangs(prompts: Any, responses: Any) -> Any:
        sleep = time.sleep
        time.time = time.monotonic = builtins.open = None  # type: ignore[assignment]
        sleep(30)

    file = tmp_path / "replaces.py"
    file.write_text(
        "import time\ntime.time = lambda: 0.0\ndef f(prompts, responses): return [1.0] * 3\n",
    )
    assert [score.value for score in scored(waits)] == [1.0] * 3
    assert "gave no answer within 0.5 s, it was in" in scored(hangs, time_limit=0.5)[0].reason
    assert [score.value for score in scored(load_function(f"{file}:f"))] == [1.0] * 3
    assert (time.time, os.kill, json.loads) == (clock, kill, loads)
    words = " ".join(record.message for record in caplog.records)
    assert f"the import of {file} changed time.time. " in words
    assert "changed os.kill and json.loads. " in words


def test_what_a_call_in_this_thread_replaces_is_put_back() -> None:
    number, kill = builtins.isinstance, os.kill

    def on_step(step: int) -> None:
        os.kill = builtins.isinstance = builtins.BaseException = None  # type: ignore[misc, assignment]
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        in_place(on_step, "the function on_step")(1)
    assert (builtins.isinstance, os.kill) == (number, kill)


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


def test_a_function_begins_in_the_folder_that_its_own_file_went_to_on_import(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(surroundings, "_FOLDERS", {})
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "words.txt").write_text("yes")
    words = (
        "def f(p, r):\n    here = os.path.exists('words.txt')\n    os.chdir('/')\n    return [here]"
    )
    (tmp_path / "goes.py").write_text(f"import os\nos.chdir('deep')\n{words}")
    (tmp_path / "stays.py").write_text(f"import os\n{words}")
    goes, stays = load_function("goes.py:f"), load_function("stays.py:f")
    for _ in range(2):
        assert scored(goes, 1)[0].value == 1.0 and scored(stays, 1)[0].value == 0.0
    assert Path.cwd() == tmp_path
    # once deleted, the folder is the run's, and nothing fails
    (tmp_path / "deep" / "words.txt").unlink()
    (tmp_path / "deep").rmdir()
    assert scored(goes, 1)[0].value == 0.0


def test_a_closed_terminal_is_opened_again(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom tether.rewards.function import FunctionReward\nfrom tether.core.types "
        "import Prompt, user\n"
        "def f(prompts, responses):\n    sys.stdout.close()\n    return [1.0]\n"
        "source = FunctionReward(f)\nfor _ in range(2):\n    "
        "source.score_texts([Prompt((user('q'),))], ['x'])\nprint('here')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout == "here\n"


def test_descriptors_that_a_call_closes_are_open_again(tmp_path: Path) -> None:
    """Without them the next file that the run opens would be its standard output."""
    program = (
        "import os\nfrom tether.rewards.function import FunctionReward\nfrom tether.core.types "
        "import Prompt, user\n"
        "def f(prompts, responses):\n    os.close(1); os.dup2(os.open(os.devnull, os.O_WRONLY), "
        "2)\n    return [1.0]\n"
        "FunctionReward(f).score_texts([Prompt((user('q'),))], ['x'])\n"
        f"print('lost', file=open({str(tmp_path / 'file')!r}, 'w'))\nprint('here')\nos.write(2, "
        "b'there')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout == "here\n" and done.stderr.endswith("there")
    assert "changed standard input, output or error" in done.stderr


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
        "stopping.PATIENCE = 0.5\nstopping.end_in_time(7)\nsys.exit(7)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 7 and "gave no answer within" not in done.stderr
    assert (
        "the program ends without threads of a user's function that do not end: ThreadPoolExecutor"
    ) in done.stderr


def test_what_a_function_does_to_its_prompts_stays_with_the_call() -> None:
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


def test_os_exit_ends_the_call_and_not_the_program() -> None:
    reason = scored(lambda prompts, responses: os._exit(3))[0].reason
    assert reason.endswith("raised SystemExit: os._exit(3)")


FORKS = """
import os
from tests.rewards.test_guarded import scored

def ends_with(code):
    child = os.fork()
    if not child:
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

print(scored(lambda prompts, responses: [ends_with(7)], 1)[0].value, ends_with(8))
"""


def test_a_process_of_the_functions_own_ends_as_it_likes() -> None:
    """In an interpreter of its own: a fork of one with many libraries and threads may crash."""
    ended = subprocess.run(
        [sys.executable, "-c", FORKS],
        check=True,
        capture_output=True,
        text=True,
    )
    assert ended.stdout.split() == ["7.0", "8"], ended.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("import sys; sys.exit()", "cannot be imported: SystemExit"),
        ("import os; os._exit(0)", r"cannot be imported: SystemExit: os._exit\(0\)"),
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


def test_what_an_import_changes_is_the_runs_again(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "mine.py").write_text(
        "import decimal, os, signal, warnings\nimport numpy as np\nimport torch\n"
        "decimal.getcontext().prec = 3\nnp.seterr(all='raise')\nwarnings.simplefilter('ignore')\n"
        "signal.signal(signal.SIGTERM, "
        "signal.SIG_IGN)\ntorch.set_grad_enabled(False)\ntorch.set_default_device('meta')\n"
        "os.environ['MINE'] = 'here'\n"
        "def f(prompts, responses): return [float(os.environ['MINE'] == 'here')] * len(responses)\n",
    )
    handler = signal.getsignal(signal.SIGTERM)
    function = load_function(f"{tmp_path}/mine.py:f")
    assert (
        signal.getsignal(signal.SIGTERM) is handler
        and torch.is_grad_enabled()
        and "MINE" not in os.environ
    )
    assert torch.ones(1).device.type == "cpu"
    assert decimal.getcontext().prec == 28 and np.geterr()["invalid"] == "warn"
    assert [score.value for score in scored(function)] == [1.0] * 3
    (message,) = [record.message for record in caplog.records]
    for name in (
        "default device",
        "recording of gradients",
        "environment variables",
        "decimal context",
        "numpy's errors",
    ):
        assert name in message
    assert f"{tmp_path}/mine.py changed " in message and "handlers of signals" in message
    # libraries set them whenever they are imported
    assert "filters of warnings" not in message


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
    monkeypatch.setattr(loading, "SLOW_IMPORT", 0.1)
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

    class Secretive:
        def __init__(self) -> None:
            self.pair = (Number(OSError()),)

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

        def __call__(self, prompts: Any, responses: Any) -> list[float]:
            return [1.0] * len(responses)

    def unfinished(prompts: Any, responses: Any) -> list[float]:
        return [later] * len(responses)

    for function in (Slotted(), Secretive(), unfinished, math.fsum):
        assert load_function(register(function)) is function
    assert (
        source_of("the judge", Slotted()).endswith("Slotted (test_guarded.py)")
        and source_of("the judge", math.fsum) == "the judge fsum"
    )
    assert "Secretive" in source_of("the judge", Secretive())
    assert [score.value for score in scored(Slotted())] == [1.0] * 3
    later = 1.0
    assert one_line(CrackedError()) == "CrackedError"


def test_a_call_that_keeps_the_interpreter_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    """No thread of the process has a turn in such a call."""
    program = (
        "import re\nfrom tether.rewards import sentinel\nfrom tether.rewards.function import "
        "FunctionReward\n"
        "from tether.core.types import Prompt, user\nsentinel.GRACE = 0.5\n"
        "def f(prompts, responses):\n    return [float(bool(re.match(r'(a+)+$', r))) for r in "
        "responses]\n"
        "source = FunctionReward(f, time_limit=0.5)\n"
        "print(source.score_texts([Prompt((user('q'),))], ['aaa'])[0].value, flush=True)\n"
        "source.score_texts([Prompt((user('q'),))], ['a' * 60 + 'b'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL and done.stdout == "1.0\n"
    assert (
        "tether: the reward function f (<string>) has held Python's interpreter for 1 s"
        in done.stderr
    )
