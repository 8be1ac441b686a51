"""Every benchmark and every experiment starts and comes to its end, at sizes that measure nothing.

A file of `benchmarks` that can be started is a case here by itself: it is started with `--smoke`,
or with what SIZES says of it.
"""

import contextlib
import gzip
import json
import os
import re
import runpy
import sys

import pytest
from benchmarks.arena import Side, contest
from tests.conftest import REPOSITORY, installed

from tether.core.errors import TetherError

pytestmark = pytest.mark.audit
FOLDER = REPOSITORY / "benchmarks"
STARTED = [
    path
    for path in sorted(FOLDER.rglob("*.py"))
    if "__main__" in path.name or ('__name__ == "__main__"') in path.read_text()
]
SIDES = {path.stem for path in FOLDER.glob("*_side.py")}
NAMES = [
    ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts).removesuffix(".__main__")
    for path in STARTED
]
BENCHMARKS = [name for name in NAMES if name.split(".")[-1] not in SIDES]
TASKS = ("rollout-64", "rollout-256", "logprobs", "sft", "reward", "dpo", "grpo", "ppo")
EXPERIMENTS = ("inverted_u", "variance", "arithmetic", "best_of_n", "flipped", "rounds")
STAGES = (
    "sft",
    "reward",
    "process",
    "direct",
    "kto",
    "ppo",
    "grpo",
    "rloo",
    "reinforce",
    "best_of_n",
    "online_direct",
)
SIZES = {
    "benchmarks.annotation_load": [["--judgments", "12", "--people", "3", "--needed", "2"]],
    "benchmarks.preferences_load": [
        ["--judgments", "24", "--annotators", "4", "--needed", "2", "--processes", "2"],
    ],
    "benchmarks.flat": [["--steps", "12"]],
    "benchmarks.prm": [["--tiny", "--rows", "60"]],
    "benchmarks.fuzz": [
        ["--minutes", "0.1", "--target", "rows", "--target", "config", "--folder", "corpora"],
    ],
    "benchmarks.curves": [["run", "--output", "."]],
    "benchmarks.coverage": [["--draws", "20", "--only", "kappa", "--no-write"]],
    "benchmarks.record": [["--check"]],
    "benchmarks.prose": [[]],
    "benchmarks.manual": [[]],
    "benchmarks.first_hour": [["--tiny", "--only", "README.md:2"]],
    "benchmarks.planned": [["sft", "grpo", "--smoke"]],
    "benchmarks.defaults": [[stage, "--smoke"] for stage in STAGES],
    "benchmarks": [[task, "--smoke"] for task in TASKS],
    "benchmarks.learning": [[name, "--smoke"] for name in EXPERIMENTS],
}
LONG = (
    *(
        "benchmarks.survival --smoke",
        "benchmarks.kills --smoke",
        "benchmarks.overlap --smoke",
        "benchmarks.planned sft",
    ),
    *("benchmarks.served --smoke", "benchmarks.first_hour --tiny"),
    *(f"benchmarks {task}" for task in TASKS if task != "grpo"),
    *(f"benchmarks.learning {name}" for name in EXPERIMENTS),
    *(f"benchmarks.defaults {stage}" for stage in STAGES if stage not in ("sft", "grpo")),
    *(
        "benchmarks.scaling --smoke",
        "benchmarks.exported --smoke",
        "benchmarks.flat --steps",
        "benchmarks.house --smoke",
        "benchmarks.live --smoke",
        "benchmarks.loophole --smoke",
    ),
)
"""Those that take more than ten seconds, or do what another case does; the slow tests have them."""
CASES = {
    " ".join([name, *each[:1]]): (name, each)
    for name in BENCHMARKS
    for each in SIZES.get(name, [["--smoke"]])
}
NEEDS = {
    "benchmarks.annotation_load": "fastapi",
    "benchmarks.live": "fastapi",
    "benchmarks.preferences_load": "sqlmodel",
    "benchmarks.voting": "reasoning_gym",
}
NEEDS |= dict.fromkeys(
    ("benchmarks.curves", "benchmarks.scaling", "benchmarks.learning"),
    "matplotlib",
)


def started(name, *arguments):
    """What `python -m NAME ARGUMENTS` says, in this process; it must not fail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *arguments])
        for known in (name, f"{name}.__main__"):
            patch.delitem(sys.modules, known, raising=False)
        code = 0
        try:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code
        assert code in (None, 0), code


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A folder to work in with rows in the layout of every published data set that a benchmark
    reads, and a run for `curves`.
    """
    monkeypatch.setenv("TETHER_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("TETHER_PEERS", str(tmp_path / "peers"))
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join(
            [str(tmp_path / "stubs"), str(REPOSITORY), os.environ.get("PYTHONPATH", "")],
        ),
    )
    solution = ["Step 1. Two and two are four.", "Step 2. So four.", "# Final Answer 4"]
    errors = [
        {
            **{
                "idx": f"circular_prm_test_p{n}",
                "classification": "circular",
                "question": f"{n} + 2?",
                "original_question": f"{n} + 2?",
            },
            **{
                "original_process": solution,
                "modified_process": [*solution[:1], "Step 2. So five."],
                "error_steps": [2],
            },
            **{"modified_question": f"{n} + 2?", "modified_steps": [2], "ground_truth": "4"},
        }
        for n in range(30)
    ]
    annotators = {f"annotator{k}": 1 for k in (1, 2, 3)}
    judged = [
        {
            **{"instance_id": str(n), "model_a": "a", "model_b": "b"},
            "preference": p,
            "evaluator": e,
            "timestamp": f"2023-06-0{n + 1}",
        }
        for n in range(6)
        for p, e in (("a-is-better", "ann"), ("tie", "ben"))
    ]
    packed(tmp_path / "data" / "prmbench" / "step-errors.jsonl.gz", errors)
    packed(
        tmp_path / "data" / "pandalm" / "testset-v1.jsonl.gz",
        [{"idx": n, **annotators, "annotator1": n % 3} for n in range(12)],
    )
    packed(tmp_path / "data" / "open-instruct" / "human-eval.jsonl.gz", judged)
    rows = [
        {
            "step": n,
            "reward/proxy": 0.1 * n,
            "kl/policy_reference_k1": n,
            "accuracy": 0.5,
            "grad_norm": 1.0,
        }
        for n in range(4)
    ]
    for seed in (0, 1):
        for arm in ("ppo", "grpo", "rloo", "rejection", "dpo", "kto", "simpo"):
            folder = tmp_path / "run" / f"seed-{seed}" / "arms" / arm
            folder.mkdir(parents=True)
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run" / "summary.json").write_text(json.dumps({"seeds": {"0": {}, "1": {}}}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def packed(path, rows):
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


ATHERIS = '''
"""In atheris's place: reads the corpus once, and feeds every file of it."""
import contextlib, sys
from pathlib import Path

def instrument_imports(**_):
    return contextlib.nullcontext()

def Setup(argv, one):
    Setup.corpus, Setup.one = Path(argv[1]), one

def Fuzz():
    files = sorted(Setup.corpus.iterdir())[:20]
    for path in files:
        Setup.one(path.read_bytes())
    print(f"#{len(files)}\\tDONE   cov: 7 ft: 7", file=sys.stderr)

class FuzzedDataProvider:
    def __init__(self, data): self.data = list(data)
    def _next(self): return self.data.pop(0) if self.data else 0
    def ConsumeIntInRange(self, low, high): return low + self._next() % (high - low + 1)
    def ConsumeBool(self): return bool(self._next() % 2)
    def ConsumeUnicode(self, count): return chr(32 + self._next()) * min(2, count)
    def PickValueInList(self, values): return values[self._next() % len(values)]
'''


@pytest.fixture
def fuzzer(data, monkeypatch):
    """atheris where it is installed, else what stands in its place."""
    if installed("atheris"):
        yield
        return
    (data / "stubs").mkdir()
    (data / "stubs" / "atheris.py").write_text(ATHERIS)
    monkeypatch.syspath_prepend(str(data / "stubs"))
    yield
    sys.modules.pop("atheris", None)


@pytest.mark.parametrize("target", ["files", "rows", "importers", "config", "overrides"])
def test_what_is_fuzzed_takes_its_first_inputs(target, fuzzer, tmp_path):
    from benchmarks.fuzz import TARGETS, seeds_of

    run, taken = TARGETS[target](tmp_path), 0
    for seed in seeds_of(target)[:20]:
        with contextlib.suppress(TetherError):
            run(seed)
            taken += 1
    assert taken > 0


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param(*case, id=title, marks=[pytest.mark.slow] * (title in LONG))
        for title, case in CASES.items()
    ],
)
def test_a_benchmark_runs_to_its_end(name, arguments, data, fuzzer, capfd):
    if not installed(NEEDS.get(name, "json")):
        pytest.skip(f"{name} needs {NEEDS[name]}")
    before = kept()
    started(name, *arguments)
    assert kept() == before, "a smoke run keeps nothing"
    assert capfd.readouterr().out.strip() or name == "benchmarks.curves"
    if name == "benchmarks.curves":
        assert {path.name for path in data.glob("*.svg")} == {"sampled.svg", "direct_methods.svg"}
    if name == "benchmarks.fuzz":
        assert not list(data.glob("corpora/finding-*"))


def test_everything_that_a_benchmark_takes_by_name_is_tried():
    from benchmarks.__main__ import BENCHMARKS as TAKEN
    from benchmarks.defaults import STAGES as TRAINED
    from benchmarks.learning.__main__ import NAMES as LEARNT

    assert (tuple(TAKEN), LEARNT, tuple(TRAINED)) == (TASKS, EXPERIMENTS, STAGES) and set(
        SIZES,
    ) <= set(BENCHMARKS)
    named = {script for one in TAKEN.values() for _, script, _, _ in one.peers} | {"tether_side.py"}
    assert named == {f"{side}.py" for side in SIDES}


VLLM = '''
"""In vLLM's place: every prompt is followed by as many tokens as it must be."""
from types import SimpleNamespace

def SamplingParams(**options):
    return options

class LLM:
    def __init__(self, model, **options): pass
    def reset_prefix_cache(self): pass
    def generate(self, prompts, sampling, use_tqdm):
        tokens = [7] * sampling["max_tokens"]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)]) for _ in prompts]
'''


def test_the_side_of_vllm_answers_the_arena(tmp_path):
    (tmp_path / "vllm.py").write_text(VLLM)
    side = Side("vllm", "vllm_side.py", environment={"PYTHONPATH": str(tmp_path)})
    task = {
        "task": "rollout",
        "model": "none",
        "rows": [{"ids": [5, 6]}] * 3,
        "batch": 2,
        "tokens": 4,
    }
    found = contest([side], task, 1)["vllm"]
    assert len(found["rates"]) == 1 and found["rates"][0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("task", ["logprobs", "sft", "reward", "dpo", "grpo"])
def test_the_side_of_trl_answers_the_arena(task, data, capfd):
    """In this environment, which has the TRL that the peers' has."""
    if not installed("trl"):
        pytest.skip("TRL is not installed")
    peer = data / "peers" / "trl" / "bin" / "python"
    peer.parent.mkdir(parents=True)
    peer.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    peer.chmod(0o755)
    started("benchmarks", task, "--smoke")
    assert "| TRL 1.16" in capfd.readouterr().out


def commands():
    """The benchmarks that the documents tell people to start, with their arguments."""
    for path in (REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")):
        for code in re.findall(r"`([^`]+)`", path.read_text()):
            if found := re.match(r"python (?:-m )?(benchmarks\S*)(.*)", code.replace("\n", " ")):
                yield found[1].removesuffix(".py").replace("/", "."), found[2].split()


def test_what_the_documents_start_is_there_and_takes_those_options(capfd):
    wanted = {}
    for name, arguments in commands():
        wanted.setdefault(name, set()).update(
            word.strip("[],") for word in arguments if word.strip("[").startswith("--")
        )
    assert len(wanted) > 10 and set(wanted) <= set(BENCHMARKS)
    for name, options in wanted.items():
        started(name, "--help")
        assert options <= set(re.findall(r"--[\w-]+", capfd.readouterr().out)), name


def kept():
    """The files that benchmarks write when they measure, and when each was written."""
    files = [*(FOLDER / "results").glob("*"), *(REPOSITORY / "docs").rglob("*")]
    return {path: path.stat().st_mtime_ns for path in files if path.is_file()}
