"""The teachers of a stage: roles on the policy's trunk, models of their own, or servers."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from tether.core.errors import ConfigError, DataError, ModelError
from tether.core.types import Conversation, Message, Prompt
from tether.data.chat import ChatEncoder
from tether.models.loading import LoadedModel, keep_on_host, pick_device
from tether.models.pretrained import same_tokens, tokenizer_of
from tether.models.saving import attach_adapter, check_same_trunk, read_role
from tether.models.trunk import Role
from tether.rewards.loading import load_object
from tether.rollout.asked import AskedTeacher
from tether.rollout.drawn import prompt_ids
from tether.runner.assembly.roles import (
    encoder_at_hand,
    encoder_of,
    frozen_role,
    load_policy,
    new_role,
    newest_policy,
    policy_source,
)
from tether.settings.model import ModelConfig
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
        source = config.model
        if source in (None, START) or same_tokens(tokenizer_of(policy_source(source)), own):
            continue
        raise ConfigError(f"{name}: {OTHER_TOKENS.format(teacher=source)}")


Attached = dict[int, tuple[str | None, ChatEncoder]]
"""By the place of a teacher on the policy's trunk: its adapter, and how it reads prompts."""


def attach_teachers(section: SamplingSection, loaded: LoadedModel, seed: int) -> Attached:
    """Put the teachers that belong to the policy's trunk there.

    Roles are made when all adapters of a trunk are there.
    """
    adapters: Attached = {}
    if not isinstance(section, PolicySection) or section.roles == "separate":
        return adapters
    encoder = encoder_of(loaded)
    for place, config in enumerate(section.teacher):
        name = f"teacher-{place}"
        if config.follow:
            new_role(loaded, name, section.lora, seed=seed)
            adapters[place] = name, encoder
        elif config.model == START:
            adapters[place] = None, encoder
        elif (folder := _on_trunk(config, loaded)) is not None:
            loaded.model = attach_adapter(loaded.model, folder, name)
            own = read_role(folder)["encoding"]
            adapters[place] = name, ChatEncoder.described(loaded.tokenizer, own)
    return adapters


def _on_trunk(config: TeacherConfig, loaded: LoadedModel) -> Path | None:
    """The folder of a teacher that is an adapter of the policy's own trunk, however it reads."""
    folder = config.model and newest_policy(Path(config.model).expanduser())
    if not folder or (role := read_role(folder))["adapter"] is None:
        return None
    try:
        check_same_trunk(role, loaded, role["encoding"], folder)
    except ModelError:
        return None
    return folder


def teachers_of(
    section: SamplingSection,
    loaded: LoadedModel,
    policy: Role,
    adapters: Attached,
    folder: Path,
    ends: contextlib.ExitStack,
    seed: int,
) -> Teachers | None:
    """The teachers of a policy, with the connections that `ends` closes.

    Args:
        adapters: see `attach_teachers`.
        folder: of the stage, for the log of servers.

    Raises:
        ConfigError, ModelError, RunError: a teacher cannot be had, or a server has other tokens.
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
            members.append(
                AskingTeacher(
                    ask=servers,
                    weight=weight,
                    likeliest=servers.likeliest if config.top_k else None,
                    least_mass=config.least_mass,
                ),
            )
            continue
        role, reader = _model(section, config, place, loaded, adapters, seed)
        lengths = section.max_new_tokens, role.context_length
        members.append(
            ModelTeacher(
                role=role,
                encoder=encoder,
                weight=weight,
                reads=_reads(config, reader, encoder, lengths),
                micro_batch_tokens=section.micro_batch_tokens,
                shares=role.model is policy.model,
            ),
        )
        following = role if config.follow else following
        role.train_mode(False)
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
    adapters: Attached,
    seed: int,
) -> tuple[Role, ChatEncoder]:
    """A teacher's role, and the encoder with which it reads prompts."""
    if place in adapters:
        name, reader = adapters[place]
        return Role(loaded.model, name), reader
    if config.model == START:
        return frozen_role(loaded, seed, section.offload), encoder_of(loaded)
    role, own = load_policy(str(config.model), loaded.config, seed, as_itself=True)
    if section.offload:
        keep_on_host(role.model.to("cpu"), pick_device(loaded.config.device))
    return role, encoder_of(own)


def _reads(
    config: TeacherConfig,
    reader: ChatEncoder,
    encoder: ChatEncoder,
    lengths: tuple[int, int],
) -> Reads | None:
    """The ids of a prompt for a teacher; None: it reads what the policy reads.

    Args:
        lengths: of an answer, and of the teacher's context.
    """
    turns = read_by(config, reader.system_prompt)
    if turns is None:
        if reader.describe() == encoder.describe():
            return None
        _LOG.info("%s reads prompts by its own chat template", config.model)

    def reads(prompt: Prompt) -> tuple[int, ...]:
        try:
            read = replace(prompt, messages=turns(prompt)) if turns else prompt
            return prompt_ids(reader, read, *lengths)
        except DataError as error:
            raise DataError(f"the teacher {config.model} cannot read it: {error}") from error

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

    try:
        words = COLUMN.sub(lambda match: str(columns[match[1]]), text)
    except KeyError as error:
        raise DataError(
            f"teacher.system names {{{error.args[0]}}}, and the row of prompt "
            f"{prompt.id or prompt.text[:40]!r} has the columns {', '.join(filter(str.isidentifier, columns)) or 'none'}",
        ) from None
    first, *rest = prompt.messages
    if first.role != "system":
        first, rest = Message("system", system or ""), prompt.messages
    return (replace(first, content="\n\n".join(filter(None, (words, first.content)))), *rest)


def _called(function: Callable[[Prompt], object], prompt: Prompt) -> Conversation:
    """The messages that a user's function gives for a prompt, with its tools and arguments of the
    template.
    """
    given = function(prompt)
    turns = list(given) if isinstance(given, Iterable) else []
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
