"""Naming a key changes that key alone: every other setting of the section keeps its value, however
deep the key stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from tether.settings.kl import KLConfig
from tether.settings.learner import OptimizerConfig
from tether.settings.policy import PRESETS, PolicyConfig
from tether.settings.stages import STAGES

NEEDED: dict[str, dict[str, Any]] = {
    "pairs": {"judge": {"call": "m:f"}},
    "evaluate": {"judge": {"call": "m:f"}},
    "distill": {"teacher": "runs/one"},
}


def sections() -> Iterator[Any]:
    for name, kind in STAGES.items():
        presets = (
            kind.section.model_fields["algorithm"].annotation.__args__
            if issubclass(kind.section, PolicyConfig)
            else [None]
        )
        for preset in presets:
            given = NEEDED.get(name, {}) | ({} if preset is None else {"algorithm": preset})
            yield pytest.param(kind.section, given, id=f"{name}-{preset}" if preset else name)


def keys(table: BaseModel, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The place and the value of every key of a section, tables and what is in them alike."""
    for name in type(table).model_fields:
        value = getattr(table, name)
        yield (*place, name), value.model_dump() if isinstance(value, BaseModel) else value
        if isinstance(value, BaseModel):
            yield from keys(value, (*place, name))


def with_key(given: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    head, *rest = place
    return {**given, head: with_key(given.get(head, {}), tuple(rest), value) if rest else value}


def accepted(section: type[BaseModel], values: dict[str, Any]) -> BaseModel | None:
    """The section; None where a key has no effect here, and is refused for that."""
    try:
        return section.model_validate(values)
    except ValidationError as error:
        if any(word in str(error) for word in ("no effect", "without", "needs")):
            return None
        raise


@pytest.mark.parametrize(("section", "given"), sections())
def test_a_key_given_its_own_default_changes_no_other(
    section: type[BaseModel],
    given: dict[str, Any],
) -> None:
    plain, changed, tried = section.model_validate(given), [], 0
    for place, value in keys(plain):
        if place[0] in given or value is None:
            continue
        named = accepted(section, with_key(given, place, value))
        tried += named is not None
        if named is not None and named.model_dump() != plain.model_dump():
            changed.append(place)
    assert changed == []
    assert tried > 2


def test_named_keys_lie_on_the_sections_default_and_alone_count_as_set() -> None:
    for given in ({"learning_rate": 1e-3}, OptimizerConfig(learning_rate=1e-3)):
        optimizer = PolicyConfig.model_validate({"optimizer": given}).optimizer
        assert (optimizer.schedule, optimizer.final_fraction, optimizer.learning_rate) == (
            "linear",
            0.0,
            1e-3,
        )
        assert optimizer.model_fields_set == {"learning_rate"}
    chosen = PolicyConfig.model_validate(
        {"optimizer": {"schedule": "cosine", "final_fraction": 0.2}},
    ).optimizer
    assert (chosen.schedule, chosen.final_fraction) == ("cosine", 0.2)
    assert (
        PolicyConfig.model_validate({"optimizer": {"schedule": "constant"}}).optimizer.schedule
        == "constant"
    )
    with pytest.raises(ValidationError, match="final_fraction has no effect"):
        PolicyConfig.model_validate({"optimizer": {"schedule": "constant", "final_fraction": 0.0}})


def test_a_presets_table_lies_between_what_is_given_and_the_sections_default() -> None:
    assert PRESETS["reinforce++_baseline"]["kl"] == {
        "place": "loss",
        "estimator": "k2",
        "coefficient": 0.05,
    }
    for given in ({"coefficient": 0.2}, KLConfig(coefficient=0.2)):
        kl = PolicyConfig.model_validate({"algorithm": "reinforce++_baseline", "kl": given}).kl
        assert (kl.place, kl.coefficient, kl.mode) == ("loss", 0.2, "fixed")
        assert kl.model_fields_set == {"coefficient"}


def test_a_section_has_every_key_as_its_own_stage_declares_it() -> None:
    """A class that is inherited beside the stage's settings may not hide their bounds and
    defaults.
    """
    for kind in STAGES.values():
        for name, field in kind.section.model_fields.items():
            declared = next(
                c for c in kind.section.__mro__ if name in vars(c).get("__annotations__", {})
            ).model_fields[name]
            assert (field.metadata, field.default, field.description) == (
                declared.metadata,
                declared.default,
                declared.description,
            ), (kind.name, name)
