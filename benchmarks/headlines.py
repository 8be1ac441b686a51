"""`python -m benchmarks.headlines`: how often the headline of a report calls a policy better or worse
that is its start model.

No model answers. Before and after, scores are drawn from one distribution, at each of four
temperatures: a prompt has a level of its own, an answer scatters around it, and the judge gives one
of eleven grades from 0 to 1, so that many answers tie. The summary is made as a run makes it, and
the headline by the report.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import numpy as np

from tether.core.types import Json
from tether.evaluation.decoding import control
from tether.evaluation.winrate import gain, win_rate
from tether.watch.report.narrative import HEADLINES, conclusion
from tether.watch.report.reading import Journey, SubRun

TEMPERATURES, PROMPTS = (1.0, 0.7, 0.5, 0.0), (64, 128)
RESULT = Path(__file__).with_name("results") / "headlines.json"


def grades(rng: np.random.Generator, levels: np.ndarray) -> list[float | None]:
    """A grade for an answer to each prompt."""
    scores = np.clip(levels + rng.normal(0, 0.2, len(levels)), 0, 1)
    return [float(score) for score in np.round(scores, 1)]


def summary_of(rng: np.random.Generator, prompts: int, *, controlled: bool) -> Json:
    """The summary of a policy that is its start model."""
    levels = rng.beta(2, 2, prompts)
    before, after = ({t: grades(rng, levels) for t in TEMPERATURES} for _ in range(2))
    groups = [str(number) for number in range(prompts)]
    first, last = before[1.0], after[1.0]
    rose = gain(first, last, groups)
    assert rose is not None
    return {
        "gold_win_rate": win_rate(last, first, groups=groups).as_dict(),
        "gold_gain": rose.as_dict(),
        **(control(before, after, groups, 1.0) if controlled else {}),
    }


def word_of(summary: Json) -> str:
    """What the report's headline says after its numbers."""
    policy = SubRun("ppo", metrics=[{"step": 1, "reward/proxy": 0.0}], summary=summary)
    words = conclusion(Journey(SubRun(""), [policy], [], [])).headline.rpartition(": ")[2]
    return next(key for key, ending in HEADLINES.items() if words == ending)


def rates(runs: int) -> list[dict[str, object]]:
    """By prompts, and with the control of decoding or without, how often each word was said."""
    rows = []
    for prompts in PROMPTS:
        for controlled in (True, False):
            rng = np.random.default_rng([prompts, controlled])
            said = Counter(
                word_of(summary_of(rng, prompts, controlled=controlled)) for _ in range(runs)
            )
            wrong = (said["better"] + said["worse"]) / runs
            row = {"prompts": prompts, "control": controlled, "runs": runs}
            rows.append({**row, "said": dict(said), "better_or_worse": wrong})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Measure, and keep the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--smoke", action="store_true", help="two runs, of which nothing is kept")
    begun, asked = time.time(), parser.parse_args()
    rows = rates(2 if asked.smoke else asked.runs)
    if asked.smoke:
        return
    record = {"rows": rows, "seconds": round(time.time() - begun)}
    RESULT.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
