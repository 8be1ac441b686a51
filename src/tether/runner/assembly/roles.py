"""From sections to roles: models, adapters and heads, on one trunk or apart, and back from disk."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from tether.core.errors import MissingFileError, ModelError
from tether.core.keeping import temporary_folder
from tether.core.once import once
from tether.core.protocols import now_doing
from tether.core.rundir import ROUNDS, read_if_there, stage_folder
from tether.core.types import Facts, Json
from tether.data.chat import ChatEncoder
from tether.models.heads import ScalarHead
from tether.models.loading import (
    LoadedModel,
    add_adapter,
    keep_on_host,
    load_model,
    pick_device,
    speech_of,
)
from tether.models.pretrained import config_at_hand, resolve, same_tokens, tokenizer_of
from tether.models.saving import (
    ENSEMBLE,
    OBJECTIVES,
    RoleDescription,
    attach_adapter,
    check_same_trunk,
    is_role,
    load_head,
    member_folders,
    read_role,
    save_role,
)
from tether.models.sharded import gathered
from tether.models.speech import read_speech
from tether.models.trunk import Role, context_length
from tether.rollout.local import LocalEngine
from tether.runner.assembly.models import open_model
from tether.settings.model import TINY, ModelConfig
from tether.settings.policy import PolicyConfig
from tether.settings.reading import build
from tether.settings.reward import RewardSection
from tether.settings.sampling import SamplingSection
from tether.settings.section import Lora
from tether.settings.stages import STAGES, making
from tether.settings.supervised import ProcessSection

logger = logging.getLogger(__name__)
MEMBER_STRIDE = 1000
"""Between the seeds of an ensemble's members, so that ensembles of neighbouring seeds have none in
common.
"""


ITS_OWN: Json = {
    "fallback": None,
    "chat_template": None,
    "template": {},
    "stop_tokens": (),
    "system_prompt": None,
}
"""Settings of a model that reads and ends turns as it was trained to."""


def encoder_of(loaded: LoadedModel) -> ChatEncoder:
    """The encoder of this model."""
    return ChatEncoder(
        loaded.tokenizer,
        loaded.stop_ids,
        loaded.template,
        loaded.system_prompt,
        loaded.config.rendered_texts,
        vocabulary=Role(loaded.model).vocabulary,
        context_length=loaded.context_length,
        arguments=loaded.config.template,
    )


def encoder_at_hand(model: ModelConfig) -> ChatEncoder:
    """The encoder of a model that is not loaded."""
    source = TINY if model.source == TINY else resolve(model)[0]
    tokenizer = tokenizer_of(source)
    shape = config_at_hand(model)
    text = shape and shape.get_text_config()
    return ChatEncoder(
        tokenizer,
        *speech_of(model, tokenizer, text, source),
        model.rendered_texts,
        context_length=context_length(text),
        arguments=model.template,
    )


def local_engine(role: Role, loaded: LoadedModel, *, max_rows: int = 64) -> LocalEngine:
    """The in-process engine for a role."""
    return LocalEngine(
        role,
        encoder_of(loaded),
        max_rows=max_rows,
        context_length=loaded.context_length,
        cpu_kernels=loaded.config.cpu_kernels,
    )


def save_trained(role: Role, loaded: LoadedModel, folder: Path, *, kind: str) -> None:
    """A trained role, with the name of the base that was really loaded for it."""
    now_doing("saving")
    if role.adapter is None:
        role = whole(role, loaded)
        if loaded.mesh is not None and loaded.mesh.get_rank() > 0:
            return
    save_role(role, loaded, folder, kind=kind, encoding=encoder_of(loaded).describe())


@torch.no_grad()
def whole(role: Role, loaded: LoadedModel, seed: int = 0) -> Role:
    """A role on a model of which nothing is cut: itself, or, on the first rank, a model read anew
    with what was trained.

    Other ranks, all of which must ask, have only given their parts of it.
    """
    if loaded.mesh is None:
        return role
    first = loaded.mesh.get_rank() == 0
    fresh = load_model(loaded.config, seed=seed).model if first else None
    name = role.adapter
    if name is None:
        for key, part in role.model.named_parameters():
            tensor = gathered(part)
            if fresh is not None:
                fresh.get_parameter(key).copy_(tensor)
    if fresh is None or name is None:
        return Role(role.model if fresh is None else fresh, name, role.head)
    with temporary_folder("tether-role") as folder:
        role.model.save_pretrained(str(folder), selected_adapters=[name])
        (folder / name).rename(folder / "adapter")
        return Role(attach_adapter(fresh, folder, name), name)


def reward_role(
    loaded: LoadedModel,
    section: RewardSection | ProcessSection,
    seed: int,
    member: int | None = None,
    *,
    one_head: bool = False,
) -> Role:
    """The trunk with a head; `member` numbers those of an ensemble, each with an adapter of another
    seed.

    Heads have other seeds too, unless weights will be averaged (`one_head`): an adapter means
    nothing to another head.
    """
    own = seed + MEMBER_STRIDE * (member or 0)
    head = new_head(
        loaded,
        zero=False,
        dropout=section.head_dropout,
        seed=seed if one_head else own,
        outputs=section.outputs,
    )
    name = "reward" if member is None else f"reward-{member}"
    return new_role(loaded, name, section.lora, seed=own, head=head)


def new_head(
    loaded: LoadedModel,
    *,
    zero: bool = True,
    dropout: float = 0.0,
    seed: int = 0,
    outputs: int = 1,
) -> ScalarHead:
    """A head that will learn, for this trunk."""
    width = Role(loaded.model).width
    head = ScalarHead(width, zero=zero, dropout=dropout, seed=seed, outputs=outputs)
    return head.to(loaded.model.device)


def new_role(
    loaded: LoadedModel,
    name: str,
    lora: Lora,
    *,
    seed: int,
    head: ScalarHead | None = None,
) -> Role:
    """A role that will learn: an adapter of its own, called `name`, on this trunk, or (`lora`
    false) the whole model.
    """
    if lora is False:
        return Role(loaded.model, head=head)
    loaded.model = add_adapter(loaded.model, name, lora, seed=seed, scores=head is not None)
    return Role(loaded.model, name, head)


def attach(loaded: LoadedModel, folder: Path, name: str) -> None:
    """Put the adapter in `folder` on this trunk, if it belongs to it. A role of it is made when all
    adapters are there.
    """
    role = read_role(folder)
    if role["adapter"] is None:
        raise MissingFileError(
            f"{folder} holds a whole model, not an adapter. Use roles = 'separate'.",
        )
    check_same_trunk(role, loaded, encoder_of(loaded).describe(), folder)
    loaded.model = attach_adapter(loaded.model, folder, name)


def scoring_role(loaded: LoadedModel, folder: Path, name: str | None) -> Role:
    """The trained head in `folder` on this trunk, under the adapter `name` (None: the trunk itself
    was trained).
    """
    return Role(
        loaded.model,
        name,
        load_head(folder, pick_device(loaded.config.device), Role(loaded.model).width),
    )


def scorer_folders(folder: Path | None) -> dict[str, Path]:
    """The names of the adapters that score, and the folder of each."""
    folders = [] if folder is None else member_folders(folder)
    return {
        f"reward-{number}" if len(folders) > 1 else "reward": path
        for number, path in enumerate(folders)
    }


def frozen_role(loaded: LoadedModel, seed: int, offload: bool) -> Role:
    """A model of its own that stays what the policy starts from."""
    settings = loaded.config
    own = open_model(settings, seed=seed, on_host=offload, mesh=loaded.mesh)
    return Role(keep_on_host(own.model, pick_device(settings.device)) if offload else own.model)


def load_scorer(
    folder: Path,
    settings: ModelConfig | None = None,
    offload: bool = False,
    mesh: DeviceMesh | None = None,
) -> tuple[tuple[Role, ...], LoadedModel]:
    """A trained reward model, or all members of an ensemble, on a base of their own, with the
    encoding of their training. Without settings the dtype is that of the training, too.
    """
    folders = scorer_folders(folder)
    description = read_role(next(iter(folders.values())))
    if description["kind"] == "policy":
        raise ModelError(
            f"{folder} is a policy, which gives no scores. Give the folder of a reward model.",
        )
    own = settings and settings.model_copy(update=ITS_OWN)
    model = _settings(description["base"], description, own)
    if settings:
        model = model.model_copy(update={"dtype": settings.dtype})
    loaded = _speaking(
        description,
        open_model(model, seed=description["base_seed"], on_host=offload, mesh=mesh),
    )
    is_whole = description["adapter"] is None
    if not is_whole:
        for name, path in folders.items():
            attach(loaded, path, name)
    if offload:
        keep_on_host(loaded.model, pick_device(model.device))
    return tuple(
        scoring_role(loaded, path, None if is_whole else name) for name, path in folders.items()
    ), loaded


def reader_of(folder: Path, tokenizer: object, encoding: Facts) -> ChatEncoder | None:
    """The encoder of a trained scorer, where it does not read a policy's ids as the policy writes
    them; None: it does.

    Args:
        encoding: of the policy, as far as it is known.
    """
    description = read_role(next(iter(scorer_folders(folder).values())))
    own = tokenizer_of(description["base"])
    alike = all(description["encoding"].get(key) == value for key, value in encoding.items())
    if alike and same_tokens(own, tokenizer):
        return None
    once(
        logger.info,
        "%s has another tokenizer, template or system message than the policy: it "
        "reads answers as text",
        folder,
    )
    return ChatEncoder.described(own, dict(description["encoding"]))


def reader_beside(folder: Path, settings: ModelConfig) -> ChatEncoder | None:
    """The same for a policy that is known by its settings alone."""
    encoder = encoder_at_hand(settings)
    named = encoder.describe()
    spoken = {key: named[key] for key in ("template", "system_prompt")}
    return reader_of(folder, encoder.tokenizer, spoken)


def trained_scorer(path: str) -> Path | None:
    """The folder of the reward model that a run, a stage or its own folder holds; None: none."""
    folder = Path(path).expanduser()
    stages = (stage_folder(folder, name) / "model" for name in making("reward"))
    return next(filter(is_scorer, (*stages, folder / "model", folder)), None)


def is_scorer(folder: Path) -> bool:
    """True if a folder holds a trained role, or names several that score together."""
    return is_role(folder) or any((folder / name).is_file() for name in (ENSEMBLE, OBJECTIVES))


def objective_names(folder: Path) -> list[str]:
    """Those that a finished reward stage has trained into `folder`."""
    return [row["name"] for row in read_if_there(folder / OBJECTIVES).get("members", ())]


def newest_policy(folder: Path) -> Path | None:
    """The folder of the trained policy in a run, a stage or a role's own folder; of several rounds
    the last one's.
    """
    for place in (folder, *sorted(folder.glob(ROUNDS), reverse=True)):
        stages = sorted(
            (place / name for name, kind in STAGES.items() if kind.trains_policy),
            key=_start_order,
            reverse=True,
        )
        results = [
            path
            for stage in stages
            for path in sorted(stage.glob(STAGES[stage.name].results), reverse=True)
        ]
        for path in (*results, place / "policy", place):
            if is_role(path) and read_role(path)["kind"] == "policy":
                return path
    return None


def policy_source(path: str) -> str:
    """The model under the policy that is trained at a path, or else the one that lies there."""
    folder = Path(path).expanduser()
    if own := newest_policy(folder):
        return read_role(own)["base"]
    plain = (folder / "model", folder / "sft" / "model")
    return next((str(one) for one in plain if (one / "config.json").is_file()), path)


def _start_order(stage: Path) -> tuple[str, int]:
    """For ordering: the time at which a stage began, and its place in a recipe."""
    began = read_if_there(stage / "manifest.json").get("started", "")
    return began, list(STAGES).index(stage.name)


def load_policy(
    path: str,
    settings: ModelConfig | None = None,
    seed: int = 0,
    *,
    as_itself: bool = False,
) -> tuple[Role, LoadedModel]:
    """A policy to talk to: a model source, a run directory, or the folder of a trained role.

    Args:
        seed: of a random model that no run has trained; a trained role's base has the seed with
            which it was trained.
        as_itself: its template, system message and stop tokens are its own, and not those of the
            settings.

    Raises:
        ConfigError, MissingFileError: there is nothing of the kind.
        ModelError: it cannot be loaded, does not belong to its base, or is a reward model.
    """
    folder = Path(path).expanduser()
    own = newest_policy(folder)
    if settings and as_itself:
        settings = settings.model_copy(update=ITS_OWN)
    if own is not None:
        role = read_role(own)
        loaded = open_model(_settings(role["base"], role, settings), seed=role["base_seed"])
        loaded = _speaking(role, loaded) if as_itself or not settings else loaded
        if role["adapter"] is None:
            return Role(loaded.model), loaded
        attach(loaded, own, "policy")
        return Role(loaded.model, "policy"), loaded
    for scorer in filter(is_role, (folder, folder / "model")):
        raise ModelError(
            f"{path} is a {read_role(scorer)['kind']} model, which scores and does not answer. "
            "Give the folder of a policy.",
        )
    plain = policy_source(path)
    values = _settings(plain, None, settings)
    if settings is None and (speech := read_speech(plain)) is not None:
        values = build(
            ModelConfig,
            {**values.model_dump(), "dtype": speech["dtype"]},
            where="model",
        )
    loaded = open_model(values, seed=seed)
    return Role(loaded.model), loaded


def _speaking(role: RoleDescription, loaded: LoadedModel) -> LoadedModel:
    """The base with the templates and stop tokens of the role's training, which only the role's
    file holds.
    """
    own = ChatEncoder.described(loaded.tokenizer, role["encoding"])
    return replace(loaded, template=own.templates, stop_ids=own.stop_ids)


def _settings(
    source: str,
    role: RoleDescription | None,
    settings: ModelConfig | None,
) -> ModelConfig:
    """Settings of a model: those of the role's training override those of the request.

    A folder other than the requested one has its own template.
    """
    values = {**(settings.model_dump() if settings else {}), "source": source}
    if settings is None or Path(source).resolve() != Path(settings.source).resolve():
        values.update(fallback=None, chat_template=None, template={}, revision=None)
    if role is not None:
        values.update(
            revision=role["base_revision"],
            system_prompt=role["encoding"]["system_prompt"],
            dtype=role["dtype"],
            quantize=role["quantize"],
        )
    return build(ModelConfig, values, where="model")


Roles = tuple[Role, Role | None, Role | None, tuple[Role, ...]]
"""Policy, reference, value, and what scores: nothing, one reward model, or the members of an
ensemble.
"""


def sampling_roles(
    section: SamplingSection,
    loaded: LoadedModel,
    reward_folder: Path | None,
    seed: int,
) -> Roles:
    """The roles of a stage that samples: adapters on one trunk, whose reference is the trunk with
    all of them off, or a model each.
    """
    if section.roles == "separate":
        return _separate_roles(section, loaded, reward_folder, seed)
    folders = scorer_folders(reward_folder)
    start = value_of(section)
    if start == "reward" and reward_folder is not None:
        folders["value"] = reward_folder
    for name, folder in folders.items():
        attach(loaded, folder, name)
    policy = new_role(loaded, "policy", section.lora, seed=seed)
    scorers = {name: scoring_role(loaded, folder, name) for name, folder in folders.items()}
    value = scorers.pop("value", None)
    if start and value is None:
        value = Role(loaded.model, "policy", new_head(loaded))
    return (
        policy,
        Role(loaded.model) if section.needs_reference else None,
        value,
        tuple(scorers.values()),
    )


def _separate_roles(
    section: SamplingSection,
    loaded: LoadedModel,
    reward_folder: Path | None,
    seed: int,
) -> Roles:
    settings = loaded.config
    mesh = loaded.mesh
    start = value_of(section)
    reference = value = None
    reward: tuple[Role, ...] = ()
    if section.needs_reference:
        reference = frozen_role(loaded, seed, section.offload)
    if reward_folder is not None:
        reward, _ = load_scorer(reward_folder, settings, section.offload, mesh)
    if start == "reward" and reward_folder is not None:
        ((value,), _) = load_scorer(reward_folder, settings, mesh=mesh)
    elif start:
        own = open_model(settings, seed=seed, mesh=mesh)
        value = new_role(own, "value", section.lora, seed=seed, head=new_head(own))
    return new_role(loaded, "policy", section.lora, seed=seed), reference, value, reward


def value_of(section: SamplingSection) -> str | None:
    """Start of a learned value; None if no value is learned."""
    return section.value_init if isinstance(section, PolicyConfig) and section.critic else None
