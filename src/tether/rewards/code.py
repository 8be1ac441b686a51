"""Programs that a model wrote, run against tests: in a process of their own, under rewards.guard,
without the right answers.

A test `assert f(2) == 4` is taken apart: the program's process is asked for `f(2)` alone, and the
comparison with 4 happens where the program never was. So does the comparison of what a program
prints. A program that leaves early, calls everything equal to everything or writes a verdict itself
gains nothing by it. Any other test (`assert abs(f(2) - 4) < 1e-6`, a whole `check(f)`) is judged
inside the program's own process, and a program that is out to deceive can deceive it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import re
import resource
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Literal, NoReturn

from pydantic import TypeAdapter

from tether.core.keeping import temporary_folder
from tether.core.received import received
from tether.core.types import Json, JsonValue
from tether.core.visible import visible
from tether.rewards.code_tests import CodeTest
from tether.rewards.guard import MEBIBYTE, OPEN_FILES, Guards, end_with, limit, restrict
from tether.rewards.sandbox import ending, write_all
from tether.rewards.scratch import confine, excess
from tether.rewards.values import as_json

OUTPUT, FILE, SCRATCH = MEBIBYTE, 16 * MEBIBYTE, 64 * MEBIBYTE
"""Bytes that a program may write: to its output, into one file, into all its files together."""
CLOSE = 1e-6
"""Difference of a printed decimal from the right one that is none, of itself or absolute."""
_FLOAT = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?")
SCRATCH_NAME = "tether-code"
_POLL = 0.01
Outcome = Sequence[JsonValue]
"""Of a test: ("gave", value), or what went wrong and how."""
_Said = tuple[Literal["gave"], JsonValue] | tuple[Literal["raised", "ended"], str]
_REPLY = TypeAdapter(tuple[str, list[_Said]])


def request(program: str, tests: Sequence[CodeTest]) -> Json:
    """The part of its tests that the program's process gets to know."""
    return {"program": program, "asks": [[test.kind, test.ask] for test in tests]}


def verdicts(tests: Sequence[CodeTest], outcomes: Sequence[Outcome]) -> tuple[float, str]:
    """The share of the tests that are met, and the first one that is not."""
    met = [_met(test, outcome) for test, outcome in zip(tests, outcomes, strict=True)]
    counted = [ok for ok, test in zip(met, tests, strict=True) if test.counts]
    reason = ""
    if False in met:
        first = met.index(False)
        what, value = outcomes[first]
        reason = f"{_shown(tests[first])}: {what} {str(value)[:120]}".rstrip()
    return sum(counted) / len(counted), reason


def _shown(test: CodeTest) -> str:
    return f"input {test.ask[:40]!r}" if test.kind == "program" else f"{test.ask[:80]}"


def _met(test: CodeTest, outcome: Outcome) -> bool:
    right = test.right
    what, value = outcome
    if what != "gave":
        return False
    if test.kind == "program":
        return isinstance(value, str) and _same_output(value, str(right))
    if test.kind == "call":
        return isinstance(right, list) and value in right
    return test.kind == "run" or value == right


def _same_output(given: str, right: str) -> bool:
    """Equal lines, numbers with a decimal point within a millionth; white space at the ends of lines
    and empty lines around them aside.
    """
    first, second = (
        [re.split(r"(\s+)", line.rstrip()) for line in text.strip("\r\n").rstrip().splitlines()]
        for text in (given, right)
    )
    if list(map(len, first)) != list(map(len, second)):
        return False
    return all(
        word == other or (_FLOAT.fullmatch(other) and _is_close(word, float(other)))
        for word, other in zip(chain(*first), chain(*second), strict=True)
    )


def _is_close(word: str, right: float) -> bool:
    with contextlib.suppress(ValueError):
        return math.isclose(float(word), right, rel_tol=CLOSE, abs_tol=CLOSE)
    return False


# What follows runs in the workers, which no right answer ever reaches.


def make_runner(seconds: float) -> Callable[..., list[Outcome]]:
    """program, asks -> for each ask ("gave", value), or what went wrong and how. `seconds` is the
    limit of all together.
    """

    def run(program: str, asks: list[list[str]]) -> list[Outcome]:
        end = time.monotonic() + seconds
        if not asks or asks[0][0] != "program":
            return _child(program, asks, end)
        return [_child(program, [ask], end)[0] for ask in asks]

    return run


def _child(program: str, asks: list[list[str]], end: float) -> list[Outcome]:
    """The answers of a new process; if it ended without any, the same reason for every test."""
    with temporary_folder(SCRATCH_NAME) as scratch:
        return _child_in(str(scratch), program, asks, end)


def _child_in(scratch: str, program: str, asks: list[list[str]], end: float) -> list[Outcome]:
    token = secrets.token_hex(16)
    worker = os.getpid()
    answers, answers_in = os.pipe()
    printed, printed_in = os.pipe()
    errors, errors_in = os.pipe()
    text = asks[0][1] if asks[0][0] == "program" else ""
    pipes = _given(text, scratch), printed_in, errors_in, answers_in
    child = os.fork()
    if child == 0:
        _become(
            program,
            asks,
            token,
            scratch,
            pipes,
            max(1, math.ceil(end - time.monotonic())),
            worker,
        )
    for pipe in pipes:
        os.close(pipe)
    try:
        texts, complaint = _listen({answers: b"", printed: b"", errors: b""}, end, child, scratch)
    finally:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        for pipe in (answers, printed, errors):
            os.close(pipe)
    with contextlib.suppress(ValueError):
        key, outcomes = received(texts[answers], _REPLY)
        if key == token and len(outcomes) == len(asks):
            whole = ["gave", texts[printed].decode(errors="replace")]
            return [
                whole if ask[0] == "program" and one[0] == "gave" else [*one]
                for ask, one in zip(asks, outcomes, strict=True)
            ]
    died = f"before its tests ({ending(os.waitstatus_to_exitcode(status))})"
    last = texts[errors].decode(errors="replace").strip().splitlines()[-1:]
    return [["ended", complaint or "; ".join([died, *last])[:200]]] * len(asks)


def _given(text: str, folder: str) -> int:
    """A file without a name that holds this text, and can only be read."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(text.encode())
        file.flush()
        return os.open(file.name, os.O_RDONLY)


def _listen(
    texts: dict[int, bytes],
    end: float,
    child: int,
    scratch: str,
) -> tuple[dict[int, bytes], str]:
    """All that comes out of these pipes until the process is through, or what it did too much
    of.
    """
    open_pipes = set(texts)
    memory, _ = resource.getrlimit(resource.RLIMIT_AS)
    while open_pipes:
        left = end - time.monotonic()
        if left <= 0:
            return texts, "by the clock: too slow"
        ready, _, _ = select.select(list(open_pipes), [], [], min(left, _POLL))
        for pipe in ready:
            chunk = os.read(pipe, 1 << 16)
            texts[pipe] += chunk
            if not chunk:
                open_pipes.discard(pipe)
            if len(texts[pipe]) > OUTPUT:
                return texts, f"by force: more than {OUTPUT >> 20} MB of output"
        if complaint := excess(child, scratch, num_bytes=SCRATCH, file_bytes=FILE, memory=memory):
            return texts, f"by force: {complaint}"
    return texts, ""


def _become(
    program: str,
    asks: list[list[str]],
    token: str,
    scratch: str,
    pipes: tuple[int, ...],
    seconds: int,
    worker: int,
) -> NoReturn:
    """The forked process: put everything away, run the program, say what it gave, end."""
    try:
        for target, pipe in enumerate([os.dup(pipe) for pipe in pipes]):
            os.dup2(pipe, target)
        os.closerange(4, 1 << 16)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        confine(scratch, SCRATCH)
        end_with(worker)
        os.chdir(scratch)
        os.environ.update(HOME=scratch, TMPDIR=scratch)
        tempfile.tempdir = scratch
        amounts = {
            resource.RLIMIT_CPU: math.ceil(time.process_time()) + seconds,
            resource.RLIMIT_FSIZE: FILE,
        }
        for kind, amount in (amounts | {resource.RLIMIT_NOFILE: OPEN_FILES}).items():
            limit(kind, amount, for_good=True)
        restrict(scratch)
        results = _answers(program, asks)
        sys.stdout.flush()
        write_all(3, json.dumps([token, results]).encode())
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - nothing may go back into the worker's own code
        write_all(2, f"{type(error).__name__}: {error}"[:300].encode(errors="replace"))
    os._exit(1)


def _answers(program: str, asks: list[list[str]]) -> list[Outcome]:
    whole = asks[0][0] == "program"
    module = types.ModuleType("__main__" if whole else "answer")
    sys.modules[module.__name__] = module
    try:
        _execute(compile(program, "answer.py", "exec", dont_inherit=True), module.__dict__)
    except SystemExit as stop:
        if not whole or stop.code not in (None, 0):
            raise
    if whole:  # what the interpreter does at its end
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # also ends the pools of concurrent.futures
        atexit._run_exitfuncs()
        return [["gave", None]]
    # Now: tests below `if __name__ == "__main__":` run, the program's do not.
    sys.modules["__main__"] = module
    module.__name__ = "__main__"
    return [_asked(kind, ask, module.__dict__) for kind, ask in asks]


def _asked(kind: str, ask: str, names: Json) -> Outcome:
    try:
        value = _execute(
            compile(ask, "test", "exec" if kind == "run" else "eval", dont_inherit=True),
            names,
        )
        return ["gave", as_json(value)]
    except MemoryError:
        return ["raised", "MemoryError"]
    except BaseException as error:  # noqa: BLE001 - a program may raise what it likes, SystemExit too
        return ["raised", visible(f"{type(error).__name__}: {error}", 200)]


def _execute(code: types.CodeType, names: Json) -> object:
    """The one place where tether runs what a model wrote."""
    return eval(code, names)  # noqa: S307


_MISSING = {
    "files": "Landlock of version 3 (Linux 6.2), so programs may read files, and only an audit "
    "hook keeps them from writing",
    "processes": "a seccomp filter (x86-64, arm64), so only an audit hook keeps them from "
    "processes and the network",
    "space": f"a mount, so files are measured every {1000 * _POLL:.0f} ms, and can exceed "
    f"{SCRATCH >> 20} MB in between",
}


def missing_guards() -> str:
    """The guards that this machine does not offer, each with its substitute; empty if it offers
    all.
    """
    held = guards()
    return "; ".join(text for name, text in _MISSING.items() if not getattr(held, name))


@cache
def guards() -> Guards:
    """Find the guards that this kernel holds, by a trial in a process of its own."""
    attempt = (
        "import sys; from tether.rewards.guard import restrict; from tether.rewards.scratch "
        "import confine\n"
        f"space = confine(sys.argv[1], {SCRATCH}); print(*map(int, (*restrict()[:2], space)))"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    with temporary_folder(SCRATCH_NAME) as folder:
        command = [sys.executable, "-c", attempt, str(folder)]
        flags = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        ).stdout
    return Guards(*(flag == "1" for flag in flags.split() or "000"))
