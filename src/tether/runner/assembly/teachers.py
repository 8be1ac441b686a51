"""The teachers of a stage: roles on the policy's trunk, models of their own, or servers."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from tether.core.errors import ConfigError, DataError, ModelError
from tether.core.types import Conversation, Message, Prompt
from tether.data.chat import ChatEncoder
from tether.models.loading import LoadedModel, keep_on_host, pick_device
from tether.models.pretrained import resolve, same_tokens, tokenizer_of
from tether.models.saving import check_same_trunk, read_role
from tether.models.trunk import Role
from tether.rewards.loading import load_object
from tether.rollout.asked import AskedTeacher
from tether.runner.assembly.roles import (
    attach,
    encoder_at_hand,
    encoder_of,
    frozen_role,
    load_policy,
    new_role,
    newest_policy,
)
from tether.settings.model import TINY, ModelConfig
from tether.settings.sampling import PolicySection, SamplingSection
from tether.settings.teacher import OTHER_TOKENS, START, ReadingConfig, TeacherConfig
from tether.settings.workers import ServersConfig
from tether.stages.teachers import AskingTeacher, ModelTeacher, Reads, Teachers

_LOG = logging.getLogger(__name__)
COLUMN = re.compile(r"\{(\w+)\}")


def check_teachers(name: str, section: PolicySection, model: ModelConfig) -> None:
    """Check what teachers need before the first stage begins: their functions, and their
    tokenizers.

    Raises:
        ConfigError: a function cannot be loaded, or a teacher writes other tokens.
    """
    own = encoder_at_hand(model).tokenizer
    for config in section.teacher:
        if config.call:
            load_object(config.call, f"{name}.teacher.call")
        if config.addresses and section.temperature != 1:
            raise ConfigError(
                f"{name}.teacher.addresses gives log-probabilities at temperature 1: set "
                f"{name}.temperature = 1, or teacher.model",
            )
        if config.model in (None, START):
            continue
        folder = newest_policy(Path(config.model).expanduser())
        source = read_role(folder)["base"] if folder else config.model
        theirs = tokenizer_of(
            source if source == TINY else resolve(model.model_copy(update={"source": source}))[0],
        )
        if not same_tokens(theirs, own):
            raise ConfigError(f"{name}: {OTHER_TOKENS.format(teacher=config.model)}")


def attach_teachers(
    section: SamplingSection,
    loaded: LoadedModel,
    seed: int,
) -> dict[int, str | None]:
    """Put the teachers that belong to the policy's trunk there; the adapter of each by its place.

    Roles are made when all adapters of a trunk are there.
    """
    adapters = dict[int, str | None]()
    if not isinstance(section, PolicySection) or section.roles == "separate":
        return adapters
    for place, config in enumerate(section.teacher):
        name = f"teacher-{place}"
        if config.follow:
            new_role(loaded, name, section.lora, seed=seed)
            adapters[place] = name
        elif config.model == START:
            adapters[place] = None
        elif (folder := _on_trunk(config, loaded)) is not None:
            attach(loaded, folder, name)
            adapters[place] = name
    return adapters


def _on_trunk(config: TeacherConfig, loaded: LoadedModel) -> Path | None:
    """The folder of a teacher that is an adapter of the policy's own trunk."""
    folder = config.model and newest_policy(Path(config.model).expanduser())
    if not folder or read_role(folder)["adapter"] is None:
        return None
    try:
        check_same_trunk(read_role(folder), loaded, encoder_of(loaded).describe(), folder)
    except ModelError:
        return None
    return folder


def teachers_of(
    section: SamplingSection,
    loaded: LoadedModel,
    policy: Role,
    adapters: Mapping[int, str | None],
    folder: Path,
    ends: contextlib.ExitStack,
    seed: int,
) -> Teachers | None:
    """The teachers of a policy, with the connections that `ends` closes.

    Args:
        adapters: see `attach_teachers`.
        folder: of the stage, for the log of servers.

    Raises:
        ConfigError, ModelError, RunError: a teacher cannot be had, or has other tokens.
    """
    if not isinstance(section, PolicySection) or not section.teacher:
        return None
    encoder = encoder_of(loaded)
    total = sum(config.weight for config in section.teacher)
    members = []
    following = None
    for place, config in enumerate(section.teacher):
        weight = config.weight / total
        if config.addresses:
            servers = AskedTeacher(
                ServersConfig(addresses=config.addresses),
                encoder,
                folder / f"teacher-{place}",
                config.top_k,
            )
            ends.callback(servers.close)
            asking = AskingTeacher(
                ask=servers,
                weight=weight,
                likeliest=servers.likeliest if config.top_k else None,
                least_mass=config.least_mass,
            )
            members.append(asking)
            continue
        role, reader = _model(section, config, place, loaded, adapters, seed)
        member = ModelTeacher(
            role=role,
            encoder=encoder,
            weight=weight,
            reads=_reads(config, reader, encoder, role.context_length - section.max_new_tokens),
            micro_batch_tokens=section.micro_batch_tokens,
            shares=role.model is policy.model,
        )
        following = role if config.follow else following
        role.train_mode(False)
        members.append(member)
    return Teachers(
        config=section,
        policy=policy,
        encoder=encoder,
        members=members,
        temperature=section.temperature,
        micro_batch_tokens=section.micro_batch_tokens,
        following=following,
    )


def _model(
    section: PolicySection,
    config: TeacherConfig,
    place: int,
    loaded: LoadedModel,
    adapters: Mapping[int, str | None],
    seed: int,
) -> tuple[Role, ChatEncoder]:
    """A teacher's role, and the encoder with which it reads prompts."""
    source = config.model
    if place in adapters:
        return Role(loaded.model, adapters[place]), encoder_of(loaded)
    if source == START:
        return frozen_role(loaded, seed, section.offload), encoder_of(loaded)
    assert source is not None
    role, own = load_policy(source, loaded.config, seed)
    if not same_tokens(own.tokenizer, loaded.tokenizer):
        raise ConfigError(OTHER_TOKENS.format(teacher=source))
    if section.offload:
        keep_on_host(role.model.to("cpu"), pick_device(loaded.config.device))
    for parameter in role.model.parameters():
        parameter.requires_grad_(False)
    return role, encoder_of(own)


def _reads(
    config: TeacherConfig,
    reader: ChatEncoder,
    encoder: ChatEncoder,
    room: int,
) -> Reads | None:
    """The ids of a prompt for a teacher; None: it reads what the policy reads."""
    turns = read_by(config, reader.system_prompt)
    if turns is None:
        if reader.describe() == encoder.describe():
            return None
        _LOG.info("%s reads prompts by its own chat template", config.model)

    def reads(prompt: Prompt) -> tuple[int, ...]:
        ids = reader.prompt(turns(prompt) if turns else prompt.messages)
        if len(ids) > room:
            raise DataError(
                f"what the teacher reads for prompt {prompt.id or prompt.text[:40]!r} has "
                f"{len(ids)} tokens, and {room} fit before an answer. Shorten it",
            )
        return ids

    return reads


def read_by(
    config: ReadingConfig,
    system: str | None = None,
) -> Callable[[Prompt], Conversation] | None:
    """The turns that a teacher alone reads in a prompt's place; None: it reads the prompt's own.

    Args:
        system: the message of its model for prompts that have none of their own.
    """
    if config.call:
        return partial(_called, load_object(config.call, "call"))
    return partial(_with_system, config.system, system) if config.system else None


def _with_system(text: str, system: str | None, prompt: Prompt) -> Conversation:
    """The prompt behind this system message, and its own, or else that of the model, behind that."""
    columns = {**prompt.metadata, **prompt.row}

    def value(match: re.Match[str]) -> str:
        if match[1] not in columns:
            raise DataError(
                f"teacher.system names {{{match[1]}}}, and the row of prompt "
                f"{prompt.id or prompt.text[:40]!r} has the columns {', '.join(filter(str.isidentifier, columns)) or 'none'}",
            )
        return str(columns[match[1]])

    words = COLUMN.sub(value, text)
    first, *rest = prompt.messages
    if first.role != "system":
        first, rest = Message("system", system or ""), prompt.messages
    return (replace(first, content="\n\n".join(filter(None, (words, first.content)))), *rest)


def _called(function: Callable[[Prompt], object], prompt: Prompt) -> Conversation:
    """The messages that a user's function gives for a prompt, with its tools and arguments of the
    template.
    """
    given = function(prompt)
    turns = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else []
    try:
        first, *rest = (
            turn if isinstance(turn, Message) else Message(turn["role"], turn["content"])
            for turn in turns or [given]
        )
    except (KeyError, TypeError):
        raise DataError(
            f"teacher.call gave {given!r:.80}, and a list of messages with role and content is needed",
        ) from None
    own = prompt.messages[0]
    tools = first.tools or own.tools
    return (replace(first, tools=tools, template=first.template or own.template), *rest)
