"""A program that trains every stage of a recipe on two threads: `python -m tests.run.crowd FOLDER
RUN [SEED]`.

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
from benchmarks.every_stage import recipe

from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import Recipe

STEPS = 40
MANY = {
    "steps": STEPS,
    "prompts_per_step": 8,
    "samples_per_prompt": 8,
    "max_new_tokens": 16,
    "checkpoint_every": STEPS,
}
"""1024 tokens a step, eight answers to a prompt: torch shares out the gradient of so many states
among its threads.
"""
EPOCHS = {"sft": 16, "reward": 16, "process": 12, "direct": 16, "kto": 8}
"""Some hundred updates of each stage."""


def values(folder: Path, run: Path) -> dict[str, Any]:
    """The recipe of `benchmarks.every_stage`, longer and with larger steps."""
    sections = recipe(folder, run)
    for name in ("ppo", "grpo", "reinforce", "best_of_n", "online_direct"):
        sections[name] |= MANY
        sections[name] |= (
            {"evaluate": {**sections[name]["evaluate"], "every": STEPS // 2}}
            if "evaluate" in sections[name]
            else {}
        )
    for name, epochs in EPOCHS.items():
        sections[name] |= {"epochs": epochs, "checkpoint_every": 1000}
    sections["reward"] |= {"evaluate_every": 20}
    sections["grpo"] = {
        key: value for key, value in sections["grpo"].items() if key != "verifiable"
    } | {"reward_source": "random"}
    sections["rounds"] |= {
        "samples_per_prompt": 8,
        "direct": {**sections["rounds"]["direct"], "epochs": 8, "checkpoint_every": 1000},
    }
    return sections


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
    place, root, *seeds = sys.argv[1:]
    held = [shifted(int(seed)) for seed in seeds]
    run_recipe(build(Recipe, values(Path(place), Path(root))))
