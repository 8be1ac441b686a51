"""Texts of strangers reach the terminal as signs: in tables, errors, progress and warnings."""

import io
import json
import logging
import subprocess
import sys

import pytest
from rich.table import Table

from tether.cli.terminal.console import Terminal, log_to_terminal, print_error

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"


def acts(text):
    """True if a terminal would do something other than show letters; rich's own colours end on
    m.
    """
    import re

    bare = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return any(character in bare for character in "\x1b\x07\x9b\u202e\r")


@pytest.mark.parametrize("colour", [True, False])
def test_tables_markup_and_plain_texts_do_not_act(colour):
    out = io.StringIO()
    terminal = Terminal(file=out, force_terminal=colour, width=100)
    table = Table(title=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    terminal.print(table)
    terminal.print(f"[bold]{HOSTILE}[/]", HOSTILE)
    terminal.print({"key": HOSTILE})
    terminal.print("plain words stay\tas they are\nand lines, too", markup=False)
    assert not acts(out.getvalue())
    assert "owned" in out.getvalue() and "and lines, too" in out.getvalue()
    assert ("\x1b[1m" in out.getvalue()) is colour  # rich's own colours still act


def test_errors_and_warnings_do_not_act(capsys):
    print_error(f"no file {HOSTILE}")
    log_to_terminal()
    log = logging.getLogger("tether")
    logging.getLogger("tether.data").warning(
        "column %s, key %s",
        HOSTILE,
        "Authorization: Bearer abcdefghijklmnop",
    )
    for handler in [
        handler for handler in log.handlers if type(handler).__name__ == "_ToStandardError"
    ]:
        log.removeHandler(handler)
    shown = capsys.readouterr().err
    assert shown.count("owned") == 2 and not acts(shown)


def test_commands_show_hostile_rows_columns_and_paths_as_signs(tmp_path):
    path = tmp_path / "rows\x1b[2J.jsonl"
    row = {"prompt": HOSTILE + "q", "response": "a" + HOSTILE, f"extra{HOSTILE}": 1}
    path.write_text(json.dumps(row) + "\n" + json.dumps({HOSTILE: 1}), encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-m", "tether", "data", "inspect", str(path)],
        capture_output=True,
        text=True,
        check=False,
        encoding="utf-8",
    )
    assert run.returncode == 0, run.stderr
    assert not acts(run.stdout) and not acts(run.stderr)
    missing = subprocess.run(
        [sys.executable, "-m", "tether", "data", "inspect", f"{path}{HOSTILE}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert missing.returncode == 2 and not acts(missing.stderr) and "not found" in missing.stderr
