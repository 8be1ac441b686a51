"""The learning rate that nobody names: it follows what is trained, shows in what is saved, and
stays what a run began with.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tether.core.rundir import read_json, read_jsonl
from tether.models.loading import add_adapter
from tether.models.tiny import tiny_model
from tether.models.trunk import Role
from tether.runner.planning.devices import gpu
from tether.runner.planning.plan import plan
from tether.runner.run import run_recipe
from tether.settings.learner import OptimizerConfig
from tether.settings.model import LoraConfig
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.settings.stages import making
from tether.settings.supervised import DirectConfig
from tether.stages.learner.local import LocalLearner
from tether.watch.monitoring.doctor import Finding
from tether.watch.monitoring.doctor_log import check_movement

pytestmark = pytest.mark.audit
WHOLE = {
    "sft": (1e-5, 2e-5),
    "reward": (1e-6, 5e-5),
    "process": (1e-6, 5e-5),
    "best_of_n": (1e-6, 2e-5),
}
PAIRS = {
    "direct": (5e-7, 5e-6),
    "kto": (5e-7, 5e-6),
    "online_direct": (5e-7, 5e-6),
    "rounds": (5e-7, 5e-6),
}
PUBLISHED = WHOLE | PAIRS | dict.fromkeys(("ppo", "grpo", "reinforce", "distill"), (1e-6, 1e-5))
"""Of whole models."""
STAGES = making("sft", "reward", "direct", "policy", "rounds")
SAMPLING = ("ppo", "grpo", "reinforce", "distill", "best_of_n", "online_direct")


def recipe_of(name: str, folder="run", **settings) -> Recipe:
    if name in SAMPLING:
        settings = {"reward_source": "random", **settings} | (
            {"roles": "separate"} if settings.get("lora") is False else {}
        )
    if name == "distill":
        settings = {"teacher": "runs/one", **settings}
    if name == "rounds":
        optimizer = (
            {"direct": {"optimizer": settings.pop("optimizer")}} if "optimizer" in settings else {}
        )
        settings = {"method": "spin", **settings, **optimizer}
    return build(
        Recipe,
        {"run": str(folder), "model": {"source": "tiny", "dtype": "float32"}, name: settings},
    )


def rate_of(recipe: Recipe, name: str) -> float:
    """As config.json would have it."""
    section = recipe.model_dump(mode="json")[name]
    return section.get("direct", section)["optimizer"]["learning_rate"]


@pytest.mark.parametrize("name", STAGES)
def test_adapters_get_more_than_whole_models_and_whoever_names_a_rate_gets_it(name: str):
    adapters, whole = rate_of(recipe_of(name), name), rate_of(recipe_of(name, lora=False), name)
    low, high = PUBLISHED[name]
    assert low <= whole <= high and 1e-4 <= adapters <= 1e-3 and adapters >= 10 * whole
    other = {"optimizer": {"weight_decay": 0.1}}
    assert (
        rate_of(recipe_of(name, **other), name) == adapters
        and rate_of(recipe_of(name, lora=False, **other), name) == whole
    )
    for lora in ({}, False):
        assert (
            rate_of(recipe_of(name, lora=lora, optimizer={"learning_rate": 0.123}), name) == 0.123
        )
    again = build(
        Recipe,
        recipe_of(name).model_dump(mode="json", exclude_unset=True)
        | {name: {**said_of(name), "lora": False}},
    )
    assert rate_of(again, name) == whole  # what was filled in does not count as said


def said_of(name: str) -> dict:
    said = recipe_of(name, lora=False).model_dump(mode="json", exclude_unset=True)[name]
    assert "learning_rate" not in json.dumps(said)
    return said


def test_the_plan_shows_the_rate():
    stages = (
        plan(recipe_of("direct"), gpu(80, "h100")).stages
        + plan(recipe_of("direct", lora=False), gpu(80, "h100")).stages
    )
    assert [s.learning_rate for s in stages] == [
        rate_of(recipe_of("direct", lora=lora), "direct") for lora in ({}, False)
    ]


def test_a_stage_of_ones_own_takes_the_rate_by_what_its_role_trains():
    def rate(adapter: str | None, **settings) -> float:
        model = tiny_model(0)
        model = model if adapter is None else add_adapter(model, adapter, LoraConfig())
        return (
            DirectConfig(**settings).optimizer_for(Role(model, adapter).adapter).learning_rate
            or 0.0
        )

    assert rate("policy") == rate_of(recipe_of("direct"), "direct") and rate(None) == rate_of(
        recipe_of("direct", lora=False),
        "direct",
    )
    assert rate("policy", optimizer=OptimizerConfig(learning_rate=0.5)) == 0.5
    with pytest.raises(ValueError, match="needs a learning rate"):
        LocalLearner(list(tiny_model(0).parameters()), OptimizerConfig(), 1)


def written(folder) -> dict:
    words = (
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
    )
    rows = [{"prompt": w, "chosen": w + "!", "rejected": "no " + w} for w in words]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = {"epochs": 3, "prompts_per_update": 4, "heldout_fraction": 0.0, "checkpoint_every": 1}
    return {"data": {"path": str(folder / "rows.jsonl")}, **more}


def test_the_default_moves_a_policy_that_the_old_one_left_where_it_was(tmp_path):
    """5e-6 was the default of DPO, adapters or not."""
    for name, settings in (("old", {"optimizer": {"learning_rate": 5e-6}}), ("new", {})):
        recipe = recipe_of("direct", tmp_path / name, **written(tmp_path), **settings)
        summary = run_recipe(recipe, ["direct"])["direct"]
        rows = list(read_jsonl(tmp_path / name / "direct" / "metrics.jsonl"))
        still = isinstance(check_movement(rows, recipe.model_dump()["direct"]), Finding)
        assert (
            still
            == (name == "old")
            == ("unmoved" in {alarm["detector"] for alarm in summary["alarms"]})
        ), rows[-1]
    stored = read_json(tmp_path / "new" / "direct" / "config.json")["direct"]["optimizer"][
        "learning_rate"
    ]
    assert (
        stored
        == pytest.approx(max(row["learning_rate"] for row in rows))
        == rate_of(recipe, "direct")
    )


def test_the_page_has_the_rates_that_are_used():
    page = (Path(__file__).parents[3] / "docs" / "methods" / "README.md").read_text(
        encoding="utf-8",
    )
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith("| `[")
    ]
    written = {
        name: (float(adapters), float(whole))
        for names, adapters, whole, *_ in lines
        for name in names.split(", ")
    }
    used = {
        f"`[{name}]`": tuple(rate_of(recipe_of(name, lora=lora), name) for lora in ({}, False))
        for name in STAGES
    }
    assert written == used
