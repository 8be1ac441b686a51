"""`python -m benchmarks.replay RUN`: the alarms that today's detectors give over a finished run's
files.

By it a threshold is chosen: over healthy runs for false alarms, over spoilt ones for steps until
the alarm.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tether.core.rundir import read_jsonl
from tether.core.types import Alarm
from tether.monitoring.texts import Text, word_tokens
from tether.monitoring.watch import Watch
from tether.settings.watch import WatchConfig


def replay(
    metrics_rows: Iterable[Mapping[str, Any]],
    sample_rows: Iterable[Mapping[str, Any]] = (),
    config: WatchConfig | None = None,
) -> list[Alarm]:
    """The alarms of a finished run, from the rows of its metrics.jsonl and samples.jsonl.

    A run keeps but a few texts a step, so the window and the baseline of measures on texts grow
    over as many steps as hold `min_texts`, and what compares different prompts within a step
    (mode_collapse) is silent unless samples hold four. Lengths of texts are counted in words here,
    the ids being gone.
    """
    watch, samples, alarms = Watch(config), {}, []
    for row in sample_rows:
        samples.setdefault(row.get("step"), []).append(row)
    metrics_rows = list(metrics_rows)
    for place, row in enumerate(metrics_rows, 1):
        texts = [
            _replayed(sample)
            for sample in samples.get(row["step"], [])
            if isinstance(sample.get("response"), str)
        ]
        alarms += watch.observe_texts(
            row["step"],
            {**row, "run/share": place / len(metrics_rows)},
            texts,
        )
    return alarms


def _replayed(row: Mapping[str, Any]) -> Text:
    proxy = row.get("proxy")
    finished = row.get("stop") != "length"
    return Text(
        str(row.get("prompt", row.get("query", ""))),
        row["response"],
        len(word_tokens(row["response"])),
        proxy,
        finished,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=__doc__)
    parser.add_argument("runs", nargs="*", type=Path, help="folders of stages, with metrics.jsonl")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help=("read no run: four quiet steps give no alarm"),
    )
    asked = parser.parse_args()
    if asked.smoke:
        print(replay([{"step": step, "policy/kl": 0.1} for step in range(4)]))
    for run in asked.runs:
        alarms = replay(read_jsonl(run / "metrics.jsonl"), read_jsonl(run / "samples.jsonl"))
        print(f"{run}: {len(alarms)} alarms")
        for alarm in alarms:
            print(f"  step {alarm.step}: {alarm.detector}, {alarm.message}")
