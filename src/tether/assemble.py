"""From a recipe to objects: the one place where implementations are chosen."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from tether.core.config import Config
from tether.core.errors import MissingFileError
from tether.core.protocols import RewardSource
from tether.data.chat import ChatEncoder
from tether.data.sources import Quarantine, read
from tether.models.config import LoraConfig, ModelConfig
from tether.models.heads import ScalarHead
from tether.models.loading import LoadedModel, add_adapter, keep_on_host, load_model, load_on_host, pick_device
from tether.models.saving import attach_adapter, check_same_trunk, load_head, read_role, save_role
from tether.models.trunk import Role
from tether.rewards.control import RandomReward
from tether.rewards.learned import LearnedReward
from tether.rollout.local import LocalEngine
from tether.stages.direct import REFERENCE_FREE, DirectConfig
from tether.stages.policy_config import PolicyConfig
from tether.stages.policy_gradient import PolicyGradient
from tether.stages.reward import RewardConfig
from tether.stages.sft import SFTConfig


class DataConfig(Config):
    """Files, folders or `hub:owner/name:split`, and how to read them."""

    path: str | tuple[str, ...]
    format: str = "auto"
    limit: int | None = Field(default=None, ge=1)
    strict: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        """The sources, environment variables filled in."""
        return tuple(os.path.expandvars(p) for p in ((self.path,) if isinstance(self.path, str) else self.path))

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        for path in self.paths:
            if path.startswith("$"):
                raise MissingFileError(
                    f"data path {path}: that environment variable is not set. Set it to the folder of your data."
                )
            if not path.startswith("hub:") and not Path(path).exists():
                raise MissingFileError(f"data not found: {path}. Give a file, a folder, or hub:owner/name:split.")
        return self


Lora = LoraConfig | Literal[False]


class SFTSection(SFTConfig):
    data: DataConfig | None = None
    lora: Lora = LoraConfig()


class RewardSection(RewardConfig):
    data: DataConfig | None = None
    test: dict[str, DataConfig] = Field(default_factory=dict, description="further held-out comparisons, evaluated by name")
    lora: Lora = LoraConfig()


OFFLOAD = "keep the layers of frozen models of their own in host memory; one at a time visits the device"


class DirectSection(DirectConfig):
    data: DataConfig | None = None
    lora: Lora = LoraConfig()
    offload: bool = Field(default=False, description=OFFLOAD)

    @model_validator(mode="after")
    def _check_offload(self) -> DirectSection:
        if self.offload and (self.lora is not False or self.loss in REFERENCE_FREE):
            raise ValueError(
                "direct.offload moves a reference of its own; there is one with lora = false and a loss that uses it"
            )
        return self


class OnlineSection(Config):
    """What every stage that samples has."""

    data: DataConfig | None = None
    lora: Lora = LoraConfig()
    roles: Literal["shared", "separate"] = Field(default="shared", description="adapters on one trunk, or a model a role")
    offload: bool = Field(default=False, description=OFFLOAD)
    reward_source: Literal["learned", "random"] = "learned"
    engine_rows: int = Field(default=64, ge=1, description="responses decoded at once")

    @model_validator(mode="after")
    def _check_roles(self) -> OnlineSection:
        if self.roles == "shared" and self.lora is False:
            raise ValueError("roles = 'shared' needs adapters, and lora is false. Set roles = 'separate' for full fine-tuning")
        if self.roles == "shared" and self.offload:
            raise ValueError("offload moves frozen models of their own, and with roles = 'shared' there are none. Leave it out")
        return self


class PolicySection(OnlineSection, PolicyConfig):
    """Any policy-gradient method; the three below name families of them."""

    value_init: Literal["zero", "reward"] = Field(
        "zero", description="a fresh head on the policy's states, or a copy of the reward model"
    )

    @model_validator(mode="after")
    def _check_value(self) -> PolicySection:
        if self.value_init == "reward" and not (self.critic and self.reward_source == "learned"):
            raise ValueError("value_init = 'reward' needs a critic and a learned reward model (reward_source = 'learned')")
        return self


class PPOSection(PolicySection):
    algorithm: Literal["ppo"] = "ppo"


class GRPOSection(PolicySection):
    algorithm: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"] = "grpo"


class ReinforceSection(PolicySection):
    algorithm: Literal["reinforce", "rloo", "reinforce++", "reinforce++_baseline"] = "reinforce"


POLICY_SECTIONS: dict[str, type[PolicySection]] = {"ppo": PPOSection, "grpo": GRPOSection, "reinforce": ReinforceSection}


class Recipe(Config):
    """A journey of stages over one model. A stage whose section is missing is not run."""

    run: str = Field(description="the run directory")
    seed: int = 0
    model: ModelConfig
    sft: SFTSection | None = None
    reward: RewardSection | None = None
    direct: DirectSection | None = None
    ppo: PPOSection | None = None
    grpo: GRPOSection | None = None
    reinforce: ReinforceSection | None = None

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        found = self.reward is not None or (Path(self.run) / "reward" / "model" / "role.json").is_file()
        for name in POLICY_SECTIONS:
            section = getattr(self, name)
            if section is not None and section.reward_source == "learned" and not found:
                raise ValueError(
                    f"{name}.reward_source = 'learned' needs a [reward] section, or a finished reward stage in the run directory"
                )
        return self


def load_rows(data: DataConfig, kind: type, quarantine: Quarantine) -> list[Any]:
    """The rows of a data section as `kind`."""
    return list(read(data.paths, kind, format=data.format, quarantine=quarantine, strict=data.strict, limit=data.limit))


def encoder_of(loaded: LoadedModel) -> ChatEncoder:
    """The one encoder that speaks this model's language."""
    return ChatEncoder(loaded.tokenizer, loaded.stop_ids, loaded.template, loaded.system_prompt)


def local_engine(role: Role, loaded: LoadedModel, *, max_rows: int = 64) -> LocalEngine:
    """The in-process engine for a role."""
    return LocalEngine(role, encoder_of(loaded), max_rows=max_rows, context_length=loaded.context_length)


def save_trained(role: Role, loaded: LoadedModel, folder: Path, *, kind: str, base: str) -> None:
    """A trained role beside the base it stands on."""
    save_role(
        role,
        folder,
        kind=kind,
        base=base,
        base_digest=loaded.digest,
        tokenizer=loaded.tokenizer,
        encoding=encoder_of(loaded).describe(),
    )


def sft_role(loaded: LoadedModel, lora: Lora, seed: int) -> Role:
    """The model that SFT trains: under an adapter, or whole."""
    if lora is False:
        return Role(loaded.model)
    return Role(add_adapter(loaded.model, "sft", lora, seed=seed), "sft")


def reward_role(loaded: LoadedModel, section: RewardSection, seed: int) -> Role:
    """The trunk with a scalar head."""
    hidden = loaded.model.config.get_text_config().hidden_size
    head = ScalarHead(hidden, zero=False, dropout=section.head_dropout, seed=seed).to(loaded.model.device)
    if section.lora is False:
        return Role(loaded.model, head=head)
    return Role(add_adapter(loaded.model, "reward", section.lora, seed=seed), "reward", head)


def direct_roles(loaded: LoadedModel, section: DirectSection, settings: ModelConfig, seed: int) -> tuple[Role, Role | None]:
    """The policy under an adapter and the bare trunk as its reference; trained whole, the reference is a model of its own."""
    if section.lora is False:
        reference = None if section.loss in REFERENCE_FREE else Role(_frozen(settings, seed, section.offload))
        return Role(loaded.model), reference
    model = add_adapter(loaded.model, "policy", section.lora, seed=seed)
    return Role(model, "policy"), None if section.loss in REFERENCE_FREE else Role(model)


def policy_stage(
    section: PolicySection, settings: ModelConfig, reward_folder: Path | None, seed: int
) -> tuple[PolicyGradient, LoadedModel]:
    """Policy, reference, reward and perhaps a value, on one trunk or apart, with an engine: everything that the stage needs.

    Raises:
        ModelError: the reward model does not belong to this trunk.
    """
    loaded = load_model(settings, seed=seed)
    encoder = encoder_of(loaded)
    if section.roles == "shared":
        policy, reference, value, reward = _shared_roles(section, loaded, reward_folder, seed)
    else:
        policy, reference, value, reward = _separate_roles(section, loaded, settings, reward_folder, seed)
    source: RewardSource = RandomReward(seed) if section.reward_source == "random" else _learned(reward, reward_folder, encoder)
    engine = local_engine(policy, loaded, max_rows=section.engine_rows)
    said = {name: getattr(section, name) for name in section.model_fields_set if name in PolicyConfig.model_fields}
    config = PolicyConfig.model_validate({**said, "algorithm": section.algorithm})
    return PolicyGradient(config, policy, reference, value, source, engine, encoder), loaded


Roles = tuple[Role, Role | None, Role | None, Role | None]


def _shared_roles(section: PolicySection, loaded: LoadedModel, reward_folder: Path | None, seed: int) -> Roles:
    """Adapters on one trunk; the reference is the trunk with all of them off."""
    assert section.lora is not False
    from_reward = section.value_init == "reward"
    model, device = loaded.model, loaded.model.device
    hidden = model.config.get_text_config().hidden_size
    if reward_folder is not None:
        description = read_role(reward_folder)
        if description["adapter"] is None:
            raise MissingFileError(f"{reward_folder} holds a whole model, not an adapter. Use ppo.roles = 'separate'.")
        check_same_trunk(description, loaded, encoder_of(loaded).describe(), reward_folder)
        model = attach_adapter(model, reward_folder, "reward")
        if from_reward:
            model = attach_adapter(model, reward_folder, "value")
    model = add_adapter(model, "policy", section.lora, seed=seed)
    reward = Role(model, "reward", load_head(reward_folder, device)) if reward_folder is not None else None
    if from_reward and reward is not None:
        value = Role(model, "value", copy.deepcopy(reward.head))
    else:
        value = Role(model, "policy", ScalarHead(hidden).to(device)) if section.critic else None
    return Role(model, "policy"), Role(model), value, reward


def _separate_roles(
    section: PolicySection, loaded: LoadedModel, settings: ModelConfig, reward_folder: Path | None, seed: int
) -> Roles:
    """A model of its own for each role."""
    device, hidden = loaded.model.device, loaded.model.config.get_text_config().hidden_size
    reference = Role(_frozen(settings, seed, section.offload)) if section.needs_reference else None
    reward = _reward_model(reward_folder, settings, section.offload) if reward_folder is not None else None
    if not section.critic:
        value = None
    elif section.value_init == "reward" and reward_folder is not None:
        value = _reward_model(reward_folder, settings, False)
    elif section.lora is False:
        value = Role(load_model(settings, seed=seed).model, head=ScalarHead(hidden).to(device))
    else:
        value = Role(
            add_adapter(load_model(settings, seed=seed).model, "value", section.lora, seed=seed),
            "value",
            ScalarHead(hidden).to(device),
        )
    policy = (
        sft_role(loaded, False, seed)
        if section.lora is False
        else Role(add_adapter(loaded.model, "policy", section.lora, seed=seed), "policy")
    )
    return policy, reference, value, reward


def _frozen(settings: ModelConfig, seed: int, offload: bool) -> Any:
    """A model that will not be trained."""
    if not offload:
        return load_model(settings, seed=seed).model
    return keep_on_host(load_on_host(settings, seed=seed).model, pick_device(settings.device))


def _reward_model(folder: Path, settings: ModelConfig, offload: bool) -> Role:
    """A trained reward model on a base of its own."""
    description = read_role(folder)
    whole = description["adapter"] is None
    source = str(folder / "model") if whole else description["base"]
    loaded = (load_on_host if offload else load_model)(settings.model_copy(update={"source": source, "fallback": None}))
    device = pick_device(settings.device)
    model = loaded.model
    if not whole:
        check_same_trunk(description, loaded, encoder_of(loaded).describe(), folder)
        model = attach_adapter(model, folder, "reward")
    if offload:
        keep_on_host(model, device)
    return Role(model, None if whole else "reward", load_head(folder, device))


def _learned(reward: Role | None, folder: Path | None, encoder: ChatEncoder) -> LearnedReward:
    if reward is None or folder is None:
        raise MissingFileError("a learned reward needs a trained reward model: run the reward stage first")
    return LearnedReward(reward, encoder)


def load_policy(path: str, settings: ModelConfig | None = None) -> tuple[Role, LoadedModel]:
    """A policy to talk to: a model source, a run directory, or the folder of a trained role."""
    folder = Path(path).expanduser()
    for candidate in (*(folder / name / "policy" for name in (*POLICY_SECTIONS, "direct")), folder / "policy", folder):
        if (candidate / "role.json").is_file():
            role = read_role(candidate)
            base = str(candidate / "model") if role["adapter"] is None else role["base"]
            loaded = load_model(_settings(base, role, settings))
            if role["adapter"] is None:
                return Role(loaded.model), loaded
            check_same_trunk(role, loaded, encoder_of(loaded).describe(), candidate)
            return Role(attach_adapter(loaded.model, candidate, "policy"), "policy"), loaded
    for candidate in (folder / "model", folder / "sft" / "model"):
        if (candidate / "config.json").is_file():
            path = str(candidate)
            break
    loaded = load_model(_settings(path, None, settings))
    return Role(loaded.model), loaded


def _settings(source: str, role: dict[str, Any] | None, settings: ModelConfig | None) -> ModelConfig:
    """How a role was trained overrides how a model is asked for."""
    values = {**(settings.model_dump() if settings else {}), "source": source, "fallback": None, "chat_template": None}
    if role is not None:
        values.update(system_prompt=role["encoding"]["system_prompt"], dtype=role["dtype"])
    return ModelConfig.model_validate(values)


def describe_sections(recipe: Recipe) -> Sequence[str]:
    """Names of the stages that the recipe has, in order."""
    return [name for name in ("sft", "reward", "direct", *POLICY_SECTIONS) if getattr(recipe, name) is not None]
