"""Conditions of keys: which settings they refuse, in which words, and what the reference says."""

from typing import Annotated, ClassVar, Literal

import pytest
from pydantic import ValidationError

from tether.settings.config import Config
from tether.settings.kl import KLConfig
from tether.settings.messages import models_of
from tether.settings.needs import Needs, needs_of
from tether.settings.policy import PolicyConfig
from tether.settings.recipe import recipe_type
from tether.settings.reference import keys_of
from tether.settings.sampling import GRPOSection


class Inner(Config):
    kind: Literal["a", "b", "c"] = "a"


class Table(Config):
    table: ClassVar[str] = "outer."
    power: bool = False
    rounds: int = 1
    inner: Inner | None = None
    speed: Annotated[float, Needs("power")] = 0.5
    extra: Annotated[int, Needs("power")] = 0
    often: Annotated[float, Needs("rounds > 1 or power", "has no effect in one round")] = 1.0
    shape: Annotated[str, Needs("inner.kind = 'b' or 'c'")] = "round"
    quiet: Annotated[bool, Needs("not power", "and power do not go together")] = False
    form: Annotated[
        Literal["x", "y"],
        Needs("rounds != 1", "needs {config.rounds} + 1 rounds", "y"),
    ] = "x"


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"speed": 0.5}, "outer.speed has no effect without power"),
        ({"speed": 0.0}, "outer.speed has no effect without power"),
        ({"speed": 0.1, "power": True}, ""),
        ({"extra": 0}, ""),
        ({"extra": 2}, "outer.extra has no effect without power"),
        ({"often": 2.0}, "outer.often has no effect in one round"),
        ({"often": 2.0, "rounds": 2}, ""),
        ({"often": 2.0, "power": True}, ""),
        ({"shape": "flat"}, "outer.shape has no effect without inner.kind = 'b' or 'c'"),
        ({"shape": "flat", "inner": {}}, "outer.shape has no effect without"),
        ({"shape": "flat", "inner": {"kind": "b"}}, ""),
        ({"shape": "flat", "inner": {"kind": "c"}}, ""),
        ({"quiet": True, "power": True}, "outer.quiet and power do not go together"),
        ({"quiet": False, "power": True}, ""),
        ({"form": "x"}, ""),
        ({"form": "y"}, "outer.form = 'y' needs 1 + 1 rounds"),
        ({"form": "y", "rounds": 3}, ""),
    ],
)
def test_a_key_is_refused_where_its_condition_does_not_hold(values, fault):
    if not fault:
        assert Table.model_validate(values)
        return
    with pytest.raises(ValidationError) as error:
        Table.model_validate(values)
    assert error.value.errors()[0]["msg"].startswith(f"Value error, {fault}")


def tables(kind):
    """Every class of settings in a recipe."""
    seen, waiting = [], [kind]
    while waiting:
        one = waiting.pop()
        if one not in seen:
            seen.append(one)
            waiting += [
                k for field in one.model_fields.values() for k in models_of(field.annotation)
            ]
    return seen


def test_every_condition_names_keys_that_are_there():
    count = 0
    for kind in tables(recipe_type()):
        for name, field in kind.model_fields.items():
            for needs in needs_of(field.metadata):
                paths = [path for path, *_ in needs._parts()]
                assert paths and all(paths), (kind, name)
                for path in paths:
                    inside = [kind]
                    for part in path.split("."):
                        fields = [k.model_fields[part] for k in inside if part in k.model_fields]
                        assert fields, (kind.__name__, name, needs.condition)
                        inside = [k for f in fields for k in models_of(f.annotation)]
                count += 1
    assert count > 60


def test_the_reference_prints_conditions():
    keys = {key.name: key.description for key in keys_of(recipe_type())}
    assert keys["ppo.lam"].endswith("; needs `critic`")
    assert keys["ppo.kl.mode"].endswith(
        "; 'adaptive' needs `coefficient > 0`; 'stop' needs `coefficient > 0 or report`",
    )
    assert "needs" not in keys["ppo.steps"]


def test_a_table_of_kl_is_checked_with_the_defaults_of_its_section():
    """GRPO's coefficient is 0 and its place the loss, whatever a table alone would have."""
    assert GRPOSection(reward_source="random", kl=KLConfig(report=False)).kl.coefficient == 0
    kl = KLConfig(estimator="k3", coefficient=0.1)
    assert GRPOSection(reward_source="random", kl=kl).kl.place == "loss"
    with pytest.raises(ValueError, match=r"kl\.report has no effect with kl\.coefficient above 0"):
        PolicyConfig(kl=KLConfig(report=False))
