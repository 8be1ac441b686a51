"""What stages that sample share: the epochs over one batch of rollouts, an average of the weights, and the loop around a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, Unpack, runtime_checkable

import torch
from torch import Tensor

from tether.core.errors import DataError, RewardError, TrainingError
from tether.core.protocols import Engine, Monitor, RewardSource, doing
from tether.core.rundir import RunDirectory
from tether.core.stopping import Stopping
from tether.core.trend import Trend, trend
from tether.core.types import Prompt, Rollout, Score
from tether.core.watchdog import Watchdog
from tether.learner.checkpoint import Checkpoints, prefixed, unprefixed
from tether.learner.local import LocalLearner
from tether.learner.loop import endless, epoch_order, keep_for_replay
from tether.models.members import adapter_factors
from tether.models.trunk import Role
from tether.stages.experience import Experience
from tether.stages.policy_config import PolicyConfig
from tether.stages.sampled import Hooks

T = TypeVar("T")
Step = tuple[dict[str, float], list[Rollout], list[Score]]
"""What a step leaves: its metrics, all rollouts and their proxy scores."""


def clipped_epochs(
    experience: Experience,
    config: PolicyConfig,
    number: int,
    accumulate: Callable[[int, int], Mapping[str, float]],
    finish: Callable[[], Mapping[str, float]],
) -> dict[str, float]:
    """Several epochs of clipped updates over the same rollouts: an optimizer step a minibatch, their order new in every epoch.

    A minibatch in which no reward is known takes no step: "policy/updates" are those taken, beside those planned.

    Args:
        accumulate: (micro-batch, tokens of the optimizer step) -> adds the gradient; metrics that add up over micro-batches,
            and "ratio_max", "ratio_min".
        finish: takes the optimizer's step.

    Raises:
        TrainingError: old and new log-probabilities disagree before any update.
    """
    totals: dict[str, float] = {}
    counts, updates, first_deviation = experience.token_counts(), 0, 0.0
    tokens = [sum(counts[index] for index in minibatch) for minibatch in experience.minibatches]
    ratio_max, ratio_min, metrics = 1.0, 1.0, {}
    for epoch in range(config.epochs):
        epoch_kl = 0.0
        for part in epoch_order(len(experience.minibatches), config.seed + number, epoch):
            if not tokens[part]:
                continue
            for index in experience.minibatches[part]:
                stats = accumulate(index, tokens[part])
                ratio_max, ratio_min = max(ratio_max, stats["ratio_max"]), min(ratio_min, stats["ratio_min"])
                if updates == 0:
                    first_deviation = max(first_deviation, stats["ratio_max"] - 1, 1 - stats["ratio_min"])
                epoch_kl += stats["policy/approximate_kl"] * tokens[part] / sum(tokens)
                for key in stats.keys() - {"ratio_max", "ratio_min"}:
                    totals[key] = totals.get(key, 0.0) + stats[key]
            metrics = finish()
            updates += 1
        if config.target_kl is not None and epoch_kl > config.target_kl:
            break
    if first_deviation > 0.2:
        raise TrainingError(
            f"before any update the ratio is off by {first_deviation:.3f}: old and new log-probabilities disagree"
        )
    return {
        **{key: value / updates for key, value in totals.items()},
        **metrics,
        "policy/ratio_max": ratio_max,
        "policy/ratio_min": ratio_min,
        "policy/first_ratio_deviation": first_deviation,
        "policy/epochs": epoch + 1,
        "policy/updates": updates,
        "policy/updates_planned": config.epochs * config.minibatches,
    }


class WeightAverage:
    """An exponential moving average of a learner's masters (cf. Polyak and Juditsky 1992, https://doi.org/10.1137/0330046).

    Of an adapter the product B A is averaged: the product of averages is another model. An average of products has no small rank,
    so two linear sketches of it are kept, P R and L P with random R and L that stay (Tropp et al. 2017,
    https://doi.org/10.1137/17M1111590); from them comes, in the end, an adapter of the old rank that is nearly the nearest to it.

    Args:
        roles: whose adapters are among the masters.
    """

    def __init__(self, learner: LocalLearner, decay: float | None, roles: Sequence[Role] = ()) -> None:
        self.learner, self.decay = learner, decay
        self.averages: list[Tensor] | None = None
        self.sketches: list[Tensor] = []
        places = {id(parameter): place for place, parameter in enumerate(learner.parameters)}
        factors = [pair for role in roles for pair in adapter_factors(role)] if decay is not None else []
        self.pairs = list(dict.fromkeys((places[id(a)], places[id(b)]) for a, b in factors if id(a) in places))
        self.tests = [_test_matrices(number, learner.masters[a], learner.masters[b]) for number, (a, b) in enumerate(self.pairs)]

    @torch.no_grad()
    def update(self) -> None:
        if self.decay is None:
            return
        masters = [m.detach() for m in self.learner.masters]
        if self.averages is None:
            self.tensors = [m.clone() for m in masters]
        for average, now in zip([*(self.averages or ()), *self.sketches], [*masters, *self._sketched(masters)], strict=True):
            average.lerp_(now, 1 - self.decay)

    @torch.no_grad()
    def apply(self) -> None:
        """End with the average instead of the last weights."""
        for parameter, average in zip(self.learner.parameters, self._weights(), strict=self.averages is not None):
            parameter.copy_(average)

    @property
    def tensors(self) -> list[Tensor] | None:
        """The averaged weights, one for each master, and the sketches: what a checkpoint holds. None before the first update."""
        return None if self.averages is None else [*self._weights(), *self.sketches]

    @tensors.setter
    def tensors(self, values: list[Tensor] | None) -> None:
        count = len(self.learner.masters)
        self.averages = None if values is None else values[:count]
        self.sketches = [] if values is None else values[count:] or self._sketched(values)

    def _sketched(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """B A R and L B A of every adapted layer."""
        layers = [(tensors[a], tensors[b], *tests) for (a, b), tests in zip(self.pairs, self.tests, strict=True)]
        return [sketch for a, b, right, left in layers for sketch in (b @ (a @ right), (left @ b) @ a)]

    @torch.no_grad()
    def _weights(self) -> list[Tensor]:
        weights = list(self.averages or ())
        for number, (a, b) in enumerate(self.pairs if weights else ()):
            of_columns, of_rows = self.sketches[2 * number : 2 * number + 2]
            basis = torch.linalg.qr(of_columns).Q
            inside = torch.linalg.pinv(self.tests[number][1] @ basis) @ of_rows
            left, sizes, right = torch.linalg.svd(inside, full_matrices=False)
            root = sizes[: len(weights[a])].sqrt()
            down, up = torch.zeros_like(weights[a]), torch.zeros_like(weights[b])
            down[: len(root)], up[:, : len(root)] = root[:, None] * right[: len(root)], basis @ (left[:, : len(root)] * root)
            weights[a], weights[b] = down, up
        return weights


def _test_matrices(number: int, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """R (inputs, 2 rank + 1) and L (4 rank + 3, outputs) of normal numbers, the same whenever they are asked for."""
    generator, (rank, inputs), outputs = torch.Generator().manual_seed(number), down.shape, up.shape[0]
    right = torch.randn(inputs, min(2 * rank + 1, inputs, outputs), generator=generator)
    left = torch.randn(min(4 * rank + 3, outputs), outputs, generator=generator)
    return right.to(down), left.to(up)


@runtime_checkable
class Follower(Protocol):
    """A reward source that is told what each step scored; what it says next depends on its state."""

    def learn(self, scores: Sequence[Score]) -> Mapping[str, float]: ...
    def state(self) -> dict[str, Any]: ...
    def load_state(self, values: Mapping[str, Any]) -> None: ...


class PolicyStage(Protocol):
    """What the loop needs of a stage; `state` is what its next step depends on beside weights and optimizer.

    A state with a true "stopped" ends the training. `config` has steps, checkpoint_every, sample_rows, seed and ordinals(number).
    """

    config: Any
    learner: LocalLearner
    average: WeightAverage
    engine: Engine
    reward: RewardSource

    def step(self, prompts: Sequence[Prompt], number: int) -> Step: ...

    def ordinals(self, number: int) -> range:
        """The places, among all prompts of the run, of those that step `number` may sample."""
        return self.config.ordinals(number)

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, values: Mapping[str, Any]) -> None:
        pass

    def train(self, prompts: Sequence[Prompt], run: RunDirectory, **hooks: Unpack[Hooks]) -> dict[str, Any]:
        """See train."""
        return train(self, prompts, run, **hooks)


def train(stage: PolicyStage, prompts: Sequence[Prompt], run: RunDirectory, **hooks: Unpack[Hooks]) -> dict[str, Any]:
    """Train, or go on training, in `run`.

    Raises:
        DataError: there are no prompts.
        RewardError: the reward source fails too often; the last whole step is saved.
    """
    config, start, monitor = stage.config, time.perf_counter(), hooks.get("monitor")
    on_step, ended, progress = hooks.get("on_step"), hooks.get("ended"), hooks.get("progress")
    if not prompts:
        raise DataError(f"{type(stage).__name__} needs at least one prompt")
    ends = lambda: stage.state().get("stopped") or (ended is not None and ended())  # noqa: E731
    with Stopping() as stopping, Checkpoints(run.path / "checkpoints", config.keep_checkpoints) as saved:
        done, watchdog = _resume(stage, run, saved, monitor), Watchdog(run.path / "stacks.txt")
        doing(progress, f"sampling for step {done + 1}")
        while stopping.asked or (done < config.steps and not ends()):
            if stopping.asked:
                _save(stage, run, saved, done, monitor)
                saved.wait()
                stopping.leave(done, config.steps, run.path)
            try:
                with watchdog.step():
                    metrics, rollouts, scores = _kept(stage, run, prompts_of(prompts, stage, done), done)
            except RewardError:
                if done:
                    _save(stage, run, saved, done, monitor)
                raise
            done += 1
            if isinstance(stage.reward, Follower):
                metrics.update(stage.reward.learn(scores))
            if on_step is not None:
                metrics.update(on_step(done, metrics))
            if monitor is not None:
                alarms = monitor.observe(done, metrics, rollouts, scores)
                run.alarm(alarms)
                metrics["alarms"] = float(len(alarms))
            run.log(metrics, done)
            run.sample(
                {"step": done, "prompt": r.prompt.text, "response": r.text, "proxy": s.value, "stop": r.stop_reason.value}
                for r, s in _spread(list(zip(rollouts, scores, strict=True)), config.sample_rows)
            )
            if done % config.checkpoint_every == 0 or done == config.steps or ends():
                _save(stage, run, saved, done, monitor)
            if progress:
                progress(done, config.steps, metrics)
    stage.average.apply()
    return {**_summary(run.metrics()), "seconds": run.seconds(start)}


def _kept(stage: PolicyStage, run: RunDirectory, prompts: Sequence[Prompt], number: int) -> Step:
    """A step; its rollouts are kept where an update had to be left out."""
    skipped, rollouts = stage.learner.skipped, []
    try:
        metrics, rollouts, scores = stage.step(prompts, number)
    finally:
        if stage.learner.skipped != skipped:
            keep_for_replay(run, number + 1, stage.learner.fault, rollouts or prompts)
    return metrics, rollouts, scores


def prompts_of(prompts: Sequence[Prompt], stage: PolicyStage, number: int) -> list[Prompt]:
    """The prompts of a step: epochs of deterministic order, one after another."""
    return [prompts[i] for i in endless(len(prompts), stage.ordinals(number), stage.config.seed)]


def _save(stage: PolicyStage, run: RunDirectory, saved: Checkpoints, number: int, monitor: Monitor | None) -> None:
    tensors, values = stage.learner.state()
    average = prefixed("ema", {str(i): t for i, t in enumerate(stage.average.tensors or [])})
    more = {} if monitor is None else {"monitor": monitor.state()}
    if isinstance(stage.reward, Follower):
        more["reward"] = stage.reward.state()
    run.flush()
    saved.save(number, {**tensors, **average}, {**values, **stage.state(), **more})


def _resume(stage: PolicyStage, run: RunDirectory, saved: Checkpoints, monitor: Monitor | None) -> int:
    found = saved.latest()
    if found is None:
        run.truncate(0)
        return 0
    tensors, values = found
    stage.learner.load_state(tensors, values)
    average = unprefixed("ema", tensors)
    stage.average.tensors = [average[str(i)].clone() for i in range(len(average))] or None
    stage.load_state(values)
    if isinstance(stage.reward, Follower):
        stage.reward.load_state(values.get("reward", {}))
    if monitor is not None:
        monitor.load_state(values["monitor"])
    stage.engine.update_weights(values["step"])
    run.truncate(values["step"])
    return values["step"]


def _spread(rows: list[T], count: int) -> list[T]:
    """So many of them, from the first on in equal steps: of different prompts where there are enough."""
    return rows[:: max(1, len(rows) // count)][:count] if count else []


def _summary(history: list[dict[str, Any]]) -> dict[str, Any]:
    """Proxy score of the first and the last steps, KL of the last ones (see core.trend), and what must stay zero."""

    def moved(key: str) -> Trend | None:
        return trend([row[key] for row in history if row.get(key) is not None])

    proxy, kl = moved("reward/proxy"), moved("kl/policy_reference_k1")
    return {
        "steps": len(history),
        "proxy_first": proxy and proxy.first,
        "proxy_last": proxy and proxy.last,
        "proxy_gain": proxy and proxy.gain,
        "kl": kl and kl.last,
        "kl_noise": kl and kl.noise,
        "first_ratio_deviation": max(row.get("policy/first_ratio_deviation", 0.0) for row in history),
        "failed_rewards": sum(row.get("reward/failed", 0.0) for row in history),
    }
