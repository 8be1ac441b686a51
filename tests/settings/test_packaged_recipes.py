"""Packaged recipes that people ask for: each runs to its end on the tiny model, and is planned."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tether.cli import app
from tether.core.rundir import read_json
from tether.runner.by_device import sized
from tether.runner.planning import devices
from tether.runner.planning.plan import plan
from tether.runner.planning.sizes import row_sizes
from tether.runner.run import run_recipe
from tether.settings.reading import packaged_recipes
from tether.settings.recipe import read_recipe
from tether.settings.stages import STAGES

ROOT = Path(__file__).resolve().parents[2]
LETTERS = "{ call = 'tether.quickstart.judges:letters' }"
TINY = ["model={ source = 'tiny', dtype = 'float32' }"]
SMALL = {
    "sft": ["data.path=tether:demonstrations", "data.limit=12"],
    "pairs": [
        "data.path=tether:prompts", "data.limit=8", "max_new_tokens=8", f"judge={LETTERS}",
    ],
    "reward": ["data.path=tether:comparisons", "data.limit=16"],
    "process": ["data.path=tether:steps", "data.limit=16", "heldout_fraction=0.3"],
    "direct": ["data.path=tether:comparisons", "data.limit=16", "evaluate_every=0"],
    "ppo": ["data.path=tether:prompts", "data.limit=24"],
    "grpo": ["data.path=tether:prompts", "data.limit=24"],
    "evaluate": [
        "data.path=tether:heldout", "data.limit=8", "max_new_tokens=8", "temperatures=[]",
        f"judge={LETTERS}",
    ],
}  # fmt: skip
"""By section what makes a stage small, and gives it data that come with tether."""
SHORT = ["steps=2", "prompts_per_step=4", "samples_per_prompt=2", "max_new_tokens=8"]
PROBLEMS = [{"question": f"What is {n} + 1?", "answer": f"So.\n#### {n + 1}"} for n in range(24)]
OWN = {
    "support-bot": ("helpful", "compliant"),
    "hh-helpful-harmless": ("helpful", "harmless"),
}
"""By recipe its objectives."""
LOCAL = ["on=local", "learner={}", "grpo.max_staleness=0"]
ASKED_FOR = (
    *("cluster-70b", "constitutional", "gsm8k-grpo", "hh-helpful-harmless", "lora-7b-24gb"),
    *("lora-7b-80gb", "process-grpo", "rlaif", "summarise-ppo", "support-bot"),
    "ultrafeedback-dpo",
)


def small(name, folder):
    """A packaged recipe on the tiny model, with little data and few steps."""
    text = packaged_recipes()[name].read_text()
    sections = [stage for stage in STAGES if re.search(rf"^\[{stage}\b", text, re.MULTILINE)]
    words = [f"run={folder / name}", *TINY]
    for section in sections:
        words += [f"{section}.{word}" for word in SMALL[section]]
        if section in ("ppo", "grpo"):
            words += [f"{section}.{word}" for word in SHORT]
            if "evaluate = " in text:
                words += [f"{section}.evaluate={{ every = 2, prompts = 4, temperatures = [] }}"]
    if name in OWN:
        words = [word for word in words if not word.startswith("reward.data")]
        words += [f"reward.objectives.{one}.path=tether:comparisons" for one in OWN[name]]
        words += [f"reward.objectives.{one}.limit=24" for one in OWN[name]]
        words += ["reward.heldout_fraction=0.4"]
    if "verifiable" in text:
        problems = folder / "problems.jsonl"
        problems.write_text("".join(json.dumps(row) + "\n" for row in PROBLEMS))
        words += [f"grpo.data.path={problems}"]
    if "[grpo.engine]" in text:
        words += [*LOCAL, "grpo.engine={ kind = 'local' }", "grpo.importance=none"]
    if "adamw8bit" in text:
        words += [f"{section}.optimizer.kind=adamw" for section in sections]
    if "[pairs]" in text:
        words = [word for word in words if not word.startswith("reward.data")]
    return read_recipe(name, words)


@pytest.mark.slow
@pytest.mark.parametrize("name", ASKED_FOR)
def test_a_recipe_runs_to_its_end_on_the_tiny_model(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TETHER_DATA", str(tmp_path))
    recipe = small(name, tmp_path)
    summaries = run_recipe(recipe)
    assert list(summaries) == list(recipe.stages)
    for stage in recipe.stages:
        assert read_json(tmp_path / name / stage / "summary.json")


SIXTEEN_BITS = "model={ source = 'tiny', dtype = 'bfloat16', recompute = true }"
QWEN, LLAMA = ["--shape", "qwen2.5-7b"], ["--shape", "llama-3.1-70b"]
CARD = ["--gpu", "h100"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "fits"),
    [
        ("lora-7b-24gb", ["--gpu-memory", "24", *QWEN], True),
        ("lora-7b-24gb", [SIXTEEN_BITS, "--gpu-memory", "16", *QWEN], False),
        ("lora-7b-80gb", [*CARD, *QWEN], True),
        ("lora-7b-80gb", ["--gpu-memory", "16", *QWEN], False),
        ("cluster-70b", [*CARD, *LLAMA], True),
        ("cluster-70b", ["learner.shard=false", *CARD, *LLAMA], False),
    ],
)
def test_a_recipe_for_a_machine_fits_it_by_its_plan(name, options, fits, tmp_path):
    words = ["plan", name, f"run={tmp_path}", "model.source=tiny", "--prompt-tokens", "200"]
    planned = CliRunner().invoke(app, [*words, *options])
    assert ("The recipe fits" in planned.output, "The recipe does not fit" in planned.output) == (
        fits,
        not fits,
    )


SHAPES = {
    "cluster-70b": "llama-3.1-70b",
    "constitutional": "qwen2.5-7b",
    "gsm8k-grpo": "qwen2.5-1.5b",
    "hh-helpful-harmless": "smollm2-135m",
    "lora-7b-24gb": "qwen2.5-7b",
    "lora-7b-80gb": "qwen2.5-7b",
    "process-grpo": "qwen2.5-1.5b",
    "rlaif": "qwen2.5-1.5b",
    "summarise-ppo": "qwen2.5-0.5b",
    "support-bot": "qwen2.5-1.5b",
    "ultrafeedback-dpo": "mistral-7b",
}
"""The shapes of the models of recipes whose heads state a plan."""
PLANNED = re.compile(
    r"`tether plan ([\w-]+) --gpu (\w+) --prompt-tokens (\d+)`: ([\d.]+) GB\D+ (\d+) s a step",
)


def figures(name):
    """The plan in a recipe's head: its name, the GPU, prompt tokens, peak GB, seconds a step."""
    head = packaged_recipes()[name].read_text().partition("\nrun =")[0].replace("\n# ", " ")
    return PLANNED.search(head).groups()


def test_each_recipe_asked_for_has_a_plan_in_its_head_and_in_the_table():
    assert SHAPES.keys() == set(ASKED_FOR)
    page = (ROOT / "docs" / "guides" / "packaged_recipes.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `([\w-]+)` \| `([\w.-]+)`[^|]*\| (\w+) \| ([\d.]+) \| (\d+) \|",
        page,
        re.M,
    )
    stated = {name: (shape, gpu, memory, seconds) for name, shape, gpu, memory, seconds in rows}
    for name, shape in SHAPES.items():
        named, gpu, _, memory, seconds = figures(name)
        assert (name, stated[name]) == (named, (shape, gpu, memory, seconds))


def recipe_for_plan(name):
    """A packaged recipe whose data come with tether; its lengths and sizes are its own."""
    text = packaged_recipes()[name].read_text()
    words = ["model.source=tiny"]
    for section in STAGES:
        block = text.partition(f"\n[{section}]")[2].partition("\n[")[0]
        if "\ndata = " in block:
            path = next(word for word in SMALL[section] if word.startswith("data.path"))
            words.append(f"{section}.{path}")
    words += [f"reward.objectives.{one}.path=tether:comparisons" for one in OWN.get(name, ())]
    return read_recipe(name, words)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_the_head_of_a_recipe_states_what_the_planner_gives(name):
    named, gpu, tokens, memory, seconds = figures(name)
    config, device, tokens = recipe_for_plan(name), devices.gpu(None, gpu), int(tokens)
    sizes = row_sizes(config, config.stages, tokens)
    shape = SHAPES[name]
    config = sized(config, config.stages, device, sizes, shape=shape, prompt_tokens=tokens)
    made = plan(config, device, shape=shape, prompt_tokens=tokens, sizes=sizes)
    last = [stage for stage in made.stages if stage.name != "evaluate"][-1]
    assert named == name
    assert max(stage.peak for stage in made.stages) / 1e9 == pytest.approx(float(memory), rel=0.03)
    step = sum(phase.seconds for phase in last.phases)
    assert step == pytest.approx(float(seconds), rel=0.05, abs=0.6)


def test_every_recipe_says_in_its_first_sentence_what_it_is():
    for name in ASKED_FOR:
        first = packaged_recipes()[name].read_text().partition("\nrun =")[0]
        assert first.startswith("# ") and ". " in first.replace("\n# ", " ") + " ", name
