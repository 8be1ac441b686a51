"""Stages that sample: their prompts, their measurements on held-out ones, and the watch over
them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import torch

from tether.core.budget import time_limit
from tether.core.errors import DataError
from tether.core.protocols import doing
from tether.core.rundir import RunDirectory
from tether.core.types import Alarm, Json, Metrics, Problem, Prompt, Readings, Rollout, Score
from tether.evaluation.decoding import other_temperatures
from tether.evaluation.held_out import HeldOutAnswers, Scorer
from tether.evaluation.suite import MeasuredPolicy
from tether.models.cpu.memory import memory_in_use
from tether.rewards.limit import FailureLimit
from tether.rollout.ahead import AheadEngine
from tether.runner.assembly.data.fitting import MEASURED_PROMPTS, has_time, measured_prompts
from tether.runner.assembly.data.prompts import usable_in
from tether.runner.assembly.data.rows import rows_of
from tether.runner.assembly.evaluation.evaluators import JudgedAnswers, Material
from tether.runner.assembly.evaluation.suites import recipe_evaluators, suite_of
from tether.runner.assembly.job import Job
from tether.runner.assembly.judges import judge_note, score_judge
from tether.runner.assembly.manifest import note_machine
from tether.runner.assembly.online import (
    OnlineStage,
    check_prompt,
    engine_on_servers,
    online_stage,
    prompts_of,
)
from tether.runner.assembly.reward_servers import served_reward
from tether.runner.assembly.rewards import learned_reward
from tether.runner.assembly.roles import save_trained
from tether.settings.evaluation import EvaluatorData
from tether.settings.judges import FunctionJudge, JudgeConfig
from tether.settings.policy import PolicyConfig
from tether.settings.sampling import SamplingSection
from tether.settings.watch import WatchSection
from tether.stages import online_loop
from tether.stages.heldout import SEED, HeldOut, held_out_split
from tether.stages.learner.ranks import Ranks
from tether.stages.policy_gradient import PolicyGradient
from tether.stages.teachers import ALONE as TEACHERS_ALONE
from tether.watch.monitoring.watch import Watch


def train(
    job: Job[SamplingSection],
    rows: Sequence[Prompt | Problem] | None,
    run: RunDirectory,
    ranks: Ranks,
) -> Json:
    """Optimise the policy on its own samples, by the method that the section is of; the result is
    the role in `policy`.
    """
    section = job.settings
    progress = job.progress
    prompts = prompts_of(section, rows)
    with contextlib.ExitStack() as ends:  # of workers and servers, however this ends
        source = None
        if section.reward_servers is not None:
            doing(progress, "starting reward servers")
            source = ends.enter_context(contextlib.closing(served_reward(job, ranks)))
        stage, loaded = online_stage(
            section,
            job.model,
            job.scorer,
            job.seed,
            source,
            ranks,
            job.folder,
            ends,
        )
        reward = stage.reward
        assert isinstance(reward, FailureLimit)
        ends.enter_context(contextlib.closing(reward))
        ends.callback(torch.set_num_threads, torch.get_num_threads())  # servers may take some
        served = None
        if section.engine.kind != "local":
            doing(progress, "starting engine servers")
            served = engine_on_servers(job, stage, loaded, ranks, run.path, ends)
            stage.engine = served
        room = loaded if served is None else served
        fits = partial(usable_in, job, check=partial(check_prompt, stage, room.context_length))
        prompts = fits(prompts)
        prompts, test = held_out_prompts(prompts, job, fits) if section.evaluate else (prompts, [])
        if isinstance(stage, PolicyGradient) and (lag := stage.config.max_staleness):
            stage.engine = AheadEngine(stage.engine, lag)
        reward.keep_stacks(run.path / "stacks.txt")
        note_machine(run, loaded, reward=str(job.scorer))
        evaluation = held_out_measurement(job, stage, test, run, ends) if section.evaluate else None

        def on_step(step: int, metrics: Metrics) -> Metrics:
            measured = memory_in_use()
            # at once, for it tells when servers worked by the end of the step
            if served is not None:
                measured |= {
                    **served.measured(step),
                    "engine/wait": metrics["time/rollout"] / metrics["time/step"],
                }
            return measured | (evaluation.at(step, section.steps) if evaluation is not None else {})

        if evaluation is not None:
            measure_start(evaluation, job, run, ranks)
        guard = Guard(section.watch, stage, run)

        def ended() -> bool:
            fallen = evaluation is not None and evaluation.fallen(section.steps)
            return guard.halted or fallen

        summary = online_loop.train(
            stage,
            prompts,
            run,
            on_step=on_step,
            monitor=guard,
            ended=ended,
            progress=progress,
        )
        if evaluation is not None:
            measure_end(evaluation, stage, run, summary)
    if reward.reasons:
        summary["failed_rewards_by_reason"] = dict(reward.reasons.most_common(10))
    save_trained(stage.policy, loaded, run.path / "policy", kind="policy")
    return loaded.noted(summary)


class Guard(Watch):
    """The watch over a stage, which also does what its section says when a detector fires."""

    def __init__(self, section: WatchSection, stage: OnlineStage, run: RunDirectory) -> None:
        config = stage.config
        meant = {
            # a large part of whole sequences is meant to be clipped
            "long_updates": isinstance(config, PolicyConfig) and config.surrogate == "sequence",
            # nearness to a teacher is no reward that a policy could fool
            "score_jump": stage.reward.name == TEACHERS_ALONE,
        }
        silent = (*section.silent, *(name for name, holds in meant.items() if holds))
        super().__init__(section.model_copy(update={"silent": silent}))
        self.act = section.act
        self.stage = stage
        self.run = run

    @property
    def halted(self) -> bool:
        return any(self.act.get(alarm["detector"]) == "stop" for alarm in self.run.alarms())

    def observe(
        self,
        step: int,
        metrics: Readings,
        rollouts: Sequence[Rollout],
        scores: Sequence[Score],
    ) -> list[Alarm]:
        alarms = super().observe(
            step,
            {**metrics, "run/share": step / (time_limit().drawn or self.stage.config.steps)},
            rollouts,
            scores,
        )
        if any(self.act.get(alarm.detector) == "raise_kl" for alarm in alarms):
            assert isinstance(self.stage, PolicyGradient)
            self.stage.raise_kl()
        return alarms


_LOG = logging.getLogger("tether.data")


def held_out_prompts(
    rows: Sequence[Prompt],
    job: Job[SamplingSection],
    fits: Callable[[Sequence[Prompt]], Sequence[Prompt]],
) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
    """(training, held-out) prompts: from data of their own, less what is trained on, or set aside
    from the training's.
    """
    section = job.settings
    config = section.evaluate
    assert config is not None
    if config.data is None:
        return held_out_split(rows, config.prompts)
    trained = {prompt.messages for prompt in rows}
    name = f"{job.stage}-evaluate"
    others, unread = rows_of(job, config.data, section.kind or Prompt, name)
    job.quarantine.absorb(unread)
    others = fits(prompts_of(section, others))
    fresh = {prompt.messages: prompt for prompt in others if prompt.messages not in trained}
    if len(fresh) < 2:
        raise DataError(
            f"{job.stage}.evaluate.data has {len(fresh)} prompts that are not "
            "trained on; at least two are needed",
        )
    if shared := sum(prompt.messages in trained for prompt in others):
        _LOG.warning(
            "[%s.evaluate]: %d of %d prompts are trained on, and are left out.",
            job.stage,
            shared,
            len(others),
        )
    return rows, list(fresh.values())[: config.prompts]


def held_out_measurement(
    job: Job[SamplingSection],
    stage: OnlineStage,
    test: Sequence[Prompt],
    run: RunDirectory,
    ends: contextlib.ExitStack,
) -> HeldOut:
    """The measurement that a section asks for.

    In addition to the judge's scores, it measures the distance from the reference. If the judge is
    another, it adds the training's own reward of the same answers.
    """
    config = job.settings.evaluate
    assert config is not None and isinstance(stage.reward, FailureLimit)
    own = stage.reward.judge
    judge, name = _judge(config.judge, own, job, run, stage.ranks)
    how = (
        stage.config.sampling
        if config.temperature is None
        else replace(stage.config.sampling, temperature=config.temperature)
    )

    policy = MeasuredPolicy(stage.policy, stage.encoder, stage.engine)
    answers = HeldOutAnswers(
        prompts=test,
        sampling=how,
        judge=judge,
        seed=job.seed + SEED,
        samples=config.samples_per_prompt,
    )

    def measure(count: int) -> None:
        few = replace(answers, prompts=test[:count])
        few.judge(few.of(policy))

    note = job.folder / MEASURED_PROMPTS
    count = measured_prompts(time_limit(), note, len(test), measure, stage.ranks)
    answers.prompts = test[:count]
    judged = JudgedAnswers(
        answers=answers,
        reward=own,
        proxy=None if name == "heldout" else stage.reward.score,
        reference=stage.reference,
        temperatures=other_temperatures(how, config.temperatures),
        best_of=config.best_of,
    )
    chosen = {key: EvaluatorData() for key in judged.names}
    chosen |= recipe_evaluators(f"{job.stage}.evaluate", config)
    return HeldOut(
        config=config,
        suite=suite_of(
            chosen,
            Material(policy, job.quarantine, ends, exactly=True, judged=judged),
            run.path,
        ),
        answers=judged.answers,
        policy=policy,
        run=run,
        learner=stage.learner,
        name=name,
        averaged=bool(stage.config.ema_decay),
    )


def _judge(
    judge: Literal["reward", "test"] | FunctionJudge | JudgeConfig,
    own: Scorer,
    job: Job[SamplingSection],
    run: RunDirectory,
    ranks: Ranks,
) -> tuple[Scorer, Literal["gold", "test", "heldout"]]:
    """The judge of held-out answers, and its name in the metrics: the training's `own` reward, or
    another that the section names.
    """
    if judge == "reward":
        return own, "heldout"
    if not isinstance(judge, str):
        run.update_manifest(judge=judge_note(judge))
        return partial(ranks.score_by_first, score_judge(judge, run.path)), "gold"
    assert job.scorer is not None  # checked before the first stage
    place = job.scorer.parent / "test" / "model"
    score = learned_reward(place, job.model, mesh=ranks.mesh).score
    return partial(ranks.score_by_share, score), "test"


def measure_start(
    evaluation: HeldOut,
    job: Job[SamplingSection],
    run: RunDirectory,
    ranks: Ranks,
) -> None:
    """Make the measurements that belong before the first step, where that is not done yet."""
    limit = time_limit()
    begun = limit.clock()
    if not run.held_out():
        doing(job.progress, "measuring held-out answers")
        evaluation.measure(0)
    if max(run.held_out()):
        return
    evaluation.decode(0)
    limit.reserve = limit.clock() - begun  # as long as the measurement after the last step
    answers = max(evaluation.config.best_of, default=0)
    drawn = 1 + len(evaluation.config.temperatures)
    limit.answered(limit.reserve / (drawn * len(evaluation.groups)))
    seconds = limit.reserve * answers / drawn
    note = job.folder / MEASURED_PROMPTS
    if not answers or ranks.once(lambda: has_time(limit, seconds, note)):
        evaluation.choose()
    else:
        _LOG.warning(
            "%s: the best of %d answers of the start is not measured: its time is limited.",
            job.stage,
            answers,
        )


def measure_end(
    evaluation: HeldOut,
    stage: OnlineStage,
    run: RunDirectory,
    summary: Json,
) -> None:
    """Make the measurements that belong after the last step, with the weights that are kept."""
    # stopped early, or not those weights
    if summary["steps"] not in run.held_out() or stage.config.ema_decay:
        # a version not used before: other weights
        stage.engine.update_weights(summary["steps"] + 1)
        evaluation.measure(summary["steps"], "after")
    if evaluation.learner is not None:
        evaluation.restore()
        stage.engine.update_weights(summary["steps"] + 2)
    evaluation.decode(evaluation.kept)
    summary[evaluation.name] = evaluation.summary()
