"""Every published method against its equation, written with loops over single responses and plain
autograd; and every option.
"""

import itertools
import math
import random

import pytest
import torch

from tether.core.errors import ConfigError
from tether.core.rundir import RunDirectory
from tether.core.types import Prompt, Score, user
from tether.data.chat import ChatEncoder
from tether.models.heads import ScalarHead
from tether.models.loading import add_adapter
from tether.models.tiny import tiny_model, tiny_tokenizer
from tether.models.trunk import Role
from tether.rollout.local import LocalEngine
from tether.settings.kl import KLConfig
from tether.settings.learner import OptimizerConfig
from tether.settings.model import LoraConfig
from tether.settings.policy import PRESETS, PolicyConfig
from tether.settings.reading import build
from tether.settings.teacher import TaughtConfig
from tether.stages.online_loop import train
from tether.stages.policy_gradient import PolicyGradient

PROMPTS = [
    Prompt((user(text),), f"p{n}")
    for n, text in enumerate(["one", "two two", "three", "a longer one"])
]


def even(rollout):
    return 10.0 * sum(i % 2 == 0 for i in rollout.response_ids) / len(rollout.response_ids)


class Reward:
    """Ten times the share of even token ids, and its steps: every fourth token is the end of one;
    every seventh one fails.
    """

    name = "even"

    def __init__(self, fails=True):
        self.fails = fails

    def score(self, rollouts):
        found = []
        for n, r in enumerate(rollouts):
            ends = [*range(3, len(r.response_ids), 4)]
            steps = tuple((t, float(r.response_ids[t] % 5) / 4) for t in ends)
            found.append(Score(None) if self.fails and n % 7 == 3 else Score(even(r), steps=steps))
        return found


class Noisy(LocalEngine):
    """Reports log-probabilities that are off by known amounts, as an engine of other numerics
    would.
    """

    def generate(self, *args, **kwargs):
        from dataclasses import replace

        groups = super().generate(*args, **kwargs)
        noise = random.Random(0)
        return [
            replace(
                g,
                rollouts=tuple(
                    replace(
                        r,
                        logprobs=tuple(
                            p + noise.choice((-1.5, -0.3, 0.0, 0.4, 1.5)) for p in r.logprobs
                        ),
                    )
                    for r in g.rollouts
                ),
            )
            for g in groups
        ]


def make(algorithm, reward=None, engine=LocalEngine, **settings):
    settings = {
        "steps": 3,
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        "max_new_tokens": 12,
        "micro_batch_tokens": 96,
        "optimizer": OptimizerConfig(learning_rate=3e-3),
        **settings,
    }
    config = PolicyConfig.model_validate({"algorithm": algorithm, **settings})
    encoder = ChatEncoder(tiny_tokenizer(), (1, *range(40, 60)))
    model = add_adapter(
        tiny_model(0).requires_grad_(False).eval(),
        "policy",
        LoraConfig(rank=8),
        seed=1,
    )
    generator = torch.Generator().manual_seed(3)
    head = ScalarHead(64, zero=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    policy = Role(model, "policy")
    value = Role(model, "policy", head) if config.critic else None
    return PolicyGradient(
        config=config,
        policy=policy,
        reference=Role(model),
        value=value,
        reward=reward or Reward(),
        engine=engine(policy, encoder),
        encoder=encoder,
    )


def gradient_of_first_update(stage):
    """What the first optimizer step receives; the weights are put back."""
    grabbed = {}
    original = stage.learner.step

    def spy():
        if not grabbed:
            grabbed["g"] = [
                None if m.grad is None else m.grad.clone() for m in stage.learner.masters
            ]
        return original()

    stage.learner.step = spy
    before = [p.detach().clone() for p in stage.learner.parameters]
    metrics, rollouts, scores = stage.step(PROMPTS, 0)
    with torch.no_grad():
        for parameter, old in zip(stage.learner.parameters, before, strict=True):
            parameter.copy_(old)
    return grabbed["g"], rollouts, scores, metrics


def logprobs_of(role, rollout):
    role.activate()
    ids = torch.tensor([rollout.prompt_ids + rollout.response_ids])
    logits = (
        role.causal_model(input_ids=ids).logits[0, len(rollout.prompt_ids) - 1 : -1].log_softmax(-1)
    )
    return logits.gather(-1, torch.tensor(rollout.response_ids)[:, None])[:, 0]


def mean(values):
    return sum(values) / len(values)


def deviation(values):
    return (sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1)) ** 0.5


class Facts:
    """One batch of rollouts as lists: what an equation needs."""

    def __init__(self, stage, rollouts, scores):
        self.known = [i for i, s in enumerate(scores) if s.value is not None]
        self.scores = {i: scores[i].value for i in self.known}
        self.steps = {i: scores[i].steps for i in self.known}
        self.rollouts, self.stage = rollouts, stage
        self.logp = {i: logprobs_of(stage.policy, rollouts[i]) for i in self.known}
        with torch.no_grad():
            self.reference = {
                i: logprobs_of(Role(stage.policy.model), rollouts[i]) for i in self.known
            }
        self.kl = {i: (self.logp[i].detach() - self.reference[i]).tolist() for i in self.known}
        self.tokens = sum(len(self.logp[i]) for i in self.known)

    def group(self, i, values=None):
        return {j: (values or self.scores)[j] for j in self.known if j // 4 == i // 4}

    def others(self, i, values=None):
        return [v for j, v in self.group(i, values).items() if j != i]


def to_go(rewards):
    return [sum(rewards[t:]) for t in range(len(rewards))]


def reinforce(f):
    """−(1/N) Σ_t log π_t G_t, with the KL in the rewards."""
    total = 0
    for i in f.known:
        rewards = [-0.3 * k for k in f.kl[i]]
        rewards[-1] += f.scores[i]
        total = total - (torch.tensor(to_go(rewards)) * f.logp[i]).sum() / f.tokens
    return total


def rloo(f):
    """R_i = s_i − β Σ kl; −(1/N) Σ (R_i − mean of the others) log π(y_i)."""
    totals = {i: f.scores[i] - 0.3 * sum(f.kl[i]) for i in f.known}
    return sum(
        -(totals[i] - mean(f.others(i, totals))) * f.logp[i].sum() / f.tokens for i in f.known
    )


def reinforce_plus_plus(f):
    """Returns with the KL in the rewards, whitened over all tokens; PPO's surrogate, at its first
    update.
    """
    returns = {}
    for i in f.known:
        rewards = [-0.3 * k for k in f.kl[i]]
        rewards[-1] += f.scores[i]
        returns[i] = to_go(rewards)
    flat = [g for i in f.known for g in returns[i]]
    scale = mean([(g - mean(flat)) ** 2 for g in flat]) ** 0.5
    return sum(
        -((torch.tensor(returns[i]) - mean(flat)) / scale * f.logp[i]).sum() / f.tokens
        for i in f.known
    )


def reinforce_plus_plus_baseline(f):
    """s_i − the group's mean, whitened over all tokens, and k2 in the loss."""
    centred = {i: f.scores[i] - mean(list(f.group(i).values())) for i in f.known}
    flat = [centred[i] for i in f.known for _ in f.logp[i]]
    scale = mean([(a - mean(flat)) ** 2 for a in flat]) ** 0.5
    total = 0
    for i in f.known:
        total = total - ((centred[i] - mean(flat)) / scale * f.logp[i]).sum() / f.tokens
        total = total + 0.3 * 0.5 * ((f.logp[i] - f.reference[i]) ** 2).sum() / f.tokens
    return total


def grouped(f, i, scaled=True):
    values = list(f.group(i).values())
    return (f.scores[i] - mean(values)) / ((deviation(values) + 1e-4) if scaled else 1.0)


def grpo_corrected(f):
    """GRPO over tokens, with the corrected k3: ρ (r − 1 − log r)."""
    total = 0
    for i in f.known:
        ratio = (f.logp[i] - f.logp[i].detach()).exp()
        r = f.reference[i] - f.logp[i]
        total = total + (-grouped(f, i) * ratio + 0.3 * ratio * (r.exp() - 1 - r)).sum() / f.tokens
    return total


def dr_grpo(f):
    return sum(-grouped(f, i, False) * f.logp[i].sum() / (len(f.known) * 12) for i in f.known)


def gspo(f):
    """−(1/n) Σ_i A_i s_i, s_i = exp(mean_t log ρ)."""
    return sum(
        -grouped(f, i) * (f.logp[i] - f.logp[i].detach()).mean().exp() / len(f.known)
        for i in f.known
    )


def cispo(f):
    return sum(-grouped(f, i) * f.logp[i].sum() / f.tokens for i in f.known)


def process(f):
    """GRPO with rewards of steps: each normalised over all steps of its group; a token gets the sum
    of those not yet passed.
    """
    total = 0
    for i in f.known:
        pool = [v for j in f.group(i) for _, v in f.steps[j]]
        spread = deviation(pool) + 1e-4
        credit = [
            sum((v - mean(pool)) / spread for end, v in f.steps[i] if end >= t)
            for t in range(len(f.logp[i]))
        ]
        total = total - (torch.tensor(credit) * f.logp[i]).sum() / f.tokens
    return total


KL = {"coefficient": 0.3}
RAW = {"normalize_scores": False}
ONE = {"epochs": 1, "minibatches": 1}
CASES = {
    "reinforce": ("reinforce", {"kl": KL, **RAW}, reinforce),
    "rloo": ("rloo", {"kl": KL, **RAW}, rloo),
    "reinforce++": ("reinforce++", {"kl": KL, **ONE, **RAW}, reinforce_plus_plus),
    "reinforce++_baseline": (
        "reinforce++_baseline",
        {"kl": KL, **ONE},
        reinforce_plus_plus_baseline,
    ),
    "grpo, corrected k3": ("grpo", {"kl": {**KL, "estimator": "k3_corrected"}}, grpo_corrected),
    "dr_grpo": ("dr_grpo", {}, dr_grpo),
    "gspo": ("gspo", ONE, gspo),
    "cispo": ("cispo", ONE, cispo),
    "process": ("grpo", {"step_rewards": True}, process),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("budget", [96, 4000])
def test_the_first_gradient_is_the_equation(name, budget):
    algorithm, settings, equation = CASES[name]
    stage = make(algorithm, micro_batch_tokens=budget, **settings)
    ours, rollouts, scores, metrics = gradient_of_first_update(stage)
    assert (
        sum(s.value is None for s in scores) == 2
        and len({len(r.response_ids) for r in rollouts}) > 4
    )
    expected = torch.autograd.grad(
        equation(Facts(stage, rollouts, scores)),
        stage.policy.parameters(),
    )
    assert max(g.abs().max() for g in expected) > 1e-3
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=2e-4)
    assert metrics["policy/first_ratio_deviation"] == 0.0


@pytest.mark.parametrize("name", ["rloo", "grpo, corrected k3", "dr_grpo"])
def test_a_masked_answer_is_neither_in_the_loss_nor_in_a_baseline(name):
    """The equation over the answers that ended alone, the masked ones counted and still scored."""
    algorithm, settings, equation = CASES[name]
    stage = make(algorithm, truncated="mask", **settings)
    ours, rollouts, scores, metrics = gradient_of_first_update(stage)
    cut = [not rollout.finished for rollout in rollouts]
    assert 2 < sum(cut) < 10 and metrics["response/masked"] == sum(cut) / len(cut)
    assert sum(score.value is None for score in scores) == 2
    kept = [Score(None) if gone else s for gone, s in zip(cut, scores, strict=True)]
    expected = torch.autograd.grad(
        equation(Facts(stage, rollouts, kept)),
        stage.policy.parameters(),
    )
    assert max(g.abs().max() for g in expected) > 1e-3
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=2e-4)


def test_masked_answers_do_not_set_the_scale_of_ppos_scores():
    """Mean and deviation of the answers that ended; GAE of these scores less the values, whitened;
    the loss over their tokens alone.
    """
    stage = make(
        "ppo",
        Reward(fails=False),
        truncated="mask",
        lam=0.9,
        value_coefficient=0.0,
        kl={"coefficient": 0.0},
        **ONE,
    )
    ours, rollouts, scores, _ = gradient_of_first_update(stage)
    ended = [i for i, rollout in enumerate(rollouts) if rollout.finished]
    assert 2 < len(ended) < len(rollouts) - 2
    values = [scores[i].value for i in ended]
    middle = mean(values)
    scale = mean([(v - middle) ** 2 for v in values]) ** 0.5
    assert stage.shaping.normalizer == pytest.approx((middle, scale))
    advantages = {}
    for i in ended:
        running, later = 0.0, 0.0
        length = len(rollouts[i].response_ids)
        for t in reversed(range(length)):
            value = float(stage.experience.values[i, t])
            paid = (scores[i].value - middle) / scale if t == length - 1 else 0.0
            running = paid + later - value + 0.9 * running
            advantages[i, t], later = running, value
    flat = list(advantages.values())
    spread = mean([(a - mean(flat)) ** 2 for a in flat]) ** 0.5
    total = 0.0
    for i in ended:
        own = [
            (advantages[i, t] - mean(flat)) / spread for t in range(len(rollouts[i].response_ids))
        ]
        total = total - (torch.tensor(own) * logprobs_of(stage.policy, rollouts[i])).sum()
    expected = torch.autograd.grad(total / len(flat), stage.policy.parameters())
    assert max(g.abs().max() for g in expected) > 1e-3
    for one, other in zip(ours, expected, strict=False):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=2e-4)


def test_reinforce_with_a_learned_value_subtracts_it():
    """lambda 1: A_t = G_t − V_t, with the values that the head gives on the plain model's own
    hidden states.
    """
    stage = make(
        "reinforce",
        critic=True,
        lam=1.0,
        value_coefficient=0.0,
        kl={"coefficient": 0.0},
        **RAW,
    )
    ours, rollouts, scores, _ = gradient_of_first_update(stage)
    facts, total = Facts(stage, rollouts, scores), 0
    for i in facts.known:
        r = rollouts[i]
        stage.policy.activate()
        ids = torch.tensor([r.prompt_ids + r.response_ids])
        states = stage.policy.decoder(input_ids=ids).last_hidden_state[
            0,
            len(r.prompt_ids) - 1 : -1,
        ]
        values = stage.value.head(states).detach()
        total = total - ((facts.scores[i] - values) * facts.logp[i]).sum() / facts.tokens
    expected = torch.autograd.grad(total, stage.policy.parameters())
    for one, other in zip(ours, expected, strict=False):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=2e-4)


def test_a_running_mean_is_that_of_earlier_steps():
    stage = make(
        "reinforce",
        baseline="running_mean",
        baseline_window=20,
        kl={"coefficient": 0.0, "report": False},
        **RAW,
    )
    _, _, first = stage.step(PROMPTS, 0)
    known = [s.value for s in first if s.value is not None]
    assert stage.shaping.past_scores == (pytest.approx(mean(known)), 14)
    ours, rollouts, scores, _ = gradient_of_first_update(stage)
    facts = Facts(stage, rollouts, scores)
    equation = sum(
        -(facts.scores[i] - mean(known)) * facts.logp[i].sum() / facts.tokens for i in facts.known
    )
    for one, other in zip(
        ours,
        torch.autograd.grad(equation, stage.policy.parameters()),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=2e-4)
    assert stage.shaping.past_scores[1] == 20


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_importance_weights_correct_for_the_engine(mode):
    stage = make("grpo", engine=Noisy, importance=mode, importance_cap=2.0)
    ours, rollouts, scores, metrics = gradient_of_first_update(stage)
    facts, total = Facts(stage, rollouts, scores), 0
    for i in facts.known:
        for t, p in enumerate(facts.logp[i]):
            ratio = math.exp(p.item() - rollouts[i].logprobs[t])
            weight = min(ratio, 2.0) if mode == "truncate" else ratio * (0.5 <= ratio <= 2.0)
            total = total - grouped(facts, i) * weight * p / facts.tokens
    for one, other in zip(ours, torch.autograd.grad(total, stage.policy.parameters()), strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=2e-4)
    assert 0.5 < metrics["policy/engine_gap"] < 1.0


class Flat(Reward):
    """All samples of some prompts score the same."""

    def score(self, rollouts):
        return [Score(even(r) if r.prompt.id in ("p1", "p3") else 1.0) for r in rollouts]


def test_groups_without_signal_are_left_out_and_replaced():
    stage = make(
        "dapo",
        Flat(),
        prompts_per_step=2,
        refill=2,
        minibatches=1,
        clip_range_high=0.3,
        epochs=2,
    )
    assert list(stage.ordinals(1)) == [2, 3, 4, 5, 6, 7]
    metrics, rollouts, _ = stage.step(
        [PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[3], PROMPTS[0], PROMPTS[2]],
        0,
    )
    assert [r.prompt.id for r in rollouts] == ["p1"] * 4 + ["p3"] * 4
    assert metrics["group/zero_signal"] == 0.5 and metrics["group/sampled"] == 16
    short, rollouts, _ = stage.step([PROMPTS[0], PROMPTS[2]], 1)
    assert len(rollouts) == 8 and short["group/zero_signal"] == 1.0 and short["policy/updates"] == 0
    assert short["reward/proxy"] == 1.0


class Unknown(Flat):
    """No score for the prompt p0."""

    def score(self, rollouts):
        scores = super().score(rollouts)
        return [
            Score(None, reason="down") if rollout.prompt.id == "p0" else score
            for rollout, score in zip(rollouts, scores, strict=True)
        ]


def test_failed_scores_of_groups_that_are_left_out_are_counted():
    stage = make("dapo", Unknown(), prompts_per_step=2, refill=1)
    metrics, rollouts, scores = stage.step(PROMPTS, 0)
    assert {r.prompt.id for r in rollouts} == {"p1", "p3"}
    assert all(score.value is not None for score in scores)
    assert metrics["reward/failed"] == 4
    whole = make("dapo", Unknown(), prompts_per_step=4, filter_groups=False)
    expected, _, _ = whole.step(PROMPTS, 0)
    for name in ("reward/proxy", "reward/proxy_std", "reward/failed"):
        assert metrics[name] == expected[name]


def test_an_update_that_is_left_out_is_named_beside_later_ones(monkeypatch):
    stage = make("ppo", minibatches=4, epochs=1)
    step, places = stage.learner.step, itertools.count()

    def broken_once():
        if next(places) == 1:
            next(p for p in stage.learner.parameters if p.grad is not None).grad.fill_(math.nan)
        return step()

    monkeypatch.setattr(stage.learner, "step", broken_once)
    metrics, _, _ = stage.step(PROMPTS, 0)
    assert metrics["skipped_updates"] == 1.0 and math.isfinite(metrics["grad_norm"])


def test_a_refilled_step_samples_what_the_reserve_would_have_given():
    """Randomness belongs to a prompt's place in the run, not to the batch that it came in."""
    stage = make("dapo", Flat(), prompts_per_step=2, refill=1)
    _, rollouts, _ = stage.step(PROMPTS, 0)
    other = make("dapo", Flat(), prompts_per_step=4, filter_groups=False)
    _, whole, _ = other.step(PROMPTS, 0)
    assert [r.response_ids for r in rollouts] == [
        r.response_ids for r in whole if r.prompt.id in ("p1", "p3")
    ]


def test_the_run_stops_at_the_kl_target(tmp_path):
    settings = {
        "kl": {"coefficient": 0.0, "mode": "stop", "target": 4.0},
        "optimizer": OptimizerConfig(learning_rate=2e-2),
    }
    stage = make("ppo", steps=30, **settings)
    run = RunDirectory.open(tmp_path / "run", {})
    train(stage, PROMPTS, run)
    kl = [row["kl/policy_reference_k1"] for row in run.metrics()]
    assert len(kl) < 30 and kl[-1] > 4.0 >= max(kl[:-1])
    again = make("ppo", steps=30, **settings)
    train(again, PROMPTS, RunDirectory.open(tmp_path / "run", {}))
    assert len(run.metrics()) == len(kl)


STATES = {"ppo": "a critic", "reinforce": "a running mean", "dapo": "a reserve of prompts"}
"""What of a preset's own a checkpoint has to hold; the others differ in formulas alone."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in STATES else pytest.mark.slow) for name in PRESETS],
)
def test_killed_and_resumed_equals_uninterrupted(tmp_path, name):
    def kill(step, metrics):
        if step == 2:
            raise KeyboardInterrupt
        return {}

    settings = {"steps": 4, "checkpoint_every": 1, "ema_decay": 0.9, "prompts_per_step": 2}
    if name == "reinforce":
        settings |= {"baseline": "running_mean"}
    whole = make(name, **settings)
    train(whole, PROMPTS, RunDirectory.open(tmp_path / "whole", {}))
    with pytest.raises(KeyboardInterrupt):
        train(
            make(name, **settings),
            PROMPTS,
            RunDirectory.open(tmp_path / "cut", {}),
            on_step=kill,
        )
    again = make(name, **settings)
    train(again, PROMPTS, RunDirectory.open(tmp_path / "cut", {}))
    for one, other in zip(whole.learner.parameters, again.learner.parameters, strict=True):
        assert torch.equal(one, other)
    assert whole.state() == again.state()


class Steps:
    """Given rewards of steps: response n is paid ROWS[n] at its first token, in its middle and at
    its last.
    """

    name = "steps"
    ROWS = ((0.5, 1.0, -0.5), (4.0, 0.25, 1.0), (-3.0, 0.0, 0.5), (1.0, 1.0, 1.0))

    def score(self, rollouts):
        lengths = [len(r.response_ids) for r in rollouts]
        ends = [(0, length // 2, length - 1) for length in lengths]
        return [
            Score(sum(row), steps=tuple(zip(e, row, strict=True)))
            for e, row in zip(ends, self.ROWS, strict=True)
        ]


def step_payments(**settings):
    """The rewards that a first step of PPO puts on every token, and its rollouts."""
    plain = {
        "epochs": 1,
        "kl": {"coefficient": 0.0},
        "samples_per_prompt": 1,
        "step_rewards": True,
        "normalize_scores": False,
    }
    stage = make("ppo", Steps(), **plain | settings)
    _, rollouts, _ = stage.step(PROMPTS, 0)
    return stage.experience.rewards, rollouts


@pytest.mark.audit
def test_rewards_of_steps_are_normalised_clipped_and_penalised():
    """By hand: the sums 1, 5.25, -2.5, 3 have deviation 2.8470; later the clip; the penalty of
    length on the last token.
    """
    sums = [sum(row) for row in Steps.ROWS]
    spread = (sum((s - sum(sums) / 4) ** 2 for s in sums) / 4) ** 0.5
    assert spread == pytest.approx(2.8470, abs=1e-4)
    settings = {
        "normalize_scores": True,
        "score_clip": 1.2,
        "overlong_buffer": 10,
        "overlong_penalty": 3.0,
    }
    rewards, rollouts = step_payments(**settings, missing_stop_penalty=0.5)
    for row, rollout, paid in zip(Steps.ROWS, rollouts, rewards, strict=True):
        length = len(rollout.response_ids)
        expected = torch.zeros(length)
        for end, value in zip((0, length // 2, length - 1), row, strict=True):
            expected[end] += max(-1.2, min(1.2, value / spread))
        expected[-1] -= 3.0 * max(0, length - 2) / 10 + 0.5 * (not rollout.finished)
        torch.testing.assert_close(paid[:length], expected)
    assert max(max(row) for row in Steps.ROWS) / spread > 1.2  # the clip acts
    assert max(len(r.response_ids) for r in rollouts) > 2  # and the penalty


@pytest.mark.audit
def test_the_scale_of_step_rewards_is_that_of_the_first_step_and_survives_a_resume():
    first = make("ppo", Steps(), step_rewards=True, samples_per_prompt=1)
    first.step(PROMPTS, 0)
    later = make("ppo", Steps(), step_rewards=True, samples_per_prompt=1)
    later.load_state(first.state())
    paid = later.shaping.scaled([Score(9.0, steps=((1, 9.0), (2, -1.0)))])
    assert paid == [
        pytest.approx((9.0 / first.shaping.normalizer[1], -1.0 / first.shaping.normalizer[1])),
    ]
    assert first.shaping.normalizer == pytest.approx((0.0, 2.8470), abs=1e-4)


@pytest.mark.audit
@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
@pytest.mark.parametrize(("value", "size"), [(100.1, 8), (100.1, 12), (1000.1, 8)])
def test_equal_scores_teach_nothing_however_large(algorithm, value, size):
    """Without a difference there is no advantage; float32 sums of 8 times 1000.1 gave -0.37 of a
    deviation to each answer.
    """

    class Same:
        name = "same"

        def score(self, rollouts):
            return [Score(value) for _ in rollouts]

    stage = make(
        algorithm,
        Same(),
        samples_per_prompt=size,
        prompts_per_step=1,
        kl={"coefficient": 0.0},
    )
    stage.step(PROMPTS[:1], 0)
    assert stage.experience.advantages.abs().max() == 0


def turning(stage, number):
    """Adapters on a path that turns: both factors of every layer move all the time, as far as they
    are long.
    """
    generator = torch.Generator().manual_seed(number // 5)
    for master in stage.learner.masters:
        away = torch.randn(master.shape, generator=generator)
        with torch.no_grad():
            master.mul_(0.97).add_(0.03 * master.norm() / away.norm() * away)


@pytest.mark.parametrize("decay", [0.9, 0.99])
def test_the_average_is_that_of_every_factor_and_close_to_that_of_the_products(decay):
    """Against a sum with weights by hand; and the product of averaged factors beside the average of
    products.
    """
    stage = make("ppo", ema_decay=decay)
    names = [n for n, _ in stage.policy.model.named_parameters() if "policy" in n.split(".")]
    layers = [
        (i, names.index(n.replace("lora_A", "lora_B")))
        for i, n in enumerate(names)
        if "lora_A" in n
    ]
    seen = []
    for number in range(30):
        turning(stage, number)
        stage.learner.follow()
        seen.append([master.detach().double().clone() for master in stage.learner.masters])
    shares = [decay**29, *((1 - decay) * decay ** (29 - number) for number in range(1, 30))]
    means = [
        sum(share * one for share, one in zip(shares, each, strict=True))
        for each in zip(*seen, strict=True)
    ]
    stage.learner.put(stage.learner.averages)
    for parameter, mean in zip(stage.learner.parameters, means, strict=True):
        torch.testing.assert_close(parameter.detach().double(), mean, rtol=1e-4, atol=1e-5)
    for a, b in layers:
        products = sum(share * (one[b] @ one[a]) for share, one in zip(shares, seen, strict=True))
        last = seen[-1][b] @ seen[-1][a]
        assert (means[b] @ means[a] - products).norm() < 0.5 * (last - products).norm()


def test_an_average_goes_on_from_a_checkpoint_as_if_nothing_had_been():
    whole, cut, again = (make("grpo", ema_decay=0.95) for _ in range(3))
    for number in range(12):
        for stage in (whole, cut) if number < 6 else (whole, again):
            turning(stage, number)
            stage.learner.follow()
        if number == 5:
            again.learner.load_state(*cut.learner.state())
    assert all(
        torch.equal(a, b)
        for a, b in zip(whole.learner.averages, again.learner.averages, strict=True)
    )
    parameters = whole.learner.parameters
    # what export reads
    assert [t.shape for t in whole.learner.averages] == [p.shape for p in parameters]


BASES = {
    "ppo": ("ppo", {"epochs": 2}),
    "grpo": ("grpo", {"epochs": 2, "kl": {"coefficient": 0.3}}),
    "reinforce": ("reinforce", {"baseline": "running_mean"}),
}
SWITCHED = {
    "algorithm": ("ppo", "grpo"),
    "samples_per_prompt": ("ppo", 2),
    "max_new_tokens": ("ppo", 9),
    "temperature": ("ppo", 0.7),
    "epochs": ("ppo", 3),
    "minibatches": ("ppo", 3),
    "normalize_scores": ("ppo", False),
    "score_clip": ("ppo", 0.5),
    "missing_stop_penalty": ("ppo", 1.0),
    "truncated": ("ppo", "mask"),
    "overlong_buffer": ("ppo", 4),
    "overlong_penalty": ("ppo", 3.0, {"overlong_buffer": 4}),
    "step_rewards": ("ppo", True),
    "filter_groups": ("grpo", True),
    "refill": ("grpo", 1, {"filter_groups": True, "prompts_per_step": 2}),
    "baseline": ("ppo", "leave_one_out"),
    "baseline_window": ("reinforce", 3),
    "scale_advantages": ("grpo", False),
    "critic": ("reinforce", True),
    "value_init": ("ppo", "reward"),
    "gamma": ("ppo", 0.9),
    "lam": ("ppo", 0.5),
    "whiten_advantages": ("ppo", False),
    "normalize": ("grpo", "sequence"),
    "surrogate": ("grpo", "sequence"),
    "clip_range": ("ppo", 0.001),
    "clip_range_high": ("ppo", 0.001),
    "dual_clip": ("ppo", 1.0001, {"optimizer": OptimizerConfig(learning_rate=5e-2)}),
    "target_kl": ("ppo", 1e-7, {"epochs": 3}),
    "importance": ("ppo", "truncate"),
    "importance_cap": ("ppo", 1.0, {"importance": "truncate"}),
    "entropy_coefficient": ("ppo", 0.1),
    "value_clip_range": ("ppo", 1e-4),
    "value_coefficient": ("ppo", 2.0),
    "value_trains_trunk": ("ppo", True),
    "ema_decay": ("ppo", 0.5),
    "optimizer": ("ppo", OptimizerConfig(learning_rate=1e-3)),
    "seed": ("ppo", 7),
    "kl.coefficient": ("ppo", 0.5),
    "kl.place": ("ppo", "loss"),
    "kl.estimator": ("grpo", "k3"),
    "kl.mode": ("ppo", "adaptive"),
    "kl.target": ("ppo", 0.01, {"kl": {"mode": "adaptive"}}),
    "kl.horizon": ("ppo", 100, {"kl": {"mode": "adaptive"}}),
    "kl.max_factor": ("ppo", 1.0001, {"kl": {"mode": "adaptive"}}),
}
NOT_OF_THE_LOSS = {
    "max_staleness",
    "thought_tokens",
    "steps",
    "prompts_per_step",
    "top_p",
    "micro_batch_tokens",
    "checkpoint_every",
    "keep_checkpoints",
    "sample_rows",
}


def test_every_option_is_accounted_for():
    """A new field needs a case above, or a reason to stand among those that shape the run and not
    the update; those of teachers have test_teachers.py.
    """
    fields = (set(PolicyConfig.model_fields) - {"kl"}) | {
        f"kl.{name}" for name in KLConfig.model_fields
    }
    assert fields - set(TaughtConfig.model_fields) == (
        set(SWITCHED) | NOT_OF_THE_LOSS | {"kl.report"}
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What a training with these settings ends with; made once."""
    weights = {}

    def made(algorithm, settings, flat):
        key = repr((algorithm, settings, flat))
        if key not in weights:
            stage = make(
                algorithm=algorithm,
                **settings,
                reward=Flat() if flat else None,
                engine=Noisy,
            )
            train(stage, PROMPTS, RunDirectory.open(tmp_path_factory.mktemp("run") / "run", {}))
            weights[key] = torch.cat([p.detach().flatten() for p in stage.policy.parameters()])
        return weights[key]

    return made


@pytest.mark.parametrize("option", SWITCHED)
def test_every_option_changes_what_is_learned(trained, option):
    base, value, *extra = SWITCHED[option]
    algorithm, settings = BASES[base]
    settings = {**settings, **(extra[0] if extra else {})}
    flat = "filter" in str(settings) or option == "filter_groups"
    plain = trained(algorithm, settings, flat)
    if option.startswith("kl."):
        switched = {**settings, "kl": {**settings.get("kl", {}), option.removeprefix("kl."): value}}
    else:
        switched = {**settings, option: value}
    algorithm = switched.pop("algorithm", algorithm)
    assert not torch.equal(trained(algorithm, switched, flat), plain)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"algorithm": "reinforce", "clip_range": 0.1},
            "clip_range has no effect with this surrogate",
        ),
        (
            {"algorithm": "grpo", "clip_range": 0.1},
            "clip_range has no effect with one update a batch",
        ),
        ({"algorithm": "grpo", "lam": 0.9}, "lam has no effect without a critic"),
        ({"algorithm": "grpo", "samples_per_prompt": 1}, "needs other samples of the same prompt"),
        ({"algorithm": "reinforce", "epochs": 2}, "has no ratio"),
        (
            {"algorithm": "grpo", "kl": {"place": "token"}},
            r"kl\.place has no effect with "
            r"kl\.coefficient = 0",
        ),
        ({"algorithm": "rloo", "kl": {"estimator": "k3"}}, "rewards take k1"),
        ({"algorithm": "ppo", "kl": {"horizon": 5}}, r"kl\.horizon has no effect"),
        ({"algorithm": "ppo", "kl": {"report": False}}, r"kl\.report has no effect"),
        ({"algorithm": "ppo", "refill": 2}, "refill has no effect without filter_groups"),
        ({"algorithm": "ppo", "filter_groups": True}, "filter_groups has no effect"),
        ({"algorithm": "ppo", "importance_cap": 3.0}, "importance_cap has no effect"),
        ({"algorithm": "ppo", "overlong_penalty": 3.0}, "overlong_penalty has no effect"),
        (
            {"algorithm": "ppo", "overlong_buffer": 400},
            "overlong_buffer is longer than max_new_tokens",
        ),
        ({"algorithm": "ppo", "scale_advantages": True}, "scale_advantages has no effect"),
        ({"algorithm": "rloo", "step_rewards": True}, "has no single score"),
        ({"algorithm": "ppo", "surrogate": "cispo"}, "set clip_range_high"),
        ({"algorithm": "ppo", "kl": {"mode": "adaptive", "coefficient": 0.0}}, "cannot adapt"),
    ],
)
def test_settings_without_effect_or_meaning_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        build(PolicyConfig, values)


def test_presets_are_not_what_the_user_said():
    config = PolicyConfig(algorithm="dapo", surrogate="cispo")
    assert config.clip_range_high == 0.28 and config.model_fields_set == {"algorithm", "surrogate"}
    assert PolicyConfig.model_validate(config.model_dump(exclude_unset=True)) == config
