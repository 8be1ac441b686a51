"""The loop around the steps of every stage that samples: prompts, records, alarms, checkpoints,
resume.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from tether.core.budget import BUDGET, time_limit
from tether.core.errors import DataError, RewardError
from tether.core.protocols import (
    AdaptiveReward,
    Engine,
    Monitor,
    OrderingEngine,
    Progress,
    RewardSource,
    Stateful,
    doing,
)
from tether.core.records import note_records, report_beginning, report_changes
from tether.core.rundir import RunDirectory
from tether.core.stopping import Stopping
from tether.core.types import Facts, Json, Metrics, Prompt, Readings, Rollout, Score
from tether.core.watchdog import Watchdog
from tether.data.chat import ChatEncoder
from tether.settings.policy import SampledConfig
from tether.stages.learner.checkpoint import Checkpoints
from tether.stages.learner.local import LocalLearner
from tether.stages.learner.loop import draws_schedule, endless, go_on_within, replayable
from tether.stages.rollouts import Experience, Step
from tether.stages.token_numbers import token_rows
from tether.stats import Trend, trend


class SamplingStage(Protocol):
    """A stage that samples, as the loop sees it; its state is saved where it is `Stateful` too."""

    @property
    def config(self) -> SampledConfig: ...

    learner: LocalLearner
    engine: Engine
    reward: RewardSource
    stopped: bool
    """True if the stage itself has ended the training."""

    def ordinals(self, number: int) -> range:
        """The places, among all prompts of the run, of those that step `number` may sample."""
        ...

    def step(self, prompts: Sequence[Prompt], number: int) -> Step: ...

    def summary(self, history: Sequence[Readings]) -> Facts:
        """The stage's own part of the run's summary, from the metrics of all steps."""
        ...


@runtime_checkable
class TokenStage(Protocol):
    """A stage that holds the tokens of its last step with their numbers."""

    experience: Experience
    encoder: ChatEncoder


def train(
    stage: SamplingStage,
    prompts: Sequence[Prompt],
    run: RunDirectory,
    *,
    on_step: Callable[[int, Metrics], Metrics] | None = None,
    monitor: Monitor | None = None,
    ended: Callable[[], bool] | None = None,
    progress: Progress | None = None,
) -> Json:
    """Train, or go on training, in `run`; the summary.

    Args:
        on_step: adds metrics to a step (gold scores, memory) before they are logged.
        monitor: looks at every step; its alarms are written down.
        ended: whether the step just logged was the last.

    Raises:
        DataError: there are no prompts.
        RewardError: the reward source fails too often; the last whole step is saved.
    """
    folder = run.path
    config = stage.config
    steps = config.steps
    learner = stage.learner
    start = time.perf_counter()
    limit = time_limit()
    ranks = learner.ranks
    if not prompts:
        raise DataError(f"{type(stage).__name__} needs at least one prompt")

    def finished() -> bool:
        return ranks.once(
            lambda: (
                done >= steps or stage.stopped or (ended is not None and ended()) or limit.over()
            ),
        )

    with (
        Stopping(folder) as stopping,
        Checkpoints(folder / "checkpoints", config.keep_checkpoints, ranks=ranks) as checkpoints,
    ):
        done = _resume(stage, run, checkpoints, monitor)
        watchdog = Watchdog(folder / "stacks.txt")
        limit.begin(done, steps)
        run.expect(steps)
        doing(progress, f"sampling for step {done + 1}")
        last = finished()
        while (stop := ranks.agreed(stopping.asked)) or not last:
            if stop:
                _save(stage, run, checkpoints, done, monitor)
                checkpoints.wait()
                stopping.leave(done, steps, folder, stop)
            batch = step_prompts(prompts, stage, done)
            order_ahead(stage, prompts, done)
            rows: list[Prompt | Rollout] = [*batch]
            try:
                with watchdog.step(), replayable(run, learner, done + 1, rows):
                    step = stage.step(batch, done)
                    rows[:] = step.rollouts
            except RewardError:
                if done:
                    _save(stage, run, checkpoints, done, monitor)
                raise
            done += 1
            if isinstance(stage.reward, AdaptiveReward):
                step.metrics.update(stage.reward.learn(step.scores))
            if on_step is not None:
                step.metrics.update(on_step(done, step.metrics))
            _record(stage, run, done, step, monitor)
            drawn = draws_schedule(limit, learner, done, run)
            last = finished()
            due = drawn or last or done % config.checkpoint_every == 0
            if due or ranks.once(lambda: stopping.to_save):
                _save(stage, run, checkpoints, done, monitor)
            if progress:
                progress(done, limit.drawn or steps, step.metrics)
    if config.ema_decay:
        learner.put(learner.averages)
    history = run.metrics()
    return {**_summary(history), **stage.summary(history), "seconds": run.seconds(start)}


def _record(
    stage: SamplingStage,
    run: RunDirectory,
    number: int,
    step: Step,
    monitor: Monitor | None,
) -> None:
    """Write down a step: its alarms and metrics, a few of its texts, and the numbers of a few of
    their tokens.
    """
    metrics, rollouts, scores = step
    if monitor is not None:
        alarms = monitor.observe(number, metrics, rollouts, scores)
        run.alarm(alarms)
        metrics["alarms"] = float(len(alarms))
    run.log(metrics, number)
    # of different prompts where there are enough
    count = stage.config.sample_rows
    places = range(0, len(rollouts), max(1, len(rollouts) // count))[:count] if count else []
    run.sample(_sample(number, rollouts[place], scores[place]) for place in places)
    if isinstance(stage, TokenStage):
        run.note_tokens(token_rows(stage.experience, stage.encoder, places, number))


def _sample(number: int, rollout: Rollout, score: Score) -> Json:
    """A text of a step, or the reason why it has no score; the turns of an episode as messages, with
    the rewards of its replies.
    """
    row: Json = {
        "step": number,
        "prompt": rollout.prompt.text,
        "response": rollout.transcript,
        "proxy": score.value,
        "stop": rollout.stop_reason.value,
    }
    if score.reason:
        row["reason"] = score.reason
    if rollout.turns:
        row["turns"] = [turn.as_row() for turn in rollout.turns]
        replies = [turn for turn in row["turns"] if turn["role"] == "assistant"]
        for turn, (start, stop) in zip(reversed(replies), reversed(rollout.spans), strict=False):
            if rewards := [reward for end, reward in score.steps if start <= end < stop]:
                turn["reward"] = sum(rewards)
    return row


def step_prompts(prompts: Sequence[Prompt], stage: SamplingStage, number: int) -> list[Prompt]:
    """The prompts of a step: epochs of deterministic order, one after another."""
    return [prompts[i] for i in endless(len(prompts), stage.ordinals(number), stage.config.seed)]


def order_ahead(stage: SamplingStage, prompts: Sequence[Prompt], number: int) -> None:
    """Ask for the samples of step `number` and of those that may be sampled with the same weights;
    else nothing.
    """
    engine = stage.engine
    config = stage.config
    if not isinstance(engine, OrderingEngine):
        return
    engine.forget(number)
    for later in range(number, min(number + engine.max_staleness + 1, config.steps)):
        engine.order(
            later,
            step_prompts(prompts, stage, later),
            config.sampling,
            num_samples=config.samples_per_prompt,
            seed=config.seed,
            ordinals=stage.ordinals(later),
        )


def _parts(stage: SamplingStage, monitor: Monitor | None) -> dict[str, Stateful]:
    """Everything beside the stage itself whose state a later step depends on."""
    parts = {"monitor": monitor, "reward": stage.reward, "engine": stage.engine}
    return {name: part for name, part in parts.items() if isinstance(part, Stateful)}


def _save(
    stage: SamplingStage,
    run: RunDirectory,
    checkpoints: Checkpoints,
    number: int,
    monitor: Monitor | None,
) -> None:
    tensors, values = stage.learner.state()
    own = stage.state() if isinstance(stage, Stateful) else {}
    states = {name: part.state() for name, part in _parts(stage, monitor).items()}
    checkpoints.save(
        number,
        tensors,
        {**values, **own, **states, "records": note_records(run), BUDGET: time_limit().state()},
    )


def _resume(
    stage: SamplingStage,
    run: RunDirectory,
    checkpoints: Checkpoints,
    monitor: Monitor | None,
) -> int:
    """The newest checkpoint in place; the number of steps that were made."""
    checkpoint = checkpoints.latest(stage.learner.parameters)
    if checkpoint is None:
        report_beginning(run)
        run.truncate(0)
        return 0
    tensors, values = checkpoint
    stage.learner.load_state(tensors, values)
    go_on_within(time_limit(), stage.learner, values, run)
    if isinstance(stage, Stateful):
        stage.load_state(values)
    for name, part in _parts(stage, monitor).items():
        part.load_state(values.get(name, {}))
    stage.engine.update_weights(values["step"])
    report_changes(run, values.get("records"), values["step"])
    run.truncate(values["step"])
    return values["step"]


def _summary(history: Sequence[Facts]) -> Json:
    """Proxy score of the first and the last steps, KL of the last ones (see stats.trend), and what
    must stay zero.
    """

    def moved(key: str) -> Trend | None:
        return trend([row[key] for row in history if row.get(key) is not None])

    proxy = moved("reward/proxy")
    kl = moved("kl/policy_reference_k1")
    return {
        "steps": len(history),
        "proxy_first": proxy and proxy.first,
        "proxy_last": proxy and proxy.last,
        "proxy_gain": proxy and proxy.gain,
        "kl": kl and kl.last,
        "kl_noise": kl and kl.noise,
        "first_ratio_deviation": max(
            row.get("policy/first_ratio_deviation", 0.0) for row in history
        ),
        "failed_rewards": sum(row.get("reward/failed", 0.0) for row in history),
    }
