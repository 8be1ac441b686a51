"""What the tests of wrong input share: a good row of every format, and a file with a wrong row
behind it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tether.core.types as types

SEEDS: list[dict[str, Any]] = [
    json.loads(line)
    for line in (Path(__file__).parent / "seeds.jsonl").read_text(encoding="utf-8").splitlines()
]
HARSH: tuple[Any, ...] = (
    None, True, False, 0, -1, 2, 10**400, 1e308, float("nan"), float("inf"), "", " ", "\n", "\0", "\ud800", "a" * 5000, [], {},
    [[]], [None], [1, 2], ["a", "b", "c"], {"role": "user"}, {"role": "king", "content": 1}, {"from": "gpt", "value": None}, "[",
    "[1", "[[]]", '{"role": "user", "content": "\\ud800"}', '[{"from": "human", "value": 3}]', "\n\nHuman:\n\nAssistant:", "tie",
    "#### ", "\\boxed{",
)  # fmt: skip
"""What to put where something else belongs."""
GOOD: dict[str, dict[str, Any]] = {seed["format"]: seed["row"] for seed in reversed(SEEDS)}
KINDS: dict[str, type] = {seed["format"]: getattr(types, seed["kind"], object) for seed in SEEDS}


def changed(row: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """The row with other values; `...` takes a column away."""
    return {name: value for name, value in {**row, **change}.items() if value is not ...}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def refused(path: Path, kind: type, **options: Any) -> tuple[int, list[tuple[str, int, str]]]:
    """How many records a file gives, and the file, line and reason of what is put in quarantine."""
    from tether.data.sources import Quarantine, read  # here, since the fuzzer instruments it before

    quarantine = Quarantine(keep=100)
    count = len(list(read(path, kind, quarantine=quarantine, **options)))
    return count, [(entry["file"], entry["line"], entry["reason"]) for entry in quarantine.examples]
