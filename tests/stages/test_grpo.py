"""GRPO against plain autograd over whole sequences, one at a time, and the demand that a tiny model
really learns.
"""

import pytest
import torch

from tether.core.errors import ConfigError
from tether.core.rundir import RunDirectory
from tether.core.types import Prompt, Score, user
from tether.data.chat import ChatEncoder
from tether.models.loading import add_adapter
from tether.models.tiny import tiny_model, tiny_tokenizer
from tether.models.trunk import Role
from tether.rollout.local import LocalEngine
from tether.settings.learner import OptimizerConfig
from tether.settings.model import LoraConfig
from tether.settings.policy import PolicyConfig
from tether.settings.reading import build
from tether.stages.online_loop import train
from tether.stages.policy_gradient import PolicyGradient

PROMPTS = [
    Prompt((user(text),), f"p{n}")
    for n, text in enumerate(["one", "two two", "three", "a longer one"])
]


class EvenReward:
    """Ten times the share of even token ids; every seventh response cannot be scored if `fails`."""

    name = "even"

    def __init__(self, fails=False):
        self.fails = fails

    def score(self, rollouts):
        scores = [
            Score(10.0 * sum(i % 2 == 0 for i in r.response_ids) / len(r.response_ids))
            for r in rollouts
        ]
        return [
            Score(None) if self.fails and n % 7 == 3 else score for n, score in enumerate(scores)
        ]


def make(reward=None, trained_a_little=False, **settings):
    settings = {
        "steps": 3,
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        "max_new_tokens": 12,
        "optimizer": OptimizerConfig(learning_rate=3e-3),
        **settings,
    }
    encoder = ChatEncoder(tiny_tokenizer(), (1, *range(40, 60)))
    model = add_adapter(
        tiny_model(0).requires_grad_(False).eval(),
        "policy",
        LoraConfig(rank=8),
        seed=1,
    )
    if trained_a_little:
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    policy = Role(model, "policy")
    config = PolicyConfig.model_validate({"algorithm": "grpo", **settings})
    return PolicyGradient(
        config=config,
        policy=policy,
        reference=Role(model),
        value=None,
        reward=reward or EvenReward(),
        engine=LocalEngine(policy, encoder),
        encoder=encoder,
    )


def logprobs_of(role, rollout):
    role.activate()
    ids = torch.tensor([rollout.prompt_ids + rollout.response_ids])
    logits = (
        role.causal_model(input_ids=ids).logits[0, len(rollout.prompt_ids) - 1 : -1].log_softmax(-1)
    )
    return logits.gather(-1, torch.tensor(rollout.response_ids)[:, None])[:, 0]


@pytest.mark.parametrize("normalize", ["token", "sequence", "constant"])
@pytest.mark.parametrize(("estimator", "beta"), [("k2", 0.3), ("k3", 0.3), (None, 0.0)])
def test_the_first_gradient_is_the_equation(normalize, estimator, beta):
    kl = {"coefficient": beta, **({"estimator": estimator} if estimator else {})}
    grpo = make(EvenReward(fails=True), True, normalize=normalize, kl=kl, micro_batch_tokens=96)
    grabbed = {}
    original = grpo.learner.step
    grpo.learner.step = lambda: (
        grabbed.update(g=[m.grad.clone() for m in grpo.learner.masters]),
        original(),
    )[1]
    before = {n: p.detach().clone() for n, p in grpo.policy.model.named_parameters()}
    _, rollouts, scores = grpo.step(PROMPTS, 0)
    with torch.no_grad():
        for name, parameter in grpo.policy.model.named_parameters():
            parameter.copy_(before[name])
    known = [i for i, s in enumerate(scores) if s.value is not None]
    assert len(known) == 14 and len({len(r.response_ids) for r in rollouts}) > 4
    total, tokens = torch.zeros(()), sum(len(rollouts[i].response_ids) for i in known)
    for i in known:
        group = [scores[j].value for j in known if j // 4 == i // 4]
        mean = sum(group) / len(group)
        deviation = (sum((s - mean) ** 2 for s in group) / (len(group) - 1)) ** 0.5
        advantage = (scores[i].value - mean) / (deviation + 1e-4)
        logprobs = logprobs_of(grpo.policy, rollouts[i])
        with torch.no_grad():
            reference = logprobs_of(Role(grpo.policy.model), rollouts[i])
        ratio = reference - logprobs
        kl = {"k2": 0.5 * ratio**2, "k3": ratio.exp() - 1 - ratio, None: 0 * ratio}[estimator]
        loss = -advantage * (logprobs - logprobs.detach()).exp() + beta * kl
        share = {
            "token": 1 / tokens,
            "sequence": 1 / len(known) / len(loss),
            "constant": 1 / len(known) / 12,
        }[normalize]
        total = total + share * loss.sum()
    expected = torch.autograd.grad(total, grpo.learner.parameters)
    for ours, theirs in zip(grabbed["g"], expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


def test_several_epochs_start_at_ratio_one_and_clip_above_where_told():
    grpo = make(
        epochs=3,
        clip_range=0.01,
        clip_range_high=0.5,
        optimizer=OptimizerConfig(learning_rate=1e-2),
    )
    metrics, _, _ = grpo.step(PROMPTS, 0)
    assert metrics["policy/first_ratio_deviation"] == 0.0 and metrics["policy/epochs"] == 3
    assert metrics["policy/ratio_max"] > 1.01 and metrics["policy/clip_fraction"] > 0


def test_a_group_that_agrees_teaches_nothing():
    class Same(EvenReward):
        def score(self, rollouts):
            return [Score(3.0) for _ in rollouts]

    grpo = make(Same())
    metrics, _, _ = grpo.step(PROMPTS, 0)
    assert metrics["grad_norm"] == 0.0


@pytest.mark.parametrize(
    "settings",
    [{}, {"epochs": 2, "minibatches": 2}, {"scale_advantages": False, "normalize": "constant"}],
)
def test_it_learns(tmp_path, settings):
    optimizer = OptimizerConfig(learning_rate=1e-2)
    grpo = make(steps=25, samples_per_prompt=8, optimizer=optimizer, **settings)
    run = RunDirectory.open(tmp_path / "run", {})
    train(grpo, PROMPTS, run)
    rows = run.metrics()
    assert rows[-1]["reward/proxy"] > rows[0]["reward/proxy"] + 1.2


def test_killed_and_resumed_equals_uninterrupted(tmp_path):
    def kill(step, metrics):
        if step == 2:
            raise KeyboardInterrupt
        return {}

    settings = {"steps": 4, "checkpoint_every": 1, "kl": {"coefficient": 0.1}, "ema_decay": 0.9}
    whole = make(**settings)
    train(whole, PROMPTS, RunDirectory.open(tmp_path / "whole", {}))
    with pytest.raises(KeyboardInterrupt):
        train(make(**settings), PROMPTS, RunDirectory.open(tmp_path / "cut", {}), on_step=kill)
    again = make(**settings)
    train(again, PROMPTS, RunDirectory.open(tmp_path / "cut", {}))
    for one, other in zip(whole.learner.parameters, again.learner.parameters, strict=True):
        assert torch.equal(one, other)


def test_an_option_without_effect_is_an_error():
    with pytest.raises(ConfigError, match=r"kl\.estimator has no effect"):
        build(PolicyConfig, {"algorithm": "grpo", "kl": {"estimator": "k3"}})
