"""Reward models of few, more and many labels, and what the choices of each are worth as the choice
widens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.learning import toy
from benchmarks.learning.picture import COLOURS, band, figure
from benchmarks.learning.workbench import markdown, mean, sample, told
from studies.curves import best_of_n_estimate, fit_overoptimization

from tether.algorithms.kl import kl_best_of_n

PAIRS = (100, 500, 4000)
LARGEST = 4096
SLIP = 0.05
"""Demonstrations repeat themselves more often than elsewhere, so that a pool holds replies which
only labels could warn of.
"""
Result = dict[str, Any]


def run(
    seed: int,
    *,
    demonstrations: int = 16000,
    pairs: Sequence[int] = PAIRS,
    prompts: int = 8,
    pool: int = 2 * LARGEST,
    largest: int = LARGEST,
) -> Result:
    """One seed: a pool of replies to each of a few prompts, scored by the truth and by reward
    models of nested sets of labels.
    """
    start = toy.fine_tuned(seed, demonstrations)
    labels = toy.labelled_pairs(start, max(pairs), seed + 100)
    fresh = sample(start, toy.PROMPTS, toy.LENGTH, num_samples=64, seed=seed + 200)
    asked = toy.PROMPTS[:: len(toy.PROMPTS) // prompts]
    replies = sample(start, asked, toy.LENGTH, num_samples=pool, seed=seed + 300)
    gold = torch.tensor([toy.true_reward(reply.text) for reply in replies]).view(prompts, pool)
    sizes = [2**power for power in range(largest.bit_length())]
    models = {}
    for count in pairs:
        reward = toy.reward_model(start, labels[:count], seed)
        proxy = torch.tensor([score.value for score in reward.score(replies)]).view(prompts, pool)
        curves = {
            name: [float(best_of_n_estimate(proxy, values, n).mean()) for n in sizes]
            for name, values in (("gold", gold), ("proxy", proxy))
        }
        models[str(count)] = {"accuracy": toy.accuracy(reward, fresh), **curves}
    ceiling = [float(best_of_n_estimate(gold, gold, n).mean()) for n in sizes]
    return {"seed": seed, "sizes": sizes, "models": models, "ceiling": ceiling}


def highest(result: Result, count: str) -> int:
    """The n at which the gold of a reward model's choices is highest."""
    gold = result["models"][count]["gold"]
    return result["sizes"][gold.index(max(gold))]


def peak(result: Result, count: str) -> float:
    """The distance at which Gao's curve through the gold gained is highest; infinite where it never
    turns.

    The last points rest on few replies each, and the curve on all.
    """
    gold, sizes = result["models"][count]["gold"], result["sizes"]
    fit = fit_overoptimization(
        [kl_best_of_n(n) for n in sizes[1:]],
        [g - gold[0] for g in gold[1:]],
        "best_of_n",
    )
    return math.inf if fit.peak is None else fit.peak


def table(results: Sequence[Result]) -> str:
    sizes = results[0]["sizes"]
    shown = [n for n in (1, 16, 128, 1024, sizes[-1]) if n in sizes]
    rows = []
    for count in results[0]["models"]:
        models = [result["models"][count] for result in results]
        gold = [told([model["gold"][sizes.index(n)] for model in models]) for n in shown]
        peaks = told([peak(result, count) for result in results])
        largest = " / ".join(str(highest(result, count)) for result in results)
        rows.append([count, told([model["accuracy"] for model in models]), *gold, peaks, largest])
    best = [told([result["ceiling"][sizes.index(n)] for result in results]) for n in shown]
    rows.append(["the truth itself", "1", *best, "", ""])
    head = ("pairs", "accuracy", *(f"true reward, best of {n}" for n in shown))
    return markdown((*head, "√KL where Gao's curve peaks", "n of the highest, by seed"), rows)


def draw(results: Sequence[Result], path: Path) -> None:
    sizes = results[0]["sizes"]
    with figure(path, 2) as (gold, proxy):
        for (count, colour), axis in (
            (pair, axis)
            for pair in zip(results[0]["models"], COLOURS, strict=False)
            for axis in (gold, proxy)
        ):
            name = "gold" if axis is gold else "proxy"
            accuracy = mean([result["models"][count]["accuracy"] for result in results])
            curves = [result["models"][count][name] for result in results]
            band(axis, sizes, curves, colour, f"{count} pairs, accuracy {accuracy:.2f}")
        band(
            gold,
            sizes,
            [result["ceiling"] for result in results],
            COLOURS[-1],
            "chosen by the truth",
            ":",
        )
        for axis, title in (
            (gold, "true reward of the chosen"),
            (proxy, "the reward model's own score of the chosen"),
        ):
            axis.set_xscale("log", base=2)
            axis.set_xlabel("n of best-of-n")
            axis.set_title(title)
        gold.figure.legend(*gold.get_legend_handles_labels(), loc="outside lower center", ncols=4)
