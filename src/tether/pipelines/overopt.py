"""How far reward models bear optimisation: proxies of few and of many labels, by best-of-n and by PPO, judged by gold.

The study of Gao et al. 2022 (https://arxiv.org/abs/2210.10760) on one's own model, with flipped labels, the ensembles of
Coste et al. 2023 (https://arxiv.org/abs/2310.02743) and the averaged weights of Ramé et al. 2024 (https://arxiv.org/abs/2401.12187).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator

from tether.algorithms.overoptimization import best_of_n_estimate, fit_overoptimization, kl_best_of_n
from tether.algorithms.reward_ensembles import Combine
from tether.assemble import PPOSection, RewardSection, learned_reward, local_engine
from tether.core.config import Config, parts
from tether.core.errors import ConfigError
from tether.core.rundir import RunDirectory, append_jsonl, read_json, read_jsonl, write_json
from tether.core.types import Comparison, Prompt, Rollout, StopReason
from tether.data.sources import split_by_group
from tether.evaluation.winrate import gain, mean_estimate
from tether.models.loading import load_model
from tether.models.memory import release
from tether.models.trunk import Role
from tether.pipelines.foundation import Foundation, SeedsConfig
from tether.pipelines.journey import run_reward
from tether.pipelines.measured import Progress
from tether.pipelines.opening import as_begun
from tether.preferences.annotators import in_true_order
from tether.stages.heldout import Measured, best_step, halves, has_fallen, peak_interval, scores_of

POOL_SEED = 15485863
NEAR = 0.5
"""Nats a response: below it Gao's curve for reinforcement learning rises without bound, and a step's estimate is mostly noise."""


class ProxySection(Config):
    """A reward model: the labels it learns from, what it is made of, and the policies that are trained against it."""

    pairs: int = Field(ge=8, description="labelled pairs; a smaller number is a part of every larger one")
    flipped: float = Field(default=0.0, ge=0, le=0.5, description="share of the labels that are turned round")
    members: int = Field(default=1, ge=1)
    average: bool = Field(default=False, description="average the members' weights instead of asking each")
    combine: Combine | None = Field(default=None, description="how an ensemble's scores become one; unset: their mean")
    policies: tuple[float, ...] = Field(default=(), description="KL coefficients, each of a PPO run; none: best-of-n alone")

    @property
    def trained_as(self) -> str:
        """The folder of its reward model, which proxies that differ in nothing else than `combine` share."""
        parts = [f"pairs-{self.pairs}", f"flipped-{self.flipped:g}", f"members-{self.members}"]
        return "-".join(parts if not self.average else [*parts, "averaged"])


class PoolSection(Config):
    """Answers from which best-of-n chooses."""

    prompts: int = Field(default=32, ge=2, description="held-out ones")
    samples: int = Field(default=128, ge=8, description="answers to each; n goes up to half of them")


class OveroptConfig(SeedsConfig):
    """The common ground, the proxies, and how they are optimised against."""

    run: str = "runs/overopt"
    seeds: tuple[int, ...] = Field(default=(0, 1, 2), min_length=1)
    proxies: dict[str, ProxySection] = Field(min_length=1)
    best_of_n: PoolSection = PoolSection()
    ppo: PPOSection

    @model_validator(mode="after")
    def _check_proxies(self) -> OveroptConfig:
        if self.ppo.evaluate is None:
            raise ValueError("ppo.evaluate says when gold is measured: set it")
        if self.ppo.evaluate.keep == "best" or self.ppo.evaluate.stop:
            raise ValueError("the whole curve is the result: leave ppo.evaluate.keep and stop out; what they would do is told")
        for name in ("coefficient", "mode"):
            if name in self.ppo.kl.model_fields_set:
                raise ValueError(f"ppo.kl.{name} has no effect: the coefficients stand in each proxy's policies")
        if "reward_combine" in self.ppo.model_fields_set:
            raise ValueError("ppo.reward_combine has no effect: set combine in the proxy")
        if self.reward.test_share:
            raise ValueError("reward.test_share would take labels from the proxies, and gold judges already: leave it out")
        for name in ("members", "average"):
            if name in self.reward.model_fields_set:
                raise ValueError(f"reward.{name} has no effect: set it in the proxy")
        for name, proxy in self.proxies.items():
            if proxy.combine is not None and (proxy.members == 1 or proxy.average):
                raise ValueError(f"proxies.{name}: combine has no effect on one model. Set members, without average")
            self.reward_section(proxy)
            for coefficient in proxy.policies:
                self.policy_section(proxy, coefficient, self.seeds[0])
        return self

    def reward_section(self, proxy: ProxySection) -> RewardSection:
        said = self.reward.model_dump(exclude_unset=True)
        more = {"members": proxy.members} | ({"average": True} if proxy.average else {})
        return RewardSection.model_validate({**said, **more, "heldout_fraction": 0.0})

    def policy_section(self, proxy: ProxySection, coefficient: float, seed: int) -> PPOSection:
        said = self.ppo.model_dump(exclude_unset=True)
        said |= self.common(self.ppo, "ppo") | {"seed": seed, "kl": {**said.get("kl", {}), "coefficient": coefficient}}
        if proxy.combine is not None:
            said["reward_combine"] = proxy.combine
        return PPOSection.model_validate(said)


class Overopt:
    """Seed by seed: the common ground, a pool of answers, then every proxy and the policies trained against it."""

    def __init__(self, config: OveroptConfig, announce: Callable[[str], Progress] | None = None) -> None:
        self.root = Path(config.run)
        self.config = config = as_begun(config, self.root)
        self.announce = announce or (lambda phase: lambda done, total, metrics: None)
        self.run_directory = RunDirectory.open(self.root, parts(config, without=("run", "proxies", "seeds")))

    def run(self) -> dict[str, Any]:
        """Everything that is missing; returns (and writes) the summary."""
        found: dict[str, Any] = {
            name: {**proxy.model_dump(exclude={"policies"}), "seeds": {}, "policies": {f"{c:g}": {} for c in proxy.policies}}
            for name, proxy in self.config.proxies.items()
        }
        for seed in self.config.seeds:
            ground = self.config.foundation(seed, lambda phase, seed=seed: self.announce(f"{phase} · seed {seed}"))
            ground.prepare()
            pool = Pool(ground, self.config.best_of_n)
            for name, proxy in self.config.proxies.items():
                model = self._reward_model(ground, proxy)
                scores = pool.scores(model, name, proxy.combine or "mean")
                accuracy = read_json(model.parent / "summary.json")["gold_accuracy"]
                found[name]["seeds"][str(seed)] = {"gold_accuracy": accuracy, **chosen_from(pool.gold, scores)}
                for coefficient in proxy.policies:
                    found[name]["policies"][f"{coefficient:g}"][str(seed)] = self._policy(ground, name, proxy, coefficient, model)
        self.run_directory.finish({"proxies": found})
        return self.run_directory.summary()

    def _reward_model(self, ground: Foundation, proxy: ProxySection) -> Path:
        """The folder of the proxy's reward model, trained if it is not there."""
        seed, reward, folder = ground.config.seed, self.config.reward, ground.root / "rewards" / proxy.trained_as
        train, test = split_by_group(ground.comparisons(), reward.heldout_fraction, reward.seed)
        run_reward(
            self.config.reward_section(proxy),
            ground.policy_model,
            folder,
            seed,
            comparisons=labels(train, proxy.pairs, proxy.flipped, seed),
            gold=[in_true_order(c) for c in test],
            progress=ground.announce(folder.name),
        )
        release()
        return folder / "model"

    def _policy(self, ground: Foundation, name: str, proxy: ProxySection, coefficient: float, reward: Path) -> dict[str, Any]:
        """One PPO run against a proxy, and what gold says about its course."""
        folder, seed = ground.root / "policies" / f"{name}-{coefficient:g}", ground.config.seed
        section = self.config.policy_section(proxy, coefficient, seed)
        assert section.evaluate is not None
        summary = ground.optimise(section, folder, reward)
        release()
        num_prompts, samples = len(ground.heldout[: section.evaluate.prompts]), section.evaluate.samples_per_prompt
        alarms = [{key: alarm[key] for key in ("detector", "step", "message")} for alarm in summary["alarms"]]
        course = course_of(RunDirectory(folder).held_out(), [str(i) for i in range(num_prompts) for _ in range(samples)])
        return {**course, "alarms": alarms, "folder": str(folder.relative_to(self.root))}


class Pool:
    """Answers of the SFT model to held-out prompts, with their gold scores; kept, so that every proxy chooses from the same."""

    def __init__(self, ground: Foundation, config: PoolSection) -> None:
        self.ground, self.config, self.folder = ground, config, ground.root / "pool"
        self.prompts = ground.heldout[: config.prompts]
        self.rollouts = self._answers()
        self.gold = self._kept("gold", lambda: [score.value for score in ground.gold(self.rollouts)])

    def scores(self, model: Path, name: str, combine: Combine) -> torch.Tensor:
        """A proxy's scores, (prompts, samples) float64."""
        source = self.ground.policy_model
        return self._kept(f"proxy-{name}", lambda: [s.value for s in learned_reward(model, source, combine).score(self.rollouts)])

    def _kept(self, name: str, compute: Callable[[], Sequence[float | None]]) -> torch.Tensor:
        if not (path := self.folder / f"{name}.json").is_file():
            write_json(path, list(compute()))
        values = [float("-inf") if v is None else v for v in read_json(path)]  # a failed score is never the best
        return torch.tensor(values, dtype=torch.float64).view(len(self.prompts), -1)

    def _answers(self) -> list[Rollout]:
        """Sampled prompt by prompt and written as they come."""
        path, ground, count = self.folder / "answers.jsonl", self.ground, self.config.samples
        self.folder.mkdir(exist_ok=True)
        done = {row["id"]: row for row in read_jsonl(path)}
        missing = [(n, p) for n, p in enumerate(self.prompts) if p.id not in done]
        if missing:
            loaded, bar = load_model(ground.policy_model), ground.announce("pool")
            engine = local_engine(Role(loaded.model), loaded, max_rows=ground.engine_rows)
            for number, prompt in missing:
                (group,) = engine.generate(
                    [prompt], ground.sampling, num_samples=count, seed=ground.config.seed + POOL_SEED, ordinals=[number]
                )
                answers = [{"ids": r.response_ids, "text": r.text, "stop": r.stop_reason.value} for r in group.rollouts]
                done[prompt.id] = {"id": prompt.id, "prompt_ids": group.rollouts[0].prompt_ids, "answers": answers}
                append_jsonl(path, [done[prompt.id]])
                bar(len(done), len(self.prompts), {})
        return [self._rollout(p, done[p.id], i) for p in self.prompts for i in range(count)]

    def _rollout(self, prompt: Prompt, row: dict[str, Any], index: int) -> Rollout:
        answer = row["answers"][index]
        ids, stop = tuple(answer["ids"]), StopReason(answer["stop"])
        return Rollout(tuple(row["prompt_ids"]), ids, (), stop, answer["text"], index, 0, self.ground.sampling, prompt)


def labels(comparisons: Sequence[Comparison], count: int, flipped: float, seed: int) -> list[Comparison]:
    """`count` of the labelled pairs, about a share `flipped` of them the wrong way round; fewer pairs are a part of more.

    Raises:
        ConfigError: there are not so many.
    """
    if count > len(comparisons):
        raise ConfigError(
            f"proxies: {count} pairs are asked for, and {len(comparisons)} can be trained on. Lower pairs, or raise "
            "pairs.num_prompts or pairs.samples_per_prompt"
        )

    def draw(purpose: str, row: Comparison) -> float:
        return random.Random(f"{seed}/{purpose}/{row.id}").random()

    chosen = sorted(comparisons, key=lambda row: draw("order", row))[:count]
    return [replace(row.swap(), probability=row.probability) if draw("flip", row) < flipped else row for row in chosen]


def chosen_from(gold: torch.Tensor, proxy: torch.Tensor) -> dict[str, Any]:
    """Best-of-n by proxy: gold and proxy of the chosen as n widens, both as gains over a single answer, and Gao's curve.

    The proxy is told in standard deviations of its scores over the pool, so that proxies can be compared.
    """
    sizes = [2**power for power in range((gold.shape[1] // 2).bit_length())]
    scaled = (proxy - proxy.mean()) / proxy.std()
    curves = {
        name: [float(best_of_n_estimate(proxy, values, n).mean()) for n in sizes]
        for name, values in (("gold", gold), ("proxy", scaled), ("ceiling", gold))
    }
    curves["ceiling"] = [float(best_of_n_estimate(gold, gold, n).mean()) for n in sizes]
    gains = {name: [value - values[0] for value in values] for name, values in curves.items()}
    kl = [kl_best_of_n(n) for n in sizes]
    return {"sizes": sizes, "kl": kl, **gains, "start": curves["gold"][0], "fit": fitted(kl, gains["gold"], "best_of_n")}


def course_of(measured: Measured, groups: Sequence[str]) -> dict[str, Any]:
    """Gold along a run: its curve, its peak with the peak's uncertainty, its fall, and what keeping the best would have kept.

    The highest of noisy measurements flatters itself. So the fall, and what is lost by keeping the best, are told on answers that
    had no say: the peak is found on half of the prompts and judged on the other half, both ways.
    """
    steps = sorted(measured)
    means = {name: [_mean(measured[step].get(name, ())) for step in steps] for name in ("score", "proxy", "kl")}
    gold = mean_estimate(measured[steps[0]]["score"], groups).as_dict()
    looks, parts = len(steps) - 1, halves(groups)
    falls: list[float | None] = [None] * len(groups)
    kept = []
    for ours, others in (parts, parts[::-1]):
        mine, theirs = scores_of(measured, ours), scores_of(measured, others)
        stop = _fallen_at(mine, [groups[i] for i in ours], looks) or steps[-1]
        best = best_step({step: rows for step, rows in mine.items() if step <= stop})
        peak = best_step(mine)
        assert best is not None and peak is not None
        highest = max(_mean(rows["score"]) or float("-inf") for rows in theirs.values())
        kept.append((_mean(theirs[best]["score"]) or 0.0) / highest)
        for i in others:
            a, b = measured[peak]["score"][i], measured[steps[-1]]["score"][i]
            falls[i] = None if a is None or b is None else b - a
    gained = gain(measured[steps[0]]["score"], measured[steps[-1]]["score"], groups)
    zero = gold["value"]
    points = [
        (k, g - zero) for k, g in zip(means["kl"], means["score"], strict=True) if k is not None and g is not None and k > NEAR
    ]
    return {
        "steps": steps,
        "gold": means["score"],
        "proxy": means["proxy"],
        "kl": means["kl"],
        "start": gold,
        "best_step": best_step(measured),
        "best_step_interval": peak_interval(measured, groups),
        "gain": gained.as_dict() if gained else None,
        "fall": mean_estimate(falls, groups).as_dict(),
        "fallen_at": _fallen_at(measured, groups, looks),
        "kept_share": statistics.fmean(kept),
        "fit": fitted([k for k, _ in points], [g for _, g in points], "rl"),
    }


def _fallen_at(measured: Measured, groups: Sequence[str], looks: int) -> int | None:
    """The first step at which `stop = true` would have ended the run."""
    steps = sorted(measured)
    return next((s for k, s in enumerate(steps) if has_fallen({t: measured[t] for t in steps[: k + 1]}, groups, looks)), None)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def fitted(kl: Sequence[float], gold: Sequence[float], kind: Literal["best_of_n", "rl"]) -> dict[str, Any] | None:
    """Gao's curve through gains of gold, or None where there are too few points for one."""
    try:
        fit = fit_overoptimization(kl, gold, kind)
    except ValueError:
        return None
    return {"alpha": fit.alpha, "beta": fit.beta, "peak": fit.peak, "peak_error": fit.peak_error}
