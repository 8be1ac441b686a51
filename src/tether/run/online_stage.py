"""From sections to stages that sample: roles, a reward source and an engine."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from tether.algorithms.reward_ensembles import Combine
from tether.core.errors import ConfigError, MissingFileError
from tether.core.protocols import RewardSource
from tether.data.chat import ChatEncoder
from tether.learner.ranks import FirstEngine, by_first, by_share, here, shared
from tether.models.config import LoraConfig, ModelConfig
from tether.models.heads import ScalarHead
from tether.models.loading import LoadedModel, add_adapter
from tether.models.saving import attach_adapter, load_head, read_role, read_versioned
from tether.models.trunk import Role
from tether.rewards.classifier import ClassifierReward
from tether.rewards.control import RandomReward
from tether.rewards.ensemble import EnsembleReward
from tether.rewards.function import FailureLimit, FunctionReward, reward_function
from tether.rewards.learned import LearnedReward
from tether.rewards.process import ProcessReward
from tether.rewards.verifiable import VerifiableReward
from tether.run.models import open_model
from tether.run.objectives import check_names, objective_names, objectives_reward
from tether.run.online_sections import BestOfNSection, OnlineDirectSection, OnlineSection, PolicySection
from tether.run.roles import attached, encoder_of, frozen_model, hidden_size, load_scorer, local_engine, scorer_folders
from tether.run.stage import settled
from tether.stages.best_of_n import BestOfN, BestOfNConfig
from tether.stages.online_direct import OnlineDirect, OnlineDirectConfig
from tether.stages.policy_config import PolicyConfig
from tether.stages.policy_gradient import PolicyGradient

Roles = tuple[Role, Role | None, Role | None, tuple[Role, ...]]
"""Policy, reference, value, and what scores: nothing, one reward model, or the members of an ensemble."""
SINGLY = LearnedReward, EnsembleReward, ClassifierReward, ProcessReward
"""The sources whose score of a response is the same whatever is scored beside it."""
OnlineStage = PolicyGradient | BestOfN | OnlineDirect


def online_stage(
    section: OnlineSection, settings: ModelConfig, reward_folder: Path | None, seed: int
) -> tuple[OnlineStage, LoadedModel]:
    """Everything that a stage that samples needs: policy, reference, perhaps a value, a reward source and an engine.

    Args:
        reward_folder: the trained role that scores, for the reward sources that are models.

    Raises:
        ModelError: the reward model does not belong to this trunk.
    """
    loaded = open_model(settings, seed=seed)
    encoder = encoder_of(loaded)
    folder = reward_folder if section.reward_source in ("learned", "process") else None
    if section.roles == "shared":
        policy, reference, value, scorers = shared_roles(section, loaded, folder, seed)
    else:
        policy, reference, value, scorers = separate_roles(section, loaded, settings, folder, seed)
    source = _source(section, scorers, folder, encoder, seed, policy.device)
    source = FailureLimit(source, section.max_failed, by_share if isinstance(source, SINGLY) else by_first)
    if here().mesh:  # servers come in its place
        engine = FirstEngine(None, list)
    else:
        engine = shared(local_engine(policy, loaded, max_rows=section.engine_rows))
    match section:
        case PolicySection():
            config = settled(section, PolicyConfig, algorithm=section.algorithm)
            return PolicyGradient(config, policy, reference, value, source, engine, encoder), loaded
        case BestOfNSection():
            reference = reference if section.needs_reference else None
            return BestOfN(settled(section, BestOfNConfig), policy, reference, source, engine, encoder), loaded
        case OnlineDirectSection():
            reference = reference if section.needs_reference else None
            return OnlineDirect(settled(section, OnlineDirectConfig), policy, reference, source, engine, encoder), loaded
    raise TypeError(f"no stage belongs to {type(section).__name__}")


def shared_roles(section: OnlineSection, loaded: LoadedModel, reward_folder: Path | None, seed: int) -> Roles:
    """Adapters on one trunk; the reference is the trunk with all of them off."""
    assert isinstance(section.lora, LoraConfig)
    critic = isinstance(section, PolicySection) and section.critic
    from_reward = isinstance(section, PolicySection) and section.value_init == "reward"
    model, device = loaded.model, loaded.model.device
    hidden = hidden_size(loaded)
    folders = _scorers(section, reward_folder)
    for name, folder in folders.items():
        if read_role(folder)["adapter"] is None:
            raise MissingFileError(f"{folder} holds a whole model, not an adapter. Use roles = 'separate'.")
        model = attached(model, loaded, folder, name)
    if from_reward and reward_folder is not None:
        model = attach_adapter(model, reward_folder, "value")
    model = add_adapter(model, "policy", section.lora, seed=seed)
    reward = tuple(Role(model, name, load_head(folder, device, hidden)) for name, folder in folders.items())
    if from_reward and reward:
        value = Role(model, "value", copy.deepcopy(reward[0].head))
    else:
        value = Role(model, "policy", ScalarHead(hidden).to(device)) if critic else None
    return Role(model, "policy"), Role(model), value, reward


def separate_roles(section: Any, loaded: LoadedModel, settings: ModelConfig, reward_folder: Path | None, seed: int) -> Roles:
    """A model of its own for each role."""
    device, hidden = loaded.model.device, hidden_size(loaded)
    critic = isinstance(section, PolicySection) and section.critic
    reference = Role(frozen_model(settings, seed, section.offload)) if section.needs_reference else None
    _scorers(section, reward_folder)
    reward = load_scorer(reward_folder, settings, section.offload)[0] if reward_folder is not None else ()
    if not critic:
        value = None
    elif section.value_init == "reward" and reward_folder is not None:
        ((value,), _) = load_scorer(reward_folder, settings)
    elif section.lora is False:
        value = Role(open_model(settings, seed=seed).model, head=ScalarHead(hidden).to(device))
    else:
        model = add_adapter(open_model(settings, seed=seed).model, "value", section.lora, seed=seed)
        value = Role(model, "value", ScalarHead(hidden).to(device))
    if section.lora is False:
        return Role(loaded.model), reference, value, reward
    return Role(add_adapter(loaded.model, "policy", section.lora, seed=seed), "policy"), reference, value, reward


def _scorers(section: OnlineSection, folder: Path | None) -> dict[str, Path]:
    """The names of the adapters that score, and the folder of each.

    Raises:
        ConfigError: the value is to start as a copy of the reward model, and there are several.
    """
    folders = scorer_folders(folder)
    if len(folders) > 1 and isinstance(section, PolicySection) and section.value_init == "reward":
        raise ConfigError(
            f"value_init = 'reward' copies one model, and {folder} is an ensemble. Use 'zero', or average its weights."
        )
    return folders


def _source(
    section: OnlineSection, scorers: tuple[Role, ...], folder: Path | None, encoder: ChatEncoder, seed: int, device: torch.device
) -> RewardSource:
    if section.reward_source == "random":
        return RandomReward(seed)
    if section.verifiable is not None:
        return VerifiableReward(section.verifiable)
    if section.classifier is not None:
        return ClassifierReward.load(section.classifier, device)
    if section.function is not None:
        function = reward_function(section.function)
        limits = {"time_limit": section.function.time_limit, "dump_after": section.function.dump_after}
        return FunctionReward(function, batch=section.function.batch, **limits)
    if not scorers or folder is None:
        stage = "reward" if section.reward_source == "learned" else "process"
        raise MissingFileError(f"reward_source = '{section.reward_source}' needs a trained model: run the {stage} stage first")
    if section.reward_source == "learned":
        if (source := objectives_reward(section.objectives, scorers, folder, encoder)) is not None:
            return source
        first, *others = scorers
        if others:
            if isinstance(section, PolicySection) and section.reward_per_token:
                raise ConfigError(f"reward_per_token asks one reward model, and {folder} is an ensemble: average or distil it")
            return EnsembleReward(scorers, encoder, section.reward_combine, uncertainty_weight=section.uncertainty_weight)
        if "reward_combine" in section.model_fields_set:
            raise ConfigError(f"reward_combine has no effect: {folder} is one reward model. Leave it out, or train an ensemble.")
        return LearnedReward(first, encoder, per_token=isinstance(section, PolicySection) and section.reward_per_token)
    delimiters = tuple(read_versioned(folder / "steps.json", "delimiters")["delimiters"])
    return ProcessReward(scorers[0], encoder, delimiters=delimiters, aggregate=section.process_aggregate)


def learned_reward(folder: Path, settings: ModelConfig, combine: Combine = "mean") -> RewardSource:
    """A trained reward model on a trunk of its own, ready to score; of an ensemble, what its members say together."""
    check_names("rounds", None, objective_names(folder))
    roles, loaded = load_scorer(folder, settings)
    first, *others = roles
    return EnsembleReward(roles, encoder_of(loaded), combine) if others else LearnedReward(first, encoder_of(loaded))
