"""How far reward models bear optimisation: proxies of few and of many labels, by best-of-n and by
PPO, judged by gold.

The study of Gao et al. 2022 (https://arxiv.org/abs/2210.10760) on one's own model, with flipped
labels, the ensembles of Coste et al. 2023 (https://arxiv.org/abs/2310.02743) and the averaged
weights of Ramé et al. 2024 (https://arxiv.org/abs/2401.12187). The settings are the sections of a
recipe with [proxies.NAME] and [best_of_n]; gold is the judge of [ppo.evaluate]. The same command
goes on where it was interrupted, also with more proxies or seeds. The page is RUN/report.html.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from rich.console import Console

from studies.command import run_study
from studies.curves import best_of_n_estimate, fit_overoptimization
from studies.overopt_page import write_page
from tether.algorithms.kl import kl_best_of_n
from tether.cli.terminal.bars import bars
from tether.core.errors import ConfigError
from tether.core.protocols import Progress
from tether.core.rundir import RunDirectory, append_jsonl, read_json, read_jsonl, write_json
from tether.core.types import Comparison, Json, Prompt, Rollout, Score, StopReason
from tether.data.sources import Quarantine, split_by_group
from tether.evaluation.peaks import Measured, best_step, has_fallen, peak_interval, without_none
from tether.evaluation.winrate import gain, mean_estimate
from tether.models.cpu.memory import free_memory
from tether.models.trunk import Role
from tether.runner.assembly.data.rows import load_rows, named
from tether.runner.assembly.job import AnyJob
from tether.runner.assembly.judges import score_judge
from tether.runner.assembly.models import open_model
from tether.runner.assembly.rewards import learned_reward
from tether.runner.assembly.roles import local_engine
from tether.runner.earlier import with_earlier_results
from tether.runner.jobs import expand
from tether.runner.methods.stage import run_stage
from tether.runner.run import run_recipe
from tether.settings.config import Config
from tether.settings.judges import FunctionJudge, JudgeConfig
from tether.settings.model import ModelConfig
from tether.settings.pairs import PairsSection
from tether.settings.reading import load_recipe, packaged_recipe
from tether.settings.recipe import BaseRecipe, recipe_type
from tether.settings.reward import RewardSection
from tether.settings.rewards import Combine
from tether.settings.sampling import PPOSection
from tether.settings.supervised import SFTSection
from tether.stats import group_indices

POOL_SEED = 15485863
NO_EFFECT = {
    "ppo.kl.coefficient": "the coefficients stand in each proxy's policies",
    "ppo.kl.mode": "the coefficients stand in each proxy's policies, and stay",
    "ppo.reward_combine": "set combine in the proxy",
    "ppo.reward_source": "policies are trained against the proxies",
    "ppo.seed": "the seeds are named on the command line",
    "reward.members": "set it in the proxy",
    "reward.average": "set it in the proxy",
    "reward.distill": "a proxy is one model, an ensemble, or an average",
    "reward.objectives": "a proxy is trained on one kind of comparison",
    "reward.test_share": (
        "the second model would take labels from the proxies, and gold judges already"
    ),
}
"""Settings of the shared sections that each proxy has of its own, and others that it cannot
have.
"""
NEAR = 0.5
"""Nats a response: below it Gao's curve for reinforcement learning rises without bound, and a
step's estimate is mostly noise.
"""


class ProxySection(Config):
    """A reward model: the labels it learns from, what it is made of, and the policies that are
    trained against it.
    """

    pairs: int = Field(
        ge=8,
        description=("labelled pairs; a smaller number is a part of every larger one"),
    )
    flipped: float = Field(
        default=0.0,
        ge=0,
        le=0.5,
        description=("share of the labels that are turned round"),
    )
    members: int = Field(default=1, ge=1)
    average: bool = Field(
        default=False,
        description=("average the members' weights instead of asking each"),
    )
    combine: Combine | None = Field(
        default=None,
        description=("how an ensemble's scores become one; unset: their mean"),
    )
    policies: tuple[float, ...] = Field(
        default=(),
        description=("KL coefficients, each of a PPO run; none: best-of-n alone"),
    )

    @property
    def trained_as(self) -> str:
        """The folder of its reward model, which proxies that differ in nothing else than `combine`
        share.
        """
        settings = [f"pairs-{self.pairs}", f"flipped-{self.flipped:g}", f"members-{self.members}"]
        return "-".join(settings if not self.average else [*settings, "averaged"])


class PoolSection(Config):
    """Answers from which best-of-n chooses."""

    prompts: int = Field(default=32, ge=2, description="held-out ones")
    samples: int = Field(
        default=128,
        ge=8,
        description="answers to each; n goes up to half of them",
    )


class OveroptConfig(Config):
    """The sections of a recipe that every proxy and policy shares, the proxies, and how they are
    optimised against.
    """

    run: str = "runs/overopt"
    model: ModelConfig
    sft: SFTSection | None = None
    pairs: PairsSection | None = Field(
        default=None,
        description=("collects the labels; unset: those of reward.data"),
    )
    reward: RewardSection
    ppo: PPOSection
    proxies: dict[str, ProxySection] = Field(min_length=1)
    best_of_n: PoolSection = PoolSection()

    def faults(self) -> Iterator[str]:
        gold = self.ppo.evaluate
        if (
            gold is None
            or gold.data is None
            or not isinstance(gold.judge, FunctionJudge | JudgeConfig)
        ):
            yield (
                "ppo.evaluate says when gold is measured, on which data, and by which judge: "
                "set it with all three"
            )
            return
        if gold.keep == "best" or gold.stop:
            yield (
                "the whole curve is the result, and tells what they would do: leave "
                "ppo.evaluate.keep and stop out"
            )
        for path, reason in NO_EFFECT.items():
            *outer, name = path.split(".")
            if name in reduce(getattr, outer, self).model_fields_set:
                yield f"{path} has no effect: {reason}"
        for name, proxy in self.proxies.items():
            if proxy.combine is not None and (proxy.members == 1 or proxy.average):
                yield (
                    f"proxies.{name}: combine has no effect on one model. Set members, without "
                    "average"
                )
            self.reward_section(proxy)
            for coefficient in proxy.policies:
                self.policy_section(proxy, coefficient, 0)

    def recipe(self, seed: int) -> BaseRecipe:
        """The common ground of a seed."""
        sections = {
            name: getattr(self, name) for name in ("model", "sft", "pairs", "reward", "ppo")
        }
        values = {
            name: value.model_dump(exclude_unset=True)
            for name, value in sections.items()
            if value is not None
        }
        return recipe_type().model_validate(
            {"run": str(Path(self.run) / f"seed-{seed}"), "seed": seed, **values},
        )

    def reward_section(self, proxy: ProxySection) -> RewardSection:
        """How a proxy is trained; its held-out comparisons are set apart before."""
        values = self.reward.model_dump(exclude_unset=True)
        more = {"members": proxy.members} | ({"average": True} if proxy.average else {})
        return RewardSection.model_validate({**values, **more, "heldout_fraction": 0.0})

    def policy_section(self, proxy: ProxySection, coefficient: float, seed: int) -> PPOSection:
        """How a policy is trained against a proxy."""
        values = self.ppo.model_dump(exclude_unset=True)
        values |= {"seed": seed, "kl": {**values.get("kl", {}), "coefficient": coefficient}}
        if proxy.combine is not None:
            values["reward_combine"] = proxy.combine
        return PPOSection.model_validate(values)


def overopt(
    config: OveroptConfig,
    seeds: Sequence[int],
    announce: Callable[[str], Progress] | None = None,
) -> Json:
    """Everything that is missing, seed by seed; returns (and writes) the summary and the page."""
    run = RunDirectory.open(
        config.run,
        {name: value for name, value in config if name not in ("run", "proxies")},
    )
    results: Json = {
        name: {
            **proxy.model_dump(exclude={"policies"}),
            "seeds": {},
            "policies": {f"{c:g}": {} for c in proxy.policies},
        }
        for name, proxy in config.proxies.items()
    }
    for seed in seeds:
        ground = Ground(config, seed, announce)
        pool = Pool(ground, config.best_of_n)
        for name, proxy in config.proxies.items():
            model = ground.reward_model(proxy)
            scores = pool.scores(model, name, proxy.combine or "mean")
            accuracy = read_json(model.parent / "summary.json").get("gold_accuracy")
            results[name]["seeds"][str(seed)] = {
                "gold_accuracy": accuracy,
                **chosen_from(pool.gold, scores),
            }
            for coefficient in proxy.policies:
                course = ground.policy(name, proxy, coefficient, model)
                results[name]["policies"][f"{coefficient:g}"][str(seed)] = course
    run.finish({"proxies": results})
    write_page(run.path)
    return run.summary()


class Ground:
    """What all proxies and policies of a seed stand on: an SFT model, labelled pairs, prompts, and
    a judge.
    """

    def __init__(
        self,
        config: OveroptConfig,
        seed: int,
        announce: Callable[[str], Progress] | None = None,
    ) -> None:
        self.config, self.seed, self.announce = config, seed, announce
        recipe = config.recipe(seed)
        self.root = Path(recipe.run)
        run_recipe(
            recipe,
            [name for name in ("sft", "pairs") if name in recipe.stages],
            self.progress,
        )
        jobs = expand(recipe, ["reward", "ppo"])
        self.reward, self.ppo = (with_earlier_results(job) for job in jobs)
        evaluate = config.ppo.evaluate
        assert (
            evaluate is not None
            and evaluate.data is not None
            and isinstance(evaluate.judge, FunctionJudge | JudgeConfig)
        )
        self.evaluate, self.judge = evaluate, evaluate.judge
        trained = {prompt.messages for prompt in self.ppo.rows or ()}
        prompts: list[Prompt] = load_rows(evaluate.data, Prompt, Quarantine(keep=0))
        self.heldout = [prompt for prompt in prompts if prompt.messages not in trained]

    def progress(self, phase: str) -> Progress:
        """Of a phase of this seed."""
        return (
            self.announce(f"{phase} · seed {self.seed}")
            if self.announce
            else lambda done, total, metrics: None
        )

    def reward_model(self, proxy: ProxySection) -> Path:
        """The folder of the proxy's reward model, trained if it is not there."""
        reward, folder = self.config.reward, self.root / "rewards" / proxy.trained_as
        rows = self.reward.rows
        if rows is None:
            rows = load_rows(named(reward.data, "reward"), Comparison, Quarantine(keep=0))
        train, test = split_by_group(rows, reward.heldout_fraction, reward.seed)
        own = self._job(
            self.reward,
            folder,
            settings=self.config.reward_section(proxy),
            rows=labels(train, proxy.pairs, proxy.flipped, self.seed),
            truth=test,
        )
        run_stage(own)
        free_memory()
        return folder / "model"

    def policy(self, name: str, proxy: ProxySection, coefficient: float, reward: Path) -> Json:
        """One PPO run against a proxy, and what gold says about its course."""
        folder = self.root / "policies" / f"{name}-{coefficient:g}"
        section = self.config.policy_section(proxy, coefficient, self.seed)
        summary = run_stage(self._job(self.ppo, folder, settings=section, scorer=reward))
        free_memory()
        groups = [
            str(i)
            for i in range(summary["gold"]["num_prompts"])
            for _ in range(self.evaluate.samples_per_prompt)
        ]
        alarms = [
            {key: alarm[key] for key in ("detector", "step", "message")}
            for alarm in summary["alarms"]
        ]
        course = course_of(RunDirectory(folder).held_out(), groups)
        return {**course, "alarms": alarms, "folder": str(folder.relative_to(self.config.run))}

    def _job(self, job: AnyJob, folder: Path, **changes: object) -> AnyJob:
        return replace(job, folder=folder, progress=self.progress(folder.name), **changes)


class Pool:
    """Answers of the start to held-out prompts, with their gold scores; kept, so that every proxy
    chooses from the same.
    """

    def __init__(self, ground: Ground, config: PoolSection) -> None:
        self.ground, self.config, self.folder = ground, config, ground.root / "pool"
        self.prompts = ground.heldout[: config.prompts]
        self.rollouts = self._answers()
        gold = self._cached("gold", lambda: score_judge(ground.judge, self.folder)(self.rollouts))
        usual = gold.nanmean(1, keepdim=True).nan_to_num(float(gold.nanmean()))
        # an answer without a verdict counts as its prompt's mean
        self.gold = torch.where(gold.isnan(), usual, gold)

    def scores(self, model: Path, name: str, combine: Combine) -> torch.Tensor:
        """A proxy's scores, (prompts, samples) float64."""
        start = self.ground.ppo.model
        scored = self._cached(
            f"proxy-{name}",
            lambda: learned_reward(model, start, combine).score(self.rollouts),
        )
        # a failed score is never the best
        return scored.nan_to_num(float(scored.nan_to_num(float("inf")).min()))

    def _cached(self, name: str, judge: Callable[[], Sequence[Score]]) -> torch.Tensor:
        if not (path := self.folder / f"{name}.json").is_file():
            write_json(path, [score.value for score in judge()])
        values = [float("nan") if value is None else value for value in read_json(path)]
        return torch.tensor(values, dtype=torch.float64).view(len(self.prompts), -1)

    def _answers(self) -> list[Rollout]:
        """Sampled prompt by prompt and written as they come."""
        path, ground, sampling = (
            self.folder / "answers.jsonl",
            self.ground,
            self.ground.config.ppo.sampling,
        )
        self.folder.mkdir(exist_ok=True)
        rows = {row["id"]: row for row in read_jsonl(path)}
        missing = [(n, p) for n, p in enumerate(self.prompts) if p.id not in rows]
        if missing:
            loaded, bar = open_model(ground.ppo.model), ground.progress("pool")
            engine = local_engine(
                Role(loaded.model),
                loaded,
                max_rows=ground.config.ppo.engine_rows,
            )
            for number, prompt in missing:
                how = {
                    "num_samples": self.config.samples,
                    "seed": ground.seed + POOL_SEED,
                    "ordinals": [number],
                }
                (group,) = engine.generate([prompt], sampling, **how)
                answers = [
                    {"ids": r.response_ids, "text": r.text, "stop": r.stop_reason.value}
                    for r in group.rollouts
                ]
                rows[prompt.id] = {
                    "id": prompt.id,
                    "prompt_ids": group.rollouts[0].prompt_ids,
                    "answers": answers,
                }
                append_jsonl(path, [rows[prompt.id]])
                bar(len(rows), len(self.prompts), {})
        return [
            self._rollout(p, rows[p.id], i)
            for p in self.prompts
            for i in range(self.config.samples)
        ]

    def _rollout(self, prompt: Prompt, row: Json, index: int) -> Rollout:
        answer = row["answers"][index]
        ids, stop = tuple(answer["ids"]), StopReason(answer["stop"])
        return Rollout(
            tuple(row["prompt_ids"]),
            ids,
            (),
            stop,
            answer["text"],
            index,
            0,
            self.ground.config.ppo.sampling,
            prompt,
        )


def labels(
    comparisons: Sequence[Comparison],
    count: int,
    flipped: float,
    seed: int,
) -> list[Comparison]:
    """`count` of the labelled pairs, about a share `flipped` of them the wrong way round; fewer
    pairs are a part of more.

    Raises:
        ConfigError: there are not so many.
    """
    if count > len(comparisons):
        raise ConfigError(
            f"proxies: {count} pairs are asked for, and {len(comparisons)} can be trained on. "
            "Lower pairs, or raise "
            "pairs.prompts or pairs.samples_per_prompt",
        )

    def draw(purpose: str, row: Comparison) -> float:
        return random.Random(f"{seed}/{purpose}/{row.id}").random()

    chosen = sorted(comparisons, key=lambda row: draw("order", row))[:count]
    return [
        replace(row.swap(), probability=row.probability) if draw("flip", row) < flipped else row
        for row in chosen
    ]


def chosen_from(gold: torch.Tensor, proxy: torch.Tensor) -> Json:
    """Best-of-n by proxy: gold and proxy of the chosen as n widens, both as gains over a single
    answer, and Gao's curve.

    The proxy is in standard deviations of its scores over the pool, so that proxies can be
    compared.
    """
    sizes = [2**power for power in range((gold.shape[1] // 2).bit_length())]
    scaled = (proxy - proxy.mean()) / proxy.std()
    sides = {"gold": (proxy, gold), "proxy": (proxy, scaled), "ceiling": (gold, gold)}
    curves = {
        name: [float(best_of_n_estimate(*side, n).mean()) for n in sizes]
        for name, side in sides.items()
    }
    gains = {name: [value - values[0] for value in values] for name, values in curves.items()}
    kl = [kl_best_of_n(n) for n in sizes]
    return {
        "sizes": sizes,
        "kl": kl,
        **gains,
        "start": curves["gold"][0],
        "fit": fitted(kl, gains["gold"], "best_of_n"),
    }


def course_of(measured: Measured, groups: Sequence[str]) -> Json:
    """Gold along a run: its curve, its peak with the peak's uncertainty, its fall, and what keeping
    the best would have kept.

    The highest of noisy measurements flatters itself. So the fall, and what is lost by keeping the
    best, are measured on answers that had no say: the peak is found on half of the prompts and
    judged on the other half, both ways.
    """
    steps = sorted(measured)
    means = {
        name: [_mean(measured[step].get(name, ())) for step in steps]
        for name in ("score", "proxy", "kl")
    }
    gold = mean_estimate(measured[steps[0]]["score"], groups)
    looks, parts = len(steps) - 1, _halves(groups)
    falls: list[float | None] = [None] * len(groups)
    shares = []
    for ours, others in (parts, parts[::-1]):
        mine, theirs = _scores_of(measured, ours), _scores_of(measured, others)
        stop = _fallen_at(mine, [groups[i] for i in ours], looks) or steps[-1]
        best = best_step({step: rows for step, rows in mine.items() if step <= stop})
        peak = best_step(mine)
        assert best is not None and peak is not None
        highest = max(_mean(rows["score"]) or float("-inf") for rows in theirs.values())
        shares.append((_mean(theirs[best]["score"]) or 0.0) / highest)
        for i in others:
            a, b = measured[peak]["score"][i], measured[steps[-1]]["score"][i]
            falls[i] = None if a is None or b is None else b - a
    gained = gain(measured[steps[0]]["score"], measured[steps[-1]]["score"], groups)
    points = [
        (k, g - gold.value)
        for k, g in zip(means["kl"], means["score"], strict=True)
        if k is not None and g is not None and k > NEAR
    ]
    return {
        "steps": steps,
        "gold": means["score"],
        "proxy": means["proxy"],
        "kl": means["kl"],
        "start": gold.as_dict(),
        "best_step": best_step(measured),
        "best_step_interval": peak_interval(measured, groups),
        "gain": gained.as_dict() if gained else None,
        "fall": mean_estimate(falls, groups).as_dict(),
        "fallen_at": _fallen_at(measured, groups, looks),
        "kept_share": statistics.fmean(shares),
        "fit": fitted([k for k, _ in points], [g for _, g in points], "rl"),
    }


def _halves(groups: Sequence[str]) -> tuple[list[int], list[int]]:
    """The answers of every other prompt, and those of the rest."""
    sides = (group_indices(groups) % 2).tolist()
    return [i for i, side in enumerate(sides) if side == 0], [
        i for i, side in enumerate(sides) if side == 1
    ]


def _scores_of(measured: Measured, answers: Sequence[int]) -> Measured:
    """The scores of these answers alone."""
    return {step: {"score": [rows["score"][i] for i in answers]} for step, rows in measured.items()}


def _fallen_at(measured: Measured, groups: Sequence[str], looks: int) -> int | None:
    """The first step at which `stop = true` would have ended the run."""
    steps = sorted(measured)
    return next(
        (
            s
            for k, s in enumerate(steps)
            if has_fallen({t: measured[t] for t in steps[: k + 1]}, groups, looks)
        ),
        None,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = without_none(values)
    return statistics.fmean(numbers) if numbers else None


def fitted(
    kl: Sequence[float],
    gold: Sequence[float],
    kind: Literal["best_of_n", "rl"],
) -> Json | None:
    """Gao's curve through gains of gold, or None where there are too few points for one."""
    try:
        fit = fit_overoptimization(kl, gold, kind)
    except ValueError:
        return None
    return {"alpha": fit.alpha, "beta": fit.beta, "peak": fit.peak, "peak_error": fit.peak_error}


def main(recipe: str, overrides: list[str], seeds: list[int]) -> None:
    """The study from the command line."""
    config = load_recipe(packaged_recipe(recipe), OveroptConfig, overrides)
    with bars(Console()) as announce:
        overopt(config, seeds, announce)
    print(f"page: {Path(config.run) / 'report.html'}")


if __name__ == "__main__":
    run_study(main, "overopt", __doc__ or "", seeds=(0, 1, 2))
