"""Learning from teachers against float64 sums over the plain models' own logits."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from tether.core.types import Message, Prompt, Score, StopReason, user
from tether.data.chat import ChatEncoder
from tether.models.heads import ScalarHead
from tether.models.loading import add_adapter
from tether.models.tiny import tiny_model, tiny_tokenizer
from tether.models.trunk import Role
from tether.rollout.local import LocalEngine
from tether.settings.learner import OptimizerConfig
from tether.settings.model import LoraConfig
from tether.settings.policy import PolicyConfig
from tether.stages.given_answers import REPLY, PartlyGiven
from tether.stages.policy_gradient import PolicyGradient
from tether.stages.rollouts import Clock, step_metrics
from tether.stages.teachers import AskingTeacher, ModelTeacher, TeacherReward, Teachers

PROMPTS = [
    Prompt((user(text),), f"p{n}")
    for n, text in enumerate(["one", "two two", "three", "a longer one"])
]
TEMPERATURE = 0.8


class Length:
    name = "length"

    def score(self, rollouts):
        return [Score(float(len(r.response_ids))) for r in rollouts]


def randomised(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))


def shouted(encoder):
    return lambda prompt: encoder.prompt((Message("system", "SHOUT"), *prompt.messages))


def make(reward=None, weights=(1.0,), **settings):
    """A policy and its teachers: the start behind a system message, and another model."""
    values = {
        "algorithm": "distill",
        "teacher": ({"model": "start", "system": "SHOUT"},) * len(weights),
        "steps": 3,
        "prompts_per_step": 4,
        "samples_per_prompt": 2,
        "max_new_tokens": 12,
        "micro_batch_tokens": 96,
        "temperature": TEMPERATURE,
        "optimizer": OptimizerConfig(learning_rate=3e-3),
    }
    config = PolicyConfig.model_validate({**values, **settings})
    encoder = ChatEncoder(tiny_tokenizer(), (1, *range(40, 60)))
    base = tiny_model(0).requires_grad_(False).eval()
    model = add_adapter(base, "policy", LoraConfig(rank=8, last_layers=1), seed=1)
    randomised(model, 3)
    policy = Role(model, "policy")
    value = Role(model, "policy", ScalarHead(64, zero=False)) if config.critic else None
    shared = {"encoder": encoder, "micro_batch_tokens": 96}
    members = [
        ModelTeacher(role=Role(model), reads=shouted(encoder), weight=weights[0], **shared),
        ModelTeacher(
            role=Role(tiny_model(7).requires_grad_(False).eval()),
            weight=weights[-1],
            **shared,
        ),
    ][: len(weights)]
    teachers = Teachers(
        config=config,
        policy=policy,
        encoder=encoder,
        members=members,
        temperature=TEMPERATURE,
        micro_batch_tokens=96,
    )
    return PolicyGradient(
        config=config,
        policy=policy,
        reference=Role(model),
        value=value,
        reward=reward or TeacherReward(teachers),
        engine=LocalEngine(policy, encoder),
        encoder=encoder,
        teachers=teachers,
    )


def first_update(stage):
    """The gradient of the first optimizer step, with its rollouts and metrics."""
    grabbed = {}
    original = stage.learner.step

    def spy():
        grabbed.setdefault("g", [m.grad.clone() for m in stage.learner.masters])
        return original()

    stage.learner.step = spy
    before = copy.deepcopy(stage.policy.model)
    step = stage.step(PROMPTS, 0)
    return grabbed["g"], step, before


def exact_logprobs(model, adapter, prompt_ids, rollout):
    """(tokens, words) log-probabilities in float64, by the library's own forward."""
    for layer in model.modules():
        if hasattr(layer, "_active_adapter"):
            layer._active_adapter = [adapter] if adapter else []
    ids = torch.tensor([tuple(prompt_ids) + rollout.response_ids])
    logits = model(input_ids=ids).logits[0, len(prompt_ids) - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1)


def gap(kind, q, p, tokens, beta=0.5):
    def kl(a, b):
        return (a.exp() * (a - b)).sum(-1)

    middle = (beta * p.exp() + (1 - beta) * q.exp()).log()
    written = torch.tensor(tokens)[:, None]
    return {
        "token": lambda: (q - p).detach().gather(1, written)[:, 0] * q.gather(1, written)[:, 0],
        "reverse": lambda: kl(q, p),
        "forward": lambda: kl(p, q),
        "jsd": lambda: beta * kl(p, middle) + (1 - beta) * kl(q, middle),
    }[kind]()


def oracle(stage, model, rollouts, kind, weights):
    """The mean over all counted tokens of the weighted gaps, differentiated in float64."""
    double = copy.deepcopy(model).double().requires_grad_(False)
    other = copy.deepcopy(stage.teachers.shown[-1].role.model).double()
    learned = [p for n, p in double.named_parameters() if ".policy." in n]
    for parameter in learned:
        parameter.requires_grad_(True)
    reads = shouted(stage.encoder)
    total, count = 0.0, 0
    for rollout in rollouts:
        with torch.no_grad():
            theirs = [exact_logprobs(double, None, reads(rollout.prompt), rollout)]
            if len(weights) > 1:
                theirs.append(exact_logprobs(other, None, rollout.prompt_ids, rollout))
        own = exact_logprobs(double, "policy", rollout.prompt_ids, rollout)
        for weight, one in zip(weights, theirs, strict=True):
            total = total + weight * gap(kind, own, one, rollout.response_ids).sum()
        count += len(rollout.response_ids)
    return torch.autograd.grad(total / count, learned)


@pytest.mark.parametrize("weights", [(1.0,), (0.25, 0.75)], ids=["one", "two"])
@pytest.mark.parametrize("kind", ["token", "reverse", "forward", "jsd"])
def test_the_gradient_is_that_of_float64_sums_over_plain_logits(kind, weights):
    stage = make(weights=weights, divergence=kind)
    ours, step, before = first_update(stage)
    expected = oracle(stage, before, step.rollouts, kind, weights)
    one, other = (torch.cat([g.flatten().double() for g in side]) for side in (ours, expected))
    assert other.norm() > 1e-3
    assert (one - other).norm() <= 1e-5 * other.norm()
    assert step.metrics["teacher/divergence"] > 0 or kind == "token"


def test_the_score_of_an_answer_is_minus_its_mean_gap():
    """By token the log-ratio, else the divergence; none of them is the zero that stood there."""
    for kind in ("token", "reverse"):
        stage = make(divergence=kind)
        _, step, before = first_update(stage)
        double = copy.deepcopy(before).double()
        for rollout, score in zip(step.rollouts, step.scores, strict=True):
            q = exact_logprobs(double, "policy", rollout.prompt_ids, rollout)
            p = exact_logprobs(double, None, shouted(stage.encoder)(rollout.prompt), rollout)
            tokens = torch.tensor(rollout.response_ids)[:, None]
            sampled = (q - p).gather(1, tokens).mean()
            exact = gap(kind, q, p, rollout.response_ids).mean() if kind == "reverse" else sampled
            assert score.value == pytest.approx(-float(exact), rel=1e-4, abs=1e-6)
        mean = -sum(
            score.value * len(rollout.response_ids)
            for score, rollout in zip(step.scores, step.rollouts, strict=True)
        ) / sum(len(rollout.response_ids) for rollout in step.rollouts)
        assert step.metrics["teacher/divergence"] == pytest.approx(mean, rel=1e-5)


def test_an_answer_whose_scoring_failed_stays_without_a_score_and_teaches_nothing():
    class Failing(TeacherReward):
        def score(self, rollouts):
            first, *others = super().score(rollouts)
            return [replace(first, value=None, reason="the environment failed"), *others]

    stage = make()
    stage.reward = Failing(stage.teachers)
    ours, step, before = first_update(stage)
    assert step.scores[0].value is None and step.scores[0].reason == "the environment failed"
    assert all(score.value for score in step.scores[1:])
    expected = oracle(stage, before, step.rollouts[1:], "token", (1.0,))
    one, other = (torch.cat([g.flatten().double() for g in side]) for side in (ours, expected))
    assert (one - other).norm() <= 1e-5 * other.norm()


def sampled(stage, model, rollout):
    """The written tokens' log-probabilities by policy and teacher, in float64."""
    reads = shouted(stage.encoder)(rollout.prompt)
    own = exact_logprobs(model, "policy", rollout.prompt_ids, rollout)
    with torch.no_grad():
        theirs = exact_logprobs(model, None, reads, rollout)
    tokens = torch.tensor(rollout.response_ids)[:, None]
    return own.gather(1, tokens)[:, 0], theirs.gather(1, tokens)[:, 0]


def over_group(values):
    """The scores of pairs of answers over their mean, in units of their deviation."""
    pairs = [values[start : start + 2] for start in range(0, len(values), 2)]
    means = [sum(pair) / 2 for pair in pairs]
    return [
        (value - mean) / (abs(pair[0] - pair[1]) / 2**0.5 + 1e-4)
        for pair, mean in zip(pairs, means, strict=True)
        for value in pair
    ]


PLAIN = {"algorithm": "reinforce", "normalize_scores": False, "kl": {"coefficient": 0.0}}


@pytest.mark.parametrize(
    ("settings", "credit"),
    [
        ({}, lambda values: values),
        ({"algorithm": "grpo"}, over_group),
        ({**PLAIN, "baseline": "none", "truncated": "mask"}, lambda values: values),
    ],
    ids=["distill", "grpo", "masked"],
)
def test_a_token_has_the_whole_score_and_its_own_log_ratio_alone(settings, credit):
    """A_t = what the method makes of the score, at every token, + c (log p_t − log q_t); answers
    without end may be left out.
    """
    stage = make(Length(), teacher_coefficient=0.3, **settings)
    ours, step, before = first_update(stage)
    double = copy.deepcopy(before).double().requires_grad_(False)
    learned = [p for n, p in double.named_parameters() if ".policy." in n]
    for parameter in learned:
        parameter.requires_grad_(True)
    credits = credit([float(len(r.response_ids)) for r in step.rollouts])
    total, count = 0.0, 0
    for rollout, score in zip(step.rollouts, credits, strict=True):
        if rollout.finished or stage.config.truncated == "score":
            q, p = sampled(stage, double, rollout)
            total = total - ((score + 0.3 * (p - q.detach())) * q).sum()
            count += len(q)
    assert count > len(step.rollouts)
    expected = torch.autograd.grad(total / count, learned)
    one, other = (torch.cat([g.flatten().double() for g in side]) for side in (ours, expected))
    assert other.norm() > 1e-3
    assert (one - other).norm() <= 1e-5 * other.norm()


def test_answers_without_end_are_left_out_where_teachers_are_the_only_reward():
    stage = make(truncated="mask")
    ours, step, before = first_update(stage)
    ended = [rollout for rollout in step.rollouts if rollout.finished]
    assert 0 < len(ended) < len(step.rollouts)
    expected = oracle(stage, before, ended, "token", (1.0,))
    one, other = (torch.cat([g.flatten().double() for g in side]) for side in (ours, expected))
    assert (one - other).norm() <= 1e-5 * other.norm()


def test_a_critic_and_whitening_see_the_reward_alone():
    """GAE of the score at the last token, whitened, and then the teacher's log-ratio of each token."""
    critic = {"critic": True, "whiten_advantages": True, "lam": 0.9}
    stage = make(Length(), teacher_coefficient=0.3, **critic)
    _, step, before = first_update(stage)
    double = copy.deepcopy(before).double()
    estimates, values = [], stage.experience.values
    for row, rollout in enumerate(step.rollouts):
        running, later = 0.0, 0.0
        last = len(rollout.response_ids) - 1
        for t in range(last, -1, -1):
            value = float(values[row, t])
            running = (last + 1.0) * (t == last) + later - value + 0.9 * running
            later = value
            estimates.append(((row, t), running, value))
    advantages = [running for _, running, _ in estimates]
    mean = sum(advantages) / len(advantages)
    spread = (sum((a - mean) ** 2 for a in advantages) / len(advantages)) ** 0.5
    ratios = [(p - q).tolist() for q, p in (sampled(stage, double, r) for r in step.rollouts)]
    for (row, t), running, value in estimates:
        expected = (running - mean) / spread + 0.3 * ratios[row][t]
        assert float(stage.experience.advantages[row, t]) == pytest.approx(expected, abs=1e-4)
        assert float(stage.experience.returns[row, t]) == pytest.approx(running + value, abs=1e-4)


def test_a_reward_and_a_teacher_add_up():
    """The gradient of both is the sum of those of each alone, on the same answers."""
    both, alone, taught = (
        first_update(make(reward=reward, teacher_coefficient=weight))[0]
        for reward, weight in ((Length(), 0.3), (Length(), 0.0), (None, 0.3))
    )
    for a, b, c in zip(both, alone, taught, strict=True):
        torch.testing.assert_close(a, b + c, atol=1e-6, rtol=1e-4)


def test_what_separates_held_out_answers_is_measured_over_the_vocabulary():
    stage = make(divergence="forward")
    rollouts = [
        rollout
        for group in stage.engine.generate(PROMPTS, stage.config.sampling, num_samples=2, seed=3)
        for rollout in group.rollouts
    ]
    scores = stage.reward.judge(rollouts)
    double = copy.deepcopy(stage.policy.model).double()
    for rollout, score in zip(rollouts, scores, strict=True):
        q = exact_logprobs(double, "policy", rollout.prompt_ids, rollout)
        p = exact_logprobs(double, None, shouted(stage.encoder)(rollout.prompt), rollout)
        other = (p.argmax(-1) != torch.tensor(rollout.response_ids)).double().mean()
        assert score.value == pytest.approx(-float(gap("reverse", q, p, ()).mean()), rel=1e-4)
        assert score.parts == {
            "forward_kl": pytest.approx(float(gap("forward", q, p, ()).mean()), rel=1e-4),
            "other_tokens": pytest.approx(float(other), abs=1e-6),
            "entropy": pytest.approx(float(-(q.exp() * q).sum(-1).mean()), rel=1e-4),
        }


def test_a_teacher_that_reads_otherwise_keeps_the_order_of_tokens():
    """In documents of several answers to one prompt, too: each token's own log-probability."""
    stage = make(samples_per_prompt=4, micro_batch_tokens=400)
    rollouts, scores, _ = stage.sample(
        PROMPTS,
        0,
        Clock(),
    )
    experience = stage.gather(rollouts, scores, 0)
    double = copy.deepcopy(stage.policy.model).double()
    for place, batch in enumerate(experience.batches):
        found = batch.scatter(stage.teachers.logprobs(experience.read(place)))
        for row, rollout in zip(found, experience.read(place).rollouts, strict=True):
            with torch.no_grad():
                p = exact_logprobs(double, None, shouted(stage.encoder)(rollout.prompt), rollout)
            exact = p.gather(1, torch.tensor(rollout.response_ids)[:, None])[:, 0]
            torch.testing.assert_close(row[: len(exact)].double(), exact, atol=1e-4, rtol=1e-4)


def test_a_teacher_elsewhere_has_its_numbers_at_its_tokens():
    """The gradient with the numbers of a server is that with the same numbers from a model."""
    here = make()
    there = make()
    own = here.teachers.shown[0]

    def ask(rollouts):
        answers = []
        for rollout in rollouts:
            with torch.no_grad():
                p = exact_logprobs(
                    there.policy.model,
                    None,
                    own.reads(rollout.prompt),
                    rollout,
                )
            answers.append(p.gather(1, torch.tensor(rollout.response_ids)[:, None])[:, 0].tolist())
        return answers

    there.teachers.members = [AskingTeacher(ask=ask)]
    for a, b in zip(first_update(here)[0], first_update(there)[0], strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-3)


def test_held_out_answers_are_measured_where_their_likeliest_tokens_are_probable():
    """The mean over the places that have least_mass, of the teacher's two tokens and of all others
    as one more; of an answer without such a place nothing is known.
    """
    stage = make(divergence="forward")
    groups = stage.engine.generate(PROMPTS, stage.config.sampling, num_samples=2, seed=3)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    masses = [0.95, 0.5, 0.92]

    def likeliest(answers):
        return [
            [
                ([5, 6], [math.log(0.7 * mass), math.log(0.3 * mass)])
                for mass in (
                    masses[t % 3] if one.prompt.id != "p3" else 0.1 for t in range(one.num_written)
                )
            ]
            for one in answers
        ]

    stage.teachers.members = [
        AskingTeacher(ask=lambda answers: [], likeliest=likeliest, least_mass=0.9, weight=weight)
        for weight in (0.25, 0.75)
    ]
    double = copy.deepcopy(stage.policy.model).double()
    for rollout, score in zip(rollouts, stage.reward.judge(rollouts), strict=True):
        if rollout.prompt.id == "p3":
            assert score.value is None and score.reason
            continue
        gaps = []
        for t, q in enumerate(exact_logprobs(double, "policy", rollout.prompt_ids, rollout).exp()):
            mass = masses[t % 3]
            if mass >= 0.9:
                pairs = [(q[5], 0.7 * mass), (q[6], 0.3 * mass), (1 - q[5] - q[6], 1 - mass)]
                gaps.append(sum(float(a) * math.log(float(a) / b) for a, b in pairs))
        assert score.value == pytest.approx(-sum(gaps) / len(gaps), rel=1e-4)


def test_what_several_servers_leave_out_is_one_mean_by_their_weights():
    stage = make(divergence="forward")
    stage.teachers.members = [
        AskingTeacher(
            ask=lambda answers: [],
            weight=weight,
            least_mass=0.9,
            masses=[torch.tensor(row)],
        )
        for weight, row in ((0.2, [0.8, 1.0]), (0.6, [0.95, 0.95]))
    ]
    metrics = stage.teachers.coverage()
    assert metrics["teacher/mass_left_out"] == pytest.approx((0.2 * 0.1 + 0.6 * 0.05) / 0.8)
    assert metrics["teacher/places_left_out"] == pytest.approx(0.2 * 0.5 / 0.8)


def test_a_share_of_the_prompts_is_answered_by_its_rows():
    """The same ones whoever samples beside them, and cut to the length of an answer."""
    stage = make(divergence="forward", own_answers=0.5)
    replies = ["yes", "a reply that is much longer than an answer may be"]
    prompts = [
        replace(PROMPTS[i % 4], metadata={REPLY: Message("assistant", replies[i % 2])})
        for i in range(40)
    ]
    engine = PartlyGiven(stage.engine, stage.encoder, 0.5)
    sampling = stage.config.sampling
    groups = engine.generate(prompts, sampling, num_samples=2, ordinals=range(40))
    given = [place for place, group in enumerate(groups) if not group.rollouts[0].logprobs]
    assert 10 <= len(given) <= 30
    later = engine.generate(prompts[20:], sampling, num_samples=2, ordinals=range(20, 40))
    assert [group.rollouts for group in later] == [group.rollouts for group in groups[20:]]
    for place in given:
        first, second = groups[place].rollouts
        whole = stage.encoder.conversation(
            (*prompts[place].messages, prompts[place].metadata[REPLY]),
            "last",
        )
        assert first == second and first.prompt_ids == whole.prompt
        assert first.response_ids == whole.ids[whole.prompt_length :][:12]
        cut = len(whole.ids) - whole.prompt_length > 12
        assert first.stop_reason == (StopReason.LENGTH if cut else StopReason.STOP_TOKEN)
    step = stage.step([replace(p, metadata=prompts[0].metadata) for p in PROMPTS], 0)
    assert step.metrics["teacher/divergence"] > 0


def test_the_replies_of_rows_are_not_among_what_the_policy_is_measured_by():
    """KL, entropy and the gap to the engine are those of its own answers."""
    stage = make(divergence="forward", own_answers=0.5, kl={"coefficient": 0.1})
    groups = stage.engine.generate(PROMPTS, stage.config.sampling, num_samples=2)
    own = [rollout for group in groups for rollout in group.rollouts]
    given = [replace(r, response_ids=r.response_ids[::-1], logprobs=()) for r in own]
    metrics = []
    for rollouts in (own, own + given):
        experience = stage.gather(rollouts, [Score(0.0)] * len(rollouts), 0)
        stage.evaluate(experience)
        metrics.append(step_metrics(experience, coefficient=0.1))
    expected, measured = metrics
    for name in ("kl/policy_reference_k1", "policy/entropy", "policy/engine_gap"):
        assert measured[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6)


def test_it_learns_what_its_teacher_reads():
    """Ten steps take a fifth of the distance, and the answers are read again for that."""
    stage = make(divergence="reverse", steps=10, optimizer=OptimizerConfig(learning_rate=1e-2))

    def distance():
        groups = stage.engine.generate(PROMPTS, stage.config.sampling, num_samples=8, seed=99)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        return -sum(score.value for score in stage.reward.judge(rollouts)) / len(rollouts)

    before = distance()
    for number in range(10):
        stage.step(PROMPTS, number)
    assert distance() < 0.8 * before
