"""What a recipe says for all of its stages at once."""

import pytest

from tether.core.errors import ConfigError
from tether.settings.reading import build
from tether.settings.recipe import Recipe

BARE = {"run": "unused", "model": {"source": "tiny"}, "lora": {"rank": 4}}


def test_a_common_lora_is_that_of_every_stage_with_none_of_its_own():
    recipe = build(
        Recipe,
        {
            **BARE,
            "sft": {"lora": False},
            "direct": {"lora": {"rank": 2}},
            "kto": {},
            "rounds": {"method": "spin"},
        },
    )
    ranks = {
        name: recipe.section(name).lora and recipe.section(name).lora.rank for name in recipe.stages
    }
    assert ranks == {"sft": False, "direct": 2, "kto": 4, "rounds": 4}
    arms = {"own": {"direct": {"lora": {"rank": 2}}}, "common": {"direct": {}}}
    recipe = build(Recipe, {**BARE, "arms": arms})
    assert [recipe.section(name).lora.rank for name in recipe.stages] == [2, 4]
    assert build(Recipe, {**BARE, "kto": {}}, ["lora.rank=8"]).section("kto").lora.rank == 8


def test_the_common_lora_is_checked_against_each_stage():
    with pytest.raises(ConfigError, match=r"lora\.dropout has no effect here"):
        build(Recipe, {**BARE, "lora": {"dropout": 0.1}, "kto": {}})


def test_a_section_that_compares_needs_something_to_compare():
    judge = {"call": "tether.quickstart.judges:letters"}
    with pytest.raises(
        ConfigError,
        match="evaluate has no effect",
    ):
        build(Recipe, {**BARE, "evaluate": {"judge": judge}})
    with pytest.raises(ConfigError, match=r"repeat has no effect without \[pairs\]"):
        build(Recipe, {**BARE, "kto": {}, "repeat": 2})


def test_prompts_that_choose_the_weights_do_not_judge_them(tmp_path):
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "b.txt").write_text("two\n")
    judge = {"call": "tether.quickstart.judges:letters"}
    heldout = {
        "every": 2,
        "keep": "best",
        "judge": judge,
        "data": {"path": str(tmp_path / "a.txt")},
    }
    ppo = {"steps": 4, "reward_source": "random", "evaluate": heldout}
    values = {
        **BARE,
        "ppo": ppo,
        "evaluate": {"judge": judge, "data": {"path": str(tmp_path / "b.txt")}},
    }
    build(Recipe, values)
    build(
        Recipe,
        {**values, "evaluate": {"judge": judge, "data": heldout["data"]}},
        ["ppo.evaluate.keep=last"],
    )
    with pytest.raises(
        ConfigError,
        match=r"ppo\.evaluate\.keep = 'best'.*a\.txt",
    ):
        build(Recipe, {**values, "evaluate": {"judge": judge, "data": heldout["data"]}})


def test_an_arm_is_a_variant_of_its_stage():
    values = {**BARE, "kto": {"beta": 0.3, "optimizer": {"learning_rate": 1e-3}}}
    recipe = build(
        Recipe,
        {
            **values,
            "arms": {
                "hot": {"kto": {"optimizer": {"schedule": "constant"}}},
                "dpo": {"direct": {}},
            },
        },
    )
    assert recipe.stages == ["direct-dpo", "kto", "kto-hot"] and recipe.policies == recipe.stages
    arm = recipe.section("kto-hot")
    assert (arm.beta, arm.optimizer.learning_rate, arm.optimizer.schedule) == (
        0.3,
        1e-3,
        "constant",
    )
    for wrong, reason in (
        ({"kto": {}, "direct": {}}, "exactly one section"),
        ({"sft": {}}, "exactly one section"),
        ({"kto": {"beta": -1}}, "cannot be run"),
    ):
        with pytest.raises(ConfigError, match=reason):
            build(Recipe, {**values, "arms": {"wrong": wrong}})
