"""Episodes beside TRL's tool loop: sampled tokens a second and the share of time that waits for the
environment, with a tool that takes 0, 50 and 500 ms.

    python -m benchmarks.turns_beside POLICY [--episodes N]

POLICY is a run whose policy calls the tool, such as one of `python -m benchmarks.tools --folder`.
It is exported once, and both play the same tasks with it, at one temperature, in turns.
"""

from __future__ import annotations

import argparse
import functools
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.tools import LIMITS, MODEL, mixed, multiply

import tether.models
from tether.cli.tools.export import export_model
from tether.core.protocols import Turn
from tether.core.types import Message, Prompt, Sampling, user
from tether.rewards.environments import EnvironmentThreads
from tether.rewards.tools import ToolEnvironment, schemas
from tether.rollout.episodes import EpisodeEngine
from tether.runner.assembly.roles import encoder_of, load_policy, local_engine
from tether.settings.model import ModelConfig

TEMPLATE = Path(tether.models.__file__).with_name("chatml-tools.jinja")
LATENCIES = (0.0, 0.05, 0.5)
SAMPLES = 4


def slow(seconds: float) -> Callable[..., int]:
    """The tool, which takes its time."""

    @functools.wraps(multiply)
    def late(a: int, b: int) -> int:
        time.sleep(seconds)
        return a * b

    return late


class Clocked(EnvironmentThreads):
    """Adds up the seconds in which the engine waits."""

    waited = 0.0

    def step(self, replies: Mapping[int, Message]) -> dict[int, Turn | str]:
        began = time.perf_counter()
        answers = super().step(replies)
        self.waited += time.perf_counter() - began
        return answers


def ours(folder: str, latency: float, questions: list[str]) -> tuple[int, float, float, float]:
    """Sampled tokens, seconds, seconds of waiting, and turns an episode."""
    role, loaded = load_policy(folder, ModelConfig.model_validate({**MODEL, "source": folder}))
    pool = Clocked(lambda: ToolEnvironment([slow(latency)]), schemas([multiply]))
    engine = local_engine(role, loaded)
    player = EpisodeEngine(
        engine,
        pool,
        encoder_of(loaded),
        LIMITS,
        context_length=loaded.context_length,
    )
    tasks = [Prompt((user(question),)) for question in questions]
    sampling = Sampling(max_new_tokens=LIMITS.tokens)  # one limit for all replies, as TRL has it
    player.generate(tasks[:1], sampling, seed=1)
    pool.waited, began = 0.0, time.perf_counter()
    groups = player.generate(tasks, sampling, num_samples=SAMPLES, seed=0)
    seconds = time.perf_counter() - began
    spans = [rollout.spans for group in groups for rollout in group.rollouts]
    tokens = sum(stop - first for one in spans for first, stop in one)
    return tokens, seconds, pool.waited, sum(map(len, spans)) / len(spans)


def theirs(folder: str, latency: float, questions: list[str]) -> tuple[int, float, float, float]:
    """The same of TRL; its loop is timed as a whole, and the tool by itself."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    waited, tool = [0.0], slow(latency)

    @functools.wraps(multiply)
    def timed(a: int, b: int) -> int:
        began = time.perf_counter()
        result = tool(a, b)
        waited[0] += time.perf_counter() - began
        return result

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    tokenizer.response_template = qwen3_template
    rows = [{"prompt": [{"role": "user", "content": one}]} for one in questions]
    count = len(questions) * SAMPLES
    trainer: Any = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        tools=[timed],
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=count,
            num_generations=SAMPLES,
            max_completion_length=LIMITS.tokens,
            max_tool_calling_iterations=LIMITS.turns - 1,
            temperature=1.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
        ),
    )
    trainer.model.eval()
    trainer.num_generations_eval = SAMPLES
    prompts = [row["prompt"] for row in rows for _ in range(SAMPLES)]
    # as its step does before it generates
    trainer._sync_tool_dicts = [{"multiply": timed}] * count
    trainer._async_tool_dicts = [{}] * count
    waited[0], began = 0.0, time.perf_counter()
    _, ids, mask, conversations, *_ = trainer._generate(prompts)
    seconds = time.perf_counter() - began
    tokens = sum(map(sum, mask)) if mask else sum(map(len, ids))
    turns = [sum(turn["role"] == "assistant" for turn in one) for one in conversations]
    return tokens, seconds, waited[0], sum(turns) / len(turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "policy",
        nargs="?",
        default=MODEL["source"],
        help="the start model if none",
    )
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--smoke", action="store_true", help="eight episodes, a tool without delay")
    options = parser.parse_args()
    episodes = 8 if options.smoke else options.episodes
    tasks = mixed(["3 numbers", "4 numbers"], max(2, episodes // SAMPLES), random.Random(5))
    questions = [task.question for task in tasks]
    with tempfile.TemporaryDirectory() as place:
        folder = str(Path(place) / "model")
        export_model(options.policy, Path(folder))
        for latency in LATENCIES[: 1 if options.smoke else None]:
            for name, side in (("tether", ours), ("TRL", theirs)):
                tokens, seconds, waited, turns = side(folder, latency, questions)
                print(
                    f"{latency * 1000:3.0f} ms, {name}: {tokens:,} sampled tokens in {seconds:.1f} s, "
                    f"{tokens / seconds:.0f} a second; {waited / seconds:.0%} waiting; "
                    f"{turns:.2f} turns an episode",
                    flush=True,
                )


if __name__ == "__main__":
    main()
