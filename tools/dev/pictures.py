"""`python -m tools.dev.pictures`: the pictures of the guides, from real runs on the tiny model.

A run in a pretended terminal, whose screen becomes an SVG, a sweep and a lab. A Chromium
photographs the report of the run, the pages of the sweep and of the lab, the dashboard, and the
page on which people judge. The pictures are written into docs/guides. Nothing of use is learned in
these runs; the pages are those of any run. `--smoke` draws the terminal of `tether --version`, and writes no file.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterable
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from tests.people.annotation.server.test_serve import serving
from tests.watch.live.measured import browsed, enter, served

from tether.people.annotation.store import Store

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "guides"
COLUMNS, ROWS = 118, 40
"""Of the pretended terminal."""
MOST_BYTES = 150_000
"""Of a picture."""
SHOT_AT = "ppo"
"""The stage in whose middle the screen is drawn."""
RUN = ["ppo.steps=12", "ppo.sample_rows=16", "pairs.data.limit=64"]
SWEEP = ["ppo.kl.coefficient=0.01,1.0", "ppo.steps=6", "ppo.sample_rows=16"]
LAB = "17_two_peaks"
PAIR = {
    "prompt": "My bread never rises. What am I doing wrong?",
    "chosen": "Check the yeast first: stir it into warm water with a little sugar. If there is no foam "
    "after ten minutes, it is dead. Then give the dough a warm place, and time to double.",
    "rejected": "Bread is a food with a long history, and there are many reasons why it may not rise. "
    "Baking is a science and an art, and practice makes perfect!",
}
"""Two answers that a person compares."""
SIZE = {"width": 1000, "height": 600}
"""Of a window."""
SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; white-space: pre; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""Of a terminal, with the fonts of the reader's machine."""


def tether(*words: str) -> list[str]:
    """A command of tether in this Python."""
    return [sys.executable, "-m", "tether", *words]


def screens(command: list[str], folder: Path) -> Iterable[str]:
    """What a command has written into a terminal, after each piece of its output.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    with subprocess.Popen(
        command,
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
    ) as process:
        os.close(theirs)
        written = b""
        while piece := _read(ours):
            written += piece
            yield written.decode("utf-8", "ignore")
    os.close(ours)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, written)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:
        # the other end was closed
        return b""


def lines_of(written: str) -> list[str]:
    """The lines on a screen after so much output, each with its codes of colour.

    Programs that redraw whole lines are understood: upwards, line erased, start of the line.
    """
    lines, row = [""], 0
    for piece in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if piece == "\n":
            row += 1
            lines += [""] * (row - len(lines) + 1)
        elif piece == "\r":
            continue
        elif up := re.fullmatch(r"\x1b\[(\d*)A", piece):
            row = max(0, row - int(up[1] or 1))
        elif re.fullmatch(r"\x1b\[[012]?K", piece):
            lines[row] = ""
        elif not piece.startswith("\x1b") or piece.endswith("m"):
            lines[row] += piece
    return lines


def drawn(lines: Iterable[str], title: str) -> str:
    """A terminal's lines as an SVG."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    for line in lines:
        console.print(Text.from_ansi(line), no_wrap=True, crop=True)
    return console.export_svg(title=title, code_format=SVG, unique_id="terminal")


def run_in_terminal(folder: Path) -> str:
    """Make the run, and draw its screen in the middle of its PPO."""
    words = ["run", "smoke", "run=runs/smoke", *RUN]
    middle = ""
    for written in screens(tether(*words), folder):
        if re.search(rf"{SHOT_AT}\b.* [678]/12", written) and not middle:
            middle = written
    return drawn([f"$ tether {' '.join(words)}", *lines_of(middle)], "tether run")


def photographs(chromium: str, runs: Path) -> dict[str, bytes]:
    """The pages of the runs as PNG pictures, by name."""
    with browsed(chromium) as browser:
        made = {
            "run_page.png": _photograph(browser, runs / "smoke" / "report.html", "#at-verdict"),
            "sweep_page.png": _photograph(browser, runs / "sweep" / "report.html", "body"),
        }
        with served(runs) as (board, address):
            while not board.tick:
                time.sleep(0.1)
            page = enter(browser, address, viewport={**SIZE, "height": 800})
            page.wait_for_selector("body[data-points]", state="attached")
            page.wait_for_timeout(1000)
            made["dashboard_page.png"] = page.screenshot()
        made["lab_page.png"] = _photograph(browser, runs / "labs" / f"{LAB}.html", "body")
        made["judge_page.png"] = _judging(browser, runs / "prefs.db")
    return made


def _judging(browser: Any, path: Path) -> bytes:
    """The page on which a person compares two answers."""
    store = Store(path)
    with serving(path) as (address, _, _):
        page = browser.new_context(viewport=SIZE).new_page()
        page.goto(f"{address}/join#{store.invite('Ada', 'annotator')}")
        page.wait_for_url("**/judge")
        page.wait_for_timeout(500)
        picture = page.screenshot()
    store.close()
    return picture


def _photograph(browser: Any, file: Path, first: str) -> bytes:
    """A page from its first element of a kind on."""
    page = browser.new_context(viewport=SIZE).new_page()
    page.goto(file.resolve().as_uri())
    page.wait_for_timeout(1000)
    page.evaluate("(first) => document.querySelector(first).scrollIntoView()", first)
    page.wait_for_timeout(500)
    return page.screenshot()


def make(chromium: str, target: Path, folder: Path) -> None:
    """Make the runs that `folder` lacks, and write their pictures into `target`.

    Raises:
        ValueError: a picture is too large.
    """
    pictures = {}
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "runs" / "smoke").exists():
        pictures["terminal.svg"] = run_in_terminal(folder).encode()
    if not (folder / "runs" / "sweep").exists():
        subprocess.run(tether("sweep", "smoke", "run=runs/sweep", *SWEEP), cwd=folder, check=True)
    if not (folder / "runs" / "labs").exists():
        subprocess.run(tether("lab", LAB), cwd=folder, check=True)
    if not (folder / "runs" / "prefs.db").exists():
        (folder / "pairs.jsonl").write_text(f"{json.dumps(PAIR)}\n", encoding="utf-8")
        asking = tether("prefs", "import", "runs/prefs.db", "pairs.jsonl", "--ask", "1")
        subprocess.run(asking, cwd=folder, check=True)
    pictures |= photographs(chromium, folder / "runs")
    for name, picture in pictures.items():
        if len(picture) > MOST_BYTES:
            raise ValueError(f"{name} has {len(picture):,} bytes, more than {MOST_BYTES:,}")
        (target / name).write_bytes(picture)
        print(f"{target / name}: {len(picture):,} bytes")


def main() -> None:
    """Write the pictures of the guides."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chromium", default=shutil.which("chromium") or "", help="its path")
    parser.add_argument("--into", type=Path, default=GUIDES, help="the folder of the pictures")
    parser.add_argument("--keep", type=Path, help="a folder for the runs; those in it are used")
    parser.add_argument("--smoke", action="store_true", help="a terminal alone, and no file")
    words = parser.parse_args()
    if words.smoke:
        *_, written = screens(tether("--version"), Path.cwd())
        print(f"{len(drawn(lines_of(written), 'tether')):,} characters")
        return
    if not words.chromium:
        raise SystemExit("The pictures need Chromium. Name it by --chromium PATH.")
    with tempfile.TemporaryDirectory() as folder:
        make(words.chromium, words.into, words.keep or Path(folder))


if __name__ == "__main__":
    main()
