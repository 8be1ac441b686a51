"""Trained roles that cannot be used, and comparisons too few to judge them by: one message each."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from tests.bad_input.folders import (
    PAIRS,
    ask_steps,
    bench,
    cut,
    edited,
    make,
    refused_folder,
    tensors,
)

from tether.cli.tools.reward_bench import bench_rewards
from tether.core.errors import TetherError
from tether.models.heads import ScalarHead
from tether.runner.assembly.roles import load_policy, load_scorer
from tether.settings.model import ModelConfig


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("folders"))


POLICY = {
    "role of no JSON": (
        lambda f: cut(f / "role.json"),
        load_policy,
        "role.json is damaged.*Delete it, or restore",
    ),
    "role is a list": (
        lambda f: (f / "role.json").write_text("[1]"),
        load_policy,
        "holds no object.*Run the stage",
    ),
    "future role": (
        lambda f: edited(f / "role.json", format=9),
        load_policy,
        "has format 9, and this tether reads 1. Install a newer",
    ),
    "role without encoding": (
        lambda f: edited(f / "role.json", "encoding"),
        load_policy,
        "lacks encoding.*Run the stage",
    ),
    "encoding without template": (
        lambda f: edited(f / "role.json", encoding={}),
        load_policy,
        "or encoding is unknown",
    ),
    "unknown kind": (
        lambda f: edited(f / "role.json", kind="oracle"),
        load_policy,
        "kind 'oracle'.* is unknown",
    ),
    "unknown dtype": (
        lambda f: edited(f / "role.json", dtype="int4"),
        load_policy,
        "dtype 'int4'.* is unknown",
    ),
    "base gone": (
        lambda f: edited(f / "role.json", base="../gone"),
        load_policy,
        "stands on the model in .*gone, which is not there",
    ),
    "another base": (
        lambda f: edited(f / "role.json", base="tiny"),
        load_policy,
        "trained on another base.*Train it on",
    ),
    "another template": (
        lambda f: edited(
            f / "role.json",
            encoding={"template": "x", "system_prompt": None, "stop_ids": [1]},
        ),
        lambda f: load_policy(str(f), ModelConfig(source="tiny", dtype="float32")),
        "another chat template, system prompt or stop tokens.*Set model",
    ),
    "no adapter": (
        lambda f: shutil.rmtree(f / "adapter"),
        load_policy,
        "the adapter in .* cannot be used.*Restore the folder",
    ),
    "adapter cut": (
        lambda f: cut(f / "adapter" / "adapter_model.safetensors"),
        load_policy,
        "the adapter in .* cannot be used",
    ),
    "adapter config cut": (
        lambda f: cut(f / "adapter" / "adapter_config.json"),
        load_policy,
        "the adapter in .* cannot be used",
    ),
    "adapter of another rank": (
        lambda f: edited(f / "adapter" / "adapter_config.json", r=3),
        load_policy,
        "the adapter in .* cannot be used.*size mismatch",
    ),
    "adapter lacks a tensor": (
        lambda f: tensors(f / "adapter" / "adapter_model.safetensors", lambda t: t.pop(min(t))),
        load_policy,
        "1 tensors are missing or too many, such as base_model",
    ),
    "adapter of other layers": (
        lambda f: edited(f / "adapter" / "adapter_config.json", target_modules=["nothing"]),
        load_policy,
        "the adapter in .* cannot be used",
    ),
    "a policy asked to score": (
        None,
        load_scorer,
        "is a policy, which gives no scores. Give the folder of a reward model",
    ),
}
REWARD = {
    "asked to answer": (None, load_policy, "is a reward model, which scores and does not answer"),
    "no head": (
        lambda f: (f / "head.safetensors").unlink(),
        load_scorer,
        "the head in .* cannot be used.*Restore",
    ),
    "head cut": (
        lambda f: cut(f / "head.safetensors"),
        load_scorer,
        "the head in .* cannot be used",
    ),
    "head of another width": (
        lambda f: save_file(ScalarHead(32).state_dict(), f / "head.safetensors"),
        load_scorer,
        "states of 32 numbers, and this trunk's have 64",
    ),
    "head without weight": (
        lambda f: tensors(f / "head.safetensors", lambda t: t.pop("linear.weight")),
        load_scorer,
        "the head in .* cannot be used",
    ),
    "head not finite": (
        lambda f: tensors(
            f / "head.safetensors",
            lambda t: t.update({"offset": torch.tensor(float("nan"))}),
        ),
        load_scorer,
        "not finite",
    ),
    "no role": (lambda f: (f / "role.json").unlink(), bench, "holds no trained reward model"),
    "of another family": (
        lambda f: edited(f / "role.json", base="tiny"),
        bench,
        "trained on another base",
    ),
}
PROCESS = {
    "steps missing": (None, ask_steps, "steps.json does not exist"),
    "steps of the future": (
        lambda f: (f / "steps.json").write_text('{"format": 3}'),
        ask_steps,
        "has format 3, .* reads 1",
    ),
    "steps without delimiters": (
        lambda f: (f / "steps.json").write_text("{}"),
        ask_steps,
        "steps.json lacks delimiters",
    ),
}
ENSEMBLE = {
    "future": (lambda f: edited(f / "ensemble.json", format=2), load_scorer, "has format 2"),
    "names nobody": (
        lambda f: edited(f / "ensemble.json", "members"),
        load_scorer,
        "lacks members",
    ),
    "member gone": (lambda f: shutil.rmtree(f / "first"), load_scorer, "holds no trained role"),
    "member changed": (
        lambda f: tensors(
            f / "first" / "head.safetensors",
            lambda t: t.update(offset=torch.ones(())),
        ),
        load_scorer,
        "has changed since .*ensemble.json was written",
    ),
}
CASES = [
    pytest.param(what, *case, id=f"{what}: {name}")
    for what, table in (
        ("policy", POLICY),
        ("reward", REWARD),
        ("reward", PROCESS),
        ("members", ENSEMBLE),
    )
    for name, case in table.items()
]


@pytest.mark.parametrize(("what", "damage", "use", "message"), CASES)
def test_a_bad_role_is_one_message(made, tmp_path, what, damage, use, message):
    refused_folder(made, tmp_path, what, damage, use, message)


def test_the_undamaged_roles_work(made):
    load_policy(str(made / "policy"))
    for folder in ("reward", "members"):
        load_scorer(made / folder)


@pytest.mark.parametrize("count", [1, 2])
def test_a_reward_model_can_be_judged_on_a_single_pair(made, tmp_path, count):
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS[:count]))
    assert (
        bench_rewards(str(made / "reward"), [str(tmp_path / "few.jsonl")])["few.jsonl"]["num_pairs"]
        == count
    )


def test_ties_alone_are_no_pairs(made, tmp_path):
    (tmp_path / "ties.jsonl").write_text(
        json.dumps({"prompt": "a", "response_a": "b", "response_b": "c", "winner": "tie"}) + "\n",
    )
    with pytest.raises(TetherError, match=r"ties\.jsonl"):
        bench_rewards(str(made / "reward"), [str(tmp_path / "ties.jsonl")])
