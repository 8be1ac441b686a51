"""Folders of sweeps with invented numbers, laid out as the runner writes them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from tests.watch.report.synthetic_run import (
    AFTER,
    BEFORE,
    PROMPTS,
    estimate,
    ppo_rows,
    ppo_summary,
    write,
    write_lines,
)

KEY = "ppo.kl.coefficient"
BETAS = (0.0, 0.01, 0.05, 0.2)
SPEEDS = {0.0: 5.0, 0.01: 1.6, 0.05: 0.8, 0.2: 0.3}
"""How far the policy of each coefficient goes."""
LARGE: dict[str, Any] = {"steps": 300, "samples": 2000, "prompts": 150}
"""Sizes of each of the twelve runs."""
GAINS = {0.0: -0.3, 0.01: 0.22, 0.05: 0.34, 0.2: 0.1}
"""The change of gold at each coefficient."""


def write_sweep(
    run: Path,
    keys: Mapping[str, Sequence[Any]] | None = None,
    *,
    steps: int = 60,
    samples: int = 40,
    prompts: int = 24,
) -> Path:
    """A sweep whose combinations have all run; numbers depend on the first key and the seed."""
    keys = keys or {KEY: BETAS, "seed": (0, 1, 2)}
    table = []
    for values in product(*keys.values()):
        own = dict(zip(keys, values, strict=True))
        folder = "sweep/" + ",".join(f"{key}={value}" for key, value in own.items())
        table.append({"values": own, "stages": {"sft": "sft", "ppo": f"{folder}/ppo"}})
        write_combination(run / folder, own, steps, samples)
        if prompts:
            table[-1]["stages"]["evaluate"] = f"{folder}/evaluate"
            write_answers(run / folder / "evaluate", own, prompts)
    losses = [{"step": step, "loss": 3 / step} for step in range(1, 9)]
    write_lines(run / "sft" / "metrics.jsonl", losses)
    write(run / "sft" / "summary.json", {"seconds": 5.0})
    write(run / "command.json", {"stages": ["sft", "ppo"], "config": {}})
    write(run / "sweep.json", {"combinations": table})
    return run


def _drawn(own: Mapping[str, Any]) -> tuple[float, int, random.Random]:
    """The first value as a coefficient of the tables above, the seed, and numbers drawn by them."""
    seed = own.get("seed", 0)
    first = next(iter(own.values()))
    beta = min(SPEEDS, key=lambda one: abs(one - first)) if isinstance(first, float) else 0.05
    return beta, seed, random.Random(json.dumps(own))


def write_combination(place: Path, own: Mapping[str, Any], steps: int, samples: int) -> None:
    beta, seed, draw = _drawn(own)
    write_lines(
        place / "ppo" / "metrics.jsonl",
        ppo_rows(steps, SPEEDS[beta], seed=draw.randrange(99)),
    )
    gain = GAINS[beta] + draw.gauss(0, 0.04)
    kl = 14 * SPEEDS[beta] + draw.gauss(0, 0.6 + SPEEDS[beta])
    write(
        place / "ppo" / "summary.json",
        ppo_summary(
            kl=kl,
            gold_gain=estimate(gain, gain - 0.08, gain + 0.08),
            proxy_gain=estimate(0.5 + SPEEDS[beta] ** 0.5 + draw.gauss(0, 0.1), 0.1, 4.0),
        ),
    )
    words = ["".join(draw.choices("aeiklmnorstu", k=draw.randint(2, 9))) for _ in range(3000)]
    rows = [
        {
            "step": 1 + number * steps // samples,
            "prompt": PROMPTS[number % len(PROMPTS)],
            "response": " ".join(draw.choices(words, k=60)),
            "proxy": round(draw.gauss(0, 1), 6),
            "stop": "stop_token",
        }
        for number in range(samples)
    ]
    write_lines(place / "ppo" / "samples.jsonl", rows)
    settings = {"steps": steps, "kl": {"coefficient": beta}, "reward_source": "learned"}
    write(
        place / "ppo" / "config.json",
        {"ppo": settings, "model": {"source": "tiny"}, "seed": seed},
    )


def write_answers(place: Path, own: Mapping[str, Any], prompts: int, words: str = "") -> None:
    beta, _, draw = _drawn(own)
    rows = []
    for number in range(prompts):
        text = (
            "Great question! " * 12
            if beta == 0 and number % 2
            else " ".join(draw.choices(AFTER.split(), k=40))
        )
        rows.append(
            {
                "id": f"heldout-{number:03d}",
                "kind": "",
                "prompt": f"{PROMPTS[number % len(PROMPTS)]} ({number})",
                "before": BEFORE,
                "after": words or text,
                "gold_before": 0.4,
                "gold_after": 0.4 + GAINS[beta] + draw.gauss(0, 0.1),
            },
        )
    write_lines(place / "answers.jsonl", rows)
    steps = {
        "0.7": {"before": estimate(0.4, 0.3, 0.5)},
        "0.3": {"before": estimate(0.52, 0.4, 0.6)},
    }
    control = {
        "gold_before": 0.4,
        "gold_by_temperature": steps,
        "verdict": "better",
        "over_best_decoding": {
            **estimate(0.2, 0.1, 0.3),
            "temperature": 0.3,
            "policy_temperature": 0.3,
            "win_rate": estimate(0.6, 0.5, 0.7),
        },
    }
    write(place / "summary.json", {"policies": {"ppo": control}})
    write(place / "config.json", {"evaluate": {}})


if __name__ == "__main__":
    import sys

    print(write_sweep(Path(sys.argv[1]), **(LARGE if "--large" in sys.argv else {})))
