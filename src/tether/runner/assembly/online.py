"""A stage that samples, from its settings: its roles, its reward, its engine, its prompts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from tether.core.protocols import Engine, RewardSource
from tether.core.types import Demonstration, Message, Problem, Prompt, Record
from tether.models.loading import LoadedModel
from tether.rewards.environments import environments_of
from tether.rewards.limit import FailureLimit
from tether.rewards.parts import RewardParts
from tether.rewards.verifiable import problem_prompt
from tether.rollout.drawn import TokenEngine, prompt_ids, score_ids
from tether.rollout.episodes import EpisodeEngine
from tether.rollout.served import probe_ids
from tether.runner.assembly.engines import served_engine
from tether.runner.assembly.job import Job
from tether.runner.assembly.launching import Placement
from tether.runner.assembly.models import open_model
from tether.runner.assembly.rewards import reward_source, task_prompts
from tether.runner.assembly.roles import (
    encoder_of,
    local_engine,
    reader_of,
    sampling_roles,
    value_of,
)
from tether.runner.assembly.teachers import attach_teachers, teachers_of
from tether.settings.environment import EnvironmentConfig
from tether.settings.model import ModelConfig
from tether.settings.sampling import BestOfNSection, OnlineSection, PolicySection, SamplingSection
from tether.stages.best_of_n import BestOfN
from tether.stages.given_answers import REPLY
from tether.stages.learner.ranks import ALONE, FirstEngine, Ranks, shared
from tether.stages.online_direct import OnlineDirect
from tether.stages.policy_gradient import PolicyGradient
from tether.stages.teachers import TeacherReward

OnlineStage = PolicyGradient | BestOfN | OnlineDirect
"""A stage that samples."""


def online_stage(
    section: SamplingSection,
    settings: ModelConfig,
    reward_folder: Path | None,
    seed: int,
    reward: RewardSource | None = None,
    ranks: Ranks = ALONE,
    place: Path | None = None,
    ends: contextlib.ExitStack | None = None,
) -> tuple[OnlineStage, LoadedModel]:
    """Everything that a stage that samples needs: policy, reference, perhaps a value, a reward
    source and an engine.

    Args:
        reward_folder: the trained role that scores, for the reward sources that are models.
        reward: the reward from servers; None: the section's own.
        ranks: those that train together.
        place, ends: of the stage, for what teachers keep open.

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
    adapters = attach_teachers(section, loaded, seed)
    policy, reference, value, scorers = sampling_roles(section, loaded, folder, seed)
    ends = ends or contextlib.ExitStack()
    teachers = teachers_of(section, loaded, policy, adapters, place or Path(), ends, seed)
    by_share = reward is None and section.reward_kind.on_every_rank and not section.objectives
    reader = None
    if section.roles == "separate" and folder is not None:
        reader = reader_of(folder, loaded.tokenizer, encoder.describe())
    reward = reward or reward_source(
        RewardParts(
            section=section,
            device=loaded.model.device,
            seed=seed,
            roles=scorers,
            folder=folder,
            encoder=reader or encoder,
            reads_text=reader is not None,
            teacher=None if teachers is None else TeacherReward(teachers),
        ),
    )
    # Where ranks cut weights over all of them, servers come in the engine's place.
    engine = (
        FirstEngine(None, list, ranks)
        if ranks.mesh
        else shared(
            episodes_of(
                section.environment,
                local_engine(policy, loaded, max_rows=section.engine_rows),
                loaded,
            ),
            ranks,
        )
    )
    if isinstance(section, PolicySection):
        build = partial(PolicyGradient, config=section, value=value, teachers=teachers)
    elif isinstance(section, BestOfNSection):
        build = partial(BestOfN, config=section)
    else:
        build = partial(OnlineDirect, config=section)
    stage = build(
        policy=policy,
        reference=reference,
        reward=FailureLimit(
            reward,
            section.max_failed,
            ranks.score_by_share if by_share else ranks.score_by_first,
            needs_steps=isinstance(section, PolicySection) and section.step_rewards,
        ),
        engine=engine,
        encoder=encoder,
        ranks=ranks,
    )
    return stage, loaded


def check_prompt(stage: OnlineStage, context_length: int, prompt: Prompt) -> None:
    """Raises a DataError where the policy or a teacher cannot read a prompt, or has no room for its
    answer, or where the template cannot write the reply of the row.
    """
    prompt_ids(stage.encoder, prompt, stage.config.max_new_tokens, context_length)
    if isinstance(reply := prompt.metadata.get(REPLY), Message):
        stage.encoder.conversation((*prompt.messages, reply), "last")
    if isinstance(stage, PolicyGradient) and stage.teachers:
        stage.teachers.check(prompt)


def episodes_of(
    config: EnvironmentConfig | None,
    engine: TokenEngine,
    loaded: LoadedModel,
    *,
    own_pace: bool = False,
) -> Engine:
    """An engine as it is; with an environment its rollouts are episodes."""
    if config is None:
        return engine
    return EpisodeEngine(
        engine,
        environments_of(config),
        encoder_of(loaded),
        config,
        context_length=loaded.context_length,
        own_pace=own_pace,
    )


def engine_on_servers(
    job: Job[SamplingSection],
    stage: OnlineStage,
    loaded: LoadedModel,
    ranks: Ranks,
    folder: Path,
    ends: contextlib.ExitStack,
) -> FirstEngine:
    """The engine on servers, which `ends` stops; on every rank, and started by the first."""
    # vLLM scores a prompt by all rows of the output layer, and samples from those of tokens.
    probe = partial(
        score_ids,
        stage.policy,
        probe_ids(encoder_of(loaded)),
        padded=job.settings.engine.kind == "vllm",
    )
    expected = probe()
    engine = None
    generate = None
    if ranks.first:
        servers = served_engine(
            job.settings,
            stage.policy,
            loaded,
            folder,
            job.seed,
            expected,
            placement=Placement(job.on, job.model.device, ranks.size),
        )
        engine = ends.enter_context(contextlib.closing(servers))
        generate = episodes_of(job.settings.environment, engine, loaded, own_pace=True).generate
    # The same number of threads on all ranks, so that they round alike.
    torch.set_num_threads(ranks.once(torch.get_num_threads))
    return FirstEngine(engine, probe, ranks, generate)


def prompts_of(section: OnlineSection, rows: Sequence[Record] | None) -> Sequence[Prompt]:
    """Prompts; of problems where their answers are to be checked, or of a reasoning-gym task."""
    if section.task is not None:
        return task_prompts(section.task)
    return [_PROMPTS[type(row)](row) for row in rows or ()]


def _before_reply(row: Demonstration) -> Prompt:
    """The turns before the last one, with that as their reply."""
    *turns, reply = row.messages
    return Prompt(tuple(turns), row.id, {**row.metadata, REPLY: reply}, row.row)


_PROMPTS: dict[type, Callable[..., Prompt]] = {
    Prompt: lambda row: row,
    Problem: problem_prompt,
    Demonstration: _before_reply,
}
"""The function that makes a prompt of a row, by the kind of the row."""
