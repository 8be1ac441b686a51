"""Sums modulo five, step by step, from a demonstrator who has learned some of the table wrong: what the rewards mend.

`3+4+1+0+2+2+4` is answered by its running sums, one a line: 2, 3, 3, 0, 2, 1. Seven of the table's 25 entries are demonstrated
wrong more often than right, so that imitation alone cannot solve what depends on them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning.picture import COLOURS, band, figure
from benchmarks.learning.workbench import encoder, imitate, markdown, mean, optimise, optimizer, sample, told

from tether.core.types import Demonstration, Prompt, Rollout, Score, assistant, user
from tether.data.steps import StepEncoder

BASE, DIGITS = 5, 7
WRONG, SLIP = 7, 0.55
"""Entries of the table that are demonstrated wrong, and how often."""
LEARNED, HELD_OUT = 4000, 512
STEPS = StepEncoder(encoder(), ("\n",))
ANSWER_TOKENS = 2 * (DIGITS - 1)
"""A digit a line, the ends of all lines but the last, and the stop token."""
ARMS: dict[str, dict[str, Any]] = {
    "REINFORCE": {"algorithm": "reinforce"},
    "RLOO": {"algorithm": "rloo"},
    "GRPO": {"algorithm": "grpo"},
    "Dr. GRPO": {"algorithm": "dr_grpo"},
    "GRPO, process rewards": {"algorithm": "grpo", "step_rewards": True},
}
Result = dict[str, Any]


def problems(seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Different sums, many to learn from and some held out."""
    numbers = random.Random(seed).sample(range(BASE**DIGITS), LEARNED + HELD_OUT)
    texts = ["+".join(str(number // BASE**place % BASE) for place in range(DIGITS)) for number in numbers]
    prompts = [Prompt((user(text),), text, {"lines": running_sums(text)}) for text in texts]
    return prompts[:LEARNED], prompts[LEARNED:]


def running_sums(text: str) -> list[str]:
    return [str(total % BASE) for total in itertools.accumulate(map(int, text.split("+")))][1:]


def demonstrated(text: str, slips: dict[tuple[int, int], int], rng: random.Random) -> str:
    total, *digits = map(int, text.split("+"))
    lines = []
    for digit in digits:
        entry = total, digit
        total = slips[entry] if entry in slips and rng.random() < SLIP else (total + digit) % BASE
        lines.append(str(total))
    return "\n".join(lines)


def half_taught(prompts: Sequence[Prompt], seed: int, demonstrations: int) -> Any:
    """A model that has learned how it is done, and the wrong entries too."""
    rng = random.Random(seed)
    table = list(itertools.product(range(BASE), repeat=2))
    slips = {(a, b): (a + b + rng.randrange(1, BASE)) % BASE for a, b in rng.sample(table, WRONG)}
    asked = rng.choices(prompts, k=demonstrations)
    rows = [Demonstration((*prompt.messages, assistant(demonstrated(prompt.text, slips, rng)))) for prompt in asked]
    return imitate(rows, seed, batch_size=16)


class Sums:
    """1 for a reply whose last line is the sum, else 0; every line is a step, worth 1 where it is the running sum.

    Args:
        all_lines: lines that were not written are wrong ones, at the reply's last token.
    """

    name = "sums"

    def __init__(self, all_lines: bool = True) -> None:
        self.all_lines = all_lines

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [self._score(rollout) for rollout in rollouts]

    def _score(self, rollout: Rollout) -> Score:
        right = rollout.prompt.metadata["lines"]
        ends = STEPS.step_ends(rollout.response_ids)
        starts = [0, *(end + 1 for end in ends)]
        written = [encoder().decode(rollout.response_ids[a : b + 1]) for a, b in zip(starts, ends, strict=False)]
        steps = [(end, float(line in right[k : k + 1])) for k, (end, line) in enumerate(zip(ends, written, strict=True))]
        if self.all_lines:
            steps += [(len(rollout.response_ids) - 1, 0.0)] * (len(right) - len(written))
        solved = len(written) == len(right) and written[-1] == right[-1]
        return Score(float(solved), steps=tuple(steps))


def solved(rollouts: Sequence[Rollout]) -> float:
    return mean([score.value or 0.0 for score in Sums().score(rollouts)])


def measure(rollouts: Sequence[Rollout]) -> dict[str, float]:
    return {"solved": solved(rollouts)}


def run(
    seed: int, *, demonstrations: int = 8000, steps: int = 60, prompts: int = 4, samples: int = 8, learning_rate: float = 5e-4
) -> Result:
    """One seed: half-taught, then every method from there, with as many answers each and the same settings."""
    train, test = problems(seed)
    start = half_taught(train, seed, demonstrations)
    common = {"steps": steps, "prompts_per_step": prompts, "samples_per_prompt": samples, "max_new_tokens": ANSWER_TOKENS}
    common |= {"kl": {"coefficient": 0.0, "report": False}, "seed": seed, "optimizer": optimizer(learning_rate)}
    arms = {}
    for name, settings in ARMS.items():
        policy, curve = optimise(start, Sums(), train, measure, {**common, **settings})
        arms[name] = {**held_out(policy, test, seed), "curve": [point["solved"] for point in curve]}
    return {"seed": seed, "answers": steps * prompts * samples, "sft": held_out(start, test, seed), "arms": arms}


def held_out(model: Any, test: Sequence[Prompt], seed: int) -> dict[str, float]:
    sampled, greedy = (sample(model, test, ANSWER_TOKENS, seed=seed, temperature=t) for t in (1.0, 0.0))
    return {"sampled": solved(sampled), "greedy": solved(greedy)}


def table(results: Sequence[Result]) -> str:
    rows = [["half-taught", *(told([result["sft"][key] for result in results], 3) for key in ("sampled", "greedy")), ""]]
    for name in results[0]["arms"]:
        arms = [result["arms"][name] for result in results]
        over = told([mean(arm["curve"]) for arm in arms], 3)
        rows.append([name, *(told([arm[key] for arm in arms], 3) for key in ("sampled", "greedy")), over])
    return markdown(("method", "held-out sums solved, sampled", "greedy", "solved on the way, mean over all steps"), rows)


def _smooth(values: Sequence[float], width: int = 10) -> list[float]:
    """The mean of the last few steps."""
    return [mean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]


def draw(results: Sequence[Result], path: Path) -> None:
    with figure(path, 1) as (axis,):
        for (name, colour), line in zip(zip(results[0]["arms"], COLOURS, strict=False), ("-", "-", "-", "--", "-"), strict=False):
            curves = [_smooth(result["arms"][name]["curve"]) for result in results]
            band(axis, range(1, len(curves[0]) + 1), curves, colour, name, line)
        axis.set_xlabel(f"step of {results[0]['answers'] // len(curves[0])} answers")
        axis.set_ylabel("share of new sums solved")
        axis.legend()
