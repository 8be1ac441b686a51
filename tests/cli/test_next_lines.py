"""Every line that a command prints to be run next is taken by tether: the commands of a table are
run on the tiny model, and each line that they print is run as it stands, in its turn.
"""

import json
import re
import shlex
from collections import deque

import pytest
from tests.cli.test_commands import tether
from tests.cli.test_documented import parse

from tether.cli import GROUPS
from tether.core.command import command_line
from tether.core.requests import Request, leave_request

RUN = "runs/a b"
RECIPES = {
    "whole": f"""run = "{RUN}"
        model = {{ source = "tiny", dtype = "float32" }}
        [sft]
        data = {{ path = "demonstrations.jsonl" }}
        epochs = 1
        [pairs]
        data = {{ path = "prompts.txt" }}
        judge = {{ call = "judge.py:score" }}
        max_new_tokens = 8
        samples_per_prompt = 2
        [reward]
        [ppo]
        data = {{ path = "prompts.txt" }}
        steps = 1
        prompts_per_step = 2
        samples_per_prompt = 2
        max_new_tokens = 8""",
    "my pairs": """run = "runs/my pairs"
        model = { source = "tiny" }
        [direct]
        loss = "dpo"
        data = { path = "pairs.jsonl" }""",
    "known": f"""run = "{RUN}"
        model = {{ source = "tiny" }}
        [direct]
        data = {{ path = "pairs.jsonl" }}""",
    "long": """run = "runs/long one"
        model = { source = "tiny" }
        [sft]
        data = { path = "demonstrations.jsonl" }
        batch_size = 4
        epochs = 2""",
    "people": """run = "runs/people"
        model = { source = "tiny" }
        [pairs]
        data = { path = "prompts.txt" }
        max_new_tokens = 8
        judge = "people"
        store = "our votes.db" """,
}
TABLE = [
    "run whole.toml sft",
    "run whole.toml",
    f"dpo '{RUN}' pairs.jsonl",
    "run long.toml",
    "run people.toml",
    "doctor known.toml",
    "ipo 'my pairs.toml' direct.loss=dpo",
    "run 'my pairs.toml' direct.zzz=1",
    "sft whole.toml --recipe sft.toml",
    "new dpo 'my dpo.toml'",
    "new grpo",
    "kto tiny pairs.jsonl --recipe 'of pairs.toml'",
    "recipes",
    "recipes lora-7b-24gb",
    "recipes cluster-70b",
    "lab",
    "prefs import 'my votes.db' pairs.jsonl",
    "prefs stats 'my votes.db'",
    "prefs invite 'my votes.db' ann",
    "prefs serve 'my votes.db'",
    "prefs export 'my votes.db' labels.jsonl --unfinished",
    "prefs stats none.db",
    "prefs import other.db answers.jsonl --labels ann",
    "watch runs",
    "run r.yml",
    "run tiny",
    "explain zzzzzz",
    "explain push_to_hub",
    "explain out of memory",
    "inspect pairs.jsonl",
    "agree 'my votes.db'",
    "train",
    "annotate",
    "init",
    "keys",
    "report none",
    "evaluate --suite zzz tiny",
    "chat runs/none",
]
"""Commands, some of them refused, whose outputs name others; in the order in which they are run."""
FILL = {
    "FILES": "pairs.jsonl",
    "FILE": "pairs.jsonl",
    "ROWS": "demonstrations.jsonl",
    "RECIPE": "'my pairs.toml'",
    "RUN": f"'{RUN}'",
    "FOLDER": "exported",
    "METHOD": "reward",
    "MODEL": "tiny",
    "NAME": "summarise-ppo",
    "OWNER/NAME": "us/ours",
}
"""What a reader fills in."""
TINY = ["model.source=tiny", "model.fallback="]
SHORTER = {
    "duel": ["--limit", "2", "--max-new-tokens", "4"],
    "evaluate": ["evaluate.data.limit=2"],
    "run": [*TINY, "--dry-run"],
    "plan": TINY,
}
"""Of lines that would take minutes, on a model that is not tiny or with many answers."""
ONLY_READ = ("lab all", "lab 1", "--push", "--on slurm")
"""Lines that are not run: the labs have tests of their own, nothing is uploaded, and no cluster is
here.
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Rows, recipes and a judge; servers start and end at once."""
    monkeypatch.setattr("tether.people.annotation.server.app.run_server", lambda *_: None)
    monkeypatch.setattr("tether.watch.live.server.serve_board", lambda *_: None)
    asked = [f"What is {i}?" for i in range(12)]
    rows = {
        "pairs": [{"prompt": p, "chosen": "aaa eee", "rejected": "xxx zzz"} for p in asked],
        "demonstrations": [{"prompt": p, "response": "aaa eee"} for p in asked],
        "answers": [{"prompt": p, "response": f"a{i}"} for p in asked for i in range(2)],
    }
    for name, lines in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    for name, text in RECIPES.items():
        (tmp_path / f"{name}.toml").write_text(text)
    (tmp_path / "prompts.txt").write_text("\n".join(asked))
    (tmp_path / "judge.py").write_text(
        "def score(prompts, responses):\n    return [float(len(text)) for text in responses]\n",
    )
    (tmp_path / "r.yml").write_text("run: runs/r\n")
    stopped = tmp_path / "runs" / "long one"
    stopped.mkdir(parents=True)
    leave_request(stopped, Request.STOP)
    return tmp_path


def lines_in(text):
    """The commands that a text names: in backticks, behind a colon, or on lines of their own."""
    text = re.sub(r"(?m)^[│╭╰ ─╮╯]*│|│$", "", text)
    named = re.findall(r"`(tether [^`]+)`", text)
    named += re.findall(r"(?m)(?:^  |: |   )(tether .+?)(?:   |$)", text)
    # "tether ipo with KEY=VALUE: ..." is the subject of an error, and a usage is no command
    lines = (line.rstrip(".") for line in dict.fromkeys(named))
    return [line for line in lines if not re.search(r"^tether \w+ with |\[OPTIONS\]", line)]


def words_of(line, folder):
    """The words of a printed line, filled in as its reader would."""
    for name, value in FILL.items():
        line = re.sub(rf"(?<![\w=/-]){name}(?![\w/])", value, line)
    words = shlex.split(line)[1:]
    number = len(list(folder.iterdir()))
    grouped = words[0] in GROUPS and len(words) == 2
    if words[0] == "prefs" and words[1:2] == ["invite"] and len(words) > 3:
        words[3] = "bob"
    if len(words) == 1 or grouped or words == ["run", "loop"]:
        words.append("--help")
    elif words[0] == "new":
        words = [*words[:2], f"{number}.toml"]
    elif words[0] == "export":
        words[2] += str(number)
    is_tiny = (
        words[1:2] and (folder / words[1]).is_file() and "tiny" in (folder / words[1]).read_text()
    )
    if words[0] in ("duel", "evaluate") or not (is_tiny or "--help" in words):
        words += SHORTER.get(words[0], [])
    if words[-1:] == TINY[-1:] or words[-1:] == ["--dry-run"]:
        words.append(f"run=runs/{number}")
    return words


def test_what_is_printed_is_taken(folder):
    """At least forty lines, as a person would copy them, run to their end."""
    waiting = deque(("", f"tether {command}") for command in TABLE)
    taken, shapes, refused = set(), set(), {}
    while waiting:
        source, line = waiting.popleft()
        # the same line on another run says nothing new
        shape = re.sub(r"'runs/[^']*'|runs/\S+", "RUN", line)
        if source and shape in shapes:
            continue
        shapes.add(shape)
        words = words_of(line, folder) if source else shlex.split(line)[1:]
        if source and any(part in line for part in ONLY_READ):
            parse(words, True)
            taken.add(line)
            continue
        done = tether(*words, cwd=folder, stdin="Hello.\n\n" if words[0] == "chat" else "")
        good = done.returncode == 0 or (words[0] == "doctor" and not done.stderr)
        if source and good:
            taken.add(line)
        elif source:
            refused[line] = f"{source}: {done.stdout[-200:]} {done.stderr[-400:]}"
        fresh = lines_in(done.stdout + done.stderr)
        waiting.extendleft((line, one) for one in reversed(fresh))
    assert not refused
    assert len(taken) >= 40, sorted(taken)


def test_a_line_is_quoted_where_a_shell_needs_it():
    """A shell reads back the words, whatever stands in them."""
    words = ["report", "runs/a b", "it's", "$HOME", "NAME", 12, "key=a,b"]
    assert shlex.split(command_line(*words)) == ["tether", *map(str, words)]
    assert command_line("export", "runs/mine", "FOLDER") == "tether export runs/mine FOLDER"
