"""Every command line of the documentation is one that the program takes: its name, options and
number of arguments.
"""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from tether.cli import app

ROOT = Path(__file__).resolve().parents[2]
APART = ("lab.md",)
"""The lab book is of its own day."""
PAGES = [
    ROOT / "README.md",
    ROOT / "AGENTS.md",
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if p.name not in APART),
]
NUMBERS = {"N": "1", "S": "1"}
pytestmark = pytest.mark.audit


def lines_of(text):
    """(words, whole) of each command line in fences and in backticks; there a name, or one with
    options alone, is no call.
    """
    fenced = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.M | re.S)
    for line in re.sub(r" *\\\n *", " ", "\n".join(fenced)).splitlines():
        if re.match(r"\s*(\w+=\S+ +)*tether ", line):
            yield words(line), True
    for line in re.findall(
        r"`((?:\w+=\S+ +)*tether [^`]+)`",
        re.sub(r"^```.*?^```", "", text, flags=re.M | re.S),
    ):
        found = words(" ".join(line.split()))
        yield found, bool(re.search(r"^[^-]*[A-Z.=/\d]", " ".join(found).partition(" --")[0]))


def words(line):
    """What stands after `tether`, without comment, brackets of what is optional, dots for more,
    and the file that the shell writes.
    """
    line = re.sub(r" > \S+", "", line)
    line = re.sub(r"[\[\]]", "", line) if " [--" in line else line
    found = [NUMBERS.get(word, word) for word in shlex.split(line, comments=True)]
    return [word for word in found[found.index("tether") + 1 :] if word != "..."]


def parse(arguments, whole):
    """As the program would, up to where the command would be run."""
    command, context = get_command(app), None
    while hasattr(command, "commands"):
        if arguments[:1] in (["--help"], ["--install-completion"]):
            return
        context = command.make_context("tether", list(arguments), parent=context)
        if not (rest := [*context._protected_args, *context.args]):
            return
        _, command, arguments = command.resolve_command(context, rest)
    try:
        command.make_context("tether", list(arguments), parent=context)
    except Exception as error:
        if whole or not re.search("Missing", str(error)):
            raise


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_documented_commands_are_taken(page):
    wrong = []
    for arguments, whole in lines_of(page.read_text(encoding="utf-8")):
        try:
            parse(arguments, whole)
        except Exception as error:  # noqa: BLE001
            wrong.append(f"tether {' '.join(arguments)}: {error}")
    assert wrong == []


def test_the_parser_would_notice():
    calls = [call for page in PAGES for call in lines_of(page.read_text(encoding="utf-8"))]
    assert len(calls) > 80 and sum(whole for _, whole in calls) > 50
    for line in (
        "prefs escalate prefs.db",
        "prefs escalate prefs.db 7",
        "serve",
        "report",
        "generate tiny --promt x",
        "judge",
    ):
        with pytest.raises(Exception, match=r"Missing|less than|No such"):
            parse(line.split(), True)
