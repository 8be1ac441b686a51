"""Sums modulo five, step by step, from a demonstrator who has learned some of the table wrong: what
the rewards mend.

`3+4+1+0+2+2+4` is answered by its running sums, one a line: 2, 3, 3, 0, 2, 1. Seven of the table's
25 entries are demonstrated wrong more often than right, so that imitation alone cannot solve what
depends on them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning.picture import COLOURS, GREY, band, figure
from benchmarks.learning.workbench import (
    Curve,
    encoder,
    imitate,
    markdown,
    mean,
    optimise,
    optimizer,
    sample,
    spread,
    told,
)

from tether.core.protocols import RewardSource
from tether.core.types import Demonstration, Prompt, Rollout, Score, assistant, user
from tether.data.steps import StepEncoder
from tether.rewards.control import RandomReward

BASE, DIGITS = 5, 7
HALF, BARELY = (7, 0.55), (13, 0.7)
"""Entries of the table that are demonstrated wrong, and how often; after the second, answers are
hardly better than chance.
"""
LEARNED, HELD_OUT = 4000, 512
STEPS = StepEncoder(encoder(), ("\n",))
ANSWER_TOKENS = 2 * (DIGITS - 1)
"""A digit a line, the ends of all lines but the last, and the stop token."""
ARMS: dict[str, dict[str, Any]] = {
    "REINFORCE": {"algorithm": "reinforce", "baseline": "none", "normalize_scores": False},
    "RLOO": {"algorithm": "rloo"},
    "GRPO": {"algorithm": "grpo"},
    "Dr. GRPO": {"algorithm": "dr_grpo"},
    "GRPO, process rewards": {"algorithm": "grpo", "step_rewards": True},
}
OFFSET = 2.0
"""A constant on every score: to a method with a baseline it is nothing."""
AGAINST = "RLOO"
PROCESS = ("RLOO", "GRPO", "GRPO, process rewards")
"""What is compared where a right answer is rare."""
Result = dict[str, Any]


def problems(seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Different sums, many to learn from and some held out."""
    numbers = random.Random(seed).sample(range(BASE**DIGITS), LEARNED + HELD_OUT)
    texts = [
        "+".join(str(number // BASE**place % BASE) for place in range(DIGITS)) for number in numbers
    ]
    prompts = [Prompt((user(text),), text, {"lines": running_sums(text)}) for text in texts]
    return prompts[:LEARNED], prompts[LEARNED:]


def running_sums(text: str) -> list[str]:
    return [str(total % BASE) for total in itertools.accumulate(map(int, text.split("+")))][1:]


def demonstrated(
    text: str,
    slips: dict[tuple[int, int], int],
    slip: float,
    rng: random.Random,
) -> str:
    total, *digits = map(int, text.split("+"))
    lines = []
    for digit in digits:
        entry = total, digit
        total = slips[entry] if entry in slips and rng.random() < slip else (total + digit) % BASE
        lines.append(str(total))
    return "\n".join(lines)


def taught(
    prompts: Sequence[Prompt],
    seed: int,
    demonstrations: int,
    wrong: int,
    slip: float,
) -> Any:
    """A model that has learned how it is done, and the wrong entries too."""
    rng = random.Random(seed)
    table = list(itertools.product(range(BASE), repeat=2))
    slips = {(a, b): (a + b + rng.randrange(1, BASE)) % BASE for a, b in rng.sample(table, wrong)}
    asked = rng.choices(prompts, k=demonstrations)
    rows = [
        Demonstration((*prompt.messages, assistant(demonstrated(prompt.text, slips, slip, rng))))
        for prompt in asked
    ]
    return imitate(rows, seed, batch_size=16)


class Sums:
    """1 for a reply whose last line is the sum, else 0; every line is a step, worth 1 where it is
    the running sum.

    Args:
        all_lines: lines that were not written are wrong ones, at the reply's last token.
        offset: added to every score; no ranking of replies changes.
    """

    name = "sums"

    def __init__(self, all_lines: bool = True, offset: float = 0.0) -> None:
        self.all_lines, self.offset = all_lines, offset

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [self._score(rollout) for rollout in rollouts]

    def _score(self, rollout: Rollout) -> Score:
        right = rollout.prompt.metadata["lines"]
        ends = STEPS.step_ends(rollout.response_ids)
        starts = [0, *(end + 1 for end in ends)]
        written = [
            encoder().decode(rollout.response_ids[a : b + 1])
            for a, b in zip(starts, ends, strict=False)
        ]
        steps = [
            (end, float(line in right[k : k + 1]))
            for k, (end, line) in enumerate(zip(ends, written, strict=True))
        ]
        if self.all_lines:
            steps += [(len(rollout.response_ids) - 1, 0.0)] * (len(right) - len(written))
        solved = len(written) == len(right) and written[-1] == right[-1]
        return Score(float(solved) + self.offset, steps=tuple(steps))


def solved(rollouts: Sequence[Rollout]) -> float:
    return mean([score.value or 0.0 for score in Sums().score(rollouts)])


def measure(rollouts: Sequence[Rollout]) -> dict[str, float]:
    return {
        "solved": solved(rollouts),
        "lines": mean([float(len(s.steps)) for s in Sums(all_lines=False).score(rollouts)]),
    }


def run(
    seed: int,
    *,
    demonstrations: int = 8000,
    steps: int = 24,
    long: int = 200,
    rare: int = 72,
) -> Result:
    """One seed: half-taught, then every method from there, with as many answers each and the same
    settings.

    For `rare` steps: process rewards against outcomes from a start that hardly ever answers
    rightly. For `long` steps, smaller and harsher: what becomes of process rewards that judge no
    more than was written.
    """
    train, test = problems(seed)
    start = taught(train, seed, demonstrations, *HALF)
    short, harsh = (
        {"steps": steps, "samples_per_prompt": 8},
        {"steps": long, "samples_per_prompt": 4},
    )
    arms = {
        name: _trained(start, Sums(), train, test, {**short, **how, "seed": seed}, 5e-4)
        for name, how in ARMS.items()
    }
    for name in ("REINFORCE", "RLOO"):
        how = {**short, **ARMS[name], "seed": seed}
        arms[f"{name}, all scores {OFFSET:g} higher"] = _trained(
            start,
            Sums(offset=OFFSET),
            train,
            test,
            how,
            5e-4,
        )
    arms["GRPO, random rewards"] = _trained(
        start,
        RandomReward(seed),
        train,
        test,
        {**short, **ARMS["GRPO"], "seed": seed},
        5e-4,
    )
    judged = {"all lines": Sums(), "written lines": Sums(all_lines=False)}
    process = {**harsh, **ARMS["GRPO, process rewards"], "seed": seed}
    lines = {
        name: _trained(start, reward, train, test, process, 1e-3)
        for name, reward in judged.items()
        if long
    }
    half = {"sft": both(start, test), "arms": arms, "lines": lines}
    return {
        "seed": seed,
        **half,
        "rare": barely(seed, train, test, demonstrations, rare) if rare else None,
    }


def barely(
    seed: int,
    train: Sequence[Prompt],
    test: Sequence[Prompt],
    demonstrations: int,
    steps: int,
) -> Result:
    """From a start near chance: most groups of answers are all wrong, and outcomes alone say
    nothing of them.
    """
    start = taught(train, seed, demonstrations, *BARELY)
    how = {"steps": steps, "samples_per_prompt": 8, "seed": seed}
    arms = {
        name: _trained(start, Sums(), train, test, {**how, **ARMS[name]}, 5e-4) for name in PROCESS
    }
    return {"sft": both(start, test), "arms": arms}


def both(model: Any, test: Sequence[Prompt]) -> dict[str, float]:
    return held_out(model, test, 1.0) | held_out(model, test, 0.0)


def _trained(
    start: Any,
    reward: RewardSource,
    train: Sequence[Prompt],
    test: Sequence[Prompt],
    how: dict[str, Any],
    rate: float,
) -> Result:
    common = {
        "prompts_per_step": 4,
        "max_new_tokens": ANSWER_TOKENS,
        "kl": {"coefficient": 0.0, "report": False},
    }
    every = max(1, how["steps"] // 6)
    settings = {**common, **how, "optimizer": optimizer(rate)}
    policy, curve = optimise(
        start,
        reward,
        train,
        measure,
        settings,
        lambda model: held_out(model, test, 0.0),
        every,
    )
    return {
        **held_out(policy, test, 1.0),
        "curve": [point["greedy"] for point in curve if "greedy" in point],
        **_last(curve),
    }


def _last(curve: Curve, width: int = 5) -> dict[str, float]:
    return {"lines": mean([point["lines"] for point in curve[-width:]])}


def held_out(model: Any, test: Sequence[Prompt], temperature: float) -> dict[str, float]:
    name = "sampled" if temperature else "greedy"
    return {name: solved(sample(model, test, ANSWER_TOKENS, temperature=temperature))}


def table(results: Sequence[Result]) -> str:
    first = _compared("half-taught", results)
    harsh = [result for result in results if result["lines"]]
    rows = [
        [
            name,
            *(
                " / ".join(f"{result['lines'][name][key]:.2f}" for result in harsh)
                for key in ("lines", "sampled")
            ),
        ]
        for name in (harsh[0]["lines"] if harsh else ())
    ]
    head = (
        "process rewards judge",
        f"lines written at the end, of {DIGITS - 1}, by seed",
        "sums solved, sampled",
    )
    rare = [result["rare"] for result in results if result.get("rare")]
    second = [_compared("barely taught", rare), f"This table: {len(rare)} seeds."] if rare else []
    return "\n\n".join([first, *second, *([markdown(head, rows)] if rows else [])])


def _compared(start: str, results: Sequence[Result]) -> str:
    known = [told([result["sft"][key] for result in results]) for key in ("greedy", "sampled")]
    rows = [[start, known[0], known[0], known[1], ""]]
    other = [on_the_way(result["arms"][AGAINST]) for result in results]
    for name in results[0]["arms"]:
        arms = [result["arms"][name] for result in results]
        columns = (
            told(values)
            for values in (
                [on_the_way(a) for a in arms],
                [a["curve"][-1] for a in arms],
                [a["sampled"] for a in arms],
            )
        )
        ahead = [on_the_way(arm) - rloo for arm, rloo in zip(arms, other, strict=True)]
        error = spread(ahead) / len(ahead) ** 0.5
        rows.append(
            [name, *columns, "" if name == AGAINST else (f"{mean(ahead):+.3f} ± {error:.3f}")],
        )
    head = (
        "method",
        "held-out sums solved, greedy, mean over the training",
        "at its end",
        "sampled, at its end",
    )
    return markdown((*head, f"ahead of {AGAINST} on the way, ± standard error"), rows)


def on_the_way(arm: Result) -> float:
    """The mean of the held-out curve: who learns faster has more of it."""
    return mean(arm["curve"])


def draw(results: Sequence[Result], path: Path) -> None:
    rare = [result["rare"] for result in results if result.get("rare")]
    with figure(path, 1 + bool(rare)) as axes:
        for axis, title, known in zip(
            axes,
            ("half-taught", "barely taught"),
            (results, rare),
            strict=False,
        ):
            _curves(axis, known)
            axis.set_title(title)


def _curves(axis: Any, results: Sequence[Result]) -> None:
    colours = dict(zip(ARMS, COLOURS, strict=False))
    steps = 24 if len(results[0]["arms"]) > len(PROCESS) else 72
    for name in results[0]["arms"]:
        curves = [[result["sft"]["greedy"], *result["arms"][name]["curve"]] for result in results]
        answers = [steps * 32 * place // 6 for place in range(len(curves[0]))]
        line = "-" if name in ARMS else ":" if "random" in name else "--"
        band(
            axis,
            answers,
            curves,
            colours.get(name.split(",")[0] if line == "--" else name, GREY),
            name,
            line,
        )
    axis.set_xlabel("answers seen")
    axis.set_ylabel("held-out sums solved, greedy")
    axis.legend(loc="lower right" if len(results[0]["arms"]) > len(PROCESS) else "upper left")
