"""The alarms that detectors give over the files of a finished run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tether.core.types import Alarm
from tether.settings.watch import WatchConfig
from tether.watch.monitoring.texts import Text, word_tokens
from tether.watch.monitoring.watch import Watch


def replay(
    metrics_rows: Iterable[Mapping[str, Any]],
    sample_rows: Iterable[Mapping[str, Any]] = (),
    config: WatchConfig | None = None,
) -> list[Alarm]:
    """The alarms of a finished run, from the rows of its metrics.jsonl and samples.jsonl.

    A run keeps but a few texts a step, so measures on texts have more noise, and what compares
    different prompts within a step (mode_collapse) is silent unless samples hold four. Lengths of
    texts are counted in words here, the ids being gone.
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
