"""`python -m benchmarks.voting RUN [--samples 16]`: majority voting beside training, on the sums of
a run of `tether grpo sums`.

How many of the held-out problems a model gets right when it answers once greedily, once at a
temperature, and when the commonest last number of several samples is its answer: the model before
and the policy after. Prints a line a model and decoding, with the 95% interval over problems.
Voting costs so many times the tokens, and no training.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tether.build.models import open_model
from tether.build.roles import load_policy, local_engine
from tether.core.protocols import Engine
from tether.core.types import Prompt, Sampling
from tether.evaluation.winrate import mean_estimate
from tether.models.trunk import Role
from tether.rewards.verifiable import reasoning_gym_prompts
from tether.settings.model import ModelConfig
from tether.settings.reading import build, packaged_recipe
from tether.settings.recipe import Recipe
from tether.stages.heldout import held_out_split

SEED = 104729


def problems() -> list[Prompt]:
    """The held-out ones of the recipe."""
    section = build(
        Recipe,
        tomllib.loads(packaged_recipe("sums").read_text(encoding="utf-8")),
    ).section("grpo")
    assert section.task is not None and section.evaluate is not None
    task = section.task
    prompts = reasoning_gym_prompts(
        task.name,
        task.size,
        task.seed,
        task.config,
        system=task.system or "",
    )
    return held_out_split(prompts, section.evaluate.prompts)[1]


def last_number(text: str) -> str:
    """The last whole number of a text; empty without one."""
    return (re.findall(r"-?\d+", text.replace("−", "-")) or [""])[-1]


def voted(answers: Sequence[str]) -> str:
    """The commonest number, the first of equals; answers without a number do not vote."""
    counts = Counter(filter(None, map(last_number, answers)))
    return counts.most_common(1)[0][0] if counts else ""


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument(
        "--smoke",
        action="store_true",
        help=("a tiny random model, a few problems, no run"),
    )
    asked = parser.parse_args()
    if asked.run is None and not asked.smoke:
        parser.error("which run of `tether grpo sums`?")
    recipe = build(Recipe, tomllib.loads(packaged_recipe("sums").read_text(encoding="utf-8")))
    model = ModelConfig(source="tiny") if asked.smoke else recipe.model
    prompts, samples = (problems()[:4], 4) if asked.smoke else (problems(), asked.samples)
    start = open_model(model)
    sides = {"before": (Role(start.model), start)}
    if asked.run is not None:
        sides["after"] = load_policy(str(asked.run / "grpo"), model)
    for name, (role, loaded) in sides.items():
        measure(name, local_engine(role, loaded, max_rows=256), prompts, samples)


def measure(name: str, engine: Engine, prompts: Sequence[Prompt], samples: int) -> None:
    """Print the lines of one model."""
    truth = [str(p.metadata["answer"]) for p in prompts]
    for temperature, count in ((0.0, 1), (0.7, samples), (1.0, samples)):
        how = Sampling(max_new_tokens=32, temperature=temperature)
        groups = engine.generate(prompts, how, num_samples=count, seed=SEED)
        texts = [[rollout.text for rollout in group.rollouts] for group in groups]
        decoding = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        ways = {"once": [row[0] for row in texts]}
        ways |= {
            f"vote of {n}": [voted(row[:n]) for row in texts] for n in (4, 8, 16, 32) if n <= count
        }
        for way, answers in ways.items():
            right = mean_estimate(
                [float(last_number(a) == t) for a, t in zip(answers, truth, strict=True)],
            )
            bounds = f"{right.value:.1%} [{right.low:.1%}, {right.high:.1%}]"
            print(f"{name:7} {decoding:16} {way:11} {bounds}", flush=True)


if __name__ == "__main__":
    main()
