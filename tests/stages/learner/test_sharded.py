"""Two ranks that hold half of every layer each train what one process trains; what one rank count
saved, another goes on with.
"""

import os
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from tests.every_stage import recipe
from tests.stages.learner.ranked import assert_same, at_step, others, records, standing_on, trained

from tether.core.errors import ConfigError
from tether.core.stopping import Interrupted
from tether.models.loading import load_model
from tether.models.trunk import Role
from tether.settings.model import ModelConfig
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.stages.learner.checkpoint import load_checkpoint

SERVED = {"engine": {"kind": "served"}}


def whole(values, *stages):
    """The recipe with these stages training all weights."""
    learning = {"lora": False, "optimizer": {"learning_rate": 1e-3, "epsilon": 1e-3}}
    return {**values, **{stage: {**values[stage], **learning} for stage in stages}}


def only(values, *stages):
    """The recipe without other stages, whose settings may not go with weights that are cut."""
    return {"model": values["model"], **{stage: values[stage] for stage in stages}}


@pytest.fixture(scope="module")
def plain(values):
    each = {"reference_logprobs": "each_update"}
    changed = {"direct": each, "kto": each, "reward": {"disentangle_length": 0.0}}
    kept = {
        stage: {**section, **changed.get(stage, {})}
        for stage, section in values.items()
        if stage != "model"
    }
    return {"model": values["model"], **kept}


@pytest.mark.parametrize(
    ("stages", "all_weights"),
    [
        (["sft", "reward", "direct"], False),
        pytest.param(["sft", "reward"], True, marks=pytest.mark.slow),
        pytest.param(["process", "kto"], False, marks=pytest.mark.slow),
        pytest.param(["process", "kto"], True, marks=pytest.mark.slow),
    ],
)
def test_two_halves_make_what_one_process_makes(plain, tmp_path, stages, all_weights):
    settings = only(whole(plain, *stages) if all_weights else plain, *stages)
    trained(settings, tmp_path / "1", stages)
    # One rank has looked at this model before, as in a program that trains twice.
    assert Role(load_model(build(ModelConfig, settings["model"])).model).independence.causal
    trained(settings, tmp_path / "2", stages, 2, shard=True)
    for stage in stages:
        assert_same(tmp_path / "1" / stage, tmp_path / "2" / stage)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["ppo", "grpo", "best_of_n", "online_direct"])
def test_two_halves_sample_with_a_server_and_make_what_one_process_makes(
    plain,
    ready,
    tmp_path,
    stage,
):
    alike = {
        "reward_source": "random",
        "ema_decay": None,
        "optimizer": {"learning_rate": 5e-3, "epsilon": 1e-3},
    }
    own = plain.get(stage) or recipe(tmp_path, "")[stage] | alike
    settings = {**only(plain, "sft", "reward"), stage: {**own, **SERVED}}
    for ranks in (1, 2):
        trained(
            settings,
            standing_on(ready, tmp_path / str(ranks)),
            [stage],
            ranks,
            **({"shard": True} if ranks > 1 else {}),
        )
    assert_same(tmp_path / "1" / stage, tmp_path / "2" / stage)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False], ids=["adapters", "whole"])
def test_steps_of_two_halves_one_whole_and_two_halves_make_six(plain, tmp_path, lora):
    settings = only(plain if lora else whole(plain, "sft"), "sft")
    settings["sft"] = {
        **settings["sft"],
        "heldout_fraction": 0.3,
        "evaluate_every": 1,
    }  # the best weights are in the checkpoint, too
    trained(settings, tmp_path / "straight", ["sft"])
    # The best weights are in these checkpoints, too.
    for ranks, step, more in ((2, 2, {"shard": True}), (1, 4, {})):
        with pytest.raises(Interrupted):
            trained(settings, tmp_path / "parts", ["sft"], ranks, stopping_at(step), **more)
        if not lora:
            check_parts(tmp_path / "parts" / "sft" / "checkpoints", ranks)
    trained(settings, tmp_path / "parts", ["sft"], 2, shard=True)
    assert_same(tmp_path / "straight" / "sft", tmp_path / "parts" / "sft")


def check_parts(folder, ranks):
    """Two ranks have written a half of each tensor of the layers each, and nobody a whole one; one
    process reads them joined.
    """
    (checkpoint,) = folder.iterdir()
    files = [load_file(path) for path in sorted(checkpoint.glob("parts/*"))]
    assert len(files) == (2 if ranks == 2 else 0)
    if files:
        tensors, _ = load_checkpoint(checkpoint)
        assert sorted({name.partition(".")[0] for name in files[0]}) == [
            "best",
            "exp_avg",
            "exp_avg_sq",
            "master",
        ]
        for name in files[0].keys() | files[1].keys():
            halves = [file[name] for file in files]
            assert all(half.numel() for half in halves) and torch.equal(
                torch.cat(halves),
                tensors.pop(name),
            )
        whole = load_file(checkpoint / "state.safetensors")
        assert whole.keys() == tensors.keys() and not files[0].keys() & whole.keys()


def stopping_at(step):
    """A progress bar that asks to stop after that many steps, once."""
    asked = []

    def bar(done, *_):
        if done == step and not asked:
            asked.append(done)
            os.kill(os.getpid(), 2)

    return lambda phase: bar


@pytest.mark.slow
def test_a_rank_that_dies_in_a_pass_is_lost_like_any_other(plain, tmp_path):
    settings = only(plain, "sft")
    trained(settings, tmp_path / "calm", ["sft"], 2, shard=True)
    trained(
        settings,
        tmp_path / "wild",
        ["sft"],
        2,
        at_step(3, lambda other: other.kill(), 1),
        shard=True,
        restarts=1,
    )
    assert records(tmp_path / "calm" / "sft") == records(tmp_path / "wild" / "sft") and not others()


START = "from tether.core.stopping import begin_program\nbegin_program()\n"
HALVES = """
import os, torch, torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from tether.settings.model import ModelConfig
from tether.models.loading import load_model
from tether.models.sharded import cut, gathered, local, shard_layers

dist.init_process_group("gloo")
local_bytes = lambda model: sum(local(p.detach()).numel() * p.element_size() for p in model.parameters())
model = load_model(ModelConfig(source="tiny", dtype="float32")).model
layers = sum(p.numel() * p.element_size() for layer in model.get_decoder().layers for p in layer.parameters())
before, whole = local_bytes(model), {name: p.detach().clone() for name, p in model.named_parameters()}
assert before == sum(p.numel() * 4 for p in whole.values())
shard_layers(model, DeviceMesh.from_group(dist.new_group(), "cpu"))
spared = torch.tensor([float(before - local_bytes(model))])
dist.all_reduce(spared)
assert spared.item() == layers, (spared, layers)  # both together hold every number of the layers once
for name, parameter in model.named_parameters():
    assert torch.equal(gathered(parameter.detach()), whole[name])
    assert torch.equal(cut(whole[name], parameter), local(parameter.detach()))
dist.barrier()
dist.destroy_process_group()
"""


def ended(program, size, *arguments):
    """The exit codes of so many processes that find each other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", START + program, *arguments]
    processes = [
        subprocess.Popen(command, env={**os.environ, **place, "RANK": str(rank)})
        for rank in range(size)
    ]
    return [process.wait(200) for process in processes]


def test_two_halves_hold_every_number_of_the_layers_once():
    assert ended(HALVES, 2) == [0, 0]


SPOILT = """
import sys, torch, torch.distributed as dist
from pathlib import Path
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from tether.core.errors import RunError, TrainingError
from tether.stages.learner.checkpoint import Checkpoints, load_checkpoint
from tether.stages.learner.ranks import Ranks

dist.init_process_group("gloo")
numbers, folder = torch.arange(6.0), Path(sys.argv[1])
part = distribute_tensor(numbers, init_device_mesh("cpu", (1,)), [Shard(0)])

def refused(kind, words, step, tensor):
    try:
        saved.save(step, {"master.0": tensor, "step.0": torch.tensor(1.0)}, {})
    except kind as error:
        assert words in str(error), error
        return
    raise AssertionError(words)

ranks = Ranks()
with Checkpoints(folder, ranks=ranks) as saved:
    saved.save(1, {"master.0": part, "step.0": torch.tensor(1.0)}, {"a": 1})
    tensors, values = load_checkpoint(folder / "step-000001")
    assert torch.equal(tensors["master.0"], numbers) and tensors["step.0"] == 1 and values == {"a": 1, "step": 1}
    refused(TrainingError, "not finite (master.0)", 2, part * float("nan"))
    ranks.size = 2  # of which the other has written somewhere else
    ranks.gather = lambda value: [value]
    refused(RunError, "1 of 2 ranks have written into", 3, part)
    assert [path.name for path in folder.glob("step-*")] == ["step-000001"]
file = next(folder.glob("step-000001/parts/*"))
file.write_bytes(file.read_bytes()[:-1] + bytes([255]))
try:
    load_checkpoint(folder / "step-000001")
    raise AssertionError("damage was not noticed")
except RunError as error:
    assert "is damaged (parts/" in str(error), error
dist.destroy_process_group()
"""


def test_parts_that_are_missing_damaged_or_not_finite_are_told(tmp_path):
    assert ended(SPOILT, 1, str(tmp_path)) == [0]


@pytest.mark.parametrize(
    ("stage", "change", "says"),
    [
        (
            "grpo",
            {},
            r"grpo\.engine\.kind = 'local' \(every token would gather all layers: use "
            r"servers\)",
        ),
        ("direct", {"reference_logprobs": "precomputed"}, "reference_logprobs = 'precomputed'"),
        ("sft", {"lora": False, "optimizer": {"kind": "adamw8bit"}}, "its blocks are not cut"),
        ("sft", {"lora": {"dora": True}}, r"sft\.lora\.dora \(its norms need whole weights\)"),
    ],
)
def test_settings_that_need_whole_weights_are_refused(plain, tmp_path, stage, change, says):
    settings = {"model": plain["model"], stage: {**plain[stage], **change}, "run": str(tmp_path)}
    with pytest.raises(ConfigError, match=rf"learner\.shard does not go with .*{says}"):
        build(Recipe, {**settings, "learner": {"ranks": 2, "shard": True}})


def test_without_ranks_everything_is_whole():
    from tether.models.sharded import cut, gathered, local
    from tether.models.trunk import is_cut

    tensor = torch.arange(6.0)
    assert not is_cut(tensor) and local(tensor) is cut(tensor, tensor) is gathered(tensor) is tensor
