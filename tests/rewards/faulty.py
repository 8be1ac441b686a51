"""Functions with faults, each as a reward and as a judge of a short run, and how such a run ends.

A program of its own, so that a hang or a kill costs one case: `python -m
tests.rewards.faulty FOLDER CASE ...` writes a line of JSON for each case.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

GOOD = "return [float(len(r)) for r in responses]"
HEAD = """import asyncio, itertools, os, random, signal, sys, time
import numpy as np
import torch
from tether.core.types import Score
class Cracked(Exception):
    def __str__(self): raise RuntimeError("no text")
    __repr__ = __str__
class Number:
    def __float__(self): raise KeyError("no number")
    def __repr__(self): raise RuntimeError("no text")
class Items(list):
    def __iter__(self): raise OSError("no items")
    def __len__(self): raise OSError("no length")
class Odd(BaseException): pass
"""
FAULTS = {
    "raises": "raise ValueError('no')",
    "exits": "sys.exit()",
    "raises beyond Exception": "raise Odd('no')",
    "raises an error without text": "raise Cracked()",
    "recurses": "return f(prompts, responses)",
    "hangs": "time.sleep(1e6)",
    "yields": "yield from (float(len(r)) for r in responses)",
    "yields, then raises": "yield 1.0\n    raise Cracked()",
    "yields without end": "yield from itertools.repeat(1.0)",
    "is a coroutine": GOOD,
    "is an asynchronous generator": "for r in responses: yield float(len(r))",
    "returns a huge integer": "return [10**400] * len(responses)",
    "returns objects without a number": "return [Number()] * len(responses)",
    "returns a list that cannot be read": "return Items([1.0] * len(responses))",
    "returns a dict": "return dict.fromkeys(responses, 1.0)",
    "returns text": "return '1' * len(responses)",
    "returns nothing": "return None",
    "returns too many": "return [1.0] * (len(responses) + 1)",
    "returns numbers at the end of float64": (
        "return [1e308 * (-1) ** n for n in range(len(responses))]"
    ),
    "returns a matrix": "return torch.ones(len(responses), 1)",
    "returns a tensor without values": "return torch.ones(len(responses), device='meta')",
    "returns scores with broken parts": (
        "return [Score(1.0, parts={'a': Number(), 3: 'x'})] * len(responses)"
    ),
    "exits on import": GOOD,
    "raises on import": GOOD,
    "changes torch": "torch.set_default_dtype(torch.float64); torch.manual_seed(0); "
    "torch.set_num_threads(7); torch.set_grad_enabled(False); " + GOOD,
    "changes torch on import": GOOD,
    "changes the process": "random.seed(0); np.random.seed(0); os.chdir('/'); "
    "sys.stdout = sys.stderr = None; " + GOOD,
    "changes signals on import": GOOD,
}
BEFORE = {
    "exits on import": "sys.exit()",
    "raises on import": "raise Cracked()",
    "changes torch on import": "torch.set_default_dtype(torch.float64); "
    "torch.set_grad_enabled(False); torch.set_num_threads(7)",
    "changes signals on import": "signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); os.chdir('/')",
}
"""Code of the module itself."""
USED = {name for name in FAULTS if name.startswith(("changes", "is a"))} | {"yields"}
"""The run ends as one with a function without a fault, to the bit."""
PLACES = ("reward", "held", "pairs", "verdict")
"""A reward; a judge of held-out prompts, of pairs, of the policies of a run."""
CASES = [f"reward: {name}" for name in FAULTS] + [
    (f"{PLACES[1 + n % 3]}: {name}") for n, name in enumerate(FAULTS)
]


def source(fault: str) -> str:
    """A module whose function `f` has a fault; "" has none."""
    kind = "async def" if fault.startswith("is a") else "def"
    return (
        f"{HEAD}{BEFORE.get(fault, '')}\n\n{kind} f(prompts, responses):\n    "
        f"{FAULTS.get(fault, GOOD)}\n"
    )


def recipe(folder: Path, place: str) -> str:
    """A run of a few seconds that calls `f` of mine.py in `folder`."""
    from tether.settings.judges import FunctionJudge

    limit = ", time_limit = 2.0" if "time_limit" in FunctionJudge.model_fields else ""
    call, data = f'call = "{folder}/mine.py:f"', f'data = {{ path = "{folder}/prompts.jsonl" }}'
    held = (
        f"evaluate = {{ prompts = 2, every = 1, temperatures = [], best_of = [], judge = {{ "
        f"{call}{limit} }} }}\n"
    )
    grpo = (
        f"[grpo]\n{data}\nsteps = 2\nprompts_per_step = 2\nsamples_per_prompt = 3\nmax_new_tokens "
        "= 4\ncheckpoint_every = 1\n"
        "optimizer = { learning_rate = 0.01 }\n"
        + ("" if place == "reward" else 'reward_source = "random"\n')
        + (held if place == "held" else "")
        + (f"function = {{ {call}, batch = 2, time_limit = 2.0 }}\n" if place == "reward" else "")
    )
    pairs = (
        f"[pairs]\n{data}\nsamples_per_prompt = 3\nmax_new_tokens = 4\njudge = {{ "
        f"{call}{limit} }}\n"
    )
    verdict = (
        f"[evaluate]\n{data}\nmax_new_tokens = 4\ntemperatures = []\njudge = {{ {call}{limit} }}\n"
    )
    head = f'run = "{folder}/run"\nseed = 1\n[model]\nsource = "tiny"\ndtype = "float32"\n'
    return head + (pairs if place == "pairs" else grpo + (verdict if place == "verdict" else ""))


def call(folder: Path) -> tuple[int, str]:
    """The exit code of `tether run` in this process, and what stands on the terminal; code -1 has a
    traceback.
    """
    from tether.cli import main

    written = io.StringIO()
    sys.argv = ["tether", "run", f"{folder}/recipe.toml"]
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0), _text(written)
        except BaseException:  # noqa: BLE001 - a command ends with SystemExit alone
            return -1, _text(written) + "\n" + traceback.format_exc(limit=-3)
    return 0, _text(written)


def _text(written: io.StringIO) -> str:
    return "(closed)" if written.closed else written.getvalue()


def numbers(folder: Path, place: str) -> Any:
    """The figures of a run that depend on its function; None where there is no result."""
    stage = {"reward": "grpo", "held": "grpo", "pairs": "pairs", "verdict": "evaluate"}[place]
    root = folder / "run" / stage
    if not (root / "summary.json").is_file():
        return None
    name = {
        "reward": "metrics.jsonl",
        "held": "heldout.jsonl",
        "pairs": "pairs.jsonl",
        "verdict": "answers.jsonl",
    }[place]
    rows = [json.loads(line) for line in (root / name).read_text(encoding="utf-8").splitlines()]
    return [
        {
            key: value
            for key, value in row.items()
            if not key.startswith(("time", "memory", "tokens_per"))
        }
        for row in rows
    ]


def run_case(folder: Path, case: str) -> dict[str, Any]:
    """One case: how the run ends, and whether the same command goes on when the function is
    mended.
    """
    place, _, fault = case.partition(": ")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "prompts.jsonl").write_text(
        "".join((f'{{"prompt": "question {n}"}}\n') for n in range(8)),
        encoding="utf-8",
    )
    (folder / "recipe.toml").write_text(recipe(folder, place), encoding="utf-8")
    (folder / "mine.py").write_text(source(fault), encoding="utf-8")
    code, text = call(folder)
    result = numbers(folder, place)
    outcome: dict[str, Any] = {"case": case, "code": code, "text": text[-1500:], "numbers": result}
    if result is None:
        (folder / "mine.py").write_text(source("") + "# mended\n", encoding="utf-8")
        outcome["again"], _ = call(folder)
    return outcome


def main() -> None:
    """Run the cases of the command line; the parent reads a line for each."""
    folder, *cases = sys.argv[1:]
    lines = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - stays when a function closes the terminal
    for number, case in enumerate(cases):
        print(json.dumps(run_case(Path(folder) / str(number), case)), file=lines, flush=True)


if __name__ == "__main__":
    main()
