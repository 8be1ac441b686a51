"""The reward of a stage: the implementation that its settings mean, on the roles that it needs."""

from __future__ import annotations

import pkgutil
from dataclasses import replace
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

from tether.core.errors import ConfigError
from tether.core.protocols import RewardSource
from tether.core.rundir import read_json
from tether.core.types import Prompt
from tether.models.loading import pick_device
from tether.models.saving import OBJECTIVES, read_versioned
from tether.rewards.learned import (
    EnsembleReward,
    LearnedReward,
    ObjectivesReward,
    ProcessReward,
    TextReward,
)
from tether.rewards.parts import RewardParts
from tether.rewards.verifiable import reasoning_gym_prompts
from tether.runner.assembly.roles import (
    encoder_of,
    load_scorer,
    objective_names,
    reader_beside,
    trained_scorer,
)
from tether.settings.environment import TaskConfig
from tether.settings.model import ModelConfig
from tether.settings.recipe import objective_faults
from tether.settings.rewards import Combine
from tether.settings.sampling import PolicySection, RewardedSection
from tether.settings.section import Section


def task_prompts(task: TaskConfig, size: int | None = None) -> list[Prompt]:
    """The prompts of a reasoning-gym task: as many as the settings have, or `size`."""
    return reasoning_gym_prompts(
        task.name,
        size or task.size,
        task.seed,
        task.config,
        system=task.system,
    )


def scoring_model(section: Section, place: Path) -> Path | None:
    """The folder of the trained model by which a stage whose folder is in `place` scores; None: by
    none.
    """
    path = section.scorer_in(place)
    return path and (trained_scorer(str(path)) or path)


def reward_source(parts: RewardParts) -> RewardSource:
    """The reward that a section names."""
    return pkgutil.resolve_name(parts.section.reward_kind.make)(parts)


def process(parts: RewardParts) -> ProcessReward:
    """The reward by a trained model of steps."""
    assert parts.folder is not None and parts.encoder is not None
    return ProcessReward(
        parts.roles[0],
        parts.encoder,
        delimiters=tuple(read_versioned(parts.folder / "steps.json", "delimiters")["delimiters"]),
        aggregate=parts.section.process_aggregate,
    )


def taught(parts: RewardParts) -> RewardSource:
    """The teachers of a stage as its reward."""
    assert parts.teacher is not None  # settings refuse the reward without them
    return parts.teacher


def learned(parts: RewardParts) -> RewardSource:
    """The reward by a trained model of whole responses: one, an ensemble, or one an objective."""
    roles = parts.roles
    assert parts.folder is not None and parts.encoder is not None
    section = parts.section
    folder = parts.folder
    encoder = parts.encoder
    per_token = isinstance(section, PolicySection) and section.reward_per_token
    names = objective_names(folder)
    for fault in objective_faults("a stage that samples", section.objectives, names):
        raise ConfigError(fault)
    if section.objectives is not None:
        rows = zip(read_json(folder / OBJECTIVES)["members"], roles, strict=True)
        trained = {row["name"]: (role, row["mean"], row["deviation"]) for row, role in rows}
        return ObjectivesReward(section.objectives, trained, encoder)
    if len(roles) == 1:
        source = LearnedReward(roles[0], encoder, per_token=per_token)
    else:
        source = EnsembleReward(
            roles,
            encoder,
            section.reward_combine,
            section.uncertainty_weight,
        )
    return TextReward(source, encoder) if parts.reads_text else source


def reward_apart(
    section: RewardedSection,
    folder: Path | None,
    settings: ModelConfig,
    seed: int = 0,
    mesh: DeviceMesh | None = None,
) -> RewardSource:
    """The reward that a section names, with a trained model on a trunk of its own.

    Args:
        mesh: over which the trunk is cut; unset: it is whole.
    """
    parts = RewardParts(section=section, device=pick_device(settings.device), seed=seed)
    if section.scorer is not None and folder is not None:
        roles, loaded = load_scorer(folder, settings, mesh=mesh)
        reader = reader_beside(folder, settings)
        parts = replace(
            parts,
            roles=roles,
            folder=folder,
            encoder=reader or encoder_of(loaded),
            reads_text=reader is not None,
        )
    return reward_source(parts)


def learned_reward(
    folder: Path,
    settings: ModelConfig,
    combine: Combine = "mean",
    mesh: DeviceMesh | None = None,
) -> RewardSource:
    """A trained reward model on a trunk of its own, ready to score; of an ensemble, what its
    members say together.
    """
    return reward_apart(RewardedSection(reward_combine=combine), folder, settings, mesh=mesh)
