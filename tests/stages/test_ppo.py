"""PPO against hand-made sums, invariances, and the demand that a tiny model really learns."""

from functools import cache

import pytest
import torch

from tether.core.errors import ConfigError
from tether.core.rundir import RunDirectory
from tether.core.types import Prompt, Score, user
from tether.data.batches import make_batch
from tether.data.chat import ChatEncoder
from tether.models.heads import ScalarHead
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
from tether.stages.rollouts import Experience

PROMPTS = [
    Prompt((user(text),), f"p{n}")
    for n, text in enumerate(
        ["one", "two two", "three", "a longer one", "five", "six?", "7", "ate"],
    )
]


class EvenReward:
    """Ten times the share of even token ids: learnable by a random model, and nothing to do with
    the code under test.
    """

    name = "even"

    def score(self, rollouts):
        return [
            Score(10.0 * sum(i % 2 == 0 for i in r.response_ids) / len(r.response_ids))
            for r in rollouts
        ]


def make(seed=0, reward=None, roles="shared", last_layers=None, **settings):
    settings = {
        "steps": 4,
        "prompts_per_step": 8,
        "samples_per_prompt": 1,
        "max_new_tokens": 12,
        "epochs": 2,
        "optimizer": OptimizerConfig(learning_rate=3e-3),
        **settings,
    }
    encoder = ChatEncoder(tiny_tokenizer(), (1,))
    base = tiny_model(seed).requires_grad_(False).eval()
    if roles == "shared":
        model = add_adapter(base, "policy", LoraConfig(rank=8, last_layers=last_layers), seed=1)
        policy, reference = Role(model, "policy"), Role(model)
        value = Role(model, "policy", ScalarHead(64))
    else:
        policy, reference = Role(base), Role(tiny_model(seed).requires_grad_(False).eval())
        value = Role(tiny_model(seed).eval(), head=ScalarHead(64))
    config = PolicyConfig.model_validate(settings)
    return PolicyGradient(
        config=config,
        policy=policy,
        reference=reference,
        value=value,
        reward=reward or EvenReward(),
        engine=LocalEngine(policy, encoder),
        encoder=encoder,
    )


def rollouts_of(ppo, seed=5):
    groups = ppo.engine.generate(
        PROMPTS,
        ppo.config.sampling,
        num_samples=ppo.config.samples_per_prompt,
        seed=seed,
    )
    return [r for g in groups for r in g.rollouts]


@pytest.mark.parametrize("roles", ["shared", "separate"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_first_ratio_is_one_and_the_reference_never_moves(tmp_path, roles, temperature):
    ppo = make(roles=roles, temperature=temperature)
    probe = make_batch(
        [ppo.encoder.rollout(r.prompt_ids, r.response_ids) for r in rollouts_of(ppo)],
        0,
    )
    with torch.no_grad():
        before = ppo.reference.logprobs(probe)[0].clone()
        policy_before = ppo.policy.logprobs(probe)[0].clone()
    summary = train(ppo, PROMPTS, RunDirectory.open(tmp_path / "run", {}))
    with torch.no_grad():
        assert torch.equal(ppo.reference.logprobs(probe)[0], before)
        assert not torch.allclose(ppo.policy.logprobs(probe)[0], policy_before, atol=1e-3)
    assert summary["first_ratio_deviation"] == 0.0


def test_old_logprobs_are_those_of_the_tempered_policy():
    """The learner's log-probabilities agree with what the engine reported for the same tokens
    (float32, to rounding).
    """
    ppo = make(temperature=0.6)
    rollouts = rollouts_of(ppo)
    experience = Experience(
        rollouts,
        ppo.reward.score(rollouts),
        ppo.encoder,
        64,
        torch.device("cpu"),
    )
    ppo.evaluate(experience)
    for row, rollout in enumerate(rollouts):
        n = len(rollout.response_ids)
        torch.testing.assert_close(
            experience.logprobs[row, :n],
            torch.tensor(rollout.logprobs),
            atol=3e-5,
            rtol=0,
        )
        assert experience.logprobs[row, n:].abs().sum() == 0


def test_rewards_by_hand():
    """-beta (log pi - log pi_ref) at every token; the score once, at the last real token; failures
    masked.
    """
    ppo = make(
        kl={"coefficient": 0.3},
        normalize_scores=False,
        missing_stop_penalty=2.0,
        score_clip=5.0,
    )
    rollouts = rollouts_of(ppo)
    scores = [Score(float(n)) for n in range(7)] + [Score(None, reason="broken")]
    experience = Experience(rollouts, scores, ppo.encoder, 80, torch.device("cpu"))
    ppo.evaluate(experience)
    experience.reference_logprobs = (
        experience.logprobs - torch.arange(experience.logprobs.shape[1]) * 0.01
    )
    rewards = ppo.shape(experience)
    for row, rollout in enumerate(rollouts):
        n = len(rollout.response_ids)
        expected = [-0.3 * 0.01 * t for t in range(n)]
        expected[-1] += min(5.0, float(row)) - (0.0 if rollout.finished else 2.0)
        if row == 7:
            expected = [0.0] * n
        torch.testing.assert_close(rewards[row, :n], torch.tensor(expected), atol=1e-5, rtol=0)
        assert rewards[row, n:].abs().sum() == 0
    assert experience.mask.sum(-1).tolist() == [len(r.response_ids) for r in rollouts[:7]] + [0]


def test_a_group_baseline_is_the_mean_of_the_other_samples():
    ppo = make(
        samples_per_prompt=3,
        baseline="leave_one_out",
        normalize_scores=False,
        kl={"coefficient": 0.0},
    )
    rollouts = rollouts_of(ppo)
    values = [float(n * n % 7) for n in range(len(rollouts))]
    scores = [Score(v) for v in values]
    scores[4] = Score(None, reason="broken")
    experience = Experience(
        rollouts,
        scores,
        ppo.encoder,
        200,
        torch.device("cpu"),
        document_tokens=200,
    )
    ppo.evaluate(experience)
    totals = ppo.shape(experience).sum(-1).tolist()
    for n in range(len(rollouts)):
        others = [values[m] for m in range(n - n % 3, n - n % 3 + 3) if m not in (n, 4)]
        assert totals[n] == pytest.approx(
            0.0 if n == 4 else values[n] - sum(others) / len(others),
            abs=1e-5,
        )


def test_normalisation_uses_the_references_own_scores():
    ppo = make()
    scores = [Score(v) for v in (1.0, 2.0, None, 6.0)]
    ppo.shaping.settle(scores)
    (one, two, unknown, six) = (row[0] for row in ppo.shaping.scaled(scores))
    assert [one, two, unknown, six] == pytest.approx(
        [-2 / 14**0.5 * 3**0.5, -1 / 14**0.5 * 3**0.5, 0.0, 3 / 14**0.5 * 3**0.5],
    )
    # later scores are measured on that first scale
    assert ppo.shaping.scaled([Score(3.0)]) == [(0.0,)]


class HeadReward:
    """What a scalar head says of the state at each response's last token."""

    name = "head"

    def __init__(self, role, encoder):
        self.role, self.encoder = role, encoder

    @torch.no_grad()
    def score(self, rollouts):
        batch = make_batch(
            [self.encoder.rollout(r.prompt_ids, r.response_ids) for r in rollouts],
            0,
        )
        return [Score(s) for s in self.role.scores(batch).tolist()]


@cache
def reward_model():
    """Weights of a trunk and a head that read, at every token of an answer, the share of even ids
    so far; on samples of the policy its scores have mean 3.84 and deviation 2.64.
    """
    ppo, trunk, head = make(), tiny_model(0).eval(), ScalarHead(64)
    rollouts = [r for seed in range(4) for r in rollouts_of(ppo, seed)]
    batch = make_batch([ppo.encoder.rollout(r.prompt_ids, r.response_ids) for r in rollouts], 0)
    even = batch.scatter((batch.targets % 2 == 0).float())
    lengths = torch.tensor([len(r.response_ids) for r in rollouts])
    mask = torch.arange(even.shape[1]) < lengths[:, None]
    share = (even.cumsum(-1) / torch.arange(1, even.shape[1] + 1))[mask]
    role = Role(trunk.requires_grad_(True), head=head)
    optimizer = torch.optim.Adam([*trunk.parameters(), *head.parameters()], 3e-3)
    for _ in range(80):
        optimizer.zero_grad()
        values = batch.scatter(role.values_at(role.hidden(batch), batch.predict + 1))[mask]
        (values - share).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        scores = role.scores(batch)
        head.scale.fill_(2.64 / float(scores.std()))
        head.offset.fill_(float(scores.mean()) - 3.84 / float(head.scale))
    return trunk.state_dict(), head.state_dict()


def from_reward_model(**settings):
    """PPO whose value starts as a copy of its reward model."""
    ppo, roles = make(roles="separate", value_init="reward", **settings), []
    for _ in range(2):
        role = Role(tiny_model(0).eval(), head=ScalarHead(64))
        role.model.load_state_dict(reward_model()[0])
        role.head.load_state_dict(reward_model()[1])
        roles.append(role)
    reward = HeadReward(roles[0], ppo.encoder)
    return PolicyGradient(
        config=ppo.config,
        policy=ppo.policy,
        reference=ppo.reference,
        value=roles[1],
        reward=reward,
        engine=ppo.engine,
        encoder=ppo.encoder,
    )


@pytest.mark.audit
def test_a_copied_value_starts_on_the_scale_of_normalised_scores():
    """At the last token it misses what is to come by less than a value of zero does, and than the
    unscaled copy by far.
    """
    ppo = from_reward_model(samples_per_prompt=4)
    ppo.step(PROMPTS, 0)
    experience = ppo.experience
    scores = torch.tensor([s.value for s in experience.scores], dtype=torch.float64)
    assert (float(scores.mean()), float(scores.std())) == (
        pytest.approx(3.84, abs=0.8),
        pytest.approx(2.64, abs=0.8),
    )
    last = torch.tensor([len(r.response_ids) - 1 for r in experience.rollouts])
    values = experience.values[torch.arange(len(last)), last].double()
    target = (scores - scores.mean()) / scores.std(correction=0)
    rms = lambda error: float(error.square().mean().sqrt())  # noqa: E731
    unscaled = values * scores.std(correction=0) + scores.mean()
    assert rms(values - target) < 0.8 * rms(target) and rms(unscaled - target) > 2 * rms(target)
    # the reward keeps its units
    assert ppo.reward.score(experience.rollouts[:1])[0].value == pytest.approx(float(scores[0]))


@pytest.mark.audit
def test_a_copied_value_keeps_its_scale_when_resumed(tmp_path):
    settings = {"steps": 3, "checkpoint_every": 1, "prompts_per_step": 4}

    def kill(step, metrics):
        if step == 2:
            raise KeyboardInterrupt
        return {}

    whole, cut, again = (from_reward_model(**settings) for _ in range(3))
    train(whole, PROMPTS, RunDirectory.open(tmp_path / "whole", {}))
    with pytest.raises(KeyboardInterrupt):
        train(cut, PROMPTS, RunDirectory.open(tmp_path / "cut", {}), on_step=kill)
    train(again, PROMPTS, RunDirectory.open(tmp_path / "cut", {}))
    for one, other in zip(
        whole.value.head.state_dict().values(),
        again.value.head.state_dict().values(),
        strict=True,
    ):
        assert torch.equal(one, other)
    assert all(
        torch.equal(a, b)
        for a, b in zip(whole.learner.parameters, again.learner.parameters, strict=True)
    )
    mean, deviation = whole.shaping.normalizer
    fresh = from_reward_model(**settings).value.head
    torch.testing.assert_close(whole.value.head.scale, fresh.scale / deviation)
    torch.testing.assert_close(
        whole.value.head.offset * fresh.scale,
        fresh.offset * fresh.scale + mean,
    )


@pytest.mark.parametrize(
    ("tokens", "share"),
    [(24, 0), (60, 0), (10_000, 0), (120, 120), (10_000, 50), (10_000, 10_000)],
)
def test_micro_batches_and_shared_prompts_do_not_change_the_update(tokens, share):
    def updated(budget, share=0):
        ppo = make(
            micro_batch_tokens=budget,
            epochs=1,
            kl={"coefficient": 0.1},
            samples_per_prompt=3,
        )
        rollouts = rollouts_of(ppo)
        for role in (ppo.value,):
            with torch.no_grad():
                role.head.linear.weight.fill_(0.01)
        scores = ppo.reward.score(rollouts)
        experience = Experience(
            rollouts,
            scores,
            ppo.encoder,
            budget,
            torch.device("cpu"),
            document_tokens=share,
        )
        ppo.evaluate(experience)
        generator = torch.Generator().manual_seed(0)
        experience.advantages = (
            torch.randn(experience.mask.shape, generator=generator) * experience.mask
        )
        experience.returns = (
            torch.randn(experience.mask.shape, generator=generator) * experience.mask
        )
        gradients = {}
        step = ppo.learner.step

        def spy():
            gradients["all"] = torch.cat([m.grad.flatten().clone() for m in ppo.learner.masters])
            return step()

        ppo.learner.step = spy
        ppo.update(experience, 0)
        return gradients["all"]

    whole = updated(100_000)
    assert whole.abs().max() > 1e-3
    torch.testing.assert_close(updated(tokens, share), whole, atol=2e-6, rtol=1e-3)


def test_the_first_update_is_the_vanilla_policy_gradient():
    """At ratio 1 the clipped surrogate's gradient is that of -(1/N) sum A log pi: compared with
    autograd on the plain model.
    """
    ppo = make(roles="separate", epochs=1, value_coefficient=0.0)
    rollouts = rollouts_of(ppo)
    experience = Experience(
        rollouts,
        ppo.reward.score(rollouts),
        ppo.encoder,
        48,
        torch.device("cpu"),
    )
    ppo.evaluate(experience)
    experience.advantages = (
        torch.randn(experience.mask.shape, generator=torch.Generator().manual_seed(1))
        * experience.mask
    )
    grabbed = {}
    original = ppo.learner.step
    ppo.learner.step = lambda: (
        grabbed.update(g=[m.grad.clone() for m in ppo.learner.masters[:5]]),
        original(),
    )[1]
    plain = tiny_model(0)
    total = sum(len(r.response_ids) for r in rollouts)
    loss = 0.0
    for row, rollout in enumerate(rollouts):
        ids, start = [*rollout.prompt_ids, *rollout.response_ids], len(rollout.prompt_ids)
        table = plain(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        for t in range(len(rollout.response_ids)):
            loss = (
                loss - experience.advantages[row, t] * table[start + t - 1, ids[start + t]] / total
            )
    loss.backward()
    expected = [p.grad for p in list(plain.parameters())[:5]]
    ppo.update(experience, 0)
    for ours, theirs in zip(grabbed["g"], expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-3)


def test_common_layers_change_nothing(monkeypatch):
    """Adapters on the upper layer alone: with the lower one computed once, or for every pass anew,
    to the bit.
    """

    def trained():
        ppo = make(last_layers=1, samples_per_prompt=2)
        for number in range(2):
            ppo.step(PROMPTS, number)
        return torch.cat([p.detach().flatten() for p in ppo.policy.parameters()])

    spared = trained()
    monkeypatch.setattr(Role, "common", lambda role, batch: None)
    assert torch.equal(trained(), spared)


@pytest.mark.parametrize(
    ("roles", "rate"),
    [("shared", 1e-2), pytest.param("separate", 2e-3, marks=pytest.mark.slow)],
)
def test_it_learns(tmp_path, roles, rate):
    ppo = make(
        roles=roles,
        steps=30,
        prompts_per_step=32,
        kl={"coefficient": 0.01},
        optimizer=OptimizerConfig(learning_rate=rate),
    )
    run = RunDirectory.open(tmp_path / "run", {})
    train(ppo, PROMPTS, run)
    rows = run.metrics()
    first, last = rows[0], rows[-1]
    assert last["reward/proxy"] > first["reward/proxy"] + 1.2
    assert last["kl/policy_reference_k1"] > 2.0 > abs(first["kl/policy_reference_k1"])


def test_a_strong_tether_holds(tmp_path):
    def final_kl(coefficient):
        settings = {
            "kl": {"coefficient": coefficient},
            "optimizer": OptimizerConfig(learning_rate=3e-3),
        }
        ppo = make(steps=20, prompts_per_step=32, **settings)
        run = RunDirectory.open(tmp_path / f"run{coefficient}", {})
        train(ppo, PROMPTS, run)
        return run.metrics()[-1]["kl/policy_reference_k1"]

    assert final_kl(2.0) < 0.3 * final_kl(0.0)


def test_killed_and_resumed_equals_uninterrupted(tmp_path):
    def weights(ppo):
        return torch.cat([p.detach().flatten() for p in ppo.learner.parameters])

    settings = {
        "steps": 4,
        "checkpoint_every": 1,
        "kl": {"mode": "adaptive", "coefficient": 0.1, "target": 0.1, "horizon": 100.0},
        "ema_decay": 0.5,
    }
    whole = make(**settings)
    whole_run = RunDirectory.open(tmp_path / "whole", {})
    train(whole, PROMPTS, whole_run)

    class KilledError(Exception):
        pass

    def kill(step, metrics):
        if step == 3:
            raise KilledError
        return {}

    run = RunDirectory.open(tmp_path / "killed", {})
    with pytest.raises(KilledError):
        train(make(**settings), PROMPTS, run, on_step=kill)
    resumed = make(**settings)
    train(resumed, PROMPTS, RunDirectory.open(tmp_path / "killed", {}))
    assert torch.equal(weights(resumed), weights(whole))
    keys = ["reward/proxy", "kl/coefficient", "policy/loss", "value/loss", "grad_norm"]
    assert [[r[k] for k in keys] for r in run.metrics()] == [
        [r[k] for k in keys] for r in whole_run.metrics()
    ]


def test_failed_rewards_are_counted_and_teach_nothing(tmp_path):
    class Failing(EvenReward):
        def score(self, rollouts):
            return [Score(None, reason="down") for _ in rollouts]

    ppo = make(reward=Failing(), steps=1, kl={"coefficient": 0.0}, value_coefficient=0.5)
    before = torch.cat([p.detach().flatten().clone() for p in ppo.learner.parameters])
    summary = train(ppo, PROMPTS, RunDirectory.open(tmp_path / "run", {}))
    assert summary["failed_rewards"] == 8
    assert torch.equal(torch.cat([p.detach().flatten() for p in ppo.learner.parameters]), before)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("top_p=0.9", "top_p < 1 samples from"),
        ("kl.target=3.0", "has no effect with kl.mode='fixed'"),
        ("epoch=3", "did you mean 'epochs'"),
        ("kl.coefficent=3", "did you mean 'coefficient'"),
        ("steps=0", "key 'steps'"),
        ("lam=1.5", "key 'lam'"),
        ("baseline=group samples_per_prompt=1", "needs other samples of the same prompt"),
    ],
)
def test_wrong_settings_are_one_clear_message(override, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        build(PolicyConfig, {}, override.split(), where="recipe.toml")
