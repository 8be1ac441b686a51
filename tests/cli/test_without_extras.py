"""tether without its optional packages: pipelines run, and what needs a package names its extra."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

LOCKS = Path(__file__).resolve().parents[2] / "locks"
PROGRAM = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        absent = name.partition(".")[0] in ABSENT
        return None if absent else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
from tether.cli import main
main()
"""
OTHERS = {"sympy", "mpmath", "mdurl", "markdown_it_py", "rich", "pygments"}
"""Packages of an extra that torch or rich brings as well."""


def names(lock):
    text = (LOCKS / f"{lock}.txt").read_text()
    return {name.replace("-", "_").lower() for name in re.findall(r"^([\w.-]+)==", text, re.M)}


def tether(*words, folder):
    extras = ("preferences", "dashboard", "verify", "quantize", "scale")
    absent = set().union(*map(names, extras)) - names("tether") - OTHERS
    assert {"sqlmodel", "sqlalchemy", "fastapi", "reasoning_gym", "ray"} <= absent
    program = f"ABSENT = {absent!r}\n{PROGRAM}"
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def test_the_quickstart_is_checked_without_an_extra(tmp_path):
    code, text = tether("run", "smoke", "--dry-run", folder=tmp_path)
    assert code == 0, text


@pytest.mark.slow
def test_the_smoke_run_ends_without_an_extra(tmp_path):
    code, text = tether("quickstart", "--smoke", folder=tmp_path)
    assert code == 0, text
    assert list(tmp_path.rglob("report.html"))


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["prefs", "import", "new.db", "pairs.jsonl"], "preferences"),
        (["prefs", "stats", "old.db"], "preferences"),
        (["prefs", "serve", "old.db"], "preferences"),
        (["dashboard", "."], "dashboard"),
        (["run", "people.toml"], "preferences"),
        (["run", "sums", "model.source=tiny", "model.fallback="], "verify"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_a_command_that_needs_an_extra_names_it_in_one_sentence(words, extra, tmp_path):
    (tmp_path / "old.db").write_bytes(b"")
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    (tmp_path / "people.toml").write_text(
        """run = "r"
model = { source = "tiny" }
[pairs]
data = { path = "tether:prompts" }
judge = "people"
store = "new.db"
""",
    )
    code, text = tether(*words, folder=tmp_path)
    assert (code, "Traceback" in text) == (2, False), text
    assert f"pip install 'tether-rlhf[{extra}]'" in text
