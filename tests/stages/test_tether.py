"""The KL of a step: in which unit its price is, over which answers it is measured, and when it ends
or leaves out updates.
"""

import copy
import math
import statistics

import pytest
import torch
from tests.stages.test_policy_gradient import (
    PROMPTS,
    Flat,
    Reward,
    even,
    gradient_of_first_update,
    logprobs_of,
    make,
)

from tether.core.types import Score
from tether.models.trunk import Role
from tether.settings.learner import OptimizerConfig
from tether.settings.policy import PRESETS, PolicyConfig
from tether.stages.rollouts import reported

STILL = OptimizerConfig(learning_rate=1e-9)


class Scaled(Reward):
    """The same scores in another unit."""

    def __init__(self, factor, shift=0.0):
        super().__init__(fails=False)
        self.factor, self.shift = factor, shift

    def score(self, rollouts):
        return [Score(self.factor * even(r) + self.shift) for r in rollouts]


class Failing(Reward):
    def score(self, rollouts):
        return [Score(None, reason="down") for _ in rollouts]


def true_kl(stage, rollouts):
    """The mean log ratio of whole answers, by passes of their own."""
    with torch.no_grad():
        each = [
            float((logprobs_of(stage.policy, r) - logprobs_of(Role(stage.policy.model), r)).sum())
            for r in rollouts
        ]
    return statistics.fmean(each)


@pytest.mark.parametrize(
    "name",
    ["ppo", "grpo", "reinforce", "rloo", "reinforce++", "reinforce++_baseline"],
)
def test_the_unit_of_the_reward_changes_nothing_of_what_a_tethered_policy_learns(name):
    """A reward of shares and the same reward of percentages pull as hard against the same
    coefficient (to GRPO's epsilon).
    """
    gradients = []
    for factor, shift in ((0.1, 0.0), (10.0, 50.0)):
        more = {"baseline": "none"} if name == "reinforce" else {}
        stage = make(name, Scaled(factor, shift), kl={"coefficient": 0.3}, **more)
        gradients.append(gradient_of_first_update(stage)[0])
    for one, other in zip(*gradients, strict=True):
        if one is not None:
            torch.testing.assert_close(
                one,
                other,
                rtol=2e-2,
                atol=2e-4 * float(other.abs().max()) + 1e-9,
            )


def test_the_price_of_a_nat_is_logged_in_deviations_of_the_scores():
    for name, settings, price in (
        ("reinforce", {}, 0.3),
        ("reinforce", {"normalize_scores": False}, None),
        ("grpo", {}, 0.3),
        ("reinforce++_baseline", {}, 0.3),
        # the group's deviation divides a KL that is in the response's score
        ("grpo", {"kl": {"coefficient": 0.3, "place": "sequence"}}, None),
        ("grpo", {"kl": {"coefficient": 0.3, "place": "token"}}, 0.3),
    ):
        stage = make(name, Scaled(0.01), **{"kl": {"coefficient": 0.3}, **settings})
        metrics, _, scores = stage.step(PROMPTS, 0)
        expected = 0.3 / statistics.pstdev(s.value for s in scores) if price is None else price
        assert metrics["kl/price"] == pytest.approx(expected, rel=1e-6)
    assert "kl/price" not in make("grpo", Scaled(0.01)).step(PROMPTS, 0)[0]


def test_the_scale_is_that_of_the_first_step_whose_scores_differ():
    class Late(Reward):
        calls = 0

        def score(self, rollouts):
            self.calls += 1
            return [Score(0.0 if self.calls == 1 else even(r)) for r in rollouts]

    stage = make("reinforce", Late(), optimizer=STILL)
    stage.step(PROMPTS, 0)
    assert stage.shaping.normalizer is None
    _, _, scores = stage.step(PROMPTS, 1)
    values = [s.value for s in scores]
    assert stage.shaping.normalizer == pytest.approx(
        (statistics.fmean(values), statistics.pstdev(values)),
    )
    before = stage.shaping.normalizer
    stage.step(PROMPTS, 2)
    assert stage.shaping.normalizer == before


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_method_reports_its_kl_by_default(name):
    stage = make(name, Reward(fails=False), optimizer=STILL)
    metrics, rollouts, _ = stage.step(PROMPTS, 0)
    assert metrics["kl/policy_reference_k1"] == pytest.approx(true_kl(stage, rollouts), abs=2e-4)
    # the policy does stand away from its reference
    assert abs(metrics["kl/policy_reference_k1"]) > 0.05


@pytest.mark.parametrize("number", [0, 1, 2, 3, 5])
def test_a_report_alone_runs_the_reference_on_a_quarter_of_the_groups(number):
    stage = make(
        "grpo",
        Reward(fails=False),
        prompts_per_step=16,
        optimizer=STILL,
        kl={"coefficient": 0.0},
    )
    places = reported(stage.config, 64, number)
    assert len(places) == 16 and {p // 4 for p in places} == {
        n for n in range(16) if n % 4 == number % 4
    }
    asked = []
    original = stage.reference.logprobs
    stage.reference.logprobs = lambda batch, *a, **k: (
        asked.append(len(batch.last)) or original(batch, *a, **k)
    )
    metrics, rollouts, _ = stage.step(PROMPTS * 4, number)
    assert sum(asked) == 16
    assert metrics["kl/policy_reference_k1"] == pytest.approx(
        true_kl(stage, [rollouts[p] for p in places]),
        abs=2e-4,
    )


def test_small_steps_and_a_kl_that_ends_the_training_take_every_answer():
    config = PolicyConfig(algorithm="grpo", samples_per_prompt=4)
    assert reported(config, 16, 3) == list(range(16)) and len(reported(config, 32, 3)) == 16
    assert reported(config, 4, 1) == list(range(4))
    one = PolicyConfig(algorithm="grpo", samples_per_prompt=64, prompts_per_step=1)
    assert reported(one, 64, 7) == list(range(64))
    stage = make(
        "grpo",
        prompts_per_step=16,
        optimizer=STILL,
        kl={"coefficient": 0.0, "mode": "stop", "target": 50.0},
    )
    stage.step(PROMPTS * 4, 0)
    assert bool(stage.experience.has_reference.all())


def test_the_kl_is_that_of_all_answers_whatever_became_of_their_rewards():
    sound = make("ppo", Reward(fails=False), optimizer=STILL)
    some, none = make("ppo", Reward(), optimizer=STILL), make("ppo", Failing(), optimizer=STILL)
    kls = [stage.step(PROMPTS, 0)[0]["kl/policy_reference_k1"] for stage in (sound, some, none)]
    assert kls[1] == pytest.approx(kls[0], rel=1e-5) and kls[2] == pytest.approx(kls[0], rel=1e-5)


class Alike(Reward):
    """Scores that differ in the first step, and not afterwards."""

    def __init__(self, then=0.1):
        super().__init__(fails=False)
        self.then, self.first = then, True

    def score(self, rollouts):
        first, self.first = self.first, False
        return [Score(even(r) if first else self.then) for r in rollouts]


@pytest.mark.parametrize(
    ("algorithm", "moves", "settings"),
    [
        ("grpo", False, {}),
        ("grpo", False, {"epochs": 2, "minibatches": 2}),
        ("grpo", False, {"optimizer": OptimizerConfig(learning_rate=3e-3, weight_decay=0.1)}),
        ("rloo", False, {"kl": {"coefficient": 0.0}}),
        ("dr_grpo", False, {}),
        ("gspo", False, {}),
        ("dapo", False, {"filter_groups": False, "overlong_buffer": 0}),
        ("grpo", True, {"kl": {"coefficient": 0.1}}),
        ("rloo", True, {"kl": {"coefficient": 0.1}}),
        ("grpo", True, {"entropy_coefficient": 0.01}),
        ("grpo", True, {"missing_stop_penalty": 2.0}),
        ("ppo", True, {}),
    ],
)
def test_momentum_alone_moves_no_weight(algorithm, moves, settings):
    stage = make(algorithm, Alike(), **settings)
    assert stage.step(PROMPTS, 0)[0]["policy/updates"] > 0
    before = [p.detach().clone() for p in stage.policy.parameters()]
    moments = copy.deepcopy(stage.learner.optimizer.state_dict()["state"])
    metrics, _, _ = stage.step(PROMPTS, 1)
    assert (metrics["policy/updates"] > 0) == (metrics["grad_norm"] > 0) == moves
    still = [torch.equal(a, b) for a, b in zip(before, stage.policy.parameters(), strict=True)]
    assert all(still) != moves
    after = stage.learner.optimizer.state_dict()["state"]
    kept = [torch.equal(moments[n]["exp_avg"], after[n]["exp_avg"]) for n in moments]
    assert all(kept) != moves


def test_a_step_in_which_every_reward_failed_moves_neither_weights_nor_coefficient():
    kl = {"mode": "adaptive", "coefficient": 0.1, "target": 50.0, "horizon": 100}
    stage = make("ppo", Failing(), kl=kl)
    before = copy.deepcopy([p.detach().clone() for p in stage.policy.parameters()])
    metrics, _, _ = stage.step(PROMPTS, 0)
    assert (
        stage.kl_coefficient == 0.1
        and metrics["policy/updates"] == 0
        and metrics["grad_norm"] == 0.0
    )
    assert math.isfinite(metrics["policy/entropy"]) and metrics["policy/entropy"] > 0
    assert all(torch.equal(a, b) for a, b in zip(before, stage.policy.parameters(), strict=True))
    followed = make("ppo", Reward(), kl=kl)
    followed.step(PROMPTS, 0)
    assert followed.kl_coefficient < 0.1


def test_an_adaptive_coefficient_stops_at_its_bound_and_warns_once(caplog):
    """KL of a policy that does not move lies below its target: 0.8^k leaves [0.1 / 1.5, ...] at the
    second step, 16 responses against a horizon of 16.
    """
    kl = {"mode": "adaptive", "coefficient": 0.1, "target": 50.0, "horizon": 16, "max_factor": 1.5}
    stage, rows = make("ppo", Reward(fails=False), optimizer=STILL, kl=kl), []
    for number in range(4):
        rows.append(stage.step(PROMPTS, number)[0])
    assert [row["kl/coefficient"] for row in rows] == pytest.approx(
        [0.1, 0.08, 0.1 / 1.5, 0.1 / 1.5],
    )
    assert caplog.text.count("has reached its bound 0.0667") == 1
    assert stage.summary(rows)["steps_at_kl_bound"] == 2
    stage.raise_kl()
    assert stage.kl_coefficient == pytest.approx(0.2 / 1.5)
    stage.raise_kl()
    assert stage.kl_coefficient == pytest.approx(0.15)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_no_update_is_taken_beyond_the_kl_target(minibatches):
    """Each update begins within the target, and the first that would not is not taken: an unlimited
    stage goes on.
    """
    settings = {
        "epochs": 6,
        "minibatches": minibatches,
        "optimizer": OptimizerConfig(learning_rate=2e-2, warmup_fraction=0.0),
    }
    free, held = make("ppo", **settings), make("ppo", target_kl=0.05, **settings)
    begun = []
    original = held.accumulate

    def spy(experience, index, denominator):
        stats = original(experience, index, denominator)
        begun.append((held.learner.updates, stats["policy/approximate_kl"]))
        return stats

    held.accumulate = spy
    assert free.step(PROMPTS, 0)[0]["policy/updates"] == 6 * minibatches
    metrics, _, _ = held.step(PROMPTS, 0)
    assert 1 <= metrics["policy/updates"] < 6 * minibatches
    kls = [
        sum(kl for at, kl in begun if at == update)
        for update in range(int(metrics["policy/updates"]))
    ]
    assert kls[0] == pytest.approx(0.0, abs=1e-6) and max(kls) <= 0.05
    experience = held.experience
    experience.common = [None] * len(experience.batches)
    assert (
        max(
            held.moved(experience, part, tokens)
            for part, tokens in enumerate(experience.token_counts())
        )
        > 0.05
    )


def test_a_step_of_silent_groups_alone_takes_no_update(caplog):
    class Silent(Flat):
        def score(self, rollouts):
            return [Score(1.0) for _ in rollouts]

    stage = make("dapo", Silent(), prompts_per_step=2, refill=1, missing_stop_penalty=2.0)
    before = [p.detach().clone() for p in stage.policy.parameters()]
    metrics, rollouts, scores = stage.step(PROMPTS, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, stage.policy.parameters(), strict=True))
    assert (
        metrics["policy/updates"] == 0
        and metrics["group/sampled"] == 16
        and metrics["group/zero_signal"] == 1.0
    )
    assert len(rollouts) == len(scores) == 8 and "nothing to learn from" in caplog.text
    assert stage.summary([metrics, {"policy/updates": 4}]) == {
        "kl_coefficient": 0.0,
        "steps_without_update": 1,
    }
    assert (
        make("dapo", Flat(), prompts_per_step=2, refill=1).step(PROMPTS, 0)[0]["policy/updates"] > 0
    )
