"""A program that trains one stage for two hundred steps on two threads: `python -m tests.runner.crowd
STAGE FOLDER RUN [SEED]`. A stage that needs a reward model has a small one trained before.

With a seed the process is unlike one without: its heap is shifted by blocks of random sizes, and
hardly any memory seems free.
"""

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from tests.every_stage import recipe

from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import Recipe

STEPS = 200
SLOWER = {"optimizer": {"learning_rate": 1e-3}}
"""A rate at which two hundred steps of sampling do not diverge."""
MANY = {
    "steps": STEPS,
    "prompts_per_step": 8,
    "samples_per_prompt": 8,
    "max_new_tokens": 16,
    "checkpoint_every": STEPS,
    **SLOWER,
}
"""1024 tokens a step, eight answers to a prompt: torch shares out the gradient of so many states
among its threads.
"""
HORIZON = 64 * STEPS
"""Samples: the KL coefficient of a shorter one passes all bounds in two hundred steps."""
EPOCHS = {"sft": 34, "reward": 67, "process": 25, "direct": 34, "kto": 34}
"""Two hundred updates of each stage that learns from rows."""
ROUNDS = {"epochs": 34, "checkpoint_every": 1000, **SLOWER}
"""A hundred updates of each of two rounds."""


SCORED = ("ppo", "reinforce", "online_direct", "rounds")
"""Stages that need the reward model; its training keeps the length of `tests.every_stage`."""


def values(stage: str, folder: Path, run: Path) -> dict[str, Any]:
    """The recipe of `tests.every_stage`, cut to a stage and what it needs, with two hundred
    steps of the stage.
    """
    sections = recipe(folder, run)
    for name in ("ppo", "grpo", "reinforce", "best_of_n", "online_direct"):
        sections[name] |= MANY
        if "evaluate" in sections[name]:
            sections[name] |= {"evaluate": {**sections[name]["evaluate"], "every": STEPS // 2}}
    sections["ppo"] |= {"kl": {**sections["ppo"]["kl"], "horizon": HORIZON}}
    if stage in EPOCHS:
        sections[stage] |= {"epochs": EPOCHS[stage], "checkpoint_every": 1000}
    if stage == "reward":
        sections[stage] |= {"evaluate_every": STEPS // 2}
    sections["grpo"] = {
        key: value for key, value in sections["grpo"].items() if key != "verifiable"
    } | {"reward_source": "random"}
    sections["rounds"] |= {
        "samples_per_prompt": 8,
        "direct": {**sections["rounds"]["direct"], **ROUNDS},
    }
    own = ("run", "model", *(("reward",) if stage in SCORED else ()), stage)
    return {name: sections[name] for name in own}


def shifted(seed: int) -> Sequence[object]:
    """Blocks of random sizes, every second one freed: whatever is allocated from now on lies
    elsewhere.
    """
    draw, total = random.Random(seed), psutil.virtual_memory().total
    blocks = [
        kind(draw.randrange(1, 60_000)) for _ in range(2000) for kind in (bytearray, torch.empty)
    ]
    psutil.virtual_memory = lambda: SimpleNamespace(total=total, available=32 << 20)
    return blocks[::2] + blocks[1::4]


if __name__ == "__main__":
    torch.set_num_threads(2)
    stage, place, root, *seeds = sys.argv[1:]
    held = [shifted(int(seed)) for seed in seeds]
    run_recipe(build(Recipe, values(stage, Path(place), Path(root))))
