"""What SECURITY.md promises: no code out of files, no secrets in runs, nothing a model wrote that
acts.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from tether.core.errors import DataError
from tether.core.visible import visible
from tether.settings.reading import build

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "tether"
SOURCES = sorted(PACKAGE.rglob("*.py"))
UNSAFE_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "marshal",
    "shelve",
    "joblib",
    "dill",
    "cloudpickle",
    "yaml",
    "dbm",
}
RUNS_ANSWERS = PACKAGE / "rewards" / "code.py"
"""The one file that evaluates text: in a guarded process (rewards.guard)."""


def violations(tree: ast.AST, may_evaluate: bool = False) -> list[str]:
    """Everything in a module that would let a file or a text run code."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found += [n.name for n in names if n.name.partition(".")[0] in UNSAFE_MODULES]
            case ast.ImportFrom(module=module, names=names):
                found += [str(module)] if (module or "").partition(".")[0] in UNSAFE_MODULES else []
                found += [
                    n.name
                    for n in names
                    if (module, n.name) in {("os", "system"), ("os", "popen"), ("torch", "load")}
                ]
            case ast.Call(func=ast.Name(id="eval" | "exec" | "__import__" as name)):
                found += [] if may_evaluate else [name]
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=owner), attr=name),
                keywords=keywords,
            ):
                if f"{owner}.{name}" in {
                    "torch.load",
                    "os.system",
                    "os.popen",
                    "yaml.load",
                    "pd.read_pickle",
                    "tarfile.open",
                }:
                    found.append(f"{owner}.{name}")
                found += _flags(keywords)
            case ast.Call(keywords=keywords):
                found += _flags(keywords)
    return found


def _flags(keywords: list[ast.keyword]) -> list[str]:
    bad = {"allow_pickle", "shell"}
    return [
        k.arg
        for k in keywords
        if k.arg in bad and not (isinstance(k.value, ast.Constant) and k.value.value is False)
    ]


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "import yaml",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "eval('1')",
        "exec('1')",
        "__import__('x')",
        "import subprocess\nsubprocess.run('x', shell=True)",
        "from subprocess import run\nrun('x', shell=flag)",
        "import os\nos.system('x')",
    ],
)
def test_the_search_itself_finds(source):
    assert len(violations(ast.parse(source))) == 1


def test_no_module_loads_what_can_run_code():
    found = {
        str(path.relative_to(PACKAGE)): bad
        for path in SOURCES
        if (bad := violations(ast.parse(path.read_text(encoding="utf-8")), path == RUNS_ANSWERS))
    }
    assert found == {}


def test_remote_code_is_off_unless_the_user_says_so():
    from tether.settings.model import ModelConfig

    assert build(ModelConfig, {"source": "owner/name"}).trust_remote_code is False
    for path in SOURCES:
        assert "trust_remote_code=True" not in path.read_text(encoding="utf-8"), path


# Chat templates are programs of a model's author


@pytest.fixture(scope="module")
def encoder():
    from tether.data.chat import ChatEncoder
    from tether.models.loading import load_model
    from tether.settings.model import ModelConfig

    loaded = load_model(ModelConfig(source="tiny", dtype="float32"))
    return lambda template: ChatEncoder(loaded.tokenizer, loaded.stop_ids, template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('touch {path}').read() }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{% set x = messages.append(1) %}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.getcwd() }}",
    ],
)
def test_a_hostile_chat_template_gets_nowhere(encoder, template, tmp_path):
    from tether.core.types import user

    trace = tmp_path / "trace"
    with pytest.raises(DataError, match="the chat template refuses this conversation"):
        encoder(template.replace("{path}", str(trace))).prompt((user("hello"),))
    assert not trace.exists()


def test_hidden_attributes_are_empty_in_a_template(encoder):
    from tether.core.types import user

    asked = "{{ messages[0].content }}"
    shown, plain = asked + "a{{ (messages|attr('__class__'))|attr('__mro__') }}b", asked + "ab"
    assert encoder(shown).prompt((user("hello"),)) == encoder(plain).prompt((user("hello"),))


# Terminals


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;owned\x07\x1b[2J", "␛]0;owned␇␛[2J"),
        ("\x9b31m\x7f\x00", "\ufffd31m␡␀"),
        ("a\rb\r\nc\td\n", "a␍b\nc\td\n"),
        ("abc\u202egpj.exe\u2066x\u200f", "abc\ufffdgpj.exe\ufffdx\ufffd"),
        ("half \ud800", "half \ufffd"),
        ("naïve 漢字 🙂 עברית \u200d", "naïve 漢字 🙂 עברית \u200d"),
    ],
)
def test_no_text_acts_on_a_terminal(text, shown):
    assert visible(text) == shown
    assert visible(visible(text)) == shown
    visible(text).encode("utf-8")


def test_lines_of_commands_do_not_act_either(capsys):
    from tether.cli.terminal.console import print_line

    print_line("\x1b[31mred/report.html")
    print_line("\x1b]0;title\x07", err=True)
    assert tuple(capsys.readouterr()) == ("␛[31mred/report.html\n", "␛]0;title␇\n")


def test_commands_write_by_the_terminals_functions_alone():
    """The others write colours of their own, a packaged recipe as it is, or what has no text."""
    direct = re.compile(
        r"\becho\(|(?<![\w.])print\(|sys\.std(?:out|err)\.write\(",
    )
    writing = {
        path.relative_to(PACKAGE).as_posix(): len(direct.findall(path.read_text(encoding="utf-8")))
        for room in ("cli",)
        for path in (PACKAGE / room).rglob("*.py")
    }
    assert {name: count for name, count in writing.items() if count} == {
        "cli/__init__.py": 1,
        "cli/recipes.py": 1,
        "cli/terminal/console.py": 3,
        "cli/tools/machine.py": 1,
    }


# Secrets

PLANTED = {
    "HF_TOKEN": "Zq7hubtokenvalue",
    "OPENAI_API_KEY": "Zq7openaikeyvalue",
    "DATABASE_URL": "postgresql://anna:Zq7pgpassword@127.0.0.1:1/prefs",
}
REWARD = """
import os
def reward(prompts, responses):
    if responses[0] < "m":
        raise ValueError(f"401 from http://127.0.0.1:1/v1?api_key=Zq7querykey with {os.environ['OPENAI_API_KEY']}")
    return [float(len(r)) for r in responses]
"""


def test_no_secret_is_in_any_file_of_a_finished_run(tmp_path, monkeypatch):
    from tether.runner.run import run_recipe
    from tether.settings.recipe import Recipe
    from tether.watch.report.page import write_report

    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    told = [
        "server.url=http://127.0.0.1:1/v1?api_key=Zq7querykey",
        "store=" + PLANTED["DATABASE_URL"],
        "--api-key",
        "Zq7option",
    ]
    monkeypatch.setattr(
        sys,
        "argv",
        ["tether", "grpo", "mine.toml", f"hub_token={PLANTED['HF_TOKEN']}", *told],
    )
    (tmp_path / "mine.py").write_text(REWARD)
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "p{n}"}}\n' for n in range(8)))
    section = {
        **{
            "data": {"path": str(tmp_path / "prompts.jsonl")},
            "steps": 3,
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
        },
        **{
            "max_new_tokens": 6,
            "reward_source": "function",
            "max_failed": 0.99,
            "optimizer": {"learning_rate": 1e-3},
        },
        "function": {"call": f"{tmp_path}/mine.py:reward", "batch": 2},
    }
    model = {"source": "tiny", "dtype": "float32"}
    recipe = build(Recipe, {"run": str(tmp_path / "run"), "model": model, "grpo": section})
    summary = run_recipe(recipe, ["grpo"])["grpo"]
    assert any("***" in reason for reason in summary["failed_rewards_by_reason"]), (
        "the planted error was met"
    )
    write_report(tmp_path / "run" / "grpo")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"config.json", "manifest.json", "summary.json", "metrics.jsonl", "report.html"} <= {
        path.name for path in files
    }
    assert [str(path) for path in files if b"Zq7" in path.read_bytes()] == []
