"""Every benchmark and every experiment starts and comes to its end, at sizes that measure nothing.

A file of `benchmarks` that can be started is a case here by itself: it is started with `--smoke`,
or with what SIZES says of it.
"""

import logging
import os
import re
import runpy
import sys

import pytest
from benchmarks.arena import Side, contest
from tests.conftest import REPOSITORY, installed

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
EXPERIMENTS = ("inverted_u", "variance", "arithmetic")
SIZES = {
    "benchmarks.coverage": [["--draws", "20", "--only", "kappa", "--no-write"]],
    "benchmarks": [[task, "--smoke"] for task in TASKS],
    "benchmarks.learning": [[name, "--smoke"] for name in EXPERIMENTS],
}
LONG = (
    "benchmarks.chaos --smoke",
    "benchmarks.distill --smoke",
    "benchmarks.distill_beside --smoke",
    "benchmarks.games --smoke",
    "benchmarks.house --smoke",
    "benchmarks.tools --smoke",
    "benchmarks.turns_beside --smoke",
    *(f"benchmarks {task}" for task in TASKS if task != "grpo"),
    *(f"benchmarks.learning {name}" for name in EXPERIMENTS),
)
"""Those that take more than ten seconds, or do what another case does; the slow tests have them."""
CASES = {
    " ".join([name, *each[:1]]): (name, each)
    for name in BENCHMARKS
    for each in SIZES.get(name, [["--smoke"]])
}
NEEDS = {"benchmarks.learning": "matplotlib"}


def started(name, *arguments):
    """What `python -m NAME ARGUMENTS` says, in this process; it must not fail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *arguments])
        patch.setattr(logging.root.manager, "disable", 0)  # a program may silence its process
        for known in (name, f"{name}.__main__"):
            patch.delitem(sys.modules, known, raising=False)
        code = 0
        try:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code
        assert code in (None, 0), code


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder to work in, without published data and without peers."""
    monkeypatch.setenv("TETHER_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("TETHER_PEERS", str(tmp_path / "peers"))
    others = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), others]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param(*case, id=title, marks=[pytest.mark.slow] * (title in LONG))
        for title, case in CASES.items()
    ],
)
@pytest.mark.usefixtures("workplace")
def test_a_benchmark_runs_to_its_end(name, arguments, capfd):
    if not installed(NEEDS.get(name, "json")):
        pytest.skip(f"{name} needs {NEEDS[name]}")
    before = kept()
    started(name, *arguments)
    assert kept() == before, "a smoke run keeps nothing"
    assert capfd.readouterr().out.strip()


def test_everything_that_a_benchmark_takes_by_name_is_tried():
    from benchmarks.__main__ import BENCHMARKS as TAKEN
    from benchmarks.learning.__main__ import NAMES as LEARNT

    assert (tuple(TAKEN), LEARNT) == (TASKS, EXPERIMENTS) and set(SIZES) <= set(BENCHMARKS)
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
def test_the_side_of_trl_answers_the_arena(task, workplace, capfd):
    """In this environment, which has the TRL that the peers' has."""
    peer = workplace / "peers" / "trl" / "bin" / "python"
    peer.parent.mkdir(parents=True)
    peer.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    peer.chmod(0o755)
    started("benchmarks", task, "--smoke")
    assert "| TRL 1.16" in capfd.readouterr().out


def commands():
    """The benchmarks that the documents tell people to start, with their arguments.

    The lab book and the decisions are records of their day.
    """
    pages = {REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")}
    pages -= {REPOSITORY / "docs" / "lab.md", *(REPOSITORY / "docs" / "decisions").glob("*.md")}
    for path in sorted(pages):
        for code in re.findall(r"`([^`]+)`", path.read_text()):
            if found := re.match(r"python -m (benchmarks\S*)(.*)", code.replace("\n", " ")):
                yield found[1], found[2].split()


def test_benchmarks_of_the_documents_exist_and_take_the_named_options(capfd):
    wanted = {}
    for name, arguments in commands():
        wanted.setdefault(name, set()).update(
            word.strip("[],") for word in arguments if word.strip("[").startswith("--")
        )
    assert len(wanted) > 1 and set(wanted) <= set(BENCHMARKS)
    for name, options in wanted.items():
        started(name, "--help")
        assert options <= set(re.findall(r"--[\w-]+", capfd.readouterr().out)), name


def kept():
    """The files that benchmarks write when they measure, and when each was written."""
    files = [*(FOLDER / "results").glob("*"), *(REPOSITORY / "docs").rglob("*")]
    return {path: path.stat().st_mtime_ns for path in files if path.is_file()}
