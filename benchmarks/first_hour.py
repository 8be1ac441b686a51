"""`python -m benchmarks.first_hour [--only NAME ...] [--tiny] [--set-up]`: how long a newcomer
waits for the documents' examples.

The Python blocks of README.md and docs/guides/python.md that call tether, and README.md's recipe,
as their texts have them. Each runs in a process of its own whose output is a pipe, with the
packaged rows as the files that it names. Of each are measured its seconds, those to the first line,
and the longest silence between two lines. `--tiny` takes the random model instead of SmolLM2-135M.
`--set-up` also times a new environment as `make quickstart` makes it, which needs the network; a
wheel index for torch is in TORCH_INDEX. The last line is JSON.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/guides/python.md")
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
ROWS = ROOT / "src" / "tether" / "recipes" / "quickstart"
REWARD = (
    "def score(prompts, responses):\n    return [-abs(len(text.split()) - 12) for text in "
    "responses]\n"
)


class Example(NamedTuple):
    """A block of a page: `text` is a whole program, or a recipe."""

    name: str
    text: str
    is_recipe: bool


class Measured(NamedTuple):
    """What a process did; all times are in seconds."""

    code: int
    seconds: float
    first_line: float
    longest_silence: float
    output: str


def examples() -> Iterator[Example]:
    """Every block of the pages that runs a method; definitions of a page's earlier blocks stand
    before it.
    """
    for page in PAGES:
        text, before = (ROOT / page).read_text(encoding="utf-8"), ""
        for number, (language, block) in enumerate(
            re.findall(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S),
            1,
        ):
            name = f"{page}:{number}"
            if language == "toml":
                yield Example(name, block, is_recipe=True)
            elif language == "python":
                if re.search(r"\btether\.\w+\(", block):
                    call = "\ntrain()\n" if re.search(r"^def train\(", block, re.M) else ""
                    yield Example(name, before + block + call, is_recipe=False)
                before += _definitions(block)


def _definitions(block: str) -> str:
    """The imports and functions of a program."""
    parts = [
        node
        for node in ast.parse(block).body
        if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef)
    ]
    return "".join(ast.unparse(part) + "\n" for part in parts)


def prepare(folder: Path) -> None:
    """Write the files that the examples name: the quickstart's rows, and a reward."""
    rows = {name: _rows(name) for name in ("demonstrations", "comparisons", "prompts", "heldout")}
    for name, source in (("demonstrations", "demonstrations"), ("pairs", "comparisons")):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows[source]),
            encoding="utf-8",
        )
    for name, count in (("prompts", 200), ("heldout", 50)):
        lines = [" ".join(row["prompt"].split()) + "\n" for row in rows[name][:count]]
        (folder / f"{name}.txt").write_text("".join(lines), encoding="utf-8")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")


def _rows(name: str) -> list[dict[str, str]]:
    return [
        json.loads(line)
        for line in (ROWS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def run(example: Example, folder: Path, *, tiny: bool = False) -> Measured:
    """Run an example in `folder`, which `prepare` has filled."""
    text = example.text.replace(MODEL, "tiny") if tiny else example.text
    path = folder / ("mine.toml" if example.is_recipe else "mine.py")
    path.write_text(text, encoding="utf-8")
    command = (
        [sys.executable, "-m", "tether", "run", path.name]
        if example.is_recipe
        else [sys.executable, path.name]
    )
    return watched(command, folder)


def watched(command: Sequence[str], folder: Path) -> Measured:
    """Run a command without a terminal, and time its lines."""
    start = last = time.monotonic()
    first = silence = 0.0
    lines = []
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    where = {"cwd": folder, "env": environment, "text": True}
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **where,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            now = time.monotonic()
            first, silence, last = first or now - start, max(silence, now - last), now
            lines.append(line)
    end = time.monotonic()
    return Measured(
        process.returncode,
        end - start,
        first or end - start,
        max(silence, end - last),
        "".join(lines),
    )


def set_up(folder: Path) -> float:
    """The seconds of a new environment with tether and what it needs, as `make quickstart` makes it
    before it begins.
    """
    start, made = time.monotonic(), folder / "venv"
    make = ["make", f"VENV={made}", f"PYTHON={sys.executable}", f"{made}/.runs"]
    subprocess.run(make, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [example.name for example in examples()]
    parser.add_argument(
        "--only",
        nargs="+",
        choices=names,
        default=names,
        help=("examples, by page and number of the block"),
    )
    parser.add_argument("--tiny", action="store_true", help="the random model")
    parser.add_argument("--set-up", action="store_true", help="time a new environment too")
    chosen = parser.parse_args()
    result: dict[str, object] = {"model": "tiny" if chosen.tiny else MODEL, "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory() as name:
        if chosen.set_up:
            result["set_up_seconds"] = round(set_up(Path(name)), 1)
    for example in examples():
        if example.name in chosen.only:
            with tempfile.TemporaryDirectory() as name:
                prepare(Path(name))
                measured = run(example, Path(name), tiny=chosen.tiny)
            print(
                f"{example.name}: {measured.seconds:.0f} s, ended with {measured.code}",
                flush=True,
            )
            if measured.code:
                print(measured.output, file=sys.stderr)
            times = {
                key: round(value, 1)
                for key, value in measured._asdict().items()
                if isinstance(value, float)
            }
            result[example.name] = {"code": measured.code, **times}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
