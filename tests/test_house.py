"""The house keeps its floors: who may import whom, what loads when, and how long a file may
grow.
"""

from __future__ import annotations

import ast
import json
import re
import resource
import subprocess
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

from benchmarks import house

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "src" / "tether"
SOURCES = sorted(PACKAGE.rglob("*.py"))

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
HELP_SECONDS = 0.5


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def loaded_by(statement: str) -> set[str]:
    """The top-level packages that a fresh interpreter has loaded after `statement`."""
    program = (
        "import sys, json, contextlib, io\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        f"    {statement}\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return set(json.loads(finished.stdout))


def lines_of_body(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """From its first statement to its last, a docstring apart: what is to be read, not its
    parameters."""
    body = function.body[ast.get_docstring(function) is not None :]
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    finished = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr


def circle(graph: grimp.ImportGraph) -> list[str]:
    """Modules of which each imports the next and the last the first; empty: there is none.

    Imports inside functions and under TYPE_CHECKING count.
    """
    needs = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = grimp.build_graph("tether", cache_dir=None, exclude_type_checking_imports=False)
    assert graph.direct_import_exists(
        importer="tether.cli.trained",
        imported="tether.runner.earlier",
    ), "an import inside a function counts"
    assert circle(graph) == []


def test_core_types_load_no_torch() -> None:
    heavy = {"torch", "transformers", "numpy"}
    assert heavy & loaded_by("import torch") == {"torch", "numpy"}, (
        "the probe itself must see what is loaded"
    )
    assert loaded_by("import tether.core.types") & heavy == set()


def test_settings_load_no_library_but_pydantic() -> None:
    modules = ", ".join(
        f"tether.settings.{path.stem}" for path in sorted((PACKAGE / "settings").glob("[a-z]*.py"))
    )
    heavy = {"torch", "transformers", "numpy", "scipy", "pyarrow", "datasets", "rich", "typer"}
    loaded = loaded_by(f"import {modules}")
    assert "pydantic" in loaded
    assert loaded & heavy == set()


def test_help_loads_neither_torch_nor_transformers() -> None:
    loaded = loaded_by("sys.argv = ['tether', '--help']; from tether.cli import main; main()")
    assert "tether" in loaded
    assert loaded & {"torch", "transformers"} == set()


def answered(command: list[str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What a command prints, three times within half a second of a processor, or within four times
    what the libraries of every command take there: other programs on the machine add to neither.
    """
    durations: list[list[float]] = [[], []]
    finished = subprocess.CompletedProcess([], 0)
    bare = [sys.executable, "-c", "import typer, rich.table, pydantic.main"]
    for _ in range(3):
        for words, seconds in zip((bare, command), durations, strict=True):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            finished = subprocess.run(
                words,
                capture_output=True,
                text=True,
                cwd=folder,
                check=False,
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    libraries, own = durations
    assert min(own) <= max(HELP_SECONDS, 4 * min(libraries)), (
        f"three answers took {own} s, and rich, typer and pydantic alone {libraries} s"
    )
    return finished


def test_help_answers_within_half_a_second() -> None:
    finished = answered([str(Path(sys.executable).with_name("tether")), "--help"])
    assert finished.returncode == 0, finished.stderr
    assert "Usage" in finished.stdout


def test_ppo_stage_loads_neither_ray_nor_vllm() -> None:
    loaded = loaded_by("import tether.stages.policy_gradient")
    assert "torch" in loaded
    assert loaded & {"ray", "vllm"} == set()


def test_a_recipe_is_read_without_torch() -> None:
    loaded = loaded_by("import tether.settings.recipe")
    assert "pydantic" in loaded
    assert loaded & {"torch", "numpy", "transformers", "peft", "scipy", "datasets"} == set()


FAULTY = """
import sys

sys.argv = ["tether", "run", "recipe.toml"]
from tether.cli import main

try:
    main()
finally:
    print("torch" in sys.modules, "numpy" in sys.modules)
"""


def test_a_typing_error_in_a_recipe_is_reported_within_half_a_second(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(
        'run = "run"\n[model]\nsource = "tiny"\n[ppo]\nclip_rnge = 0.2\ndata = { path = "." }\n',
    )
    finished = answered([sys.executable, "-c", FAULTY], tmp_path)
    assert finished.returncode == 2 and "did you mean" in finished.stderr, finished.stderr
    assert finished.stdout.split() == ["False", "False"]


def test_a_ppo_step_is_a_paragraph_in_eight_files() -> None:
    """`step` and `learn` together fit on a page, and CONTRIBUTING lists eight files that are
    there.
    """
    methods = {
        node.name: lines_of_body(node)
        for node in ast.walk(tree(PACKAGE / "stages" / "policy_gradient.py"))
        if isinstance(node, ast.FunctionDef)
    }
    assert methods["step"] + methods["learn"] <= 40
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    order = re.findall(
        r"^\d\. `(\S+)`:",
        text.split("## How a PPO step runs")[1].split("##")[0],
        re.MULTILINE,
    )
    assert len(order) == 8 and all((PACKAGE / name).is_file() for name in order)


def test_no_file_has_more_than_400_lines_of_code() -> None:
    lengths = {
        path.relative_to(PACKAGE).as_posix(): house.code_lines(path.read_text(encoding="utf-8"))
        for path in SOURCES
    }
    assert lengths, "no sources found"
    assert {name: n for name, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_no_function_is_longer_than_80_lines() -> None:
    long = [
        (
            f"{path.relative_to(REPOSITORY)}:{node.lineno} {node.name} has "
            f"{lines_of_body(node)} lines"
        )
        for path in SOURCES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and lines_of_body(node) > MAX_FUNCTION_LINES
    ]
    assert long == []


SAMPLE = '''"""A docstring
of two lines."""

import os  # a comment after code

# a comment alone
TEXT = """two
lines"""


class Thing:
    """A docstring."""

    size: dict = {}
    """How many there are."""

    def whole(self):
        """Whether a part is missing. Ask."""


def told(values):
    """What a caller gets."""
    found, other = getattr(values, "x", None), 1

    return [said for said in (found, other)]
'''


BY_KEYWORDS = ("settings", "stages", "runner", "cli/tools")
"""Rooms whose dataclasses of more than four fields are built by keywords alone."""


def test_large_dataclasses_are_built_by_keywords() -> None:
    classes = (
        (path, node)
        for room in BY_KEYWORDS
        for path in sorted((PACKAGE / room).rglob("*.py"))
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
        and sum(isinstance(statement, ast.AnnAssign) for statement in node.body) > 4
    )
    positional = [
        f"{path.relative_to(PACKAGE)}: {node.name}"
        for path, node in classes
        for words in map(ast.unparse, node.decorator_list)
        if "dataclass" in words and "kw_only=True" not in words
    ]
    assert positional == []


def test_lines_of_code_are_counted_without_comments_and_docstrings() -> None:
    """By hand: import, two of TEXT, class, size, two defs, the assignment, return."""
    assert house.code_lines(SAMPLE) == 9
    assert house.tokens("x = f(1)  # a comment\n") == 6
    assert list(house.public_names(ast.parse(SAMPLE))) == ["Thing", "told"]
    assert house.vague_locals(ast.parse(SAMPLE)) == 2  # found and said


def test_any_splats_and_fields_by_place_are_counted() -> None:
    source = (
        "from typing import Any\n"
        "x: dict[str, Any] = Thing(1, **f(**values), **more)\n"
        "y = replace(x, **values)\n"
        "@dataclass(frozen=True)\n"
        "class Five:\n    a: int\n    b: int\n    c: int\n    d: int\n    e: Any\n"
    )
    assert house.uses_of_any(ast.parse(source)) == 2
    assert list(house.splats(ast.parse(source), {"Thing"})) == ["Thing", "Thing", "replace"]
    assert list(house.by_place(ast.parse(source))) == ["Five"]
    keywords = source.replace("    e: Any", "    _: KW_ONLY\n    e: Any")
    assert list(house.by_place(ast.parse(keywords))) == []


def test_right_splats_are_there() -> None:
    """A line of the table that no call needs any more is taken out."""
    trees = {path: tree(path) for path in SOURCES}
    classes = {n.name for t in trees.values() for n in ast.walk(t) if isinstance(n, ast.ClassDef)}
    calls = {
        f"{path.relative_to(PACKAGE).as_posix()}: {name}"
        for path, source in trees.items()
        for name in house.splats(source, classes)
    }
    assert house.RIGHT_SPLATS.keys() <= calls


def test_the_house_does_not_grow() -> None:
    counts, ceilings = house.counts(), house.ceilings()
    assert counts.keys() == ceilings.keys()
    above = {
        name: (count, ceilings[name]) for name, count in counts.items() if count > ceilings[name]
    }
    assert not above, (
        "counted and allowed: make it smaller, or take out what it makes needless (python -m "
        "benchmarks.house)"
    )


def test_no_drawer_for_odds_and_ends() -> None:
    assert [
        path
        for path in SOURCES
        if path.stem in {"utils", "util", "helpers", "helper", "misc", "common"}
    ] == []


def test_every_marker_says_what_it_needs() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    markers = settings["tool"]["pytest"]["ini_options"]["markers"]
    assert {marker.partition(":")[0] for marker in markers} == {"slow", "gpu", "browser", "audit"}
    contributing = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for marker in markers:
        name, _, description = marker.partition(":")
        assert len(description.split()) >= 3, f"{name} has no description in pyproject.toml"
        assert f"`{name}`" in contributing, f"{name} is not explained in CONTRIBUTING.md"


def test_every_file_that_is_not_python_travels_in_the_package():
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    packed: set[Path] = set()
    for package, patterns in settings["tool"]["setuptools"]["package-data"].items():
        folder = PACKAGE.joinpath(*package.split(".")[1:])
        packed.update(path for pattern in patterns for path in folder.glob(pattern))
    files = {
        path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert files - packed - set(SOURCES) == set()


def test_every_room_has_a_floor():
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]
    floors = next(c for c in contracts["contracts"] if c["id"] == "floors")["layers"]
    named = [room for floor in floors for room in floor.split(" | ")]
    groups = {room.split(".")[1] for room in named if room.count(".") == 2}
    package = REPOSITORY / "src" / "tether"
    files = {path.parent.relative_to(package).parts for path in package.rglob("*.py")}
    rooms = {".".join(("tether", *parts[: 1 + (parts[0] in groups)])) for parts in files if parts}
    assert rooms - {f"tether.{group}" for group in groups} == {*named}
