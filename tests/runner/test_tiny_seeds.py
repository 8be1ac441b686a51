"""A run on the random tiny model is read with its own weights again, whatever its seed."""

import shutil

import pytest
import torch
from tests.every_stage import recipe

from tether.cli import main
from tether.cli.tools.export import export_model
from tether.core.errors import ModelError
from tether.models.tiny import tiny_model
from tether.runner.assembly.roles import load_policy, load_scorer
from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import Recipe


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeds")
    values = recipe(folder, folder / "run")
    section = {**values["grpo"], "steps": 1}
    reward = {**values["reward"], "epochs": 1}
    built = build(
        Recipe,
        {
            **{key: values[key] for key in ("run", "model")},
            "seed": 7,
            "reward": reward,
            "grpo": section,
        },
    )
    run_recipe(built)
    return folder / "run"


def base_of(loaded):
    """The embedding, in which no adapter stands."""
    return loaded.model.get_input_embeddings().weight


def test_policy_and_reward_model_stand_on_the_base_of_their_seed(root, tmp_path):
    run = shutil.copytree(root, tmp_path / "run")
    expected = tiny_model(7).get_input_embeddings().weight
    for loaded in (load_policy(str(run))[1], load_scorer(run / "reward" / "model")[1]):
        assert torch.equal(base_of(loaded), expected)


def test_exports_and_commands_work_with_it(root, tmp_path, monkeypatch, capsys):
    for source in (root, root / "reward"):
        made = export_model(str(source), tmp_path / f"{source.name}-out")
        assert made["difference"] < 1e-4
    monkeypatch.setattr(
        "sys.argv",
        ["tether", "generate", str(root), "Hello", "--max-new-tokens=4"],
    )
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0 and "Hello" in capsys.readouterr().out


def test_an_adapter_alone_has_no_base_that_anybody_could_load(root, tmp_path):
    export_model(str(root), tmp_path / "out", adapter=True)
    with pytest.raises(
        ModelError,
        match=r"'tiny'.*without --adapter",
    ):
        load_policy(str(tmp_path / "out"))
