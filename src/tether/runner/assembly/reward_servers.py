"""The reward of a stage from servers: processes of their own, on this machine or a cluster's, or
those that run already.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tether.core.digest import digest
from tether.core.rundir import write_json
from tether.core.types import Json
from tether.models.loading import pick_device
from tether.rewards.function import FunctionReward
from tether.rewards.servers import ServedReward, reward_server
from tether.runner.assembly.job import Job
from tether.runner.assembly.launching import Placement
from tether.runner.assembly.rewards import reward_apart
from tether.scale.servers.http import JsonServer
from tether.settings.model import ModelConfig
from tether.settings.reading import build
from tether.settings.sampling import OnlineSection
from tether.stages.learner.ranks import Ranks


def reward_settings(job: Job[OnlineSection]) -> Json:
    """Everything that a server of a stage's reward needs to know."""
    section = job.settings
    keys = {"reward_source", section.reward_source, *(section.reward_kind.served or ())}
    scoring = section.model_dump(mode="json", include=keys, exclude_defaults=True)
    scorer = str(job.scorer.resolve()) if section.scorer and job.scorer else None
    return {
        "reward": scoring,
        "scorer": scorer,
        "model": job.model.model_dump(mode="json"),
    }


def served_reward(job: Job[OnlineSection], ranks: Ranks) -> ServedReward:
    """The reward of a stage from servers, whose settings and logs are in `reward` of its folder.

    Raises:
        ModelError, RunError: see ServedReward.
        ConfigError: the cluster cannot be reached, or is too small.
    """
    section = job.settings
    source = section.reward_source
    config = section.reward_servers
    settings = reward_settings(job)
    folder = job.folder / "reward"
    path = folder / "settings.json"
    assert config is not None
    if not ranks.first:
        return ServedReward(source, None, config, folder, "")
    write_json(path, settings)

    def command(host: str, port: int) -> Sequence[str]:
        where = str(path.resolve()), "--host", host, "--port", str(port)
        return sys.executable, "-m", "tether", "rewards", *where

    on_device = section.reward_kind.on_every_rank
    device = pick_device(job.model.device).type if on_device else "cpu"
    threads = 0
    if device == "cpu":
        threads = max(1, torch.get_num_threads() // max(1, len(config.names)))
    placement = Placement(job.on, job.model.device, ranks.size)
    servers = placement.servers_for(config, command, folder, threads, device)
    if section.function is not None:  # calls as in this process
        config = config.model_copy(update={"batch": section.function.batch})
    return ServedReward(source, servers, config, folder, digest(settings["reward"]))


def settings_server(
    settings: Json,
    address: tuple[str, int],
    stacks: Path | None = None,
    token: str | None = None,
) -> JsonServer:
    """A server that scores by these settings.

    Raises:
        ConfigError, ModelError, MissingFileError: what they name cannot be had.
    """
    section = build(OnlineSection, settings["reward"], where="reward")
    model = build(ModelConfig, settings["model"], where="model")
    scorer: Any = settings["scorer"] and Path(settings["scorer"])
    source = reward_apart(section, scorer, model)
    if isinstance(source, FunctionReward):
        source.watchdog.path = stacks
    return reward_server(source, digest(settings["reward"]), address, token)
