"""An ensemble on one trunk against its members loaded alone, and averaged weights against the mean
of weights.
"""

import pytest
import torch

from tether.core.types import Prompt, Rollout, Sampling, StopReason, user
from tether.data.batches import make_batch
from tether.data.chat import ChatEncoder
from tether.models.average import average_roles
from tether.models.heads import ScalarHead
from tether.models.loading import add_adapter
from tether.models.members import as_members
from tether.models.tiny import tiny_model, tiny_tokenizer
from tether.models.trunk import Role
from tether.rewards import learned
from tether.rewards.learned import EnsembleReward, LearnedReward
from tether.settings.model import LoraConfig

ENCODER = ChatEncoder(tiny_tokenizer(), (1,))
LAST = LoraConfig(rank=4, alpha=8.0, last_layers=1)


def trained(role, seed):
    """A role as if it had learned: everything that is its own is random, offset and scale too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        own = [p for name, p in role.model.named_parameters() if role.adapter in name.split(".")]
        for parameter in (*own, *role.head.parameters()):
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        role.head.offset.fill_(0.1 * seed)
        role.head.scale.fill_(1.0 + 0.5 * seed)
    return role


def members(count=3, lora=LAST, layers=3, policy=False):
    """Roles on one trunk; `policy`: a stranger's adapter stands in all layers, and is not zero."""
    model = tiny_model(layers=layers).requires_grad_(False)
    for seed in range(count):
        model = add_adapter(model, f"reward-{seed}", lora, seed=seed, scores=True)
    if policy:
        trained(Role(add_adapter(model, "policy", LoraConfig(rank=2)), "policy", ScalarHead(64)), 9)
    return [trained(Role(model, f"reward-{seed}", ScalarHead(64)), seed) for seed in range(count)]


def alone(seed, lora=LAST, layers=3):
    model = add_adapter(
        tiny_model(layers=layers).requires_grad_(False),
        "reward",
        lora,
        seed=seed,
        scores=True,
    )
    return trained(Role(model, "reward", ScalarHead(64)), seed)


def rollouts():
    made = []
    for prompt, response in (
        ("hello", "well!"),
        ("hello", "no"),
        ("and a longer one", "yes, of course"),
        ("x", "y" * 30),
    ):
        ids = ENCODER.prompt((user(prompt),))
        out = tuple(ENCODER.tokenizer(response)["input_ids"])
        made.append(
            Rollout(
                ids,
                out,
                (),
                StopReason.LENGTH,
                response,
                0,
                0,
                Sampling(),
                Prompt((user(prompt),)),
            ),
        )
    return made


@pytest.mark.parametrize("policy", [False, True])
@pytest.mark.parametrize("budget", [48, 4096])
def test_each_members_score_is_that_of_the_model_alone(policy, budget, monkeypatch):
    monkeypatch.setattr(learned, "MICRO_BATCH_TOKENS", budget)
    found = EnsembleReward(members(policy=policy), ENCODER).score(rollouts())
    for seed in range(3):
        expected = [s.value for s in LearnedReward(alone(seed), ENCODER).score(rollouts())]
        assert [s.parts[f"member_{seed}"] for s in found] == pytest.approx(expected, abs=1e-4)
    for score in found:
        assert score.value == pytest.approx(sum(score.parts[f"member_{k}"] for k in range(3)) / 3)


@pytest.mark.parametrize("combine", ["mean", "worst", "uncertainty"])
def test_the_order_of_the_members_changes_nothing(combine):
    roles = members()
    forth, back = (
        EnsembleReward(order, ENCODER, combine, uncertainty_weight=0.5)
        for order in (roles, roles[::-1])
    )
    for a, b in zip(forth.score(rollouts()), back.score(rollouts()), strict=True):
        assert a.value == pytest.approx(b.value, rel=1e-9) and a.parts["spread"] == pytest.approx(
            b.parts["spread"],
            rel=1e-9,
        )
        own = [a.parts[f"member_{k}"] for k in range(3)]
        assert own == pytest.approx([b.parts[f"member_{2 - k}"] for k in range(3)])
        expected = {
            "mean": sum(own) / 3,
            "worst": min(own),
            "uncertainty": sum(own) / 3 - 0.5 * a.parts["spread"] ** 2,
        }
        assert a.value == pytest.approx(expected[combine])


@pytest.mark.parametrize("policy", [False, True])
def test_layers_that_members_share_run_once_on_the_tokens_that_count(policy):
    roles = members(count=5, policy=policy)
    calls = {}
    for number, layer in enumerate(roles[0].decoder.layers):
        layer.mlp.register_forward_hook(
            lambda *_, number=number: calls.__setitem__(number, calls.get(number, 0) + 1),
        )
    widths = []
    roles[0].decoder.layers[2].mlp.down_proj.register_forward_hook(
        lambda _, given, __: widths.append(given[0].shape[:-1].numel()),
    )
    EnsembleReward(roles, ENCODER).score(rollouts())
    assert calls == {0: 1, 1: 1, 2: 5}
    # of the last layer's larger part only what a head reads is computed
    assert widths == [len(rollouts())] * 5
    assert {member.common_depth for member in as_members(members(lora=LoraConfig(rank=2)))} == {0}


def test_a_member_that_fails_fails_the_score():
    roles = members()
    with torch.no_grad():
        roles[1].head.linear.bias.fill_(float("inf"))
    assert all(
        s.value is None and "inf" in s.reason
        for s in EnsembleReward(roles, ENCODER).score(rollouts())
    )


def test_members_must_stand_on_one_trunk():
    with pytest.raises(ValueError, match="one trunk"):
        EnsembleReward([alone(0), alone(1)], ENCODER)
    with pytest.raises(ValueError, match="one trunk"):
        EnsembleReward([], ENCODER)


@pytest.mark.parametrize(
    "lora",
    [LAST, LoraConfig(rank=3), LoraConfig(rank=2, targets=("q_proj", "embed_tokens"))],
)
def test_averaged_weights_are_the_mean_of_the_members_weights(lora):
    """Against peft's own account of what an adapter adds to a weight, and a plain model that has
    the mean in its weights.
    """
    roles = members(lora=lora)
    averaged = average_roles(roles, "reward", lora)
    plain = tiny_model(layers=3).requires_grad_(False)
    touched = 0
    for name, layer in averaged.causal_model.named_modules():
        if not hasattr(layer, "get_delta_weight") or "reward" not in {
            *layer.lora_A,
            *layer.lora_embedding_A,
        }:
            continue
        mean = torch.stack([layer.get_delta_weight(role.adapter) for role in roles]).mean(0)
        assert mean.abs().max() > 0.01
        torch.testing.assert_close(layer.get_delta_weight("reward"), mean, atol=1e-6, rtol=1e-5)
        plain.get_submodule(name).weight.data += mean
        touched += 1
    assert touched >= 1
    batch = make_batch(
        [ENCODER.rollout_for_scoring(r.prompt_ids, r.response_ids) for r in rollouts()],
        ENCODER.pad_id,
    )
    hidden = Role(plain).hidden(batch)[batch.last]
    # heads are linear: the mean of their numbers is the number of their mean
    effective = [role.head(hidden) for role in roles]
    torch.testing.assert_close(
        averaged.scores(batch),
        torch.stack(effective).mean(0),
        atol=1e-4,
        rtol=1e-4,
    )


def test_averaging_a_and_b_apart_would_be_another_model():
    roles = members()
    layer = average_roles(roles, "reward", LAST).decoder.layers[2].mlp.up_proj
    apart = (
        sum(layer.lora_B[r.adapter].weight for r in roles)
        @ sum(layer.lora_A[r.adapter].weight for r in roles)
        / 9
    )
    assert (layer.get_delta_weight("reward") - 2.0 * apart).abs().max() > 0.05


@pytest.mark.parametrize("budget", [48, 4096])
def test_the_steps_of_a_response_are_what_each_token_changed_of_its_score(budget, monkeypatch):
    role = alone(3)
    plain = LearnedReward(role, ENCODER).score(rollouts())
    monkeypatch.setattr(learned, "MICRO_BATCH_TOKENS", budget)
    found = LearnedReward(role, ENCODER, per_token=True).score(rollouts())
    for rollout, whole, score in zip(rollouts(), plain, found, strict=True):
        assert score.value == pytest.approx(whole.value, abs=1e-4)
        assert [t for t, _ in score.steps] == list(range(len(rollout.response_ids)))
        assert sum(change for _, change in score.steps) == pytest.approx(whole.value, abs=1e-4)
        running = 0.0
        for (_, change), end in zip(
            score.steps[:-1],
            range(1, len(rollout.response_ids)),
            strict=True,
        ):
            running += change
            ids = torch.tensor([[*rollout.prompt_ids, *rollout.response_ids[:end]]])
            role.activate()
            expected = role.head(role.decoder(input_ids=ids).last_hidden_state[0, -1]).item()
            assert running == pytest.approx(expected, abs=1e-4)
