"""Every line that a command prints to run next is taken by tether: the commands of a table are run on
the tiny model, and what they print is run, too.
"""

import json
import re
import shlex

import pytest
from tests.cli.test_commands import tether
from tests.cli.test_documented import parse

from tether.cli import GROUPS

PAIRS = [{"prompt": f"What is {i}?", "chosen": "aaa eee", "rejected": "xxx zzz"} for i in range(12)]
RUN = "runs/a b"
TABLE = {
    "sft": [("sft", "tiny", "demonstrations.jsonl", "--run", RUN)],
    "people": [
        ("prefs", "import", "my votes.db", "pairs.jsonl"),
        ("prefs", "stats", "my votes.db"),
        ("prefs", "invite", "my votes.db", "ann"),
        ("prefs", "serve", "my votes.db"),
        ("prefs", "stats", "none.db"),
    ],
    "faults": [
        ("lab",),
        ("watch", "runs"),
        ("run", "r.yml"),
        ("ipo", "r.toml", "direct.loss=dpo"),
        ("explain", "zzzzzz"),
        ("evaluate", "--suite", "zzz", "tiny"),
        ("chat", "runs/none"),
    ],
}
"""Commands, some of them refused, whose outputs name others; in the order in which they are run."""
TRAINING = ("sft",)
"""Groups that train."""
FILL = {
    "FILES": "pairs.jsonl",
    "FILE": "pairs.jsonl",
    "RECIPE": "r.toml",
    "RUN": RUN,
    "FOLDER": "exported",
    "NAME": "sft",
    "ROWS": "demonstrations.jsonl",
}
"""What a reader fills in."""
TINY = ["model.source=tiny", "model.fallback="]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("next lines")
    rows = [{"prompt": row["prompt"], "response": row["chosen"]} for row in PAIRS]
    for name, lines in (("pairs", PAIRS), ("demonstrations", rows)):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    (place / "r.yml").write_text("run: runs/r\n")
    (place / "r.toml").write_text(
        'run = "runs/my r"\nmodel = { source = "tiny" }\n[direct]\ndata = { path = "pairs.jsonl" }\n',
    )
    return place


@pytest.fixture(autouse=True)
def servers(monkeypatch):
    """A server starts and ends at once."""
    monkeypatch.setattr("tether.people.annotation.server.app.run_server", lambda *_: None)
    monkeypatch.setattr("tether.watch.live.server.serve_board", lambda *_: None)


def lines_in(text):
    """The commands that a text names: in backticks, behind a colon, or on lines of their own."""
    text = re.sub(r"(?m)^[│╭╰ ─╮╯]*│|│$", "", text)
    found = re.findall(r"`(tether [^`]+)`", text)
    found += re.findall(r"(?m)(?:^  |: |   )(tether .+?)(?:  |$)", text)
    return [line.rstrip(".") for line in dict.fromkeys(found) if " | " not in line]


def taken(line, folder):
    """Run a printed line: whether tether takes it, and what it said."""
    words = [FILL.get(word, word) for word in shlex.split(line)[1:]]
    if words[0] == "lab":
        parse(words, True)
        return True, ""
    grouped = words[0] in GROUPS and len(words) == 2
    if len(words) == 1 or grouped or words == ["run", "loop"]:
        words.append("--help")
    if words[0] == "new":
        words.append(f"{len(list(folder.iterdir()))}.toml")
    if words[0] == "export" and len(words) == 3:
        words[-1] += str(len(list(folder.iterdir())))
    if words[0] in ("run", "plan") and words[1] not in ("loop", "r.toml"):
        words += [*TINY, *["--dry-run"] * (words[0] == "run")]
    done = tether(*words, cwd=folder, stdin="Hello.\n\n" if words[0] == "chat" else "")
    found = words[0] == "doctor" and not done.stderr
    return done.returncode == 0 or found, done.stderr[-400:]


@pytest.mark.parametrize(
    "group",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in TRAINING)) for name in TABLE],
)
def test_what_is_printed_is_taken(folder, group):
    said = [tether(*words, cwd=folder) for words in TABLE[group]]
    lines = dict.fromkeys(line for one in said for line in lines_in(one.stdout + one.stderr))
    assert lines
    refused = {line: why for line in lines for good, why in [taken(line, folder)] if not good}
    assert not refused
