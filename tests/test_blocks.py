"""The blocks of the documents: Python compiles, its names and keywords are tether's, whole programs
run; commands of a shell name programs, modules and files that are there; recipes have keys that
exist.
"""

import ast
import importlib
import importlib.util
import inspect
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from studies.overopt import OveroptConfig

from tether.core.errors import ConfigError
from tether.settings.reading import build
from tether.settings.recipe import recipe_type

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "AGENTS.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(
        p
        for p in (ROOT / "docs").rglob("*.md")
        if not {"lab", "decisions"} & {p.stem, p.parent.name}
    ),
]
SHELLS = ("sh", "bash", "shell", "console")
OWN = ("tether", "studies", "benchmarks", "tools", "labs")
FREE = {"argilla"}
"""Packages of others that a block may use without being installed here."""


def blocks_of(page, *languages):
    """(line, text) of each fenced block in one of these languages."""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
        if match[1] in languages:
            yield text.count("\n", 0, match.start()) + 2, match[2]


def cases(*languages):
    return [
        pytest.param(block, id=f"{page.relative_to(ROOT)}:{line}")
        for page in PAGES
        for line, block in blocks_of(page, *languages)
    ]


def imported(tree):
    """What a block's imports bring: objects of tether by the names that the block gives them."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] not in FREE:
                    importlib.import_module(alias.name)
                found[alias.asname or alias.name.split(".")[0]] = (
                    None if alias.name in FREE else importlib.import_module(alias.name)
                )
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"
                found[alias.asname or alias.name] = getattr(module, alias.name)
    return found


def resolved(node, names):
    """The object that `a` or `a.b.c` is; None where it is the block's own."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    outer = resolved(node.value, names) if isinstance(node, ast.Attribute) else None
    if inspect.ismodule(outer) or inspect.isclass(outer):
        assert hasattr(outer, node.attr), f"{ast.unparse(node)} does not exist"
        return getattr(outer, node.attr)
    return None


def faults_of(block):
    """Each call of the block that tether's signature refuses."""
    tree = ast.parse(block)
    names = imported(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or (called := resolved(node.func, names)) is None:
            continue
        if not getattr(called, "__module__", "").startswith(OWN):
            continue
        bound = [ast.unparse(one) for one in node.args if not isinstance(one, ast.Starred)]
        keywords = {key.arg: 0 for key in node.keywords if key.arg}
        try:
            inspect.signature(called).bind(*bound, **keywords)
        except TypeError as error:
            yield f"{ast.unparse(node.func)}: {error}"


@pytest.mark.parametrize("block", cases("python", "py"))
def test_a_python_block_names_what_exists(block):
    assert list(faults_of(block)) == []


def test_a_wrong_name_or_keyword_in_a_block_is_noticed():
    right = "import tether.core.types as t\nt.Sampling(16, 1.0)\n"
    assert list(faults_of(right)) == []
    assert list(faults_of(right.replace("1.0", "1.0, colour=1")))
    with pytest.raises(AssertionError):
        list(faults_of(right.replace("t.Sampling", "t.Samplings")))
    with pytest.raises(AssertionError):
        list(faults_of("from tether.core.types import Samplings\n"))
    assert len(cases("python", "py")) > 12


def test_the_votes_of_the_page_on_agreement_are_reported():
    (_, block), *_ = blocks_of(ROOT / "docs" / "trust" / "agreement.md", "python")
    vote = 'Vote.seen("pair-9", "bea", "tie", "first", at=2.0, seconds=9.0),'
    more = 'Vote.seen("pair-1", "bea", "right", "first", at=3.0, seconds=8.0),'
    space = {}
    exec(compile(block.replace("...,", vote + more), "agreement.md", "exec"), space)
    assert len(space["votes"]) == 3 and space["dawid_skene"](space["votes"]).labels


def test_the_curve_of_the_page_on_best_of_n_turns():
    """Proxy scores rise; gold falls where they are highest."""
    (_, block), *_ = blocks_of(ROOT / "docs" / "methods" / "best_of_n.md", "python")
    numpy = importlib.import_module("numpy")
    proxy = numpy.random.default_rng(1).normal(size=(40, 16))
    gold = proxy - 0.4 * proxy**2
    space = {"proxy": proxy.tolist(), "gold": gold.tolist()}
    exec(compile(block.replace("range(1000)", "range(5)"), "best_of_n.md", "exec"), space)
    assert len(space["peaks"]) == 5 and space["kls"][0] == 0


def test_the_reward_functions_of_the_pages_return_a_number_for_each_response():
    (_, block) = next(
        b for b in blocks_of(ROOT / "docs/guides/python.md", "python") if "theirs" in b[1]
    )
    space = {}
    exec(compile(block, "python.md", "exec"), space)
    assert space["theirs"](["yes, 4", "no"], answer=["4", "5"], other=[1, 2]) == [1.0, 0.0]
    prompts = [type("Prompt", (), {"row": {"answer": "4"}})] * 2
    assert space["mine"](prompts, ["4!", "no"]) == [1.0, 0.0]
    (_, block) = next(blocks_of(ROOT / "docs/trust/distrust.md", "python"))
    exec(compile(block, "distrust.md", "exec"), space)
    assert space["kindness"](["a", "b"], ["thank you, thanks", "no"]) == [2, 0]


def lines_of(block):
    """Words of each command of a block, without settings of the environment before it."""
    for line in re.sub(r" *\\\n *", " ", block).splitlines():
        for part in re.split(r" && ", re.sub(r"\s+#.*", "", line)):
            words = shlex.split(part)
            while words and re.match(r"\w+=", words[0]):
                words = words[1:]
            if words:
                yield words


PROGRAMS = {
    "tether",
    "python",
    "pip",
    "make",
    "source",
    "cp",
    "rm",
    "docker",
    "export",
    "git",
    "shuf",
}
"""Programs that documents may start. `tether`'s commands are parsed by tests/cli/test_documented.py,
those of `docker` by tests/test_containers.py.
"""


def shell_faults(block):
    for program, *words in lines_of(block):
        if program not in PROGRAMS:
            yield f"{program}: no program that the documents explain"
        elif program == "make" and not re.search(
            rf"^{words[0]}:",
            (ROOT / "Makefile").read_text(encoding="utf-8"),
            re.M,
        ):
            yield f"make has no target {words[0]}"
        elif program == "python" and words[0] == "-m":
            name = words[1]
            if name.split(".")[0] in OWN and importlib.util.find_spec(name) is None:
                yield f"no module {name}"
        elif program == "python" and not (ROOT / words[0]).is_file():
            yield f"no file {words[0]}"


@pytest.mark.parametrize("block", cases(*SHELLS))
def test_a_shell_block_starts_what_exists(block):
    assert list(shell_faults(block)) == []


def test_a_wrong_program_target_or_module_is_noticed():
    for line in ("tehter run x", "make tests", "python -m benchmarks.nowhere", "python labs/0.py"):
        assert list(shell_faults(f"A=1 {line}  # comment\n")), line
    assert not list(shell_faults("make test PYTEST_ARGS=-x && python -m studies.overopt a=1\n"))


@pytest.mark.parametrize("block", cases("toml"))
def test_a_recipe_of_a_page_has_keys_that_exist(block):
    """Parts of recipes: keys that are required may be missing; what is there must fit."""
    assert unknown_keys(block) == []


def unknown_keys(block):
    values = tomllib.loads(block)
    try:
        build(OveroptConfig if "proxies" in values else recipe_type(), values)
    except ConfigError as error:
        parts = re.split(r"; |\n  ", str(error).removeprefix("config: "))
        return [part for part in parts if part.startswith("unknown key") or "(got " in part]
    return []


def test_an_unknown_key_of_a_recipe_is_noticed():
    assert unknown_keys("[ppo]\nstep = 3\n") and not unknown_keys("[ppo]\nsteps = 3\n")
    assert unknown_keys("[ppo]\nsteps = 'many'\n") and len(cases("toml")) > 30
