"""From sections to stages that sample: roles, a reward source and an engine."""

from __future__ import annotations

from pathlib import Path

import torch

from tether.algorithms.reward_ensembles import Combine
from tether.core.errors import MissingFileError
from tether.core.protocols import RewardSource
from tether.core.rundir import read_json
from tether.learner.ranks import FirstEngine, by_first, by_share, here, shared
from tether.models.config import ModelConfig
from tether.models.loading import LoadedModel
from tether.models.saving import OBJECTIVES, read_versioned
from tether.models.trunk import Role
from tether.rewards.classifier import ClassifierReward
from tether.rewards.control import RandomReward
from tether.rewards.function import FailureLimit, FunctionReward, reward_function
from tether.rewards.learned import EnsembleReward, LearnedReward, ObjectivesReward, ProcessReward, TrainedObjective
from tether.rewards.verifiable import VerifiableReward
from tether.run.models import open_model
from tether.run.online_sections import BestOfNSection, OnlineSection, PolicySection, SamplingSection, check_names
from tether.run.roles import (
    attach,
    encoder_of,
    frozen_model,
    load_scorer,
    local_engine,
    new_head,
    new_role,
    objective_names,
    scorer_folders,
    scoring_role,
)
from tether.stages.best_of_n import BestOfN
from tether.stages.online_direct import OnlineDirect
from tether.stages.policy_gradient import PolicyGradient

Roles = tuple[Role, Role | None, Role | None, tuple[Role, ...]]
"""Policy, reference, value, and what scores: nothing, one reward model, or the members of an ensemble."""
SINGLY = LearnedReward, EnsembleReward, ClassifierReward, ProcessReward
"""The sources whose score of a response is the same whatever is scored beside it."""
OnlineStage = PolicyGradient | BestOfN | OnlineDirect


def online_stage(
    section: SamplingSection, settings: ModelConfig, reward_folder: Path | None, seed: int, served: RewardSource | None = None
) -> tuple[OnlineStage, LoadedModel]:
    """Everything that a stage that samples needs: policy, reference, perhaps a value, a reward source and an engine.

    Args:
        reward_folder: the trained role that scores, for the reward sources that are models.
        served: what scores in their place.

    Raises:
        ModelError: the reward model does not belong to this trunk.
    """
    loaded = open_model(settings, seed=seed)
    encoder = encoder_of(loaded)
    folder = None if section.scorer is None or (served and not _value(section)[1]) else reward_folder
    separate = section.roles == "separate"
    roles = separate_roles(section, loaded, settings, folder, seed) if separate else shared_roles(section, loaded, folder, seed)
    policy, reference, value, scorers = roles
    source = served or reward_source(section, scorers, folder, loaded, loaded.model.device, seed)
    source = FailureLimit(source, section.max_failed, by_share if isinstance(source, SINGLY) else by_first)
    if here().mesh:  # servers come in its place
        engine = FirstEngine(None, list)
    else:
        engine = shared(local_engine(policy, loaded, max_rows=section.engine_rows))
    if isinstance(section, PolicySection):
        return PolicyGradient(section, policy, reference, value, source, engine, encoder), loaded
    if isinstance(section, BestOfNSection):
        return BestOfN(section, policy, reference, source, engine, encoder), loaded
    return OnlineDirect(section, policy, reference, source, engine, encoder), loaded


def shared_roles(section: SamplingSection, loaded: LoadedModel, reward_folder: Path | None, seed: int) -> Roles:
    """Adapters on one trunk; the reference is the trunk with all of them off."""
    folders, (critic, from_reward) = scorer_folders(reward_folder), _value(section)
    if from_reward and reward_folder is not None:
        folders["value"] = reward_folder
    for name, folder in folders.items():
        attach(loaded, folder, name)
    policy = new_role(loaded, "policy", section.lora, seed=seed)
    scorers = {name: scoring_role(loaded, folder, name) for name, folder in folders.items()}
    value = scorers.pop("value", None)
    if critic and value is None:
        value = Role(loaded.model, "policy", new_head(loaded))
    return policy, Role(loaded.model) if section.needs_reference else None, value, tuple(scorers.values())


def separate_roles(
    section: SamplingSection, loaded: LoadedModel, settings: ModelConfig, reward_folder: Path | None, seed: int
) -> Roles:
    """A model of its own for each role."""
    critic, from_reward = _value(section)
    reference = Role(frozen_model(settings, seed, section.offload)) if section.needs_reference else None
    reward = load_scorer(reward_folder, settings, section.offload)[0] if reward_folder is not None else ()
    value = None
    if from_reward and reward_folder is not None:
        ((value,), _) = load_scorer(reward_folder, settings)
    elif critic:
        own = open_model(settings, seed=seed)
        value = new_role(own, "value", section.lora, seed=seed, head=new_head(own))
    return new_role(loaded, "policy", section.lora, seed=seed), reference, value, reward


def _value(section: SamplingSection) -> tuple[bool, bool]:
    """Whether a value is learned, and whether it starts as the reward model."""
    critic = isinstance(section, PolicySection) and section.critic
    return critic, isinstance(section, PolicySection) and section.value_init == "reward"


def reward_source(
    section: OnlineSection,
    scorers: tuple[Role, ...],
    folder: Path | None,
    loaded: LoadedModel | None,
    device: torch.device,
    seed: int,
) -> RewardSource:
    """What scores for a section; of a trained model its roles, its folder and the model under them."""
    if section.reward_source == "random":
        return RandomReward(seed)
    if section.verifiable is not None:
        return VerifiableReward(section.verifiable)
    if section.classifier is not None:
        return ClassifierReward.load(section.classifier, device)
    if (own := section.function) is not None:
        return FunctionReward(reward_function(own), batch=own.batch, time_limit=own.time_limit, dump_after=own.dump_after)
    if not scorers or folder is None or loaded is None:
        needs = f"needs a trained model: run the {section.scorer} stage first"
        raise MissingFileError(f"reward_source = '{section.reward_source}' {needs}")
    encoder = encoder_of(loaded)
    if section.reward_source == "process":
        delimiters = tuple(read_versioned(folder / "steps.json", "delimiters")["delimiters"])
        return ProcessReward(scorers[0], encoder, delimiters=delimiters, aggregate=section.process_aggregate)
    check_names("a stage that samples", section.objectives, objective_names(folder))
    if section.objectives is not None:
        rows = zip(read_json(folder / OBJECTIVES)["members"], scorers, strict=True)
        trained = {row["name"]: TrainedObjective(role, row["mean"], row["deviation"]) for row, role in rows}
        return ObjectivesReward(section.objectives, trained, encoder)
    first, *others = scorers
    if others:
        return EnsembleReward(scorers, encoder, section.reward_combine, uncertainty_weight=section.uncertainty_weight)
    return LearnedReward(first, encoder, per_token=isinstance(section, PolicySection) and section.reward_per_token)


def learned_reward(folder: Path, settings: ModelConfig, combine: Combine = "mean") -> RewardSource:
    """A trained reward model on a trunk of its own, ready to score; of an ensemble, what its members say together."""
    check_names("rounds", None, objective_names(folder))
    roles, loaded = load_scorer(folder, settings)
    first, *others = roles
    return EnsembleReward(roles, encoder_of(loaded), combine) if others else LearnedReward(first, encoder_of(loaded))
