"""The reward of a stage: the implementation that its settings mean, on the roles that it needs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from tether.build.roles import (
    encoder_of,
    load_scorer,
    objective_names,
    reader_beside,
    trained_scorer,
)
from tether.core.errors import ConfigError, ModelError
from tether.core.protocols import RewardSource
from tether.core.rundir import read_json
from tether.core.types import Prompt
from tether.data.chat import ChatEncoder
from tether.models.loading import LoadedModel, pick_device
from tether.models.saving import OBJECTIVES, read_versioned
from tether.models.trunk import Role
from tether.rewards.classifier import ClassifierReward
from tether.rewards.control import CheckedControl, RandomReward
from tether.rewards.function import reward_function
from tether.rewards.learned import (
    EnsembleReward,
    LearnedReward,
    ObjectivesReward,
    ProcessReward,
    TextReward,
)
from tether.rewards.majority import MajorityReward
from tether.rewards.verifiable import VerifiableReward, reasoning_gym_prompts
from tether.settings.model import ModelConfig
from tether.settings.policy import PolicyConfig
from tether.settings.recipe import objective_faults
from tether.settings.rewards import Combine
from tether.settings.sampling import PolicySection, RewardedSection, TaskConfig
from tether.settings.section import Section


def task_prompts(task: TaskConfig, size: int | None = None) -> list[Prompt]:
    """The prompts of a reasoning-gym task: as many as the settings have, or `size`."""
    system = {} if task.system is None else {"system": task.system}
    return reasoning_gym_prompts(task.name, size or task.size, task.seed, task.config, **system)


def check_names(stage: str, asked: Collection[str] | None, trained: Collection[str]) -> None:
    """Check that a stage names the objectives that were trained.

    Raises:
        ConfigError: it asks for other objectives than were trained, or for none of several.
    """
    for fault in objective_faults(stage, asked, trained):
        raise ConfigError(fault)


def reward_model_of(section: Section) -> Path | None:
    """The folder of the reward model that a section names; None where it is that of the run."""
    if not isinstance(section, RewardedSection) or section.reward_model is None:
        return None
    return trained_scorer(section.reward_model) or Path(section.reward_model)


SINGLY = LearnedReward, EnsembleReward, TextReward, ClassifierReward, ProcessReward
"""Models that every rank has: each scores its share. The first rank alone computes all other
rewards.
"""


def reward_source(
    section: RewardedSection,
    scorers: tuple[Role, ...],
    folder: Path | None,
    loaded: LoadedModel | None,
    device: torch.device,
    seed: int,
    reader: ChatEncoder | None = None,
) -> RewardSource:
    """The reward that a section names. For a trained model the caller passes its roles, its folder
    and the model under them.

    Args:
        reader: of a trained model that has another tokenizer or template than the policy; it reads
            texts then.

    Raises:
        ModelError: it has, and what the section asks for goes by the policy's tokens.
    """
    if section.verifiable is not None:
        check = VerifiableReward(section.verifiable)
        if section.reward_source == "majority":
            return CheckedControl(MajorityReward(section.verifiable, check), check)
        return (
            check
            if section.reward_source != "random"
            else CheckedControl(RandomReward(seed), check)
        )
    if section.reward_source == "random":
        return RandomReward(seed)
    if section.classifier is not None:
        return ClassifierReward.load(section.classifier, device)
    if (own := section.function) is not None:
        return reward_function(own)
    assert folder is not None and loaded is not None
    encoder = reader or encoder_of(loaded)
    per_token = isinstance(section, PolicySection) and section.reward_per_token
    by_ids = {
        "reward_source = 'process'": section.reward_source == "process",
        "objectives": section.objectives is not None,
        "reward_per_token": per_token,
        "value_init = 'reward'": isinstance(section, PolicyConfig)
        and section.critic
        and section.value_init == "reward",
    }
    if reader is not None and any(by_ids.values()):
        asked_for = next(name for name, there in by_ids.items() if there)
        raise ModelError(
            f"{folder} was trained with another tokenizer, template or system message than the "
            f"policy has, and {asked_for} goes by the policy's tokens. Leave it out, or train the "
            "reward model on the policy's base.",
        )
    if section.reward_source == "process":
        delimiters = tuple(read_versioned(folder / "steps.json", "delimiters")["delimiters"])
        return ProcessReward(
            scorers[0],
            encoder,
            delimiters=delimiters,
            aggregate=section.process_aggregate,
        )
    check_names("a stage that samples", section.objectives, objective_names(folder))
    if section.objectives is not None:
        rows = zip(read_json(folder / OBJECTIVES)["members"], scorers, strict=True)
        trained = {row["name"]: (role, row["mean"], row["deviation"]) for row, role in rows}
        return ObjectivesReward(section.objectives, trained, encoder)
    return _by_members(
        scorers,
        encoder,
        reader,
        section.reward_combine,
        section.uncertainty_weight,
        per_token=per_token,
    )


def _by_members(
    roles: Sequence[Role],
    encoder: ChatEncoder,
    reader: ChatEncoder | None,
    combine: Combine,
    uncertainty_weight: float = 0.1,
    *,
    per_token: bool = False,
) -> RewardSource:
    """The reward of a trained model, or of the members of an ensemble. With a `reader`, they read
    answers as text.
    """
    if len(roles) == 1:
        source = LearnedReward(roles[0], encoder, per_token=per_token)
    else:
        source = EnsembleReward(roles, encoder, combine, uncertainty_weight=uncertainty_weight)
    return source if reader is None else TextReward(source, reader)


def reward_apart(
    section: RewardedSection,
    folder: Path | None,
    settings: ModelConfig,
    seed: int,
) -> RewardSource:
    """The reward that a section names, with a trained model on a trunk of its own."""
    if section.scorer is None or folder is None:
        return reward_source(section, (), None, None, pick_device(settings.device), seed)
    roles, loaded = load_scorer(folder, settings)
    return reward_source(
        section,
        roles,
        folder,
        loaded,
        loaded.model.device,
        seed,
        reader_beside(folder, settings),
    )


def learned_reward(
    folder: Path,
    settings: ModelConfig,
    combine: Combine = "mean",
    mesh: DeviceMesh | None = None,
) -> RewardSource:
    """A trained reward model on a trunk of its own, ready to score; of an ensemble, what its
    members say together.

    Args:
        mesh: over which the trunk is cut; unset: it is whole.
    """
    check_names("rounds", None, objective_names(folder))
    roles, loaded = load_scorer(folder, settings, mesh=mesh)
    reader = reader_beside(folder, settings)
    encoder = reader or encoder_of(loaded)
    return _by_members(roles, encoder, reader, combine)
