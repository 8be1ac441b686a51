"""A stage is one row of the table and one module: nothing else lists the stages."""

import json
import subprocess
import sys

MODULE = '''
from pydantic import Field

from tether.core.types import Prompt
from tether.settings.model import LoraConfig
from tether.models.loading import add_adapter
from tether.models.trunk import Role
from tether.runner.assembly.manifest import stage_model
from tether.runner.assembly.roles import save_trained
from tether.settings.section import Section, SteadyLora


class EchoSection(Section):
    """Settings of a stage that learns nothing."""

    times: int = Field(default=2, ge=1)
    lora: SteadyLora = LoraConfig()


def train(job, rows, run, ranks):
    section, loaded = job.settings, stage_model(job, run, ranks)
    role = Role(add_adapter(loaded.model, "policy", section.lora, seed=job.seed), "policy")
    for step in range(section.times):
        run.log({"reward/proxy": float(len(rows)), "kl/policy_reference_k1": 0.0}, step + 1)
        if job.progress is not None:
            job.progress(step + 1, section.times, {})
    save_trained(role, loaded, run.path / "policy", kind="policy")
    return {"steps": section.times, "num_prompts": len(rows), "seconds": 0.1}
'''
HOUSE = """
import contextlib
import io
import json
import sys

from echo_stage import EchoSection
from tether.settings.stages import STAGES, StageKind

STAGES["echo"] = StageKind(
    name="echo",
    makes="policy",
    section=EchoSection,
    method="echo_stage",
    help="Repeat what was said",
)

from tether.cli import main

for line in sys.stdin:
    sys.argv, code = ["tether", *json.loads(line)], 0
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    print(json.dumps([code, said.getvalue()]), flush=True)
"""
RECIPE = """
run = "run"
[model]
source = "tiny"
dtype = "float32"
[lora]
rank = 4
[echo]
data = { path = "prompts.txt" }
times = 3
[arms.long.echo]
times = 5
"""


def test_a_new_stage_is_one_row_and_one_module(tmp_path):
    (tmp_path / "echo_stage.py").write_text(MODULE)
    (tmp_path / "house.py").write_text(HOUSE)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "prompts.txt").write_text("one\ntwo\nthree\n")

    def tether(*arguments):
        """The exit code and the words of a command, one of many in one process: each start would
        load torch again.
        """
        process.stdin.write(json.dumps(arguments) + "\n")
        process.stdin.flush()
        code, words = json.loads(process.stdout.readline())
        assert "Traceback" not in words, words
        return code, " ".join(words.split())

    command, pipe = [sys.executable, "house.py"], subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdin=pipe, stdout=pipe, text=True) as process:
        commands(tether, tmp_path)
        process.stdin.close()


def commands(tether, tmp_path):
    """Every command that concerns a stage, given to one that no module of tether names."""
    code, text = tether("--help")
    assert code == 0 and "echo" in text and "Repeat what was said" in text
    code, text = tether("echo", "recipe.toml", "echo.tims=4")
    assert code == 2 and "unknown key 'echo.tims'" in text and "'times'" in text
    code, text = tether("plan", "recipe.toml")
    assert code == 0 and "The recipe fits" in text, text
    code, text = tether("doctor", "recipe.toml")
    assert code == 2 and "no stage that samples" in text, text
    code, text = tether("run", "recipe.toml")
    assert code == 0 and "num prompts" in text, text
    summary = json.loads((tmp_path / "run" / "echo" / "summary.json").read_text())
    assert (
        summary["steps"] == 3
        and json.loads((tmp_path / "run" / "echo-long" / "summary.json").read_text())["steps"] == 5
    )
    (tmp_path / "run" / "echo" / "summary.json").unlink()
    (tmp_path / "run" / "echo" / "metrics.jsonl").unlink()
    code, text = tether("resume", "run")
    assert (
        code == 0
        and json.loads((tmp_path / "run" / "echo" / "summary.json").read_text())["steps"] == 3
    ), text
    assert (
        tether("report", "run")[0] == 0 and "echo" in (tmp_path / "run" / "report.html").read_text()
    )
    code, text = tether("export", "run/echo", "exported")
    assert code == 0 and (tmp_path / "exported" / "config.json").is_file(), text
    assert "[echo]" in (tmp_path / "exported" / "README.md").read_text() or "echo" in text
