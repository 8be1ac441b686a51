"""Rejection sampling against plain autograd and a recount of its choices."""

import math
import statistics
from dataclasses import replace

import pytest
import torch

from tether.core.errors import ConfigError
from tether.core.rundir import RunDirectory
from tether.core.types import Prompt, Score, StopReason, user
from tether.data.chat import ChatEncoder
from tether.models.loading import add_adapter
from tether.models.tiny import tiny_model, tiny_tokenizer
from tether.models.trunk import Role
from tether.rollout.local import LocalEngine
from tether.settings.learner import OptimizerConfig
from tether.settings.model import LoraConfig
from tether.settings.reading import build
from tether.settings.sampling import BestOfNConfig
from tether.stages.best_of_n import BestOfN
from tether.stages.online_loop import train

PROMPTS = [
    Prompt((user(text),), f"p{n}")
    for n, text in enumerate(["one", "two two", "three", "a longer one"])
]


class EvenReward:
    """Ten times the share of even token ids; the responses in `fails` cannot be scored."""

    name = "even"

    def __init__(self, fails=()):
        self.fails = fails

    def score(self, rollouts):
        scores = [
            Score(10.0 * sum(i % 2 == 0 for i in r.response_ids) / len(r.response_ids))
            for r in rollouts
        ]
        return [
            Score(None, reason="down") if n in self.fails else score
            for n, score in enumerate(scores)
        ]


def make(reward=None, trained_a_little=False, with_reference=True, **options):
    options = {
        "steps": 3,
        "prompts_per_step": 4,
        "samples_per_prompt": 5,
        "max_new_tokens": 12,
        "optimizer": OptimizerConfig(learning_rate=3e-3),
        **options,
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
    reference = Role(model) if with_reference else None
    engine = LocalEngine(policy, encoder)
    return BestOfN(
        config=BestOfNConfig(**options),
        policy=policy,
        reference=reference,
        reward=reward or EvenReward(),
        engine=engine,
        encoder=encoder,
    )


def weights_of(stage):
    return torch.cat([p.detach().flatten().clone() for p in stage.learner.parameters])


def logprobs_of(role, rollout, temperature):
    """One sequence at a time through the plain model."""
    role.activate()
    ids = torch.tensor([rollout.prompt_ids + rollout.response_ids])
    logits = role.causal_model(input_ids=ids).logits[0, len(rollout.prompt_ids) - 1 : -1]
    return (
        (logits / temperature)
        .log_softmax(-1)
        .gather(-1, torch.tensor(rollout.response_ids)[:, None])[:, 0]
    )


def favourites(rollouts, scores, samples, keep, threshold, penalty):
    """A recount by full sort of each prompt's samples."""
    chosen = []
    for start in range(0, len(rollouts), samples):
        known = [
            (i, scores[i].value)
            for i in range(start, start + samples)
            if scores[i].value is not None
        ]
        known = [
            (i, v - penalty * (rollouts[i].stop_reason is StopReason.LENGTH)) for i, v in known
        ]
        known = [(i, v) for i, v in known if threshold is None or v >= threshold]
        chosen += [i for i, _ in sorted(known, key=lambda pair: (-pair[1], pair[0]))[:keep]]
    return chosen


CHOICES = [
    {},
    {"keep": 2, "normalize": "sequence"},
    {"keep": 5, "threshold": 5.5, "temperature": 0.7},
    {"threshold": 6.5, "missing_stop_penalty": 3.0, "normalize": "sequence", "temperature": 1.4},
]


@pytest.mark.parametrize("options", CHOICES)
def test_the_update_is_the_likelihood_of_the_favourites_as_sampled(options):
    stage = make(
        EvenReward(fails=(1, 7, 15, 16, 17, 18, 19)),
        True,
        micro_batch_tokens=96,
        **options,
    )
    before = {n: p.detach().clone() for n, p in stage.policy.model.named_parameters()}
    grabbed, original = {}, stage.learner.step
    stage.learner.step = lambda: (
        grabbed.update(g=[m.grad.clone() for m in stage.learner.masters]),
        original(),
    )[1]
    metrics, rollouts, scores = stage.step(PROMPTS, 0)
    with torch.no_grad():
        for name, parameter in stage.policy.model.named_parameters():
            parameter.copy_(before[name])
    config = stage.config
    kept = favourites(
        rollouts,
        scores,
        5,
        config.keep,
        config.threshold,
        config.missing_stop_penalty,
    )
    assert stage.select(rollouts, scores) == kept
    # whose last token is the stop token, and trained
    assert any(rollouts[i].stop_reason is StopReason.STOP_TOKEN for i in kept)
    tokens, total = sum(len(rollouts[i].response_ids) for i in kept), torch.zeros(())
    for i in kept:
        logprobs = logprobs_of(stage.policy, rollouts[i], config.temperature)
        total = total - (
            logprobs.sum() / tokens if config.normalize == "token" else logprobs.mean() / len(kept)
        )
    assert metrics["policy/loss"] == pytest.approx(float(total.detach()), abs=1e-5)
    for ours, theirs in zip(
        grabbed["g"],
        torch.autograd.grad(total, stage.learner.parameters),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)
    assert metrics["kept/responses"] == len(kept)
    # the last prompt's scores all failed
    assert metrics["kept/prompts_without"] == 4 - len({i // 5 for i in kept}) >= 1
    assert metrics["reward/failed"] == 7
    assert metrics["reward/kept"] == pytest.approx(statistics.fmean(scores[i].value for i in kept))
    assert metrics["reward/proxy"] == pytest.approx(
        statistics.fmean(s.value for s in scores if s.value is not None),
    )


def test_equals_are_taken_in_the_order_they_were_sampled():
    class Same(EvenReward):
        def score(self, rollouts):
            return [Score(3.0) for _ in rollouts]

    stage = make(Same(), keep=2, threshold=3.0)  # what reaches the threshold is kept
    _, rollouts, scores = stage.step(PROMPTS, 0)
    assert [
        (rollouts[i].prompt.id, rollouts[i].sample_index) for i in stage.select(rollouts, scores)
    ] == [(f"p{prompt}", sample) for prompt in range(4) for sample in range(2)]


@pytest.mark.parametrize("normalize", ["token", "sequence"])
@pytest.mark.parametrize("tokens", [24, 60, 130])
def test_micro_batches_do_not_change_the_updates(normalize, tokens):
    def updated(budget):
        stage = make(
            micro_batch_tokens=budget,
            keep=3,
            epochs=2,
            minibatches=2,
            normalize=normalize,
        )
        metrics, _, _ = stage.step(PROMPTS, 0)
        assert stage.learner.updates == 4
        return weights_of(stage), metrics["policy/loss"]

    whole, loss = updated(100_000)
    assert (whole - weights_of(make())).abs().max() > 1e-3
    cut, cut_loss = updated(tokens)
    # Adam turns the rounding of a gradient near 0 into a difference of steps, but of few weights
    # and by little.
    assert (cut - whole).abs().mean() < 1e-5
    assert cut_loss == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("silent_engine", [False, True])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_distance_and_entropy_are_those_of_all_samples(temperature, silent_engine):
    stage = make(EvenReward(fails=(2, 11)), True, temperature=temperature)
    rollouts = [
        r
        for g in stage.engine.generate(PROMPTS, stage.config.sampling, num_samples=5)
        for r in g.rollouts
    ]
    with torch.no_grad():
        policy = [logprobs_of(stage.policy, r, temperature) for r in rollouts]
        reference = [logprobs_of(stage.reference, r, temperature) for r in rollouts]
    if silent_engine:  # one that does not say how likely its tokens were
        rollouts = [replace(r, logprobs=()) for r in rollouts]
    metrics = stage.measure(rollouts, stage.reward.score(rollouts), [0, 7])
    expected = statistics.fmean(
        float((p - q).sum()) for p, q in zip(policy, reference, strict=True)
    )
    assert abs(expected) > 0.1
    assert metrics["kl/policy_reference_k1"] == pytest.approx(expected, abs=1e-4)
    assert metrics["policy/entropy"] == pytest.approx(-float(torch.cat(policy).mean()), abs=1e-4)
    assert metrics["kl/best_of_n"] == pytest.approx(math.log(5) - 4 / 5)
    assert metrics["response/length"] == statistics.fmean(map(len, policy))
    assert (
        metrics["response/stop_rate"]
        == sum(len(p) < 12 or r.finished for p, r in zip(policy, rollouts, strict=True)) / 20
    )
    assert metrics["kept/length"] == (len(policy[0]) + len(policy[7])) / 2


def test_without_a_reference_no_distance_is_claimed():
    metrics, _, _ = make(with_reference=False, report_kl=False).step(PROMPTS, 0)
    assert "kl/policy_reference_k1" not in metrics
    thresholded, _, _ = make(threshold=2.0).step(PROMPTS, 0)
    # what a threshold makes of the distance depends on the policy
    assert "kl/best_of_n" not in thresholded
    with pytest.raises(ValueError, match="report_kl needs a reference"):
        make(with_reference=False)


def test_every_round_samples_from_the_policy_as_it_has_become():
    stage = make()
    _, first, _ = stage.step(PROMPTS, 0)
    with torch.no_grad():
        policy = [logprobs_of(stage.policy, r, 1.0) for r in first]
    assert (
        max(
            float((p - torch.tensor(r.logprobs)).abs().max())
            for p, r in zip(policy, first, strict=True)
        )
        > 1e-2
    )
    before = [p.detach().clone() for p in stage.policy.parameters()]
    _, second, _ = stage.step(PROMPTS, 1)
    with torch.no_grad():
        for parameter, value in zip(stage.policy.parameters(), before, strict=True):
            parameter.copy_(value)
        for rollout in second:
            assert rollout.policy_version == 1
            torch.testing.assert_close(
                logprobs_of(stage.policy, rollout, 1.0),
                torch.tensor(rollout.logprobs),
                atol=3e-5,
                rtol=0,
            )


@pytest.mark.parametrize("reward", [EvenReward(fails=range(20)), EvenReward()])
def test_where_nothing_is_kept_nothing_moves(tmp_path, reward):
    stage = make(reward, steps=2, threshold=10.5)
    before = weights_of(stage)
    run = RunDirectory.open(tmp_path / "run", {})
    train(stage, PROMPTS, run)
    assert torch.equal(weights_of(stage), before)
    assert stage.learner.updates == 0
    assert [(row["kept/responses"], row["kept/prompts_without"]) for row in run.metrics()] == [
        (0, 4),
        (0, 4),
    ]


@pytest.mark.parametrize(
    "options",
    [{}, {"keep": 2, "epochs": 2, "minibatches": 2, "normalize": "sequence"}],
)
def test_it_learns(tmp_path, options):
    stage = make(
        steps=10,
        samples_per_prompt=8,
        optimizer=OptimizerConfig(learning_rate=1e-2),
        **options,
    )
    run = RunDirectory.open(tmp_path / "run", {})
    train(stage, PROMPTS, run)
    first, last = run.metrics()[0], run.metrics()[-1]
    assert last["reward/proxy"] > first["reward/proxy"] + 1.2
    assert first["reward/kept"] > first["reward/proxy"] + 1.0
    assert last["kl/policy_reference_k1"] > 1.0 > abs(first["kl/policy_reference_k1"])


def test_imitating_what_was_chosen_blindly_teaches_nothing(tmp_path):
    """The control: the best by a number that has nothing to do with the tokens, everything else as
    where it learns.
    """

    class Blind(EvenReward):
        def score(self, rollouts):
            return [Score(float(n * 7 % 5)) for n, _ in enumerate(rollouts)]

    def evenness(stage):
        groups = stage.engine.generate(PROMPTS, stage.config.sampling, num_samples=32, seed=9)
        return statistics.fmean(
            s.value for s in EvenReward().score([r for g in groups for r in g.rollouts])
        )

    stage = make(
        Blind(),
        steps=12,
        samples_per_prompt=8,
        optimizer=OptimizerConfig(learning_rate=1e-2),
    )
    before = evenness(stage)
    train(stage, PROMPTS, RunDirectory.open(tmp_path / "run", {}))
    assert evenness(stage) < before + 0.8


def test_killed_and_resumed_equals_uninterrupted(tmp_path):
    def kill(step, metrics):
        if step == 3:
            raise KeyboardInterrupt
        return {}

    options = {
        "steps": 4,
        "checkpoint_every": 2,
        "epochs": 2,
        "minibatches": 2,
        "keep": 2,
        "ema_decay": 0.5,
    }
    whole = make(**options)
    whole_run = RunDirectory.open(tmp_path / "whole", {})
    train(whole, PROMPTS, whole_run)
    with pytest.raises(KeyboardInterrupt):
        train(make(**options), PROMPTS, RunDirectory.open(tmp_path / "cut", {}), on_step=kill)
    again = make(**options)
    run = RunDirectory.open(tmp_path / "cut", {})
    train(again, PROMPTS, run)
    assert torch.equal(weights_of(again), weights_of(whole))
    keys = ["reward/proxy", "reward/kept", "policy/loss", "grad_norm", "kl/policy_reference_k1"]
    assert [[row[k] for k in keys] for row in run.metrics()] == [
        [row[k] for k in keys] for row in whole_run.metrics()
    ]


def test_the_average_of_the_weights_is_what_the_run_ends_with(tmp_path):
    stage = make(epochs=2, ema_decay=0.7)
    seen, original = [], stage.learner.step
    stage.learner.step = lambda: (
        original(),
        seen.append([master.detach().clone() for master in stage.learner.masters]),
    )[0]
    train(stage, PROMPTS, RunDirectory.open(tmp_path / "run", {}))
    assert len(seen) == 6
    averages = seen[0]
    for masters in seen[1:]:
        averages = [
            0.7 * average + 0.3 * master for average, master in zip(averages, masters, strict=True)
        ]
    for parameter, average, last in zip(stage.learner.parameters, averages, seen[-1], strict=True):
        torch.testing.assert_close(parameter.detach().float(), average, rtol=1e-5, atol=1e-7)
        assert not torch.allclose(average, last, rtol=1e-4, atol=1e-6)


CHANGES = {
    "steps": 2,
    "prompts_per_step": 3,
    "samples_per_prompt": 12,
    "keep": 2,
    "threshold": 7.5,
    "max_new_tokens": 11,
    "temperature": 0.8,
    "missing_stop_penalty": 9.0,
    "epochs": 3,
    "minibatches": 1,
    "normalize": "sequence",
    "ema_decay": 0.5,
    "optimizer": OptimizerConfig(learning_rate=2e-3),
    "seed": 1,
}


def test_every_option_changes_what_is_learned(tmp_path):
    def learned(name, **options):
        stage = make(
            **{"steps": 1, "epochs": 2, "minibatches": 2, "samples_per_prompt": 5, **options},
        )
        train(stage, PROMPTS, RunDirectory.open(tmp_path / name, {}))
        return weights_of(stage)

    plain = learned("plain")
    assert torch.equal(learned("again"), plain)
    assert [
        name
        for name, value in CHANGES.items()
        if torch.equal(learned(name, **{name: value}), plain)
    ] == []
    # of cost and of record
    others = {
        "micro_batch_tokens",
        "report_kl",
        "checkpoint_every",
        "keep_checkpoints",
        "sample_rows",
        "thought_tokens",  # of a template that writes thoughts: tests/rollout/test_thinking.py
    }
    assert CHANGES.keys() | others == BestOfNConfig.model_fields.keys()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("keep=9", "keep = 9 of samples_per_prompt = 8"),
        ("keep=8", "the reward has no effect"),
        ("samples_per_prompt=1", "the reward has no effect"),
        ("clip_range=0.2", "unknown key 'clip_range'"),
        ("top_p=0.9", "unknown key 'top_p'"),
    ],
)
def test_wrong_options_are_one_clear_message(override, message):
    with pytest.raises(ConfigError, match=message):
        build(BestOfNConfig, {}, [override], where="recipe.toml")
