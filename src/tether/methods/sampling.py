"""Stages that sample: their prompts, their measurements on held-out ones, and the watch over
them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from tether.build.context import Context, note_machine
from tether.build.data.fitting import MEASURED_PROMPTS, has_time, measured_prompts
from tether.build.data.prompts import usable_in
from tether.build.engines import served_engine
from tether.build.evaluation.evaluators import JudgedAnswers, Material
from tether.build.evaluation.suites import recipe_evaluators, suite_of
from tether.build.judges import judge_note, score_judge
from tether.build.models import open_model
from tether.build.reward_servers import served_reward
from tether.build.rewards import SINGLY, learned_reward, reward_source, task_prompts
from tether.build.roles import (
    encoder_of,
    local_engine,
    reader_of,
    sampling_roles,
    save_trained,
    value_of,
)
from tether.core.budget import TimeLimit, time_limit
from tether.core.errors import DataError, MissingFileError
from tether.core.protocols import RewardSource, doing
from tether.core.rundir import RunDirectory
from tether.core.types import Alarm, Json, Problem, Prompt, Rollout, Score
from tether.cpu.memory import memory_in_use
from tether.evaluation.decoding import other_temperatures
from tether.evaluation.held_out import HeldOutAnswers, Scorer
from tether.evaluation.suite import MeasuredPolicy
from tether.learner.ranks import ALONE, FirstEngine, Ranks, shared
from tether.models.loading import LoadedModel
from tether.monitoring.watch import Watch
from tether.rewards.limit import FailureLimit
from tether.rewards.verifiable import problem_prompt
from tether.rollout.ahead import AheadEngine
from tether.rollout.drawn import score_ids
from tether.rollout.served import probe_ids
from tether.settings.evaluation import EvaluatorData
from tether.settings.judges import FunctionJudge, JudgeConfig
from tether.settings.model import ModelConfig
from tether.settings.policy import PolicyConfig
from tether.settings.sampling import (
    BestOfNSection,
    OnlineSection,
    PolicySection,
    SamplingSection,
)
from tether.settings.section import calls_functions
from tether.settings.watch import WatchSection
from tether.stages import online_loop
from tether.stages.best_of_n import BestOfN
from tether.stages.heldout import SEED, HeldOut, held_out_split
from tether.stages.online_direct import OnlineDirect
from tether.stages.policy_gradient import PolicyGradient

_LOG = logging.getLogger("tether.data")
OnlineStage = PolicyGradient | BestOfN | OnlineDirect


def train(
    section: SamplingSection,
    context: Context,
    rows: Sequence[Prompt | Problem] | None,
    run: RunDirectory,
) -> Json:
    """Optimise the policy on its own samples, by the method that the section is of; the result is
    the role in `policy`.
    """
    progress = context.progress
    prompts = prompts_of(section, rows)
    with contextlib.ExitStack() as ends:  # of workers and servers, however this ends
        source = _reward_servers(section, context, ends)
        stage, loaded = online_stage(
            section,
            context.model,
            context.scorer,
            context.seed,
            source,
            context.ranks,
        )
        assert isinstance(stage.reward, FailureLimit)
        ends.enter_context(contextlib.closing(stage.reward))
        ends.callback(torch.set_num_threads, torch.get_num_threads())  # servers may take some
        served = None
        if section.engine.kind != "local":
            doing(progress, "starting engine servers")
            served = _served(section, stage, loaded, context, run.path, ends)
            stage.engine = served
        fits = partial(
            usable_in,
            context,
            encoder=stage.encoder,
            max_new_tokens=section.max_new_tokens,
            context_length=loaded.context_length if served is None else served.context_length,
        )
        prompts = fits(prompts)
        prompts, test = (
            _held_out(prompts, section, context, fits) if section.evaluate else (prompts, [])
        )
        if isinstance(stage, PolicyGradient) and stage.config.max_staleness:
            stage.engine = AheadEngine(stage.engine, stage.config.max_staleness)
        stage.reward.keep_stacks(run.path / "stacks.txt")
        note_machine(run, loaded, reward=str(context.scorer))
        evaluation = (
            _evaluation(section, stage, test, context, run, ends) if section.evaluate else None
        )

        def on_step(step: int, metrics: dict[str, float]) -> dict[str, float]:
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
            _measure_start(evaluation, context, run, time_limit())
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
            _measure_end(evaluation, stage, run, summary)
    if stage.reward.reasons:
        summary["failed_rewards_by_reason"] = dict(stage.reward.reasons.most_common(10))
    save_trained(stage.policy, loaded, run.path / "policy", kind="policy")
    return loaded.noted(summary)


def _reward_servers(
    section: SamplingSection,
    context: Context,
    ends: contextlib.ExitStack,
) -> RewardSource | None:
    """The source that reward servers answer for, where the recipe has some; `ends` stops them."""
    if section.reward_servers is None:
        return None
    doing(context.progress, "starting reward servers")
    return ends.enter_context(contextlib.closing(served_reward(section, context)))


def _measure_start(
    evaluation: HeldOut,
    context: Context,
    run: RunDirectory,
    limit: TimeLimit,
) -> None:
    """Make the measurements that belong before the first step, where that is not done yet."""
    begun = limit.clock()
    if not run.held_out():
        doing(context.progress, "measuring held-out answers")
        evaluation.measure(0)
    if max(run.held_out()):
        return
    evaluation.decode(0)
    limit.measured = limit.clock() - begun  # as long as the measurement after the last step
    answers = max(evaluation.config.best_of, default=0)
    drawn = 1 + len(evaluation.config.temperatures)
    seconds = limit.measured * answers / drawn
    note = context.folder / MEASURED_PROMPTS
    if not answers or context.ranks.once(lambda: has_time(limit, seconds, note)):
        evaluation.choose()
    else:
        words = "%s: the best of %d answers of the start is not measured: its time is limited."
        _LOG.warning(words, context.name, answers)


def _measure_end(
    evaluation: HeldOut,
    stage: OnlineStage,
    run: RunDirectory,
    summary: Json,
) -> None:
    """Make the measurements that belong after the last step, with the weights that are kept."""
    # stopped early, or not those weights
    if summary["steps"] not in run.held_out() or stage.learner.averages:
        # a version not used before: other weights
        stage.engine.update_weights(summary["steps"] + 1)
        evaluation.measure(summary["steps"], "after")
    if evaluation.learner is not None:
        evaluation.restore()
        stage.engine.update_weights(summary["steps"] + 2)
    evaluation.decode(evaluation.kept)
    summary[evaluation.name] = evaluation.summary()


def online_stage(
    section: SamplingSection,
    settings: ModelConfig,
    reward_folder: Path | None,
    seed: int,
    reward: RewardSource | None = None,
    ranks: Ranks = ALONE,
) -> tuple[OnlineStage, LoadedModel]:
    """Everything that a stage that samples needs: policy, reference, perhaps a value, a reward
    source and an engine.

    Args:
        reward_folder: the trained role that scores, for the reward sources that are models.
        reward: the reward from servers; None: the section's own.
        ranks: those that train together.

    Raises:
        ModelError: the reward model does not belong to this trunk.
    """
    loaded = open_model(settings, seed=seed, mesh=ranks.mesh)
    encoder = encoder_of(loaded)
    folder = (
        None
        if section.scorer is None or (reward is not None and value_of(section) != "reward")
        else reward_folder
    )
    policy, reference, value, scorers = sampling_roles(section, loaded, folder, seed)
    reader = None
    if section.roles == "separate" and folder is not None:
        reader = reader_of(folder, loaded.tokenizer, encoder.describe())
    if reward is None:
        reward = reward_source(
            section,
            scorers,
            folder,
            loaded,
            loaded.model.device,
            seed,
            reader,
        )
    needs_steps = isinstance(section, PolicySection) and section.step_rewards
    ask = ranks.score_by_share if isinstance(reward, SINGLY) else ranks.score_by_first
    # Where ranks cut weights over all of them, servers come in the engine's place.
    engine = (
        FirstEngine(None, list, ranks)
        if ranks.mesh
        else shared(local_engine(policy, loaded, max_rows=section.engine_rows), ranks)
    )
    if isinstance(section, PolicySection):
        build = partial(PolicyGradient, config=section, value=value)
    elif isinstance(section, BestOfNSection):
        build = partial(BestOfN, config=section)
    else:
        build = partial(OnlineDirect, config=section)
    stage = build(
        policy=policy,
        reference=reference,
        reward=FailureLimit(reward, section.max_failed, ask, needs_steps=needs_steps),
        engine=engine,
        encoder=encoder,
        ranks=ranks,
    )
    return stage, loaded


def _evaluation(
    section: SamplingSection,
    stage: OnlineStage,
    test: Sequence[Prompt],
    context: Context,
    run: RunDirectory,
    ends: contextlib.ExitStack,
) -> HeldOut:
    """The measurement that a section asks for.

    In addition to the judge's scores, it measures the distance from the reference. If the judge is
    another, it adds the training's own reward of the same answers.
    """
    assert section.evaluate is not None
    assert isinstance(stage.reward, FailureLimit)
    config, own, reference = section.evaluate, stage.reward.judge, stage.reference
    judge, name = _judge(config.judge, own, context, run)
    how = (
        stage.config.sampling
        if config.temperature is None
        else replace(stage.config.sampling, temperature=config.temperature)
    )

    judged = JudgedAnswers(
        answers=HeldOutAnswers(
            prompts=test,
            sampling=how,
            judge=judge,
            seed=context.seed + SEED,
            samples=config.samples_per_prompt,
        ),
        reward=own,
        proxy=None if name == "heldout" else stage.reward.score,
        reference=reference,
        temperatures=other_temperatures(how, config.temperatures),
        best_of=config.best_of,
    )
    chosen = {key: EvaluatorData() for key in judged.names}
    chosen |= recipe_evaluators(f"{context.name}.evaluate", config)
    policy = MeasuredPolicy(stage.policy, stage.encoder, stage.engine)
    material = Material(policy, context.quarantine, ends, exactly=True, judged=judged)
    return HeldOut(
        config=config,
        suite=suite_of(chosen, material, run.path),
        answers=judged.answers,
        policy=policy,
        run=run,
        learner=stage.learner,
        name=name,
        averaged=bool(stage.learner.ema_decay),
    )


def _judge(
    judge: Literal["reward", "test"] | FunctionJudge | JudgeConfig,
    own: Scorer,
    context: Context,
    run: RunDirectory,
) -> tuple[Scorer, Literal["gold", "test", "heldout"]]:
    """The judge of held-out answers, and its name in the metrics: the training's `own` reward, or
    another that the section names.
    """
    if judge == "reward":
        return own, "heldout"
    if not isinstance(judge, str):
        run.update_manifest(judge=judge_note(judge))
        return partial(context.ranks.score_by_first, score_judge(judge, run.path)), "gold"
    folder = None if context.scorer is None else context.scorer.parent / "test" / "model"
    if folder is None or not folder.is_dir():
        raise MissingFileError(
            f"{context.name}.evaluate.judge = 'test' needs a test model: set reward.test_share "
            "and train the reward stage",
        )
    score = learned_reward(folder, context.model, mesh=context.ranks.mesh).score
    return partial(context.ranks.score_by_share, score), "test"


def _served(
    section: SamplingSection,
    stage: OnlineStage,
    loaded: LoadedModel,
    context: Context,
    folder: Path,
    ends: contextlib.ExitStack,
) -> FirstEngine:
    """The engine on servers, which `ends` stops; on every rank, and started by the first."""
    # vLLM scores a prompt by all rows of the output layer, and samples from those of tokens.
    probe = partial(
        score_ids,
        stage.policy,
        probe_ids(encoder_of(loaded)),
        padded=section.engine.kind == "vllm",
    )
    expected, engine, ranks = probe(), None, context.ranks
    if ranks.first:
        policy, place = stage.policy, context.placement
        servers = served_engine(
            section,
            policy,
            loaded,
            folder,
            context.seed,
            expected,
            placement=place,
        )
        engine = ends.enter_context(contextlib.closing(servers))
    # The same number of threads on all ranks, so that they round alike.
    torch.set_num_threads(ranks.once(torch.get_num_threads))
    return FirstEngine(engine, probe, ranks)


def _ended(guard: Guard, evaluation: HeldOut | None, steps: int) -> bool:
    """True if an alarm or the held-out scores end the training before its last step."""
    return guard.halted or (evaluation is not None and evaluation.fallen(steps))


class Guard(Watch):
    """The watch over a stage, which also does what its section says when a detector fires."""

    def __init__(self, section: WatchSection, stage: OnlineStage, run: RunDirectory) -> None:
        config = stage.config  # a large part of whole sequences is meant to be clipped
        of_sequences = isinstance(config, PolicyConfig) and config.surrogate == "sequence"
        silent = (*section.silent, "long_updates") if of_sequences else section.silent
        super().__init__(section.model_copy(update={"silent": silent}))
        self.act, self.stage, self.run = section.act, stage, run

    @property
    def halted(self) -> bool:
        return any(self.act.get(alarm["detector"]) == "stop" for alarm in self.run.alarms())

    def observe(
        self,
        step: int,
        metrics: Mapping[str, float],
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


def prompts_of(section: OnlineSection, rows: Sequence[Prompt | Problem] | None) -> Sequence[Prompt]:
    """Prompts; of problems where their answers are to be checked, or of a reasoning-gym task."""
    if section.task is not None:
        return task_prompts(section.task)
    return [problem_prompt(row) if isinstance(row, Problem) else row for row in rows or ()]


def _held_out(
    rows: Sequence[Prompt],
    section: SamplingSection,
    context: Context,
    fits: Callable[[Sequence[Prompt]], Sequence[Prompt]],
) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
    """(training, held-out) prompts: from data of their own, less what is trained on, or set aside
    from the training's.
    """
    assert section.evaluate is not None
    note = context.folder / MEASURED_PROMPTS
    most = section.evaluate.prompts
    count = context.ranks.once(lambda: measured_prompts(time_limit(), note, most))
    if section.evaluate.data is None:
        return held_out_split(rows, count)
    trained = {prompt.messages for prompt in rows}
    name = f"{context.name}-evaluate"
    whole = calls_functions(section)
    others, unread = context.read(section.evaluate.data, section.kind or Prompt, name, whole=whole)
    context.quarantine.absorb(unread)
    others = fits(prompts_of(section, others))
    fresh = {prompt.messages: prompt for prompt in others if prompt.messages not in trained}
    if len(fresh) < 2:
        raise DataError(
            f"{context.name}.evaluate.data has {len(fresh)} prompts that are not "
            "trained on; at least two are needed",
        )
    if shared := sum(prompt.messages in trained for prompt in others):
        words = "[%s.evaluate]: %d of %d prompts are trained on, and are left out."
        _LOG.warning(words, context.name, shared, len(others))
    return rows, list(fresh.values())[:count]
