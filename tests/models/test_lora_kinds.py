"""Kinds of adapters beside the plain one: what they compute, and that roles are still routed
through their own.
"""

import math

import pytest
import torch

from tether.core.types import Prompt, Sampling, assistant, user
from tether.data.batches import make_batch
from tether.models.heads import ScalarHead
from tether.models.loading import add_adapter
from tether.models.saving import attach_adapter
from tether.models.trunk import Role
from tether.runner.assembly.models import open_model
from tether.runner.assembly.roles import encoder_of, local_engine, save_trained
from tether.settings.model import LoraConfig, ModelConfig

TALK = (user("one"), assistant("and two"))


def scrambled(role, seed):
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        for parameter in role.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return role


def logprobs(role, encoder):
    with torch.no_grad():
        return role.logprobs(make_batch([encoder.conversation(TALK)], 0))[0]


def by_hand(layer, name, kind, states):
    """A layer's output from its matrices: rsLoRA's scale (2312.03732), and DoRA's lengths of
    columns (2402.09353).
    """
    down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
    weight = layer.get_base_layer().weight
    scale = 8.0 / (math.sqrt(4) if kind == "rslora" else 4)
    changed = weight + scale * up @ down
    if kind == "dora":
        lengths = layer.lora_magnitude_vector[name].weight
        changed = lengths[:, None] * changed / changed.norm(dim=1, keepdim=True)
    return states @ changed.T


@pytest.mark.parametrize("kind", ["plain", "rslora", "dora"])
def test_roles_of_every_kind_share_a_trunk(tmp_path, kind):
    """A policy and a reward model on one base: each computes its own, the base stays bare, the
    engine samples the policy.
    """
    loaded = open_model(ModelConfig(source="tiny", dtype="float32"))
    encoder = encoder_of(loaded)
    bare = logprobs(Role(loaded.model), encoder)
    lora = LoraConfig(rank=4, alpha=8.0, **({} if kind == "plain" else {kind: True}))
    model = add_adapter(loaded.model, "reward", LoraConfig(rank=4))
    policy = scrambled(Role(add_adapter(model, "policy", lora), "policy"), 1)
    reward = scrambled(Role(policy.model, "reward", ScalarHead(64, zero=False)), 2)
    batch = make_batch([encoder.conversation(TALK)], 0)
    with torch.no_grad():
        before = logprobs(policy, encoder), reward.scores(batch)
        assert torch.allclose(logprobs(Role(policy.model), encoder), bare, atol=1e-5)
        assert not torch.allclose(before[0], bare, atol=1e-3)
        assert torch.equal(logprobs(policy, encoder), before[0]) and torch.equal(
            reward.scores(batch),
            before[1],
        )
        layer = policy.decoder.get_submodule("layers.0.mlp.up_proj")
        states = torch.randn(3, 64)
        policy.activate()
        assert torch.allclose(layer(states), by_hand(layer, "policy", kind, states), atol=1e-5)
    sampling = Sampling(max_new_tokens=8, temperature=1.0)
    (group,) = local_engine(policy, loaded).generate(
        [Prompt(TALK[:1], "a")],
        sampling,
        num_samples=2,
        seed=3,
    )
    for rollout in group.rollouts:
        own = make_batch([encoder.rollout(rollout.prompt_ids, rollout.response_ids)], 0)
        with torch.no_grad():
            assert torch.allclose(
                policy.logprobs(own)[0],
                torch.tensor(rollout.logprobs),
                atol=1e-3,
            )
    save_trained(policy, loaded, tmp_path, kind="policy")
    again = open_model(ModelConfig(source="tiny", dtype="float32"))
    read = Role(attach_adapter(again.model, tmp_path, "policy"), "policy")
    assert torch.allclose(logprobs(read, encoder), before[0], atol=1e-5)
    marked = [parameter.requires_grad_(True) for parameter in policy.parameters()]
    reward.activate()  # another role between forward and backward
    loss = policy.logprobs(batch)[0].sum()
    reward.activate()
    assert all(gradient.abs().sum() > 0 for gradient in torch.autograd.grad(loss, marked))
