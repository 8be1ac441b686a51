"""Two runs of one recipe leave the same bytes in every file, whatever order sets have in a process;
nothing else stays.
"""

import os
import subprocess
import sys

import pytest
from tests.every_stage import differences, everything, loop_recipe, recipe, toml

EXPORTS = (["export", "run", "out"], ["export", "run", "small", "--adapter"])


def ran(folder, values, chaos, further):
    """All that a run and further commands leave, temporary files too; `chaos` decides the order of
    sets.
    """
    text = "".join(f"{key} = {toml(value)}\n" for key, value in values.items())
    (folder / "recipe.toml").write_text(text.replace(f"{folder}/", ""), encoding="utf-8")
    environment = {**os.environ, "PYTHONHASHSEED": chaos, "TMPDIR": str(folder)}
    for command in (["run", "recipe.toml"], *further):
        words = [sys.executable, "-m", "tether", *command]
        done = subprocess.run(
            words,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    return everything(folder)


def same_twice(tmp_path, make, *further):
    left = []
    for chaos in ("1", "2"):
        folder = tmp_path / chaos
        folder.mkdir()
        left.append(ran(folder, make(folder), chaos, further))
    assert differences(*left) == []
    assert not [name for name in left[0] if name.rpartition("/")[2].startswith(".")]
    return left[0]


def test_two_runs_leave_the_same_bytes_and_no_lock(tmp_path):
    """Peft holds the names of layers in sets, and safetensors its entries in a hash map."""

    def make(folder):
        values = recipe(folder, folder / "run")
        return {key: values[key] for key in ("run", "model", "direct")}

    files = same_twice(tmp_path, make)
    assert {
        "run/direct/policy/adapter/adapter_config.json",
        "run/direct/reference.safetensors",
    } <= files.keys()


@pytest.mark.slow
def test_two_runs_of_all_stages_and_their_exports_leave_the_same_bytes(tmp_path):
    files = same_twice(tmp_path, lambda folder: recipe(folder, folder / "run"), *EXPORTS)
    assert (
        len(files) > 100 and {"out/model.safetensors", "small/adapter_config.json"} <= files.keys()
    )


@pytest.mark.slow
def test_two_runs_of_rounds_leave_the_same_bytes(tmp_path):
    assert len(same_twice(tmp_path, lambda folder: loop_recipe(folder / "run"))) > 60
