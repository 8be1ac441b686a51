"""Stages that sample: their prompts, their measurements on held-out ones, and the watch over
them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial

import torch

from tether.core.protocols import doing
from tether.core.rundir import RunDirectory
from tether.core.types import Json, Metrics, Problem, Prompt
from tether.models.cpu.memory import memory_in_use
from tether.rewards.limit import FailureLimit
from tether.rollout.ahead import AheadEngine
from tether.runner.assembly.data.prompts import usable_in
from tether.runner.assembly.evaluation.heldout import (
    held_out_measurement,
    held_out_prompts,
    measure_end,
    measure_start,
)
from tether.runner.assembly.guard import Guard
from tether.runner.assembly.job import Job
from tether.runner.assembly.manifest import note_machine
from tether.runner.assembly.online import engine_on_servers, online_stage, prompts_of
from tether.runner.assembly.reward_servers import served_reward
from tether.runner.assembly.roles import (
    save_trained,
)
from tether.settings.sampling import (
    SamplingSection,
)
from tether.stages import online_loop
from tether.stages.heldout import HeldOut
from tether.stages.learner.ranks import Ranks
from tether.stages.policy_gradient import PolicyGradient


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
        given = section, job.model, job.scorer, job.seed, source, ranks, job.folder, ends
        stage, loaded = online_stage(*given)
        assert isinstance(stage.reward, FailureLimit)
        ends.enter_context(contextlib.closing(stage.reward))
        ends.callback(torch.set_num_threads, torch.get_num_threads())  # servers may take some
        served = None
        if section.engine.kind != "local":
            doing(progress, "starting engine servers")
            served = engine_on_servers(job, stage, loaded, ranks, run.path, ends)
            stage.engine = served
        fits = partial(
            usable_in,
            job,
            encoder=stage.encoder,
            max_new_tokens=section.max_new_tokens,
            context_length=loaded.context_length if served is None else served.context_length,
        )
        prompts = fits(prompts)
        prompts, test = held_out_prompts(prompts, job, fits) if section.evaluate else (prompts, [])
        if isinstance(stage, PolicyGradient) and stage.config.max_staleness:
            stage.engine = AheadEngine(stage.engine, stage.config.max_staleness)
        stage.reward.keep_stacks(run.path / "stacks.txt")
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
            return measured | (
                evaluation.at(step, stage.config.steps) if evaluation is not None else {}
            )

        if evaluation is not None:
            measure_start(evaluation, job, run, ranks)
        guard = Guard(section.watch, stage, run)

        ended = partial(_ended, guard, evaluation, stage.config.steps)
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
    if stage.reward.reasons:
        summary["failed_rewards_by_reason"] = dict(stage.reward.reasons.most_common(10))
    save_trained(stage.policy, loaded, run.path / "policy", kind="policy")
    return loaded.noted(summary)


def _ended(guard: Guard, evaluation: HeldOut | None, steps: int) -> bool:
    """True if an alarm or the held-out scores end the training before its last step."""
    return guard.halted or (evaluation is not None and evaluation.fallen(steps))
