"""Online direct methods against autograd on whole sequences, the stage for collected pairs, and a
tiny model that learns.
"""

import dataclasses

import pytest
import torch

from tether.core.errors import ConfigError
from tether.core.rundir import RunDirectory
from tether.core.types import Prompt, Rollout, Sampling, Score, StopReason, user
from tether.data.chat import ChatEncoder
from tether.models.loading import add_adapter
from tether.models.tiny import tiny_model, tiny_tokenizer
from tether.models.trunk import Role
from tether.rollout.local import LocalEngine
from tether.settings.learner import OptimizerConfig
from tether.settings.model import LoraConfig
from tether.settings.reading import build
from tether.settings.sampling import OnlineDirectConfig
from tether.settings.supervised import DirectConfig
from tether.stages.direct import Direct
from tether.stages.learner.checkpoint import complete_checkpoints
from tether.stages.online_direct import OnlineDirect, best_and_worst
from tether.stages.online_loop import train

PROMPTS = [
    Prompt((user(text),), f"p{n}")
    for n, text in enumerate(["one", "two two", "three", "a longer one"])
]
ENCODER = ChatEncoder(tiny_tokenizer(), (1, *range(40, 60)))


class EvenReward:
    """Ten times the share of even token ids. If troubled, the first prompt's answers tie once 2 are
    taken off the unfinished ones, and of the second's only one can be scored.
    """

    name = "even"

    def __init__(self, troubled=False, samples=4):
        self.troubled, self.samples = troubled, samples

    def score(self, rollouts):
        scores = [
            Score(10.0 * sum(i % 2 == 0 for i in r.response_ids) / len(r.response_ids))
            for r in rollouts
        ]
        if self.troubled:
            scores[: self.samples] = [
                Score(2.0 * (not r.finished)) for r in rollouts[: self.samples]
            ]
            scores[self.samples + 1 : 2 * self.samples] = [Score(None)] * (self.samples - 1)
        return scores


def make(reward=None, reference="shared", **settings):
    settings = {
        "steps": 3,
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        "max_new_tokens": 12,
        "optimizer": OptimizerConfig(learning_rate=3e-3),
        **settings,
    }
    model = add_adapter(
        tiny_model(0).requires_grad_(False).eval(),
        "policy",
        LoraConfig(rank=8),
        seed=1,
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    policy, config = Role(model, "policy"), OnlineDirectConfig(**settings)
    reference = None if config.loss in ("orpo", "simpo") else Role(model)
    return OnlineDirect(
        config=config,
        policy=policy,
        reference=reference,
        reward=reward or EvenReward(),
        engine=LocalEngine(policy, ENCODER),
        encoder=ENCODER,
    )


def logprob_of(role, rollout, temperature):
    role.activate()
    ids = torch.tensor([rollout.prompt_ids + rollout.response_ids])
    logits = (
        role.causal_model(input_ids=ids).logits[0, len(rollout.prompt_ids) - 1 : -1] / temperature
    )
    return logits.log_softmax(-1).gather(-1, torch.tensor(rollout.response_ids)[:, None]).sum()


@pytest.mark.parametrize("tokens", [32, 10_000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_is_that_of_the_best_over_the_worst(temperature, tokens):
    stage = make(
        EvenReward(troubled=True),
        temperature=temperature,
        micro_batch_tokens=tokens,
        beta=0.3,
        missing_stop_penalty=2.0,
    )
    grabbed, original = {}, stage.learner.step
    stage.learner.step = lambda: (
        grabbed.update(g=[m.grad.clone() for m in stage.learner.masters]),
        original(),
    )[1]
    before = [p.detach().clone() for p in stage.learner.parameters]
    metrics, rollouts, scores = stage.step(PROMPTS, 0)
    assert (metrics["pairs/used"], metrics["pairs/tied"], metrics["pairs/failed"]) == (2, 1, 1)
    with torch.no_grad():
        for parameter, value in zip(stage.learner.parameters, before, strict=True):
            parameter.copy_(value)
    total, ratios = torch.zeros(()), []
    for start in (8, 12):
        order = sorted(
            range(start, start + 4),
            key=lambda i: scores[i].value - 2.0 * (not rollouts[i].finished),
        )
        worst, best = (rollouts[order[i]] for i in (0, -1))
        h = []
        for rollout in (best, worst):
            with torch.no_grad():
                reference = logprob_of(stage.pairs.likelihoods.reference, rollout, temperature)
            h.append(logprob_of(stage.policy, rollout, temperature) - reference)
        ratios += [float(x.detach()) for x in h]
        total = total - torch.log(torch.sigmoid(0.3 * (h[0] - h[1]))) / 2
    assert metrics["loss"] == pytest.approx(total.item(), rel=1e-5)
    assert metrics["kl/policy_reference_k1"] == pytest.approx(sum(ratios) / 4, rel=1e-4)
    expected = torch.autograd.grad(total, stage.learner.parameters)
    for ours, theirs in zip(grabbed["g"], expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("loss", ["dpo", "ipo", "orpo", "simpo"])
def test_on_the_same_pairs_it_is_the_stage_for_collected_ones(loss):
    stage = make(loss=loss)
    groups = stage.engine.generate(PROMPTS, stage.config.sampling, num_samples=4)
    rollouts = [r for g in groups for r in g.rollouts]
    pairs, _ = best_and_worst(rollouts, EvenReward().score(rollouts), len(rollouts) // len(groups))
    rankings = [pair.ranking(ENCODER, str(n)) for n, pair in enumerate(pairs)]
    collected = Direct(
        DirectConfig(loss=loss),
        stage.policy,
        stage.pairs.likelihoods.reference,
        ENCODER,
    )
    assert len(pairs) == 4
    assert stage.pairs(rankings, 4)[0].item() == collected.pairs(rankings, 4)[0].item()


def rollout(ids, sample, finished=True):
    reason = StopReason.STOP_TOKEN if finished else StopReason.LENGTH
    return Rollout((5, 6), ids, (), reason, "", sample, 0, Sampling(), PROMPTS[0])


def test_best_and_worst_by_hand():
    answers = [rollout((7,), 0), rollout((8,), 1), rollout((9,), 2, finished=False)]
    rollouts = [*answers * 4, answers[0], answers[0]]
    scores = [1.0, 2.0, 3.0, None, 2.0, None, 1.0, 1.0, 2.5, 0.5, None, 1.0, 1.0, 2.0]
    pairs, skipped = best_and_worst(
        rollouts,
        [Score(s) for s in scores],
        3,
        missing_stop_penalty=1.5,
    )
    found = [
        (p.best.response_ids, p.worst.response_ids, p.best_score, p.worst_score) for p in pairs
    ]
    assert found == [((8,), (7,), 2.0, 1.0), ((7,), (9,), 0.5, -0.5)]
    # the third group's scores are all 1, the last group's answers are the same
    assert skipped == {"failed": 1, "tied": 2}


class Silent:
    name = "silent"

    def score(self, rollouts):
        return [Score(None)] * len(rollouts)


def test_a_step_without_a_pair_leaves_the_weights_and_goes_on(tmp_path):
    stage = make(Silent(), steps=2)
    before = [p.detach().clone() for p in stage.learner.parameters]
    summary = train(stage, PROMPTS, RunDirectory.open(tmp_path / "run", {}))
    assert all(torch.equal(a, b) for a, b in zip(before, stage.learner.parameters, strict=True))
    assert (
        summary["pairs"] == {"used": 0, "tied": 0, "failed": 8} and summary["failed_rewards"] == 32
    )
    assert stage.learner.updates == 2


@pytest.mark.parametrize("loss", ["dpo", "ipo"])
def test_it_learns_what_scores_high(loss, tmp_path):
    beta = {"dpo": 0.1, "ipo": 0.02}[loss]
    rate = OptimizerConfig(learning_rate=1e-2)
    stage = make(
        loss=loss,
        beta=beta,
        steps=30,
        prompts_per_step=8,
        samples_per_prompt=4,
        optimizer=rate,
    )
    run = RunDirectory.open(tmp_path / "run", {})
    summary = train(stage, PROMPTS, run)
    assert summary["proxy_last"] > summary["proxy_first"] + 1.5
    assert len(run.metrics()) == 30 and all(
        row["pairs/used"] + row["pairs/tied"] == 8 for row in run.metrics()
    )


def test_killed_and_resumed_equals_uninterrupted(tmp_path):
    def trained(folder, stop_at=None):
        stage = make(steps=5, checkpoint_every=2, ema_decay=0.5)

        def progress(done, total, metrics):
            if done == stop_at:
                raise KeyboardInterrupt

        try:
            train(stage, PROMPTS, RunDirectory.open(folder, {}), progress=progress)
        except KeyboardInterrupt:
            return trained(folder)
        return torch.cat([p.detach().flatten() for p in stage.learner.parameters])

    assert torch.equal(trained(tmp_path / "whole"), trained(tmp_path / "cut", stop_at=3))


def observed(folder, **settings):
    """All that an option may change: weights, metrics, passes, checkpoints and texts."""
    stage, calls = (
        make(
            **{
                "steps": 2,
                "max_new_tokens": 8,
                "checkpoint_every": 1,
                "keep_checkpoints": 9,
                **settings,
            },
        ),
        [],
    )
    original = stage.policy.logprobs
    stage.policy.logprobs = lambda *arguments: (calls.append(1), original(*arguments))[1]
    run = RunDirectory.open(folder, {})
    train(stage, PROMPTS, run)
    kept = [path.name for path in complete_checkpoints(run.path / "checkpoints")]
    weights = [round(float(p.detach().abs().sum()), 4) for p in stage.policy.parameters()]
    samples = (
        (run.path / "samples.jsonl").read_text() if (run.path / "samples.jsonl").is_file() else ""
    )
    return weights, [round(row["loss"], 6) for row in run.metrics()], len(calls), kept, samples


EFFECTS = {
    "loss": ({}, {"loss": "ipo"}),
    "beta": ({}, {"beta": 0.5}),
    "label_smoothing": ({}, {"label_smoothing": 0.2}),
    "margin": ({"loss": "simpo"}, {"loss": "simpo", "margin": 1.0}),
    "average": ({"loss": "ipo"}, {"loss": "ipo", "average": True}),
    "likelihood_weight": ({}, {"likelihood_weight": 0.5}),
    "micro_batch_tokens": ({}, {"micro_batch_tokens": 32}),
    "steps": ({}, {"steps": 3}),
    "prompts_per_step": ({}, {"prompts_per_step": 3}),
    "samples_per_prompt": ({}, {"samples_per_prompt": 2}),
    "max_new_tokens": ({}, {"max_new_tokens": 6}),
    "temperature": ({}, {"temperature": 0.5}),
    "missing_stop_penalty": ({}, {"missing_stop_penalty": 10.0}),
    "ema_decay": ({}, {"ema_decay": 0.9}),
    "optimizer": ({}, {"optimizer": OptimizerConfig(learning_rate=1e-3)}),
    "checkpoint_every": ({}, {"checkpoint_every": 2}),
    "keep_checkpoints": ({}, {"keep_checkpoints": 1}),
    "sample_rows": ({}, {"sample_rows": 0}),
    "seed": ({}, {"seed": 5}),
}


def test_every_option_has_an_effect(tmp_path):
    # of a template that writes thoughts: tests/rollout/test_thinking.py
    assert EFFECTS.keys() | {"thought_tokens"} == OnlineDirectConfig.model_fields.keys()
    known = {}
    for option, (plain, changed) in EFFECTS.items():
        if str(plain) not in known:
            known[str(plain)] = observed(tmp_path / f"{option}-plain", **plain)
        assert observed(tmp_path / option, **changed) != known[str(plain)], option


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["samples_per_prompt=1"], "greater than or equal to 2"),
        (["margin=0.5"], "online_direct.margin has no effect with online_direct.loss = 'dpo'"),
        (["loss=robust"], "set online_direct.label_smoothing above 0"),
    ],
)
def test_wrong_settings_are_one_clear_message(overrides, message):
    with pytest.raises(ConfigError, match=message):
        build(OnlineDirectConfig, {}, overrides, where="recipe.toml")


def test_the_policy_is_no_reference_of_itself():
    stage = make()
    with pytest.raises(ValueError, match="is the policy itself"):
        OnlineDirect(
            config=stage.config,
            policy=stage.policy,
            reference=dataclasses.replace(stage.policy),
            reward=EvenReward(),
            engine=stage.engine,
            encoder=ENCODER,
        ).step(PROMPTS, 0)
