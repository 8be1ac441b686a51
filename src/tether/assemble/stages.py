"""From sections to stages that sample: roles, a reward source and an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tether.algorithms.reward_ensembles import Combine
from tether.assemble.objectives import check_names, objective_names, objectives_reward
from tether.assemble.roles import encoder_of, load_scorer, local_engine, separate_roles, shared_roles
from tether.assemble.sampling import BestOfNSection, OnlineDirectSection, OnlineSection, PolicySection
from tether.core.config import Config
from tether.core.errors import ConfigError, MissingFileError
from tether.core.protocols import RewardSource
from tether.data.chat import ChatEncoder
from tether.models.config import ModelConfig
from tether.models.loading import LoadedModel, load_model
from tether.models.saving import read_versioned
from tether.models.trunk import Role
from tether.rewards.classifier import ClassifierReward
from tether.rewards.control import RandomReward
from tether.rewards.ensemble import EnsembleReward
from tether.rewards.function import FailureLimit, FunctionReward, load_function
from tether.rewards.learned import LearnedReward
from tether.rewards.process import ProcessReward
from tether.rewards.verifiable import VerifiableReward
from tether.stages.best_of_n import BestOfN, BestOfNConfig
from tether.stages.online_direct import OnlineDirect, OnlineDirectConfig
from tether.stages.policy_config import PolicyConfig
from tether.stages.policy_gradient import PolicyGradient

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
    loaded = load_model(settings, seed=seed)
    encoder = encoder_of(loaded)
    folder = reward_folder if section.reward_source in ("learned", "process") else None
    if section.roles == "shared":
        policy, reference, value, scorers = shared_roles(section, loaded, folder, seed)
    else:
        policy, reference, value, scorers = separate_roles(section, loaded, settings, folder, seed)
    source = FailureLimit(_source(section, scorers, folder, encoder, seed, policy.device), section.max_failed)
    engine = local_engine(policy, loaded, max_rows=section.engine_rows)
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


def settled(section: Config, kind: type[Any], **more: Any) -> Any:
    """The stage's own settings out of a section, what was left at its default left unsaid."""
    said = {name: getattr(section, name) for name in section.model_fields_set if name in kind.model_fields}
    return kind.model_validate({**said, **more})


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
        function = load_function(section.function.call)
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
