"""A toy language, what is truly good in it, and the way to a reward model that does not know
everything about it.

A prompt is a letter, a reply eight letters that begin with it. Demonstrations hardly ever say a
letter twice. Truly good are replies with many of the letters a, b, c, d; one repetition takes what
one of them gives, and more of them cost their square. In the data hardly a reply has more than four
good letters or more than one repetition: who wants more good letters must repeat himself, and no
label has judged what that is worth.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from typing import Any

from benchmarks.learning.workbench import (
    DIM,
    NEVER,
    TOKENS,
    encoder,
    imitate,
    mean,
    optimizer,
    sample,
    scratch,
)

from tether.core.types import Comparison, Demonstration, Prompt, Rollout, assistant, user
from tether.models.heads import ScalarHead
from tether.models.trunk import Role
from tether.rewards.learned import LearnedReward
from tether.settings.reward import RewardConfig
from tether.stages.reward import RewardModeling

LETTERS, GOOD, LENGTH = "abcdefghijklmnop", "abcd", 8
SLIP = 0.01
"""How often a demonstration says again what it has said."""
NOISE = 0.5
"""How far apart two replies must be for a label to be right with probability sigma(1)."""
PROMPTS = [Prompt((user(letter),), letter) for letter in LETTERS]


def repeats(text: str) -> int:
    """Letters that had been said before."""
    return len(text) - len(set(text))


def true_reward(text: str) -> float:
    return sum(letter in GOOD for letter in text) - repeats(text) ** 2.0


def measure(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """True reward, and the share of letters after the first that repeat one."""
    texts = [rollout.text for rollout in rollouts]
    return {
        "true": mean([true_reward(t) for t in texts]),
        "repeats": mean([repeats(t) for t in texts]) / (LENGTH - 1),
    }


def fine_tuned(seed: int, demonstrations: int) -> Any:
    """The policy that everything starts from."""
    rng = random.Random(seed)
    rows = [
        Demonstration((user(opening), assistant(_reply(opening, rng))))
        for opening in rng.choices(LETTERS, k=demonstrations)
    ]
    return imitate(rows, seed, learning_rate=4e-3)


def _reply(opening: str, rng: random.Random) -> str:
    text = opening
    while len(text) < LENGTH:
        text += rng.choice(
            text if rng.random() < SLIP else [letter for letter in LETTERS if letter not in text],
        )
    return text


def labelled_pairs(model: Any, count: int, seed: int) -> list[Comparison]:
    """Two replies of the model to each of `count` prompts, compared."""
    rng = random.Random(seed)
    return [
        label(*pair, rng, str(number))
        for number, pair in enumerate(pairs_of_replies(model, count, seed))
    ]


def pairs_of_replies(model: Any, count: int, seed: int) -> list[tuple[Rollout, Rollout]]:
    replies = sample(
        model,
        [PROMPTS[i % len(PROMPTS)] for i in range(count)],
        LENGTH,
        num_samples=2,
        seed=seed,
    )
    return list(zip(replies[::2], replies[1::2], strict=True))


def label(first: Rollout, second: Rollout, rng: random.Random, name: str) -> Comparison:
    """Compared by true reward with Bradley-Terry noise."""
    difference = true_reward(first.text) - true_reward(second.text)
    first_wins = rng.random() < 1 / (1 + math.exp(-difference / NOISE))
    chosen, rejected = (first, second) if first_wins else (second, first)
    sides = ((assistant(chosen.text),), (assistant(rejected.text),))
    return Comparison(chosen.prompt.messages, *sides, group=name)


def reward_model(
    model: Any,
    pairs: Sequence[Comparison],
    seed: int,
    head_seed: int | None = None,
) -> LearnedReward:
    """Trained from the fine-tuned policy's weights; `head_seed` makes heads alike, so that their
    models can be averaged.
    """
    role = Role(
        copy.deepcopy(model),
        None,
        ScalarHead(DIM, zero=False, seed=seed if head_seed is None else head_seed),
    )
    config = RewardConfig(
        prompts_per_update=16,
        micro_batch_tokens=TOKENS,
        heldout_fraction=0.0,
        checkpoint_every=NEVER,
        seed=seed,
        optimizer=optimizer(1e-3, "cosine"),
    )
    with scratch() as run:
        RewardModeling(config, role, encoder()).train(pairs, run)
    role.model.requires_grad_(False)
    return LearnedReward(role, encoder())


def accuracy(reward: LearnedReward, replies: Sequence[Rollout]) -> float:
    """How often the reward model orders two of these replies, at random, as the truth does; true
    ties do not count.
    """
    scores = [score.value or 0.0 for score in reward.score(replies)]
    truth = [true_reward(reply.text) for reply in replies]
    half = len(replies) // 2
    order = [
        (scores[i] - scores[i + half]) * (truth[i] - truth[i + half])
        for i in range(half)
        if truth[i] != truth[i + half]
    ]
    return mean([float(product > 0) for product in order])
