"""The price on a card, beside what an H100 measured (docs/guides/machines.md)."""

import pytest

from tether.runner.planning.devices import gpu, kind_of
from tether.runner.planning.memory import Planner
from tether.runner.planning.plan import plan, shape_config
from tether.runner.planning.sizes import row_sizes
from tether.runner.planning.speeds import RowSizes
from tether.settings.recipe import read_recipe

H100 = gpu(name="h100")
STAGES = {"sft": 11, "pairs": 22, "reward": 21, "ppo": 34, "evaluate": 16}
"""Seconds of the quickstart's stages as their summaries had them; with loading and the report the
whole took 172.
"""
WHOLE = 172
SHAPE = "qwen2.5-1.5b"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA L40", None),
        ("NVIDIA A10G", None),
        ("NVIDIA RTX A1000", None),
    ],
)
def test_a_card_has_its_own_data_sheet_or_is_measured(name, kind):
    assert kind_of(name) == kind


def test_the_quickstarts_price_is_within_a_third():
    recipe = read_recipe("quickstart", ["model.dtype=bfloat16"])
    sizes = row_sizes(recipe, recipe.stages)
    made = plan(recipe, H100, sizes=sizes, stages=recipe.stages)
    assert made.seconds == pytest.approx(WHOLE, rel=0.3)
    beside = (WHOLE - sum(STAGES.values())) / len(STAGES)
    for stage in made.stages:
        assert stage.seconds == pytest.approx(STAGES[stage.name] + beside, rel=0.5), stage.name


@pytest.mark.parametrize(("rows", "rate"), [(64, 8730), (256, 23297), (1024, 42441)])
def test_rates_of_decoding_are_within_a_quarter(rows, rate):
    """Tokens a second of 1.5 billion weights, steps replayed as graphs."""
    recipe = read_recipe("quickstart", ["model.dtype=bfloat16"])
    config = shape_config(recipe.model, "qwen2.5-1.5b")
    speeds = Planner(recipe, H100, config, RowSizes(), {}).speeds
    assert rows / speeds.decoding(rows) == pytest.approx(rate, rel=0.25)


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", 7.0),
        ("org/judge-135M", 0.135),
        ("mistralai/Mixtral-8x7B-v0.1", 56.0),
        ("./runs/own/", 1.5436),
    ],
)
def test_a_judge_in_the_same_process_needs_room(model, billions):
    """Two bytes a parameter: by the name, else as many as Qwen2.5-1.5B has with tied embeddings."""
    judged = [f'pairs.judge={{model="{model}"}}', f'evaluate.judge={{model="{model}"}}']
    free = plan(read_recipe("quickstart"), H100, shape=SHAPE)
    made = plan(read_recipe("rlaif", judged), H100, shape=SHAPE)
    assert "judge model" not in str(free)
    held = {
        (stage.name, phase.bytes["judge model"])
        for stage in made.stages
        for phase in stage.phases
        if "judge model" in phase.bytes
    }
    assert {name for name, _ in held} == {"pairs", "evaluate"}
    for _, number in held:
        assert number == pytest.approx(2e9 * billions, rel=1e-3)
