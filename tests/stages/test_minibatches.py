"""The optimizer steps of a batch of rollouts: how many, of which answers, and what each of them is
divided by.
"""

import math
import random
import tomllib

import pytest
import torch
from tests.stages.test_policy_gradient import PROMPTS, Facts, Reward, deviation, make, mean

from tether.algorithms.policy_losses import ppo_clip_loss
from tether.core.rundir import RunDirectory
from tether.core.types import Prompt, Rollout, Sampling, Score, StopReason, user
from tether.data.chat import ChatEncoder
from tether.models.tiny import tiny_tokenizer
from tether.settings.learner import OptimizerConfig
from tether.settings.reading import packaged_recipe
from tether.stages.learner.local import schedule_factor
from tether.stages.online_loop import train
from tether.stages.rollouts import Experience, deal

pytestmark = pytest.mark.audit


def quickstart():
    settings = tomllib.loads(packaged_recipe("quickstart").read_text())["ppo"]
    algorithmic = ("samples_per_prompt", "baseline", "minibatches", "epochs", "lam", "kl")
    return {name: settings[name] for name in algorithmic if name in settings}


def test_a_stop_token_that_is_the_padding_too_counts():
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    encoder = ChatEncoder(tokenizer, (1,))
    rollouts = [
        Rollout((70, 71), ids, (), StopReason.STOP_TOKEN, "", 0, 0, Sampling(), PROMPTS[0])
        for ids in ((7, 8, 1), (9, 1))
    ]
    experience = Experience(rollouts, [Score(1.0), Score(2.0)], encoder, 64, torch.device("cpu"))
    assert encoder.pad_id == 1 and experience.mask.tolist() == [
        [True, True, True],
        [True, True, False],
    ]


RECIPES = {
    "quickstart": ("ppo", quickstart()),
    "grpo": ("grpo", {"epochs": 2, "minibatches": 2, "samples_per_prompt": 4}),
    "gspo": ("gspo", {"samples_per_prompt": 4}),
    "dapo": ("dapo", {"samples_per_prompt": 4, "refill": 1}),
    "reinforce++": ("reinforce++", {"samples_per_prompt": 1}),
}


def spy_on_updates(stage):
    """The gradient and the learning rate of every optimizer step, as they come."""
    gradients, rates, original = [], [], stage.learner.step

    def step():
        gradients.append([m.grad.clone() for m in stage.learner.masters])
        metrics = original()
        rates.append(metrics["learning_rate"])
        return metrics

    stage.learner.step = step
    return gradients, rates


@pytest.mark.parametrize("name", RECIPES)
def test_a_setting_of_memory_changes_neither_updates_nor_gradients(name, tmp_path):
    algorithm, settings = RECIPES[name]
    first = {}
    for budget in (96, 400, 4000):
        optimizer = OptimizerConfig(
            learning_rate=3e-3,
            warmup_fraction=0.1,
            schedule="linear",
            final_fraction=0.1,
        )
        stage = make(
            algorithm,
            prompts_per_step=8,
            micro_batch_tokens=budget,
            steps=3,
            optimizer=optimizer,
            **settings,
        )
        gradients, rates = spy_on_updates(stage)
        run = RunDirectory.open(tmp_path / str(budget), {})
        train(stage, [Prompt((user(f"{n} times"),), f"p{n}") for n in range(16)], run)
        planned = stage.config.epochs * stage.config.minibatches
        assert [
            (row["policy/updates"], row["policy/updates_planned"]) for row in run.metrics()
        ] == [(planned, planned)] * 3
        assert len(rates) == stage.learner.updates == stage.learner.total_updates == 3 * planned
        assert rates[-1] == 3e-3 * schedule_factor(optimizer, 3 * planned - 1, 3 * planned)
        assert all(row["policy/first_ratio_deviation"] < 1e-6 for row in run.metrics())
        first[budget] = gradients[0]
    assert max(g.abs().max() for g in first[96]) > 1e-3
    for budget in (400, 4000):
        for one, other in zip(first[96], first[budget], strict=True):
            torch.testing.assert_close(one, other, atol=2e-6, rtol=2e-4)


def gspo(f, rows):
    return sum(
        -advantage(f, i) * (f.logp[i] - f.logp[i].detach()).mean().exp() / len(rows) for i in rows
    )


def dr_grpo(f, rows):
    return sum(-advantage(f, i, scaled=False) * f.logp[i].sum() / (12 * len(rows)) for i in rows)


def grpo_by_response(f, rows):
    """GRPO's equation 3 with k2 in the loss: a response's mean over its tokens, the mean over
    responses.
    """
    total = 0
    for i in rows:
        kl = 0.5 * (f.logp[i] - f.reference[i]) ** 2
        total = total + (-advantage(f, i) * f.logp[i] + 0.3 * kl).mean() / len(rows)
    return total


def grpo_by_token(f, rows):
    tokens = sum(len(f.logp[i]) for i in rows)
    return sum(-advantage(f, i) * f.logp[i].sum() / tokens for i in rows)


def advantage(f, i, scaled=True):
    values = list(f.group(i).values())
    return (f.scores[i] - mean(values)) / ((deviation(values) + 1e-4) if scaled else 1.0)


KL = {"coefficient": 0.3, "place": "loss", "estimator": "k2"}


@pytest.mark.parametrize(
    ("algorithm", "settings", "equation"),
    [
        ("gspo", {}, gspo),
        ("dr_grpo", {"minibatches": 4}, dr_grpo),
        ("grpo", {"minibatches": 4, "normalize": "sequence", "kl": KL}, grpo_by_response),
        ("grpo", {"minibatches": 4}, grpo_by_token),
    ],
    ids=["gspo", "dr_grpo", "grpo by response", "grpo by token"],
)
@pytest.mark.parametrize("budget", [96, 4000])
def test_every_minibatch_is_divided_by_its_own(algorithm, settings, equation, budget):
    """All four gradients of a step against the equation over the minibatch's responses, at weights
    that hardly move.
    """
    still = OptimizerConfig(learning_rate=1e-12, max_grad_norm=math.inf)
    stage = make(
        algorithm,
        Reward(),
        prompts_per_step=8,
        micro_batch_tokens=budget,
        optimizer=still,
        **settings,
    )
    gradients, _ = spy_on_updates(stage)
    _, rollouts, scores = stage.step(PROMPTS * 2, 0)
    facts, experience = Facts(stage, rollouts, scores), stage.experience
    parts = [
        torch.cat([experience.rows[n] for n in part]).tolist() for part in experience.minibatches
    ]
    assert len(gradients) == 4 and sorted(i for part in parts for i in part) == list(range(32))
    lengths = [mean([len(rollouts[i].response_ids) for i in part]) for part in parts]
    assert max(lengths) > 1.1 * min(lengths)  # else a wrong denominator would not show
    unmatched = list(gradients)
    for part in parts:
        rows = [i for i in part if scores[i].value is not None]
        expected = torch.autograd.grad(
            equation(facts, rows),
            stage.policy.parameters(),
            retain_graph=True,
        )
        distances = [
            max(float((a - b).abs().max()) for a, b in zip(g, expected, strict=True))
            for g in unmatched
        ]
        best = min(range(len(unmatched)), key=distances.__getitem__)
        for one, other in zip(unmatched.pop(best), expected, strict=True):
            torch.testing.assert_close(one, other, atol=3e-6, rtol=3e-4)


def test_minibatches_are_whole_groups_with_as_many_answers_that_count():
    generator = random.Random(0)
    for case in range(200):
        groups, size, parts = (
            generator.randint(1, 12),
            generator.randint(1, 6),
            generator.randint(1, 5),
        )
        counts = [generator.random() < 0.8 for _ in range(groups * size)]
        dealt = deal(counts, size, parts, str(case))
        assert sorted(i for part in dealt for i in part) == list(range(len(counts)))
        assert dealt == deal(counts, size, parts, str(case))
        counted = [sum(counts[i] for i in part) for part in dealt]
        alive = sum(any(counts[g * size : (g + 1) * size]) for g in range(groups))
        if alive >= parts:
            assert len(dealt) == parts and min(counted) > 0 and max(counted) - min(counted) <= size
            assert all(
                len({tuple(part) for part in dealt if i // size in {j // size for j in part}}) == 1
                for i in range(len(counts))
            )
        else:
            assert (
                sum(c > 0 for c in counted) == min(parts, sum(counts))
                and max(counted) - min(counted) <= 1
            )
    orders = {str(deal([True] * 8, 1, 2, str(seed))) for seed in range(30)}
    assert len(orders) > 10  # other prompts stand together at every step


def test_a_minibatch_without_a_known_score_takes_no_step():
    class Failing(Reward):
        def score(self, rollouts):
            return [Score(1.0 * n) if n < 2 else Score(None) for n, _ in enumerate(rollouts)]

    stage = make("grpo", Failing(), prompts_per_step=4, minibatches=4, samples_per_prompt=4)
    gradients, _ = spy_on_updates(stage)
    metrics, _, _ = stage.step(PROMPTS, 0)
    assert (metrics["policy/updates"], metrics["policy/updates_planned"]) == (2, 4)
    assert stage.learner.updates == len(gradients) == 2
    assert all(any(g.abs().max() > 0 for g in gradient) for gradient in gradients)


def test_the_kl_of_a_sequence_ratio_is_that_of_its_tokens():
    """Log ratios of +0.3 and -0.3 in turn have the mean 0; k3 = exp(d) - 1 - d of each is 0.0453 on
    average.
    """
    d = torch.tensor([[0.3, -0.3] * 4])
    mask = torch.ones(1, 8, dtype=torch.bool)
    _, whole = ppo_clip_loss(
        d - 1.0,
        -torch.ones(1, 8),
        torch.ones(1, 8),
        mask,
        clip_range=0.2,
        denominator=8,
        sequence_ratio=True,
    )
    by_hand = ((math.exp(0.3) - 1.3) + (math.exp(-0.3) - 0.7)) / 2
    assert by_hand == pytest.approx(0.0453, abs=1e-4)
    assert float(whole.approximate_kl) == pytest.approx(by_hand, rel=1e-4)
    assert float(whole.ratio_max) == pytest.approx(1.0) and float(whole.clip_fraction) == 0.0


class Silent(Reward):
    """Every third prompt's answers all score the same."""

    def score(self, rollouts):
        return [
            Score(1.0 if int(r.prompt.id[1:]) % 3 == 0 else float(n % 4))
            for n, r in enumerate(rollouts)
        ]


def test_prompts_in_reserve_that_were_not_needed_are_not_lost(tmp_path):
    """Each of 12 prompts is sampled before any is sampled again, however many a step took from its
    reserve.
    """
    prompts = [Prompt((user(f"{n} times"),), f"p{n}") for n in range(12)]

    def trained(folder, kill_at=None):
        sampled = []
        stage = make(
            "dapo",
            Silent(),
            prompts_per_step=2,
            refill=2,
            minibatches=1,
            clip_range_high=0.3,
            epochs=2,
            steps=4,
        )
        generate = stage.engine.generate

        def counted(batch, *args, **kwargs):
            sampled.extend(
                (p.id, place) for p, place in zip(batch, kwargs["ordinals"], strict=True)
            )
            return generate(batch, *args, **kwargs)

        def kill(step, metrics):
            if step == kill_at:
                raise KeyboardInterrupt
            return {}

        stage.engine.generate = counted
        stage.config = stage.config.model_copy(update={"checkpoint_every": 1})
        run = RunDirectory.open(tmp_path / folder, {})
        if kill_at:
            with pytest.raises(KeyboardInterrupt):
                train(stage, prompts, run, on_step=kill)
        else:
            train(stage, prompts, run)
        return sampled, stage

    sampled, whole = trained("whole")
    assert [place for _, place in sampled] == list(range(len(sampled)))
    assert len(sampled) > 8  # a reserve was used
    assert len({name for name, _ in sampled[:12]}) == min(12, len(sampled))
    trained("cut", kill_at=3)
    rest, again = trained("cut")
    assert rest == sampled[-len(rest) :]
    for one, other in zip(whole.learner.parameters, again.learner.parameters, strict=True):
        assert torch.equal(one, other)
