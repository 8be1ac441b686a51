"""From sections to roles: models, adapters and heads, on one trunk or apart, and back from disk."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from tether.assemble.rows import Lora
from tether.assemble.sampling import OnlineSection, PolicySection
from tether.assemble.sections import ONLINE, DirectSection, KTOSection, ProcessSection, RewardSection
from tether.core.config import build
from tether.core.errors import ConfigError, MissingFileError, ModelError
from tether.data.chat import ChatEncoder
from tether.models.config import LoraConfig, ModelConfig
from tether.models.heads import ScalarHead
from tether.models.loading import LoadedModel, add_adapter, keep_on_host, load_model, load_on_host, pick_device
from tether.models.saving import attach_adapter, check_same_trunk, is_role, load_head, member_folders, read_role, save_role
from tether.models.trunk import Role
from tether.rollout.local import LocalEngine

Roles = tuple[Role, Role | None, Role | None, tuple[Role, ...]]
"""Policy, reference, value, and what scores: nothing, one reward model, or the members of an ensemble."""
MEMBER_STRIDE = 1000
"""Between the seeds of an ensemble's members, so that ensembles of neighbouring seeds have none in common."""


def encoder_of(loaded: LoadedModel) -> ChatEncoder:
    """The one encoder that speaks this model's language."""
    return ChatEncoder(loaded.tokenizer, loaded.stop_ids, loaded.template, loaded.system_prompt)


def local_engine(role: Role, loaded: LoadedModel, *, max_rows: int = 64) -> LocalEngine:
    """The in-process engine for a role."""
    return LocalEngine(role, encoder_of(loaded), max_rows=max_rows, context_length=loaded.context_length)


def save_trained(role: Role, loaded: LoadedModel, folder: Path, *, kind: str) -> None:
    """A trained role, with the name of the base that was really loaded for it."""
    save_role(
        role,
        folder,
        kind=kind,
        base=loaded.source,
        base_digest=loaded.digest,
        tokenizer=loaded.tokenizer,
        encoding=encoder_of(loaded).describe(),
    )


def sft_role(loaded: LoadedModel, lora: Lora, seed: int) -> Role:
    """The model that SFT trains: under an adapter, or whole."""
    if lora is False:
        return Role(loaded.model)
    return Role(add_adapter(loaded.model, "sft", lora, seed=seed), "sft")


def reward_role(loaded: LoadedModel, section: RewardSection | ProcessSection, seed: int, member: int | None = None) -> Role:
    """The trunk with a head; `member` numbers those of an ensemble, each with an adapter of another seed.

    Heads have other seeds too, unless weights will be averaged: what one head's adapter learned means nothing to another head.
    """
    hidden = _hidden(loaded)
    own = seed + MEMBER_STRIDE * (member or 0)
    start = seed if isinstance(section, RewardSection) and section.average else own
    head = ScalarHead(hidden, zero=False, dropout=section.head_dropout, seed=start, outputs=section.outputs).to(
        loaded.model.device
    )
    if section.lora is False:
        return Role(loaded.model, head=head)
    name = "reward" if member is None else f"reward-{member}"
    return Role(add_adapter(loaded.model, name, section.lora, seed=own), name, head)


def member_role(loaded: LoadedModel, folder: Path, member: int) -> Role:
    """A trained member of an ensemble, on this trunk."""
    name = f"reward-{member}"
    return Role(_attached(loaded.model, loaded, folder, name), name, load_head(folder, loaded.model.device, _hidden(loaded)))


def direct_roles(
    loaded: LoadedModel, section: DirectSection | KTOSection, settings: ModelConfig, seed: int
) -> tuple[Role, Role | None]:
    """The policy under an adapter and the bare trunk as its reference; trained whole, the reference is a model of its own."""
    if section.lora is False:
        if not section.needs_reference:
            return Role(loaded.model), None
        if section.reference_logprobs == "precomputed":  # asked before it changes
            return Role(loaded.model), Role(loaded.model)
        return Role(loaded.model), Role(_frozen(settings, seed, section.offload))
    model = add_adapter(loaded.model, "policy", section.lora, seed=seed)
    return Role(model, "policy"), Role(model) if section.needs_reference else None


def shared_roles(section: OnlineSection, loaded: LoadedModel, reward_folder: Path | None, seed: int) -> Roles:
    """Adapters on one trunk; the reference is the trunk with all of them off."""
    assert isinstance(section.lora, LoraConfig)
    critic = isinstance(section, PolicySection) and section.critic
    from_reward = isinstance(section, PolicySection) and section.value_init == "reward"
    model, device = loaded.model, loaded.model.device
    hidden = _hidden(loaded)
    folders = _scorer_folders(section, reward_folder)
    for name, folder in folders.items():
        if read_role(folder)["adapter"] is None:
            raise MissingFileError(f"{folder} holds a whole model, not an adapter. Use roles = 'separate'.")
        model = _attached(model, loaded, folder, name)
    if from_reward and reward_folder is not None:
        model = attach_adapter(model, reward_folder, "value")
    model = add_adapter(model, "policy", section.lora, seed=seed)
    reward = tuple(Role(model, name, load_head(folder, device, hidden)) for name, folder in folders.items())
    if from_reward and reward:
        value = Role(model, "value", copy.deepcopy(reward[0].head))
    else:
        value = Role(model, "policy", ScalarHead(hidden).to(device)) if critic else None
    return Role(model, "policy"), Role(model), value, reward


def _scorer_folders(section: Any, folder: Path | None) -> dict[str, Path]:
    """The names of the adapters that score, and the folder of each.

    Raises:
        ConfigError: the value is to start as a copy of the reward model, and there are several.
    """
    folders = [] if folder is None else member_folders(folder)
    if len(folders) > 1 and isinstance(section, PolicySection) and section.value_init == "reward":
        raise ConfigError(
            f"value_init = 'reward' copies one model, and {folder} is an ensemble. Use 'zero', or average its weights."
        )
    return {_scorer_name(number, len(folders)): path for number, path in enumerate(folders)}


def _scorer_name(number: int, count: int) -> str:
    return f"reward-{number}" if count > 1 else "reward"


def _hidden(loaded: LoadedModel) -> int:
    return loaded.model.config.get_text_config().hidden_size


def _attached(model: Any, loaded: LoadedModel, folder: Path, name: str) -> Any:
    """`model` with the adapter in `folder`, if it belongs to this trunk."""
    check_same_trunk(read_role(folder), loaded, encoder_of(loaded).describe(), folder)
    return attach_adapter(model, folder, name)


def separate_roles(section: Any, loaded: LoadedModel, settings: ModelConfig, reward_folder: Path | None, seed: int) -> Roles:
    """A model of its own for each role."""
    device, hidden = loaded.model.device, _hidden(loaded)
    critic = isinstance(section, PolicySection) and section.critic
    reference = Role(_frozen(settings, seed, section.offload)) if section.needs_reference else None
    _scorer_folders(section, reward_folder)
    reward = load_scorer(reward_folder, settings, section.offload)[0] if reward_folder is not None else ()
    if not critic:
        value = None
    elif section.value_init == "reward" and reward_folder is not None:
        ((value,), _) = load_scorer(reward_folder, settings)
    elif section.lora is False:
        value = Role(load_model(settings, seed=seed).model, head=ScalarHead(hidden).to(device))
    else:
        model = add_adapter(load_model(settings, seed=seed).model, "value", section.lora, seed=seed)
        value = Role(model, "value", ScalarHead(hidden).to(device))
    if section.lora is False:
        return Role(loaded.model), reference, value, reward
    return Role(add_adapter(loaded.model, "policy", section.lora, seed=seed), "policy"), reference, value, reward


def _frozen(settings: ModelConfig, seed: int, offload: bool) -> Any:
    """A model that will not be trained."""
    if not offload:
        return load_model(settings, seed=seed).model
    return keep_on_host(load_on_host(settings, seed=seed).model, pick_device(settings.device))


def load_scorer(
    folder: Path, settings: ModelConfig, offload: bool = False, as_trained: bool = False
) -> tuple[tuple[Role, ...], LoadedModel]:
    """A trained reward model, or all members of an ensemble, on a base of their own; perhaps with the encoding they learned."""
    folders = _scorer_folders(None, folder)
    description = read_role(next(iter(folders.values())))
    if description["kind"] == "policy":
        raise ModelError(f"{folder} is a policy, which gives no scores. Give the folder of a reward model.")
    whole, on_base = description["adapter"] is None, {"source": description["base"], "fallback": None}
    loaded = (load_on_host if offload else load_model)(settings.model_copy(update=on_base))
    loaded = _speaking(description, loaded) if as_trained else loaded
    device = pick_device(settings.device)
    model = loaded.model
    if not whole:
        for name, path in folders.items():
            model = _attached(model, loaded, path, name)
    if offload:
        keep_on_host(model, device)
    return tuple(
        Role(model, None if whole else name, load_head(path, device, _hidden(loaded))) for name, path in folders.items()
    ), loaded


def load_trained(folder: Path, settings: ModelConfig | None = None) -> tuple[tuple[Role, ...], LoadedModel]:
    """What scores, on the base that its folder names, in the dtype it was trained in."""
    role = read_role(member_folders(folder)[0])
    return load_scorer(folder, _settings(role["base"], role, settings), as_trained=settings is None)


def newest_policy(folder: Path) -> Path | None:
    """The folder of the trained policy in a run, a stage or a role's own folder; of several rounds the last one's."""
    within = ((folder, "round-*/policy"), (folder / "rounds", "round-*/policy"), (folder, "round-*/*/policy"))
    latest = [path for root, pattern in within for path in sorted(root.glob(pattern))[-1:]]
    candidates = (*(folder / n / "policy" for n in (*ONLINE, "kto", "direct")), *latest, folder / "policy", folder)
    return next((path for path in candidates if is_role(path) and read_role(path)["kind"] == "policy"), None)


def load_policy(path: str, settings: ModelConfig | None = None) -> tuple[Role, LoadedModel]:
    """A policy to talk to: a model source, a run directory, or the folder of a trained role.

    Raises:
        ConfigError, MissingFileError: there is nothing of the kind.
        ModelError: it cannot be loaded, does not belong to its base, or is a reward model.
    """
    folder = Path(path).expanduser()
    own = newest_policy(folder)
    if own is not None:
        role = read_role(own)
        loaded = load_model(_settings(role["base"], role, settings))
        loaded = loaded if settings else _speaking(role, loaded)
        if role["adapter"] is None:
            return Role(loaded.model), loaded
        check_same_trunk(role, loaded, encoder_of(loaded).describe(), own)
        return Role(attach_adapter(loaded.model, own, "policy"), "policy"), loaded
    if (scores := next(filter(is_role, (folder, folder / "model")), None)) is not None:
        raise ModelError(
            f"{path} is a {read_role(scores)['kind']} model, which scores and does not answer. Give the folder of a policy."
        )
    plain = next((p for p in (folder / "model", folder / "sft" / "model") if (p / "config.json").is_file()), path)
    loaded = load_model(_settings(str(plain), None, settings))
    return Role(loaded.model), loaded


def _speaking(role: dict[str, Any], loaded: LoadedModel) -> LoadedModel:
    """The base with the template and stop tokens that the role was trained with: nobody else says what they are."""
    return replace(loaded, template=role["encoding"]["template"], stop_ids=tuple(role["encoding"]["stop_ids"]))


def _settings(source: str, role: dict[str, Any] | None, settings: ModelConfig | None) -> ModelConfig:
    """How a role was trained overrides how a model is asked for."""
    values = {**(settings.model_dump() if settings else {}), "source": source, "fallback": None, "chat_template": None}
    if role is not None:
        values.update(system_prompt=role["encoding"]["system_prompt"], dtype=role["dtype"])
    return build(ModelConfig, values, where="model")
