"""Objectives on one trunk against their models loaded alone, and multipliers that only training
moves.
"""

import json

import pytest
import torch

from tether.core.errors import ConfigError
from tether.core.types import Prompt, Rollout, Sampling, Score, StopReason, user
from tether.data.chat import ChatEncoder
from tether.models.heads import ScalarHead
from tether.models.loading import add_adapter
from tether.models.tiny import tiny_model, tiny_tokenizer
from tether.models.trunk import Role
from tether.rewards.control import RandomReward
from tether.rewards.learned import LearnedReward, ObjectivesReward
from tether.rewards.limit import FailureLimit
from tether.settings.model import LoraConfig
from tether.settings.rewards import ObjectiveConfig

ENCODER = ChatEncoder(tiny_tokenizer(), (1,))
LAST = LoraConfig(rank=4, alpha=8.0, last_layers=1)
NAMES = ("helpful", "safe", "true")
SCALES = {"helpful": (0.5, 2.0), "safe": (-1.0, 0.25), "true": (0.0, 1.0)}


def trained(model, name, seed):
    """A role as if it had learned: what is its own is random."""
    generator = torch.Generator().manual_seed(seed)
    role = Role(add_adapter(model, name, LAST, seed=seed), name, ScalarHead(64))
    with torch.no_grad():
        own = [p for key, p in role.model.named_parameters() if name in key.split(".")]
        for parameter in (*own, *role.head.parameters()):
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return role


def source(settings):
    model, objectives = tiny_model(layers=3).requires_grad_(False), {}
    for seed, name in enumerate(NAMES):
        role = trained(model, f"reward-{seed}", seed)
        model = role.model
        objectives[name] = (role, *SCALES[name])
    return ObjectivesReward(
        {k: ObjectiveConfig(**v) for k, v in settings.items()},
        objectives,
        ENCODER,
    )


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


def alone():
    """By objective: the standardized scores of its model, loaded by itself."""
    found = {}
    for seed, name in enumerate(NAMES):
        role = trained(tiny_model(layers=3).requires_grad_(False), "reward", seed)
        mean, deviation = SCALES[name]
        found[name] = [
            (s.value - mean) / deviation for s in LearnedReward(role, ENCODER).score(rollouts())
        ]
    return found


WEIGHTED = {"helpful": {"weight": 2.0}, "safe": {"weight": 0.5}, "true": {"weight": 0.0}}
HELD = {
    "true": {"at_least": 0.25, "rate": 0.5},
    "helpful": {"weight": 2.0},
    "safe": {"at_least": -50.0},
}


def test_the_score_is_the_weighted_sum_of_the_models_alone():
    expected = alone()
    for number, score in enumerate(source(WEIGHTED).score(rollouts())):
        parts = {name: expected[name][number] for name in NAMES}
        assert score.parts == pytest.approx(parts, abs=1e-3)
        assert score.value == pytest.approx(2.0 * parts["helpful"] + 0.5 * parts["safe"], abs=1e-3)


def test_constraints_weigh_what_their_multipliers_say_whatever_the_order_of_the_settings():
    reward, expected = source(HELD), alone()
    reward.load_state({"multipliers": {"true": 1.5, "safe": 0.25}})
    for number, score in enumerate(reward.score(rollouts())):
        helpful, safe, true = (expected[name][number] for name in NAMES)
        assert score.value == pytest.approx(
            (2.0 * helpful + 1.5 * true + 0.25 * safe) / 2.75,
            abs=1e-3,
        )


def test_the_measure_of_a_policy_does_not_move_with_the_multipliers():
    reward, expected = FailureLimit(source(HELD), 0.5), alone()
    for multiplier in (0.0, 3.0):
        reward.load_state({"multipliers": {"true": multiplier, "safe": 0.0}})
        found = reward.judge(rollouts())
        assert [s.value for s in found] == pytest.approx(
            [2.0 * value for value in expected["helpful"]],
            abs=1e-3,
        )
        assert [s.parts["true"] for s in found] == pytest.approx(expected["true"], abs=1e-3)
    assert FailureLimit(RandomReward(0), 0.5).judge(rollouts()) == RandomReward(0).score(rollouts())


def test_training_moves_the_multiplier_of_a_violated_constraint_and_scoring_moves_none():
    reward = source(HELD)
    first = reward.score(rollouts())
    assert [s.value for s in reward.score(rollouts())] == [s.value for s in first]
    assert reward.state() == {"multipliers": {"true": 0.0, "safe": 0.0}}
    made = [Score(0.0, {"helpful": 1.0, "safe": 0.0, "true": value}) for value in (-1.0, -0.5)]
    metrics = reward.learn([*made, Score(None, reason="failed")])
    assert metrics == {
        **{"objective/true": -0.75, "objective/helpful": 1.0, "objective/safe": 0.0},
        **{"objective/true_multiplier": 0.0, "objective/safe_multiplier": 0.0},
    }
    assert reward.state() == {"multipliers": {"true": 0.5, "safe": 0.0}}
    assert reward.learn(made)["objective/true_multiplier"] == 0.5
    assert [s.value for s in reward.score(rollouts())] != [s.value for s in first]
    assert reward.learn([Score(None, reason="failed")]) == {}
    assert reward.state()["multipliers"]["true"] == 1.0


def test_the_state_survives_json_to_the_bit_and_passes_through_the_limit_on_failures():
    reward = source(HELD)
    reward.multipliers["true"] = 0.1 + 0.2
    again = FailureLimit(source(HELD), 0.5)
    again.load_state(json.loads(json.dumps(FailureLimit(reward, 0.5).state())))
    assert again.state() == {"multipliers": {"true": 0.1 + 0.2, "safe": 0.0}}
    assert (
        again.learn([Score(0.0, {"helpful": 0.0, "safe": 0.0, "true": 0.25})])[
            "objective/true_multiplier"
        ]
        == 0.1 + 0.2
    )
    stateless = FailureLimit(RandomReward(0), 0.5)
    assert stateless.state() == {} and stateless.learn([Score(1.0)]) == {}


def test_an_objective_that_fails_fails_the_score():
    reward = source(WEIGHTED)
    with torch.no_grad():
        reward.scorers.members[1].head.linear.bias.fill_(float("inf"))
    assert all(s.value is None and "'safe': inf" in s.reason for s in reward.score(rollouts()))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "a weight or is held"),
        ({"weight": 1.0, "at_least": 0.0}, "give one of both"),
        ({"weight": 1.0, "rate": 0.1}, "rate has no effect"),
    ],
)
def test_settings_without_effect_are_errors(values, message):
    with pytest.raises(ValueError, match=message) as found:
        ObjectiveConfig(**values)
    assert not isinstance(found.value, ConfigError)
