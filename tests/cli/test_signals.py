"""A signal ends every command at every moment, its first ones too, with one line and the exit code
of the signal.
"""

import random
import signal
import subprocess
import sys
import time

import pytest
from tests.cli.test_faults import toml
from tests.every_stage import recipe

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
STARTED = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for programs in the background
print(flush=True)
sys.argv[0] = "tether"
runpy.run_module("tether", run_name="__main__")
"""
AT_AN_IMPORT = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for programs in the background
module, number = sys.argv[1:3]
class Sends:
    def find_spec(self, name, *_):
        global module
        if name == module:
            module = None
            os.kill(os.getpid(), int(number))
sys.meta_path.insert(0, Sends())
sys.argv = ["tether", *sys.argv[3:]]
runpy.run_module("tether", run_name="__main__")
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("signals")
    text = "".join(
        f"{key} = {toml(value)}\n" for key, value in recipe(folder, folder / "run").items()
    )
    (folder / "recipe.toml").write_text(text)
    return folder / "recipe.toml"


def check(code, told, number, moment):
    """One line and the code of the signal; a step in hand may be finished first."""
    lines = [line for line in told.splitlines() if "finishes this step" not in line]
    assert code == CODES[number] and len(lines) == 1 and lines[0].startswith("tether: "), (
        moment,
        code,
        told,
    )


@pytest.mark.parametrize(
    ("module", "number"),
    [
        ("typer", signal.SIGINT),
        ("tether.cli.prefs", signal.SIGTERM),
        pytest.param("rich", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("numpy._core._multiarray_umath", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("torch._C", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("torch._C", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("transformers", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("peft", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_signal_while_a_module_loads(path, tmp_path, module, number):
    words = [
        sys.executable,
        "-c",
        AT_AN_IMPORT,
        module,
        str(int(number)),
        "run",
        str(path),
        f"run={tmp_path}/run",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    check(done.returncode, done.stderr, number, module)
    assert not list(tmp_path.glob("**/.lock"))


BUSY = """
import torch
def busy(prompts, responses):
    numbers = torch.ones(200, 200)
    open("begun", "w").close()
    while True:
        numbers @ numbers
"""


@pytest.mark.parametrize("number", CODES)
def test_a_signal_while_a_judge_computes(tmp_path, number):
    """Python 3.11 to 3.13 unwind such a thread inside of torch, which aborts the program."""
    (tmp_path / "judges.py").write_text(BUSY)
    settings = {
        "run": "run",
        "model": {"source": "tiny"},
        "pairs": {
            "data": {"path": "tether:prompts", "limit": 2},
            "max_new_tokens": 2,
            "judge": {"call": "judges.py:busy"},
        },
    }
    text = "".join(f"{key} = {toml(value)}\n" for key, value in settings.items())
    (tmp_path / "recipe.toml").write_text(text)
    program = subprocess.Popen(
        [sys.executable, "-c", STARTED, "run", "recipe.toml"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    while not (tmp_path / "begun").exists() and program.poll() is None:
        time.sleep(0.02)
    time.sleep(0.1)
    program.send_signal(number)
    _, told = program.communicate(timeout=120)
    assert program.returncode == CODES[number], told
    assert told.rstrip().splitlines()[-1].startswith("tether: "), told


@pytest.mark.slow
@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize("command", ["run", "generate"])
def test_a_signal_at_twenty_moments(path, tmp_path, number, command):
    words = {
        "run": ["run", str(path), f"run={tmp_path}/run"],
        "generate": ["generate", "tiny", "Hello", "--max-new-tokens=20000"],
    }
    draw, codes = random.Random(int(number)), []
    for place in range(20):
        program = subprocess.Popen(
            [sys.executable, "-c", STARTED, *words[command]],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert program.stdout.readline() == "\n"
        time.sleep(0.1 + 6 * (place + draw.random()) / 20)
        program.send_signal(number)
        _, told = program.communicate(timeout=120)
        codes.append(program.returncode)
        if program.returncode:  # not done before
            check(program.returncode, told, number, place)
    assert codes.count(CODES[number]) > 5 and not list(tmp_path.glob("**/.lock"))
